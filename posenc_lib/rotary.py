"""Door 2: queries and keys turned by their positions (RoPE)."""
import math
from collections.abc import Mapping
from numbers import Integral

import torch
from torch import Tensor

from . import _checks
from .angles import angles, cast, frequencies
from .configs import read_rotary
from .method import PositionMethod
from .offsets import is_consecutive

_recent: tuple = ()                                  # last tables, newest first: settings, positions, frequency, table
_KEPT, _LARGEST = 4, 2**26                           # how many of them, and of how many bytes at most
_BLOCK = 2**18                                       # numbers turned at a time: 1 MB of float32 stays in cache
_transformed = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)    # inside vmap, grad and the like


def rotate(x: Tensor, positions, base: float = 10000.0, *, rotary_dim: int | None = None, layout: str = "interleaved",
           scaling=None) -> Tensor:
    """Turn every pair of features counter-clockwise by position times frequency, w_i = base**(-2i/rotary_dim).

    x: real (..., length, dim), dim even. positions: int (length,), (batch, length) where batch is x's first axis, or
    an int n for arange(n). rotary_dim: even, at most dim; the frequencies follow from it and the features after it
    pass through untouched. layout: pair i is (2i, 2i+1), "interleaved", or (i, i + rotary_dim/2), "half".
    scaling: a rule such as YaRN(...); one that looks at the length gets the row's last position + 1.
    Returns x's shape, dtype and device. Angles are float64 and half types are rotated in float32, rounded once.
    Errors: ValueError for odd or too wide dimensions, a bad base, positions that do not fit; TypeError for float
    positions or an x that is not real floating point.
    Cost: about one copy of x, plus length x rotary_dim/2 sines and cosines unless a call just before had them too
    (on the CPU, 256 and more consecutive positions in float32 or less: products of 2 sqrt(length) rows of them).
    Source: Su et al. 2021 (arXiv:2104.09864), section 3.2.2; the half layout is GPT-NeoX's.
    """
    _checks.layout(layout)
    _check_real(x, "x")
    if x.dim() < 2:
        raise ValueError(f"x must have shape (..., length, dim), got {tuple(x.shape)}")
    if x.dim() == 2:
        return rotate(x[None], positions, base, rotary_dim=rotary_dim, layout=layout, scaling=scaling)[0]
    rotary_dim = _rotary_dim(_checks.even_width(x.shape[-1], "x's last dimension"), rotary_dim)
    if isinstance(positions, Integral) and not isinstance(positions, bool):
        positions = torch.arange(_checks.whole_number(positions, "positions (a length)"), device=x.device)
    positions = _checks.sequence_positions(positions, "positions", length=x.shape[-2], batch=x.shape[0])
    return _turned(x, positions, _curve(scaling, rotary_dim, base, positions), layout)


class Rotary(PositionMethod):
    """RoPE: q and k turned by their own positions, so that q . k depends on the offset alone; v is left alone.

    Door 2 (rotation). No weights. head_dim: even. base, rotary_dim, layout and scaling as in `rotate`; a scaling rule
    that looks at the length gets each row's last key position + 1, so neither history nor batch mates matter.
    Cost: about one copy of q and k. The sines and cosines, length x rotary_dim/2 each, are built when the positions
    change and found again by the next layers (on the CPU: the last four tables, each of at most 64 MB, are kept and
    compared by value). On other devices and under torch.compile they are built by each call.
    Errors: ValueError for a head_dim that is odd, a rotary_dim above it, a bad base; TypeError for another scaling.
    Source: Su et al. 2021 (arXiv:2104.09864), equations 13 to 16.
    """

    def __init__(self, head_dim: int, base: float = 10000.0, *, rotary_dim: int | None = None,
                 layout: str = "interleaved", scaling=None):
        super().__init__()
        self.head_dim, self.base = _checks.even_width(head_dim, "head_dim"), _checks.positive_number(base)
        self.rotary_dim, self.layout = _rotary_dim(head_dim, rotary_dim), _checks.layout(layout)
        self.scaling = scaling
        _curve(scaling, self.rotary_dim, self.base)                            # a rule that cannot work fails here

    def rotate(self, q, k, q_positions, k_positions):
        """q, k (batch, heads, length, head_dim); positions int (length,) or (batch, length). Same shapes and dtypes."""
        q_positions, k_positions = _door_2(q, k, q_positions, k_positions, self.head_dim)
        curve = _curve(self.scaling, self.rotary_dim, self.base, k_positions)
        return _turned(q, q_positions, curve, self.layout), _turned(k, k_positions, curve, self.layout)

    @classmethod
    def from_config(cls, config: Mapping, *, layout: str | None = None) -> "Rotary":
        """The Rotary of a published model, from its whole config dict (config.json).

        Read are rope_theta; head_dim, qk_rope_head_dim (DeepSeek) or hidden_size / num_attention_heads;
        partial_rotary_factor or rotary_dim; and the dict rope_parameters (new) or rope_scaling (old), whose rope_type
        or type is default, linear, dynamic, yarn or llama3. NeoX's and GPT-J's own names are understood too.
        layout: by default the one the model's published weights expect, "half" for nearly all of them.
        Errors: TypeError unless config is a mapping; ValueError for a type or a key in the rope dict that is not known
        (the message lists those that are), a setting that is missing or given twice with two values, longrope, mrope.
        """
        settings = read_rotary(config)
        return cls(**settings if layout is None else {**settings, "layout": layout})

    def extra_repr(self):
        return (f"head_dim={self.head_dim}, base={self.base:g}, rotary_dim={self.rotary_dim}, layout={self.layout!r}, "
                f"scaling={self.scaling}")


