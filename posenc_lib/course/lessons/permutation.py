"""Lesson 01: why can attention not see order?"""
import functools
import itertools

import numpy as np
import torch
from matplotlib.patches import FancyBboxPatch, Rectangle

from posenc_lib import NoPE, attend

from .. import style
from ..check import Exercise, Guess, Mistake
from ..explorer import Choice, Scene, Slider


def _box(ax, x, y, width, height, text="", colour=style.GREY, fill="white", size=10, **options):
    """A rounded box centred at (x, y) with text in it."""
    ax.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, facecolor=fill, edgecolor=colour,
                                boxstyle="round,pad=0,rounding_size=0.12", **options))
    ax.text(x, y, text, ha="center", va="center", size=size)


@style.drawing
def draw_reordering() -> style.Picture:
    """Two sentences, each with its reordering: the same words, lines showing where each one went."""
    pairs = (("dog", "bites", "man"), (2, 1, 0)), (("wǒ", "ài", "chī", "píng", "guǒ"), (3, 4, 1, 0, 2))
    fig = style.figure(8, 2.2)
    for ax, (words, order) in zip(fig.subplots(1, 2, width_ratios=[3, 5]), pairs):
        for new, old in enumerate(order):
            colour = style.COLOURS[old]
            ax.plot([old, new], [0.78, 0.22], color=colour, lw=2.2)
            _box(ax, old, 1, 0.84, 0.4, words[old], colour)
            _box(ax, new, 0, 0.84, 0.4, words[old], colour)
        ax.set(xlim=(-0.6, len(words) - 0.4), ylim=(-0.3, 1.3))
        ax.axis("off")
    return style.Picture(fig, """Two sentences as rows of boxes, with lines to their reordering below. Left: dog bites
        man becomes man bites dog. Right: wǒ ài chī píng guǒ becomes píng guǒ ài wǒ chī. Every word of the upper row
        is found in the lower row exactly once; only the places differ.""")


@style.drawing
def draw_attention(words, scores, weights, outputs) -> style.Picture:
    """Scores (n, n), weights (n, n) and outputs (n, d_v) of one head as heat maps, labelled with the `words`."""
    n, strongest = len(words), int(np.argmax(weights[0]))
    fig = style.figure(8, 2.9)
    panels = fig.subplots(1, 3)
    limits = dict(vmin=-np.abs(scores).max(), vmax=np.abs(scores).max()), dict(vmin=0, vmax=1), dict(vmin=-2, vmax=2)
    titles = ("scores $e_{ij}$", r"weights $\alpha_{ij}$", "outputs $z_i$")
    for ax, values, limit, title in zip(panels, (scores, weights, outputs), limits, titles):
        image = style.heat_axes(ax).imshow(values, **limit)
        ax.set(title=title, yticks=range(n), yticklabels=words, xlabel="column of $z$")
        ax.tick_params(labelsize=9)
        fig.colorbar(image, ax=ax, shrink=0.9)
    for ax in panels[:2]:
        ax.set(xticks=range(n), xticklabels=words, xlabel="key j")
    panels[2].set_xticks(range(outputs.shape[1]))
    panels[0].set_ylabel("query i")
    return style.Picture(fig, f"""Three heat maps for the tokens {', '.join(words)}. Left: {n} by {n} scores, positive
        and negative. Middle: {n} by {n} attention weights between 0 and 1; the first token attends most to
        {words[strongest]}, with weight {weights[0, strongest]:.2f}. Right: the outputs, {n} rows of
        {outputs.shape[1]} columns.""")


def counting_head(length: int) -> tuple[np.ndarray, np.ndarray]:
    """Weights (length, length) and outputs (length,) of a causal head that averages a 1 at the first token with 0s."""
    nothing = torch.zeros(1, 1, length, 1, dtype=torch.float64)
    v = torch.zeros_like(nothing)
    v[0, 0, 0] = 1
    out, weights = attend(nothing, nothing, v, NoPE(), causal=True, return_weights=True)
    return weights[0, 0].numpy(), out.flatten().numpy()


