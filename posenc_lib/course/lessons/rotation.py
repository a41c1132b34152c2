"""Lesson 05: how does an absolute encoding carry relative position?"""
import functools

import numpy as np
from matplotlib.patches import Polygon

from posenc_lib import frequencies, shift_matrix, sinusoidal_encoding

from .. import style
from ..check import Exercise, Guess, Mistake
from ..explorer import Choice, LogSlider, Scene, Slider


def _tip(angle, radius=1.0):
    """x, y of a clock hand at `angle`: (sin, cos), so angle 0 is 12 o'clock and growing angles go clockwise."""
    return radius * np.sin(angle), radius * np.cos(angle)


def _arc(start, turn, inner=0.34, wind=0.06):
    """Points of a line that winds from angle `start` by `turn`, a little further out with each round."""
    along = np.linspace(0, 1, 200)
    return _tip(start + along * turn, inner + wind * np.abs(turn) / (2 * np.pi) * along)


def _arrow_head(start, turn, size=0.075):
    """Corners (3, 2) of the triangle at the end of `_arc`; too small to see for a turn of less than 0.1 radians."""
    x, y = (values[-1] for values in _arc(start, turn))
    end, size = start + turn, size * min(1, abs(turn) / 0.3) * (abs(turn) > 0.1)
    forward = np.sign(turn) * np.array([np.cos(end), -np.sin(end)])
    outward = np.array(_tip(end))
    return np.array([x, y]) + size * np.array([1.6 * forward, outward, -outward])


@style.drawing
def draw_quarter_turns(starts=(2, 8), hours: int = 3) -> style.Picture:
    """Clock dials on which the hour hand moves `hours` on, from each of `starts`."""
    fig = style.figure(8, 3.4)
    step = 2 * np.pi / 12
    for ax, start in zip(fig.subplots(1, len(starts)), starts):
        turn = np.linspace(0, 2 * np.pi, 200)
        ax.plot(*_tip(turn, 1.0), color=style.GREY, lw=1)
        for hour in range(1, 13):
            x, y = _tip(hour * step, 1.14)
            ax.text(x, y, str(hour), ha="center", va="center",
                    weight="bold" if hour in (start, start + hours) else "normal")
        for hour, colour in ((start, style.BLUE), (start + hours, style.VERMILION)):
            x, y = _tip(hour * step, 0.92)
            ax.plot([0, x], [0, y], color=colour, lw=3, solid_capstyle="round")
        ax.plot(*_arc(start * step, hours * step), color=style.INK, lw=1.4)
        ax.add_patch(Polygon(_arrow_head(start * step, hours * step), color=style.INK))
        ax.set(aspect="equal", xlim=(-1.3, 1.3), ylim=(-1.3, 1.3), title=f"{start} o'clock, {hours} hours later")
        ax.axis("off")
    moves = " and ".join(f"from {start} to {start + hours}" for start in starts)
    return style.Picture(fig, f"""Clock dials with the hour hand before, blue, and after, orange: {moves}. On each
        dial an arrow shows the turn between the two hands: {360 * hours / 12:.0f} degrees clockwise, the same from
        every start.""")


@style.drawing
def draw_logits(offset: int = 3, d_model: int = 64, length: int = 60, seed: int = 0) -> style.Picture:
    """Logits between codes for three projections: none, random, and built to look `offset` positions ahead."""
    codes = sinusoidal_encoding(length, d_model).numpy()
    rng = np.random.default_rng(seed)
    w_q, w_k = rng.normal(size=(2, d_model, d_model)) / np.sqrt(d_model)
    panels = {"raw codes": np.eye(d_model), "random projections": w_q @ w_k.T,
              f"built: look {offset} ahead": shift_matrix(offset, d_model).numpy().T}
    fig = style.figure(8, 3)
    axes = fig.subplots(1, len(panels), sharey=True)
    for ax, (title, product) in zip(axes, panels.items()):
        logits = codes @ product @ codes.T
        style.heat_axes(ax).imshow(logits)
        best = logits.argmax(axis=1)
        ax.plot(best, np.arange(length), ".", color=style.VERMILION, ms=3)
        ax.set(title=title, xlabel="key position")
    axes[0].set_ylabel("query position")
    return style.Picture(fig, f"""Three heat maps of logits, {length} query by {length} key positions, an orange dot on
        the largest logit of each row. Raw codes: stripes along the diagonal, dots on the diagonal. Random projections:
        patches without diagonal stripes, dots in a few columns. Projections built for offset {offset}: the stripes of
        the first map moved {offset} to the right, dots {offset} beside the diagonal.""")


