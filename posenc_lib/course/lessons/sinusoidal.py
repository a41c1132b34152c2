"""Lesson 03: what exactly is the sinusoidal encoding?"""
import functools

import numpy as np
from matplotlib.ticker import MaxNLocator

from posenc_lib import frequencies, sinusoidal_encoding, wavelengths

from .. import style
from ..check import Exercise, Guess, Mistake
from ..explorer import LogSlider, Scene, Slider


@style.drawing
def draw_addition(length: int = 16, d_model: int = 60, base: float = 10000.0) -> style.Picture:
    """Token vectors, their encoding and the sum, side by side (length x d_model each)."""
    tokens = np.random.default_rng(0).normal(size=(length, d_model))
    encoding = sinusoidal_encoding(length, d_model, base).numpy()
    fig = style.figure(8, 3)
    panels = fig.subplots(1, 3, sharey=True)
    for ax, values, title in zip(panels, (tokens, encoding, tokens + encoding),
                                 ("token vectors", "+ encoding", "= what layer 1 sees")):
        image = style.heat_axes(ax).imshow(values, vmin=-2, vmax=2)
        ax.set(title=title, xlabel="column")
    panels[0].set_ylabel("position")
    fig.colorbar(image, ax=panels, label="value", shrink=0.9)
    return style.Picture(fig, f"""Three heat maps of {length} positions by {d_model} columns. Left: random token
        vectors, pure noise. Middle: the encoding, waves in the first columns that slow down to the right until the
        columns are constant stripes of 0 and 1. Right: their sum, noise with the stripes shining through.""")