class AxialRotary(PositionMethod):
    """RoPE on a grid: the first half of the features is turned by the row, the second half by the column.

    Door 2 (rotation). No weights. head_dim: divisible by 4, two halves made of pairs (interleaved layout).
    grid: (height, width); a position is row * width + column. Scores depend on the row and the column offset alone.
    Cost: about two copies of q and k, tables as in Rotary. Errors: ValueError for a head_dim that 4 does not divide, a
    grid that is not two numbers >= 1, positions outside the grid.
    Source: the 2-D case in Heo et al. 2024 (arXiv:2403.13298), section 3.1, "axial frequency".
    """

    def __init__(self, head_dim: int, grid: tuple[int, int], base: float = 10000.0):
        super().__init__()
        self.head_dim, self.base = _checks.whole_number(head_dim, "head_dim", least=1), _checks.positive_number(base)
        if head_dim % 4:
            raise ValueError(f"head_dim must be divisible by 4: pairs for row and column, got {head_dim}")
        if not isinstance(grid, (tuple, list)) or len(grid) != 2:
            raise ValueError(f"grid must be (height, width), got {grid!r}")
        self.grid = (_checks.whole_number(grid[0], "height", least=1), _checks.whole_number(grid[1], "width", least=1))

    def rotate(self, q, k, q_positions, k_positions):
        """q, k (batch, heads, length, head_dim); positions int (length,) or (batch, length). Same shapes and dtypes."""
        q_positions, k_positions = _door_2(q, k, q_positions, k_positions, self.head_dim)
        return self._turned(q, q_positions), self._turned(k, k_positions)

    def _turned(self, x, positions):
        height, width = self.grid
        if _checks.eager(positions) and positions.max() >= height * width:
            raise ValueError(f"positions must be below {height} * {width} = {height * width} on this grid, "
                             f"got {int(positions.max())}")
        curve = _curve(None, self.head_dim // 2, self.base)
        rows, columns = positions // width, positions % width
        by_row, by_column = x.chunk(2, dim=-1)
        return torch.cat((_turned(by_row, rows, curve, "interleaved"),
                          _turned(by_column, columns, curve, "interleaved")), dim=-1)

    def extra_repr(self):
        return f"head_dim={self.head_dim}, grid={self.grid}, base={self.base:g}"


def _rotary_dim(dim: int, rotary_dim: int | None) -> int:
    if rotary_dim is None:
        return dim
    if _checks.even_width(rotary_dim, "rotary_dim") > dim:
        raise ValueError(f"rotary_dim must be at most the head's {dim} dimensions, got {rotary_dim}")
    return int(rotary_dim)


def _curve(scaling, dim: int, base: float, positions: Tensor | None = None) -> tuple:
    """(dim, base, attention factor, frequencies): the frequencies (dim/2,) or (batch, dim/2) of a scaling rule, which
    may look at the length, the positions' last + 1; None for the plain ones, which follow from dim and base."""
    if scaling is None:
        return dim, _checks.positive_number(base), 1.0, None
    if isinstance(scaling, type) or not hasattr(scaling, "frequencies") or not hasattr(scaling, "attention_factor"):
        raise TypeError(f"scaling must be None or a rule such as LinearScaling(4), got {scaling!r}")
    length = None
    if positions is not None and positions.shape[-1]:
        length = positions.amax(dim=-1) + 1
        length = length.cpu() if length.device.type == "mps" else length
    return dim, base, scaling.attention_factor, scaling.frequencies(dim, base, length)


def _check_real(x, name: str):
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise TypeError(f"{name} must be a real floating-point tensor, got {getattr(x, 'dtype', type(x).__name__)}")


def _door_2(q, k, q_positions, k_positions, head_dim) -> tuple[Tensor, Tensor]:
    """Checked positions for q and k (batch, heads, length, head_dim)."""
    for name, x in (("q", q), ("k", k)):
        _check_real(x, name)
        if x.dim() != 4 or x.shape[-1] != head_dim:
            raise ValueError(f"{name} must have shape (batch, heads, length, {head_dim}), got {tuple(x.shape)}")
    checked = _checks.sequence_positions(k_positions, "k_positions", length=k.shape[2], batch=k.shape[0])
    if q_positions is k_positions and q.shape[2] == k.shape[2] and q.shape[0] == k.shape[0]:
        return checked, checked
    return _checks.sequence_positions(q_positions, "q_positions", length=q.shape[2], batch=q.shape[0]), checked


def _turned(x: Tensor, positions: Tensor, curve: tuple, layout: str) -> Tensor:
    """x (batch, ..., length, dim) with its first 2 * pairs features turned; curve as `_curve` gives it."""
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    fast = x.device.type == "cpu" and not torch.compiler.is_compiling() and not _learned(curve)
    form = layout if fast else "plain"
    table = [part.to(x.device) for part in _table(positions, curve, work, form)]
    if table[0].dim() == 3:                                                    # (batch, length, ..): one for all heads
        table = [part[(slice(None),) + (None,) * (x.dim() - 3)] for part in table]
    if form == "half" or form == "interleaved" and x.dtype != work:
        return _Turn.apply(x, 1, *table) if _differentiated(x) else _Turn.forward(x, 1, *table)
    width = 2 * table[0].shape[-1]
    head = x if width == x.shape[-1] else x[..., :width]
    if form == "interleaved":                                                  # one complex product
        if head.stride(-1) != 1 or head.storage_offset() % 2 or any(stride % 2 for stride in head.stride()[:-1]):
            head = head.clone(memory_format=torch.contiguous_format)
        turned = torch.view_as_real(torch.view_as_complex(head.unflatten(-1, (-1, 2))) * table[0]).flatten(-2)
    else:
        cos, sin = table                                                       # (.., length, pairs)
        pairs, axis = ((-1, 2), -1) if layout == "interleaved" else ((2, -1), -2)
        a, b = head.to(work).unflatten(-1, pairs).unbind(axis)
        turned = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=axis).flatten(-2).to(x.dtype)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), dim=-1)


