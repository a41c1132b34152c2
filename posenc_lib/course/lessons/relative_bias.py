"""Lesson 09: how far can the relative term be simplified?"""
import functools

import numpy as np
import torch
from matplotlib import colormaps

from posenc_lib import TUPE, ALiBi, DeBERTa, Huang, T5Bias, TransformerXL, alibi_slopes, t5_bucket

from .. import style
from ..check import Exercise, Guess, Mistake
from ..explorer import Choice, LogSlider, Scene, Slider

TERMS = ("word-word", "word-position", "position-word", "position-position")


@style.drawing
def draw_map(terms) -> style.Picture:
    """The four terms of the logits (4, queries, keys) and their sum, side by side."""
    terms = np.asarray(terms)
    fig = style.figure(8, 2.5)
    panels = fig.subplots(1, 5, sharey=True)
    total = terms.sum(axis=0)
    limit = max(np.abs(terms).max(), np.abs(total).max())
    for ax, values, title in zip(panels, (*terms, total), (*TERMS, "sum")):
        image = style.heat_axes(ax).imshow(values, vmin=-limit, vmax=limit, aspect="equal")
        ax.set_title(title.replace("-", " –\n" if "position" in title else " – "), fontsize=10, va="bottom")
        ax.set_xlabel("key j")
    panels[0].set_ylabel("query i")
    fig.colorbar(image, ax=panels, label="value", shrink=0.7)
    return style.Picture(fig, """Five square heat maps, query against key. Word-word is noise. Word-position changes
        smoothly along each row but jumps from row to row; position-word changes smoothly down each column but jumps
        from column to column; position-position is smooth both
        ways. The sum, right, shows none of them cleanly.""")


SAME, NEW, TURNED, GONE = "#CFE4F2", "#FBE2B0", "#EFD5E4", "#EFEFEF"    # pale: black text lies on them
ROWS = (                                             # method, four cells (kind, formula), divisor
    ("absolute (03)", (SAME, "$q_i\\cdot k_j$"), (SAME, "$q_i\\cdot p_jW_K$"), (SAME, "$p_iW_Q\\cdot k_j$"),
     (SAME, "$p_iW_Q\\cdot p_jW_K$"), "$\\sqrt{d}$"),
    ("Shaw (08)", (SAME, "$q_i\\cdot k_j$"), (NEW, "$q_i\\cdot a_r$"), None, None, "$\\sqrt{d}$"),
    ("Transformer-XL", (SAME, "$q_i\\cdot k_j$"), (NEW, "$q_i\\cdot W_R\\,R_{-r}$"), (NEW, "$u\\cdot k_j$"),
     (NEW, "$v\\cdot W_R\\,R_{-r}$"), "$\\sqrt{d}$"),
    ("T5", (SAME, "$q_i\\cdot k_j$"), None, None, (NEW, "$b_{bucket(r)}$"), "nothing"),
    ("ALiBi", (SAME, "$q_i\\cdot k_j$"), None, None, (NEW, "$-m\\,|r|$"), "$\\sqrt{d}$ (not $m|r|$)"),
    ("TUPE", (SAME, "$q_i\\cdot k_j$"), None, None, (NEW, "$p_iU_Q\\cdot p_jU_K$"), "$\\sqrt{2d}$"),
    ("DeBERTa", (SAME, "$q_i\\cdot k_j$"), (NEW, "$q_i\\cdot K_{\\delta(i,j)}$"), (NEW, "$k_j\\cdot Q_{\\delta(j,i)}$"),
     None, "$\\sqrt{3d}$"),
    ("Huang 1, 2", (TURNED, "$(q_i\\cdot k_j)\\,a_{|r|}$ or $a_r$"), None, None, None, "$\\sqrt{d}$"),
    ("Huang 3", (TURNED, "$\\Sigma_n\\,q_{in}k_{jn}a_{rn}$"), None, None, None, "$\\sqrt{d}$"),
    ("Huang 4", (SAME, "$q_i\\cdot k_j$"), (NEW, "$q_i\\cdot a_r$"), (NEW, "$a_r\\cdot k_j$"), None, "$\\sqrt{d}$"),
    ("RoPE (06)", (TURNED, "$q_i\\cdot R_r\\,k_j$"), None, None, None, "$\\sqrt{d}$"),
)


