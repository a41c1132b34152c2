"""Ground floor: who is how far from whom. An offset is key position minus query position, j - i."""
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
