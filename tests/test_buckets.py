"""Buckets and slopes: against logarithms of 60 digits at every boundary, and against the published code."""
import bisect
import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc_lib import alibi_slopes, deberta_bucket, t5_bucket

A_HAIR = mpmath.mpf(10) ** -40


def t5_reference(offset, bidirectional, num_buckets, max_distance):
    """The published formula, with logarithms that are exact for the purpose."""
    each_way = num_buckets // 2 if bidirectional else num_buckets
    first = each_way if bidirectional and offset > 0 else 0
    distance = abs(offset) if bidirectional else max(-offset, 0)
    exact = each_way // 2
    if distance < exact:
        return first + distance
    if exact == 0:
        return first
    with mpmath.workdps(60):
        steps = mpmath.log(mpmath.mpf(distance) / exact) / mpmath.log(mpmath.mpf(max_distance) / exact)
        return first + min(exact + int(mpmath.floor(steps * (each_way - exact) + A_HAIR)), each_way - 1)


def deberta_reference(offset, num_buckets, max_distance):
    half, distance = num_buckets // 2, abs(offset)
    if distance <= half:
        return offset
    with mpmath.workdps(60):
        steps = mpmath.log(mpmath.mpf(distance) / half) / mpmath.log(mpmath.mpf(max_distance - 1) / half)
        bucket = half + int(mpmath.ceil(steps * (half - 1) - A_HAIR))
    return int(math.copysign(min(bucket, num_buckets - 1), offset))


def check_t5(t5_bucket):
    @given(st.booleans(), st.integers(1, 40), st.integers(1, 3000))
    def at_every_boundary(bidirectional, half, room):
        num_buckets = 2 * half
        max_distance = (half if bidirectional else num_buckets) // 2 + room
        offsets = torch.arange(-max_distance - 3, max_distance + 4)
        bucket = t5_bucket(offsets, bidirectional=bidirectional, num_buckets=num_buckets, max_distance=max_distance)
        assert bucket.dtype == torch.int64 and bucket.shape == offsets.shape
        past = bucket[offsets <= 0]
        assert (past.diff() <= 0).all()                                 # monotone, so it is enough to look at the steps
        step = (bucket.diff() != 0).nonzero().flatten()
        for index in {0, len(offsets) - 1, *step.tolist(), *(step + 1).tolist()}:
            expected = t5_reference(int(offsets[index]), bidirectional, num_buckets, max_distance)
            assert bucket[index] == expected, (int(offsets[index]), num_buckets, max_distance)
        if bidirectional:
            future = bucket[offsets > 0]
            assert torch.equal(future, past[:-1].flip(0) + half)
        else:
            assert (bucket[offsets >= 0] == 0).all()

    at_every_boundary()
    for max_distance in (2**57, 2**59, 2**60 - 1):                      # the float root is off by hundreds here
        for step in (1, 2):
            first = bisect.bisect_left(range(2**60), max_distance**step * 3**(3 - step), key=lambda r: r**3)
            assert t5_bucket([1 - first, -first], bidirectional=False, num_buckets=6,
                             max_distance=max_distance).tolist() == [2 + step, 3 + step]
    # (14 / 3)**2 = 392 / 18 exactly: 84 is a boundary that a float32 logarithm misses
    assert t5_bucket([-84, -83], bidirectional=False, num_buckets=36, max_distance=392).tolist() == [27, 26]


def check_deberta(deberta_bucket):
    @given(st.integers(1, 40), st.integers(2, 3000))
    def at_every_boundary(half, room):
        num_buckets, max_distance = 2 * half, half + room
        offsets = torch.arange(-max_distance - 3, max_distance + 4)
        bucket = deberta_bucket(offsets, num_buckets, max_distance)
        assert bucket.dtype == torch.int64 and bucket.shape == offsets.shape
        assert (bucket.diff() >= 0).all() and torch.equal(bucket, -bucket.flip(0))
        step = (bucket.diff() != 0).nonzero().flatten()
        for index in {0, len(offsets) - 1, *step.tolist(), *(step + 1).tolist()}:
            assert bucket[index] == deberta_reference(int(offsets[index]), num_buckets, max_distance)

    at_every_boundary()
    assert deberta_bucket([24, 25], 18, 65).tolist() == [13, 14]        # (24 / 9)**2 = 64 / 9 exactly


def test_t5_buckets_are_exact_at_every_boundary():
    check_t5(t5_bucket)


def test_deberta_buckets_are_exact_at_every_boundary():
    check_deberta(deberta_bucket)


@pytest.mark.parametrize("check, name, old, new", [
    (check_t5, "t5_bucket", "inclusive=False", "inclusive=True"),
    (check_t5, "t5_bucket", "(offsets > 0)", "(offsets >= 0)"),
    (check_t5, "t5_bucket", "-offsets.clamp(max=0)", "offsets.clamp(min=0)"),
    (check_t5, "t5_bucket", "*range(exact), *", "*range(exact), exact, *"),
    (check_deberta, "deberta_bucket", "inclusive=True", "inclusive=False"),
    (check_deberta, "deberta_bucket", "offsets.sign() *", ""),
    (check_deberta, "deberta_bucket", "max_distance - 1, half - 1", "max_distance, half - 1"),
    (check_deberta, "deberta_bucket", "ends[:num_buckets - 1]", "ends"),
    (check_t5, "t5_bucket", "    while root**degree > value:\n        root -= 1\n", ""),
    (check_deberta, "deberta_bucket", "    while root**degree > value:\n        root -= 1\n", ""),
])
def test_the_checks_see_a_wrong_bucket(mutant, check, name, old, new):
    with pytest.raises(AssertionError):
        check(getattr(mutant("offsets", old, new), name))