@style.drawing
def draw_terms() -> style.Picture:
    """Which of the four terms each method keeps, replaces, multiplies or drops."""
    fig = style.figure(8, 5.0)
    ax = fig.subplots()
    edges = np.array([0, 1.85, 3.5, 5.2, 6.7, 8.5, 9.95])
    for title, left, right in zip(("", *TERMS, "divided by"), edges, edges[1:]):
        ax.text((left + right) / 2, -0.18, title.replace("-", "–"), ha="center", va="bottom", fontsize=9.5,
                weight="bold")
    for y, (name, *cells, divisor) in enumerate(ROWS):
        ax.text(0.02, y + 0.5, name, va="center", fontsize=10.5, weight="bold")
        ax.text((edges[-2] + edges[-1]) / 2, y + 0.5, divisor, ha="center", va="center", fontsize=10)
        for left, right, cell in zip(edges[1:], edges[2:], cells):
            colour, formula = cell or (GONE, "–")
            ax.fill([left + 0.03, right - 0.03, right - 0.03, left + 0.03], [y + 0.05, y + 0.05, y + 0.95, y + 0.95],
                    color=colour, lw=0)
            ax.text((left + right) / 2, y + 0.5, formula, ha="center", va="center", fontsize=10,
                    color=style.INK if cell else style.GREY)
    for x, colour, meaning in zip((1.6, 3.3, 5.6, 8.2), (SAME, NEW, TURNED, GONE),
                                  ("kept", "replaced", "multiplied", "dropped")):
        ax.fill([x, x + 0.3, x + 0.3, x], np.array([0.25, 0.25, 0.75, 0.75]) + len(ROWS), color=colour, lw=0)
        ax.text(x + 0.4, len(ROWS) + 0.5, meaning, va="center", fontsize=10)
    ax.set(xlim=(0, edges[-1]), ylim=(len(ROWS) + 0.9, -0.8))
    ax.axis("off")
    return style.Picture(fig, """A table of methods by the four terms, with r the offset j minus i. Absolute keeps all
        four. Shaw replaces word-position and drops the other two position terms. Transformer-XL replaces all three. T5,
        ALiBi and TUPE drop both mixed terms and put a bucket's number, minus slope times distance, or a product of
        projected positions in place of position-position. DeBERTa and Huang 4 replace both mixed terms and drop
        position-position. Huang 1 to 3 and RoPE keep only word-word and multiply or turn it. Divided by the square root
        of d, but T5 by nothing, TUPE by root 2d, DeBERTa by root 3d.""")


@style.drawing
def draw_buckets(num_buckets: int = 32, max_distance: int = 128, reach: int = 175) -> style.Picture:
    """T5's bucket against the offset, for an encoder (both sides) and a decoder (past only)."""
    fig = style.figure(8, 3.4)
    last = []
    for ax, bidirectional in zip(fig.subplots(1, 2), (True, False)):
        offsets = np.arange(-reach, reach + 1 if bidirectional else 1)
        bucket = t5_bucket(torch.tensor(offsets), bidirectional=bidirectional, num_buckets=num_buckets,
                           max_distance=max_distance).numpy()
        for side in (offsets <= 0, offsets > 0):
            ax.plot(offsets[side], bucket[side], color=style.BLUE, drawstyle="steps-mid", lw=1.4)
        starts = -offsets[offsets <= 0][bucket[offsets <= 0] == bucket[offsets <= 0].max()].max()
        last.append(int(starts))
        for x in (-starts, starts) if bidirectional else (-starts,):
            ax.axvline(x, color=style.VERMILION, lw=1, ls="--")
        ax.axvline(-max_distance, color=style.GREY, lw=1, ls=":")
        ax.set(title="encoder: both sides" if bidirectional else "decoder: the past", ylabel="bucket",
               xlabel="offset j − i (key minus query)", ylim=(-1, num_buckets + 4.5))
        ax.text(-starts + 3, num_buckets + 4.3, f"−{starts}", color=style.VERMILION, va="top", weight="bold")
        ax.text(-max_distance - 3, num_buckets + 4.3, f"−{max_distance}", color=style.GREY, va="top", ha="right")
    return style.Picture(fig, f"""T5's bucket against the offset, two panels of steps. Encoder: near offset 0 every
        offset has its own bucket, then the steps grow ever wider; the past uses the buckets 0 to 15, the future 17 to
        31. From offset {last[0]} on, either side, the last bucket holds everything. Decoder: 32 buckets for the past,
        the last from distance {last[1]} on. The nominal maximum distance {max_distance} lies beyond both.""")


