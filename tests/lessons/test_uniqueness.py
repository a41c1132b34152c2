"""Lesson 04: what its text states in numbers, the data its pictures draw, and independent wrong answers."""
import itertools
import math

import mpmath
import numpy as np
import pytest
import torch

from posenc_lib import encoding_distance, frequencies, sinusoidal_encoding
from posenc_lib.course.lessons import uniqueness as lesson


def nearest(d_model, base=10000.0, length=2000):
    d = encoding_distance(torch.arange(1, length), d_model, base)
    return int(d.argmin()) + 1, d.min().item()


def doubles(codes):
    """All pairs (first position, position) with equal rows, by a plain loop."""
    seen, found = {}, []
    for q, row in enumerate(codes.tolist()):
        p = seen.setdefault(tuple(row), q)
        found += [(p, q)] if p != q else []
    return found


# ---- the numbers of the text

@pytest.mark.parametrize("d_model, offset, distance", [
    (2, 710, 6.03e-5), (4, 1885, 0.0444), (6, 132, 0.328), (8, 63, 0.645), (10, 6, 0.970), (12, 1, 0.984),
    (16, 1, 1.015), (64, 1, 1.472), (512, 1, 3.714)])
def test_nearest_codes_in_2000_positions(d_model, offset, distance):
    k, d = nearest(d_model)
    assert k == offset and d == pytest.approx(distance, rel=2e-3)


@pytest.mark.parametrize("d_model, offset", [(8, 69115), (12, 81631), (14, 49769), (16, 1), (64, 1)])
def test_nearest_codes_in_100_000_positions(d_model, offset):
    assert nearest(d_model, length=100_000)[0] == offset


def test_the_stated_distances_to_sixty_digits():
    with mpmath.workdps(60):
        for k, d_model, stated in ((710, 2, 6.02887067e-5), (44, 2, 0.0177026), (63, 8, 0.6452924), (1, 8, 0.9640996),
                                   (615_746, 16, 0.8812), (6283, 8, 0.18598), (1885, 4, 0.0444064)):
            w = [mpmath.mpf(10000) ** (mpmath.mpf(-2 * i) / d_model) for i in range(d_model // 2)]
            exact = 2 * mpmath.sqrt(sum(mpmath.sin(k * x / 2) ** 2 for x in w))
            assert float(exact) == pytest.approx(stated, rel=1e-4)
            assert encoding_distance(k, d_model).item() == pytest.approx(float(exact), rel=1e-9)
        assert mpmath.floor(mpmath.pi * 10**48) == 3141592653589793238462643383279502884197169399375


def test_near_returns_come_from_fractions_near_pi():
    records, best = [], math.inf
    for k in range(1, 2000):
        gap = abs(math.remainder(k, 2 * math.pi))
        if gap < best:
            best, records = gap, [*records, k]
    assert records == [1, 6, 19, 25, 44, 333, 710]
    assert 44 / 14 == 22 / 7 and 710 / 226 == 355 / 113


@pytest.mark.parametrize("dtype, d_model, first, different", [
    (torch.bfloat16, 2, (1, 711), 811), (torch.float16, 2, (2, 712), 1205), (torch.float32, 2, None, 2000),
    *((dtype, d, None, 2000) for dtype in lesson.FORMATS.values() if dtype for d in (4, 6, 8, 16, 128))])
def test_doubles_after_rounding(dtype, d_model, first, different):
    codes = sinusoidal_encoding(2000, d_model, dtype=dtype)
    found = doubles(codes)
    assert (found[0] if found else None) == first
    assert len(codes.unique(dim=0)) == different


def test_other_doubles_of_the_text():
    few = sinusoidal_encoding(torch.tensor([7, 84830]), 4, dtype=torch.bfloat16)
    assert torch.equal(few[0], few[1])
    assert len(sinusoidal_encoding(2000, 512, dtype=torch.bfloat16)[:, -2:].unique(dim=0)) == 624


@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, 8), (torch.float16, 11), (torch.float32, 24),
                                         (torch.float8_e4m3fn, 4)])
