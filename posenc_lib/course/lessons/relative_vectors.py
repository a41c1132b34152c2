"""Lesson 08: what if attention is told the offset directly?"""
import functools

import numpy as np
import torch
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from posenc_lib import clip_offsets, relative_offsets

from .. import style
from ..check import Exercise, Guess, Mistake, Verdict
from ..explorer import Scene, Slider

WORDS = ("wǒ", "ài", "chī", "píng", "guǒ")


def _word(ax, x, text, colour=style.GREY):
    ax.add_patch(FancyBboxPatch((x - 0.38, -0.22), 0.76, 0.44, facecolor="white", edgecolor=colour, lw=1.5,
                                boxstyle="round,pad=0,rounding_size=0.1"))
    ax.text(x, 0, text, ha="center", va="center")


@style.drawing
def draw_two_ways(asking: int = 2) -> style.Picture:
    """The same words with a label on every token, and with a label on every pair that one query belongs to."""
    fig = style.figure(8, 2.2)
    absolute, relative = fig.subplots(1, 2)
    for ax in (absolute, relative):
        ax.set(xlim=(-0.6, len(WORDS) - 0.4), ylim=(-1.15, 0.95))
        ax.axis("off")
    absolute.set_title("absolute: a label on every token")
    relative.set_title("relative: a label on every pair")
    for j, word in enumerate(WORDS):
        _word(absolute, j, word)
        absolute.text(j, -0.62, f"+ $p_{j}$", ha="center", va="center", color=style.BLUE, weight="bold")
        _word(relative, j, word, style.VERMILION if j == asking else style.GREY)
        offset = j - asking
        if offset:
            relative.add_patch(FancyArrowPatch((asking, 0.25), (j, 0.25), arrowstyle="-|>", mutation_scale=11,
                                               connectionstyle=f"arc3,rad={-0.45 * np.sign(offset):.2f}",
                                               color=style.BLUE, lw=1.3))
        relative.text(j, -0.62, f"{offset:+d}" if offset else "0", ha="center", va="center", color=style.BLUE,
                      weight="bold")
    absolute.text(2, -1.05, "added once, before attention", ha="center", color=style.GREY)
    relative.text(2, -1.05, f"offsets as {WORDS[asking]} sees them, inside attention", ha="center", color=style.GREY)
    offsets = ", ".join(f"{j - asking:+d}" if j != asking else "0" for j in range(len(WORDS)))
    return style.Picture(fig, f"""The words {' '.join(WORDS)} twice. Left: under every word a label p0 to p4 that is
        added to it, whoever looks. Right: {WORDS[asking]} is marked, arrows lead from it to the other words, and under
        the words stand their offsets from it, {offsets}.""")


@style.drawing
def draw_rows(length: int = 9, max_offset: int = 3) -> style.Picture:
    """Offsets j - i of all pairs, and the row of the table that each pair reads, written into two grids."""
    here = torch.arange(length)
    offsets = relative_offsets(here, here)
    rows = clip_offsets(offsets, max_offset)
    fig = style.figure(8, 4.3)
    titles = ("offset  j - i", f"row of the table, clipped at {max_offset}")
    for ax, values, title in zip(fig.subplots(1, 2), (offsets.numpy(), rows.numpy()), titles):
        style.heat_axes(ax).imshow(values)
        middle = (values.max() + values.min()) / 2
        for i in range(length):
            for j in range(length):
                ax.text(j, i, f"{values[i, j]}".replace("-", "−"), ha="center", va="center", size=9,
                        color="white" if values[i, j] <= middle else style.INK)
        ax.set(title=title, xlabel="key position j", ylabel="query position i", xticks=range(length),
               yticks=range(length))
    return style.Picture(fig, f"""Two grids of {length} by {length} numbers. Left: the offsets, 0 on the diagonal,
        positive to its right, negative to its left, from {1 - length} to {length - 1}. Right: the rows of the table,
        {max_offset} on the diagonal, rising to {2 * max_offset} at {max_offset} steps to its right and falling to 0 at
        {max_offset} steps to its left; the corners beyond are filled with {2 * max_offset} and 0.""")


