"""Frequencies, wavelengths, angles and the last cast."""
import math

import numpy as np
import pytest
import torch

from posenc_lib import frequencies, wavelengths
from posenc_lib.angles import angles, cast

BASES = [1.0, 1.0001, 10.0, 10000.0, 500000.0, 1000000.0]
WIDTHS = [2, 6, 64, 512]


def check_frequencies(frequencies, exact_angle):
    """Relative error <= (ln(base) + 2) 2**-53: the exponent is rounded once, the power to its last bit."""
    for base in BASES:
        for dim in WIDTHS:
            bound = (math.log(base) + 2) * 2**-53
            for i, w in enumerate(frequencies(dim, base).tolist()):
                exact = exact_angle(1, i, dim, base)
                assert abs(w - exact) <= bound * exact, f"base {base}, dim {dim}, pair {i}"


def test_frequencies_are_exact_to_the_last_bits(exact_angle):
    check_frequencies(frequencies, exact_angle)


def test_frequencies_start_at_one_and_are_a_geometric_progression():
    for base in BASES:
        w = frequencies(128, base)
        assert w[0] == 1
        torch.testing.assert_close(w[1:] / w[:-1], torch.full((63,), base ** (-2 / 128), dtype=torch.float64),
                                   rtol=1e-14, atol=0)


def test_frequencies_match_the_oracle(golden):
    oracle = golden["rope"]["rotate_d6"]
    expected = torch.tensor(oracle["expected"]["inv_freq"], dtype=torch.float64)
    torch.testing.assert_close(frequencies(6, oracle["inputs"]["base"]), expected, rtol=1e-15, atol=0)


