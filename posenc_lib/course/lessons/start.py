"""Lesson 00: how does the course work, and is my environment ready?"""
import numpy as np
from matplotlib.patches import FancyBboxPatch

from .. import style
from ..check import Exercise, Guess, Mistake
from ..explorer import Scene, Slider


def _box(ax, x, y, width, height, text, colour=style.LIGHT, **options):
    """A rounded box with centred text; x, y is its middle."""
    ax.add_patch(FancyBboxPatch((x - width / 2, y - height / 2), width, height, facecolor=colour, edgecolor=style.GREY,
                                lw=1, boxstyle="round,pad=0.02,rounding_size=0.1"))
    ax.text(x, y, text, ha="center", va="center", **options)


def _arrow(ax, start, end, colour=style.GREY, **options):
    ax.annotate("", xy=end, xytext=start, arrowprops={"arrowstyle": "-|>", "color": colour, "lw": 1.4} | options)


@style.drawing
def draw_transformer() -> style.Picture:
    """A Transformer as the course sees it: where tokens mix, and where position can get in."""
    fig = style.figure(8, 2.9)
    ax = fig.subplots()
    ax.set(xlim=(0, 8), ylim=(0, 2.9))
    ax.axis("off")
    blocks = [(0.85, "tokens", "dog\nbites\nman"), (2.35, "one vector each", "token\nvectors"),
              (4.35, "tokens meet here", "attention"), (5.95, "each token alone", "feed-\nforward"),
              (7.3, "", "next\nlayer")]
    for x, below, text in blocks:
        _box(ax, x, 1.5, 1.05, 1.0, text, colour=style.SKY if text == "attention" else style.LIGHT,
             weight="bold" if text == "attention" else "normal")
        ax.text(x, 0.83, below, ha="center", va="top", fontsize=9, color=style.GREY)
    for (left, *_), (right, *_) in zip(blocks, blocks[1:]):
        _arrow(ax, (left + 0.57, 1.5), (right - 0.57, 1.5))
    for x, target, text in ((3.3, (3.3, 1.55), "position as a label:\nabsolute"),
                            (4.35, (4.35, 2.06), "position as an offset:\nrelative")):
        ax.text(x - (0.35 if x < 4 else -0.55), 2.83, text, ha="center", va="top", color=style.VERMILION, fontsize=10)
        _arrow(ax, (x, 2.4), target, style.VERMILION)
    ax.annotate("", xy=(3.78, 0.5), xytext=(6.5, 0.5), arrowprops={"arrowstyle": "-", "color": style.GREY, "lw": 1.2})
    ax.text(5.14, 0.43, "one layer, repeated many times", ha="center", va="top", fontsize=9, color=style.GREY)
    return style.Picture(fig, """Block diagram from left to right: the tokens dog, bites, man become one vector each,
        pass through attention, where tokens meet, and through a feed-forward network, which handles each token
        alone; such layers repeat. Two red arrows show where position can enter: as a label added to the token vectors
        before the first layer (absolute), or as an offset inside attention (relative).""")


@style.drawing
def draw_absolute_and_relative(length: int = 5) -> style.Picture:
    """Left: a label for every token. Right: an offset for every pair of tokens."""
    fig = style.figure(8, 3.1)
    left, right = fig.subplots(1, 2, width_ratios=[1.35, 1])
    words = ["the", "dog", "bites", "the", "man"][:length]
    left.set(xlim=(-0.6, length - 0.4), ylim=(-0.9, 2.2), title="absolute: a label on every token")
    left.axis("off")
    for p, word in enumerate(words):
        _box(left, p, 0.2, 0.72, 0.55, word)
        _box(left, p, 1.35, 0.5, 0.5, str(p), colour=style.YELLOW, weight="bold")
        _arrow(left, (p, 1.08), (p, 0.5))
    left.text((length - 1) / 2, -0.55, "the same word at places 0 and 3 becomes two different inputs", ha="center",
              fontsize=9, color=style.GREY)
    offsets = np.arange(length)[None, :] - np.arange(length)[:, None]
    style.heat_axes(right).imshow(offsets, vmin=1 - length, vmax=length - 1, aspect="equal")
    for i, j in np.ndindex(offsets.shape):
        right.text(j, i, f"{offsets[i, j]:+d}" if offsets[i, j] else "0", ha="center", va="center", fontsize=10,
                   color="white" if offsets[i, j] < 1 else style.INK)
    right.set(title="relative: an offset for every pair", xticks=range(length), yticks=range(length))
    right.set_xticklabels(words, fontsize=9)
    right.set_yticklabels(words, fontsize=9)
    right.set(xlabel="key j", ylabel="query i")
    return style.Picture(fig, f"""Left: five words in a row, each with a label from 0 to {length - 1}. Right:
        a table with the words as rows (query i) and columns (key j); each entry is the offset j - i: 0 on the
        diagonal, positive to its right, negative to its left, the same along every diagonal.""")


