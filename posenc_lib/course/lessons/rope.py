"""Lesson 06: what if we rotate queries and keys instead of adding?"""
import functools

import numpy as np
import torch
from matplotlib.patches import Polygon, Rectangle

from posenc_lib import frequencies, rotate

from .. import style
from ..check import Exercise, Guess, Mistake
from ..explorer import Choice, LogSlider, Scene, Slider


def token_scores(length: int, dim: int, base: float = 10000.0, *, before: bool, seed: int = 0) -> np.ndarray:
    """Scores of one word with itself at all pairs of positions, (length, length), with random W_Q and W_K.

    before: the word is rotated and then projected. Otherwise the projections are rotated, as RoPE does.
    """
    generator = torch.Generator().manual_seed(seed)
    word, *projections = torch.randn(2 * dim + 1, dim, dtype=torch.float64, generator=generator).split((1, dim, dim))
    words = word.expand(length, dim)
    w_q, w_k = (projection / dim**0.5 for projection in projections)
    if before:
        q, k = rotate(words, length, base) @ w_q, rotate(words, length, base) @ w_k
    else:
        q, k = rotate(words @ w_q, length, base), rotate(words @ w_k, length, base)
    return (q @ k.T / dim**0.5).numpy()


@style.drawing
def draw_scores(length: int = 100, dim: int = 64) -> style.Picture:
    """Scores of one word with itself: rotated before the projections, and after them."""
    fig = style.figure(8, 3.6)
    panels = fig.subplots(1, 2, sharey=True)
    titles = ("word rotated, then projected", "projected, then rotated: RoPE")
    for ax, before, title in zip(panels, (True, False), titles):
        image = style.heat_axes(ax).imshow(token_scores(length, dim, before=before))
        ax.set(title=title, xlabel="key position j")
        fig.colorbar(image, ax=ax, label="score")
    panels[0].set_ylabel("query position i")
    return style.Picture(fig, f"""Two heat maps of the scores of one word with itself, {length} query by {length} key
        positions. Left, rotated before the projections: patches that change along every diagonal. Right, rotated after
        them: every diagonal has one colour, so the map is made of parallel stripes.""")


def _partner_arcs(ax, y, pairs):
    """Arcs above the row at height y between the two boxes of each pair."""
    turn = np.linspace(0, np.pi, 40)
    for first, second in pairs:
        middle, radius = (first + second) / 2 + 0.5, (second - first) / 2
        height = 0.25 + 0.12 * radius
        ax.plot(middle - radius * np.cos(turn), y + 0.8 + height * np.sin(turn), color=style.INK, lw=1.3)


@style.drawing
def draw_layouts(dim: int = 8, rows: int = 3) -> style.Picture:
    """Which features are partners (arcs) and how fast each is turned (colour): two layouts, row 3 is their mixture."""
    half = dim // 2
    adjacent, apart = [(2 * n, 2 * n + 1) for n in range(half)], [(n, n + half) for n in range(half)]
    by_two, by_half = np.repeat(np.arange(half), 2), np.tile(np.arange(half), 2)
    layouts = (("interleaved", adjacent, by_two), ("half-split", apart, by_half), ("mixed: a bug", apart, by_two))
    fig = style.figure(8, 1.4 * rows)
    ax = fig.subplots()
    for n, (name, pairs, frequency) in enumerate(layouts[:rows]):
        y = -2.1 * n
        for column in range(dim):
            colour = style.COLOURS[frequency[column] % len(style.COLOURS)]
            ax.add_patch(Rectangle((column + 0.06, y), 0.88, 0.75, color=colour, alpha=0.55, lw=0))
            ax.text(column + 0.5, y + 0.37, f"$x_{column}$   $\\omega_{frequency[column]}$", ha="center", va="center")
        ax.text(-0.15, y + 0.37, name, ha="right", va="center", weight="bold")
        _partner_arcs(ax, y, pairs)
    ax.set(xlim=(-2.1, dim + 0.1), ylim=(-2.1 * (rows - 1) - 0.1, 1.6))
    ax.axis("off")
    mixture = (" Mixed: boxes are joined as in half-split but coloured as in interleaved, so the two ends of every arc "
               "have different frequencies.") if rows > 2 else ""
    return style.Picture(fig, f"""{rows} rows of {dim} boxes, x0 to x{dim - 1}; colour and label of a box give its
        frequency, an arc joins the two boxes that are turned together. Interleaved: neighbours are joined and share a
        frequency. Half-split: box n is joined with box n + {half} and they share a frequency.{mixture}""")


