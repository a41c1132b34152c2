"""Lesson 02: what its text states in numbers, its six wishes, the data its explorer draws, and other wrong answers."""
import itertools
import math
from pathlib import Path

import nbformat
import numpy as np
import pytest
import torch

from posenc_lib import sinusoidal_encoding, wavelengths
from posenc_lib.course.lessons import counting as lesson

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "02_counting.ipynb"


def table(length, d_model):
    return sinusoidal_encoding(length, d_model, dtype=torch.float64).numpy()


# ---- the three objections

def test_the_index_drowns_the_token_and_the_sinusoid_does_not():
    token, index = np.random.default_rng(0).normal(size=512), np.full(512, 1024.0)
    total = token + index
    assert math.isclose(np.linalg.norm(index), 23170, abs_tol=0.5)
    assert 1 - total @ index / np.linalg.norm(total) / np.linalg.norm(index) < 1e-6
    assert np.allclose(np.linalg.norm(table(1024, 512), axis=1), 16)


def test_ranks():
    assert np.linalg.matrix_rank(np.arange(1024.0)[:, None] * np.ones(512)) == 1
    assert np.linalg.matrix_rank(table(1024, 512), tol=1e-6) == 165


@pytest.mark.parametrize("seed", range(20))
def test_a_head_over_plain_indices_prefers_an_end(seed):
    random = np.random.default_rng(seed)
    code = np.arange(64.0)[:, None] * random.normal(size=32)
    W_Q, W_K = random.normal(size=(2, 32, 16))
    favourite = ((code @ W_Q + random.normal(size=16)) @ (code @ W_K + random.normal(size=16)).T).argmax(axis=1)
    assert set(favourite) <= {0, 63}


def test_steps_of_the_squeezed_index_and_of_the_sinusoid():
    step = np.linalg.norm(np.diff(table(2, 512), axis=0))
    assert math.isclose(step, 3.714, abs_tol=5e-4)
    assert step / (16 / 1023) > 200


@pytest.mark.parametrize("d_model, columns, share", [(512, 276, 0.353), (64, 35, 0.343), (16, 7, 0.313)])
def test_columns_that_leave_their_range_beyond_the_training_length(d_model, columns, share):
    codes = table(1248, d_model)
    low, high = codes[:1024].min(axis=0), codes[:1024].max(axis=0)
    for tolerance in (1e-12, 1e-9):                  # the count does not hang on rounding
        outside = (codes[1024:] < low - tolerance) | (codes[1024:] > high + tolerance)
        assert outside.any(axis=0).sum() == columns
    assert len(outside) == 224 and math.isclose(outside.mean(), share, abs_tol=5e-4)


def test_the_position_in_the_formula_is_the_integer():
    first = sinusoidal_encoding(torch.tensor([500]), 8)[0, 0].item()
    assert math.isclose(first, math.sin(500), abs_tol=1e-6) and abs(first - math.sin(0.5)) > 0.9


# ---- the clock

def test_a_dial_shows_each_reading_twice_a_day():
    moment = 3 * 3600 + 15 * 60 + 42
    assert np.allclose(lesson.dial(moment), [97.85, 94.2, 252])
    same = np.flatnonzero(np.isclose(lesson.dial(np.arange(86400)), lesson.dial(moment)).all(axis=1))
    assert same.tolist() == [moment, moment + 43200]


def test_the_hour_hand_alone_is_unique_within_twelve_hours():
    assert len(np.unique(lesson.dial(np.arange(43200))[:, 0])) == 43200


def test_how_the_periods_step():
    for d_model, ratio in ((8, 10), (64, 1.334), (512, 1.037)):
        periods = wavelengths(d_model)
        assert torch.allclose(periods[1:] / periods[:-1], torch.tensor(10000 ** (2 / d_model), dtype=torch.float64))
        assert math.isclose(10000 ** (2 / d_model), ratio, abs_tol=5e-4)


# ---- the wish list, as the notebook's own cells define it

