"""Lesson 07: how is a RoPE model stretched beyond its training length?"""
import copy
import math

import numpy as np
import torch
from torch import nn

from posenc_lib import DynamicNTK, LinearScaling, Llama3, NTKAware, Rotary, YaRN, frequencies

from .. import style
from ..check import Exercise, Guess, Mistake
from ..explorer import Choice, LogSlider, Scene, Slider

RULES = {
    "none": lambda factor, original: None,
    "interpolation": lambda factor, original: LinearScaling(factor),
    "NTK-aware": lambda factor, original: NTKAware(factor),
    "dynamic NTK": DynamicNTK,
    "YaRN": YaRN,
    "Llama 3": Llama3,
}


def turns(frequency, length) -> np.ndarray:
    """How often each pair goes round within `length` positions."""
    return length * np.asarray(frequency) / (2 * math.pi)


def scaled(rule, dim: int, base: float, length: int | None = None) -> np.ndarray:
    """Frequencies of `rule`, plain ones for None, at a text of `length` tokens."""
    return (frequencies(dim, base) if rule is None else rule.frequencies(dim, base, length)).numpy()


# A model small enough to train in two seconds: one layer of attention with two heads, each with its own job.

HEAD_DIM, ORIGINAL, BACK, MARKS = 32, 64, 3, 4


class Reader(nn.Module):
    """Two attention heads that look from the last token of a text at one earlier token each.

    tokens: int (batch, length), 1 where a token is a mark. Head 0 has to look at the token BACK before the last one,
    head 1 at the newest mark. A head is one query vector and one key vector a kind of token, turned by RoPE; since
    nothing else enters, each kind is turned and scored once a position, not once a text.
    """

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(2, HEAD_DIM))                    # (heads, head_dim)
        self.key = nn.Parameter(torch.randn(2, 2, HEAD_DIM))                   # (kinds of token, heads, head_dim)

    def forward(self, tokens, rule=None):
        """Logits of the last token's query with all keys, (batch, heads, length)."""
        positions = torch.arange(tokens.shape[-1])
        q = self.query[:, None].expand(2, 2, 1, HEAD_DIM)                      # (kinds, heads, 1, head_dim)
        k = self.key[:, :, None].expand(2, 2, len(positions), HEAD_DIM)        # (kinds, heads, length, head_dim)
        q, k = Rotary(HEAD_DIM, scaling=rule).rotate(q, k, positions[-1:], positions)
        scores = (q @ k.mT)[:, :, 0] / HEAD_DIM**0.5                           # (kinds, heads, length)
        return scores[tokens, :, positions].transpose(1, 2)                    # of the kind that stands there