class TurnScene(Scene):
    """Two angles, their complex numbers, and what becomes of the sine when the angles are added."""
    controls = {
        "alpha": Slider(-180, 175, 40, step=5, label="angle α", help="first angle, in degrees"),
        "beta": Slider(-180, 175, 75, step=5, label="angle β", help="second angle, in degrees"),
    }
    size = (8.0, 3.6)
    BARS = ("sin α cos β", "cos α sin β", "their sum = sin(α+β)", "sin α + sin β (no!)")

    def build(self):
        circle, bars = self.figure.subplots(1, 2, width_ratios=[1, 1.25])
        turn = np.linspace(0, 2 * np.pi, 181)
        circle.plot(np.cos(turn), np.sin(turn), color=style.LIGHT, lw=1)
        circle.axhline(0, color=style.LIGHT, lw=0.8)
        circle.axvline(0, color=style.LIGHT, lw=0.8)
        circle.set(xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal", title="on the unit circle",
                   xticks=[-1, 0, 1], yticks=[-1, 0, 1], xlabel="cosine (real part)", ylabel="sine (imaginary part)")
        self.hands, self.names = [], []
        for colour, name in ((style.BLUE, "α"), (style.ORANGE, "β"), (style.VERMILION, "α+β")):
            self.hands += circle.plot([0, 1], [0, 0], color=colour, lw=3, solid_capstyle="round")
            self.names.append(circle.text(0, 0, name, color=colour, ha="center", va="center", weight="bold"))
        places = np.arange(len(self.BARS))[::-1]
        colours = (style.SKY, style.SKY, style.VERMILION, style.GREY)
        self.bars = bars.barh(places, np.zeros(len(places)), color=colours, height=0.6)
        bars.axvline(0, color=style.GREY, lw=0.8)
        bars.set(xlim=(-2.1, 2.1), ylim=(-0.6, 3.6), yticks=places, yticklabels=self.BARS, xlabel="value",
                 title="the sine of a sum")
        self.layer(*self.bars, *self.hands, *self.names, on=("alpha", "beta"))

    def update(self, alpha, beta):
        a, b = np.deg2rad([alpha, beta])
        for hand, name, angle, reach, out in zip(self.hands, self.names, (a, b, a + b), (1, 1, 0.8), (1.16, 1.42, 1.3)):
            hand.set_data([0, reach * np.cos(angle)], [0, reach * np.sin(angle)])
            name.set_position((out * np.cos(angle), out * np.sin(angle)))
        values = (np.sin(a) * np.cos(b), np.cos(a) * np.sin(b), np.sin(a + b), np.sin(a) + np.sin(b))
        for bar, value in zip(self.bars, values):
            bar.set_width(value)

    def describe(self, alpha, beta):
        a, b = np.deg2rad([alpha, beta])
        return (f"α = {alpha}°, β = {beta}°. Multiplying the two complex numbers gives the hand at {alpha + beta}°. "
                f"sin(α+β) = {np.sin(a + b):.3f} is the sum of the two products {np.sin(a) * np.cos(b):.3f} and "
                f"{np.cos(a) * np.sin(b):.3f}; sin α + sin β would be {np.sin(a) + np.sin(b):.3f}.")