@style.drawing
def draw_slopes(num_heads: int = 8, length: int = 65) -> style.Picture:
    """ALiBi's penalty by distance for each head, and the weights it gives alone."""
    fig = style.figure(8, 3.3)
    penalty, weight = fig.subplots(1, 2)
    distance = np.arange(length)
    slopes = alibi_slopes(num_heads).numpy()
    shades = [style.COLOURS[n % 6] for n in range(num_heads)]
    half = []
    for n, (slope, shade) in enumerate(zip(slopes, shades)):
        w = np.exp(-slope * distance) / np.exp(-slope * distance).sum()
        half.append(int((w.cumsum() < 0.9).sum()) + 1)
        penalty.plot(distance, -slope * distance, color=shade, ls="-" if n < 6 else "--")
        weight.semilogy(distance, w, color=shade, ls="-" if n < 6 else "--",
                        label=f"head {n + 1}: 1/{1 / slope:.3g}")
    penalty.set(title="added to the logits", xlabel="distance i − j", ylabel="bias", ylim=(-17, 0.5))
    weight.set(title="weights, if all tokens were alike", xlabel="distance i − j", ylabel="weight", ylim=(1e-7, 1))
    fig.legend(*weight.get_legend_handles_labels(), loc="outside right center", title="slope")
    return style.Picture(fig, f"""Left: {num_heads} straight lines that start at 0 and fall with the distance, head 1
        steepest, head {num_heads} nearly flat. Right: the attention weights these penalties give on a logarithmic axis,
        again straight lines. Ninety percent of the weight lies on the nearest {half[0]} tokens for head 1 and on
        {half[-1]} of {length} for head {num_heads}.""")


@style.drawing
def draw_shift(queries: int = 3, keys: int = 5) -> style.Picture:
    """The relative shift: cells hold distances; a column of zeros, another reading of the memory, one row dropped."""
    distance = np.tile(np.arange(keys)[::-1].astype(float), (queries, 1))
    padded = np.concatenate((np.full((queries, 1), np.nan), distance), axis=1)
    reread = padded.reshape(keys + 1, queries)
    shifted = reread[1:].reshape(queries, keys)
    fig = style.figure(8, 3.0)
    panels = fig.subplots(1, 4, width_ratios=(keys, keys + 1, queries, keys))
    titles = ("products with\n$R$ of a distance", "a column of\nzeros (–) in front", "same memory,\nread as 6 × 3",
              "first row dropped,\nread as 3 × 5")
    for ax, cells, title in zip(panels, (distance, padded, reread, shifted), titles):
        style.heat_axes(ax).imshow(np.nan_to_num(cells, nan=-1), vmin=-1, vmax=2 * keys - 2, cmap="YlGnBu",
                                   aspect="equal")
        for (y, x), value in np.ndenumerate(cells):
            hidden = cells is shifted and x > y + keys - queries
            if hidden:
                ax.fill([x - 0.5, x + 0.5, x + 0.5, x - 0.5], [y - 0.5, y - 0.5, y + 0.5, y + 0.5], color=style.LIGHT)
            ax.text(x, y, "–" if np.isnan(value) else f"{value:.0f}", ha="center", va="center", fontsize=11,
                    color=style.VERMILION if hidden else style.INK, weight="normal" if hidden else "bold")
        ax.set_title(title, fontsize=10)
        ax.set(xticks=[], yticks=[])
    panels[0].set(xlabel="by distance", ylabel="query")
    panels[3].set(xlabel="key", xticks=range(keys))
    return style.Picture(fig, """Four small grids of distances. First, three rows 4 3 2 1 0. Second, a dash that stands
        for a zero in front of each. Third, the same 18 cells in six rows of three: – 4 3, 2 1 0, and twice again.
        Fourth, without the first row and in rows of five: 2 1 0 – 4, 3 2 1 0 –, 4 3 2 1 0. Every black number is now
        the distance from its query to its key; the grey cells belong to keys after the query.""")


