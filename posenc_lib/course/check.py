"""Exercise checks that name the mistake, and guesses a learner commits to before a cell reveals the answer."""
import copy
import html
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_COLOURS = {"correct": "#009E73", "not yet": "#D55E00", "not done yet": "#767676", "noted": "#0072B2"}


@dataclass(frozen=True)
class Verdict:
    """What a check says. status: "not done yet", "correct", "not yet" or "noted" (a guess)."""
    status: str
    message: str

    def __repr__(self):
        return f"{self.status.capitalize()}. {self.message}"

    def _repr_html_(self):
        text = html.escape(self.message).replace("\n", "<br>")
        return (f'<div style="border-left:5px solid {_COLOURS[self.status]};padding:.3em .8em">'
                f"<b>{self.status.capitalize()}.</b> {text}</div>")


@dataclass(frozen=True)
class Mistake:
    """A wrong answer learners plausibly give, and the hint that names what went wrong.

    answer: a wrong value, or a wrong function. An answer that agrees with it on every probe gets the hint.
    """
    name: str
    answer: object
    hint: str


class Exercise:
    """An automatic check. Call it with the learner's answer; it returns a Verdict and never raises.

    right: the value, or the function, that solves the exercise.
    probes: for functions, argument tuples the answer is tried on.
    mistakes: known wrong answers, tried in order. praise: said when right, and worth reading.
    integers: the right numbers as floats get a hint, because they are to be counts or rows of a table.
    """

    def __init__(self, right, *, praise: str, probes: Sequence[tuple] = (), mistakes: Sequence[Mistake] = (),
                 tolerance: float = 1e-5, integers: bool = False):
        if callable(right) and not probes:
            raise ValueError("a function needs probes to be tried on")
        self.right, self.probes, self.mistakes, self.praise = right, tuple(probes), tuple(mistakes), praise
        self.tolerance, self.integers = tolerance, integers

    def __call__(self, answer) -> Verdict:
        if answer is None or answer is Ellipsis:
            return Verdict("not done yet", "Replace the dots with your answer and run the cell again.")
        if callable(self.right) and not callable(answer):
            return Verdict("not yet", f"Hand over the function itself, not {_short(answer)}.")
        wanted, given = self._outcomes(self.right), self._outcomes(answer)
        if all(value is None or value is Ellipsis for value in given):
            return Verdict("not done yet", "The function returns nothing yet. Replace the dots and run the cell again.")
        if self._agree(given, wanted):
            if self.integers and any(_array(value).dtype.kind not in "iu" for value in given):
                return Verdict("not yet", "The numbers are right, but they are floats. A position counts and a row "
                               "number points into a table: keep them integers (int64) all the way.")
            return Verdict("correct", self.praise)
        for mistake in self.mistakes:
            if self._agree(given, self._outcomes(mistake.answer)):
                return Verdict("not yet", mistake.hint)
        message = self._difference(answer, wanted, given)
        return Verdict("not yet", message[0].upper() + message[1:])

    def _outcomes(self, answer) -> list:
        if not self.probes:
            return [answer]
        return [_call(answer, probe) for probe in self.probes] if callable(answer) else [answer]

    def _agree(self, given, wanted) -> bool:
        return len(given) == len(wanted) and all(
            not isinstance(a, Exception) and not isinstance(b, Exception) and _same(a, b, self.tolerance)
            for a, b in zip(given, wanted))

    def _difference(self, answer, wanted, given) -> str:
        """What tells the answer from the right one, at the first probe where they differ, without giving it away."""
        for probe, right, mine in zip(self.probes or [()], wanted, given):
            where = f"For {_arguments(answer, probe)}: " if probe else ""
            if isinstance(mine, Exception):
                return f"{where}your function raised {type(mine).__name__}: {mine}"
            if _same(mine, right, self.tolerance):
                continue
            mine_array, right_array = _array(mine), _array(right)
            if mine_array is None or right_array is None:
                return f"{where}{_short(mine)} is not it."
            kinds = mine_array.dtype.kind, right_array.dtype.kind
            if kinds[0] != kinds[1] and ("U" in kinds or "b" in kinds):
                wish = {"U": "text", "b": "True or False"}.get(kinds[1], "a number")
                return f"{where}{_short(mine)} will not do; write {wish}."
            if mine_array.shape != right_array.shape:
                return f"{where}expected shape {right_array.shape}, yours is {mine_array.shape}."
            if not right_array.shape or right_array.dtype.kind == "U":
                return f"{where}{_short(mine)} is not it."
            place = tuple(int(n) for n in np.argwhere(~_close(mine_array, right_array, self.tolerance))[0])
            return (f"{where}the first entry that is off is at {list(place)}: expected {right_array[place]:.4g}, "
                    f"yours is {mine_array[place]:.4g}.")
        return "That is not it."