_rng = np.random.default_rng(0)
_PAIRS = [tuple(_rng.normal(size=(2, 4))) for _ in range(3)]
_SCORES = [(np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 5.0]]),), (_rng.normal(size=(4, 3)),)]
_ANGLES = [(np.sin(a), np.cos(a), np.sin(b), np.cos(b)) for a, b in _rng.uniform(-3, 3, size=(4, 2))]


def _softmax(x, axis=-1):
    weights = np.exp(x - x.max(axis=axis, keepdims=True))
    return weights / weights.sum(axis=axis, keepdims=True)


check_cosine = Exercise(
    right=lambda a, b: a @ b / np.linalg.norm(a) / np.linalg.norm(b),
    probes=_PAIRS,
    praise="The length of the vectors is out, only the angle between them is left: 1 for the same direction, 0 for a "
           "right angle, -1 for opposite directions.",
    mistakes=[
        Mistake("the angle", lambda a, b: np.arccos(a @ b / np.linalg.norm(a) / np.linalg.norm(b)),
                "That is the angle itself, in radians. Its cosine is asked for, which is one step less."),
        Mistake("plain dot product", lambda a, b: a @ b,
                "That is the dot product itself. It grows with the vectors' lengths; divide by both of them."),
        Mistake("only one length", lambda a, b: a @ b / np.linalg.norm(a),
                "You divided by the length of a only, so a longer b still gives a larger answer."),
        Mistake("squared lengths", lambda a, b: a @ b / (a @ a) / (b @ b),
                "a @ a is the squared length. Take its square root, or use np.linalg.norm."),
        Mistake("element by element", lambda a, b: a * b,
                "a * b multiplies element by element and leaves a vector. A dot product adds them up: a @ b."),
    ])

check_softmax = Exercise(
    right=_softmax,
    probes=_SCORES,
    praise="Every row is positive and sums to 1. Adding one constant to a whole row would not change it, which "
           "lesson 09 will use.",
    mistakes=[
        Mistake("not normalised", np.exp, "The exponentials are right; now each row must be divided by its sum."),
        Mistake("wrong axis", lambda x: _softmax(x, axis=0),
                "Your columns sum to 1. In attention a row belongs to one query, and it is the row that must sum "
                "to 1 (axis=-1, and keepdims=True so that shapes fit)."),
        Mistake("whole matrix", lambda x: np.exp(x) / np.exp(x).sum(),
                "You divided by the sum over the whole matrix. Each row is a distribution of its own."),
        Mistake("no exponential", lambda x: x / x.sum(axis=-1, keepdims=True),
                "You divided the scores by their sum. Scores may be negative: take exp first."),
    ])

check_sum = Exercise(
    right=lambda sin_a, cos_a, sin_b, cos_b: sin_a * cos_b + cos_a * sin_b,
    probes=_ANGLES,
    praise="The angle of a sum, made from the two angles' sines and cosines alone. Lesson 05 is this line, "
           "written as a matrix.",
    mistakes=[
        Mistake("the whole product", lambda sin_a, cos_a, sin_b, cos_b: (cos_a + 1j * sin_a) * (cos_b + 1j * sin_b),
                "That is the whole complex number. The sine is one of its two parts; which?"),
        Mistake("added", lambda sin_a, cos_a, sin_b, cos_b: sin_a + sin_b,
                "Sine is not additive: sin(90°) + sin(90°) would be 2, and no sine is. Use all four numbers."),
        Mistake("minus", lambda sin_a, cos_a, sin_b, cos_b: sin_a * cos_b - cos_a * sin_b,
                "That is sin(α - β): the sign between the products is the sign between the angles."),
        Mistake("cosine of the sum", lambda sin_a, cos_a, sin_b, cos_b: cos_a * cos_b - sin_a * sin_b,
                "That is cos(α + β), the real part. The sine is the imaginary part of the product."),
        Mistake("product of sines", lambda sin_a, cos_a, sin_b, cos_b: sin_a * sin_b + cos_a * cos_b,
                "That is cos(α - β). In the sine of a sum every product mixes one sine with one cosine."),
    ])

guess_softmax = Guess(a="The largest weight grows.", b="All weights grow.", c="Nothing changes.")