LENGTH, HEAD_DIM = 128, 16
METHODS = ("T5 encoder", "T5 decoder", "ALiBi", "ALiBi, both sides", "Transformer-XL", "DeBERTa", "Huang 4", "TUPE")
CAUSAL = ("T5 decoder", "ALiBi")
HAVE_BUCKETS = ("T5 encoder", "T5 decoder", "DeBERTa")


def _method(name, num_heads, num_buckets, max_distance, base):
    d_model = num_heads * HEAD_DIM
    return {
        "T5 encoder": lambda: T5Bias(num_heads, num_buckets, max_distance),
        "T5 decoder": lambda: T5Bias(num_heads, num_buckets, max_distance, bidirectional=False),
        "ALiBi": lambda: ALiBi(num_heads),
        "ALiBi, both sides": lambda: ALiBi(num_heads, bidirectional=True),
        "Transformer-XL": lambda: TransformerXL(d_model, num_heads, base),
        "DeBERTa": lambda: DeBERTa(d_model, num_heads, max_distance, num_buckets),
        "Huang 4": lambda: Huang(HEAD_DIM, num_buckets // 2, variant=4),
        "TUPE": lambda: TUPE(d_model, num_heads, LENGTH),
    }[name]()


@functools.lru_cache(maxsize=1)
def _all_heads(name, num_heads, num_buckets, max_distance, base) -> np.ndarray:
    """What position adds to the logits, (heads, LENGTH, LENGTH), where every token has the same q and k.

    Tables are random, N(0, 1): what training would put there is not known to a picture.
    """
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        q, k = torch.randn(2, 1, 16, 1, HEAD_DIM)
        q, k = (x[:, :num_heads].expand(1, num_heads, LENGTH, HEAD_DIM) for x in (q, k))
        method = _method(name, num_heads, num_buckets, max_distance, base)
        for name_of, parameter in method.named_parameters():
            projects = name_of.endswith("projection.weight")
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if projects else 1.0)
        places = torch.arange(LENGTH)
        bias = method.bias(places, places)
        if bias is not None:
            return bias.numpy()
        scale = HEAD_DIM ** -0.5 if method.scale is None else method.scale
        return (method.logits(q, k, places, places) - (q * scale) @ k.transpose(-2, -1))[0].numpy()


@functools.lru_cache(maxsize=1)
def bias_matrix(name, num_heads, head, num_buckets, max_distance, base) -> np.ndarray:
    """One head of it, head counted from 1 and at most num_heads; NaN where a causal mask hides the key."""
    bias = _all_heads(name, num_heads, num_buckets, max_distance, base)[min(head, num_heads) - 1].astype(float)
    return np.where(np.tri(LENGTH, dtype=bool), bias, np.nan) if name in CAUSAL else bias


def row_weights(row) -> np.ndarray:
    """Softmax of a row with NaN for hidden keys: the attention weights if all tokens were alike."""
    seen = ~np.isnan(row)
    grown = np.exp(np.where(seen, row, -np.inf) - row[seen].max())
    return grown / grown.sum()


