"""The sinusoidal encoding as a function: against exact arithmetic, and by its identities."""
import itertools
import math
import random
import shutil

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc_lib import complex_encoding, encoding_distance, frequencies, shift_matrix, sinusoidal_encoding

BASES = [1.0, 1.0001, 10.0, 10000.0, 500000.0, 1000000.0]
WIDTHS = [2, 6, 64, 256, 512]
EXTREMES = [0, 1, 2, 44, 710, 2**16, 10**6, 2**23 + 1, 2**24 - 2, 2**24 - 1]

positions = st.integers(0, 2**24 - 1)
shifts = st.integers(-2**24, 2**24)
widths = st.integers(1, 16).map(lambda pairs: 2 * pairs)
bases = st.floats(1, 1e6)


def float64_bound(position):
    """Error of a float64 sine: the angle's relative error is at most (ln(base) 2i/d + 3) 2**-53, and w_i times
    ln(base) 2i/d is at most 1/e, so the angle is off by less than 4 p 2**-53; the sine itself by 2**-52."""
    return 4 * abs(position) * 2**-53 + 2**-52


def check_precision(sinusoidal_encoding, exact_angle, device="cpu", dtypes=(torch.float32, torch.float64)):
    """Sines and cosines against 60-digit arithmetic: 6e-8 in float32, `float64_bound` in float64."""
    draw = random.Random(1)
    for base, d_model in itertools.product(BASES, WIDTHS):
        numbers = EXTREMES + [draw.randrange(2**24) for _ in range(20)]
        pairs = sorted({0, d_model // 2 - 1, *(draw.randrange(d_model // 2) for _ in range(4))})
        for dtype in dtypes:
            code = sinusoidal_encoding(torch.tensor(numbers, device=device), d_model, base, dtype=dtype).tolist()
            for p, row in zip(numbers, code):
                bound = 6e-8 if dtype == torch.float32 else float64_bound(p)
                for i in pairs:
                    exact, where = exact_angle(p, i, d_model, base), f"{p=} {i=} {d_model=} {base=} {dtype}"
                    assert abs(row[2 * i] - mpmath.sin(exact)) <= bound, f"sine of {where}"
                    assert abs(row[2 * i + 1] - mpmath.cos(exact)) <= bound, f"cosine of {where}"


def test_every_sine_and_cosine_is_exact_to_rounding(exact_angle, device):
    check_precision(sinusoidal_encoding, exact_angle, device, (torch.float32,))


def test_float64_is_exact_to_the_stated_bound(exact_angle):
    check_precision(sinusoidal_encoding, exact_angle, "cpu", (torch.float64,))


def test_float32_angles_would_be_wrong(exact_angle):
    """What popular libraries do: the angle itself in float32. Off by more than 1e-3 at position 1e5 (float32 angles
    there are 2**-7 apart), by more than 1e-2 at 1e6."""
    def worst(code, p):
        return max(abs(float(s) - mpmath.sin(exact_angle(p, i, 128))) for i, s in enumerate(code))

    w = 10000.0 ** -(torch.arange(0, 128, 2, dtype=torch.float32) / 128)
    for p, error in ((10**5, 1e-3), (10**6, 1e-2)):
        assert worst((torch.tensor(float(p)) * w).sin(), p) > error
        assert worst(sinusoidal_encoding(torch.tensor(p), 128)[0::2], p) < 6e-8


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_the_float32_value_rounded_once(dtype, device):
    where = torch.tensor(EXTREMES, device=device)
    for layout in ("interleaved", "half"):
        code = sinusoidal_encoding(where, 64, layout=layout, dtype=dtype)
        assert code.dtype == dtype
        assert torch.equal(code, sinusoidal_encoding(where, 64, layout=layout).to(dtype))


def test_float32_is_the_float64_value_rounded_once():
    exact = sinusoidal_encoding(torch.tensor(EXTREMES), 64, dtype=torch.float64)
    assert torch.equal(sinusoidal_encoding(torch.tensor(EXTREMES), 64), exact.float())


def check_layouts(sinusoidal_encoding, golden):
    for name, layout in (("interleaved_d6", "interleaved"), ("concat_d6", "half")):
        oracle = golden["sinusoidal"][name]
        given, expected = oracle["inputs"], torch.tensor(oracle["expected"]["pe"], dtype=torch.float64)
        code = sinusoidal_encoding(given["positions"], given["d"], given["base"], layout=layout, dtype=torch.float64)
        torch.testing.assert_close(code, expected, rtol=0, atol=1e-15)


def test_both_layouts_match_the_oracle(golden):
    check_layouts(sinusoidal_encoding, golden)


def test_layouts_are_permutations_of_each_other(golden):
    index = golden["rope"]["layout_permutation"]["expected"]
    interleaved, half = (sinusoidal_encoding(50, 6, layout=layout) for layout in ("interleaved", "half"))
    assert torch.equal(interleaved[:, index["interleaved_to_half_index"]], half)
    assert torch.equal(half[:, index["half_to_interleaved_index"]], interleaved)


def test_a_shifted_encoding_matches_the_oracle(golden):
    oracle = golden["shape"]["shift_k5"]
    inputs = oracle["inputs"]
    code = sinusoidal_encoding(torch.arange(inputs["L"]) + inputs["shift"], inputs["d"], inputs["base"],
                               dtype=torch.float64)
    torch.testing.assert_close(code, torch.tensor(oracle["expected"]["pe"], dtype=torch.float64), rtol=0, atol=1e-14)


@given(st.lists(positions, max_size=5), widths, bases)
def test_the_complex_form_is_the_same_code(where, d_model, base):
    z = complex_encoding(where, d_model, base)
    code = sinusoidal_encoding(where, d_model, base, dtype=torch.float64)
    assert z.dtype == torch.complex128 and z.shape == (len(where), d_model // 2)
    assert torch.equal(z.imag, code[:, 0::2]) and torch.equal(z.real, code[:, 1::2])
    torch.testing.assert_close(z.abs(), torch.ones_like(z.real), rtol=0, atol=4 * 2**-53)


@given(positions, positions, widths, bases)
def test_in_complex_form_a_shift_multiplies(p, k, d_model, base):
    z = complex_encoding([p, k, p + k], d_model, base)
    torch.testing.assert_close(z[2], z[0] * z[1], rtol=0, atol=4 * float64_bound(p + k))


def check_shift_matrix(shift_matrix):
    @given(positions, shifts, widths, bases)
    def shifts_every_position(p, k, d_model, base):
        k = max(k, -p)
        code = sinusoidal_encoding([p, p + k], d_model, base, dtype=torch.float64)
        torch.testing.assert_close(shift_matrix(k, d_model, base) @ code[0], code[1], rtol=0,
                                   atol=4 * float64_bound(2 * p + abs(k)))

    @given(shifts, shifts, widths, bases)
    def group_law(a, b, d_model, base):
        product = shift_matrix(a, d_model, base) @ shift_matrix(b, d_model, base)
        torch.testing.assert_close(product, shift_matrix(a + b, d_model, base), rtol=0,
                                   atol=4 * float64_bound(abs(a) + abs(b)))

    @given(shifts, widths, bases)
    def transpose_shifts_back(k, d_model, base):
        there, back = shift_matrix(k, d_model, base), shift_matrix(-k, d_model, base)
        assert there.dtype == torch.float64 and there.shape == (d_model, d_model)
        assert torch.equal(there.T, back)
        torch.testing.assert_close(there @ back, torch.eye(d_model, dtype=torch.float64), rtol=0, atol=4 * 2**-53)

    shifts_every_position()
    group_law()
    transpose_shifts_back()
    assert torch.equal(shift_matrix(0, 8), torch.eye(8, dtype=torch.float64))


def test_shift_matrix_moves_every_position_and_is_a_group_of_rotations():
    check_shift_matrix(shift_matrix)


def test_shift_matrix_is_a_clockwise_turn_of_each_pair():
    """In (sin, cos) coordinates the code of position p is at angle p from the cos axis, towards sin: clockwise."""
    one = math.cos(1), math.sin(1)
    torch.testing.assert_close(shift_matrix(1, 2), torch.tensor([[one[0], one[1]], [-one[1], one[0]]],
                                                                dtype=torch.float64), rtol=0, atol=2**-53)
    mixed = shift_matrix(3, 6)
    for i, j in itertools.product(range(6), repeat=2):
        assert (mixed[i, j] != 0) == (i // 2 == j // 2)


@given(positions, positions, st.integers(0, 2**24), widths, bases)
def test_dot_products_depend_on_the_offset_only_and_are_even_in_it(p, q, shift, d_model, base):
    code = sinusoidal_encoding([p, q, p + shift, q + shift], d_model, base, dtype=torch.float64)
    here, there, mirrored = code[0] @ code[1], code[2] @ code[3], code[3] @ code[2]
    expected = (abs(p - q) * frequencies(d_model, base)).cos().sum()          # sum over pairs of cos(k w_i)
    bound = 2 * d_model * float64_bound(p + q + 2 * shift)
    torch.testing.assert_close(here, expected, rtol=0, atol=bound)
    torch.testing.assert_close(there, here, rtol=0, atol=bound)
    assert there == mirrored


def check_encoding_distance(encoding_distance, exact_angle):
    """Against the definition in exact arithmetic; near-returns keep their digits at width 2, where they are nearest."""
    offsets = [0, 1, -1, 5, 44, -44, 710, 103993, 2**24 - 1]
    for base, d_model in itertools.product(BASES, (2, 6, 64)):
        for k, distance in zip(offsets, encoding_distance(offsets, d_model, base).tolist()):
            theta = [exact_angle(k, i, d_model, base) for i in range(d_model // 2)]
            exact = mpmath.sqrt(sum(mpmath.sin(t) ** 2 + (mpmath.cos(t) - 1) ** 2 for t in theta))
            bound = 4 * exact * 2**-53 if d_model == 2 else d_model * float64_bound(k)
            assert abs(distance - exact) <= bound, f"{k=} {d_model=} {base=}"


def test_encoding_distance_against_exact_arithmetic(exact_angle):
    check_encoding_distance(encoding_distance, exact_angle)


def test_near_returns_of_the_fastest_pair():
    """44 is 7 turns and 710 is 113 turns, almost: 22/7 and 355/113 are close to pi."""
    near = encoding_distance([44, 710], 2)
    assert near.tolist() == pytest.approx([2 * abs(float(mpmath.sin(22))), 2 * abs(float(mpmath.sin(355)))], rel=1e-15)
    distances = encoding_distance(torch.arange(1, 710), 2)
    assert (distances > near[1]).all() and (distances[:43] > near[0]).all()


@given(st.lists(positions, min_size=2, max_size=2), widths, bases)
def test_distance_is_the_norm_of_the_difference_at_every_position(where, d_model, base):
    code = sinusoidal_encoding(where, d_model, base, dtype=torch.float64)
    distance = encoding_distance(where[1] - where[0], d_model, base)
    torch.testing.assert_close((code[1] - code[0]).norm(), distance, rtol=0, atol=d_model * float64_bound(sum(where)))
    assert distance == encoding_distance(where[0] - where[1], d_model, base)
    assert 0 <= distance <= math.sqrt(2 * d_model) * (1 + 2**-50)


@pytest.mark.parametrize("kind", [
    list, tuple, np.array, torch.tensor, lambda v: np.array(v, dtype=np.uint8), lambda v: np.array(v[::-1])[::-1],
    lambda v: np.broadcast_to(np.array(v), (4,)), lambda v: torch.tensor(v, dtype=torch.uint8),
    lambda v: torch.tensor(v, dtype=torch.int8), lambda v: torch.tensor(v, dtype=torch.int32),
    lambda v: torch.tensor(v, dtype=torch.uint16), lambda v: np.array(v, dtype=np.uint64)])
@pytest.mark.filterwarnings("error")
def test_positions_of_every_integer_kind_are_the_same_positions(kind):
    where = [3, 0, 127, 5]
    expected = sinusoidal_encoding(128, 8)[where]
    assert torch.equal(sinusoidal_encoding(kind(where), 8), expected)
    assert torch.equal(complex_encoding(kind(where), 8), complex_encoding(128, 8)[where])
    assert torch.equal(encoding_distance(kind(where), 8), encoding_distance(torch.arange(128), 8)[where])


def test_an_int_is_a_length_and_a_scalar_tensor_a_position():
    assert torch.equal(sinusoidal_encoding(5, 8), sinusoidal_encoding(torch.arange(5), 8))
    assert torch.equal(sinusoidal_encoding(np.int32(5), 8), sinusoidal_encoding(5, 8))
    assert torch.equal(complex_encoding(5, 8), complex_encoding(range(5), 8))
    assert torch.equal(sinusoidal_encoding(torch.tensor(4), 8), sinusoidal_encoding(5, 8)[4])
    assert torch.equal(encoding_distance(4, 8), encoding_distance([4], 8)[0])


@pytest.mark.parametrize("shape", [(0,), (2, 3), (2, 0), (2, 3, 4)])
def test_codes_keep_the_shape_of_the_positions(shape, device):
    where = torch.arange(math.prod(shape), device=device).reshape(shape)
    for layout in ("interleaved", "half"):
        code = sinusoidal_encoding(where, 6, layout=layout)
        assert code.shape == (*shape, 6) and code.device.type == device
        assert torch.equal(code.reshape(-1, 6).cpu(), sinusoidal_encoding(math.prod(shape), 6, layout=layout))
    assert complex_encoding(where.cpu(), 6).shape == (*shape, 3)
    assert encoding_distance(where.cpu(), 6).shape == shape
    assert sinusoidal_encoding(0, 6).shape == sinusoidal_encoding([], 6).shape == (0, 6)


def test_nothing_but_the_arguments_matters():
    """Not what was asked before, nor autocast, inference mode or the default dtype."""
    expected = sinusoidal_encoding(100, 16), shift_matrix(7, 16), encoding_distance(7, 16), complex_encoding(100, 16)
    sinusoidal_encoding(200, 16, 10.0, dtype=torch.bfloat16)
    sinusoidal_encoding(50, 16, layout="half")

    def same():
        now = sinusoidal_encoding(100, 16), shift_matrix(7, 16), encoding_distance(7, 16), complex_encoding(100, 16)
        return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(now, expected))

    assert same()
    with torch.autocast("cpu", torch.bfloat16):
        assert same()
    with torch.inference_mode():
        assert same()
    torch.set_default_dtype(torch.float64)
    try:
        assert same()
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_code_can_be_changed_in_place_without_changing_the_next_one():
    expected = sinusoidal_encoding(5, 8).clone()
    sinusoidal_encoding(5, 8).zero_()
    assert torch.equal(sinusoidal_encoding(5, 8), expected)


def test_under_a_meta_default_device_values_are_still_computed_on_the_cpu():
    expected = sinusoidal_encoding(5, 8), shift_matrix(3, 8), encoding_distance([3], 8), complex_encoding(5, 8)
    with torch.device("meta"):
        assert sinusoidal_encoding(5, 8).device.type == "meta"                  # the caller's default is respected ...
        now = (sinusoidal_encoding(5, 8, device="cpu"), shift_matrix(3, 8),     # ... and so is what the caller says
               encoding_distance([3], 8), complex_encoding(5, 8))
    assert all(torch.equal(a, b) for a, b in zip(now, expected))


def test_meta_positions_give_meta_codes():
    for dtype in (torch.int32, torch.int64, torch.uint64):
        code = sinusoidal_encoding(torch.empty(2, 3, dtype=dtype, device="meta"), 8)
        assert code.device.type == "meta" and code.shape == (2, 3, 8)


@pytest.mark.parametrize("function", [sinusoidal_encoding, complex_encoding])
@pytest.mark.parametrize("where, error, message", [
    (torch.arange(3.0), TypeError, "positions must be integers, got dtype torch.float32: a position is a count"),
    (torch.arange(3).half(), TypeError, "positions must be integers, got dtype torch.float16"),
    (2.0, TypeError, "positions must be integers, got dtype torch.float32"),
    ([1, 2.5], TypeError, "positions must be integers, got dtype torch.float32"),
    ([True, False], TypeError, "positions must be integers, got dtype torch.bool"),
    (True, TypeError, "positions must be integers, got dtype torch.bool"),
    (torch.tensor([1j]), TypeError, "positions must be integers, got dtype torch.complex64"),
    ("12", TypeError, "positions must be 64-bit integers in a tensor, an array or a regular list, got '12'"),
    (None, TypeError, "positions must be 64-bit integers in a tensor, an array or a regular list, got None"),
    ([2**64], TypeError, "positions must be 64-bit integers in a tensor, an array or a regular list, got"),
    (np.array([2**64 - 1], dtype=np.uint64), ValueError,
     r"positions must be below 2\*\*63, got \[18446744073709551615\]"),
    (-1, ValueError, r"positions \(a length\) must be at least 0, got -1"),
    (2**70, ValueError, r"positions \(a length\) must be at most 2\*\*62"),
    (torch.tensor([0, -3]), ValueError, "positions must not be negative, got -3"),
])
def test_bad_positions_are_named(function, where, error, message):
    with pytest.raises(error, match=message):
        function(where, 8)


@pytest.mark.parametrize("call", [lambda d, b: sinusoidal_encoding(3, d, b), lambda d, b: complex_encoding(3, d, b),
                                  lambda d, b: shift_matrix(3, d, b), lambda d, b: encoding_distance(3, d, b)])
@pytest.mark.parametrize("d_model, base, error, message", [
    (7, 1e4, ValueError, r"d_model must be even: the encoding needs \(sin, cos\) pairs, got 7"),
    (0, 1e4, ValueError, "d_model must be at least 1, got 0"),
    (8.0, 1e4, TypeError, "d_model must be an int, got 8.0"),
    (8, -1, ValueError, "base must be a finite number greater than 0, got -1.0"),
    (8, math.nan, ValueError, "base must be a finite number greater than 0, got nan"),
])
def test_bad_widths_and_bases_are_named(call, d_model, base, error, message):
    with pytest.raises(error, match=message):
        call(d_model, base)


@pytest.mark.parametrize("call, error, message", [
    (lambda: sinusoidal_encoding(3, 8, layout="concat"), ValueError, 'layout must be "interleaved" .* got \'concat\''),
    (lambda: sinusoidal_encoding(3, 8, dtype=torch.int64), TypeError, "dtype must be a floating-point torch.dtype"),
    (lambda: sinusoidal_encoding(3, 8, dtype=torch.complex64), TypeError, "dtype must be a floating-point torch.dtype"),
    (lambda: shift_matrix(1.0, 8), TypeError, "offset must be an int, got 1.0 of type float"),
    (lambda: shift_matrix(2**70, 8), ValueError, r"offset must be at most 2\*\*62"),
    (lambda: shift_matrix(-2**70, 8), ValueError, "offset must be at least -4611686018427387904"),
    (lambda: encoding_distance(0.5, 8), TypeError, "offsets must be integers, got dtype torch.float32"),
])
def test_other_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++") or shutil.which("cl")), reason="needs a C++ compiler"))])
def test_compiled_code_is_as_exact(backend, exact_angle):
    """One graph, any length; the checks of values are skipped, the arithmetic is not."""
    compiled = torch.compile(lambda p: sinusoidal_encoding(p, 64), fullgraph=True, dynamic=True, backend=backend)
    for where in (torch.tensor(EXTREMES), torch.tensor(EXTREMES[:3])):
        code = compiled(where)
        for p, row in zip(where.tolist(), code.tolist()):
            for i in (0, 9, 31):
                assert abs(row[2 * i] - mpmath.sin(exact_angle(p, i, 64))) <= 6e-8
                assert abs(row[2 * i + 1] - mpmath.cos(exact_angle(p, i, 64))) <= 6e-8


def test_a_compiled_length_may_vary():
    compiled = torch.compile(lambda x: sinusoidal_encoding(x.shape[0], x.shape[1]), fullgraph=True, backend="eager",
                             dynamic=True)
    for length, d_model in ((5, 8), (7, 8), (3, 12)):
        assert torch.equal(compiled(torch.empty(length, d_model)), sinusoidal_encoding(length, d_model))


@pytest.mark.parametrize("old, new", [
    ("(theta.sin(), theta.cos())", "(theta.cos(), theta.sin())"),
    ('layout == "interleaved"', 'layout == "half"'),
    ("theta = angles(*_arguments(positions, d_model, base))                      #",
     "theta = angles(*_arguments(positions, d_model, base)).float()  #"),
    ("theta = angles(*_arguments(positions, d_model, base))                      #",
     "theta = angles(*_arguments(positions, d_model, base)) + 1  #"),
    ("return cast(pairs.flatten(-2), dtype", "return cast(pairs.flatten(-2).half(), dtype"),
    ("frequency = frequencies(_checks.even_width(d_model), base)", "frequency = frequencies(d_model)"),
])
def test_the_checks_see_a_wrong_encoding(mutant, exact_angle, golden, old, new):
    wrong = mutant("sinusoidal", old, new).sinusoidal_encoding
    with pytest.raises(AssertionError):
        check_precision(wrong, exact_angle)
        check_layouts(wrong, golden)


@pytest.mark.parametrize("old, new", [
    ("(cos, sin, -sin, cos)", "(cos, -sin, sin, cos)"), ("(cos, sin, -sin, cos)", "(cos, sin, sin, cos)"),
    ("theta = offset * ", "theta = -offset * "), ("theta = offset * ", "theta = offset / "),
    ("frequencies(_checks.even_width(d_model), base)\n    sin", "frequencies(d_model)\n    sin")])
def test_the_checks_see_a_wrong_shift(mutant, old, new):
    with pytest.raises(AssertionError):
        check_shift_matrix(mutant("sinusoidal", old, new).shift_matrix)


@pytest.mark.parametrize("old, new", [
    ("(theta / 2).sin()", "theta.sin()"), ("return 2 * (theta", "return (theta"),
    ("return 2 * (theta / 2).sin().square().sum(dim=-1).sqrt()", "return (2 * (1 - theta.cos()).sum(dim=-1)).sqrt()")])
def test_the_checks_see_a_wrong_distance(mutant, exact_angle, old, new):
    """The last mutant is the textbook formula 2 - 2 cos, which loses the digits of a near-return."""
    with pytest.raises(AssertionError):
        check_encoding_distance(mutant("sinusoidal", old, new).encoding_distance, exact_angle)