@style.drawing
def draw_counting(length: int = 12) -> style.Picture:
    """The weights of the averaging head under a causal mask, and what it returns at each position."""
    weights, out = counting_head(length)
    fig = style.figure(8, 2.9)
    left, right = fig.subplots(1, 2, width_ratios=[1, 1.5])
    image = style.heat_axes(left).imshow(weights, vmin=0, vmax=1)
    left.set(title="weights: the mean of all seen", xlabel="key position", ylabel="query position")
    fig.colorbar(image, ax=left, ticks=[0, 0.5, 1])
    right.vlines(range(length), 0, out, color=style.LIGHT)
    right.plot(range(length), out, "o", color=style.BLUE)
    for p in (0, 1, 2, 3):
        right.annotate("1" if p == 0 else f"1/{p + 1}", (p, out[p]), (7, 2), textcoords="offset points")
    right.set(title="output: 1/(p + 1)", xlabel="position p", ylabel="output", ylim=(0, 1.12))
    return style.Picture(fig, f"""Left: the {length} by {length} attention weights are a lower triangle; row p holds
        p + 1 equal weights. Right: the output against the position falls as 1, 1/2, 1/3, 1/4 down to {out[-1]:.2f}, so
        every position has a value of its own.""")


DOORS = (
    ("1 input", "embed", "added to the token\nvectors, once", "lessons 03, 10, 11", style.BLUE),
    ("2 rotation", "rotate", "turns queries\nand keys", "lessons 06, 07, 11", style.ORANGE),
    ("3 bias", "bias", "a number per pair\nof positions", "lessons 09, 11", style.GREEN),
    ("4 logits", "logits", "tokens and posi-\ntions meet", "lessons 08, 09, 11", style.VERMILION),
    ("5 values", "values", "changes what is\nsummed up", "lesson 08", style.PURPLE),
)


@style.drawing
def draw_doors() -> style.Picture:
    """The way from tokens to outputs, and the five doors on it through which position can enter."""
    fig = style.figure(8, 3.7, layout="none")
    ax = fig.add_axes([0.01, 0.01, 0.98, 0.98])
    ax.set(xlim=(0, 16), ylim=(0, 7.4))
    ax.axis("off")
    _box(ax, 10.3, 5.55, 8.9, 2.5, fill="#F7F7F7")
    ax.text(5.98, 6.95, "attention, the same in every layer", size=10, color=style.GREY)
    stations = ((0.95, "token\nids"), (3.35, "token\nvectors"), (6.9, "q, k"), (9.3, "logits\n$q \\cdot k$"),
                (11.65, "softmax"), (13.7, "$\\Sigma\\,\\alpha v$"), (15.35, "out"))
    widths = (1.3, 1.7, 1.1, 1.5, 1.75, 1.2, 0.85)
    for (x, text), width in zip(stations, widths):
        _box(ax, x, 5.5, width, 1.25, text, style.INK)
    for (x, _), (following, _), w, v in zip(stations, stations[1:], widths, widths[1:]):
        ax.annotate("", (following - v / 2, 5.5), (x + w / 2, 5.5), arrowprops=dict(arrowstyle="->", color=style.GREY))

    entrances = (3.35, 6.9, 10.35, 9.3, 13.7)          # where each door leads in; the bias joins on the logits' way out
    signs = (1.62, 4.8, 11.22, 8.0, 14.4)              # where its sign stands, so that no two signs overlap
    for entrance, x, (name, hook, what, where, colour) in zip(entrances, signs, DOORS):
        top = 5.5 if name == "3 bias" else 4.83
        ax.annotate("", (entrance, top), (x, 3.35), arrowprops=dict(arrowstyle="-|>", color=colour, lw=2))
        _box(ax, x, 1.85, 3.0, 2.95, "", colour)
        ax.text(x, 2.92, name, ha="center", va="center", weight="bold", color=colour)
        ax.text(x, 2.36, f"{hook}()", ha="center", va="center", size=9, family="DejaVu Sans Mono")
        ax.text(x, 1.62, what, ha="center", va="center", size=9)
        ax.text(x, 0.76, where, ha="center", va="center", size=9, color=style.GREY)
    return style.Picture(fig, """A row of boxes from token ids over token vectors into attention: q and k, logits q
        times k, softmax, weighted sum of v, out. Five numbered doors lead into it from below. Door 1, input, adds to
        the token vectors once, lessons 03, 10 and 11. Door 2, rotation, turns queries and keys, lessons 06, 07 and 11.
        Door 4, logits, is where tokens and positions meet, lessons 08, 09 and 11. Door 3, bias, adds a number per pair
        of positions to the logits, lessons 09 and 11. Door 5, values, changes what is summed up, lesson 08.""")