class BiasScene(Scene):
    """What position adds to the logits by method, and the row of one query."""
    controls = {
        "method": Choice(METHODS, "T5 encoder", help="which method's matrix is shown"),
        "num_heads": Choice((1, 2, 4, 8, 12, 16), 8, label="heads", help="number of heads of the layer"),
        "head": Slider(1, 16, 1, label="head shown", help="which head is shown; the last one where there are fewer"),
        "num_buckets": Slider(4, 64, 32, step=2, label="buckets",
                              help="T5 and DeBERTa: number of buckets; Huang: twice the clipping distance"),
        "max_distance": Slider(34, 256, 128, step=2, label="max distance",
                               help="T5 and DeBERTa: how far the buckets are meant to reach"),
        "base": LogSlider(0, 6, 10000.0, help="Transformer-XL: base of the sinusoids"),
        "position": Slider(0, LENGTH - 1, 64, help="position of the query whose row is read off"),
    }
    size = (8.0, 4.7)

    def build(self):
        grid = self.figure.add_gridspec(2, 2, width_ratios=[1.15, 1])
        self.heat = style.heat_axes(self.figure.add_subplot(grid[:, 0]))
        self.row, self.weights = self.figure.add_subplot(grid[0, 1]), self.figure.add_subplot(grid[1, 1])
        keys = np.arange(LENGTH)
        cmap = colormaps[style.HEAT].with_extremes(bad=style.LIGHT)
        self.image = self.heat.imshow(np.zeros((LENGTH, LENGTH)), vmin=0, vmax=1, cmap=cmap, aspect="equal")
        bar = self.figure.colorbar(self.image, ax=self.heat, ticks=[0, 1], location="bottom", shrink=0.8, pad=0.02)
        bar.ax.set_xticklabels(["lowest", "highest"])
        self.heat.set(xlabel="key position j", ylabel="query position i", title="What position adds to the logits")
        self.mark = self.heat.axhline(0, color="white", lw=2.5)
        self.core = self.heat.axhline(0, color=style.VERMILION, lw=1.2)
        self.curve, = self.row.plot(keys, np.zeros(LENGTH), color=style.BLUE, lw=1.4, drawstyle="steps-mid")
        self.row.set(xlim=(0, LENGTH - 1), ylim=(-10, 10), title="The query's row: added to its logits", ylabel="added")
        self.alone, = self.weights.semilogy(keys, np.ones(LENGTH), color=style.BLUE, lw=1.4, drawstyle="steps-mid")
        self.weights.set(xlim=(0, LENGTH - 1), ylim=(1e-4, 1.2), xlabel="key position j", ylabel="weight",
                         title="Its weights, if all tokens were alike")
        self.cursors = [ax.axvline(0, color=style.VERMILION, lw=1.2) for ax in (self.row, self.weights)]
        self.note = self.figure.supxlabel("", fontsize=9, color=style.GREY)
        every = tuple(name for name in self.controls if name != "position")
        self.layer(self.image, self.row.yaxis, self.note, on=every)
        self.layer(self.mark, self.core, self.curve, self.alone, *self.cursors, on="position")

    def update(self, position, **settings):
        matrix = bias_matrix(**self._settings(settings))
        low, high = np.nanmin(matrix), np.nanmax(matrix)
        self.image.set_data((matrix - low) / (high - low))
        self.row.set_ylim(low - 0.06 * (high - low), high + 0.06 * (high - low))
        for line in (self.mark, self.core):
            line.set_ydata([position, position])
        for line in self.cursors:
            line.set_xdata([position, position])
        weights = row_weights(matrix[position])
        self.note.set_text(self._unused(settings))
        self.curve.set_ydata(matrix[position])
        self.alone.set_ydata(np.where(weights > 0, weights, np.nan))

    @staticmethod
    def _settings(settings):
        return {("name" if name == "method" else name): value for name, value in settings.items()}

    @staticmethod
    def _unused(settings):
        """The settings that do not matter to the method, in words, so that no slider moves in silence."""
        method, idle = settings["method"], []
        if settings["head"] > settings["num_heads"]:
            idle.append(f"head {settings['head']}")
        if method not in HAVE_BUCKETS + ("Huang 4",):
            idle.append(f"buckets {settings['num_buckets']}")
        if method not in HAVE_BUCKETS:
            idle.append(f"max distance {settings['max_distance']}")
        if method != "Transformer-XL":
            idle.append(f"base {style.number(settings['base'])}")
        return f"Not used by {method}: {', '.join(idle)}." if idle else ""

    def describe(self, position, **settings):
        matrix = bias_matrix(**self._settings(settings))
        method, row = settings["method"], matrix[position]
        weights, seen = row_weights(row), row[~np.isnan(row)]
        used = [f"head {min(settings['head'], settings['num_heads'])} of {settings['num_heads']}"]
        if method.startswith("ALiBi"):
            slope = alibi_slopes(settings["num_heads"])[min(settings["head"], settings["num_heads"]) - 1]
            used.append(f"slope {slope:.4g}")
        if method in HAVE_BUCKETS:
            used.append(f"{settings['num_buckets']} buckets, max distance {settings['max_distance']}")
        if method == "Huang 4":
            used.append(f"clipped at {settings['num_buckets'] // 2}")
        if method == "Transformer-XL":
            used.append(f"base {style.number(settings['base'])}")
        return (f"{method}, {', '.join(used)}: position adds {np.nanmin(matrix):.3g} to {np.nanmax(matrix):.3g} to the "
                f"logits. The query at position {position} meets {len(np.unique(seen.round(4)))} different numbers; "
                f"if all tokens were alike, it would look most at key {int(weights.argmax())}, with weight "
                f"{weights.max():.3g}. {self._unused(settings)}")


