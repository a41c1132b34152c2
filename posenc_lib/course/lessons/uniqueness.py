"""Lesson 04: how can periodic functions label positions uniquely?"""
import functools
import itertools

import numpy as np
import torch

from posenc_lib import complex_encoding, encoding_distance, frequencies, sinusoidal_encoding

from .. import style
from ..check import Exercise, Guess, Mistake
from ..explorer import Choice, LogSlider, Scene, Slider

LENGTH = 2000                                        # positions 0 .. 1999 wherever the lesson says "2000 positions"
FLOOR = 2e-5                                         # bottom of the logarithmic distance axes; zeros are drawn there


def distances(length: int, d_model: int, base: float = 10000.0) -> np.ndarray:
    """Distance of two codes for the offsets 1 .. length - 1, shape (length - 1,)."""
    return encoding_distance(torch.arange(1, length), d_model, base).numpy()


def _wrapped(angle):
    """The same angles between -pi and pi."""
    return (np.asarray(angle) + np.pi) % (2 * np.pi) - np.pi


def _distance_axis(ax, top):
    """A logarithmic axis from FLOOR to `top`, with a few plain tick labels, which are also quick to draw."""
    ax.set(ylim=(FLOOR, top), yticks=[1e-4, 1e-2, 1], yticklabels=["0.0001", "0.01", "1"])
    ax.minorticks_off()


def _equal_axes(ax, reach):
    ax.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")


@style.drawing
def draw_circle_and_torus(d_model: int = 8, near: tuple = (44, 63)) -> style.Picture:
    """Positions 0 .. near[0] on the circle of pair 0; positions 0 .. near[1] by the angles of pairs 0 and 1."""
    fig = style.figure(8, 4.1)
    circle, torus = fig.subplots(1, 2)
    z = complex_encoding(near[0] + 1, 2).numpy()[:, 0]
    circle.plot(*np.array([(np.cos(t), np.sin(t)) for t in np.linspace(0, 2 * np.pi, 200)]).T, color=style.LIGHT, lw=1)
    circle.plot(z.real[:-1], z.imag[:-1], "o", color=style.BLUE, ms=4)
    circle.plot(z.real[-1], z.imag[-1], "o", mfc="none", mec=style.VERMILION, mew=1.8, ms=10)
    for p in range(7):
        circle.text(1.14 * z.real[p], 1.14 * z.imag[p], p, ha="center", va="center", weight="bold")
    circle.text(0.93, 0, f"{near[0]}", color=style.VERMILION, ha="right", va="center", weight="bold")
    circle.set(title=f"pair 0: positions 0 to {near[0]}", xlabel="cosine", ylabel="sine", xticks=[-1, 0, 1],
               yticks=[-1, 0, 1])
    _equal_axes(circle, 1.3)

    x, y = _wrapped(np.arange(near[1] + 1)[:, None] * frequencies(d_model).numpy()[:2]).T
    torus.plot(x[:-1], y[:-1], "o", color=style.BLUE, ms=4)
    torus.plot(x[-1], y[-1], "o", mfc="none", mec=style.VERMILION, mew=1.8, ms=10)
    for p in (0, 1, 2, 3):
        torus.text(x[p], y[p] + 0.24, p, ha="center", va="center", weight="bold")
    torus.text(x[-1] + 0.1, y[-1] - 0.34, f"{near[1]}", color=style.VERMILION, ha="center", va="center", weight="bold")
    torus.set(title=f"pairs 0 and 1: positions 0 to {near[1]}", xlabel="angle of pair 0", ylabel="angle of pair 1",
              xticks=[-np.pi, 0, np.pi], xticklabels=["-π", "0", "π"], yticks=[-np.pi, 0, np.pi],
              yticklabels=["-π", "0", "π"])
    torus.spines[:].set_visible(True)
    _equal_axes(torus, np.pi)
    return style.Picture(fig, f"""Left: a unit circle with the positions 0 to {near[0]} as dots, one radian apart, so
        that they wind round it {near[0] // 6} times; position {near[0]}, ringed, lies almost on position 0. Right: a
        square, both angles from minus pi to pi; the positions climb it in slanted rows, the first angle ten times
        faster than the second; position {near[1]}, ringed, lies just beside position 0 in the middle.""")