def _table(positions: Tensor, curve: tuple, dtype: torch.dtype, form: str) -> tuple[Tensor, ...]:
    """`_build_table`, or one of the last tables if it was built from exactly these values."""
    global _recent
    if positions.device.type != "cpu" or torch.compiler.is_compiling() or _learned(curve):
        return _build_table(positions, curve, dtype, form)
    (*settings, frequency), recent = (dtype, form, *curve), _recent            # no frequency: dim and base say it all
    for known, known_positions, known_frequency, table in recent:
        if known == settings and _same(known_frequency, frequency) and _same(known_positions, positions):
            return table
    with torch.inference_mode(False):                # so that a table first used in inference can be trained with later
        entry = (settings, positions.clone(), frequency if frequency is None else frequency.clone(),
                 _build_table(positions, curve, dtype, form))
    if entry[3][0].nbytes <= _LARGEST:
        _recent = (entry, *recent[:_KEPT - 1])       # replaced whole: safe between threads
    return entry[3]


def _learned(curve: tuple) -> bool:
    """Whether the frequencies have a gradient of their own: such tables are built by each call and never kept."""
    return curve[3] is not None and curve[3].requires_grad


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _build_table(positions, curve, dtype, form) -> tuple[Tensor, ...]:
    """cos and sin times factor: "plain" (cos, sin), "interleaved" one complex tensor, each (.., length, pairs); "half"
    (cos cos, -sin sin), each (.., length, 2 pairs)."""
    dim, base, factor, frequency = curve
    frequency = frequencies(dim, base) if frequency is None else frequency
    if dtype == torch.float32 and frequency.dim() == 1 and len(positions) >= 256 and is_consecutive(positions):
        step = math.isqrt(len(positions))                                      # e^(i (a + b) w) = e^(i a w) e^(i b w):
        start, rest = (_on_circle(angles(p, frequency)) for p in (positions[::step], torch.arange(step, device="cpu")))
        cos, sin = torch.view_as_real((start[:, None] * rest).flatten(0, 1)[:len(positions)]).unbind(-1)
    else:
        theta = angles(positions, frequency[..., None, :])
        cos, sin = theta.cos(), theta.sin()
    cos, sin = cast(cos * factor, dtype), cast(sin * factor, dtype)
    if form == "half":
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
    return (torch.complex(cos, sin),) if form == "interleaved" else (cos, sin)