WORDS = ("the", "dog", "bites", "the", "man")
ORDERS = {
    "as written": (0, 1, 2, 3, 4),
    "nouns swapped": (0, 4, 2, 3, 1),
    "the ↔ the": (3, 1, 2, 0, 4),
    "shifted by one": (4, 0, 1, 2, 3),
    "reversed": (4, 3, 2, 1, 0),
    "shuffled": (2, 4, 0, 3, 1),
}
WIDEST = 64


@functools.lru_cache(maxsize=1)
def _weights():
    """Token vectors (5, 64), equal for equal words, and three projections (64, 64), cut to size for smaller d_model."""
    random = np.random.default_rng(3)
    vocabulary = {word: random.normal(size=WIDEST) for word in sorted(set(WORDS))}
    return np.array([vocabulary[word] for word in WORDS]), random.normal(size=(3, WIDEST, WIDEST))


@functools.lru_cache(maxsize=4)
def run_attention(order: tuple, d_model: int, causal: bool):
    """One head over WORDS in that order: token vectors (5, d_model), weights (5, 5), outputs (5, d_model)."""
    tokens, projections = _weights()
    x = torch.from_numpy(tokens[list(order), :d_model])
    q, k, v = (x @ torch.from_numpy(w[:d_model, :d_model]) / d_model ** 0.5 for w in projections)
    out, weights = attend(q[None, None], k[None, None], v[None, None], NoPE(), causal=causal, return_weights=True)
    return x.numpy(), weights[0, 0].numpy(), out[0, 0].numpy()