def texts(count: int, length: int, generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Random texts with MARKS marks each, (count, length), and the two positions to look at, (count, 2)."""
    marks = torch.rand(count, length, generator=generator).topk(MARKS).indices
    tokens = torch.zeros(count, length, dtype=torch.long).scatter_(1, marks, 1)
    return tokens, torch.stack((torch.full((count,), length - 1 - BACK), marks.amax(1)), dim=1)


def train(reader: Reader, rule=None, length: int = ORIGINAL, *, steps: int = 300, batch: int = 64, seed: int = 0):
    """A trained copy of the reader."""
    reader, generator = copy.deepcopy(reader), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(reader.parameters(), lr=0.05)
    for _ in range(steps):
        tokens, target = texts(batch, length, generator)
        loss = nn.functional.cross_entropy(reader(tokens, rule).flatten(0, 1), target.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return reader


@torch.no_grad()
def accuracy(reader: Reader, rule=None, length: int = ORIGINAL, count: int = 200) -> tuple[float, float]:
    """Part of new texts in which each head's largest weight is on the right token."""
    tokens, target = texts(count, length, torch.Generator().manual_seed(99))
    return tuple((reader(tokens, rule).argmax(-1) == target).float().mean(0).tolist())


@torch.no_grad()
def score_curves(reader: Reader, rule=None, length: int = 4 * ORIGINAL) -> np.ndarray:
    """Logit against distance 0 .. length - 1 of head 0 with a plain token and of head 1 with a mark, (2, length)."""
    plain, marks = (reader(torch.full((1, length), kind), rule)[0].flip(-1) for kind in (0, 1))
    return torch.stack((plain[0], marks[1])).numpy()


def _arc(ax, x, angle, start=0.0, radius=1.0, **look):
    """An arc of a clock at (x, 0), from `start` to `angle` radians clockwise from 12."""
    turn = np.linspace(start, angle, 120)
    return ax.plot(x + radius * np.sin(turn), radius * np.cos(turn), **look)


@style.drawing
def draw_seen(dim: int = 128, base: float = 10000.0, original: int = 4096, stretch: int = 4,
              pairs=(0, 45, 50, 56, 63)) -> style.Picture:
    """The part of a few circles that distances up to `original` reach, and what `stretch` times the length adds."""
    fig = style.figure(8, 2.5)
    ax = fig.subplots()
    seen = turns(frequencies(dim, base), original)
    for n, i in enumerate(pairs):
        x, part, more = 2.9 * n, min(seen[i], 1), min(stretch * seen[i], 1)
        _arc(ax, x, 2 * np.pi, color=style.LIGHT, lw=1)
        _arc(ax, x, 2 * np.pi * part, color=style.BLUE, lw=6, solid_capstyle="butt")
        if more > part:
            _arc(ax, x, 2 * np.pi * more, 2 * np.pi * part, color=style.VERMILION, lw=6, solid_capstyle="butt")
        ax.text(x, -1.25, f"pair {i}\n{seen[i]:.2f} turns" if seen[i] < 10 else f"pair {i}\n{seen[i]:.0f} turns",
                ha="center", va="top")
    ax.text(-1.1, 1.75, f"seen within {original} tokens", color=style.BLUE, weight="bold", va="center")
    ax.text(4.9, 1.75, f"new within {stretch * original}", color=style.VERMILION, weight="bold", va="center")
    ax.set(xlim=(-1.2, 2.9 * len(pairs) - 1.7), ylim=(-2.15, 2.0), aspect="equal")
    ax.axis("off")
    return style.Picture(fig, f"""Circles of five pairs. Pairs {pairs[0]} and {pairs[1]} are blue all round: training
        within {original} tokens has shown every angle. The slower pairs {', '.join(map(str, pairs[2:]))} are blue on an
        arc from 12 o'clock only, ever shorter, and continue in vermilion: angles that only a text {stretch} times as
        long reaches.""")


@style.drawing
def draw_rules(dim: int = 128, base: float = 10000.0, original: int = 4096, factor: float = 4.0) -> style.Picture:
    """Frequency ratio of the five rules against the pair number."""
    fig = style.figure(8, 3.6)
    ax = fig.subplots()
    plain, length = scaled(None, dim, base), 3 * original // 2
    first_slow = int(np.argmax(turns(plain, original) < 1))
    ax.axvspan(first_slow - 0.5, dim // 2 - 0.5, color=style.LIGHT, alpha=0.5, lw=0)
    ax.text(dim // 2 - 1, 1.04, "no full turn in training", ha="right", va="bottom", color=style.GREY)
    for (name, rule), colour, dash in zip(list(RULES.items())[1:], style.COLOURS, ("-", "-", "--", "-", "-")):
        ratio = scaled(rule(factor, original), dim, base, length) / plain
        label = f"{name}, at {length} tokens" if name == "dynamic NTK" else name
        ax.plot(ratio, color=colour, ls=dash, label=label, lw=2)
    ax.set(xlabel="pair i, from the fastest to the slowest", ylabel="new frequency / old", xlim=(-0.5, dim // 2 - 0.5),
           yscale="log", ylim=(0.8 / factor, 1.3), yticks=[1, 0.5, 0.25], yticklabels=["1", "1/2", "1/4"])
    ax.minorticks_off()
    ax.legend(loc="lower left", bbox_to_anchor=(0, 0.12))
    return style.Picture(fig, f"""Frequency ratio against the pair number for factor {factor:g}, on a logarithmic axis.
        Interpolation is a flat line at 1/{factor:g}. NTK-aware is a straight line from 1 down to 1/{factor:g}, dynamic
        NTK a less steep one. YaRN and Llama 3 stay at 1, fall in between and run at 1/{factor:g} through the shaded
        region, the pairs from {first_slow} on that make no full turn in training.""")


@style.drawing
def draw_scores(reader: Reader, rules: dict, near: int = 20) -> style.Picture:
    """Each head's score against distance under several rules; rules: name -> rule."""
    fig = style.figure(8, 3.3)
    left, right = fig.subplots(1, 2)
    for (name, rule), colour in zip(rules.items(), (style.INK, style.BLUE, style.VERMILION)):
        back, newest = score_curves(reader, rule)
        left.plot(np.arange(near + 1), back[:near + 1], color=colour, marker=".", label=name)
        right.plot(np.arange(1, len(newest)), newest[1:], color=colour, lw=1.2, label=name)
    left.axvline(BACK, color=style.LIGHT, zorder=0)
    right.axvspan(0, ORIGINAL, color=style.LIGHT, alpha=0.6, lw=0, zorder=0)
    left.set(title=f'Head "{BACK} back", any token', xlabel="distance to the key", ylabel="score",
             xticks=[0, BACK, 4 * BACK, near])
    right.set(title='Head "newest mark", a mark', xlabel="distance to the key", xticks=[1, 64, 128, 192, 256])
    handles, labels = left.get_legend_handles_labels()
    fig.legend(handles, labels, loc="outside upper center", ncols=len(rules))
    seen = {"no rule": "sharp peak at distance 3; the other head's score falls with the distance down to about 50 of "
                       "the 64 tokens of training, shaded, and climbs again in waves beyond",
            "interpolation": "the peak is four times as wide and stands at distance 12; the other head's score goes on "
                             "falling over most of the longer text",
            "YaRN": "sharp peak at distance 3 again, and the other head's score goes on falling as well"}
    return style.Picture(fig, f"""Score against distance of the heads {BACK} back and newest mark.
        {' '.join(f"{name[0].upper() + name[1:]}: {seen[name]}." for name in rules)}""")


class StretchScene(Scene):
    """One rule as an edit of the frequency curve, and where it sends the pairs at the position chosen."""
    controls = {
        "rule": Choice(tuple(RULES), "NTK-aware", help="which rule edits the frequencies"),
        "factor": Slider(1, 64, 4, help="how many times longer the context is to get"),
        "base": LogSlider(2, 7, 10000.0, help="base of the frequencies before the rule"),
        "original_length": Choice((64, 512, 2048, 4096, 8192, 32768, 131072), 4096, label="original length",
                                  help="tokens the model was trained with"),
        "position": LogSlider(2, 6, 16384.0, help="last position of the text; its distance to the first"),
        "head_dim": Slider(4, 256, 128, step=4, help="width of a head: head_dim / 2 pairs"),
    }
    size = (8.0, 5.6)
    DIALS = 5

    def build(self):
        grid = self.figure.add_gridspec(2, 2, height_ratios=[1.9, 1])
        self.ratio, self.turns = (self.figure.add_subplot(grid[0, n]) for n in range(2))
        self.clocks = self.figure.add_subplot(grid[1, :])
        for ax, label, ticks, names in (
                (self.ratio, "new frequency / old", (1, 1 / 4, 1 / 16, 1 / 64), ("1", "1/4", "1/16", "1/64")),
                (self.turns, "turns", (1e-4, 1e-2, 1, 1e2, 1e4), ("0.0001", "0.01", "1", "100", "10,000"))):
            ax.set(yscale="log", xlim=(0, 1), xlabel="2i / head_dim", ylabel=label, yticks=ticks, yticklabels=names)
            ax.minorticks_off()
        self.ratio.set(ylim=(1 / 90, 1.4), title="The rule as an edit of the curve")
        self.turns.set(ylim=(1e-5, 3e5))
        for x, y, name, colour in ((0, 1.03, "Turns in training", style.BLUE),
                                   (1, 1.03, "at position", style.VERMILION),
                                   (1, 0.93, "x: unseen angles", style.INK)):
            self.turns.text(x, y, name, color=colour, transform=self.turns.transAxes, ha="right" if x else "left")
        self.turns.axhline(1, color=style.LIGHT, lw=1)
        self.slow = self.ratio.axvspan(0, 1, color=style.LIGHT, alpha=0.6, lw=0)
        self.edit, = self.ratio.plot([], [], color=style.VERMILION, lw=2.4)
        self.seen, = self.turns.plot([], [], color=style.BLUE, lw=4, alpha=0.5)
        self.now, = self.turns.plot([], [], color=style.VERMILION)
        self.beyond, = self.turns.plot([], [], "x", color=style.INK, ms=5)

        self.centres = [2.9 * n for n in range(self.DIALS)]
        self.rings, self.arcs, self.plain, self.hands, self.names = [], [], [], [], []
        for x in self.centres:
            self.rings += _arc(self.clocks, x, 2 * np.pi, color=style.LIGHT, lw=1)
            self.arcs += _arc(self.clocks, x, 0, color=style.BLUE, lw=5, alpha=0.5)
            self.plain += self.clocks.plot([x, x], [0, 1], color=style.GREY, lw=1.4, ls=":")
            self.hands += self.clocks.plot([x, x], [0, 1], color=style.VERMILION, lw=2.4, solid_capstyle="round")
            self.names.append(self.clocks.text(x, -1.25, "pair 0", ha="center", va="top", fontsize=10))
        self.clocks.set(xlim=(-1.3, 2.9 * self.DIALS - 1.6), ylim=(-1.75, 1.1), aspect="equal",
                        title="Blue: arc seen in training.  Hand: the angle at position (dotted: without the rule)")
        self.clocks.axis("off")

        self.layer(*self.rings, *self.names, on="head_dim")
        self.layer(self.slow, self.seen, *self.arcs, on=("base", "original_length", "head_dim"))
        self.layer(*self.plain, on=("base", "position", "head_dim"))
        self.layer(self.edit, self.now, self.beyond, *self.hands, on=tuple(self.controls))

    def numbers(self, rule, factor, base, original_length, position, head_dim):
        """Plain and new frequencies, turns seen in training, turns at the position, pairs carried beyond."""
        position = round(position)
        plain = scaled(None, head_dim, base)
        new = scaled(RULES[rule](factor, original_length), head_dim, base, position + 1)
        seen, now = turns(plain, original_length), turns(new, position)
        return plain, new, seen, now, (seen < 1) & (now > seen * (1 + 1e-9))

    def update(self, **values):
        plain, new, seen, now, beyond = self.numbers(**values)
        x = np.arange(len(plain)) / len(plain)
        first_slow = x[np.argmax(seen < 1)] if (seen < 1).any() else 1
        self.slow.set_x(first_slow)
        self.slow.set_width(1 - first_slow)
        self.edit.set_data(x, new / plain)
        self.seen.set_data(x, seen)
        self.now.set_data(x, now)
        self.beyond.set_data(x[beyond], now[beyond])

        pairs = np.unique(np.linspace(0, len(plain) - 1, self.DIALS).astype(int))
        position = round(values["position"])
        for n, x in enumerate(self.centres):
            for artist in (self.rings[n], self.arcs[n], self.plain[n], self.hands[n], self.names[n]):
                artist.set_visible(n < len(pairs))
            if n < len(pairs):
                i = pairs[n]
                turn = np.linspace(0, 2 * np.pi * min(seen[i], 1), 120)
                self.arcs[n].set_data(x + np.sin(turn), np.cos(turn))
                for hand, angle in ((self.plain[n], position * plain[i]), (self.hands[n], position * new[i])):
                    hand.set_data([x, x + np.sin(angle)], [0, np.cos(angle)])
                self.names[n].set_text(f"pair {i}")

    def describe(self, **values):
        plain, new, seen, _, beyond = self.numbers(**values)
        return (f"Rule {values['rule']}, factor {values['factor']}, base {style.number(values['base'])}, "
                f"original length {values['original_length']}, head_dim {values['head_dim']}: the first "
                f"frequency is divided by {style.number(plain[0] / new[0])}, the last by "
                f"{style.number(plain[-1] / new[-1])}. {int((seen < 1).sum())} of {len(plain)} pairs "
                f"made no full turn in training; at position {round(values['position'])} {int(beyond.sum())} of them "
                "have reached angles that training has not shown.")


# Exercises

check_seen = Exercise(
    right=24,
    praise="24 of 64 pairs. Compare Llama 2 with its 18: a larger base slows the pairs down, and that is half of the "
           "trick of longer contexts - but it also leaves more circles unseen.",
    mistakes=[
        Mistake("the pairs that do", 40,
                "40 pairs do complete a turn (pairs 0 to 39). The question asks for the others."),
        Mistake("columns instead of pairs", 48,
                "You counted columns: every pair has two. head_dim 128 makes 64 pairs."),
        Mistake("2 pi forgotten", 15,
                "You compared 1 / w with the length. A full turn is 2 pi radians, so the wavelength is 2 pi / w."),
        Mistake("base 10000", 4,
                "That is the answer for base 10 000. This model has base 1 000 000."),
        Mistake("as many as Llama 2", 18,
                "18 was the answer for Llama 2: base 10 000 and 4096 tokens. Put in this model's numbers."),
    ])

check_base = Exercise(
    right=lambda base, factor, dim: base * factor ** (dim / (dim - 2)),
    probes=[(10000.0, 4, 16), (10000.0, 8, 128), (500000.0, 2, 64)],
    praise="base * factor**(dim / (dim - 2)): the exponent makes up for the last pair being number dim/2 - 1, so that "
           "it is divided by the factor exactly.",
    mistakes=[
        Mistake("times the factor", lambda b, s, d: b * s,
                "With base * factor the last pair is divided by factor**((dim - 2) / dim), a little less than factor: "
                "its exponent is (dim - 2) / dim, not 1. Solve for the base once more."),
        Mistake("exponent upside down", lambda b, s, d: b * s ** ((d - 2) / d),
                "Your exponent is upside down. Raise both sides of base'**(-(dim-2)/dim) = base**(-(dim-2)/dim) / "
                "factor to the power -dim/(dim-2)."),
        Mistake("only the multiplier", lambda b, s, d: s ** (d / (d - 2)),
                "That is what the base is multiplied by. Return the new base itself."),
        Mistake("a smaller base", lambda b, s, d: b / s ** (d / (d - 2)),
                "You divided. A smaller base makes every pair faster; stretching needs slower pairs."),
        Mistake("factor to the power dim", lambda b, s, d: b * s ** (2 / (d - 2)),
                "You used the exponent of one step from pair to pair. The whole factor must be reached at the last "
                "pair, number dim/2 - 1."),
    ])


def _ratio(turns, factor, slow=1, fast=4):
    keep = np.clip((np.asarray(turns, dtype=float) - slow) / (fast - slow), 0, 1)
    return keep + (1 - keep) / factor


def _ratio_in_wavelength(turns, factor, slow=1, fast=4):
    wavelength = 1 / np.asarray(turns, dtype=float)
    keep = np.clip((1 / slow - wavelength) / (1 / slow - 1 / fast), 0, 1)
    return keep + (1 - keep) / factor


def _ratio_of_wavelengths(turns, factor, slow=1, fast=4):
    keep = np.clip((np.asarray(turns, dtype=float) - slow) / (fast - slow), 0, 1)
    return 1 / (keep + (1 - keep) * factor)


def _ratio_unclipped(turns, factor, slow=1, fast=4):
    keep = (np.asarray(turns, dtype=float) - slow) / (fast - slow)
    return keep + (1 - keep) / factor


check_ratio = Exercise(
    right=_ratio,
    probes=[(np.array([0.1, 0.5, 1.0, 2.0, 2.5, 3.5, 4.0, 100.0]), 8), (np.array([0.2, 1.5, 3.0, 40.0]), 4, 0.5, 2)],
    praise="That is Llama 3's rule. Blending the frequencies linearly in the number of turns is its own choice; YaRN "
           "blends linearly in the pair number instead.",
    mistakes=[
        Mistake("fast and slow swapped", lambda t, s, slow=1, fast=4: 1 + 1 / s - _ratio(t, s, slow, fast),
                "Fast pairs come out divided and slow pairs kept. It is the fast ones, with many turns, that have been "
                "seen all round and must be left alone."),
        Mistake("no limits", _ratio_unclipped,
                "The blend runs on outside the band: a pair with 100 turns would get a ratio far above 1. Limit keep "
                "to 0 .. 1 (np.clip)."),
        Mistake("linear in the wavelength", _ratio_in_wavelength,
                "You blend linearly in the wavelength, 1 / turns. The rule is linear in the number of turns, which "
                "means in the frequency. (Both agree outside the band, so a plot hides it.)"),
        Mistake("wavelengths blended", _ratio_of_wavelengths,
                "You blended the wavelengths, 1 and factor, and took the inverse. Blend the ratios, 1 and 1 / factor."),
        Mistake("no ramp", lambda t, s, slow=1, fast=4: np.where(np.asarray(t) > slow, 1.0, 1 / s),
                "You switch at `slow` without a ramp. Between slow and fast turns the ratio climbs evenly from "
                "1 / factor to 1."),
        Mistake("interpolation", lambda t, s, slow=1, fast=4: np.full(len(t), 1 / s),
                "That is position interpolation: every pair divided, however often it has turned."),
    ])

check_logits = Exercise(
    right=(0.1 * math.log(32) + 1) ** 2,
    praise="About 1.813. The factor 1.347 sits in q and in k, so their product carries its square.",
    tolerance=2e-3,
    mistakes=[
        Mistake("not squared", 0.1 * math.log(32) + 1,
                "That is the factor in cos and sin, so in q and in k alike. What does their dot product get?"),
        Mistake("doubled", 2 * (0.1 * math.log(32) + 1),
                "q and k both carry the factor, and a dot product multiplies them. Multiply, do not add."),
        Mistake("decadic logarithm", (0.1 * math.log10(32) + 1) ** 2,
                "You took the decadic logarithm. ln is the natural one: math.log."),
        Mistake("binary logarithm", (0.1 * math.log2(32) + 1) ** 2,
                "You took the binary logarithm. ln is the natural one: math.log."),
        Mistake("the temperature", (0.1 * math.log(32) + 1) ** -2,
                "That is the temperature t, which the logits are divided by. The question asks what they are "
                "multiplied by."),
        Mistake("the context factor", 32,
                "32 is how much longer the context gets. The logits grow much more gently, with its logarithm."),
    ])

LLAMA_3_2_1B = {
    "model_type": "llama", "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
    "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192},
}

check_config = Exercise(
    right=[15, 3, 14],
    praise="15 pairs untouched, 3 on the ramp, 14 divided by 32: the three bands of the llama3 rule.",
    mistakes=[
        Mistake("slow and fast swapped", [14, 3, 15],
                "You have the bands in the wrong order. Untouched pairs come first in the list: ratio 1."),
        Mistake("head_dim 128", [29, 6, 29],
                "These are the numbers for head_dim 128. This config has no head_dim, so it is hidden_size / "
                "num_attention_heads = 64."),
        Mistake("key-value heads", [57, 13, 58],
                "You divided hidden_size by num_key_value_heads. Key heads are fewer but not wider: head_dim is "
                "hidden_size / num_attention_heads."),
        Mistake("another base or another length", [21, 4, 7],
                "These are the numbers for base 10 000 - and, by chance, also for an original length of 131 072. The "
                "config says rope_theta 500 000, and the rope dict says which length the model was trained with first: "
                "8192, not max_position_embeddings."),
        Mistake("columns", [30, 6, 28],
                "You counted columns; every frequency serves a pair of columns. There are 32 pairs."),
    ])

guess_circle = Guess(a="All 64: after 4096 positions everything has turned.", b="46, the faster ones.",
                     c="32, the faster half.")
guess_beyond = Guess(a="Both heads go on working: RoPE depends on the distance alone.",
                     b="The head that looks 3 back goes on working, the one that looks for the newest mark fails.",
                     c="Both heads fail.")
guess_back = Guess(a="3 back, as trained.", b="12 back.", c="Less than one back: at the last token itself.")
guess_stale = Guess(a="No: a key at position 10 stays at position 10.",
                    b="Yes: every key that has been turned already was turned by other frequencies.",
                    c="Only for keys beyond position 64: up to the original length nothing is stretched.")
