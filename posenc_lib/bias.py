"""Door 3: methods that add a number to each logit, whatever the tokens are."""
from collections.abc import Callable

import torch
from torch import Tensor, nn

from . import _checks
from .method import PositionMethod
from .offsets import alibi_slopes, checked_table, is_consecutive, relative_offsets, t5_bucket


class T5Bias(PositionMethod):
    """logits + table[bucket(j - i), head]: one learned number a bucket and head.

    Door 3 (bias). .table (num_buckets, num_heads), N(0, 0.02); T5 shares it between all layers.
    num_buckets, max_distance, bidirectional: see `t5_bucket`. scale: factor on q . k, None for head_dim**-0.5;
    published T5 weights need 1.0, since T5 leaves 1 / sqrt(head_dim) out and adds the bias to the bare q . k.
    Cost: a (heads, q, k) matrix, written once; bucketing every pair where positions are batched or have gaps.
    Errors: ValueError for no heads and for buckets that do not work out.
    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1.
    """

    def __init__(self, num_heads: int, num_buckets: int = 32, max_distance: int = 128, bidirectional: bool = True,
                 scale: float | None = None):
        super().__init__()
        self.num_heads = _checks.whole_number(num_heads, "num_heads", least=1)
        self.buckets = dict(bidirectional=bool(bidirectional), num_buckets=num_buckets, max_distance=max_distance)
        t5_bucket([0], **self.buckets)                                         # raises where they do not work out
        self.scale = None if scale is None else _checks.positive_number(scale, "scale")
        self.table = nn.Parameter(torch.empty(num_buckets, num_heads))
        nn.init.normal_(self.table, std=0.02)

    def bias(self, q_positions, k_positions):
        """(heads, q, k), or (batch, heads, q, k) for batched positions, in the table's dtype."""
        by_head = checked_table(self.table, self.buckets["num_buckets"], self.num_heads).t()
        return _bias_of_offset(lambda offsets: by_head[:, t5_bucket(offsets, **self.buckets)],
                               q_positions, k_positions)

    def extra_repr(self):
        buckets = ", ".join(f"{name}={value}" for name, value in self.buckets.items())
        return f"num_heads={self.num_heads}, {buckets}, scale={self.scale}"


class ALiBi(PositionMethod):
    """logits - slope_h |i - j|: nearer keys weigh more, at a fixed rate a head. Nothing is learned.

    Door 3 (bias). No weights. bidirectional=False: keys after the query get 0 - a causal mask hides them;
    True: the same penalty on both sides. Slopes: see `alibi_slopes`. Scale head_dim**-0.5, the bias itself unscaled.
    In causal attention + slope j would do, one row a head, because softmax ignores what a row shares; this is the
    paper's matrix, right for any mask and any positions.
    Cost: a (heads, q, k) float32 matrix, written once.
    Errors: ValueError for num_heads < 1. Source: Press et al. 2022 (arXiv:2108.12409), section 3.
    """

    def __init__(self, num_heads: int, bidirectional: bool = False):
        super().__init__()
        self.num_heads = _checks.whole_number(num_heads, "num_heads", least=1)
        self.bidirectional = bool(bidirectional)

    def bias(self, q_positions, k_positions):
        """float32 (heads, q, k), or (batch, heads, q, k) for batched positions; never positive."""
        def minus_slope_times_distance(offsets):
            nearness = -offsets.abs() if self.bidirectional else offsets.clamp(max=0)
            slopes = alibi_slopes(self.num_heads).to(device=offsets.device, dtype=torch.float32)
            return slopes.view(-1, *[1] * offsets.dim()) * nearness.to(torch.float32)
        return _bias_of_offset(minus_slope_times_distance, q_positions, k_positions)

    def extra_repr(self):
        return f"num_heads={self.num_heads}, bidirectional={self.bidirectional}"


