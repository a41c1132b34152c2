"""Ground floor: frequencies, wavelengths and angles, in float64 until the last cast.

Frequencies are built on the CPU whatever the default device is; an angle is a position times a frequency in float64.
That keeps the error of a returned float32 sine or cosine below 6e-8 at every position below 2**24 and every base >= 1,
where float32 angles are off by 6e-3 at position 1e5.
"""
import math

import torch
from torch import Tensor

from . import _checks


def frequencies(dim: int, base: float = 10000.0) -> Tensor:
    """Angular frequency of each (sin, cos) pair, in radians per position: w_i = base**(-2i/dim).

    dim: even width of the encoding. base: > 0; with base >= 1 frequencies fall from 1 to base**(-(dim-2)/dim).
    Returns float64 on the CPU, shape (dim/2,). Errors: ValueError for odd dim or base <= 0, NaN or infinite.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
    """
    dim, base = _checks.even_width(dim, "dim"), _checks.positive_number(base)
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / dim
    return torch.pow(base, -exponents)


def wavelengths(dim: int, base: float = 10000.0) -> Tensor:
    """Positions per full turn of each pair: 2 pi / w_i = 2 pi base**(2i/dim).

    Returns float64 on the CPU, shape (dim/2,). The longest is 2 pi base**((dim-2)/dim), short of 2 pi base.
    Errors and source as `frequencies`.
    """
    return 2 * math.pi / frequencies(dim, base)


def angles(positions: Tensor, frequencies: Tensor) -> Tensor:
    """Angle of every position on every circle, in radians: positions (...) times frequencies (pairs,).

    Returns float64 (..., pairs) on the positions' device - on the CPU where that device has no float64 (MPS).
    """
    if positions.device.type == "mps":
        positions = positions.cpu()
    return positions.to(torch.float64)[..., None] * frequencies.to(positions.device)


def cast(values: Tensor, dtype: torch.dtype, device=None) -> Tensor:
    """float64 `values` in the caller's dtype: half types are the float32 value rounded once.

    Errors: TypeError unless dtype is a real floating-point type.
    """
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"dtype must be a floating-point torch.dtype such as torch.float32, got {dtype}")
    if dtype != torch.float64:
        values = values.to(torch.float32)
    return values.to(device=device, dtype=dtype)