def memory_bytes(length, max_offset=64, head_dim=64, num_heads=8) -> dict:
    """Bytes in float32 of three ways to hold what `length` queries think of `length` keys, one sentence, one layer."""
    return {"a vector for every pair, (L, L, d)": 4 * length * length * head_dim,
            "the logits themselves, (heads, L, L)": 4 * num_heads * length * length,
            "queries times table, (heads, L, 2m+1)": 4 * num_heads * length * (2 * max_offset + 1)}


@style.drawing
def draw_memory(head_dim: int = 64, max_offset: int = 64, num_heads: int = 8) -> style.Picture:
    """Bytes of the looked-up table, of the logits and of queries times table, against the length."""
    lengths = 2 ** np.arange(7, 15)
    fig = style.figure(8, 3.3)
    ax = fig.subplots()
    curves = {name: [memory_bytes(int(n), max_offset, head_dim, num_heads)[name] / 2**20 for n in lengths]
              for name in memory_bytes(1)}
    for (name, values), colour, marker in zip(curves.items(), (style.VERMILION, style.GREY, style.BLUE), "os^"):
        ax.loglog(lengths, values, marker=marker, ms=5, color=colour, label=name)
    ax.set(xlabel="length L (tokens)", ylabel="MiB, one layer", xticks=lengths, xticklabels=lengths, xlim=(110, 19000))
    ax.minorticks_off()
    ax.legend(loc="upper left")
    first, _, last = (values[5] for values in curves.values())
    return style.Picture(fig, f"""Memory against length, both on logarithmic axes, lengths 128 to 16384. The vector for
        every pair lies highest and rises with the square of the length, {first:,.0f} MiB at length 4096. The logits run
        parallel below it. Queries times table lies lowest and rises in proportion to the length, {last:.0f} MiB at
        4096.""")


@functools.lru_cache(maxsize=1)
def _tokens(d_model, seed=2):
    """q and k of 32 tokens and a vector for every offset -31 .. 31: random directions, all of length sqrt(d_model)."""
    rng = np.random.default_rng(seed)
    drawn = [rng.normal(size=(rows, 128))[:, :d_model] for rows in (32, 32, 63)]
    return tuple(v * np.sqrt(d_model) / np.linalg.norm(v, axis=1, keepdims=True) for v in drawn)


def logits_of(position: int, d_model: int, max_offset: int) -> tuple[np.ndarray, np.ndarray]:
    """Content term and offset term, (32,) each, of one query's logits in the explorer."""
    q, k, vectors = _tokens(d_model)
    offset = np.clip(np.arange(32) - position, -max_offset, max_offset)
    return k @ q[position] / np.sqrt(d_model), vectors[offset + 31] @ q[position] / np.sqrt(d_model)


def _softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