class TUPE(PositionMethod):
    """(q . k + (p_i U_Q) . (p_j U_K)) / sqrt(2 head_dim): positions correlate with positions, apart from the tokens.

    Door 3 (bias); scale (2 head_dim)**-0.5, because two terms are summed. .table (max_len, d_model), N(0, 1), which is
    what the official code's LayerNorm makes of its rows; .query_projection and .key_projection are U_Q and U_K.
    reset_cls: position 0 holds [CLS], which has no place in the sentence: row 0 is .cls_to_others (heads,), and what
    is left of column 0 is .others_to_cls (heads,), both learned, from 0. By position, not by index; row 0 wins.
    All layers share one TUPE. TUPE-R adds T5's buckets, Compose(TUPE(...), T5Bias(...)), with extra ones for [CLS].
    Cost: two projections of the positions and one (heads, q, k) product.
    Errors: ValueError if num_heads does not divide d_model or a position is max_len or more.
    Source: Ke et al. 2021 (arXiv:2006.15595), sections 3.1 and 3.2.
    """

    def __init__(self, d_model: int, num_heads: int, max_len: int, reset_cls: bool = True):
        super().__init__()
        self.d_model = _checks.whole_number(d_model, "d_model", least=1)
        self.num_heads, _ = _checks.heads(d_model, num_heads)
        self.max_len = _checks.whole_number(max_len, "max_len", least=1)
        self.scale = (2 * d_model // num_heads) ** -0.5
        self.table = nn.Parameter(torch.randn(max_len, d_model))
        self.query_projection = nn.Linear(d_model, d_model, bias=False)
        self.key_projection = nn.Linear(d_model, d_model, bias=False)
        self.reset_cls = bool(reset_cls)
        if reset_cls:
            self.cls_to_others = nn.Parameter(torch.zeros(num_heads))
            self.others_to_cls = nn.Parameter(torch.zeros(num_heads))

    def bias(self, q_positions, k_positions):
        """(heads, q, k), or (batch, heads, q, k) for batched positions, in the table's dtype."""
        q, k = self._project(self.query_projection, q_positions), self._project(self.key_projection, k_positions)
        q = q * self.scale
        if self.reset_cls:          # two more features reset within the product, where another pass would cost as much
            q_is_cls, k_is_cls = (q_positions == 0)[..., None, :, None], (k_positions == 0)[..., None, :, None]
            from_cls = checked_table(self.cls_to_others, self.num_heads)[:, None, None]
            to_cls = checked_table(self.others_to_cls, self.num_heads)[:, None, None]
            one = torch.ones_like(to_cls)
            q = torch.cat((q.masked_fill(q_is_cls, 0), q_is_cls * from_cls, ~q_is_cls * one), dim=-1)
            k = torch.cat((k.masked_fill(k_is_cls, 0), torch.ones_like(k_is_cls) * one, k_is_cls * to_cls), dim=-1)
        return q @ k.transpose(-2, -1)

    def _project(self, projection, positions):
        """(..., length) -> (..., heads, length, head_dim)."""
        positions = _checks.positions(positions)
        table = checked_table(self.table, self.max_len, self.d_model)
        if _checks.eager(positions) and positions.max() >= self.max_len:
            raise ValueError(f"the table has max_len = {self.max_len} rows, got position {int(positions.max())}")
        return projection(table[positions]).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)

    def extra_repr(self):
        return f"d_model={self.d_model}, num_heads={self.num_heads}, max_len={self.max_len}, reset_cls={self.reset_cls}"


def _bias_of_offset(values: Callable[[Tensor], Tensor], q_positions, k_positions) -> Tensor:
    """The bias that depends on j - i alone; values maps int64 offsets (...) to (heads, ...).

    Where both positions are consecutive, the q + k - 1 offsets that occur are computed once and every row of the
    matrix is a window on them.
    """
    q_positions = _checks.positions(q_positions, "q_positions")
    k_positions = _checks.positions(k_positions, "k_positions")
    if is_consecutive(q_positions) and is_consecutive(k_positions):
        start, stop = int(k_positions[0] - q_positions[-1]), int(k_positions[-1] - q_positions[0]) + 1
        offsets = torch.arange(start, stop, device=q_positions.device)
        windows = values(offsets).unfold(-1, len(k_positions), 1)    # (heads, q, k), last query first
        return windows.flip(-2)
    biases = values(relative_offsets(q_positions, k_positions))
    return biases if biases.dim() == 3 else biases.movedim(1, 0)