@pytest.fixture(scope="module")
def notebook():
    space = {"np": np, "torch": torch, "sinusoidal_encoding": sinusoidal_encoding}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code" and any(f"def {name}(" in cell.source for name in ("index", "whole", "any_length")):
            exec(cell.source, space)
    return space


NAMES = ("bounded", "unique", "same_step", "any_length", "offset", "smooth")


@pytest.mark.parametrize("scheme, missed", [
    ("index", {"bounded"}), ("normalised", {"unique", "same_step", "offset"}), ("one_hot", {"any_length", "smooth"}),
    ("binary", {"same_step", "any_length", "offset", "smooth"}), ("clock", {"any_length"})])
def test_scores(notebook, scheme, missed):
    assert {name for name in NAMES if not notebook[name](notebook[scheme])} == missed


@pytest.mark.parametrize("wish, code", [
    ("bounded", lambda p, n: p[:, None] / 50_000),
    ("unique", lambda p, n: np.minimum(p, 98)[:, None] * 1.0),
    ("same_step", lambda p, n: np.sqrt(p)[:, None]),
    ("any_length", lambda p, n: (p % 99_999)[:, None] * 1.0),
    ("offset", lambda p, n: (p[:, None] * 1.0) ** 0.5),
    ("smooth", lambda p, n: (p * 61 % 128)[:, None] * 1.0)])
def test_each_wish_refuses_a_code_that_breaks_it(notebook, wish, code):
    assert not notebook[wish](code)


@pytest.mark.parametrize("d_model", [4, 16, 32])
def test_the_sinusoid_meets_every_wish(notebook, d_model):
    def code(p, n):
        return sinusoidal_encoding(torch.from_numpy(p), d_model, dtype=torch.float64).numpy()

    assert all(notebook[name](code) for name in NAMES if name != "any_length" or d_model == 16)


def test_a_binary_offset_can_be_read_from_a_difference(notebook):
    p = np.arange(100)
    read = notebook["binary"](p, 100) @ 2.0 ** np.arange(7)
    assert np.array_equal(read[:, None] - read, p[:, None] - p)


# ---- exercises

def test_bits_by_other_means():
    def by_text(positions, bits):
        return np.array([[int(digit) for digit in f"{p % 2**bits:0{bits}b}"[::-1]] for p in positions])

    assert lesson.check_bits(by_text).status == "correct"
    assert by_text(range(6), 3).T.tolist() == [[0, 1, 0, 1, 0, 1], [0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1]]
    as_written = lesson.check_bits(lambda p, bits: by_text(p, bits)[:, ::-1])
    assert as_written.status == "not yet" and "fastest bit" in as_written.message
    masked = lesson.check_bits(lambda p, bits: p[:, None] & 2 ** np.arange(bits))
    assert "A bit is 0 or 1" in masked.message
    assert lesson.check_bits(lambda p, bits: np.zeros((len(p), bits))).status == "not yet"


def test_clock_by_other_means():
    def by_complex(positions, periods):
        z = np.exp(2j * np.pi * np.outer(positions, 1 / periods))
        return np.stack([z.imag, z.real], axis=2).reshape(len(positions), -1)

    assert lesson.check_clock(by_complex).status == "correct"
    assert lesson.check_clock(lambda p, T: torch.from_numpy(by_complex(p, T))).status == "correct"
    assert "Sine and cosine have changed places" in lesson.check_clock(lambda p, T: np.stack(
        [np.cos(2 * np.pi * np.outer(p, 1 / T)), np.sin(2 * np.pi * np.outer(p, 1 / T))], axis=2).reshape(len(p), -1)
    ).message
    assert "full turn" in lesson.check_clock(lambda p, T: by_complex(p, T * 2 * np.pi)).message
    assert lesson.check_clock(lambda p, T: by_complex(p + 1, T)).status == "not yet"


def test_the_hands_return_first_at_120():
    first = next(n for n in itertools.count(1) if all(n % period == 0 for period in (8, 12, 30)))
    assert lesson.check_repeat(first).status == "correct"
    assert lesson.check_repeat(16).status == "not yet"


# ---- what the explorer shows

@pytest.mark.parametrize("position, length", [(0, 2), (37, 100), (127, 128), (128, 256), (255, 256)])
def test_readings_of_the_explorer(position, length):
    scene = lesson.CodesScene()
    scene.frame(position=position, length=length, d_model=8, base=10000.0)
    index, share, bits = (note.get_text() for note in scene.notes)
    assert int(index) == position == int(bits, 2) and len(bits) == 8
    assert math.isclose(float(share), position / length, rel_tol=1e-3, abs_tol=1e-12)
    assert f"Position {position} in a text of {length} tokens." in scene.describe(
        position=position, length=length, d_model=8, base=10000.0)


def test_a_position_beyond_the_text_is_read_at_its_end():
    scene = lesson.CodesScene()
    values = dict(position=200, length=50, d_model=8, base=10000.0)
    scene.frame(**values)
    assert scene.notes[0].get_text() == "49"
    assert "position 200 is beyond its end" in scene.describe(**values)


@pytest.mark.parametrize("d_model, base", [(2, 1.0), (8, 10000.0), (64, 1e6)])
def test_the_hands_of_the_explorer(d_model, base):
    scene = lesson.CodesScene()
    scene.frame(position=100, length=256, d_model=d_model, base=base)
    assert np.allclose(scene.image.get_array(), sinusoidal_encoding(256, d_model, base).numpy().T)
    for n, pair in enumerate(scene.shown_hands(d_model)):
        x, y = np.subtract(np.array(scene.hands[n].get_data())[:, 1], scene.centres[n])
        angle = 100 / base ** (2 * pair / d_model)
        assert np.allclose([x, y], [math.sin(angle), math.cos(angle)])