def _on_circle(theta: Tensor) -> Tensor:
    return torch.complex(theta.cos(), theta.sin())


def _differentiated(x: Tensor) -> bool:
    """Whether someone wants derivatives through x, or maps over it; the bare forward below is then not enough."""
    return (torch.is_grad_enabled() and x.requires_grad or _transformed()
            or torch.autograd.forward_ad.unpack_dual(x).tangent is not None)


class _Turn(torch.autograd.Function):
    """The rotation on the CPU block by block, half types through float32; its gradient is the rotation back."""

    @staticmethod
    def forward(x, sign, *table):
        y, work = torch.empty_like(x), table[0].real.dtype
        width, length = table[0].shape[-1] * (2 if table[0].is_complex() else 1), x.shape[-2]
        if width < x.shape[-1]:
            y[..., width:] = x[..., width:]
        numbers = _BLOCK
        if x.dtype != work:                          # the float32 scratch takes a tenth of q and k, 1 or 2 MB at most
            numbers = min(_BLOCK, max(_BLOCK // 8, x.numel() // (10 * len(table))))
        rows = max(1, min(numbers * length // max(1, x.numel()), length))
        whole, scratch = (x if width == x.shape[-1] else x[..., :width], y[..., :width], *table), None
        blocks = zip(*(t.split(rows, dim=-2) for t in whole)) if rows < length else (whole,)
        for source, target, *part in blocks:
            if x.dtype == work:
                _turn_half(source, target, sign, *part)
                continue
            if scratch is None or scratch.shape != source.shape:
                scratch = x.new_empty(source.shape, dtype=work)
                pairs = scratch.unflatten(-1, (-1, 2))
                turned = torch.empty_like(scratch) if len(part) == 2 else torch.view_as_complex(pairs)
            scratch.copy_(source)
            if len(part) == 2:
                target.copy_(_turn_half(scratch, turned, sign, *part))
            else:
                turned.mul_(part[0] if sign > 0 else part[0].conj())
                target.copy_(scratch)
        return y

    @staticmethod
    def setup_context(ctx, inputs, output):
        _, ctx.sign, *table = inputs
        ctx.save_for_backward(*table)
        ctx.save_for_forward(*table)

    @staticmethod
    def backward(ctx, grad):
        table = ctx.saved_tensors                                              # once: checkpointing unpacks them once
        return _Turn.apply(grad, -ctx.sign, *table), *(None,) * (1 + len(table))

    @staticmethod
    def jvp(ctx, tangent, *_):
        return _Turn.apply(tangent, ctx.sign, *ctx.saved_tensors)

    @staticmethod
    def vmap(info, in_dims, x, sign, *table):
        return _Turn.apply(x.movedim(in_dims[0], 0), sign, *table), 0


def _turn_half(source: Tensor, target: Tensor, sign: int, cos: Tensor, sin: Tensor) -> Tensor:
    """target = source turned in the half layout, or turned back for sign -1; all of one dtype."""
    torch.mul(source, cos, out=target)
    for half, other, part in zip(target.chunk(2, -1), reversed(source.chunk(2, -1)), sin.chunk(2, -1)):
        half.addcmul_(other, part, value=sign)
    return target
