"""Who is how far from whom: offsets and clipping."""
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc_lib import clip_offsets, relative_offsets

positions = st.lists(st.integers(0, 2**62), max_size=6)
offsets = st.lists(st.integers(-2**61, 2**61), max_size=8)


def int64(values):
    return torch.tensor(values, dtype=torch.int64)


def check_relative_offsets(relative_offsets):
    @given(positions, positions)
    def key_minus_query(q, k):
        result = relative_offsets(int64(q), int64(k))
        assert result.dtype == torch.int64 and result.shape == (len(q), len(k))
        assert result.tolist() == [[j - i for j in k] for i in q]

    key_minus_query()


def test_an_offset_is_key_minus_query():
    check_relative_offsets(relative_offsets)


@given(positions, positions, st.integers(0, 2**61))
def test_offsets_do_not_change_when_everything_shifts(q, k, shift):
    assert torch.equal(relative_offsets(int64(q) // 2 + shift, int64(k) // 2 + shift),
                       relative_offsets(int64(q) // 2, int64(k) // 2))


@given(positions, positions)
def test_swapping_the_roles_transposes_and_negates(q, k):
    assert torch.equal(relative_offsets(int64(q), int64(k)), -relative_offsets(int64(k), int64(q)).T)


def test_batches_of_positions_give_batches_of_offsets():
    q, k = int64([[3, 4], [7, 8]]), int64([0, 1, 2])
    batched = relative_offsets(q, k)
    assert batched.shape == (2, 2, 3)
    for row, expected in zip(q, batched):
        assert torch.equal(relative_offsets(row, k), expected)
    assert torch.equal(relative_offsets(k, q), -batched.transpose(1, 2))


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda v: np.array(v, dtype=np.uint8),
                                  lambda v: torch.tensor(v, dtype=torch.int32), lambda v: np.array(v[::-1])[::-1]])
def test_offsets_of_lists_arrays_and_narrow_integers_do_not_wrap(kind):
    """0 - 200 would be 56 in uint8."""
    assert relative_offsets(kind([0, 200]), kind([0, 200])).tolist() == [[0, 200], [-200, 0]]


def test_no_positions_give_no_offsets():
    assert relative_offsets([], [1, 2]).shape == (0, 2)
    assert relative_offsets(int64([1, 2]), torch.zeros(3, 0, dtype=torch.int64)).shape == (3, 2, 0)


def check_clip_offsets(clip_offsets):
    @given(offsets, st.integers(0, 2**62))
    def clipped_and_counted_from_zero(values, max_offset):
        rows = clip_offsets(int64(values), max_offset)
        assert rows.tolist() == [min(max(value, -max_offset), max_offset) + max_offset for value in values]

    @given(offsets, st.integers(0, 5))
    def close_to_zero(values, max_offset):
        rows = clip_offsets(int64(values + list(range(-7, 8))), max_offset)
        assert rows.unique().tolist() == list(range(2 * max_offset + 1))
        assert rows[values.index(0) if 0 in values else len(values) + 7] == max_offset

    clipped_and_counted_from_zero()
    close_to_zero()


def test_clipped_offsets_are_the_rows_of_a_table():
    check_clip_offsets(clip_offsets)


def test_the_widest_clip_does_not_wrap():
    assert clip_offsets([-2**62, 0, 2**62 - 1], 2**62).tolist() == [0, 2**62, 2**63 - 1]


def test_clipping_matches_the_oracle(golden):
    oracle = golden["shaw"]["k2_L4"]
    k = oracle["inputs"]["max_relative_position"]
    assert clip_offsets(relative_offsets(torch.arange(4), torch.arange(4)), k).tolist() == oracle["expected"]["index"]
    last_query = relative_offsets(torch.tensor([3]), torch.arange(4))
    assert clip_offsets(last_query, k).tolist() == oracle["expected"]["index_decode_last_query"]


@pytest.mark.parametrize("q, k, error, message", [
    (torch.arange(3.0), [0], TypeError, "q_positions must be integers, got dtype torch.float32: a position is a count"),
    ([0], torch.tensor([True]), TypeError, "k_positions must be integers, got dtype torch.bool"),
    ([0], [-1], ValueError, "k_positions must not be negative, got -1"),
    (3, [0], TypeError, r"q_positions must be an integer tensor, got the int 3; write torch.arange\(3\)"),
    (torch.tensor(3), [0], ValueError, "q_positions and k_positions need at least one dimension, got a single number"),
    (None, [0], TypeError, "q_positions must be 64-bit integers in a tensor, an array or a regular list, got None"),
    ([[0], [1, 2]], [0], TypeError, "q_positions must be 64-bit integers in a tensor, an array or a regular list"),
    ([2**70], [0], TypeError, "q_positions must be 64-bit integers in a tensor, an array or a regular list"),
    ([0], np.array([2**63 + 5], dtype=np.uint64), ValueError,
     r"k_positions must be below 2\*\*63, got \[9223372036854775813\]"),
    (torch.zeros(2, 3, dtype=torch.int32), torch.zeros(3, 4, dtype=torch.int32), ValueError,
     r"must agree in all dimensions but the last, got shapes \(2, 3\) and \(3, 4\)"),
])
def test_bad_positions_are_named(q, k, error, message):
    with pytest.raises(error, match=message):
        relative_offsets(q, k)


@pytest.mark.parametrize("values, max_offset, error, message", [
    ([0.5], 2, TypeError, "offsets must be integers, got dtype torch.float32"),
    ([1], -1, ValueError, "max_offset must be at least 0, got -1"),
    ([1], 2.0, TypeError, "max_offset must be an int, got 2.0 of type float"),
    ([1], 2**63 - 1, ValueError, r"max_offset must be at most 2\*\*62, got 9223372036854775807"),
    (np.array([2**63], dtype=np.uint64), 2, ValueError, r"offsets must be below 2\*\*63, got \[9223372036854775808\]"),
])
def test_bad_offsets_are_named(values, max_offset, error, message):
    with pytest.raises(error, match=message):
        clip_offsets(values, max_offset)


@pytest.mark.parametrize("old, new", [
    ("k_positions[..., None, :] - q_positions[..., :, None]", "q_positions[..., :, None] - k_positions[..., None, :]"),
    ("k_positions[..., None, :] - q_positions[..., :, None]", "k_positions[..., :, None] - q_positions[..., None, :]"),
    ("k_positions[..., None, :] - q", "k_positions[..., None, :].int() - q"),
])
def test_the_checks_see_a_wrong_offset(mutant, old, new):
    with pytest.raises(AssertionError):
        check_relative_offsets(mutant("offsets", old, new).relative_offsets)


@pytest.mark.parametrize("old, new", [
    ("), -max_offset, max_offset) + max_offset", "), -max_offset, max_offset)"),
    ("), -max_offset, max_offset) + max_offset", "), 0, max_offset) + max_offset"),
    ("), -max_offset, max_offset) + max_offset", "), -max_offset, max_offset - 1) + max_offset"),
])
def test_the_checks_see_a_wrong_clip(mutant, old, new):
    with pytest.raises(AssertionError):
        check_clip_offsets(mutant("offsets", old, new).clip_offsets)