class ClipScene(Scene):
    """Which row of the table each pair reads, and what that does to the logits and weights of one query."""
    controls = {
        "max_offset": Slider(0, 31, 4, label="clip distance", help="offsets beyond it share a vector: max_offset"),
        "position": Slider(0, 31, 12, help="the query whose logits are drawn"),
        "d_model": Slider(4, 128, 16, step=4, help="width of query, key and offset vectors; the model has one head"),
    }
    size = (8.0, 4.6)
    LENGTH = 32

    def build(self):
        grid = self.figure.add_gridspec(2, 2, width_ratios=[1, 1.3], height_ratios=[1.5, 1])
        self.heat = style.heat_axes(self.figure.add_subplot(grid[:, 0]))
        self.logits = self.figure.add_subplot(grid[0, 1])
        self.weights = self.figure.add_subplot(grid[1, 1], sharex=self.logits)
        keys = np.arange(self.LENGTH)

        self.image = self.heat.imshow(np.zeros((self.LENGTH,) * 2), vmin=-1, vmax=1, aspect="equal")
        bar = self.figure.colorbar(self.image, ax=self.heat, ticks=[-1, 0, 1], location="bottom", shrink=0.9)
        bar.ax.set_xticklabels(["first row:\n-clip", "middle row:\n0", "last row:\n+clip"])
        self.heat.set(title="Row of the table", xlabel="key position j", ylabel="query position i",
                      xticks=[0, 10, 20, 30], yticks=[0, 10, 20, 30])
        self.row = self.heat.axhline(0, color="white", lw=3)
        self.row_core = self.heat.axhline(0, color=style.VERMILION, lw=1.4)

        self.far = [ax.add_patch(Rectangle((0, -9), 0, 18, color="#EFEFEF", zorder=0))
                    for ax in (self.logits, self.weights) for _ in range(2)]
        self.content = self.logits.plot(keys, 0.0 * keys, "o", color=style.GREY, ms=3.5, label="content")[0]
        self.offset = self.logits.step(keys, 0.0 * keys, where="mid", color=style.BLUE, lw=2, label="offset")[0]
        self.total = self.logits.plot(keys, 0.0 * keys, color=style.VERMILION, lw=1.3, label="sum")[0]
        self.logits.set(title="Logits of the marked query", ylabel="logit", xlim=(-0.5, 31.5), ylim=(-5.6, 7.6),
                        yticks=[-4, -2, 0, 2, 4])
        self.logits.tick_params(labelbottom=False)
        self.legend = self.logits.legend(loc="upper center", ncols=3, fontsize=9, handlelength=1.4, columnspacing=1.2)
        self.stems = self.weights.vlines(keys, 0, 0.0 * keys, color=style.VERMILION, lw=4)
        self.weights.set(ylabel="weight", xlabel="key position j   (grey: beyond the clip distance)", ylim=(0, 0.85),
                         yticks=[0, 0.4, 0.8])
        self.layer(self.image, on="max_offset")
        self.layer(self.row, self.row_core, on="position")
        self.layer(*self.far, on=("max_offset", "position"))
        self.layer(self.content, on=("position", "d_model"))
        self.layer(self.offset, self.total, self.stems, self.legend, on=("max_offset", "position", "d_model"))

    def update(self, max_offset, position, d_model):
        keys = np.arange(self.LENGTH)
        self.image.set_data(np.clip(keys - keys[:, None], -max_offset, max_offset) / max(max_offset, 1))
        for line in (self.row, self.row_core):
            line.set_ydata([position, position])
        edges = [(-0.5, max(position - max_offset - 0.5, -0.5)), (min(position + max_offset + 0.5, 31.5), 31.5)]
        for patch, (left, right) in zip(self.far, edges * 2):
            patch.set_x(left)
            patch.set_width(right - left)
        content, offset = logits_of(position, d_model, max_offset)
        self.content.set_ydata(content)
        self.offset.set_ydata(offset)
        self.total.set_ydata(content + offset)
        self.stems.set_segments([[(j, 0), (j, w)] for j, w in enumerate(_softmax(content + offset))])

    def describe(self, max_offset, position, d_model):
        content, offset = logits_of(position, d_model, max_offset)
        far = np.abs(np.arange(self.LENGTH) - position) > max_offset
        share = 100 * _softmax(content + offset)[far].sum()
        distinct = len(np.unique(np.clip(np.arange(self.LENGTH) - position, -max_offset, max_offset)))
        rows = 2 * max_offset + 1
        return (f"Clip distance {max_offset}: a table of {rows} vector{'s' * (rows > 1)} of width {d_model}, "
                f"{rows * d_model:,} numbers. "
                f"The query at position {position} reads {distinct} of them for its 32 keys. {far.sum()} keys lie "
                f"beyond the clip distance and receive {share:.0f} % of its attention.")


def _rows(q_positions, k_positions, max_offset, *, offsets=lambda i, j: j - i,
          to_row=lambda r, m: r.clamp(-m, m) + m):
    """Rows of the table, with the places where learners go astray as options."""
    q_positions, k_positions = torch.as_tensor(q_positions), torch.as_tensor(k_positions)
    return to_row(offsets(q_positions[:, None], k_positions[None, :]), max_offset)


def _rows_variant(**options):
    return lambda q, k, m: _rows(q, k, m, **options)