class PermutationScene(Scene):
    """Token vectors, weights and outputs of a sentence and of its reordering, with one token marked in both."""
    controls = {
        "order": Choice(tuple(ORDERS), "nouns swapped", help="how the words of the lower row are ordered"),
        "marked": Slider(0, 4, 1, label="marked position", help="the token that is framed, by its position as written"),
        "d_model": Slider(4, WIDEST, 16, step=4, help="width of the token vectors; one head, so also d_k"),
        "mask": Choice(("none", "causal"), "none", help="causal: a token attends to itself and what stands before it"),
    }
    size = (8.0, 4.9)

    def build(self):
        panels = self.figure.subplots(2, 4, width_ratios=[1, 1, 1, 1])
        n = len(WORDS)
        limits = dict(vmin=-2.5, vmax=2.5), dict(vmin=0, vmax=1), dict(vmin=-2, vmax=2), dict(vmin=0, vmax=1)
        titles = (("token vectors X", "weights", "outputs f(X)", ""),
                  ("reordered: PX", "weights", "f(PX)", "|f(PX) − P f(X)|"))
        self.images, self.frames, self.labels = [], [], []
        for row, axes in enumerate(panels):
            for column, ax in enumerate(axes):
                ax.set(xticks=[], yticks=[], title=titles[row][column])
                ax.title.set_size(10)
                style.heat_axes(ax)
                if (row, column) == (0, 3):
                    ax.set(xlim=(0, 1), ylim=(0, 1))
                    continue
                self.images.append(ax.imshow(np.zeros((n, 2)), extent=(0, 1, n, 0), **limits[column]))
                for colour, width in (("white", 4.5), (style.VERMILION, 2.2)):
                    frame = Rectangle((0, 0), 1, 1, fill=False, ec=colour, lw=width, clip_on=False)
                    self.frames.append(ax.add_patch(frame))
                if column < 2:
                    for i, word in enumerate(WORDS):
                        texts = [ax.text(-0.04, i + 0.5, word, ha="right", va="center", size=10)]
                        if column:
                            texts.append(ax.text((i + 0.5) / n, n + 0.12, word, ha="center", va="top", size=8,
                                                 rotation=40))
                        if row:
                            self.labels += [(i, text) for text in texts]
                if column == 1:
                    ax.set_xlabel("\n")                  # room for the slanted words
                elif row:
                    ax.set_xlabel("d_model columns", size=9)
        self.verdict = panels[0, 3].text(0.5, 0.62, "", ha="center", va="center", size=13, weight="bold")
        self.size_of_gap = panels[0, 3].text(0.5, 0.3, "", ha="center", va="center", size=10, color=style.GREY)
        self.layer(*(text for _, text in self.labels), on="order")
        self.layer(*self.images[:3], on=("d_model", "mask"))
        self.layer(*self.images[3:], self.verdict, self.size_of_gap, on=("order", "d_model", "mask"))
        self.layer(*self.frames, on=("marked", "order"))

    def runs(self, order, d_model, mask):
        """Both runs, and |f(PX) - P f(X)| (5, d_model)."""
        places = ORDERS[order]
        written = run_attention(tuple(range(len(WORDS))), d_model, mask == "causal")
        moved = run_attention(places, d_model, mask == "causal")
        return written, moved, np.abs(moved[2] - written[2][list(places)])

    def update(self, order, marked, d_model, mask):
        written, moved, gap = self.runs(order, d_model, mask)
        for image, values in zip(self.images, (*written, *moved, gap)):
            image.set_data(values)
        places = ORDERS[order]
        for i, text in self.labels:
            text.set_text(WORDS[places[i]])
        for i, frame in enumerate(self.frames):
            frame.set_xy((0, marked if i < 6 else places.index(marked)))
        holds = gap.max() < 1e-12
        self.verdict.set_text("f(PX) = P f(X)\nholds" if holds else "f(PX) = P f(X)\nfails")
        self.verdict.set_color(style.GREEN if holds else style.VERMILION)
        self.size_of_gap.set_text("every output moved\nwith its token" if holds
                                  else f"largest difference\n{gap.max():.2f}")

    def describe(self, order, marked, d_model, mask):
        written, _, gap = self.runs(order, d_model, mask)
        places = ORDERS[order]
        holds, now = gap.max() < 1e-12, places.index(marked)
        law = "holds: every output moved with its token" if holds else f"fails, by up to {gap.max():.2f}"
        where = f"stays at position {now}" if now == marked else f"goes from position {marked} to {now}"
        fate = "does not change" if gap[now].max() < 1e-12 else f"changes by up to {gap[now].max():.2f}"
        twins = "equal" if np.abs(written[2][0] - written[2][3]).max() < 1e-12 else "different"
        sentence, masked = " ".join(WORDS[i] for i in places), "no mask" if mask == "none" else "a causal mask"
        return (f"The dog bites the man, reordered ({order}) to: {sentence}. With {masked} and d_model {d_model}, "
                f"f(PX) = P f(X) {law}. The marked word '{WORDS[marked]}' {where} and its output {fate}. "
                f"In the sentence as written, the two words 'the' have {twins} outputs.")