class HandsScene(Scene):
    """One pair as a clock hand at p and at p + k, beside the same turn begun at position 0, and the matrix M_k."""
    controls = {
        "d_model": Slider(4, 512, 16, step=4, help="width of the encoding: d_model / 2 pairs"),
        "base": LogSlider(0, 6, 10000.0, help="the slowest pair turns almost base times slower than the first"),
        "pair": Choice(("first", "second", "middle", "last"), "second", help="which pair of columns is drawn"),
        "position": Slider(0, 200, 10, help="the position p that the move starts from"),
        "offset": Slider(-24, 24, 2, help="how many positions the move goes on (or back)"),
    }
    size = (8.0, 3.9)

    def build(self):
        here, origin, self.words = self.figure.subplots(1, 3, width_ratios=[1, 1, 0.95])
        turn = np.linspace(0, 2 * np.pi, 120)
        self.before, self.after, self.arcs, self.heads = [], [], [], []
        for ax, title in ((here, "from p to p + k"), (origin, "from 0 to k")):
            ax.plot(*_tip(turn), color=style.GREY, lw=1)
            ax.text(0, 1.09, "sin 0, cos 1", ha="center", fontsize=9, color=style.GREY)
            self.before += ax.plot([0, 0], [0, 1], color=style.BLUE, lw=5, solid_capstyle="round", alpha=0.75)
            self.after += ax.plot([0, 0], [0, 1], color=style.VERMILION, lw=2.2, solid_capstyle="round")
            self.arcs += ax.plot([0], [0], color=style.INK, lw=1.3)
            self.heads.append(ax.add_patch(Polygon(np.zeros((3, 2)), color=style.INK)))
            ax.set(aspect="equal", xlim=(-1.12, 1.12), ylim=(-1.12, 1.25), title=title)
            ax.axis("off")
        here.text(0, -1.3, "blue: before", color=style.BLUE, ha="center", weight="bold")
        origin.text(0, -1.3, "orange: after", color=style.VERMILION, ha="center", weight="bold")
        self.words.set(xlim=(0, 1), ylim=(0, 1))
        self.words.axis("off")
        self.which = self.words.text(0, 1.0, "", va="top", linespacing=1.6)
        self.matrix = self.words.text(0, 0.34, "", family="DejaVu Sans Mono", linespacing=1.6)
        self.codes = self.words.text(0, 0.02, "", linespacing=1.6)
        self.layer(self.which, on=("d_model", "base", "pair"))
        self.layer(self.matrix, self.before[1], self.after[1], self.arcs[1], self.heads[1],
                   on=("d_model", "base", "pair", "offset"))
        self.layer(self.codes, self.before[0], self.after[0], self.arcs[0], self.heads[0],
                   on=("d_model", "base", "pair", "offset", "position"))

    def shown(self, d_model, base, pair):
        """Number of the drawn pair and its frequency."""
        last = d_model // 2 - 1
        i = {"first": 0, "second": 1, "middle": (last + 1) // 2, "last": last}[pair]
        return i, float(frequencies(d_model, base)[i])

    def update(self, d_model, base, pair, position, offset):
        i, w = self.shown(d_model, base, pair)
        turn = offset * w
        for n, start in enumerate((position * w, 0.0)):
            for hand, angle in ((self.before[n], start), (self.after[n], start + turn)):
                x, y = _tip(angle)
                hand.set_data([0, x], [0, y])
            self.arcs[n].set_data(*_arc(start, turn))
            self.heads[n].set_xy(_arrow_head(start, turn))
        (a, b), (c, d) = _rotation(turn)
        self.which.set_text(f"pair {i} of 0 .. {d_model // 2 - 1}\nbase {style.number(base)}\nfrequency w = {w:.3g}")
        self.matrix.set_text(f"turn k w = {turn:.3g} rad\n\nmatrix for k = {offset}\n"
                             f"[ {_two(a)}  {_two(b)} ]\n[ {_two(c)}  {_two(d)} ]")
        s, c = _tip(position * w)
        s2, c2 = _tip((position + offset) * w)
        self.codes.set_text(f"p = {position}: ({_two(s)}, {_two(c)})\n"
                            f"p + k = {position + offset}: ({_two(s2)}, {_two(c2)})")

    def describe(self, d_model, base, pair, position, offset):
        i, w = self.shown(d_model, base, pair)
        turn = offset * w
        way = "clockwise" if turn > 0 else "counter-clockwise"
        moves = (f"turns {style.number(abs(turn))} radians ({style.number(abs(turn) / 2 / np.pi)} rounds) {way}"
                 if offset else "does not turn")
        return (f"Pair {i} of d_model {d_model}, base {style.number(base)}, {style.number(w)} radians per position. "
                f"From position {position} to {position + offset} the hand {moves}, exactly as it does from 0 to "
                f"{offset}: the matrix for offset {offset} is the same at every position.")


def _rotation(turn):
    """The 2 x 2 block [[cos, sin], [-sin, cos]]: a clockwise turn in (sin, cos) coordinates."""
    return np.array([[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]])


def _two(value):
    """Two decimals, sign always shown, and never -0.00."""
    return f"{round(float(value), 2) + 0.0:+.2f}"


@functools.lru_cache(maxsize=4)
def _similarity(reach, d_model, base) -> np.ndarray:
    """Dot product of two codes over its largest value, d_model / 2, for the offsets 0 .. reach."""
    return np.cos(np.arange(reach + 1)[:, None] * frequencies(d_model, base).numpy()).mean(axis=1)


@functools.lru_cache(maxsize=1)
def _products(length, d_model, base) -> np.ndarray:
    """Dot products of all pairs of codes over d_model / 2, (length, length)."""
    codes = sinusoidal_encoding(length, d_model, base).numpy()
    return codes @ codes.T / (d_model / 2)


def first_rise(d_model: int, base: float = 10000.0, reach: int = 2000) -> int:
    """Smallest offset at which two codes are more similar than at the offset before."""
    return int(np.argmax(np.diff(_similarity(reach, d_model, base)) > 0)) + 1


class SimilarityScene(Scene):
    """Dot products of all codes as a heat map, and the marked row of it as a curve over the offset."""
    controls = {
        "d_model": Slider(4, 512, 128, step=4, help="width of the encoding: d_model / 2 pairs"),
        "base": LogSlider(0, 6, 10000.0, help="the slowest pair turns almost base times slower than the first"),
        "position": Slider(0, 120, 60, help="the position whose row is drawn as a curve"),
    }
    size = (8.0, 3.9)
    REACH = 120

    def build(self):
        self.heat, self.curve = self.figure.subplots(1, 2, width_ratios=[1, 1.25])
        style.heat_axes(self.heat)
        self.image = self.heat.imshow(np.zeros((self.REACH + 1,) * 2), vmin=-1, vmax=1)
        self.heat.set(xlabel="position q", ylabel="position p", title="All pairs of positions", xticks=[0, 40, 80, 120],
                      yticks=[0, 40, 80, 120])
        self.row = self.heat.axhline(0, color="white", lw=2.5)
        self.row_core = self.heat.axhline(0, color=style.VERMILION, lw=1.2)
        self.curve.set(xlim=(-self.REACH, self.REACH), ylim=(-1.4, 1.08), xlabel="offset q - p",
                       ylabel="dot product / (d_model/2)", title="The marked row, by offset",
                       yticks=[-1, -0.5, 0, 0.5, 1])
        self.curve.axhline(0, color=style.LIGHT, lw=1)
        self.formula = self.curve.plot([0], [0], color=style.LIGHT, lw=4, label="mean of cos(k w)")[0]
        self.rise = self.curve.plot([0, 0], [0, 0], "o", color=style.ORANGE, ms=8, mec=style.INK, label="first rise")[0]
        self.measured = self.curve.plot([0], [0], color=style.VERMILION, lw=1.4, label="this row")[0]
        self.curve.legend(handles=[self.formula, self.measured, self.rise], loc="lower center", ncols=3, fontsize=9,
                          columnspacing=1.0, handlelength=1.4)
        self.layer(self.image, self.formula, on=("d_model", "base"))
        self.layer(self.row, self.row_core, self.measured, on=("d_model", "base", "position"))
        self.layer(self.rise, on=("d_model", "base"))

    def update(self, d_model, base, position):
        products, curve = _products(self.REACH + 1, d_model, base), _similarity(self.REACH, d_model, base)
        self.image.set_data(products)
        self.formula.set_data(np.arange(-self.REACH, self.REACH + 1), np.concatenate([curve[:0:-1], curve]))
        for line in (self.row, self.row_core):
            line.set_ydata([position, position])
        self.measured.set_data(np.arange(self.REACH + 1) - position, products[position])
        rise = first_rise(d_model, base, self.REACH)
        self.rise.set_data([-rise, rise], [curve[rise], curve[rise]])

    def describe(self, d_model, base, position):
        curve, rise = _similarity(self.REACH, d_model, base), first_rise(d_model, base, self.REACH)
        return (f"Dot products of sinusoidal codes, d_model {d_model}, base {style.number(base)}, divided by "
                f"{d_model // 2}. The row of position {position}, drawn over the offset, lies on the one curve that "
                f"all rows share: 1 at offset 0, down to {curve[rise - 1]:.2f} at offset {rise - 1}, the first rise at "
                f"offset {rise}, the lowest value {curve.min():.2f}. Left and right are mirror images.")


def _blocks(offset, d_model, base, entries=lambda c, s: [[c, s], [-s, c]], angle=None):
    """Block-diagonal matrix, with the places where learners go astray as options."""
    matrix = np.zeros((d_model, d_model))
    for i in range(d_model // 2):
        turn = angle(i) if angle else offset * base ** (-2 * i / d_model)
        matrix[2 * i:2 * i + 2, 2 * i:2 * i + 2] = entries(np.cos(turn), np.sin(turn))
    return matrix


def _with_entries(entries):
    return lambda offset, d_model, base: _blocks(offset, d_model, base, entries)


def _half_layout(offset, d_model, base):
    turn = offset * base ** (-2 * np.arange(d_model // 2) / d_model)
    c, s = np.diag(np.cos(turn)), np.diag(np.sin(turn))
    return np.block([[c, s], [-s, c]])


check_shift_matrix = Exercise(
    right=_blocks,
    probes=[(2, 8, 10000.0), (-3, 6, 100.0), (0, 4, 10000.0)],
    praise="Your matrix is the library's shift_matrix, for offsets of either sign. You derived it from two addition "
           "formulas and never mentioned a position.",
    mistakes=[
        Mistake("transposed", _with_entries(lambda c, s: [[c, -s], [s, c]]),
                "Your matrix moves k positions back: the minus sign sits in the upper row. Most textbooks print the "
                "rotation that way, for (cos, sin) coordinates; this encoding puts the sine first. Read the entries "
                "off the two formulas."),
        Mistake("no minus", _with_entries(lambda c, s: [[c, s], [s, c]]),
                "A minus sign is missing: cos(a + b) = cos a cos b MINUS sin a sin b. Without it the matrix is no "
                "rotation."),
        Mistake("sine and cosine swapped", _with_entries(lambda c, s: [[s, c], [c, -s]]),
                "You have sine and cosine of the turn in each other's places. Check with k = 0: moving by nothing must "
                "be the identity matrix."),
        Mistake("sines, then cosines", _half_layout,
                "Right numbers, wrong places: this is the matrix for a code with all sines first. Here columns 2i and "
                "2i+1 are a pair, so the 2 x 2 blocks lie along the diagonal."),
        Mistake("one frequency for all", lambda k, d, b: _blocks(k, d, b, angle=lambda i: k),
                "All your blocks turn by k radians. Pair i turns by k times its own frequency."),
        Mistake("divided by the frequency", lambda k, d, b: _blocks(k, d, b, angle=lambda i: k * b ** (2 * i / d)),
                "Your later pairs turn faster, not slower: the frequency is base to the power MINUS 2i / d_model."),
        Mistake("exponent i / d", lambda k, d, b: _blocks(k, d, b, angle=lambda i: k * b ** (-i / d)),
                "Your exponent is -i / d_model; a 2 is missing. The frequency of pair i is base**(-2i / d_model)."),
        Mistake("column number as pair number", lambda k, d, b: _blocks(k, d, b, angle=lambda i: k * b ** (-4 * i / d)),
                "You put the column number 2i where the pair number i belongs: the exponent is -2i / d_model for "
                "columns 2i and 2i+1."),
    ])


def _composed(code_p, code_k, sign=1, cosine_sign=-1, swap=False):
    """The code of p + k from the codes of p and k; sign = -1 gives p - k."""
    s, c, sk, ck = code_p[0::2], code_p[1::2], sign * code_k[0::2], code_k[1::2]
    pairs = [s * ck + c * sk, c * ck + cosine_sign * s * sk]
    return np.stack(pairs[::-1] if swap else pairs, axis=-1).reshape(-1)


def _composed_by_halves(code_p, code_k):
    n = len(code_p) // 2
    s, c, sk, ck = code_p[:n], code_p[n:], code_k[:n], code_k[n:]
    return np.concatenate([s * ck + c * sk, c * ck - s * sk])


def _code(position, d_model, base=10000.0):
    return sinusoidal_encoding(np.array([position]), d_model, base).numpy()[0].astype(float)


check_compose = Exercise(
    right=_composed,
    probes=[(_code(17, 8), _code(5, 8)), (_code(3, 6, 100.0), _code(40, 6, 100.0))],
    praise="The code of p + k, from two codes and nothing else: you needed neither p nor k, nor the base. Each entry "
           "is a sum of products, so this is multiplication, not addition, of codes.",
    mistakes=[
        Mistake("added", lambda p, k: p + k,
                "You added the two codes. Codes of positions do not add (section 1): even position 0 is not the zero "
                "vector."),
        Mistake("multiplied entry by entry", lambda p, k: p * k,
                "You multiplied entry by entry. Each new entry needs the sine AND the cosine of both codes: write out "
                "the two addition formulas."),
        Mistake("p - k", lambda p, k: _composed(p, k, sign=-1),
                "That is the code of p - k: both signs in front of sin k w are turned round."),
        Mistake("plus in the cosine", lambda p, k: _composed(p, k, cosine_sign=1),
                "Your sines are right, your cosines are not: there is a minus sign in cos(a + b)."),
        Mistake("cosine first", lambda p, k: _composed(p, k, swap=True),
                "You wrote the cosines to the even columns. The sine of p + k belongs to column 2i."),
        Mistake("halves", _composed_by_halves,
                "You took the first half of the code for the sines. Here they are interleaved: sines are [0::2], "
                "cosines [1::2]."),
    ])


def _pair(position, w):
    return np.array([np.sin(position * w), np.cos(position * w)])


def _signed_offset(u, v, w):
    return np.arctan2(v[0] * u[1] - v[1] * u[0], u @ v) / w


check_offset = Exercise(
    right=_signed_offset,
    probes=[(_pair(7, 0.1), _pair(12, 0.1), 0.1), (_pair(12, 0.1), _pair(7, 0.1), 0.1),
            (_pair(300, 0.01), _pair(550, 0.01), 0.01)],
    praise="Two codes give the offset with its sign, wherever they stand. The cosine alone could not: you needed the "
           "sine of the turn too, which is also a sum of products of code entries. Section 7 lets a projection compute "
           "it.",
    mistakes=[
        Mistake("arccos of the dot product", lambda u, v, w: np.arccos(np.clip(u @ v, -1, 1)) / w,
                "The size is right, the sign is lost: the dot product is cos(k w), and the cosine is the same for k "
                "and -k. Use the sine of the turn as well."),
        Mistake("other way round", lambda u, v, w: -_signed_offset(u, v, w),
                "Your sign is turned round: in (sin, cos) coordinates a positive offset turns clockwise."),
        Mistake("not divided by w", lambda u, v, w: w * _signed_offset(u, v, w),
                "That is the angle k w in radians. The question asks for k, in positions."),
        Mistake("arcsin of the cross product", lambda u, v, w: np.arcsin(np.clip(v[0] * u[1] - v[1] * u[0], -1, 1)) / w,
                "arcsin folds turns of more than a quarter back. Sine and cosine together (np.arctan2) settle all four "
                "quarters."),
        Mistake("difference of two angles",
                lambda u, v, w: (np.arctan2(v[0], v[1]) - np.arctan2(u[0], u[1])) / w,
                "You subtracted two angles that np.arctan2 had each folded into one turn, so sometimes a whole turn is "
                "missing. Get sine and cosine of the DIFFERENCE from the formulas, then take one np.arctan2."),
    ])

check_projection = Exercise(
    right=lambda offset, d_model: _blocks(offset, d_model, 10000.0).T,
    probes=[(3, 8), (-2, 6)],
    praise="q = PE(p) W_Q is the code of p + offset, so the raw dot product finds its best partner there. With a "
           "negative offset the head looks back: the matrix has direction, which the raw dot product lacks.",
    mistakes=[
        Mistake("not transposed", lambda k, d: _blocks(k, d, 10000.0),
                "With this matrix the head looks to the other side, at p - offset. M_k acts on columns, from the left; "
                "PE(p) W_Q is a row times a matrix. What happens to a matrix when you write its equation in rows?"),
        Mistake("identity", lambda k, d: np.eye(d),
                "With the identity every position finds itself most similar. The query has to be moved by the offset "
                "first."),
        Mistake("ones beside the diagonal", lambda k, d: np.eye(d, k=k),
                "A matrix with ones beside the diagonal moves the COLUMNS of the code, its features. What has to move "
                "is the position, and that is a rotation in each pair."),
    ])

guess_additive = Guess(a="The plain index f(p) = c p and the sinusoidal code.",
                       b="Only multiples of the plain index, f(p) = c p.",
                       c="Any code whose distances depend on the offset only.")
guess_far = Guess(a="M_98 in place of M_2: it has to know where it starts.", b="The same M_2.",
                  c="M_2 to the power 98, once for every position.")
guess_direction = Guess(a="Clockwise.", b="Counter-clockwise.",
                        c="Clockwise in the fast pairs, counter-clockwise in the slow ones.")
guess_monotone = Guess(a="It falls all the way.", b="It falls at first, then goes up and down.", c="It stays the same.")
guess_random = Guess(a="Yes: the codes' dot product depends on the offset only, and a matrix cannot change that.",
                     b="Yes, but the curve over the offset looks different.",
                     c="No: it now depends on where the two stand.")
