"""Lesson 02: why not simply 1, 2, 3, ...?"""
import functools

import numpy as np
from matplotlib.ticker import MaxNLocator

from posenc_lib import frequencies, sinusoidal_encoding, wavelengths

from .. import style
from ..check import Exercise, Guess, Mistake
from ..explorer import LogSlider, Scene, Slider

DIAL = (43200, 3600, 60)               # seconds for one turn of the hour, minute and second hand


def dial(seconds) -> np.ndarray:
    """Degrees clockwise from 12 of hour, minute and second hand; seconds since midnight (...) -> (..., 3)."""
    return np.asarray(seconds)[..., None] % DIAL * 360 / DIAL


@style.drawing
def draw_norms(d_model: int = 512, length: int = 1024) -> style.Picture:
    """How long the position vector is beside a token vector: index in every column, and the code of lesson 03."""
    positions = np.arange(1, length + 1)
    fig = style.figure(8, 3.2)
    ax = fig.subplots()
    ax.loglog(positions, positions * np.sqrt(d_model), color=style.VERMILION)
    ax.axhline(np.sqrt(d_model), color=style.BLUE)
    ax.axhline(np.sqrt(d_model / 2), color=style.GREEN)
    ax.text(length / 8, length / 8 * np.sqrt(d_model) * 1.9, "index", color=style.VERMILION, ha="right", weight="bold")
    ax.text(length, np.sqrt(d_model) * 1.3, "token vector", color=style.BLUE, ha="right", weight="bold")
    ax.text(length, np.sqrt(d_model / 2) * 0.8, "code of lesson 03", color=style.GREEN, ha="right", va="top",
            weight="bold")
    ax.set(xlabel="position", ylabel="length of the vector", xlim=(1, length * 1.1), ylim=(6, 5e4),
           title=f"{d_model} columns")
    return style.Picture(fig, f"""Length of a vector against position, both axes logarithmic. The index, written into
        all {d_model} columns, starts as long as a token vector, about {np.sqrt(d_model):.1f}, and climbs in a straight
        line to {length * np.sqrt(d_model):.0f} at position {length}. Token vectors and the code of lesson 03, with
        {np.sqrt(d_model / 2):.0f}, stay level.""")


@style.drawing
def draw_halves(lengths=(10, 100)) -> style.Picture:
    """Texts of several lengths squeezed onto the same ruler from 0 to 1."""
    fig = style.figure(8, 0.8 + 0.75 * len(lengths))
    ax = fig.subplots()
    for row, length in enumerate(lengths):
        ruler = np.arange(length + 1) / length
        ax.plot([0, 1], [row, row], color=style.LIGHT, lw=1, zorder=0)
        ax.plot(ruler, np.full(length + 1, row), "|", color=style.BLUE, ms=14)
        ax.plot(0.5, row, "o", color=style.VERMILION, ms=9)
        ax.text(0.5, row - 0.28, f"position {length // 2}", ha="center", color=style.VERMILION, weight="bold")
    ax.set(yticks=range(len(lengths)), yticklabels=[f"{length} tokens" for length in lengths],
           xlabel="position / length", ylim=(len(lengths) - 0.6, -0.6))
    ax.spines["left"].set_visible(False)
    ax.tick_params(axis="y", length=0)
    return style.Picture(fig, f"""Rulers from 0 to 1 for texts of {' and '.join(map(str, lengths))} tokens. The longer
        the text, the closer its ticks. Positions {' and '.join(str(n // 2) for n in lengths)} stand at the same place,
        one half.""")


