"""Doors 4 and 5: methods where tokens meet relative positions, in the logits and in the values."""
import torch
from torch import Tensor, nn

from . import _checks
from .angles import angles, cast, frequencies
from .method import PositionMethod
from .offsets import checked_table, clip_offsets, deberta_bucket, is_consecutive, relative_offsets


class Shaw(PositionMethod):
    """logits q_i . (k_j + a^K_r) / sqrt(head_dim), values sum_j w_ij (v_j + a^V_r), with r = clip(j - i).

    Doors 4 (logits) and 5 (values). .key_table and .value_table, each (2 * max_offset + 1, head_dim), Xavier uniform,
    shared by all heads; row 0 is offset -max_offset, see `clip_offsets`. Beyond max_offset, offsets share a vector;
    attention is not cut off there.
    Cost: q times the table, (q, 2 * max_offset + 1) numbers a head, of which each pair picks one - never a
    (q, k, head_dim) table. Values the same, backwards: weights are summed by row of the table.
    Errors: ValueError for a negative max_offset, for q or v of another width and for tables of another shape.
    Source: Shaw et al. 2018 (arXiv:1803.02155), equations 3 and 4.
    """

    def __init__(self, head_dim: int, max_offset: int):
        super().__init__()
        self.head_dim = _checks.whole_number(head_dim, "head_dim", least=1)
        self.max_offset = _checks.whole_number(max_offset, "max_offset")
        self.key_table = nn.Parameter(torch.empty(2 * max_offset + 1, head_dim))
        self.value_table = nn.Parameter(torch.empty(2 * max_offset + 1, head_dim))
        nn.init.xavier_uniform_(self.key_table)
        nn.init.xavier_uniform_(self.value_table)

    def logits(self, q, k, q_positions, k_positions, mask=None):
        """(batch, heads, q, k)."""
        _check_width(q, self.head_dim)
        q = q * self.head_dim ** -0.5
        table = checked_table(self.key_table, *self._shape)
        return _times_shifted_keys(q, k, table, q_positions, k_positions)

    def values(self, weights, v, q_positions, k_positions):
        """(batch, heads, q, head_dim)."""
        _check_width(v, self.head_dim, "v")
        table = checked_table(self.value_table, *self._shape)
        rows = _for_heads(clip_offsets(relative_offsets(q_positions, k_positions), self.max_offset))
        exact = torch.promote_types(weights.dtype, torch.float32)              # thousands of small weights share a row
        by_row = torch.zeros(*weights.shape[:-1], len(table), dtype=exact, device=weights.device)
        by_row = by_row.scatter_add(-1, rows.expand(weights.shape), weights.to(exact))
        return weights @ v + by_row.to(weights.dtype) @ table

    @property
    def _shape(self):
        return 2 * self.max_offset + 1, self.head_dim

    def extra_repr(self):
        return f"head_dim={self.head_dim}, max_offset={self.max_offset}"