def _four_terms(w, p, W_Q, W_K):
    B = W_Q @ W_K.T
    return np.stack([w @ B @ w.T, w @ B @ p.T, p @ B @ w.T, p @ B @ p.T])


def _probe(length, width, head_dim, seed):
    rng = np.random.default_rng(seed)
    return tuple(rng.normal(size=shape) for shape in ((length, width), (length, width), (width, head_dim),
                                                      (width, head_dim)))


check_four_terms = Exercise(
    right=_four_terms,
    probes=[_probe(3, 4, 2, 0), _probe(5, 6, 3, 1)],
    praise="And their sum is the whole product: nothing is lost, nothing is left over. The two mixed terms are not "
           "each other's transpose, because W_Q and W_K differ.",
    mistakes=[
        Mistake("mixed terms swapped", lambda *a: _four_terms(*a)[[0, 2, 1, 3]],
                "The two mixed terms have changed places: word-position is the word of the QUERY with the position of "
                "the KEY. The first word of a term's name goes with W_Q, the second with W_K."),
        Mistake("one mixed term mirrored", lambda *a: np.stack([_four_terms(*a)[0], _four_terms(*a)[1],
                                                                _four_terms(*a)[1].T, _four_terms(*a)[3]]),
                "You took position-word to be the transpose of word-position. It would be if W_Q and W_K were equal; "
                "they are two matrices, so a word that asks and a word that is asked have different vectors."),
        Mistake("query and key swapped", lambda *a: _four_terms(*a).transpose(0, 2, 1),
                "Rows and columns have changed places: row i belongs to the query i, column j to the key j. So the "
                "query's part stands on the left of the product."),
        Mistake("the sum", lambda *a: _four_terms(*a).sum(axis=0),
                "That is the sum of the four, which attention uses. Return them apart, stacked to (4, L, L)."),
        Mistake("without the projections", lambda w, p, W_Q, W_K: np.stack([w @ w.T, w @ p.T, p @ w.T, p @ p.T]),
                "The projections are missing: words and positions are multiplied by W_Q for the query and by W_K for "
                "the key before they meet."),
        Mistake("divided by the root", lambda *a: _four_terms(*a) / np.sqrt(a[2].shape[1]),
                "You divided by the square root of the head's width. The exercise asks for the terms before that."),
    ])


def _bucket(offsets, num_buckets, max_distance, *, sign=1, step=np.floor, cap=True, halved=True, log=True):
    """T5's bucket in plain numpy, with the places where learners go astray as options."""
    r = sign * np.asarray(offsets)
    n = num_buckets // 2 if halved else num_buckets
    e = n // 2
    distance = np.maximum(np.abs(r), 1)
    grown = (distance - e) / (max_distance - e)
    if log:
        grown = np.log(np.maximum(distance / e, 1)) / np.log(max_distance / e)
    far = e + step((n - e) * grown).astype(int)
    far = np.minimum(far, n - 1) if cap else far
    return np.where(np.abs(r) < e, np.abs(r), far) + n * (r > 0)