def test_positions_merge_after_two_to_the_bits(dtype, bits):
    whole = torch.arange(max(0, 2**bits - 4096), 2**bits + 2)
    kept = whole.float().to(dtype).double() if bits < 24 else whole.to(dtype).double()
    assert int(whole[kept != whole][0]) == 2**bits + 1
    assert kept[-1] == 2**bits


def test_half_positions_merge_at_any_width():
    positions = torch.arange(1024).to(torch.bfloat16).long()
    assert len(positions.unique()) == 513
    for d_model in (2, 64, 512):
        assert doubles(sinusoidal_encoding(positions, d_model))[0] == (256, 257)
    assert torch.tensor([8190, 8191, 8192]).to(torch.bfloat16).tolist() == [8192] * 3
    assert torch.tensor([65536, 65537 + 511]).to(torch.bfloat16).tolist() == [65536, 65536 + 512]


def test_the_torus_comes_back_first_at_63():
    chords = lesson._distance(np.arange(1, 64), np.array([1, 0.1]))
    assert chords.argmin() == 62 and chords[62] == pytest.approx(0.169, abs=1e-3) and chords[43] > 1


def test_neighbours_come_nearer_as_the_base_grows():
    ds = [nearest(64, base) for base in (100.0, 1e4, 1e6)]
    assert [k for k, _ in ds] == [1, 1, 1] and [round(d, 2) for _, d in ds] == [1.95, 1.47, 1.28]
    assert nearest(8, 1.0) == (710, pytest.approx(2 * nearest(2)[1]))


def test_the_promise_at_d_16():
    bound = [8**0.5 * 2 * math.sin(math.pi / m) for m in (17, 18)]
    assert bound[1] < encoding_distance(1, 16).item() < bound[0]
    assert round(18**8 / 1e9) == 11


# ---- pictures and the explorer's data

def test_the_two_codes_of_the_maps():
    offsets = np.arange(1, 2000)
    a, b = (lesson._distance(offsets, w) for w in (lesson.SINUSOIDAL, lesson.REPEATING))
    assert list(offsets[b < 1e-9]) == [400, 800, 1200, 1600]
    assert offsets[a.argmin()] == 402 and a.min() == pytest.approx(0.128, abs=5e-4)


@pytest.mark.parametrize("stored", lesson.FORMATS)
@pytest.mark.parametrize("position, d_model, base", [(0, 2, 1e4), (1, 2, 1e4), (1999, 8, 1e4), (1000, 8, 1.0),
                                                     (711, 64, 100.0)])
def test_explorer_data_against_rows(position, d_model, base, stored):
    d, found, different = lesson.from_position(position, d_model, base, stored)
    dtype = lesson.FORMATS[stored] or torch.float64
    rows = sinusoidal_encoding(2000, d_model, base, dtype=dtype).double()
    wanted = (rows - rows[position]).norm(dim=1).numpy()
    assert np.allclose(d, wanted, atol=1e-12)
    assert position not in found and wanted[found] == pytest.approx(np.delete(wanted, position).min(), abs=1e-12)
    assert different == len(rows.unique(dim=0))


@pytest.mark.parametrize("base", [1.0, 30.0, 1e4, 1e6])
def test_smallest_distance_by_width(base):
    least, far = lesson.least_by_width(base)
    for width, value, is_far in zip(lesson.WIDTHS, least, far):
        k, d = nearest(width, base)
        assert value == pytest.approx(d, rel=1e-9) and is_far == (k > 1)


def test_the_sentence_says_when_a_code_is_shared():
    scene = lesson.NearestScene()
    said = scene.describe(d_model=2, base=10000.0, stored="bfloat16", position=1)
    assert "very same code is shared by positions 711 and 1421" in said and "811 of the 2,000" in said
    said = scene.describe(d_model=8, base=10000.0, stored="exact", position=1000)
    assert "positions 937 and 1063, at distance 0.645" in said and "0.964" in said