class TransformerXL(PositionMethod):
    """logits ((q_i + u) . k_j + (q_i + v) . W R_{i-j}) / sqrt(head_dim), R = [sin | cos] of the distance i - j.

    Door 4 (logits). .u and .v (num_heads, head_dim), N(0, 0.02): what a query asks of every key's content and place;
    .position_projection is W, d_model to d_model, no bias. Keys may outnumber queries (memory).
    R_{i-j} is R_j turned by i (addition theorems), so W^T (q_i + v) is turned by the query's position and multiplied by
    the encodings of the keys: no table of distances and no relative shift, right for any positions, future ones too.
    Cost: one (q, d_model) x (d_model, k) product a head.
    Errors: ValueError for odd d_model, num_heads that does not divide it, q of other heads or width.
    Source: Dai et al. 2019 (arXiv:1901.02860), section 3.3; kimiyoung/transformer-xl, mem_transformer.py.
    """

    def __init__(self, d_model: int, num_heads: int, base: float = 10000.0):
        super().__init__()
        self.d_model, self.base = _checks.even_width(d_model), _checks.positive_number(base)
        self.num_heads, self.head_dim = _checks.heads(d_model, num_heads)
        self.u = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        self.v = nn.Parameter(torch.empty(self.num_heads, self.head_dim))
        nn.init.normal_(self.u, std=0.02)
        nn.init.normal_(self.v, std=0.02)
        self.position_projection = nn.Linear(d_model, d_model, bias=False)

    def logits(self, q, k, q_positions, k_positions, mask=None):
        """(batch, heads, q, k)."""
        _check_heads(q, self.num_heads, self.head_dim)
        u = checked_table(self.u, self.num_heads, self.head_dim)[:, None]
        v = checked_table(self.v, self.num_heads, self.head_dim)[:, None]
        weight = self.position_projection.weight.unflatten(0, (self.num_heads, -1))    # (heads, head_dim, d_model)
        along_sin, along_cos = ((q + v) @ weight).chunk(2, dim=-1)
        sin_i, cos_i = self._sin_cos(q_positions, q.dtype)
        sin_j, cos_j = self._sin_cos(k_positions, q.dtype)
        turned = torch.cat((along_cos * sin_i - along_sin * cos_i, along_sin * sin_i + along_cos * cos_i), dim=-1)
        encoded = torch.cat((sin_j, cos_j), dim=-1)
        return ((q + u) @ k.transpose(-2, -1) + turned @ encoded.transpose(-2, -1)) * self.head_dim ** -0.5

    def _sin_cos(self, positions, dtype):
        """Two (length, d_model/2), or (batch, 1, length, d_model/2) for batched positions."""
        theta = _for_heads(angles(_checks.positions(positions), frequencies(self.d_model, self.base)))
        return cast(theta.sin(), dtype, positions.device), cast(theta.cos(), dtype, positions.device)

    def extra_repr(self):
        return f"d_model={self.d_model}, num_heads={self.num_heads}, base={self.base:g}"


class DeBERTa(PositionMethod):
    """logits (q_i . k_j + q_i . Kr[d(i, j)] + k_j . Qr[d(j, i)]) / sqrt(3 head_dim), d(i, j) = clip(i - j + s).

    Door 4 (logits). .table (2 s, d_model), N(0, 0.02), clipped to 0..2 s - 1: distances i - j from -s to s - 1, one
    row fewer than Shaw's. Kr and Qr are the table through .key_projection and .query_projection, split into heads.
    s = max_offset; with num_buckets (DeBERTa-v2, v3) s = num_buckets, and i - j is first put into log buckets
    (`deberta_bucket`) that reach max_offset.
    p2c_index: "paper" reads Qr at d(j, i); "code" at d(i, j), which is what both published codes do, so published
    weights need it.
    Cost: (q, 2 s) and (k, 2 s) products a head, of which each pair picks one number.
    Errors: ValueError for max_offset < 1, num_heads that does not divide d_model, q of other heads or width.
    Source: He et al. 2021 (arXiv:2006.03654), equations 2 to 4; microsoft/DeBERTa disentangled_attention.py.
    """

    def __init__(self, d_model: int, num_heads: int, max_offset: int, num_buckets: int | None = None,
                 p2c_index: str = "paper"):
        super().__init__()
        self.d_model = _checks.whole_number(d_model, "d_model", least=1)
        self.num_heads, self.head_dim = _checks.heads(d_model, num_heads)
        self.max_offset = _checks.whole_number(max_offset, "max_offset", least=1)
        self.num_buckets = num_buckets
        if num_buckets is not None:
            deberta_bucket([0], num_buckets, max_offset)                       # raises where they do not work out
        if p2c_index not in ("paper", "code"):
            raise ValueError(f'p2c_index must be "paper" for d(j, i) or "code" for d(i, j), got {p2c_index!r}')
        self.p2c_index = p2c_index
        self.span = max_offset if num_buckets is None else num_buckets
        self.scale = (3 * self.head_dim) ** -0.5
        self.table = nn.Parameter(torch.empty(2 * self.span, d_model))
        nn.init.normal_(self.table, std=0.02)
        self.query_projection = nn.Linear(d_model, d_model, bias=False)
        self.key_projection = nn.Linear(d_model, d_model, bias=False)

    def logits(self, q, k, q_positions, k_positions, mask=None):
        """(batch, heads, q, k)."""
        _check_heads(q, self.num_heads, self.head_dim)
        table = checked_table(self.table, 2 * self.span, self.d_model)
        key_rows, query_rows = (project(table).unflatten(-1, (self.num_heads, -1)).permute(1, 2, 0)
                                for project in (self.key_projection, self.query_projection))  # (heads, head_dim, rows)
        ij = -relative_offsets(q_positions, k_positions)                       # i - j, (.., q, k)
        ji = -ij if self.p2c_index == "paper" else ij
        q, scaled_k = q * self.scale, k * self.scale
        content_to_position = _pick(q @ key_rows, self._row(ij))
        position_to_content = _pick(scaled_k @ query_rows, self._row(ji).transpose(-2, -1)).transpose(-2, -1)
        return q @ k.transpose(-2, -1) + content_to_position + position_to_content

    def _row(self, distance):
        if self.num_buckets is not None:
            distance = deberta_bucket(distance, self.num_buckets, self.max_offset)
        return torch.clamp(distance + self.span, 0, 2 * self.span - 1)

    def extra_repr(self):
        return (f"d_model={self.d_model}, num_heads={self.num_heads}, max_offset={self.max_offset}, "
                f"num_buckets={self.num_buckets}, p2c_index={self.p2c_index!r}")