def _bucket_variant(**options):
    return lambda offsets, num_buckets, max_distance: _bucket(offsets, num_buckets, max_distance, **options)


check_bucket = Exercise(
    right=_bucket_variant(),
    probes=[(np.arange(-120, 121), 32, 100), (np.arange(-30, 31), 8, 20), (np.arange(-200, 201), 16, 150)],
    praise="Those are T5's buckets. One warning for production: a boundary such as 84 can land on the wrong side in a "
           "float32 logarithm; the library compares whole numbers instead.",
    mistakes=[
        Mistake("direction swapped", _bucket_variant(sign=-1),
                "Past and future have changed places. The offset is key minus query: positive means the key comes "
                "later, and these get the upper half of the buckets. Somewhere you counted query minus key."),
        Mistake("not halved", _bucket_variant(halved=False),
                "You gave each direction all the buckets. An encoder looks both ways: n = num_buckets // 2 for each."),
        Mistake("rounded", _bucket_variant(step=np.round),
                "You rounded to the nearest bucket. The fraction is cut off, always down."),
        Mistake("rounded up", _bucket_variant(step=np.ceil),
                "You rounded up (DeBERTa's buckets do). T5 cuts the fraction off."),
        Mistake("no last bucket", _bucket_variant(cap=False),
                "Far offsets run past the last bucket of their direction, into the other half or off the table. "
                "Everything from some distance on shares bucket n - 1."),
        Mistake("no logarithm", _bucket_variant(log=False),
                "Your far buckets are all equally wide. They should grow: the fraction is a ratio of logarithms."),
        Mistake("one direction only", lambda o, b, m: _bucket(-np.abs(np.asarray(o)), b, m),
                "Keys after the query land in the same buckets as keys before it. Their buckets start at n."),
        Mistake("every future key in bucket 0",
                lambda o, b, m: _bucket(np.minimum(o, 0), 2 * b, m),
                "That is the decoder's rule: all buckets for the past, the future in bucket 0. Here both sides count."),
    ])


check_slopes = Exercise(
    right=lambda num_heads: 2.0 ** (-8 * np.arange(1, num_heads + 1) / num_heads),
    probes=[(8,), (4,), (2,), (16,)],
    praise="The last slope is 1/256 however many heads there are: the range is fixed and the heads share it out, "
           "evenly in the exponent.",
    mistakes=[
        Mistake("halved at each head", lambda n: 2.0 ** -np.arange(1, n + 1),
                "1/2, 1/4, 1/8, ... is what 8 heads get. With 16 heads the last slope would be 1/65536: the exponents "
                "must end at 8 for any number of heads."),
        Mistake("from exponent 0", lambda n: 2.0 ** (-8 * np.arange(n) / n),
                "Your first slope is 1 and your last is not 1/256: count the heads from 1."),
        Mistake("steep heads last", lambda n: 2.0 ** (-8 * np.arange(n, 0, -1) / n),
                "The slopes are right, their order is not: head 1 has the steepest."),
        Mistake("exponent falls short", lambda n: 2.0 ** (-np.arange(1, n + 1) / n),
                "Your last slope is 1/2. The exponents run to 8, not to 1."),
        Mistake("evenly spaced slopes", lambda n: np.linspace(2.0 ** (-8 / n), 2.0 ** -8, n),
                "Your slopes are evenly spaced. They should be a geometric series: each is the one before times a "
                "fixed factor."),
        Mistake("negative", lambda n: -2.0 ** (-8 * np.arange(1, n + 1) / n),
                "A slope is a positive number; the minus stands in front of it in the formula."),
        Mistake("exponents", lambda n: 8 * np.arange(1, n + 1) / n,
                "Those are the exponents. The slope is 2 to minus that."),
    ])


def _clip(distance, s):
    return min(max(distance + s, 0), 2 * s - 1)


