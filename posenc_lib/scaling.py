"""Door 2's frequencies for longer contexts: five rules, each an edit of one curve, w_i = base**(-2i/dim).

Every rule has frequencies(dim, base, length=None), float64 on the CPU, and attention_factor, which is multiplied into
cos and sin of q and of k and nowhere else. Errors: ValueError for a factor below 1 and settings out of order.
"""
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from . import _checks
from .angles import frequencies


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation: every frequency divided by `factor` >= 1, as if positions were.

    Source: Chen et al. 2023 (arXiv:2306.15595), equation 4.
    """

    factor: float
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self):
        _check_factor(self.factor)

    def frequencies(self, dim: int, base: float = 10000.0, length=None) -> Tensor:
        """float64 CPU (dim/2,)."""
        return frequencies(dim, base) / self.factor


@dataclass(frozen=True)
class NTKAware:
    """A larger base, base * factor**(dim/(dim-2)): the first frequency stays, the last is divided by `factor` >= 1.

    Source: the "NTK-aware scaled RoPE" of 2023, as written in Peng et al. 2023 (arXiv:2309.00071), section 3.1.
    """

    factor: float
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self):
        _check_factor(self.factor)

    def frequencies(self, dim: int, base: float = 10000.0, length=None) -> Tensor:
        """float64 CPU (dim/2,); dim at least 4."""
        return _larger_base(dim, base, torch.tensor(self.factor, dtype=torch.float64, device="cpu"))


@dataclass(frozen=True)
class DynamicNTK:
    """NTKAware by as much as the sequence at hand needs: the factor is 1 up to `original_length`, and then
    factor * length / original_length - (factor - 1).

    Source: Peng et al. 2023 (arXiv:2309.00071), section 3.3; the formula is that of `transformers`.
    """

    factor: float
    original_length: int
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self):
        _check_factor(self.factor)
        _checks.whole_number(self.original_length, "original_length", least=1)

    def frequencies(self, dim: int, base: float = 10000.0, length=None) -> Tensor:
        """float64 (dim/2,), or (..., dim/2) on the lengths' device for an int tensor (...); None: nothing stretched."""
        if length is None:
            length = self.original_length
        if not isinstance(length, Tensor):
            length = torch.tensor(_checks.whole_number(length, "length"), device="cpu")
        beyond = (length - self.original_length).clamp(min=0).to(torch.float64)
        return _larger_base(dim, base, 1 + self.factor * beyond / self.original_length)


@dataclass(frozen=True)
class YaRN:
    """Pairs that turn more than `beta_fast` times within `original_length` stay, pairs that turn less than `beta_slow`
    times are divided by `factor` >= 1, a ramp over the pairs lies between; cos and sin grow by `attention_factor`.

    truncate: whole pair numbers as ends of the ramp. attention_factor: multiplied into cos and sin of q and of k, so
    logits carry its square; by default (0.1 mscale ln(factor) + 1) / (0.1 mscale_all_dim ln(factor) + 1), where None
    stands for mscale = 1 and mscale_all_dim = 0: the paper's 0.1 ln(factor) + 1. DeepSeek's models, which publish the
    two, also multiply their softmax scale by (0.1 mscale_all_dim ln(factor) + 1)**2; that is attention's business.
    Source: Peng et al. 2023 (arXiv:2309.00071), sections 3.2 and 3.4, and its published code.
    """

    factor: float
    original_length: int
    beta_fast: float = 32
    beta_slow: float = 1
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self):
        _check_factor(self.factor)
        _checks.whole_number(self.original_length, "original_length", least=1)
        if _checks.positive_number(self.beta_slow, "beta_slow") >= _checks.positive_number(self.beta_fast, "beta_fast"):
            raise ValueError(f"beta_fast must exceed beta_slow, got {self.beta_fast} and {self.beta_slow}")
        if self.attention_factor is None:
            mscale, all_dim = 1 if self.mscale is None else self.mscale, self.mscale_all_dim or 0
            value = (0.1 * mscale * math.log(self.factor) + 1) / (0.1 * all_dim * math.log(self.factor) + 1)
            object.__setattr__(self, "attention_factor", value)
        _checks.positive_number(self.attention_factor, "attention_factor")

    def frequencies(self, dim: int, base: float = 10000.0, length=None) -> Tensor:
        """float64 CPU (dim/2,); base above 1."""
        plain = frequencies(dim, base)
        if base <= 1:
            raise ValueError(f"YaRN needs a base above 1: it looks for the pair with a given wavelength, got {base}")
        low, high = (dim * math.log(self.original_length / (2 * math.pi * turns)) / (2 * math.log(base))
                     for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = (min(max(end, 0), dim - 1) for end in (low, high))
        pairs = torch.arange(dim // 2, dtype=torch.float64, device="cpu")
        ramp = ((pairs - low) / (high - low if high > low else 0.001)).clamp(0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)


@dataclass(frozen=True)
class Llama3:
    """Pairs that turn more than `high_freq_factor` times within `original_length` stay, pairs that turn less than
    `low_freq_factor` times are divided by `factor` >= 1, between them a blend that is linear in the frequency.

    Source: meta-llama's published model code, apply_scaling; Llama 3.1 has factor 8 and original_length 8192.
    """

    factor: float
    original_length: int
    low_freq_factor: float = 1
    high_freq_factor: float = 4
    attention_factor: ClassVar[float] = 1.0

    def __post_init__(self):
        _check_factor(self.factor)
        _checks.whole_number(self.original_length, "original_length", least=1)
        low = _checks.positive_number(self.low_freq_factor, "low_freq_factor")
        if low >= _checks.positive_number(self.high_freq_factor, "high_freq_factor"):
            raise ValueError("high_freq_factor must exceed low_freq_factor, got "
                             f"{self.high_freq_factor} and {self.low_freq_factor}")

    def frequencies(self, dim: int, base: float = 10000.0, length=None) -> Tensor:
        """float64 CPU (dim/2,)."""
        plain = frequencies(dim, base)
        turns = self.original_length * plain / (2 * math.pi)
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return plain / self.factor * (1 - keep) + plain * keep


def _check_factor(factor):
    if _checks.positive_number(factor, "factor") < 1:
        raise ValueError(f"factor must be at least 1: it says how many times longer the context gets, got {factor}")


def _larger_base(dim: int, base: float, stretch: Tensor) -> Tensor:
    """Frequencies (..., dim/2) of the base base * stretch**(dim/(dim-2)), one row for each `stretch` (...)."""
    plain = frequencies(dim, base)
    if dim < 4:
        raise ValueError(f"NTK-aware scaling needs two pairs, the first to stay and the last to stretch, got dim={dim}")
    exponents = torch.arange(0, dim, 2, dtype=torch.float64, device="cpu") / (dim - 2)
    return plain.to(stretch.device) * stretch[..., None] ** -exponents.to(stretch.device)