@style.drawing
def draw_circle(theta: float = 2.2) -> style.Picture:
    """A hand on a circle, its two coordinates as waves, and the same wave at two very different speeds."""
    turn = np.linspace(0, 2 * np.pi, 200)
    fig = style.figure(8, 4.6)
    (circle, waves), (near, far) = fig.subplots(2, 2, width_ratios=[1, 1.7], height_ratios=[1.2, 1])
    circle.plot(np.sin(turn), np.cos(turn), color=style.GREY, lw=1)
    hours = np.arange(12) * np.pi / 6
    circle.plot(np.sin(hours), np.cos(hours), ".", color=style.GREY)
    x, y = np.sin(theta), np.cos(theta)
    circle.plot([0, x], [0, y], color=style.INK, lw=2.5)
    circle.plot([x, x], [0, y], color=style.ORANGE, lw=2.5)
    circle.plot([0, x], [0, 0], color=style.BLUE, lw=2.5)
    circle.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), aspect="equal", title="a hand at angle θ")
    circle.axis("off")
    for f, colour, name, at in ((np.sin, style.BLUE, "sin θ", 0.4), (np.cos, style.ORANGE, "cos θ", 0.56)):
        waves.plot(turn, f(turn), color=colour)
        waves.plot(theta, f(theta), "o", color=colour)
        waves.text(at, 1.05, name, color=colour, weight="bold", transform=waves.transAxes)
    waves.axvline(theta, color=style.INK, lw=1)
    waves.set(xlabel="θ (radians)", yticks=[-1, 0, 1], xlim=(0, 2 * np.pi), ylim=(-1.1, 1.1),
              title="its two coordinates")
    for ax, end in ((near, 1), (far, 1000)):
        x = np.linspace(0, end, 2000)
        if end * 100 > 10000:                       # too many waves to draw: what is left is a band
            ax.fill_between([0, end], -1, 1, color=style.SKY, lw=0)
        else:
            ax.plot(x, np.sin(100 * x), color=style.SKY)
        ax.plot(x, np.sin(0.01 * x), color=style.VERMILION, lw=2.2)
        ax.set(xlabel="x", xlim=(0, end), ylim=(-1.1, 1.1), yticks=[-1, 0, 1], title=f"x from 0 to {end}")
    near.text(0.5, 1.07, "sin 100x", color=style.SKY, weight="bold", transform=near.transAxes)
    far.text(0.4, 1.07, "sin 0.01x", color=style.VERMILION, weight="bold", transform=far.transAxes)
    return style.Picture(fig, """Four panels. Top left: a circle with a clock hand, its horizontal and vertical
        coordinate drawn as bars. Top right: the two coordinates against the angle, a sine and a cosine wave. Bottom
        left: for x from 0 to 1, sin 100x makes 16 waves while sin 0.01x stays at zero. Bottom right: for x from 0 to
        1000, sin 0.01x makes one and a half waves while those of sin 100x merge into a solid band.""")


@style.drawing
def draw_dials(moments=("03:15:42", "15:15:42")) -> style.Picture:
    """A twelve-hour dial for each moment of the day, hours, minutes and seconds as on a wall clock."""
    fig = style.figure(2.6 * len(moments), 3)
    turn, said = np.linspace(0, 2 * np.pi, 100), []
    for ax, moment in zip(np.atleast_1d(fig.subplots(1, len(moments))), moments):
        h, m, s = map(int, moment.split(":"))
        degrees = dial(3600 * h + 60 * m + s)
        said.append(f"{moment}: hour hand {degrees[0]:.4g}, minute hand {degrees[1]:.4g}, second hand {degrees[2]:.4g}")
        ax.plot(np.sin(turn), np.cos(turn), color=style.GREY)
        for angle in np.arange(12) * np.pi / 6:
            ax.plot([0.9 * np.sin(angle), np.sin(angle)], [0.9 * np.cos(angle), np.cos(angle)], color=style.GREY)
        for angle, reach, width, colour in zip(np.deg2rad(degrees), (0.5, 0.75, 0.9), (5, 3, 1.5),
                                               (style.INK, style.BLUE, style.VERMILION)):
            ax.plot([0, reach * np.sin(angle)], [0, reach * np.cos(angle)], color=colour, lw=width)
        ax.set(aspect="equal", xlim=(-1.1, 1.1), ylim=(-1.1, 1.1))
        ax.set_title(moment, loc="center")
        ax.axis("off")
    return style.Picture(fig, f"""Clock dials, side by side, angles in degrees clockwise from twelve.
        {'; '.join(said)}.""")


@style.drawing
def draw_periods(components: int = 12) -> style.Picture:
    """Steps for one full round of every bit, every clock hand and every pair of some sinusoids, on a log axis."""
    fig = style.figure(8, 3.6)
    ax = fig.subplots()
    bits = 2.0 ** np.arange(1, components + 1)
    series = [("bits: × 2", bits, style.BLUE, "o"),
              ("clock hands: × 60, × 12", np.array(DIAL[::-1]), style.VERMILION, "D")]
    for d, colour, marker in ((8, style.GREEN, "s"), (64, style.ORANGE, "^"), (512, style.PURPLE, "v")):
        name = f"lesson 03, {d} columns: × {10000 ** (2 / d):.4g}"
        series.append((name, wavelengths(d).numpy()[:components], colour, marker))
    for label, periods, colour, marker in series:
        ax.semilogy(np.arange(len(periods)), periods, marker + "-", color=colour, label=label, lw=1)
    ax.set(xlabel="component, from the fastest", ylabel="positions for one round", xlim=(-0.3, components - 0.5))
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    fig.legend(loc="outside right upper")
    return style.Picture(fig, f"""Positions for one full round against the number of the component, on a logarithmic
        axis. Bits climb in a straight line from 2, doubling. Three clock hands jump from 60 to 3600 to 43200. The code
        of lesson 03 climbs in straight lines from 6.28: steeply with 8 columns, slower than bits with 64, and hardly at
        all with 512 over the first {components} pairs.""")