@style.drawing
def draw_distances(widths=(2, 8, 64), length: int = LENGTH, base: float = 10000.0) -> style.Picture:
    """Distance between two codes against their offset, one panel a width, the smallest ringed."""
    fig = style.figure(8, 3.3)
    found = []
    for ax, d_model in zip(fig.subplots(1, len(widths), sharey=True), widths):
        d = distances(length, d_model, base)
        nearest = int(d.argmin()) + 1
        found.append(f"for d_model {d_model} at offset {nearest} with {d.min():.3g}")
        ax.semilogy(np.arange(1, length), d, ".", color=style.BLUE, ms=2)
        ax.semilogy(nearest, d.min(), "o", mfc="none", mec=style.VERMILION, mew=1.8, ms=9)
        right = nearest > length / 2
        ax.annotate(f"offset {nearest}", (nearest, d.min()), (-10 if right else 10, -4), textcoords="offset points",
                    color=style.VERMILION, weight="bold", ha="right" if right else "left")
        ax.set(title=f"d_model = {d_model}", xlabel="offset k", xlim=(-40, length),
               xticks=[0, length // 2, length])
        _distance_axis(ax, 60)
        if ax.get_subplotspec().is_first_col():
            ax.set_ylabel("distance D(k)")
    return style.Picture(fig, f"""Distance against offset on a logarithmic axis, {len(widths)} panels. The wider the
        encoding, the narrower and higher the band of points. Smallest distance, ringed: {'; '.join(found)}.""")


REPEATING = 2 * np.pi / np.array([6.25, 25, 100, 400])   # near the wavelengths of d_model 8 with base 256
SINUSOIDAL = frequencies(8, 256.0).numpy()


def _distance(offsets, w):
    """D(k) for any frequencies w."""
    return 2 * np.sqrt((np.sin(np.asarray(offsets)[..., None] * w / 2) ** 2).sum(-1))


@style.drawing
def draw_maps(length: int = LENGTH) -> style.Picture:
    """Angle maps of two codes of four pairs, one of which repeats; and the magnitude map of either."""
    fig = style.figure(8, 3.6)
    panels = fig.subplots(1, 3, sharey=True)
    positions = np.arange(length)[:, None]
    turns = positions * SINUSOIDAL, positions * REPEATING, None
    for ax, angle, title in zip(panels, turns, ("code A: angles", "code B: angles", "A or B: magnitudes")):
        values, limits = (np.ones((length, 4)), (0, 2)) if angle is None else (_wrapped(angle), (-np.pi, np.pi))
        image = style.heat_axes(ax).imshow(values, vmin=limits[0], vmax=limits[1])
        ax.set(title=title, xlabel="pair i", xticks=range(4))
        if ax is not panels[0]:
            bar = fig.colorbar(image, ax=ax, ticks=[0, 1, 2] if angle is None else [-np.pi, 0, np.pi])
            if angle is not None:
                bar.ax.set_yticklabels(["-π", "0", "π"])
    panels[0].set_ylabel("position p")
    return style.Picture(fig, f"""Three heat maps of {length} positions by 4 pairs. The two angle maps look alike:
        stripes, coarsest in pair 3. Pair 0 turns fastest, and yet its stripes look wider than those of pair 1. The
        magnitude map is one even colour: every magnitude is 1.""")


@style.drawing
def draw_map_distances(length: int = LENGTH) -> style.Picture:
    """Distance against offset for the two codes of `draw_maps`."""
    fig = style.figure(8, 3)
    offsets = np.arange(1, length)
    least = []
    for ax, w, name in zip(fig.subplots(1, 2, sharey=True), (SINUSOIDAL, REPEATING), "AB"):
        d = _distance(offsets, w)
        d[d < 1e-9] = 0                              # 400 turns of rounding leave some 1e-13
        least.append(d.min())
        ax.semilogy(offsets, np.maximum(d, FLOOR), ".", color=style.BLUE, ms=2)
        zero = offsets[d == 0]
        ax.semilogy(zero, np.full(len(zero), FLOOR), "v", color=style.VERMILION, ms=10, clip_on=False)
        ax.set(title=f"code {name}", xlabel="offset k", xticks=range(0, length + 1, 400))
        _distance_axis(ax, 10)
        if len(zero):
            ax.text(zero[0] + 30, 1.9 * FLOOR, "distance 0: the same code", color=style.VERMILION)
        if name == "A":
            ax.set_ylabel("distance D(k)")
    return style.Picture(fig, f"""Distance against offset on a logarithmic axis. Code A never comes nearer than
        {least[0]:.3g}. Code B drops to exactly 0 at the offsets 400, 800, 1200 and 1600.""")


FORMATS = {"exact": None, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WIDTHS = (2, 4, 8, 16, 32, 64, 128, 256, 512)


@functools.lru_cache(maxsize=1)
def _codes(d_model, base, stored) -> tuple[np.ndarray, int]:
    """The codes (LENGTH, d_model) after rounding to a number format, and how many of them differ."""
    codes = sinusoidal_encoding(LENGTH, d_model, base, dtype=FORMATS[stored]).float().numpy() + 0.0    # no -0.0
    return codes.astype(float), len({row.tobytes() for row in codes})


@functools.lru_cache(maxsize=1)
def _by_offset(d_model, base) -> np.ndarray:
    return np.r_[0.0, distances(LENGTH, d_model, base)]


@functools.lru_cache(maxsize=1)
def least_by_width(base) -> tuple[np.ndarray, np.ndarray]:
    """For each of WIDTHS the smallest distance in LENGTH positions, and whether an offset other than 1 attains it.

    The frequencies of half the width are every other frequency, so the sines are taken once, for the widest.
    """
    squares = np.sin(np.arange(1, LENGTH)[:, None] * frequencies(WIDTHS[-1], base).numpy() / 2) ** 2
    sums = [squares[:, ::WIDTHS[-1] // width].sum(axis=1) for width in WIDTHS]
    return np.array([2 * np.sqrt(total.min()) for total in sums]), np.array([total.argmin() > 0 for total in sums])


@functools.lru_cache(maxsize=1)
def from_position(position, d_model, base, stored) -> tuple[np.ndarray, np.ndarray, int]:
    """Distances (LENGTH,) from the code of `position` to all, the positions that are nearest, the number of codes."""
    if FORMATS[stored] is None:
        d, different = _by_offset(d_model, base)[np.abs(np.arange(LENGTH) - position)], LENGTH
    else:
        codes, different = _codes(d_model, base, stored)
        gap = codes - codes[position]
        d = np.sqrt(np.einsum("pc,pc->p", gap, gap))
    others = np.delete(np.arange(LENGTH), position)
    return d, others[d[others] == d[others].min()], different


class NearestScene(Scene):
    """Distances from one position's code to all others, the nearest one, and the smallest distance by width."""
    controls = {
        "d_model": Slider(2, 512, 8, step=2, help="width of the encoding: d_model / 2 pairs"),
        "base": LogSlider(0, 6, 10000.0, help="the slowest pair turns almost base times slower than the first"),
        "stored": Choice(tuple(FORMATS), "exact", label="stored as", help="number format the code is rounded to"),
        "position": Slider(0, LENGTH - 1, 1000, help="the position whose code is compared with all others"),
    }
    size = (8.0, 6.4)
    HANDS = 8

    def build(self):
        grid = self.figure.add_gridspec(2, 2, height_ratios=[1.35, 1], width_ratios=[1.1, 1])
        self.top = self.figure.add_subplot(grid[0, :])
        self.widths, self.clocks = self.figure.add_subplot(grid[1, 0]), self.figure.add_subplot(grid[1, 1])
        every = np.arange(LENGTH)
        self.points, = self.top.semilogy(every, np.ones(LENGTH), ".", color=style.BLUE, ms=2.5)
        self.cursor = self.top.axvline(0, color=style.GREY, lw=1)
        self.ring, = self.top.semilogy([0], [1], "o", mfc="none", mec=style.VERMILION, mew=2, ms=10, clip_on=False)
        self.said = self.top.text(1, 1.03, "", transform=self.top.transAxes, ha="right", color=style.VERMILION,
                                  weight="bold")
        self.top.set(ylim=(FLOOR, 60), xlim=(-10, LENGTH + 10), xlabel="other position q", ylabel="distance",
                     title="From the code of p to all others",
                     yticks=[FLOOR, 1e-4, 1e-3, 1e-2, 1e-1, 1, 10],
                     yticklabels=["0", "0.0001", "0.001", "0.01", "0.1", "1", "10"])
        self.top.minorticks_off()

        self.least, = self.widths.loglog(WIDTHS, np.ones(len(WIDTHS)), "o-", color=style.LIGHT, mfc=style.GREEN,
                                         mec=style.GREEN, ms=6)
        self.far, = self.widths.loglog(WIDTHS, np.ones(len(WIDTHS)), "s", color=style.ORANGE, ms=8)
        self.now, = self.widths.loglog([2], [1], "o", mfc="none", mec=style.VERMILION, mew=2, ms=13, clip_on=False)
        self.widths.set(xlabel="d_model", ylabel="smallest distance", xlim=(1.6, 640),
                        title="Nearest pair in 2000 (exact)", xticks=[2, 8, 32, 128, 512],
                        xticklabels=["2", "8", "32", "128", "512"])
        _distance_axis(self.widths, 60)
        for y, colour, marker, text in ((0.94, style.GREEN, "o", "neighbours"), (0.81, style.ORANGE, "s", "far apart")):
            self.widths.plot(0.05, y, marker, color=colour, ms=7, transform=self.widths.transAxes)
            self.widths.text(0.09, y, text, va="center", size=10, transform=self.widths.transAxes)

        turn = np.linspace(0, 2 * np.pi, 90)
        self.centres = [(2.6 * (n % 4), -3.2 * (n // 4)) for n in range(self.HANDS)]
        self.dials, self.hands, self.nearest_hands, self.names = [], [], [], []
        for x, y in self.centres:
            self.dials += self.clocks.plot(x + np.sin(turn), y + np.cos(turn), color=style.GREY, lw=1)
            self.hands += self.clocks.plot([x, x], [y, y + 1], color=style.BLUE, lw=4.5, solid_capstyle="round")
            self.nearest_hands += self.clocks.plot([x, x], [y, y + 1], color=style.VERMILION, lw=1.8)
            self.names.append(self.clocks.text(x, y - 1.15, "pair 0", ha="center", va="top", fontsize=9))
        self.clocks.set(xlim=(-1.1, 8.9), ylim=(-5.3, 1.3), aspect="equal", title="Hands: p blue, nearest red")
        self.clocks.axis("off")

        self.layer(*self.dials, *self.names, on="d_model")
        self.layer(self.least, self.far, self.now, on=("d_model", "base"))
        self.layer(self.points, self.cursor, self.ring, self.said, *self.hands, *self.nearest_hands,
                   on=tuple(self.controls))

    def update(self, d_model, base, stored, position):
        d, nearest, _ = from_position(position, d_model, base, stored)
        shown = np.maximum(d, FLOOR)
        shown[position] = np.nan
        self.points.set_ydata(shown)
        self.cursor.set_xdata([position, position])
        self.ring.set_data(nearest, shown[nearest])
        self.said.set_text(f"nearest: {_listed(nearest, 2)}, distance {d[nearest[0]]:.3g}")

        least, far = least_by_width(base)
        self.least.set_ydata(least)
        self.far.set_ydata(np.where(far, least, np.nan))
        self.now.set_data([d_model], [_by_offset(d_model, base)[1:].min()])

        pairs = np.unique(np.linspace(0, d_model // 2 - 1, self.HANDS).astype(int))
        w = frequencies(d_model, base).numpy()[pairs]
        for n, (x, y) in enumerate(self.centres):
            for artist in (self.dials[n], self.hands[n], self.nearest_hands[n], self.names[n]):
                artist.set_visible(n < len(pairs))
            if n < len(pairs):
                for hand, p in ((self.hands[n], position), (self.nearest_hands[n], nearest[0])):
                    hand.set_data([x, x + np.sin(p * w[n])], [y, y + np.cos(p * w[n])])
                self.names[n].set_text(f"pair {pairs[n]}")

    def describe(self, d_model, base, stored, position):
        d, nearest, different = from_position(position, d_model, base, stored)
        neighbour = min(d[p] for p in (position - 1, position + 1) if 0 <= p < LENGTH)
        codes = "exact numbers" if stored == "exact" else stored
        if d[nearest[0]] == 0:
            found = f"the very same code is shared by {_listed(nearest, 4)}"
        else:
            found = f"the nearest code is that of {_listed(nearest, 4)}, at distance {d[nearest[0]]:.3g}"
        return (f"Position {position} among {style.number(LENGTH)}, d_model {d_model}, base {style.number(base)}, "
                f"codes in {codes}: {found}; the nearer neighbour is at {neighbour:.3g}. "
                f"{style.number(different)} of the {style.number(LENGTH)} codes differ.")


def _listed(positions, most):
    """A few positions in words."""
    if len(positions) > most:
        return f"{len(positions)} positions, the first {positions[0]}"
    names = [str(p) for p in positions]
    return f"position{'s' * (len(names) > 1)} " + " and ".join(names)


def _my_distance(power=2, *, half=0.5, factor=2.0, root=True, repeat=1):
    """D(k) with the places where learners go astray as options."""
    def function(offsets, d_model, base):
        w = np.repeat(base ** (-2 * np.arange(d_model // 2) / d_model), repeat)
        total = (np.abs(np.sin(np.asarray(offsets)[:, None] * w * half)) ** power).sum(axis=1)
        return factor * (np.sqrt(total) if root else total)
    return function


check_distance = Exercise(
    right=_my_distance(),
    probes=[(np.array([0, 1, 44, 63, 710]), 8, 10000.0), (np.arange(6), 64, 100.0), (np.array([-3, 3]), 4, 500.0)],
    praise="No code was built, and none had to be: the distance needs the offset only, and its sign does not matter.",
    mistakes=[
        Mistake("whole angle", _my_distance(half=1.0),
                "You took the sine of the whole angle k w_i. In the last line of the derivation it is the half angle."),
        Mistake("no factor", _my_distance(factor=1.0),
                "Every distance is half of what it should be: each chord is 2 |sin|, not |sin|."),
        Mistake("no root", _my_distance(factor=4.0, root=False),
                "That is the square of the distance. Take the root at the end."),
        Mistake("root of four forgotten", _my_distance(factor=4.0),
                "Twice too large: the 4 of the squared distance comes out of the root as 2."),
        Mistake("chords added", _my_distance(power=1, root=False),
                "You added the chords of the pairs. Pairs are columns of one vector: add the squares, then take the "
                "root, as Pythagoras does."),
        Mistake("a frequency per column", _my_distance(repeat=2),
                "Too large by sqrt(2): you summed over d_model columns. Sine and cosine of a pair are already one "
                "chord; sum over the d_model / 2 pairs."),
    ])

_CODES_UNIQUE = (False, True, False, True, True)
_CODE_HINTS = (
    "(a): both periods are whole numbers of positions, so look for an offset that is a multiple of both.",
    "(b): the two periods fit into each other, but is any whole number of positions a multiple of one of them?",
    "(c): the period is not a whole number, but what about twice the period?",
    "(d): the first pair alone repeats, that is true. Does the code, if the second pair never does?",
    "(e): four copies of one hand tell no more than that hand alone. What does the hand alone tell?",
)
check_unique = Exercise(
    right=list(_CODES_UNIQUE),
    praise="One pair whose period is no fraction of whole numbers is enough. How the periods relate to each other, and "
           "how many there are, plays no part: the tokens stand on whole positions.",
    mistakes=[Mistake(str(answer), list(answer), " ".join(
                  hint for mine, right, hint in zip(answer, _CODES_UNIQUE, _CODE_HINTS) if mine != right))
              for answer in itertools.product((True, False), repeat=5) if answer != _CODES_UNIQUE])

check_period = Exercise(
    right=(7 / (2 * np.pi)) ** 2,
    praise="With this base, about 1.24, pair 1 is back after every 7 positions. It is made from pi and no whole "
           "number, so the proof does not apply to it. Pair 0 still never comes back, so the whole code is unique.",
    mistakes=[
        Mistake("no square", 7 / (2 * np.pi),
                "That is 1 / w_1. For d = 4 and i = 1 the exponent is 2i/d = 1/2: which base has this as its root?"),
        Mistake("inverted", (2 * np.pi / 7) ** 2,
                "You solved w = base**(+1/2). The exponent is negative: w_1 = base**(-1/2)."),
        Mistake("root instead of square", (7 / (2 * np.pi)) ** 0.5,
                "You took the root where the square belongs: base**(1/2) = 1 / w_1."),
        Mistake("no 2 pi", 49,
                "With base 49 the pair needs 7 positions for one radian. Full turns are 2 pi radians."),
        Mistake("the period", 7, "7 is the wavelength you want, and the base is not a wavelength. Start from w_1."),
    ])


def _my_nearest(first=1, beyond=0, *, shift=None, best=np.argmin):
    def function(length, d_model, base):
        offsets = np.arange(first, length + beyond)
        place = int(best(_my_distance()(offsets, d_model, base)))
        return place + (first if shift is None else shift)
    return function


check_nearest = Exercise(
    right=_my_nearest(),
    probes=[(2000, 8, 10000.0), (2000, 16, 10000.0), (710, 2, 10000.0), (711, 2, 10000.0), (2000, 8, 30.0)],
    praise="Searched by offset this is 2000 distances. Comparing all pairs of 2000 positions would be 2 million.",
    mistakes=[
        Mistake("offset 0", _my_nearest(first=0),
                "You found offset 0: every position is nearest to itself. Start at offset 1."),
        Mistake("index for offset", _my_nearest(shift=0),
                "One too small: argmin returns a place in the list, and your list of offsets starts at 1."),
        Mistake("one too many", _my_nearest(beyond=1),
                "You allow an offset of `length`. From position 0 to the last it is only length - 1."),
        Mistake("one too few", _my_nearest(beyond=-1),
                "You leave out the largest offset, length - 1: from the first position to the last."),
        Mistake("farthest", _my_nearest(best=np.argmax), "That is the offset of the largest distance."),
        Mistake("a distance", lambda length, d, base: _my_distance()(np.arange(1, length), d, base).min(),
                "You return the distance. The question is for which offset it occurs."),
    ])

check_float8 = Exercise(
    right=17,
    praise="2**4 = 16 is the last in an unbroken row; 17 is rounded to 16. In `torch.float8_e4m3fn` a text of 18 "
           "tokens has two with the same position.",
    mistakes=[
        Mistake("last exact", 16, "16 = 2**4 still fits. The question is for the first that does not."),
        Mistake("stored bits", 9,
                "You counted the 3 stored bits only. The leading 1 is not stored but counts: 4 significant bits."),
        Mistake("all eight bits", 257,
                "That would be 8 significant bits. Of the 8 stored bits one is the sign and four are the exponent."),
        Mistake("range", 449,
                "448 is the largest number of the format. It misses whole numbers long before its range ends."),
        Mistake("bits minus one", 15, "All whole numbers up to 2**4 fit, 15 included."),
    ])

guess_pair = Guess(a="Yes, every six or seven positions.", b="Yes, but seldom, after 44 or 710 positions, say.",
                   c="No, not one.")
guess_nearest = Guess(a="A neighbour: 999 or 1001.", b="A position far away.",
                      c="None: all codes are equally far apart.")
guess_half = Guess(a="No two: 256 pairs leave room enough.", b="256 and 257.", c="1022 and 1023.")
guess_map = Guess(a="Code A.", b="Code B.", c="The picture cannot tell.")