check_rows = Exercise(
    right=_rows_variant(),
    integers=True,
    probes=[(torch.arange(2), torch.arange(3), 1), (torch.tensor([3, 4]), torch.arange(5), 2),
            (torch.arange(6), torch.arange(6), 2)],
    praise="Right, also for two queries that stand at the end of five keys: that is how a model with a cache asks, and "
           "code that counts both from 0 gets every offset wrong there.",
    mistakes=[
        Mistake("query minus key", _rows_variant(offsets=lambda i, j: i - j),
                "Your offset is i - j. Shaw's is key minus query, j - i: a key that comes after the query has a "
                "positive offset. (Some models do count i - j. Mixing the two mirrors the text.)"),
        Mistake("distances", _rows_variant(offsets=lambda i, j: (j - i).abs()),
                "You took the distance |j - i|, so the key before and the key after read the same row. The sign is "
                "what tells left from right."),
        Mistake("no shift", _rows_variant(to_row=lambda r, m: r.clamp(-m, m)),
                "Clipped, but not shifted: rows of a table are numbered from 0. A negative index raises no error in "
                "Python, it counts from the end and reads a wrong row."),
        Mistake("no clip", _rows_variant(to_row=lambda r, m: r + m),
                "Shifted, but not clipped: far offsets point outside the table, or count back from its end."),
        Mistake("shifted, then clipped at m", _rows_variant(to_row=lambda r, m: (r + m).clamp(0, m)),
                "After the shift the rows run from 0 to 2m, not to m: you gave all keys on the right the middle row."),
        Mistake("clipped at 0", _rows_variant(to_row=lambda r, m: r.clamp(0, m) + m),
                "You clip at 0 from below, so all keys on the left read the row of offset 0. Clip at -m."),
        Mistake("wrapped", _rows_variant(to_row=lambda r, m: (r + m) % (2 * m + 1)),
                "You wrap around: an offset just beyond m reads the row of -m. Clipping keeps it at the end it is at."),
        Mistake("counted from 0", lambda q, k, m: _rows(torch.arange(len(q)), torch.arange(len(k)), m),
                "You counted both from 0 and ignored the positions. Queries at positions 3 and 4 with keys 0 to 4 are "
                "the last two of five, as in a model that keeps earlier keys in a cache."),
        Mistake("keys down the rows", lambda q, k, m: _rows(q, k, m).T,
                "Right numbers, transposed: queries go down, keys go across, as in every matrix of logits."),
    ])


def shaw_head(q, k, v, key_table, value_table, rows, *, key_term=None, value_term=None,
              mix=lambda content, offset, d: (content + offset) / d ** 0.5, axis=-1):
    """One head of Shaw's equations, as they stand; learners' wrong turns as options. rows (queries, keys)."""
    a_key, a_value = key_table[rows], value_table[rows]
    offset = torch.einsum("id,ijd->ij", q, a_key) if key_term is None else key_term(q, k, a_key)
    weights = torch.softmax(mix(q @ k.T, offset, q.shape[-1]), dim=axis)
    extra = torch.einsum("ij,ijd->id", weights, a_value) if value_term is None else value_term(weights, a_key, a_value)
    return weights @ v + extra


def _head_variant(**options):
    return lambda *arguments: shaw_head(*arguments, **options)


def _head_probe(seed, q_len, k_len, max_offset, d):
    make = torch.Generator().manual_seed(seed)
    q, k, v, key_table, value_table = (
        torch.randn(n, d, generator=make) for n in (q_len, k_len, k_len, 2 * max_offset + 1, 2 * max_offset + 1))
    return q, k, v, key_table, value_table, _rows(torch.arange(q_len), torch.arange(k_len), max_offset)