def _attention(x, w_q, w_k, w_v, *, scale=lambda x, q: q.shape[-1] ** 0.5, axis=-1, swap=False):
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    scores = (k @ q.T if swap else q @ k.T) / scale(x, q)
    return torch.softmax(scores, dim=axis) @ v


def _steps(x, w_q, w_k, w_v):
    """Scores before scaling, weights and values."""
    q, k, v = x @ w_q, x @ w_k, x @ w_v
    return q @ k.T, torch.softmax(q @ k.T / q.shape[-1] ** 0.5, dim=-1), v


def _variant(**options):
    return lambda *arguments: _attention(*arguments, **options)


def _draw(seed, *shapes):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float32) for shape in shapes)


check_attention = Exercise(
    right=_attention,
    probes=[_draw(0, (4, 6), (6, 3), (6, 3), (6, 5)), _draw(1, (3, 8), (8, 4), (8, 4), (8, 2))],
    praise="That is the whole of single-head attention. Nowhere did you need to know which row of x comes first: rows "
           "and columns are only ever compared, never counted.",
    mistakes=[
        Mistake("weights returned", lambda *a: _steps(*a)[1],
                "You returned the weights: the relation between token i and token j. The output z_i is what comes of "
                "it, the values summed with these weights; its width is that of w_v, not the number of tokens."),
        Mistake("no scale", _variant(scale=lambda x, q: 1),
                "The scores are not divided by anything. Without the square root of d_k they grow with the width and "
                "the softmax turns into a hard choice."),
        Mistake("scaled by d_model", _variant(scale=lambda x, q: x.shape[-1] ** 0.5),
                "You divided by the square root of the width of x, d_model. The sum in a score runs over d_k terms, "
                "the width of q and k, so it is d_k that belongs there."),
        Mistake("scaled by d_k", _variant(scale=lambda x, q: q.shape[-1]),
                "You divided by d_k itself; the square root is missing."),
        Mistake("multiplied", _variant(scale=lambda x, q: q.shape[-1] ** -0.5),
                "You multiplied by the square root of d_k. Divide by it."),
        Mistake("softmax over queries", _variant(axis=0),
                "Your softmax runs over the queries (dim=0). Every query spreads a weight of 1 over its keys, so each "
                "row must sum to 1: dim=-1."),
        Mistake("no softmax", lambda x, *w: _steps(x, *w)[0] / w[0].shape[-1] ** 0.5 @ _steps(x, *w)[2],
                "The softmax is missing: your weights may be negative and do not sum to 1."),
        Mistake("scaled after the softmax",
                lambda x, *w: torch.softmax(_steps(x, *w)[0], dim=-1) / w[0].shape[-1] ** 0.5 @ _steps(x, *w)[2],
                "You scaled after the softmax, so the rows no longer sum to 1. Scale the scores before it."),
        Mistake("q and k swapped", _variant(swap=True),
                "Queries and keys have changed places: row i of the scores must belong to query i, so q comes first."),
        Mistake("tokens instead of values", lambda x, *w: _steps(x, *w)[1] @ x,
                "You summed the token vectors x. Sum the values, x @ w_v."),
    ])

check_restore = Exercise(
    right=lambda shuffled, order: shuffled[np.argsort(order)],
    probes=[(torch.arange(10.0).reshape(5, 2), [3, 4, 1, 0, 2]), (torch.arange(4.0)[:, None], [1, 2, 3, 0])],
    praise="You undid P with its inverse, which for a permutation is its transpose. Code that sorts a batch (by "
           "length, say) before a model puts the results back in order afterwards in just this way.",
    mistakes=[
        Mistake("shuffled again", lambda shuffled, order: shuffled[order],
                "You applied the same permutation once more. Swaps undo themselves, most permutations do not. You need "
                "the inverse of P, which is its transpose."),
        Mistake("nothing done", lambda shuffled, order: shuffled,
                "That is still f(PX), in the shuffled order. Each row must go back to where its token stood before."),
        Mistake("reversed", lambda shuffled, order: shuffled.flip(0),
                "You turned the rows upside down. That undoes only a reversal; this order is another one."),
        Mistake("rows sorted", lambda shuffled, order: shuffled[np.argsort(order)[::-1].copy()],
                "The rows come out in the opposite order: row order[0] of the answer must be row 0 of the shuffled "
                "outputs."),
    ])