def test_buckets_match_the_stored_values(golden):
    for kind, bidirectional in (("bidirectional_32_128", True), ("causal_32_128", False)):
        case = golden["t5"][kind]
        assert t5_bucket(case["inputs"]["relative_position"],
                         bidirectional=bidirectional).tolist() == case["expected"]["bucket"]
    case = golden["deberta"]["log_bucket_8_32"]
    assert deberta_bucket(case["inputs"]["relative_position"], 8, 32).tolist() == case["expected"]["bucket"]


def test_where_the_default_buckets_begin():
    offsets = torch.arange(0, 200)
    begin = (t5_bucket(-offsets).diff() != 0).nonzero().flatten() + 1
    assert begin.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert 16 not in t5_bucket(torch.arange(-300, 300))                 # the upper half has no distance 0
    begin = (t5_bucket(-offsets, bidirectional=False).diff() != 0).nonzero().flatten() + 1
    assert begin.tolist() == [*range(1, 17), 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]


def test_buckets_match_transformers_where_its_float_logarithms_are_right():
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5").T5Attention
    deberta = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    offsets = torch.arange(-600, 601)
    for num_buckets, max_distance in ((32, 128), (64, 128), (8, 64), (12, 500)):
        for bidirectional in (True, False):
            theirs = t5._relative_position_bucket(offsets, bidirectional, num_buckets, max_distance)
            assert torch.equal(t5_bucket(offsets, bidirectional=bidirectional, num_buckets=num_buckets,
                                         max_distance=max_distance), theirs)
    for num_buckets, max_distance in ((256, 512), (64, 512), (8, 512)):
        offsets = torch.arange(1 - max_distance, max_distance)
        theirs = deberta.make_log_bucket_position(offsets, num_buckets, max_distance)
        assert torch.equal(deberta_bucket(offsets, num_buckets, max_distance), theirs.to(torch.int64))


def test_slopes_match_the_stored_values(golden):
    for num_heads, slopes in golden["alibi"]["slopes"]["expected"].items():
        ours = alibi_slopes(int(num_heads))
        assert ours.dtype == torch.float64 and ours.device.type == "cpu"
        torch.testing.assert_close(ours, torch.tensor(slopes, dtype=torch.float64), rtol=1e-14, atol=0)


@pytest.mark.parametrize("num_heads", [*range(1, 20), 64, 71, 112])
def test_slopes_match_bloom(num_heads):
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    theirs = bloom.build_alibi_tensor(torch.ones(1, 2), num_heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(alibi_slopes(num_heads).float(), theirs, rtol=2e-6, atol=0)


def test_slopes_under_another_default_device():
    with torch.device("meta"):
        assert alibi_slopes(6).tolist() == [2 ** -2, 2 ** -4, 2 ** -6, 2 ** -8, 2 ** -1, 2 ** -3]


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 3)])
@pytest.mark.parametrize("bucket", [t5_bucket, lambda offsets: deberta_bucket(offsets, 8, 32)])
def test_buckets_keep_shape_and_device(bucket, shape):
    assert bucket(torch.zeros(shape, dtype=torch.int32)).shape == shape
    assert bucket(torch.zeros(shape, dtype=torch.int64, device="meta")).device.type == "meta"


def test_buckets_compile():
    for bucket in (t5_bucket, lambda offsets: deberta_bucket(offsets, 64, 200)):
        offsets = torch.arange(-300, 300)
        assert torch.equal(torch.compile(bucket, fullgraph=True, backend="aot_eager")(offsets), bucket(offsets))


@pytest.mark.parametrize("call, error, message", [
    (lambda: t5_bucket([1], num_buckets=33), ValueError, "num_buckets must be even: .* got 33"),
    (lambda: t5_bucket([1], num_buckets=0), ValueError, "num_buckets must be at least 2, got 0"),
    (lambda: t5_bucket([1], num_buckets=32.0), TypeError, "num_buckets must be an int, got 32.0"),
    (lambda: t5_bucket([1], max_distance=8), ValueError, "max_distance must be greater than 8, .* got 8"),
    (lambda: t5_bucket([1], bidirectional=False, max_distance=16), ValueError, "greater than 16, .* got 16"),
    (lambda: t5_bucket([1.5]), TypeError, "offsets must be integers"),
    (lambda: deberta_bucket([1], 7, 32), ValueError, "num_buckets must be even: .* got 7"),
    (lambda: deberta_bucket([1], 8, 5), ValueError, "max_distance must be greater than 5, .* got 5"),
    (lambda: deberta_bucket(torch.ones(2), 8, 32), TypeError, "offsets must be integers"),
    (lambda: alibi_slopes(0), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: alibi_slopes(2.0), TypeError, "num_heads must be an int"),
])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
