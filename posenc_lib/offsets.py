"""Ground floor: who is how far from whom. An offset is key position minus query position, j - i."""
import math
from functools import lru_cache

import torch
from torch import Tensor

from . import _checks


def relative_offsets(q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """Offset j - i of every (query i, key j): positive when the key comes after the query.

    q_positions: int (..., q). k_positions: int (..., k), leading dimensions broadcast. Returns int64 (..., q, k).
    Errors: TypeError for float positions, ValueError for negative ones and shapes that do not fit.
    """
    q_positions = _checks.positions(q_positions, "q_positions")
    k_positions = _checks.positions(k_positions, "k_positions")
    if not q_positions.dim() or not k_positions.dim():
        raise ValueError("q_positions and k_positions need at least one dimension, got a single number")
    if any(1 not in (m, n) and m != n for m, n in zip(q_positions.shape[-2::-1], k_positions.shape[-2::-1])):
        raise ValueError("q_positions and k_positions must agree in all dimensions but the last, got shapes "
                         f"{tuple(q_positions.shape)} and {tuple(k_positions.shape)}")
    return k_positions[..., None, :] - q_positions[..., :, None]


def clip_offsets(offsets: Tensor, max_offset: int) -> Tensor:
    """Row of a table with 2 * max_offset + 1 rows: clip(offset, -max_offset, max_offset) + max_offset.

    offsets: int, any shape. Returns int64 of that shape, 0..2 * max_offset; offset 0 is row max_offset.
    Errors: ValueError for a negative max_offset, TypeError for float offsets.
    Source: Shaw et al. 2018 (arXiv:1803.02155), section 3.2.
    """
    max_offset = _checks.whole_number(max_offset, "max_offset")
    return torch.clamp(_checks.integers(offsets, "offsets"), -max_offset, max_offset) + max_offset


def t5_bucket(offsets, *, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128) -> Tensor:
    """T5's bucket of each offset: near distances have their own, far ones share buckets that grow like a logarithm.

    offsets: int, any shape. num_buckets: even, >= 2. Bidirectional: keys after the query (offset > 0) use the upper
    half of the buckets. Otherwise all buckets are for the past, and every future key is in bucket 0.
    Of the n buckets of a direction, distances below e = n // 2 are exact; distance r >= e is in bucket
    e + floor((n - e) log(r / e) / log(max_distance / e)), at most n - 1.
    Returns int64 of the offsets' shape, 0..num_buckets - 1, exact at every boundary: the boundaries are found by
    comparing integer powers, where a float logarithm can land on the wrong side.
    Errors: ValueError for odd num_buckets or a max_distance that leaves no room, TypeError for float offsets.
    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1; mesh_tensorflow transformer_layers.py.
    """
    offsets = _checks.integers(offsets, "offsets")
    each_way = _half(num_buckets) * (1 if bidirectional else 2)
    exact = each_way // 2
    max_distance = _beyond(max_distance, exact)
    ends = (*range(exact), *_boundaries(exact, max_distance, each_way - exact, inclusive=False))
    distance = offsets.abs() if bidirectional else -offsets.clamp(max=0)
    bucket = _count_below(distance, ends)
    return bucket + each_way * (offsets > 0) if bidirectional else bucket


def deberta_bucket(offsets, num_buckets: int, max_distance: int) -> Tensor:
    """DeBERTa-v2's log bucket of each offset: bucket(-r) = -bucket(r), clamped to +-(num_buckets - 1).

    offsets: int, any shape. num_buckets: even, >= 2; max_distance: > m + 1, with m = num_buckets // 2. Distances
    r <= m are exact and farther ones are in bucket m + ceil((m - 1) log(r / m) / log((max_distance - 1) / m)).
    Returns int64 of the offsets' shape, exact at every boundary.
    Errors: ValueError for odd num_buckets or too small a max_distance, TypeError for float offsets.
    Source: He et al. 2021 (arXiv:2006.03654); microsoft/DeBERTa da_utils.py, make_log_bucket_position.
    """
    offsets = _checks.integers(offsets, "offsets")
    half = _half(num_buckets)
    max_distance = _beyond(max_distance, half + 1)
    ends = (*range(half + 1), *_boundaries(half, max_distance - 1, half - 1, inclusive=True))
    return offsets.sign() * _count_below(offsets.abs(), ends[:num_buckets - 1])


def alibi_slopes(num_heads: int) -> Tensor:
    """ALiBi's slope of each head: 2**(-8/n), 2**(-16/n), ..., 2**-8 for a power of two n = num_heads.

    Otherwise the slopes of the next smaller power of two n, followed by every second slope of 2n, unsorted.
    Returns float64 (num_heads,) on the CPU. Errors: ValueError for num_heads < 1.
    Source: Press et al. 2022 (arXiv:2108.12409), section 3, and get_slopes in the official code.
    """
    num_heads = _checks.whole_number(num_heads, "num_heads", least=1)
    power = 1 << (num_heads.bit_length() - 1)                                  # the largest power of two <= num_heads
    exponents = [8 * i / power for i in range(1, power + 1)] + [4 * i / power for i in range(1, 2 * power, 2)]
    return torch.tensor([2.0 ** -e for e in exponents[:num_heads]], dtype=torch.float64, device="cpu")


def is_consecutive(positions: Tensor) -> bool:
    """Whether `positions` are n, n + 1, n + 2, ... and knowing it is free: on the CPU, not batched, not compiling.

    A False is always safe: it only means the slower way, which is right for any positions.
    """
    return (not torch.compiler.is_compiling() and positions.device.type == "cpu" and positions.dim() == 1
            and positions.numel() > 0 and bool((positions.diff() == 1).all()))


def checked_table(table: Tensor, *shape: int) -> Tensor:
    """`table`, which must have this shape: an index into a table of another would be silently wrong."""
    if table.shape != shape:
        raise ValueError(f"the table must have shape {shape}, got {tuple(table.shape)}")
    return table


def _count_below(distance: Tensor, ends: tuple[int, ...]) -> Tensor:
    """Bucket of each distance, given the largest distance of every bucket but the last."""
    return torch.bucketize(distance, torch.tensor(ends, dtype=torch.int64, device=distance.device))


def _half(num_buckets) -> int:
    num_buckets = _checks.whole_number(num_buckets, "num_buckets", least=2)
    if num_buckets % 2:
        raise ValueError(f"num_buckets must be even: one half is exact, the other grows, got {num_buckets}")
    return num_buckets // 2


def _beyond(max_distance, exact: int) -> int:
    max_distance = _checks.whole_number(max_distance, "max_distance")
    if max_distance <= exact:
        raise ValueError(f"max_distance must be greater than {exact}, which these buckets reach by counting alone, "
                         f"got {max_distance}")
    return max_distance


@torch.compiler.assume_constant_result
def _boundaries(low: int, high: int, steps: int, *, inclusive: bool) -> tuple[int, ...]:
    """Largest integers <= (or < unless inclusive) the points low (high / low)**(s / steps), s = 1, ..., steps - 1."""
    return _cached_boundaries(low, high, steps, inclusive)


@lru_cache
def _cached_boundaries(low, high, steps, inclusive):
    return tuple(_floor_root(high**s * low**(steps - s) - (not inclusive), steps) for s in range(1, steps))


def _floor_root(value: int, degree: int) -> int:
    """Largest integer r with r**degree <= value, by integer comparison; the float only says where to look."""
    root = round(math.exp(math.log(value) / degree))
    while root**degree > value:
        root -= 1
    while (root + 1)**degree <= value:
        root += 1
    return root
