"""The sinusoidal encoding as a function: the vector, its complex form, the shift matrix, the distance between codes."""
import torch
from torch import Tensor

from . import _checks
from .angles import angles, cast, frequencies


def sinusoidal_encoding(positions, d_model: int, base: float = 10000.0, *, layout: str = "interleaved",
                        dtype: torch.dtype = torch.float32, device=None) -> Tensor:
    """PE[p, 2i] = sin(p w_i), PE[p, 2i+1] = cos(p w_i) with w_i = base**(-2i/d_model).

    positions: int tensor (...), or an int n for arange(n). d_model: even. base: > 0.
    layout: "interleaved" (sin, cos, sin, cos, ..., the paper) or "half" (all sines, then all cosines, tensor2tensor).
    Returns (..., d_model) in `dtype` on `device`; by default where the positions tensor is, or torch's default device
    for an int, an array or a list. float32 values are within 6e-8 of exact arithmetic at every position below 2**24
    for base >= 1; half types are the float32 value rounded once.
    Errors: ValueError for odd d_model, bad base, negative positions; TypeError for float positions.
    Cost: (positions x d_model) sines and cosines in float64.
    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.
    """
    _checks.layout(layout)
    if device is None:
        device = (positions if isinstance(positions, Tensor) else torch.empty(0)).device
    theta = angles(*_arguments(positions, d_model, base))                      # (..., d_model/2)
    pairs = torch.stack((theta.sin(), theta.cos()), dim=-1 if layout == "interleaved" else -2)
    return cast(pairs.flatten(-2), dtype, device)                              # (..., d_model)


def complex_encoding(positions, d_model: int, base: float = 10000.0) -> Tensor:
    """The same code as one complex number a pair: z_i(p) = exp(1j p w_i); PE[p, 2i] = z.imag, PE[p, 2i+1] = z.real.

    positions: int tensor (...), or an int n for arange(n) on the CPU. Returns complex128 (..., d_model/2),
    every |z| = 1. z(p + k) = z(p) z(k): a shift multiplies. Errors as `sinusoidal_encoding`.
    """
    theta = angles(*_arguments(positions, d_model, base))
    return torch.complex(theta.cos(), theta.sin())


def shift_matrix(offset: int, d_model: int, base: float = 10000.0) -> Tensor:
    """M_k with PE(p + k) = M_k PE(p) for every p (column vectors, interleaved layout).

    offset: int k of either sign. Returns float64 (d_model, d_model) on the CPU, block-diagonal with the blocks
    [[cos k w_i, sin k w_i], [-sin k w_i, cos k w_i]]: a clockwise turn by k w_i in (sin, cos) coordinates.
    M_a M_b = M_{a+b} and M_k^T = M_{-k}. Errors: TypeError for a float offset, ValueError for odd d_model, bad base.
    Source: Vaswani et al. 2017, section 3.5 (claim); the addition theorems (proof).
    """
    offset = _checks.whole_number(offset, "offset", least=-2**62)
    theta = offset * frequencies(_checks.even_width(d_model), base)
    sin, cos = theta.sin(), theta.cos()
    blocks = torch.stack((cos, sin, -sin, cos), dim=-1).unflatten(-1, (2, 2))  # (d_model/2, 2, 2)
    return torch.block_diag(*blocks)


def encoding_distance(offsets, d_model: int, base: float = 10000.0) -> Tensor:
    """Euclidean distance ||PE(p + k) - PE(p)|| for each offset k; the same at every p.

    offsets: an int k, or an int tensor (...). Returns float64 (...): 2 sqrt(sum_i sin(k w_i / 2)**2), a form without
    cancellation, so that near-returns such as k = 710 keep their digits. Errors: TypeError for float offsets.
    """
    theta = angles(_checks.integers(offsets, "offsets"), frequencies(_checks.even_width(d_model), base))
    return 2 * (theta / 2).sin().square().sum(dim=-1).sqrt()


def _arguments(positions, d_model, base) -> tuple[Tensor, Tensor]:
    """Checked positions and the frequencies of a sinusoidal code."""
    frequency = frequencies(_checks.even_width(d_model), base)
    return _checks.positions(positions, int_means_arange=True), frequency