@functools.lru_cache(maxsize=1)
def _waves(length, d_model, base) -> np.ndarray:
    """The waves that are on screen, (d_model, length); moving the position alone does not compute them again."""
    return sinusoidal_encoding(length, d_model, base).numpy().T


class CodesScene(Scene):
    """Five ways to write a position, above each other, and what each says at one position."""
    controls = {
        "position": Slider(0, 255, 37, help="the position that is read off"),
        "length": Slider(2, 256, 100, help="how many tokens the text has"),
        "d_model": Slider(2, 64, 8, step=2, help="columns of the clock code: d_model / 2 hands"),
        "base": LogSlider(0, 6, 10000.0, help="the slowest hand turns almost base times slower than the first"),
    }
    size = (8.0, 6.6)
    LONGEST, BITS, HANDS = 256, 8, 4

    def build(self):
        grid = self.figure.add_gridspec(5, 2, width_ratios=[2.3, 1], height_ratios=[1, 1, 1, 1.1, 1.6])
        rows = [self.figure.add_subplot(grid[n, 0]) for n in range(5)]
        notes = [self.figure.add_subplot(grid[n, 1]) for n in range(5)]
        index, share, hot, bits, hands = rows
        everywhere = np.arange(self.LONGEST)
        edge = (-0.5, self.LONGEST - 0.5)

        index.plot(everywhere, everywhere, color=style.BLUE)
        index.set(ylim=(0, 255), yticks=[0, 255], ylabel="value")
        self.share, = share.plot([], [], color=style.BLUE)
        share.set(ylim=(0, 1.05), yticks=[0, 1], ylabel="value")
        hot.set_facecolor("#440154")
        hot.plot(everywhere, everywhere, color="#fde725", lw=2)
        hot.set(ylim=(255, 0), yticks=[0, 255], ylabel="column")
        style.heat_axes(bits).imshow(everywhere >> np.arange(self.BITS)[:, None] & 1, vmin=0, vmax=1)
        bits.set(yticks=[0, 7], ylabel="bit")
        self.image = style.heat_axes(hands).imshow(np.zeros((2, self.LONGEST)), vmin=-1, vmax=1)
        hands.set(xlabel="position", ylabel="column")
        hands.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=4))
        self.hands_axes = hands
        for ax in rows:
            ax.set_xlim(edge)
            ax.tick_params(labelbottom=ax is hands)
        for ax, title in zip(rows, ("index", "index / length", "one-hot: a column for each position",
                                    "binary: 8 bits (dark 0, yellow 1)",
                                    "clock hands: two columns for each (dark -1, yellow 1)")):
            ax.set_title(title, fontsize=10.5, pad=3)

        self.covers = [ax.axvspan(0, 1, color="white", zorder=3) for ax in rows]
        self.cursors = [ax.axvline(0, color=style.VERMILION, lw=1.4, zorder=4) for ax in rows]
        for ax in notes:
            ax.axis("off")
        notes[2].text(0, 0.5, "1 at the position,\n0 elsewhere", va="center", transform=notes[2].transAxes)
        self.notes = [notes[n].text(0, 0.5, "", va="center", fontsize=12, transform=notes[n].transAxes)
                      for n in (0, 1, 3)]
        turn = np.linspace(0, 2 * np.pi, 60)
        self.dials, self.hands, self.names, self.centres = [], [], [], [(0, 0), (3, 0), (0, -3.4), (3, -3.4)]
        clocks = notes[4]
        for x, y in self.centres:
            self.dials += clocks.plot(x + np.sin(turn), y + np.cos(turn), color=style.GREY, lw=1)
            self.hands += clocks.plot([x, x], [y, y + 1], color=style.VERMILION, lw=2.4, solid_capstyle="round")
            self.names.append(clocks.text(x, y - 1.15, "hand 0", ha="center", va="top", fontsize=9))
        clocks.set(xlim=(-1.2, 4.2), ylim=(-5.4, 1.2), aspect="equal")

        self.layer(hands.yaxis, *self.dials, *self.names, on="d_model")
        self.layer(self.image, on=("d_model", "base"))
        self.layer(self.share, *self.covers, on="length")
        self.layer(*self.cursors, *self.notes, *self.hands, on="position")

    def shown_hands(self, d_model):
        """Numbers of up to four hands, spread from the first to the last."""
        return np.unique(np.linspace(0, d_model // 2 - 1, self.HANDS).astype(int))

    def update(self, position, length, d_model, base):
        read = min(position, length - 1)
        self.share.set_data(np.arange(length), np.arange(length) / length)
        for cover in self.covers:
            cover.set_x(length - 0.5)
            cover.set_width(self.LONGEST - length)
        for cursor in self.cursors:
            cursor.set_xdata([read, read])
        for note, text in zip(self.notes, (f"{read}", f"{read / length:.4g}", f"{read:08b}")):
            note.set_text(text)

        self.image.set_data(_waves(self.LONGEST, d_model, base))
        self.image.set_extent((-0.5, self.LONGEST - 0.5, d_model - 0.5, -0.5))
        self.hands_axes.set_ylim(d_model - 0.5, -0.5)
        shown = self.shown_hands(d_model)
        angle = read * frequencies(d_model, base).numpy()[shown]
        for n, (x, y) in enumerate(self.centres):
            for artist in (self.dials[n], self.hands[n], self.names[n]):
                artist.set_visible(n < len(shown))
            if n < len(shown):
                self.hands[n].set_data([x, x + np.sin(angle[n])], [y, y + np.cos(angle[n])])
                self.names[n].set_text(f"hand {shown[n]}")

    def describe(self, position, length, d_model, base):
        read = min(position, length - 1)
        beyond = f" (position {position} is beyond its end)" if position > read else ""
        turns = read * frequencies(d_model, base).numpy()[[0, -1]] / (2 * np.pi)
        hands = "1 hand" if d_model == 2 else f"{d_model // 2} hands"
        return (f"Position {read} in a text of {length} tokens{beyond}. Index: {read}. "
                f"Index / length: {read / length:.4g}. One-hot: column {read} of {length}. "
                f"Binary: {read:08b}, the fastest bit last. Clock: {hands} with base {style.number(base)}, "
                f"the first has made {turns[0]:.2f} turns, the last {turns[1]:.4f}.")


def _bits(positions, bits):
    return np.asarray(positions)[:, None] >> np.arange(bits) & 1


check_bits = Exercise(
    right=_bits,
    probes=[(np.arange(6), 3), (np.array([5, 12, 255, 256]), 8)],
    praise="Bit b flips every 2**b positions. With 8 bits, position 256 gets the code of position 0: a counter of "
           "finite width runs over.",
    mistakes=[
        Mistake("highest bit first", lambda p, b: _bits(p, b)[:, ::-1],
                "Your columns run from the slowest bit to the fastest, as one writes binary numbers. Column 0 must be "
                "the fastest bit: 0, 1, 0, 1, ..."),
        Mistake("power left in", lambda p, b: _bits(p, b) * 2 ** np.arange(b),
                "Your columns hold 0 or 2**b (that is what `positions & 2**b` gives). A bit is 0 or 1."),
        Mistake("true or false", lambda p, b: _bits(p, b).astype(bool),
                "True and False: nearly. Turn them into 1 and 0."),
        Mistake("no remainder", lambda p, b: np.asarray(p)[:, None] // 2 ** np.arange(b),
                "You divided by 2**b and kept the whole quotient, so it keeps growing. The bit is what remains of the "
                "quotient when it is divided by 2."),
        Mistake("remainder of 2**b", lambda p, b: np.asarray(p)[:, None] % 2 ** np.arange(b),
                "You took the remainder by 2**b. Bit b is the other way round: divide by 2**b first, then take the "
                "remainder by 2."),
        Mistake("counted from one", lambda p, b: np.asarray(p)[:, None] >> np.arange(1, b + 1) & 1,
                "Your fastest column changes only at every second position: your bits are numbered from 1. Bit 0 "
                "divides by 2**0 = 1."),
        Mistake("bits in rows", lambda p, b: _bits(p, b).T,
                "One row for each position, one column for each bit: transpose."),
    ])


def _clock(positions, periods, *, pairs=(np.sin, np.cos), unit=2 * np.pi, layout=-1):
    angle = unit * np.asarray(positions, dtype=float)[:, None] / np.asarray(periods, dtype=float)
    return np.stack([f(angle) for f in pairs], axis=layout).reshape(len(positions), -1)


check_clock = Exercise(
    right=_clock,
    probes=[(np.arange(5), np.array([60, 3600])), (np.array([11742, 54942, 7]), np.array([60, 3600, 43200]))],
    praise="Each hand is a point on a circle and takes two columns. Lesson 03 keeps this code and changes only the "
           "periods.",
    mistakes=[
        Mistake("degrees", lambda p, T: _clock(p, T, unit=360.0),
                "Your angle is in degrees. np.sin and np.cos take radians: a full turn is 2 pi, not 360."),
        Mistake("no full turn", lambda p, T: _clock(p, T, unit=1.0),
                "After one period your hand has turned by 1 radian. It must have made a full turn, 2 pi radians."),
        Mistake("half a turn", lambda p, T: _clock(p, T, unit=np.pi),
                "After one period your hand has made half a turn: pi radians. A full turn is 2 pi."),
        Mistake("multiplied by the period", lambda p, T: _clock(p, 1 / np.asarray(T, dtype=float)),
                "You multiplied by the period, so each hand makes whole turns at every step and never seems to move. A "
                "long period means a small angle: divide by it."),
        Mistake("cosine first", lambda p, T: _clock(p, T, pairs=(np.cos, np.sin)),
                "Sine and cosine have changed places. Position 0 must read 0, 1, 0, 1, ...: all hands straight up."),
        Mistake("all sines, then all cosines", lambda p, T: _clock(p, T, layout=-2),
                "The numbers are right, their order is not: put the two columns of a hand next to each other."),
        Mistake("sine only", lambda p, T: _clock(p, T, pairs=(np.sin,)),
                "You have one column for each hand. The sine alone, how far right the tip is, does not tell whether "
                "the hand points up or down: it takes both coordinates."),
        Mistake("where the hand is, as a fraction", lambda p, T: np.asarray(p)[:, None] / np.asarray(T) % 1,
                "You give the fraction of the turn, from 0 to 1. At the end of each turn it jumps from 1 back to 0, "
                "though the hand hardly moves. The two coordinates of the tip do not jump."),
    ])

check_repair = Exercise(
    right="a",
    praise="Fixing the divisor makes the code the plain index in other units: 0.5 is position 512 in every text, the "
           "steps are equal - and position 2048 is 2. One divisor for all texts and a bound for all texts exclude "
           "each other.",
    mistakes=[
        Mistake("unique", "b", "With a fixed divisor, 0.5 is position 512 in every text and nothing else. The code has "
                               "become unique."),
        Mistake("same step", "c",
                "Every step is 1/1024 now, in every text. The divisor no longer depends on the length."),
        Mistake("offset", "d", "Moving on by k adds k/1024, everywhere. That rule is as simple as it gets."),
        Mistake("none", "e", "Try a position beyond 1024."),
    ])

check_repeat = Exercise(
    right=120,
    praise="120, the least common multiple. The periods of a wall clock divide each other, so there it is the longest "
           "one. One period that no whole number of steps is a multiple of is enough never to repeat: the fastest "
           "hand of lesson 03 has it.",
    mistakes=[
        Mistake("product", 2880, "After 8 x 12 x 30 steps all hands are back, but not for the first time."),
        Mistake("longest period", 30, "After 30 steps the slow hand is back. Has the hand with period 8 made whole "
                                      "turns then?"),
        Mistake("sum", 50, "Adding periods has no meaning here: all hands turn at the same time. Each must have made a "
                           "whole number of turns."),
        Mistake("two hands", 24, "After 24 steps the two fast hands are back. The third is not."),
        Mistake("two slow hands", 60, "After 60 steps the two slow hands are back. The hand with period 8 has made 7.5 "
                                      "turns."),
        Mistake("a multiple", 240, "At step 240 they are all back, for the second time."),
        Mistake("common divisor", 2, "2 divides all three periods. The question asks what all three periods divide."),
    ])

guess_attend = Guess(a="Anywhere: each head prefers another position.", b="Always the first or the last position.",
                     c="Always its own position.")
guess_half = Guess(a="Position 5 of every text.", b="Position 5 of 10 and position 50 of 100.",
                   c="Nothing: fractions are not allowed.")
guess_dial = Guess(a="Once: three hands fix the moment.", b="Twice.", c="24 times, once an hour.")
guess_best = Guess(a="The index.", b="Binary.", c="The clock.", d="None of the five.")
