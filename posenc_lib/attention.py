"""Attention, written once: it opens doors 2 to 5 of whatever method it is given and never asks which one it is."""
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import _checks
from .method import PositionMethod


def attend(q: Tensor, k: Tensor, v: Tensor, method: PositionMethod, *, q_positions=None, k_positions=None,
           causal: bool = False, mask: Tensor | None = None, return_weights: bool = False):
    """softmax(logits + bias) v, with position entering through the method's doors 2 to 5.

    q (batch, heads, q_len, head_dim), k (batch, heads, k_len, head_dim), v (batch, heads, k_len, any width).
    q_positions, k_positions: int (length,) or (batch, length). Default: k_positions = arange(k_len) and q_positions =
    the last q_len of the k_positions, which is what decoding with a cache needs.
    causal: attend only where k_position <= q_position - positions, not indices.
    mask: bool, True = may attend, four dimensions broadcastable to (batch, heads, q_len, k_len).
    Returns out (batch, heads, q_len, v width), and the weights (batch, heads, q_len, k_len) if return_weights.
    A query that may attend to nothing gets zeros.
    Where doors 4 and 5 are shut and the weights are not asked for, torch's fused scaled_dot_product_attention does
    the work; otherwise the logits are built in memory: q_len x k_len numbers a head. Both agree to rounding.
    Errors: ValueError for shapes or positions that do not fit, TypeError for complex or mixed dtypes, float
    positions, a mask that is not bool or a method that is not a PositionMethod.

    Keys in a cache are kept unrotated and rotated here. The fast recipe for a long decode rotates each key once, when
    it is written, and then attends with NoPE:
        q, k_new = rotary.rotate(q, k_new, position, position)
        k = torch.cat((k_cache, k_new), dim=-2);  out = attend(q, k, v, NoPE())
    """
    _check_qkv(q, k, v)
    _check_method(method)
    batch, heads, q_len, _ = q.shape
    k_len = k.shape[-2]
    by_default = q_positions is None and k_positions is None
    q_positions, k_positions = _positions(q, k, q_positions, k_positions)

    q, k = method.rotate(q, k, q_positions, k_positions)
    bias = _checked_bias(method.bias(q_positions, k_positions), q, k_len)
    allowed = _checked_mask(mask, (batch, heads, q_len, k_len))
    explicit = return_weights or method.opens("logits") or method.opens("values")
    if k_len == 0:
        weights, out = q.new_zeros(batch, heads, q_len, 0), v.new_zeros(batch, heads, q_len, v.shape[-1])
        return (out, weights) if return_weights else out

    if by_default and q_len == 1:                    # the last query sees every key anyway
        causal = False
    plain = by_default and not explicit and bias is None and allowed is None
    is_causal = True if causal and plain and q_len == k_len else False         # a bool even where lengths are symbols
    if causal and not is_causal:
        seen = k_positions[..., None, :] <= q_positions[..., :, None]
        seen = seen[None, None] if seen.dim() == 2 else seen[:, None]          # (1 or batch, 1, q, k)
        allowed = seen if allowed is None else allowed & seen
    blind, attended = None, allowed
    if allowed is not None and not (by_default and mask is None):
        blind = ~allowed.any(dim=-1, keepdim=True)   # (.., q, 1): queries that may attend to nothing ...
        attended = allowed | blind                   # ... attend to everything, without NaN, and are erased below

    if not explicit:
        attn_mask = None if attended is None else attended.expand(batch, heads, q_len, k_len)
        if bias is not None:
            bias = bias.to(q.dtype).expand(batch, heads, q_len, k_len)
            attn_mask = bias if attended is None else bias.masked_fill(~attended, -torch.inf)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, scale=method.scale)
        return out if blind is None else out.masked_fill(blind, 0)

    logits = method.logits(q, k, q_positions, k_positions, allowed)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if attended is not None:
        logits = logits.masked_fill(~attended, -torch.inf)
    at_least_float32 = torch.promote_types(logits.dtype, torch.float32)
    weights = torch.softmax(logits, dim=-1, dtype=at_least_float32).to(v.dtype)
    if blind is not None:
        weights = weights.masked_fill(blind, 0)
    out = method.values(weights, v, q_positions, k_positions)
    return (out, weights) if return_weights else out