check_attention = Exercise(
    right=_head_variant(),
    probes=[_head_probe(0, 5, 5, 2, 4), _head_probe(1, 3, 6, 1, 8)],
    tolerance=1e-4,
    praise="That is equations 3 and 4 of the paper, also where queries and keys differ in number.",
    mistakes=[
        Mistake("the key meets the offset vector",
                _head_variant(key_term=lambda q, k, a: torch.einsum("jd,ijd->ij", k, a)),
                "Your offset vector meets the key: that is what (q + a) . k gives. Shaw adds it to the key, so it is "
                "the query that meets it: each token asks for places by its own query."),
        Mistake("offset term not scaled", _head_variant(mix=lambda c, o, d: c / d ** 0.5 + o),
                "Only the content term is divided by sqrt(d). The offset vector is part of the key, so both are."),
        Mistake("nothing scaled", _head_variant(mix=lambda c, o, d: c + o),
                "The sum is not divided by sqrt(d)."),
        Mistake("no value term", _head_variant(value_term=lambda w, a_key, a_value: 0),
                "The weights are right, but the values do not get their offset vectors: v_j + a^V_ij is what is "
                "summed."),
        Mistake("no key term", _head_variant(key_term=lambda q, k, a: 0),
                "The offset vectors of the keys are missing in the logits."),
        Mistake("one table for both", _head_variant(value_term=lambda w, a, _: torch.einsum("ij,ijd->id", w, a)),
                "You add the keys' table to the values. The values have a table of their own."),
        Mistake("values not weighted", _head_variant(value_term=lambda w, _, a: a.sum(dim=1)),
                "The offset vectors of the values must be weighted like the values themselves."),
        Mistake("softmax over queries", _head_variant(axis=0),
                "Your softmax runs over the queries. Each query spreads its attention over the keys, the last axis."),
    ])