class Huang(PositionMethod):
    """Four ways for a learned a_r to meet q_i . k_j, all divided by sqrt(head_dim), with r = clip(j - i).

    variant 1: (q_i . k_j) a_|r|, one number a distance: left and right look alike.
    variant 2: (q_i . k_j) a_r, one number an offset.
    variant 3: sum_d q_id k_jd a_rd, one vector an offset.
    variant 4: q_i . k_j + q_i . a_r + a_r . k_j, one vector an offset; BERT's relative_key_query, which counts i - j.
    Door 4 (logits). .table (max_offset + 1,), (2 * max_offset + 1,) or (2 * max_offset + 1, head_dim), shared by all
    heads: N(1, 0.02) where it multiplies - zeros would erase the tokens - and N(0, 0.02) in variant 4.
    Cost: one product and a pick a pair; variant 3 one product a row of the table.
    Errors: ValueError for a negative max_offset, an unknown variant, q of another width, a table of another shape.
    Source: Huang et al. 2020 (arXiv:2009.13658), section 3.
    """

    def __init__(self, head_dim: int, max_offset: int, variant: int = 1):
        super().__init__()
        self.head_dim = _checks.whole_number(head_dim, "head_dim", least=1)
        self.max_offset = _checks.whole_number(max_offset, "max_offset")
        if variant not in (1, 2, 3, 4):
            raise ValueError(f"variant must be 1, 2, 3 or 4, got {variant!r}")
        self.variant = variant
        rows = max_offset + 1 if variant == 1 else 2 * max_offset + 1
        self._shape = (rows,) if variant in (1, 2) else (rows, head_dim)
        self.table = nn.Parameter(torch.empty(self._shape))
        nn.init.normal_(self.table, mean=0.0 if variant == 4 else 1.0, std=0.02)

    def logits(self, q, k, q_positions, k_positions, mask=None):
        """(batch, heads, q, k)."""
        _check_width(q, self.head_dim)
        table = checked_table(self.table, *self._shape)
        q = q * self.head_dim ** -0.5
        offsets = relative_offsets(q_positions, k_positions)
        if self.variant == 1:
            return (q @ k.transpose(-2, -1)) * table[_for_heads(offsets.abs().clamp(max=self.max_offset))]
        rows = clip_offsets(offsets, self.max_offset)
        if self.variant == 2:
            return (q @ k.transpose(-2, -1)) * table[_for_heads(rows)]
        if self.variant == 3:
            logits = q.new_zeros(*q.shape[:-1], k.shape[-2])
            for row, vector in enumerate(table):
                logits = torch.where(_for_heads(rows == row), (q * vector) @ k.transpose(-2, -1), logits)
            return logits
        logits = _times_shifted_keys(q, k, table, q_positions, k_positions)
        by_row = (k * self.head_dim ** -0.5) @ table.t()                       # (batch, heads, k, rows)
        return logits + _pick(by_row, rows.transpose(-2, -1)).transpose(-2, -1)

    def extra_repr(self):
        return f"head_dim={self.head_dim}, max_offset={self.max_offset}, variant={self.variant}"