# ---- exercises: answers written without a look at the lesson's own

def hint(check, answer):
    verdict = check(answer)
    assert verdict.status == "not yet"
    return verdict.message


def test_distance_answers():
    def by_rows(offsets, d_model, base):
        rows = sinusoidal_encoding(torch.as_tensor(offsets) + 50, d_model, base, dtype=torch.float64)
        return (rows - sinusoidal_encoding([50], d_model, base, dtype=torch.float64)).norm(dim=1)

    def cosines(offsets, d_model, base):
        return np.cos(np.outer(offsets, frequencies(d_model, base)))

    check = lesson.check_distance
    assert check(by_rows).status == "correct"
    assert check(lambda k, d, b: (2 - 2 * cosines(k, d, b)).sum(1) ** 0.5).status == "correct"
    assert "square of the distance" in hint(check, lambda k, d, b: (2 - 2 * cosines(k, d, b)).sum(1))
    assert "half of what" in hint(check, lambda k, d, b: by_rows(k, d, b) / 2)
    assert "sqrt(2)" in hint(check, lambda k, d, b: by_rows(k, d, b) * 2**0.5)
    assert "whole angle" in hint(check, lambda k, d, b: by_rows(2 * np.asarray(k), d, b))
    assert "Pythagoras" in hint(check, lambda k, d, b: (2 - 2 * cosines(k, d, b)).clip(0).__pow__(0.5).sum(1))


def test_unique_answers_by_the_definition():
    periods = ((12, 90), (2 * np.pi, 4 * np.pi), (7.5,), (12, 2 * np.pi), (2 * np.pi,) * 4)
    truth = [bool((lesson._distance(np.arange(1, 5000), 2 * np.pi / np.array(p)) > 1e-9).all()) for p in periods]
    assert lesson.check_unique(truth).status == "correct"
    for answer in itertools.product((True, False), repeat=5):
        wrong = [n for n in range(5) if answer[n] != truth[n]]
        if wrong:
            message = hint(lesson.check_unique, list(answer))
            assert [n for n in range(5) if f"({'abcde'[n]}):" in message] == wrong


def test_period_answers():
    base = (7 / (2 * np.pi)) ** 2
    assert lesson.check_period(base).status == "correct" and base == pytest.approx(1.24, abs=2e-3)
    assert 7 * frequencies(4, base)[1].item() == pytest.approx(2 * np.pi)
    assert lesson.check_period(10000).status == "not yet"
    assert "1 / w_1" in hint(lesson.check_period, 7 / 2 / np.pi)
    assert "Full turns" in hint(lesson.check_period, 7**2)


def test_nearest_answers():
    def by_all_pairs(length, d_model, base):
        if length > 800:
            return nearest(d_model, base, length)[0]
        rows = sinusoidal_encoding(length, d_model, base, dtype=torch.float64)
        gaps = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").fill_diagonal_(9)
        p, q = divmod(int(gaps.argmin()), length)
        return abs(p - q)

    check = lesson.check_nearest
    assert check(by_all_pairs).status == "correct"
    assert "itself" in hint(check, lambda n, d, b: encoding_distance(torch.arange(n), d, b).argmin())
    assert "One too small" in hint(check, lambda n, d, b: encoding_distance(torch.arange(1, n), d, b).argmin())
    assert "length - 1" in hint(check, lambda n, d, b: nearest(d, b, n + 1)[0])
    assert "leave out" in hint(check, lambda n, d, b: nearest(d, b, n - 1)[0])
    assert "the distance" in hint(check, lambda n, d, b: nearest(d, b, n)[1])


def test_float8_answers():
    assert lesson.check_float8(17).status == "correct"
    assert "still fits" in hint(lesson.check_float8, 2**4)
    assert "448" in hint(lesson.check_float8, 449)