check_rows = Exercise(
    right=lambda i, j, s: (_clip(i - j, s), _clip(j - i, s)),
    integers=True,
    probes=[(5, 3, 4), (3, 5, 4), (2, 2, 3), (0, 9, 4), (9, 0, 4)],
    praise="The second table is read from the key's point of view: for the key, the query is on the other side.",
    mistakes=[
        Mistake("the published code", lambda i, j, s: (_clip(i - j, s), _clip(i - j, s)),
                "You read both tables in the same row. That is what the published code does, and so does everyone who "
                "loads its weights; but the paper's formula says delta(j, i) in the third term."),
        Mistake("key minus query", lambda i, j, s: (_clip(j - i, s), _clip(i - j, s)),
                "You counted key minus query, this course's offset. DeBERTa counts query minus key, so the two rows "
                "have changed places."),
        Mistake("one row too many", lambda i, j, s: (min(max(i - j, -s), s) + s, min(max(j - i, -s), s) + s),
                "You clip to -s ... s, which is Shaw's table with 2s + 1 rows. DeBERTa's has 2s: the last is 2s - 1."),
        Mistake("not clipped", lambda i, j, s: (i - j + s, j - i + s),
                "Far pairs fall off the table (a negative row would even be read from its end, silently). Clip to "
                "0 ... 2s - 1."),
        Mistake("not shifted", lambda i, j, s: (min(max(i - j, -s), s - 1), min(max(j - i, -s), s - 1)),
                "Rows are numbered from 0, so s is added to the distance before clipping."),
    ])


def _shift(x, *, pad=0, drop=0, keep=True):
    queries, keys = x.shape
    x = np.insert(x, pad if pad == 0 else keys, 0, axis=1).reshape(keys + 1, queries)
    x = (x[1:] if drop == 0 else x[:-1]).reshape(queries, keys)
    return np.tril(x, keys - queries) if keep else x


check_shift = Exercise(
    right=_shift,
    probes=[(np.arange(1.0, 16).reshape(3, 5),), (np.arange(1.0, 17).reshape(4, 4) ** 2,), (np.ones((1, 4)),)],
    praise="The right numbers. Done by reshaping it takes no loop, no index and one copy: that is why Transformer-XL's "
           "code does it. (The library turns the query instead, by the addition theorems of lesson 05.)",
    mistakes=[
        Mistake("the rest left in", lambda x: _shift(x, keep=False),
                "The visible part is right. Right of the diagonal, where the key comes after the query, there are "
                "left-over numbers of the next row: set them to 0 (np.tril with k = keys - queries)."),
        Mistake("zeros behind", lambda x: _shift(x, pad=1),
                "The column of zeros belongs in front of the rows, not behind them."),
        Mistake("last row dropped", lambda x: _shift(x, drop=1),
                "Drop the first row of the re-read array, not the last."),
        Mistake("not shifted", lambda x: np.tril(x, x.shape[1] - x.shape[0]),
                "Nothing has moved yet: row i must move queries - 1 - i places to the left."),
        Mistake("shifted to the right", lambda x: np.tril(np.stack([np.roll(row, len(x) - 1 - i)
                                                                    for i, row in enumerate(x)]),
                                                          x.shape[1] - x.shape[0]),
                "Your rows moved to the right. The first query is nearest to the start, so its row moves farthest, and "
                "to the left."),
    ])


guess_move = Guess(a="Only the two mixed terms: position-position depends on offsets alone, as lesson 05 showed.",
                   b="All three terms with a position in them.",
                   c="None: every offset is what it was.")
guess_far = Guess(a="Yes: 95 and 400 tokens away are different distances.",
                  b="Yes: 95 is within the maximum distance of 128, 400 is beyond it.",
                  c="No: both are in the last bucket.")
guess_row = Guess(a="No: the bias is a different matrix.",
                  b="Yes, exactly the same weights.",
                  c="Only for the last query, where the two biases agree.")
guess_zero = Guess(a="Plain q k^T, so the model starts without position.",
                   b="All zeros: every token looks at every token alike.",
                   c="An error: a table of zeros has no gradient.")