class Guess:
    """A prediction with lettered options. Calling it notes the learner's letter; the next cell shows what happens."""

    def __init__(self, **options: str):
        self.options = options

    def __call__(self, letter=...) -> Verdict:
        letters, text = ", ".join(self.options), str(letter).strip().strip("().").lower()
        if letter is None or letter is Ellipsis:
            return Verdict("not done yet", f"Commit to one of {letters} before you run the next cell.")
        if text not in self.options:
            return Verdict("not yet", f"The options are {letters}.")
        return Verdict("noted", f"({text}) {self.options[text]} The next cell shows what happens.")


def _call(function: Callable, arguments: tuple):
    try:
        return function(*copy.deepcopy(arguments))
    except Exception as problem:                     # a learner's code may raise anything
        return problem


def _arguments(function, probe: tuple) -> str:
    """The probe as the learner's function names its arguments: "positions = [0, 1], d_model = 8"."""
    try:
        names = list(inspect.signature(function).bind(*probe).arguments)
    except (TypeError, ValueError):                  # no signature, or one that does not take the probe
        names = []
    words = [_short(value) for value in probe]
    return ", ".join(f"{name} = {word}" for name, word in zip(names, words)) if len(names) == len(words) else \
        ", ".join(words)


def _array(value) -> np.ndarray | None:
    """value as a numpy array of numbers, bools or strings; None where it is no such thing."""
    try:
        if isinstance(value, torch.Tensor):
            value = value.detach().cpu()
            value = value.double() if value.is_floating_point() else value
        elif isinstance(value, (list, tuple)) and any(isinstance(v, torch.Tensor) for v in value):
            value = [_array(v) for v in value]
        array = np.asarray(value)
    except Exception:                                # ragged lists, objects that refuse
        return None
    return array if array.dtype.kind in "biufcUS" else None


def _close(mine: np.ndarray, right: np.ndarray, tolerance: float) -> np.ndarray:
    return np.isclose(mine, right, rtol=tolerance, atol=tolerance)


def _same(mine, right, tolerance) -> bool:
    mine, right = _array(mine), _array(right)
    if mine is None or right is None or mine.shape != right.shape:
        return False
    if "U" in (mine.dtype.kind, right.dtype.kind) or "S" in (mine.dtype.kind, right.dtype.kind):
        return mine.dtype.kind == right.dtype.kind and bool(
            np.all(np.char.lower(np.char.strip(mine)) == np.char.lower(np.char.strip(right))))
    if (mine.dtype.kind == "b") != (right.dtype.kind == "b"):
        return False
    return bool(np.all(_close(mine, right, tolerance)))


def _short(value) -> str:
    """A few words for a value in a message."""
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu().numpy()
    if isinstance(value, np.ndarray) and value.size > 12:
        return f"an array of shape {value.shape}"
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
    text = " ".join(repr(_rounded(value)).split())
    return text if len(text) <= 60 else text[:57] + "..."


def _rounded(value):
    """Floats in `value`, also inside lists, to four digits."""
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