@style.drawing
def draw_encoding(length: int = 256, d_model: int = 512, base: float = 10000.0) -> style.Picture:
    """Heat map of the whole encoding, all sines and all cosines apart so that the frequencies are in order."""
    encoding = sinusoidal_encoding(length, d_model, base, layout="half").numpy()
    fig = style.figure(8, 3.8)
    panels = fig.subplots(1, 2, sharey=True)
    for ax, values, name in zip(panels, (encoding[:, :d_model // 2], encoding[:, d_model // 2:]), ("sin", "cos")):
        image = style.heat_axes(ax).imshow(values, vmin=-1, vmax=1, interpolation="antialiased")
        ax.set(title=f"{name} columns", xlabel="pair i")
    panels[0].set_ylabel("position p")
    fig.colorbar(image, ax=panels, label="value", ticks=[-1, 0, 1])
    return style.Picture(fig, f"""Two heat maps, sines and cosines, of {length} positions by {d_model // 2} pairs. The
        waves are finest at the left edge, fan out into ever wider bands and end at the right in columns that hardly
        change: sines near 0, cosines near 1.""")


@style.drawing
def draw_wavelengths(widths=(8, 64, 512), base: float = 10000.0) -> style.Picture:
    """Wavelength of every pair on a logarithmic axis, for several d_model."""
    fig = style.figure(8, 3.2)
    ax = fig.subplots()
    for d_model, colour, size in zip(sorted(widths, reverse=True), style.COLOURS, (3, 6, 11)):
        pairs = np.arange(d_model // 2)
        ax.semilogy(2 * pairs / d_model, wavelengths(d_model, base), "o", color=colour, ms=size,
                    label=f"d_model = {d_model}")
    ax.axhline(2 * np.pi * base, color=style.GREY, ls="--", lw=1)
    ax.text(0, 2 * np.pi * base * 0.8, f"2π · {base:g}: approached, never reached", va="top", color=style.GREY)
    ax.set(xlabel="2i / d_model, from the first pair to the last", ylabel="wavelength (positions)")
    ax.legend(loc="lower right")
    longest = ", ".join(f"{wavelengths(d, base)[-1]:.0f} for d_model {d}" for d in widths)
    return style.Picture(fig, f"""Wavelength against 2i/d_model on a logarithmic axis. All widths lie on one straight
        line from 6.28 positions upwards; a wider encoding puts more points on it. The last points stop below the dashed
        line at 2 pi times {base:g}: {longest}.""")


@functools.lru_cache(maxsize=1)
def _table(length, d_model, base) -> np.ndarray:
    """The encoding that is on screen; moving the position alone does not compute it again."""
    return sinusoidal_encoding(length, d_model, base).numpy()


class EncodingScene(Scene):
    """Heat map, curves and clock hands of the sinusoidal encoding."""
    controls = {
        "d_model": Slider(4, 512, 64, step=4, help="width of the encoding: d_model / 2 pairs"),
        "base": LogSlider(0, 6, 10000.0, help="the slowest pair turns almost base times slower than the first"),
        "position": Slider(0, 199, 50, help="the position that is read off"),
    }
    size = (8.0, 6.0)
    LENGTH, HANDS = 200, 8

    def build(self):
        grid = self.figure.add_gridspec(2, 2, height_ratios=[1.25, 1], width_ratios=[1.2, 1])
        self.heat = style.heat_axes(self.figure.add_subplot(grid[0, :]))
        self.curves, self.clocks = self.figure.add_subplot(grid[1, 0]), self.figure.add_subplot(grid[1, 1])
        positions = np.arange(self.LENGTH)

        self.image = self.heat.imshow(np.zeros((self.LENGTH, 4)), vmin=-1, vmax=1)
        self.figure.colorbar(self.image, ax=self.heat, label="value", ticks=[-1, 0, 1], pad=0.01)
        self.heat.set(ylabel="position p", xlabel="column", title="The encoding: one row a position")
        self.heat.xaxis.set_major_locator(MaxNLocator(integer=True))
        self.row = self.heat.axhline(0, color="white", lw=2.5)
        self.row_core = self.heat.axhline(0, color=style.VERMILION, lw=1.2)

        self.waves = [self.curves.plot(positions, np.zeros(self.LENGTH), color=colour, **look)[0] for colour, look in
                      zip(style.COLOURS, ({"lw": 0.6, "marker": ".", "ms": 4}, {}, {}))]
        self.curves.set(xlabel="position p", ylabel="value", ylim=(-1.1, 1.1), xlim=(0, self.LENGTH - 1),
                        yticks=[-1, 0, 1], title="Sine of pair")
        self.cursor = self.curves.axvline(0, color=style.VERMILION, lw=1.2)
        self.labels = [self.curves.text(x, 1.045, "", color=wave.get_color(), weight="bold",
                                        transform=self.curves.transAxes)
                       for x, wave in zip((0.36, 0.5, 0.68), self.waves)]

        turn = np.linspace(0, 2 * np.pi, 90)
        self.centres = [(2.6 * (n % 4), -3.2 * (n // 4)) for n in range(self.HANDS)]
        self.dials, self.hands, self.names = [], [], []
        for x, y in self.centres:
            self.dials += self.clocks.plot(x + np.sin(turn), y + np.cos(turn), color=style.GREY, lw=1)
            self.hands += self.clocks.plot([x, x], [y, y + 1], color=style.VERMILION, lw=2.4, solid_capstyle="round")
            self.names.append(self.clocks.text(x, y - 1.15, "pair 0", ha="center", va="top", fontsize=9))
        self.clocks.set(xlim=(-1.1, 8.9), ylim=(-5.3, 1.3), aspect="equal", title="One hand a pair: 0 is up, clockwise")
        self.clocks.axis("off")

        self.layer(self.heat.xaxis, *self.labels, *self.dials, *self.names, on="d_model")
        self.layer(self.image, *self.waves, on=("d_model", "base"))
        self.layer(self.row, self.row_core, self.cursor, *self.hands, on="position")

    def shown_pairs(self, d_model, count):
        """`count` pairs (fewer if there are fewer), spread from the first to the last."""
        return np.unique(np.linspace(0, d_model // 2 - 1, count).astype(int))

    def update(self, d_model, base, position):
        encoding = _table(self.LENGTH, d_model, base)
        self.image.set_data(encoding)
        self.image.set_extent((-0.5, d_model - 0.5, self.LENGTH - 0.5, -0.5))
        self.heat.set_xlim(-0.5, d_model - 0.5)
        for line in (self.row, self.row_core):
            line.set_ydata([position, position])
        self.cursor.set_xdata([position, position])

        shown = self.shown_pairs(d_model if d_model <= 8 else d_model // 2, 3)
        for n, wave in enumerate(self.waves):
            wave.set_visible(n < len(shown))
            self.labels[n].set_text(f"{shown[n]}" if n < len(shown) else "")
            if n < len(shown):
                wave.set_ydata(encoding[:, 2 * shown[n]])

        pairs = self.shown_pairs(d_model, self.HANDS)
        angle = position * frequencies(d_model, base).numpy()[pairs]
        for n, (x, y) in enumerate(self.centres):
            for artist in (self.dials[n], self.hands[n], self.names[n]):
                artist.set_visible(n < len(pairs))
            if n < len(pairs):
                self.hands[n].set_data([x, x + np.sin(angle[n])], [y, y + np.cos(angle[n])])
                self.names[n].set_text(f"pair {pairs[n]}")

    def describe(self, d_model, base, position):
        angle = position * frequencies(d_model, base).numpy()
        turns = angle / (2 * np.pi)
        slowest = wavelengths(d_model, base)[-1]
        return (f"Sinusoidal encoding with d_model {d_model} ({d_model // 2} pairs) and base {style.number(base)}, "
                f"read at position {position}: the first hand has made {turns[0]:.2f} turns, the last {turns[-1]:.4f}. "
                f"The slowest pair needs {style.number(slowest)} positions for one turn.")


def _encoding(positions, d_model, base, *, exponent=lambda i, d: 2 * i / d, pairs=None, layout="interleaved"):
    """The encoding in plain numpy, with the places where learners go astray as options."""
    positions = np.asarray(positions, dtype=float)
    angle = positions[:, None] / base ** exponent(np.arange(d_model // 2), d_model)
    pairs = pairs or (np.sin, np.cos)
    values = np.stack([f(angle) for f in pairs], axis=-1 if layout == "interleaved" else -2)
    return values.reshape(len(positions), d_model)


def _column_as_pair(positions, d_model, base, factor=2):
    column = np.arange(d_model)
    angle = np.asarray(positions, dtype=float)[:, None] / base ** (factor * column / d_model)
    return np.where(column % 2, np.cos(angle), np.sin(angle))


def _variant(**options):
    return lambda positions, d_model, base: _encoding(positions, d_model, base, **options)


check_encoding = Exercise(
    right=_variant(),
    probes=[(np.arange(4), 8, 10000.0), (np.array([0, 3, 500]), 6, 100.0)],
    praise="Your table is the library's table, at every position, width and base tried.",
    mistakes=[
        Mistake("column number as pair number", _column_as_pair,
                "You put the column number where the pair number i belongs: the exponent runs from 0 almost to 2 and "
                "the two columns of a pair get different frequencies. There are only d_model / 2 pairs; columns 2i and "
                "2i+1 share the exponent 2i / d_model. (A common bug in published code: it runs without an error.)"),
        Mistake("column number over d", lambda p, d, b: _column_as_pair(p, d, b, factor=1),
                "The even columns are right, the odd ones are not: your exponent is column / d_model for every column, "
                "so a cosine turns more slowly than the sine beside it. Both columns of pair i need 2i / d_model."),
        Mistake("positions ignored", lambda p, d, b: _encoding(np.arange(len(p)), d, b),
                "You counted 0, 1, 2, ... yourself. Use the positions that were handed over: they may be 0, 3, 500."),
        Mistake("base ignored", lambda p, d, b: _encoding(p, d, 10000.0),
                "You wrote the base 10 000 into the formula. Use the argument base."),
        Mistake("counted from 1", lambda p, d, b: _encoding(np.asarray(p) + 1, d, b),
                "Your positions are one too far. Position 0 must read 0, 1, 0, 1, ..."),
        Mistake("angles only", lambda p, d, b: np.asarray(p, dtype=float)[:, None] / b ** (2 * np.arange(d // 2) / d),
                "These are the angles, one for each pair. Take the sine and the cosine of each."),
        Mistake("exponent i", _variant(exponent=lambda i, d: i),
                "Your exponent is i. It must be 2i / d_model, so that the whole width spans one factor of base."),
        Mistake("exponent i / d", _variant(exponent=lambda i, d: i / d),
                "Your exponent is i / d_model; a 2 is missing. With it the pairs would only reach sqrt(base)."),
        Mistake("exponent over half the pairs", _variant(exponent=lambda i, d: i / max(d // 2 - 1, 1)),
                "Your exponent reaches exactly 1 at the last pair (tensor2tensor does that). The paper divides by "
                "d_model, so the last exponent is (d_model - 2) / d_model."),
        Mistake("multiplied instead of divided", _variant(exponent=lambda i, d: -2 * i / d),
                "Your angles grow with i: you multiply the position by base**(2i / d_model). Divide by it."),
        Mistake("cosine first", _variant(pairs=(np.cos, np.sin)),
                "Sine and cosine have changed places: even columns hold the sine, odd columns the cosine. Position 0 "
                "must read 0, 1, 0, 1, ..."),
        Mistake("sines, then cosines", _variant(layout="half"),
                "The numbers are right, their order is not: you have all sines, then all cosines. That layout exists "
                '(layout="half" in the library), but the paper interleaves them.'),
        Mistake("positions as fractions",
                lambda p, d, b: _encoding(np.asarray(p, dtype=float) / len(p), d, b),
                "You divided the positions by the length. p is the plain integer 0, 1, 2, ...; as a fraction the same "
                "position would get another code in every sentence."),
        Mistake("degrees", lambda p, d, b: _encoding(np.deg2rad(np.asarray(p, dtype=float)), d, b),
                "You converted degrees to radians. p w_i is an angle in radians already."),
    ])

check_longest = Exercise(
    right=lambda d_model, base: 2 * np.pi * base ** ((d_model - 2) / d_model),
    probes=[(512, 10000.0), (8, 10000.0), (64, 500.0)],
    praise="Exactly 2 pi base**((d_model - 2) / d_model): the last pair is number d_model / 2 - 1, not d_model / 2.",
    mistakes=[
        Mistake("2 pi base", lambda d, b: 2 * np.pi * b,
                "2 pi base would be pair number d_model / 2. Pairs are numbered from 0: the last is d_model / 2 - 1."),
        Mistake("no 2 pi", lambda d, b: b ** ((d - 2) / d),
                "That is 1 / w of the last pair, the positions per radian. A full turn is 2 pi radians."),
        Mistake("i / d", lambda d, b: 2 * np.pi * b ** ((d / 2 - 1) / d),
                "A 2 is missing: the exponent of pair i is 2i / d_model."),
        Mistake("2 (d - 1) / d", lambda d, b: 2 * np.pi * b ** (2 * (d - 1) / d),
                "You put the last column number in as i. i numbers the pairs, and the last pair is d_model / 2 - 1."),
        Mistake("exponent (d - 1) / d", lambda d, b: 2 * np.pi * b ** ((d - 1) / d),
                "You numbered the columns, not the pairs: put i = d_model / 2 - 1 into 2i / d_model."),
        Mistake("a frequency", lambda d, b: b ** (-(d - 2) / d),
                "That is the slowest frequency, in radians per position. The wavelength is 2 pi divided by it."),
        Mistake("base", lambda d, b: b,
                "The base alone is no wavelength: which pair is the last, and what is a full turn?"),
    ])

check_base = Exercise(
    right=256,
    praise="base = 256: from pair to pair the frequency shrinks by base**(-2/8), and 256**(-1/4) is 1/4.",
    mistakes=[
        Mistake("the ratio itself", 4,
                "4 is the ratio between neighbouring pairs. The ratio is base**(2 / d_model) with d_model = 8; which "
                "base has 4 as its fourth root?"),
        Mistake("square of the ratio", 16,
                "16 = 4**2 would be right if a pair step were base**(1/2). With d_model = 8 it is base**(2/8)."),
        Mistake("the last divisor", 64, "64 is the last divisor, base**(6/8), not the base itself."),
        Mistake("the usual base", 10000,
                "Base 10000 with d_model = 8 gives 1, 0.1, 0.01, 0.001. This table falls more slowly."),
    ])

check_slow_pair = Exercise(
    right=141,
    praise="From pair 141 on a hand makes less than one turn over 1000 positions: 115 of the 256 pairs, nearly half of "
           "the columns, change only slowly over such a text.",
    mistakes=[
        Mistake("column instead of pair", 282,
                "282 is the sine column of that pair. The question asks for the pair number i."),
        Mistake("cosine column of the pair", 283,
                "283 is the cosine column of that pair. The question asks for the number of the pair."),
        Mistake("one too far", 142, "Pair 142 is slow enough, but so is 141."),
        Mistake("last fast pair", 140,
                "Pair 140 has a wavelength just below 1000: it still completes a turn. Take the next."),
        Mistake("2 pi forgotten", 192,
                "You compared base**(2i / d_model) with 1000. A full turn takes 2 pi times as many positions."),
        Mistake("counted the slow pairs", 115,
                "115 pairs are that slow. The question asks for the number of the first one."),
    ])

check_repair = Exercise(
    right=lambda column, d_model: column / d_model,
    probes=[(0, 8), (2, 8), (6, 8), (100, 512), (510, 512)],
    praise="column / d_model, since the sine column of pair i is column 2i. With it, sine and cosine of a pair turn "
           "together again.",
    mistakes=[
        Mistake("unchanged", lambda c, d: 2 * c / d,
                "That is the exponent of the faulty code. Which pair does column 2 belong to? Its exponent?"),
        Mistake("half of it", lambda c, d: c // 2 / d,
                "c // 2 is the pair number, right. But the exponent of pair i is 2i / d_model; the 2 is missing."),
        Mistake("the cosine column", lambda c, d: (c + 1) / d,
                "That treats the sine column like the one beside it, one further. Start from pair i = c / 2."),
        Mistake("the divisor", lambda c, d: 10000 ** (c / d),
                "That is the whole divisor. Only its exponent is asked for."),
        Mistake("negative", lambda c, d: -c / d,
                "The code divides by 10000 ** exponent, so the exponent is not negative."),
    ])

guess_row = Guess(a="All zeros: nothing has turned yet.", b="0, 1, 0, 1, ...: sines of 0 and cosines of 0.",
                  c="Random numbers, as for any embedding.")
guess_frequencies = Guess(a="8, one for each column.", b="4, one for each pair of columns.", c="1, the base.")
guess_longest = Guess(a="10 000, the base.", b="2 pi times 10 000, about 62 832.", c="A little less than 62 832.")
guess_beyond = Guess(a="It stays about as accurate: the encoding is defined there.",
                     b="It drifts off by a few positions.",
                     c="It is off by hundreds of positions before the end.")