def split_heads(x, num_heads):
    """(b, l, d) -> (b, h, l, d/h)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _numbers(*shape):
    return torch.arange(float(np.prod(shape))).view(shape)


check_split = Exercise(
    right=split_heads,
    probes=[(_numbers(12, 5, 8), 2), (_numbers(3, 4, 12), 3)],
    praise="Every size comes from the tensor itself, so any batch works - also the smaller last one of an epoch.",
    mistakes=[
        Mistake("fixed batch size", lambda x, h: x.view(6, -1, h, x.shape[-1] // h).transpose(1, 2),
                "The 6 is still there. With 12 sentences, view(6, -1, ...) joins sentences in pairs without a word. "
                "The batch size is x.shape[0]."),
        Mistake("no transpose", lambda x, h: x.unflatten(-1, (h, -1)),
                "The shape is (b, l, h, d/h): heads and length still have to change places, or every head would attend "
                "over heads instead of tokens."),
        Mistake("view instead of transpose", lambda x, h: x.reshape(x.shape[0], h, x.shape[1], -1),
                "The shape is right and the numbers are not: reshaping straight to (b, h, l, d/h) deals the numbers "
                "out in another order and mixes tokens. Split the last axis first, then transpose."),
        Mistake("heads interleaved", lambda x, h: x.unflatten(-1, (-1, h)).movedim(-1, 1),
                "Your heads take every h-th column. Head 0 is the first d/h columns: split the last axis as (h, d/h)."),
    ])


def shaw_logits(q, k, table, *, lengths=lambda q, k: (q.shape[-2], k.shape[-2]), sign=1, at_the_end=False,
                mix=lambda content, offset, d: (content + offset) / d ** 0.5):
    """q (b, h, q, d), k (b, h, k, d), table (2m + 1, d) -> (b, h, q, k), positions counted from 0."""
    q_len, k_len = lengths(q, k)
    max_offset = len(table) // 2
    i, j = torch.arange(q_len, device=table.device), torch.arange(k_len, device=table.device)
    if at_the_end:
        i = i + k_len - q_len
    rows = (sign * (j[None, :] - i[:, None])).clamp(-max_offset, max_offset) + max_offset
    offset = torch.einsum("bhid,ijd->bhij", q, table[rows])
    return mix(q @ k.transpose(-2, -1), offset, q.shape[-1])


def _logits_variant(**options):
    return lambda q, k, table: shaw_logits(q, k, table, **options)


def _logits_probe(seed, q_len, k_len):
    make = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=make) for shape in ((2, 2, q_len, 4), (2, 2, k_len, 4), (5, 4)))


class AnyDevice(Exercise):
    """An exercise on a function of tensors that must work on other devices, and for 3 queries and 7 keys, too.

    torch's meta device, which keeps shapes and no numbers, stands in for any other device.
    """

    def __call__(self, answer):
        verdict = super().__call__(answer)
        if verdict.status != "correct":
            return verdict
        on_cpu = _logits_probe(2, 3, 7)
        elsewhere = [tensor.to("meta") for tensor in on_cpu]
        if attempt(answer, *on_cpu) != "runs, output (2, 2, 3, 7)":
            return Verdict("not yet", "It does not return (2, 2, 3, 7) for 3 queries and 7 keys. Which length comes "
                                      "from which tensor?")
        if attempt(answer, *elsewhere) != "runs, output (2, 2, 3, 7)":
            return Verdict("not yet", "The numbers are right on the CPU, but on another device it stops: a tensor in "
                                      "it is made on a fixed device. A plain number will do for the scale, and indices "
                                      "are made with device=table.device.")
        return verdict


check_logits = AnyDevice(
    right=shaw_logits,
    probes=[_logits_probe(0, 1, 7), _logits_probe(1, 5, 5)],
    tolerance=1e-4,
    praise="Lengths from the tensors they belong to, and no device named anywhere: it ran on a second device just now.",
    mistakes=[
        Mistake("key length from the query", _logits_variant(lengths=lambda q, k: (q.shape[-2],) * 2),
                "Both lengths still come from q. With one query and seven keys it even runs: the single column of "
                "offset logits is broadcast over all keys, and all of them count as offset 0."),
        Mistake("queries at the end", _logits_variant(at_the_end=True),
                "You let the queries be the last of the keys. That is right for a cache, but here the two are "
                "different sentences, and both count from 0."),
        Mistake("query minus key", _logits_variant(sign=-1),
                "Your offsets are i - j; they should be j - i."),
        Mistake("offset term not scaled", _logits_variant(mix=lambda c, o, d: c / d ** 0.5 + o),
                "Only the content term is divided by sqrt(d)."),
        Mistake("nothing scaled", _logits_variant(mix=lambda c, o, d: c + o),
                "You took the scale out altogether. It is needed, as a plain number."),
    ])


def merge_heads(out):
    """(b, h, l, d/h) -> (b, l, d)."""
    return out.transpose(1, 2).flatten(2)


check_merge = Exercise(
    right=merge_heads,
    probes=[(_numbers(2, 2, 5, 4),), (_numbers(1, 3, 4, 2),)],
    praise="(b, l, d), with the heads side by side again. Now x + attention(x) works.",
    mistakes=[
        Mistake("batch and length in one", lambda out: out.transpose(1, 2).reshape(-1, out.shape[1] * out.shape[3]),
                "The shape is (b l, d): all sentences in one long list. The batch must survive."),
        Mistake("no transpose", lambda out: out.reshape(out.shape[0], out.shape[2], -1),
                "The shape is right, the numbers are not: without transposing first, the row of one token is filled "
                "with numbers of several tokens."),
        Mistake("width before heads", lambda out: out.permute(0, 2, 3, 1).flatten(2),
                "The heads are interleaved. They lie one after the other, as they did before the split."),
        Mistake("heads summed", lambda out: out.sum(dim=1),
                "You added the heads up. They are put side by side: h times d/h columns make d."),
    ])


def attempt(function, *arguments) -> str:
    """What happens when the function is called, in words that are the same on every computer."""
    try:
        return f"runs, output {tuple(function(*arguments).shape)}"
    except Exception:                                # broken code may raise anything
        return "stops with an error"


guess_shift = Guess(
    a="Nothing.", b="All logits grow, because the positions are larger.", c="Only the logits on the diagonal stay.")
guess_centre = Guess(a="Row 0, because the offset is 0.", b="Row m, the middle one.", c="The last row, 2m.")
guess_clip = Guess(
    a="5 different weights; keys beyond offset 2 get exactly zero.",
    b="5 different weights, none of them zero.", c="40 different weights, one for each offset.")
guess_bytes = Guess(a="33 KB, the size of the table.", b="64 MiB.", c="1 GiB.")