def _pick(by_row: Tensor, rows: Tensor) -> Tensor:
    """by_row[..., i, rows[i, j]]: by_row (batch, heads, i, rows of a table), rows (i, j) or (batch, i, j)."""
    return by_row.gather(-1, _for_heads(rows).expand(*by_row.shape[:-1], rows.shape[-1]))


def _times_shifted_keys(q: Tensor, k: Tensor, table: Tensor, q_positions: Tensor, k_positions: Tensor) -> Tensor:
    """q_i . (k_j + table[clip(j - i)]), table (2 * max_offset + 1, head_dim).

    Without gradients, nothing of the result's size is held beside it: all keys get the first row before the product,
    and what the other rows have more than it is added in place, some queries at a time. Where positions are
    consecutive, the keys before those near a block of queries have the first row, and all keys after them the last.
    """
    max_offset, (q_len, k_len) = len(table) // 2, (q.shape[-2], k.shape[-2])
    if torch.compiler.is_compiling() or torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, table)):
        rows = clip_offsets(relative_offsets(q_positions, k_positions), max_offset)
        return q @ k.transpose(-2, -1) + _pick(q @ table.t(), rows)
    logits = q @ (k + table[0]).transpose(-2, -1)
    more = (table - table[0]).t()                                              # (head_dim, rows)
    near, far = 0, k_len
    consecutive = is_consecutive(q_positions) and is_consecutive(k_positions)
    cached = int(q_positions[0] - k_positions[0]) if consecutive else 0        # keys before the first query's own
    for start in range(0, q_len, _QUERIES_AT_A_TIME):
        stop = min(start + _QUERIES_AT_A_TIME, q_len)
        queries = slice(start, stop)
        if consecutive:
            near = min(max(cached + start - max_offset, 0), k_len)
            far = min(max(cached + stop - 1 + max_offset, near), k_len)
        by_row = q[..., queries, :] @ more                                     # (batch, heads, queries, rows)
        rows = clip_offsets(relative_offsets(q_positions[..., queries], k_positions[..., near:far]), max_offset)
        logits[..., queries, near:far] += _pick(by_row, rows)
        logits[..., queries, far:] += by_row[..., -1:]
    return logits


_QUERIES_AT_A_TIME = 128


def _for_heads(pairs: Tensor) -> Tensor:
    """(q, k) as it is, (batch, q, k) as (batch, 1, q, k)."""
    return pairs[:, None] if pairs.dim() == 3 else pairs


def _check_width(tensor: Tensor, head_dim: int, name: str = "q"):
    if tensor.shape[-1] != head_dim:
        raise ValueError(f"the table has vectors of head_dim = {head_dim}, got {name} of shape {tuple(tensor.shape)}")


def _check_heads(q: Tensor, num_heads: int, head_dim: int):
    if q.dim() != 4 or q.shape[1] != num_heads or q.shape[-1] != head_dim:
        raise ValueError(f"the method has {num_heads} heads of head_dim {head_dim}, got q of shape {tuple(q.shape)}")