def test_a_wavelength_is_one_full_turn():
    for base in BASES:
        for dim in WIDTHS:
            turn = wavelengths(dim, base) * frequencies(dim, base)
            torch.testing.assert_close(turn, torch.full((dim // 2,), 2 * math.pi, dtype=torch.float64),
                                       rtol=1e-15, atol=0)


def test_the_longest_wavelength_falls_short_of_two_pi_base():
    """The last exponent is (dim-2)/dim, not 1: at width 512, 9646 of the 10000 that articles promise."""
    assert wavelengths(512)[-1].item() == pytest.approx(2 * math.pi * 10000 ** (510 / 512), rel=1e-14)
    assert wavelengths(512).max() < 2 * math.pi * 10000


def test_base_one_turns_every_pair_alike():
    assert frequencies(8, 1).tolist() == [1.0] * 4


@pytest.mark.parametrize("function", [frequencies, wavelengths])
def test_frequencies_are_float64_on_the_cpu_whatever_the_defaults_are(function):
    expected = function(64)
    assert expected.dtype == torch.float64 and expected.device.type == "cpu" and expected.shape == (32,)
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
            assert torch.equal(function(64), expected)
            assert function(64).device.type == "cpu"
    finally:
        torch.set_default_dtype(torch.float32)


def test_widths_and_bases_may_be_numpy_numbers():
    assert torch.equal(frequencies(np.int64(6), np.float64(100)), frequencies(6, 100.0))


@pytest.mark.parametrize("dim, base, error, message", [
    (7, 1e4, ValueError, r"dim must be even: the encoding needs \(sin, cos\) pairs, got 7"),
    (0, 1e4, ValueError, "dim must be at least 1, got 0"),
    (-2, 1e4, ValueError, "dim must be at least 1, got -2"),
    (2**63, 1e4, ValueError, r"dim must be at most 2\*\*62, got 9223372036854775808"),
    (8.0, 1e4, TypeError, "dim must be an int, got 8.0 of type float"),
    (True, 1e4, TypeError, "dim must be an int, got True of type bool"),
    ("8", 1e4, TypeError, "dim must be an int, got '8' of type str"),
    (8, 0, ValueError, "base must be a finite number greater than 0, got 0"),
    (8, -1e4, ValueError, "base must be a finite number greater than 0, got -10000.0"),
    (8, math.nan, ValueError, "base must be a finite number greater than 0, got nan"),
    (8, math.inf, ValueError, "base must be a finite number greater than 0, got inf"),
    (8, 10**400, ValueError, "base must be a finite number greater than 0, got inf"),
    (8, "1e4", TypeError, "base must be a real number, got '1e4' of type str"),
    (8, 1j, TypeError, "base must be a real number, got 1j of type complex"),
    (8, True, TypeError, "base must be a real number, got True of type bool"),
    (8, torch.tensor(1e4), TypeError, r"base must be a real number, got tensor\(10000.\) of type Tensor"),
])
@pytest.mark.parametrize("function", [frequencies, wavelengths])
def test_bad_widths_and_bases_are_named(function, dim, base, error, message):
    with pytest.raises(error, match=message):
        function(dim, base)


def check_angles(angles):
    """float64(position) * frequency, rounded once - for integers of any width and sign."""
    w = frequencies(64)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        positions = torch.tensor([0, 1, min(torch.iinfo(dtype).max, 2**24 + 1)], dtype=dtype)
        theta = angles(positions, w)
        assert theta.dtype == torch.float64 and theta.shape == (3, 32)
        assert theta.tolist() == [[float(p) * f for f in w.tolist()] for p in positions.tolist()]


def test_an_angle_is_a_position_times_a_frequency():
    check_angles(angles)


def test_angles_keep_the_shape_of_the_positions(device):
    for shape in [(), (0,), (3,), (2, 3), (2, 0, 4)]:
        theta = angles(torch.zeros(shape, dtype=torch.int64, device=device), frequencies(10))
        assert theta.shape == (*shape, 5)
        assert theta.device.type == ("cpu" if device == "mps" else device)


@pytest.mark.parametrize("dtype, bits", [(torch.bfloat16, 8), (torch.float16, 11)])
def test_half_types_are_the_float32_value_rounded_once(dtype, bits):
    """Just above a tie: float32 lands on the tie, which goes to the even neighbour; a direct cast would go up."""
    value = torch.tensor([1 + 2**-bits + 2**-40], dtype=torch.float64)
    assert cast(value, dtype).item() == 1
    assert cast(value, torch.float32).item() == 1 + 2**-bits
    assert cast(value, torch.float64).item() == value.item()


@pytest.mark.parametrize("dtype, given", [(torch.int64, "torch.int64"), (torch.complex64, "torch.complex64"),
                                          (None, "None"), ("float32", "float32"), (float, "<class 'float'>")])
def test_a_cast_to_anything_but_a_float_type_is_refused(dtype, given):
    with pytest.raises(TypeError, match=f"dtype must be a floating-point torch.dtype .*, got {given}"):
        cast(torch.zeros(2, dtype=torch.float64), dtype)


@pytest.mark.parametrize("old, new", [
    ("torch.arange(0, dim, 2,", "torch.arange(0, dim // 2,"),                  # exponents i/dim instead of 2i/dim
    ("torch.pow(base, -exponents)", "torch.pow(base, exponents)"),
    ("torch.pow(base, -exponents)", "torch.pow(base, -exponents.float()).double()"),
    (' device="cpu") / dim', ' device="cpu") / max(dim - 2, 1)'),              # tensor2tensor's spacing
])
def test_the_checks_see_a_wrong_frequency(mutant, exact_angle, old, new):
    with pytest.raises(AssertionError):
        check_frequencies(mutant("angles", old, new).frequencies, exact_angle)


@pytest.mark.parametrize("old, new", [
    ("positions.to(torch.float64)[", "positions.to(torch.float32)["),
    ("positions.to(torch.float64)[", "positions.to(torch.int8).to(torch.float64)["),
    ("[..., None] * ", "[..., None] / "),
])
def test_the_checks_see_a_wrong_angle(mutant, old, new):
    with pytest.raises(AssertionError):
        check_angles(mutant("angles", old, new).angles)