class SelfAttention(nn.Module):
    """Multi-head self-attention with position through doors 2 to 5 of `method`; door 1 is the model's to open.

    d_model: divisible by num_heads. The four projections have no bias, as in the paper's equations.
    Cost: attention's own, plus the method's. Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.2.
    Errors: ValueError if num_heads does not divide d_model, TypeError if method is not a PositionMethod.
    """

    def __init__(self, d_model: int, num_heads: int, method: PositionMethod):
        super().__init__()
        self.d_model = _checks.whole_number(d_model, "d_model", least=1)
        self.num_heads, _ = _checks.heads(d_model, num_heads)
        _check_method(method)
        self.method = method
        self.q_projection = nn.Linear(d_model, d_model, bias=False)
        self.k_projection = nn.Linear(d_model, d_model, bias=False)
        self.v_projection = nn.Linear(d_model, d_model, bias=False)
        self.out_projection = nn.Linear(d_model, d_model, bias=False)

    def forward(self, x: Tensor, positions=None, *, causal: bool = False, mask: Tensor | None = None) -> Tensor:
        """x (batch, length, d_model); positions int (length,) or (batch, length), default arange. Same shape out."""
        _checks.token_vectors(x, self.d_model)
        q, k, v = (self._split(project(x)) for project in (self.q_projection, self.k_projection, self.v_projection))
        out = attend(q, k, v, self.method, q_positions=positions, k_positions=positions, causal=causal, mask=mask)
        return self.out_projection(out.transpose(1, 2).flatten(2))             # (batch, length, d_model)

    def _split(self, x: Tensor) -> Tensor:
        """(batch, length, d_model) -> (batch, heads, length, head_dim)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _check_qkv(q, k, v):
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(f"{name} must have shape (batch, heads, length, head_dim), got {tuple(tensor.shape)}")
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be real floating point, got {tensor.dtype}")
    if not q.dtype == k.dtype == v.dtype:
        raise TypeError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
    if q.shape[:2] != k.shape[:2] or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        raise ValueError("q, k and v must agree in batch and heads, q and k in head_dim, k and v in length, got "
                         f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[-1] == 0:
        raise ValueError("head_dim must be at least 1, got 0")


def _check_method(method):
    if not isinstance(method, PositionMethod):
        given = f"the class {method.__name__}: call it" if isinstance(method, type) else type(method).__name__
        raise TypeError(f"method must be a PositionMethod such as NoPE(), got {given}")


def _positions(q, k, q_positions, k_positions) -> tuple[Tensor, Tensor]:
    (batch, _, q_len, _), k_len = q.shape, k.shape[-2]
    if k_positions is None:
        k_positions = torch.arange(k_len, device=q.device)
    else:
        k_positions = _checks.sequence_positions(k_positions, "k_positions", length=k_len, batch=batch).to(q.device)
    if q_positions is None:
        if q_len > k_len:
            raise ValueError(f"{q_len} queries are more than {k_len} keys, so they cannot be the last of them: "
                             "give q_positions")
        return k_positions[..., k_len - q_len:], k_positions
    q_positions = _checks.sequence_positions(q_positions, "q_positions", length=q_len, batch=batch).to(q.device)
    return q_positions, k_positions


def _checked_bias(bias, q, k_len) -> Tensor | None:
    batch, heads, q_len, _ = q.shape
    if bias is not None and bias.shape not in ((heads, q_len, k_len), (batch, heads, q_len, k_len)):
        raise ValueError(f"bias must have shape ({heads}, {q_len}, {k_len}) or ({batch}, {heads}, {q_len}, {k_len}) "
                         f"to fit q and k, got {tuple(bias.shape)}")
    return bias


def _checked_mask(mask, shape) -> Tensor | None:
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        raise TypeError(f"mask must be a bool tensor, True = may attend, got {getattr(mask, 'dtype', type(mask))}")
    if mask.dim() != 4 or any(m != 1 and m != n for m, n in zip(mask.shape, shape)):
        raise ValueError(f"mask must have four dimensions broadcastable to {shape}, got {tuple(mask.shape)}")
    return mask