def neighbour_scores(positions, dtype: torch.dtype, dim: int = 64, base: float = 10000.0) -> np.ndarray:
    """Score of one fixed q and k at i and i + 1 for each i of `positions`, these being rounded to `dtype` first."""
    q, k = np.random.default_rng(3).normal(size=(2, dim // 2, 2)) @ (1, 1j)
    positions = torch.as_tensor(positions)
    i, j = (p.to(dtype).double().numpy()[:, None] for p in (positions, positions + 1))
    w = frequencies(dim, base).numpy()
    return ((q * np.exp(1j * i * w)).conj() * k * np.exp(1j * j * w)).real.sum(axis=-1) / dim**0.5


@style.drawing
def draw_collapse(length: int = 3000) -> style.Picture:
    """Score of a query with the key right after it, against the position, for three number types of the position."""
    positions = np.arange(0, length, 3)
    fig = style.figure(8, 3)
    ax = fig.subplots()
    for dtype, name, colour, marker in ((torch.bfloat16, "bfloat16 positions", style.VERMILION, "x"),
                                        (torch.float16, "float16 positions", style.BLUE, "."),
                                        (torch.float64, "exact positions", style.INK, None)):
        scores = neighbour_scores(positions, dtype)
        ax.plot(positions, scores, color=colour, marker=marker, ms=4, lw=1.2 if marker is None else 0, label=name)
    low, high = ax.get_ylim()
    ax.set(xlabel="query position i", ylabel="score with key i + 1", xlim=(0, length),
           ylim=(low, high + 0.35 * (high - low)))
    ax.legend(loc="upper center", ncols=3)
    return style.Picture(fig, f"""Score of one query with the key right after it, at positions 0 to {length}. Exact
        positions: one horizontal line. Positions rounded to bfloat16 leave the line at 256 and jump between a few other
        values; positions rounded to float16 leave it at 2048.""")


def mean_score(offsets, dim: int, base: float = 10000.0) -> np.ndarray:
    """Average of q . R_r q over all directions of q of length 1, for each offset r: the mean of cos(r w_n)."""
    return np.cos(np.asarray(offsets)[:, None] * frequencies(dim, base).numpy()).mean(axis=1)


@style.drawing
def draw_decay(dim: int = 64, reach: int = 256, query=None, peak: int = 150, seed: int = 0) -> style.Picture:
    """Score against distance: the average for q = k, that for unrelated q and k, and `query` with k = R_peak query."""
    offsets, w = np.arange(reach + 1), frequencies(dim).numpy()
    turn = np.exp(-1j * offsets[:, None] * w)
    q, k = np.random.default_rng(seed).normal(size=(2, 2000, dim // 2, 2)) @ (1, 1j)

    def scores(a, b):
        lengths = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
        return ((a.conj() * b) @ turn.T).real / lengths[:, None]

    fig = style.figure(8, 3.4)
    ax = fig.subplots()
    made = ""
    if query is not None:
        z = (np.asarray(query).reshape(-1, 2) @ (1, 1j))[None]                 # (1, dim/2) complex
        special = scores(z, z * np.exp(1j * peak * w))[0]
        ax.plot(offsets, special, color=style.GREEN, lw=1.2, label=f"made for distance {peak}")
        made = (f" A key made for distance {peak}: a peak of 1 at distance {peak}, {special[0]:.2f} at distance 0, "
                f"never below {special.min():.2f}.")
    for values, colour, name in ((scores(q, q), style.VERMILION, "key = query"),
                                 (scores(q, k), style.BLUE, "key unrelated to query")):
        middle, spread = values.mean(axis=0), values.std(axis=0)
        ax.fill_between(offsets, middle - spread, middle + spread, color=colour, alpha=0.2, lw=0)
        ax.plot(offsets, middle, color=colour, label=f"{name}: mean, spread")
    ax.axhline(0, color=style.LIGHT, lw=1, zorder=0)
    ax.set(xlabel="distance i - j: how far back the key stands", ylabel="score / (|q| |k|)", xlim=(0, reach),
           ylim=(-0.35, 1.35), yticks=[0, 0.5, 1])
    ax.legend(loc="upper center", ncols=3, fontsize=9, columnspacing=1.2, handlelength=1.5)
    return style.Picture(fig, f"""Score over |q| |k| against the distance, head_dim {dim}. Key equal to the query: the
        mean falls from 1 to about {mean_score([20], dim)[0]:.1f} within 20 positions and then only drifts down in
        waves. Unrelated key: mean 0 and the same narrow spread at every distance.{made}""")


@functools.lru_cache(maxsize=1)
def _pairs_of_words(count: int = 128) -> dict:
    """Complex pairs of a query and of the two keys the explorer offers; pair n is the same at every head_dim."""
    rng = np.random.default_rng(5)
    q, other = (rng.uniform(0.6, 1, count) * np.exp(2j * np.pi * rng.random(count)) for _ in range(2))
    return {"query": q, "same as query": q, "another word": other}


@functools.lru_cache(maxsize=4)
def _score_curve(reach: int, head_dim: int, base: float, key: str) -> np.ndarray:
    """q . R_r k over |q| |k| for the offsets r = -reach .. reach."""
    q, k = (_pairs_of_words()[name][:head_dim // 2] for name in ("query", key))
    turned = np.exp(1j * np.arange(-reach, reach + 1)[:, None] * frequencies(head_dim, base).numpy())
    return (turned @ (q.conj() * k)).real / (np.linalg.norm(q) * np.linalg.norm(k))


def _arrow(centre, tip: complex, thick: float = 0.035) -> np.ndarray:
    """Corners (7, 2) of an arrow from `centre` to centre + tip; `thick` is half the width of its shaft."""
    size = min(1.0, abs(tip) / 0.3)
    direction = tip / max(abs(tip), 1e-9)
    head, wing = 0.26 * size, (0.08 + thick) * size
    neck = max(abs(tip) - head, 0)
    outline = np.array([-1j * thick, neck - 1j * thick, neck - 1j * wing, abs(tip), neck + 1j * wing,
                        neck + 1j * thick, 1j * thick]) * direction + centre
    return np.stack([outline.real, outline.imag], axis=-1)


class RopeScene(Scene):
    """Four pairs of a query and a key as arrows, turned by their positions, and the score they give together."""
    controls = {
        "head_dim": Slider(4, 256, 64, step=4, help="width of the head (d_model / num_heads): head_dim / 2 pairs"),
        "base": LogSlider(0, 6, 10000.0, help="the slowest pair turns almost base times slower than the first"),
        "position": Slider(60, 260, 100, help="position i of the query"),
        "offset": Slider(-60, 60, 2, help="key position minus query position, j - i"),
        "key": Choice(("same as query", "another word"), "another word", help="which key vector meets the query"),
    }
    size = (8.0, 4.2)
    REACH, DIALS = 60, 4

    def build(self):
        dials, self.curve = self.figure.subplots(1, 2, width_ratios=[1, 1.1])
        self.centres = [complex(2.5 * (n % 2), -2.95 * (n // 2)) for n in range(self.DIALS)]
        turn = np.exp(1j * np.linspace(0, 2 * np.pi, 100))
        self.rings, self.names, self.ghosts, self.q_arrows, self.k_arrows = [], [], [], [], []
        for centre in self.centres:
            ring = centre + turn
            self.rings += dials.plot(ring.real, ring.imag, color=style.LIGHT, lw=1)
            self.names.append(dials.text(centre.real, centre.imag - 1.1, "pair 0", ha="center", va="top", fontsize=10))
            for arrows, style_of in ((self.ghosts, dict(fc="none", ec=style.BLUE, ls=":", lw=1)),
                                     (self.ghosts, dict(fc="none", ec=style.VERMILION, ls=":", lw=1)),
                                     (self.q_arrows, dict(color=style.BLUE, lw=0, alpha=0.75)),
                                     (self.k_arrows, dict(color=style.VERMILION, lw=0))):
                arrows.append(dials.add_patch(Polygon(np.zeros((7, 2)), **style_of)))
        dials.set(xlim=(-1.1, 3.6), ylim=(-4.75, 1.75), aspect="equal")
        dials.axis("off")
        dials.text(-1.05, 1.62, "query", color=style.BLUE, weight="bold", va="top")
        dials.text(0.35, 1.62, "key", color=style.VERMILION, weight="bold", va="top")
        dials.text(1.2, 1.62, "dotted: unrotated", color=style.GREY, va="top")

        self.curve.axhline(0, color=style.LIGHT, lw=1)
        self.curve.set(xlim=(-self.REACH, self.REACH), ylim=(-1.05, 1.35), xlabel="offset j - i",
                       ylabel="score / (|q| |k|)", yticks=[-1, -0.5, 0, 0.5, 1])
        self.line = self.curve.plot([0], [0], color=style.INK, lw=1.4)[0]
        self.marker = self.curve.plot([0], [0], "o", color=style.GREEN, ms=10, mec=style.INK, clip_on=False)[0]
        self.number = self.curve.text(0, 1.3, "", color=style.INK, weight="bold", va="top", ha="center")
        self.layer(*self.rings, *self.names, on="head_dim")
        self.layer(*self.ghosts, on=("head_dim", "key"))
        self.layer(self.line, on=("head_dim", "base", "key"))
        self.layer(self.marker, self.number, on=("head_dim", "base", "key", "offset"))
        self.layer(*self.q_arrows, *self.k_arrows, on=("head_dim", "base", "key", "offset", "position"))

    def shown_pairs(self, head_dim) -> np.ndarray:
        """Numbers of the pairs drawn: four (or as many as there are), from the first to the last."""
        return np.unique(np.linspace(0, head_dim // 2 - 1, self.DIALS).astype(int))

    def update(self, head_dim, base, position, offset, key):
        pairs, w = self.shown_pairs(head_dim), frequencies(head_dim, base).numpy()
        words = _pairs_of_words()
        for n, centre in enumerate(self.centres):
            drawn = (self.rings[n], self.names[n], self.q_arrows[n], self.k_arrows[n], *self.ghosts[2 * n:2 * n + 2])
            for artist in drawn:
                artist.set_visible(n < len(pairs))
            if n < len(pairs):
                q, k, speed = words["query"][pairs[n]], words[key][pairs[n]], w[pairs[n]]
                self.names[n].set_text(f"pair {pairs[n]}")
                self.ghosts[2 * n].set_xy(_arrow(centre, q))
                self.ghosts[2 * n + 1].set_xy(_arrow(centre, k))
                self.q_arrows[n].set_xy(_arrow(centre, q * np.exp(1j * position * speed), 0.08))
                self.k_arrows[n].set_xy(_arrow(centre, k * np.exp(1j * (position + offset) * speed)))
        curve = _score_curve(self.REACH, head_dim, base, key)
        self.line.set_data(np.arange(-self.REACH, self.REACH + 1), curve)
        self.marker.set_data([offset], [curve[offset + self.REACH]])
        self.number.set_text(f"score at offset {offset}: {round(curve[offset + self.REACH], 2) + 0.0:+.2f}")

    def describe(self, head_dim, base, position, offset, key):
        w = frequencies(head_dim, base).numpy()
        score = _score_curve(self.REACH, head_dim, base, key)[offset + self.REACH]
        return (f"RoPE with head_dim {head_dim} ({head_dim // 2} pairs) and base {style.number(base)}; the key is "
                f"{'the query itself' if key == 'same as query' else key}. Query at position {position}, key at "
                f"{position + offset}: in pair 0 they are turned by {position} and {position + offset} radians, in the "
                f"last by {style.number(position * w[-1])} and {style.number((position + offset) * w[-1])}. The score "
                f"is {round(score, 2) + 0.0:.2f} of |q| |k|, at every position the same.")


def _turned(x, positions, base, *, sign=1, exponent=2, first_sin=-1, layout="interleaved", axis=-2, angle=None):
    """RoPE in plain numpy, with the places where learners go astray as options."""
    x, positions = np.asarray(x, dtype=float), np.asarray(positions, dtype=float)
    d = x.shape[-1]
    w = base ** (-exponent * np.arange(d // 2) / d)
    angle = sign * (positions[:, None] * w if angle is None else angle(positions, w))
    angle = angle[:, None] if axis == -3 else angle
    c, s = np.cos(angle), np.sin(angle)
    a, b = (x[..., 0::2], x[..., 1::2]) if layout == "interleaved" else (x[..., :d // 2], x[..., d // 2:])
    turned = a * c + first_sin * b * s, a * s + b * c
    return (np.stack(turned, axis=-1).reshape(x.shape) if layout == "interleaved" else np.concatenate(turned, axis=-1))


def _variant(**options):
    return lambda x, positions, base: _turned(x, positions, base, **options)


def _table(positions, dim, base):
    """The cosines and sines alone, interleaved (length, dim)."""
    angle = np.asarray(positions, dtype=float)[:, None] * base ** (-2 * np.arange(dim // 2) / dim)
    return np.stack([np.cos(angle), np.sin(angle)], axis=-1).reshape(len(angle), dim)


def _overwritten(x, positions, base):
    """The two lines, the second of which reads what the first has just written."""
    y = np.array(x, dtype=float)
    a, b = y[..., 0::2], y[..., 1::2]
    angle = np.asarray(positions)[:, None] * base ** (-2 * np.arange(a.shape[-1]) / y.shape[-1])
    a[...] = a * np.cos(angle) - b * np.sin(angle)
    b[...] = a * np.sin(angle) + b * np.cos(angle)
    return y


def _probe(heads, dim, seed):
    return np.random.default_rng(seed).normal(size=(2, heads, heads, dim))


check_rotate = Exercise(
    right=_turned,
    probes=[(_probe(3, 8, 0), np.array([0, 2, 5]), 10000.0), (_probe(2, 6, 1), np.array([1, 40]), 100.0)],
    praise="Your function is the library's rotate, for any number of axes in front. Note what it never asked for: the "
           "other token. Each vector is turned by its own position alone, so keys can be turned once and kept.",
    mistakes=[
        Mistake("clockwise", _variant(sign=-1),
                "You turn clockwise: the minus sign has moved to the wrong line. Scores would still be relative, but a "
                "model trained the usual way would read every offset with the wrong sign."),
        Mistake("no minus", _variant(first_sin=1),
                "A minus sign is missing in the first line. Without it the map is no rotation and lengths change."),
        Mistake("half-split", _variant(layout="half"),
                "You paired feature n with feature n + dim/2. Here the partners are neighbours, 2n and 2n+1. (The "
                "other pairing exists too: section 5.)"),
        Mistake("half-split partners, interleaved frequencies", lambda x, p, b: _suspect(x, p, b),
                "Your partners are n and n + dim/2, but your frequencies are repeated for neighbours: two conventions "
                "in one function. Keep to neighbours in both."),
        Mistake("exponent n / dim", _variant(exponent=1),
                "Your exponent is -n/dim; a 2 is missing. The frequency of pair n is base**(-2n/dim)."),
        Mistake("column number as pair number", _variant(exponent=4),
                "You put the column number 2n where the pair number n belongs: your exponent is -4n/dim."),
        Mistake("one frequency for all", _variant(angle=lambda p, w: p[:, None] + 0 * w),
                "All your pairs turn by the position in radians. Pair n turns by the position times ITS frequency."),
        Mistake("added instead of rotated", lambda x, p, b: x + _table(p, x.shape[-1], b),
                "You added a table of cosines and sines to x. That is lesson 03's way. Here the table multiplies: "
                "cosine and sine of a pair mix its two features."),
        Mistake("multiplied by the table", lambda x, p, b: x * _table(p, x.shape[-1], b),
                "You multiplied x by the table entry by entry, so the two features of a pair never mix. A rotation has "
                "four products for a pair."),
        Mistake("overwritten before it was read", _overwritten,
                "Your first line is right, but the second one reads first features that the first line has already "
                "overwritten: x[..., 0::2] is a view, not a copy. Write both results into a new array."),
        Mistake("row number as position", lambda x, p, b: _turned(x, np.arange(len(p)), b),
                "You turned row 0, 1, 2, ... by its row number. The positions are given, and they need not start at 0 "
                "or be neighbours (a decoder's newest token is alone in its tensor)."),
        Mistake("the head's number as position", _variant(axis=-3),
                "You turned each HEAD by its own number: your angles lie along the heads' axis. With as many heads as "
                "positions nothing complains. Angles of shape (length, dim/2) fit the end of x's shape by themselves."),
    ])

check_order = Exercise(
    right=lambda dim: np.r_[0:dim:2, 1:dim:2],
    probes=[(8,), (6,)],
    praise="First all first partners, then all second ones. Applied to the rows of W_Q and W_K of every head it turns "
           "a model trained with one layout into one for the other, and no output changes.",
    mistakes=[
        Mistake("the inverse", lambda dim: np.argsort(np.r_[0:dim:2, 1:dim:2]),
                "That is the way back, from half-split to interleaved. x[order][n] is x[order[n]]: which OLD feature "
                "must stand at place 0, 1, 2, ...?"),
        Mistake("second partners first", lambda dim: np.r_[1:dim:2, 0:dim:2],
                "Right pairs, but the partners have changed places: the first feature of a pair must land in the first "
                "half, or every pair turns the other way."),
        Mistake("nothing moved", lambda dim: np.arange(dim),
                "That leaves everything in place. In half-split layout feature 1 must be the first feature of pair 1; "
                "where does that stand in the interleaved vector?"),
    ])


def _suspect(x, positions, base=10000.0):
    """Half-split partners with the frequencies of neighbours: a bug."""
    x, d = np.asarray(x, dtype=float), x.shape[-1]
    angle = np.repeat(np.asarray(positions, dtype=float)[:, None] * base ** (-np.arange(0, d, 2) / d), 2, axis=-1)
    partner = np.concatenate([-x[..., d // 2:], x[..., :d // 2]], axis=-1)
    return x * np.cos(angle) + partner * np.sin(angle)


class _Rotation:
    """A rotation to be tested, rotate(x, positions), with a name for messages."""

    def __init__(self, name, function):
        self.name, self.function = name, function

    def __call__(self, x, positions):
        return self.function(np.asarray(x, dtype=float), np.asarray(positions))

    def __repr__(self):
        return self.name


def squared(x, positions, base=10000.0):
    """A rotation by frequency times position SQUARED: keeps lengths, but its scores are not relative."""
    return _turned(x, positions, base, angle=lambda p, w: p[:, None] ** 2 * w)


def _scores(rotation, positions, shift, offset):
    """Scores of a fixed q and k at (p + shift, p + shift + offset) for each p."""
    q, k = np.random.default_rng(7).normal(size=(2, 1, 16))
    positions = np.asarray(positions) + shift
    rows = (len(positions), 1)
    return (rotation(np.tile(q, rows), positions) * rotation(np.tile(k, rows), positions + offset)).sum(axis=-1)


def _is_relative(rotation) -> bool:
    return all(np.ptp(_scores(rotation, np.arange(40), 0, offset)) < 1e-9 for offset in (0, 1, 5))


def _keeps_lengths(rotation) -> bool:
    x = np.random.default_rng(8).normal(size=(20, 16))
    return np.allclose(np.linalg.norm(rotation(x, np.arange(20)), axis=-1), np.linalg.norm(x, axis=-1))


def _like_the_library(rotation) -> bool:
    x = np.random.default_rng(9).normal(size=(20, 16))
    return np.allclose(rotation(x, np.arange(20)), _turned(x, np.arange(20), 10000.0))


check_is_relative = Exercise(
    right=_is_relative,
    probes=[(_Rotation("the interleaved rotation", lambda x, p: _turned(x, p, 10000.0)),),
            (_Rotation("the half-split rotation", lambda x, p: _turned(x, p, 10000.0, layout="half")),),
            (_Rotation("the clockwise rotation", lambda x, p: _turned(x, p, 10000.0, sign=-1)),),
            (_Rotation("the suspect", _suspect),),
            (_Rotation("a rotation by position squared", squared),)],
    praise="Your check lets every real RoPE pass, in either layout and direction, and stops the suspect and a rotation "
           "by squared positions, which keeps all lengths. It needs no reference implementation: it tests the property "
           "itself.",
    mistakes=[
        Mistake("lengths, or offset 0", _keeps_lengths,
                "You tested lengths, or scores at offset 0, which is the same thing. That stops the suspect, but a "
                "rotation by the position SQUARED keeps lengths too. Compare scores at two places with the same "
                "offset, other than 0."),
        Mistake("compared with one implementation", _like_the_library,
                "You compared the outputs with one particular rotation. A half-split or a clockwise rotation gives "
                "other outputs and is just as relative. Test scores, not vectors."),
        Mistake("everything passes", lambda rotation: True,
                "Your check lets everything pass, also the suspect. At position 0 every candidate leaves x alone, and "
                "every one keeps the shape: look at scores at other positions."),
        Mistake("one pair only", lambda rotation: rotation.function is not squared,
                "Your check lets the suspect pass. With a single pair (dim = 2) the suspect IS right: both features "
                "have the one frequency there is. Use vectors of 8 features or more."),
        Mistake("nothing passes", lambda rotation: False,
                "Your check stops everything, also true rotations. Did you compare scores at DIFFERENT offsets, or "
                "offset 5 with offset -5? Those may differ. Or did you use == instead of np.allclose?"),
    ])

_PADDED = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1], [0, 0, 0, 0, 1]], dtype=torch.bool)


def _counted(mask):
    return mask.long().cumsum(-1)


check_positions = Exercise(
    right=lambda mask: (_counted(mask) - 1).clamp(min=0),
    integers=True,
    probes=[(_PADDED,), (_PADDED[1:, 1:],)],
    praise="Each row counts its own real tokens from 0. Row by row the next position is simply the number of real "
           "tokens so far, which is what a decoding step needs.",
    mistakes=[
        Mistake("column numbers", lambda mask: torch.arange(mask.shape[-1]).expand(mask.shape),
                "Those are column numbers: the first real token of a padded row does not get 0. RoPE would forgive it "
                "if everybody did the same, but the exercise asks for the count of real tokens."),
        Mistake("counted from 1", _counted,
                "You count from 1. The first real token has position 0."),
        Mistake("pads below zero", lambda mask: _counted(mask) - 1,
                "Real tokens are right, but padding gets -1, and a position must not be negative. Lift it to 0."),
        Mistake("tokens minus one from the right", lambda mask: mask.flip(-1).long().cumsum(-1).flip(-1) - 1,
                "You count from the right end. Positions grow from left to right."),
        Mistake("column numbers, pads 0", lambda mask: torch.arange(mask.shape[-1]) * mask,
                "Padding gets 0, but real tokens still have their column numbers. Count only what is real: a running "
                "sum of the mask."),
    ])

guess_direction = Guess(a="The same as before.", b="What offset -5 gave before: the offset changes its sign.",
                        c="Something that depends on the positions.")
guess_values = Guess(a="Yes: otherwise the output does not know where the values came from.",
                     b="No: the output would then depend on absolute positions.",
                     c="It makes no difference, since the softmax has normalised the weights.")
guess_layout = Guess(a="It stops with an error.", b="It runs; scores are wrong, but still depend on the offset only.",
                     c="It runs; scores are wrong and depend on absolute positions too.")
guess_suspect = Guess(a="All four pass: the suspect is right.", b="Only D fails.", c="C and D fail.",
                      d="B, C and D fail.")
guess_padding = Guess(a="Yes: its tokens are now at the wrong positions.", b="No.",
                      c="Only slightly, since two positions are few.")
guess_half = Guess(a="257", b="2049", c="65 537")
guess_unrelated = Guess(a="It falls as for q = k, only lower.", b="It is zero at every distance.",
                        c="It grows with the distance.")