check_position = Exercise(
    right=lambda reading: 1 / reading - 1,
    probes=[(1 / torch.arange(1, 7),), (torch.tensor([0.01, 0.25, 1.0]),)],
    praise="Position recovered from a mean and a mask, without any encoding. A trained decoder has to learn such a "
           "head by itself, and its feed-forward layers have to learn your formula.",
    mistakes=[
        Mistake("number of tokens", lambda reading: 1 / reading,
                "1 / reading is the number of tokens seen, p + 1. Positions are counted from 0."),
        Mistake("one too many", lambda reading: 1 / reading + 1,
                "The sign of the 1 is wrong: the token at position p sees p + 1 tokens. Solve for p."),
        Mistake("complement", lambda reading: 1 - reading,
                "1 - reading grows with the position, but it is not the position: at position 1 it is one half. Solve "
                "reading = 1 / (p + 1) for p."),
        Mistake("formula forwards", lambda reading: 1 / (reading + 1),
                "You put the reading where the position belongs. The reading is 1 / (p + 1); now solve that for p."),
        Mistake("row numbers", lambda reading: torch.arange(len(reading)),
                "You numbered the rows, so you used their order and not what the head computed. The check hands you "
                "readings in any order: get the position out of each number."),
    ])

KINDS = ("equivariant", "invariant", "neither")
_RIGHT_KINDS = ("equivariant", "invariant", "neither", "neither")
_KIND_HINTS = (
    {"invariant": "Map 1: the mean is invariant, but what is left of each token after subtracting it still has a row "
                  "of its own, and the rows move with the tokens.",
     "neither": "Map 1: the mean does not care about order, so every token has the same vector subtracted, wherever "
                "it stands."},
    {"equivariant": "Map 2: there are no rows left that could move; the answer is one vector. Does it change?",
     "neither": "Map 2: does the largest number of a column change when you deal the rows out in another order?"},
    {"equivariant": "Map 3: one row comes out, so nothing can move along. Whose is it after a shuffle?",
     "invariant": "Map 3: one vector comes out, but which? After a shuffle another token stands first. Pooling all "
                  "tokens is invariant, picking by place is not."},
    {"equivariant": "Map 4: a running sum at row i adds the rows before it. The same token further down has more "
                    "before it, so its row changes (as under a causal mask).",
     "invariant": "Map 4: only the last running sum, the total, is the same in every order. The rows above are not."},
)
check_kinds = Exercise(
    right=list(_RIGHT_KINDS),
    praise="And you may have noticed why map 4 is neither: a running sum is a causal mask in its purest form.",
    mistakes=[Mistake(", ".join(answer), list(answer), " ".join(
                  hints[word] for word, right, hints in zip(answer, _RIGHT_KINDS, _KIND_HINTS) if word != right))
              for answer in itertools.product(KINDS, repeat=4) if answer != _RIGHT_KINDS])

guess_relation = Guess(a="The weight α of row 1, column 4: one number.", b="The output z of token 1: a vector.",
                       c="The weight α of row 4, column 1: one number.")
guess_shuffle = Guess(a="Nothing: the output matrix is the same as before.",
                      b="Each token keeps its output vector; the rows are in the new order.",
                      c="Every output vector changes, because every token has new neighbours.")
guess_causal = Guess(a="Yes: the mask knows nothing about the tokens.",
                     b="No, but the mean over all tokens is still unchanged.",
                     c="No, and the mean over all tokens changes too.")
guess_last = Guess(a="Yes, it comes after them.", b="No, although it comes after them.")
