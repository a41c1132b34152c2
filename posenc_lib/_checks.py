"""Checks of the caller's input, each with a sentence that says what was given and what is allowed."""
import math
from numbers import Integral, Real

import torch
from torch import Tensor

_LARGEST = 2**62                                     # leaves room to add two of them in 64 bits
_INTEGERS = {torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64}


def whole_number(value, name: str, *, least: int = 0) -> int:
    """`value` as an int from `least` to 2**62; bools and floats are refused."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int, got {value!r} of type {type(value).__name__}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
    if value > _LARGEST:
        raise ValueError(f"{name} must be at most 2**62, got {value}")
    return int(value)


def even_width(value, name: str = "d_model") -> int:
    """`value` as an even int >= 2: sinusoidal and rotary codes are made of (sin, cos) pairs."""
    value = whole_number(value, name, least=1)
    if value % 2:
        raise ValueError(f"{name} must be even: the encoding needs (sin, cos) pairs, got {value}")
    return value


def positive_number(value, name: str = "base") -> float:
    """`value` as a finite float > 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} must be a real number, got {value!r} of type {type(value).__name__}")
    try:
        value = float(value)
    except OverflowError:
        value = math.inf
    if not 0 < value < math.inf:                     # false for NaN; math.isfinite cannot be compiled
        raise ValueError(f"{name} must be a finite number greater than 0, got {value}")
    return value


def integers(values, name: str) -> Tensor:
    """`values` as an int64 tensor: a tensor on its own device, an array or a list of ints on the CPU."""
    if not isinstance(values, Tensor):
        try:
            plain = values.copy() if hasattr(values, "strides") else values    # torch refuses a reversed numpy view
            tensor = torch.as_tensor(plain, device="cpu")
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{name} must be 64-bit integers in a tensor, an array or a regular list, got "
                            f"{values!r}") from error
        values = tensor if tensor.numel() else tensor.to(torch.int64)
    if values.dtype not in _INTEGERS:
        raise TypeError(f"{name} must be integers, got dtype {values.dtype}: a position is a count, and half-precision "
                        "floats cannot even count past 256 (bfloat16) or 2048 (float16)")
    result = values.to(torch.int64)
    if values.dtype == torch.uint64 and eager(values) and (result < 0).any():
        raise ValueError(f"{name} must be below 2**63, got {values.flatten().tolist()}")
    return result


def heads(d_model: int, num_heads) -> tuple[int, int]:
    """num_heads and head_dim = d_model / num_heads."""
    num_heads = whole_number(num_heads, "num_heads", least=1)
    if d_model % num_heads:
        raise ValueError(f"d_model must be divisible by num_heads, got {d_model} and {num_heads}")
    return num_heads, d_model // num_heads


def eager(values: Tensor) -> bool:
    """Whether there are values to check: not while compiling, not on the meta device."""
    return not torch.compiler.is_compiling() and values.device.type != "meta" and values.numel() > 0


def positions(values, name: str = "positions", *, int_means_arange: bool = False) -> Tensor:
    """`values` as int64 positions >= 0 of any shape; an int n means arange(n) where `int_means_arange`."""
    if isinstance(values, Integral) and not isinstance(values, bool):
        if not int_means_arange:
            raise TypeError(f"{name} must be an integer tensor, got the int {values}; write torch.arange({values})")
        return torch.arange(whole_number(values, f"{name} (a length)"), device="cpu")
    values = integers(values, name)
    if eager(values) and values.min().item() < 0:
        raise ValueError(f"{name} must not be negative, got {int(values.min())}")
    return values


def sequence_positions(values, name: str, *, length: int, batch: int) -> Tensor:
    """`values` as int64 positions of shape (length,) or (batch, length), matching the tensor they describe."""
    values = positions(values, name)
    if values.shape not in ((length,), (batch, length)):
        raise ValueError(f"{name} must have shape ({length},) or ({batch}, {length}), got {tuple(values.shape)}")
    return values


def token_vectors(x, d_model: int) -> Tensor:
    """`x`, a real floating-point tensor of shape (batch, length, d_model)."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"x must be a real floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")
    if x.dim() != 3 or x.shape[-1] != d_model:
        raise ValueError(f"x must have shape (batch, length, {d_model}), got {tuple(x.shape)}")
    return x


def layout(value: str) -> str:
    """`value`, one of the two orders of sines and cosines."""
    if value not in ("interleaved", "half"):
        raise ValueError(f'layout must be "interleaved" (sin, cos, sin, cos, ...) or "half" (sines, then cosines), '
                         f"got {value!r}")
    return value
