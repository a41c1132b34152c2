"""attend and SelfAttention: against plain loops, and by what must and must not change the result."""
import copy
import itertools
import math
import pickle
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from posenc_lib import Compose, NoPE, PositionMethod, SelfAttention, Sinusoidal, attend, clip_offsets, relative_offsets

FIVE = torch.arange(5)


class Table(PositionMethod):
    """Door 3: a learned number for every head and clipped offset; three dimensions, or four where positions have two.

    Also stretches queries and keys by their positions (door 2), so that a position gone astray shows.
    """

    def __init__(self, num_heads, stretch=0.0, scale=None, batch=None):
        super().__init__()
        self.table = nn.Parameter((1.7 * torch.arange(7.0 * num_heads)).sin().unflatten(0, (num_heads, 7)))
        self.stretch, self.scale, self.batch = stretch, scale, batch

    def rotate(self, q, k, q_positions, k_positions):
        return self._stretched(q, q_positions), self._stretched(k, k_positions)

    def _stretched(self, x, positions):
        factor = (1 + self.stretch * positions).to(x.dtype)[..., None]         # (length, 1) or (batch, length, 1)
        return x * (factor[:, None] if factor.dim() == 3 else factor)

    def bias(self, q_positions, k_positions):
        index = clip_offsets(relative_offsets(q_positions, k_positions), 3)    # (q, k) or (batch, q, k)
        bias = self.table[:, index]                                            # (heads, q, k) or (heads, batch, q, k)
        if self.batch is not None and index.dim() == 2:
            return bias.expand(self.batch, -1, -1, -1)
        return bias if index.dim() == 2 else bias.transpose(0, 1)


class OpenLogits(PositionMethod):
    """Door 4: logits times the number of keys that the query sees."""

    def logits(self, q, k, q_positions, k_positions, mask=None):
        seen = 1.0 if mask is None else mask.to(q.dtype).sum(-1, keepdim=True)
        return super().logits(q, k, q_positions, k_positions) * seen


class OpenValues(PositionMethod):
    """Door 5: the weighted sum plus the query's position."""

    def values(self, weights, v, q_positions, k_positions):
        return super().values(weights, v, q_positions, k_positions) + q_positions[:, None].to(v.dtype)


class OpenDoors(OpenLogits, OpenValues):
    """Doors 4 and 5."""


def qkv(batch=2, heads=2, q_len=5, k_len=5, head_dim=4, **kind):
    return (torch.randn(batch, heads, q_len, head_dim, **kind), torch.randn(batch, heads, k_len, head_dim, **kind),
            torch.randn(batch, heads, k_len, head_dim, **kind))


def plain_attention(q, k, v, q_positions, k_positions, *, causal=False, mask=None, table=None, stretch=0.0, scale=None):
    """The equations in plain loops over python floats. Positions (batch, length). Returns out and weights."""
    (batch, heads, q_len, head_dim), k_len = q.shape, k.shape[2]
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    mask = torch.ones(1, 1, 1, 1, dtype=torch.bool) if mask is None else mask
    mask = mask.expand(batch, heads, q_len, k_len).tolist()
    out = torch.zeros(batch, heads, q_len, v.shape[-1], dtype=torch.float64)
    weights = torch.zeros(batch, heads, q_len, k_len, dtype=torch.float64)
    for b, h, i in itertools.product(range(batch), range(heads), range(q_len)):
        terms = {}
        for j in range(k_len):
            p_i, p_j = q_positions[b][i], k_positions[b][j]
            if mask[b][h][i][j] and (not causal or p_j <= p_i):
                dot = sum(x * y for x, y in zip(q[b, h, i].tolist(), k[b, h, j].tolist()))
                bias = 0.0 if table is None else table[h, 3 + max(-3, min(3, p_j - p_i))].item()
                terms[j] = math.exp(dot * scale * (1 + stretch * p_i) * (1 + stretch * p_j) + bias)
        for j, term in terms.items():
            weights[b, h, i, j] = term / sum(terms.values())
            out[b, h, i] += weights[b, h, i, j] * v[b, h, j]
    return out, weights


@st.composite
def cases(draw):
    """One call of attend with its arguments, and the same for plain_attention."""
    torch.manual_seed(draw(st.integers(0, 2**32)))
    batch, heads, k_len = draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(0, 6))
    given_positions = draw(st.sampled_from(["", "k", "q", "qk"]))
    q_len = draw(st.integers(0, 5 if "q" in given_positions else k_len))
    q, k, v = qkv(batch, heads, q_len, k_len, draw(st.integers(1, 4)))
    v = v[..., :draw(st.integers(1, 4))]

    def positions(length):
        shape = draw(st.sampled_from([(length,), (batch, length)]))
        return torch.randint(0, 7, shape, dtype=draw(st.sampled_from([torch.int64, torch.int32, torch.uint8])))

    k_positions = positions(k_len) if "k" in given_positions else torch.arange(k_len)
    q_positions = positions(q_len) if "q" in given_positions else k_positions[..., k_len - q_len:]
    keywords = {"causal": draw(st.booleans())}
    if draw(st.booleans()):
        shape = [draw(st.sampled_from([1, n])) for n in (batch, heads, q_len, k_len)]
        keywords["mask"] = torch.rand(shape) < draw(st.sampled_from([0.2, 0.5, 0.8]))
    stretch, scale = draw(st.sampled_from([0.0, 0.3])), draw(st.sampled_from([None, 1.0, 0.3]))
    method = Table(heads, stretch, scale, draw(st.sampled_from([None, batch]))) if draw(st.booleans()) else NoPE()
    expected = plain_attention(
        q, k, v, q_positions.expand(batch, -1).tolist(), k_positions.expand(batch, -1).tolist(), **keywords,
        **({"table": method.table, "stretch": stretch, "scale": scale} if isinstance(method, Table) else {}))
    if "q" in given_positions:
        keywords["q_positions"] = q_positions
    if "k" in given_positions:
        keywords["k_positions"] = k_positions
    return SimpleNamespace(q=q, k=k, v=v, method=method, keywords=keywords, expected=expected)


def check_against_plain_loops(attend):
    """Both paths of attend, whatever the shapes, positions, masks, biases and scales."""
    @given(cases())
    def same(case):
        out, weights = case.expected
        fused = attend(case.q, case.k, case.v, case.method, **case.keywords)
        assert fused.dtype == torch.float32 and fused.shape == out.shape
        torch.testing.assert_close(fused, out.float(), rtol=2e-5, atol=2e-5)
        explicit, found = attend(case.q, case.k, case.v, case.method, return_weights=True, **case.keywords)
        torch.testing.assert_close(explicit, out.float(), rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(found, weights.float(), rtol=2e-5, atol=2e-5)

    same()


def test_attend_is_what_plain_loops_compute():
    check_against_plain_loops(attend)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-13), (torch.float32, 2e-5), (torch.float16, 1e-2),
                                              (torch.bfloat16, 6e-2)])
def test_dtypes_and_devices(dtype, tolerance, device):
    """Half types: each of the few roundings is 2**-11 or 2**-8 of values below 4."""
    if device == "mps" and dtype == torch.float64:
        pytest.skip("MPS has no float64")
    q, k, v = qkv(dtype=dtype)
    method, mask = Table(2), torch.rand(2, 1, 5, 5) < 0.7
    expected, _ = plain_attention(q, k, v.double(), [list(range(5))] * 2, [list(range(5))] * 2, causal=True, mask=mask,
                                  table=method.table)
    q, k, v, method, mask = (x.to(device) for x in (q, k, v, method, mask))
    fused = attend(q, k, v, method, causal=True, mask=mask)
    explicit, weights = attend(q, k, v, method, causal=True, mask=mask, return_weights=True)
    for out in (fused, explicit):
        assert out.dtype == dtype and out.device == q.device
        torch.testing.assert_close(out.cpu().double(), expected, rtol=0, atol=tolerance)
    assert weights.dtype == dtype


def test_positions_follow_the_queries_device(device):
    q, k, v = (x.to(device) for x in qkv())
    method = Table(2, stretch=0.3).to(device)
    expected = attend(q, k, v, method, causal=True)
    for positions in (torch.arange(5), torch.arange(5, device=device), list(range(5)), range(5), FIVE.numpy()):
        torch.testing.assert_close(attend(q, k, v, method, q_positions=positions, causal=True), expected)
        torch.testing.assert_close(attend(q, k, v, method, k_positions=positions, causal=True), expected)


def check_fused_is_used(attend, monkeypatch):
    """Torch's fused kernel does the work exactly where doors 4 and 5 are shut and nobody asks for the weights."""
    calls, fused = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention",
                        lambda q, k, v, mask, **b: calls.append((mask, b)) or fused(q, k, v, mask, **b))
    q, k, v = qkv()
    for method in (NoPE(), Table(2), Compose(Table(2), Sinusoidal(4)), Compose()):
        attend(q, k, v, method, causal=True)
    assert len(calls) == 4
    attend(q, k, v, NoPE(), return_weights=True)
    for method in (OpenDoors(), Compose(Table(2), OpenDoors())):
        attend(q, k, v, method)
    assert len(calls) == 4
    attend(q, k, v, NoPE(), causal=True, mask=torch.rand(1, 1, 5, 5) < 0.7)
    assert [options["is_causal"] for mask, options in calls] == [True, False, False, True, False]
    assert [mask is None for mask, options in calls] == [True, False, False, True, False]      # never both


def test_the_fused_kernel_is_used_where_it_can_be(monkeypatch):
    check_fused_is_used(attend, monkeypatch)


def gradients(attend, explicit, causal, mask):
    torch.manual_seed(3)
    q, k, v = qkv(requires_grad=True)
    method = Table(2, stretch=0.2)
    out = attend(q, k, v, method, causal=causal, mask=mask, return_weights=explicit)
    ((out[0] if explicit else out) ** 2).sum().backward()
    return q.grad, k.grad, v.grad, method.table.grad


def check_gradients(attend):
    """Both paths give the same gradients, the bias table's included; rows that see nothing have none, not NaN."""
    sees_nothing = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    sees_nothing[..., 2, :] = False
    for causal, mask in [(False, None), (True, None), (True, sees_nothing), (False, sees_nothing)]:
        fused, explicit = (gradients(attend, explicit, causal, mask) for explicit in (False, True))
        for a, b in zip(fused, explicit):
            assert a is not None and a.isfinite().all() and a.abs().sum() > 0
            torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
        if mask is not None:
            assert not fused[0][:, :, 2].any() and not explicit[0][:, :, 2].any()


def test_both_paths_have_the_same_gradients():
    check_gradients(attend)


def test_the_gradient_is_the_derivative():
    """Central differences in float64, through bias table and queries, fused path."""
    q, k, v = qkv(batch=1, q_len=3, k_len=3, head_dim=2, dtype=torch.float64)
    method = Table(2, stretch=0.2).double()

    def run(q, table):
        return torch.func.functional_call(Caller(method), {"method.table": table}, (q, k, v))

    assert torch.autograd.gradcheck(run, (q.requires_grad_(), method.table.detach().clone().requires_grad_()))


class Caller(nn.Module):
    """attend as a module, for functional_call and for torch.compile."""

    def __init__(self, method, causal=True):
        super().__init__()
        self.method, self.causal = method, causal

    def forward(self, q, k, v, mask=None, q_positions=None):
        return attend(q, k, v, self.method, causal=self.causal, mask=mask, q_positions=q_positions)


def check_rows_that_see_nothing(attend):
    q, k, v = qkv()
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    for method in (NoPE(), Table(2)):
        for keywords in ({"mask": nothing}, {"mask": nothing, "causal": True},
                         {"causal": True, "q_positions": [0] * 5, "k_positions": [1] * 5}):
            out, weights = attend(q, k, v, method, return_weights=True, **keywords)
            assert not attend(q, k, v, method, **keywords).any() and not out.any() and not weights.any()


def test_rows_that_see_nothing_give_zeros():
    check_rows_that_see_nothing(attend)


def check_masked_keys_have_no_influence(attend):
    @given(st.integers(0, 2**32), st.booleans(), st.booleans())
    def nothing_changes(seed, causal, with_bias):
        generator = torch.Generator().manual_seed(seed)
        q, k, v = (torch.randn(2, 2, 5, 4, generator=generator) for _ in range(3))
        hidden = torch.rand(2, 1, 1, 5, generator=generator) < 0.4             # keys that nobody may see
        noise = 100 * torch.randn(2, 2, 5, 4, generator=generator)
        other_k, other_v = torch.where(hidden.mT, noise, k), torch.where(hidden.mT, noise, v)
        method = Table(2) if with_bias else NoPE()
        for explicit in (False, True):
            keywords = {"causal": causal, "mask": ~hidden, "return_weights": explicit}
            before, after = attend(q, k, v, method, **keywords), attend(q, other_k, other_v, method, **keywords)
            for a, b in zip(before, after):
                assert torch.equal(a, b)

    nothing_changes()


def test_masked_keys_have_no_influence():
    check_masked_keys_have_no_influence(attend)


def check_decoding(attend):
    """Step by step with a cache, in chunks, and with given positions: the rows of the full result."""
    q, k, v = qkv(q_len=7, k_len=7)
    for method in (NoPE(), Table(2), Table(2, stretch=0.3)):
        full = attend(q, k, v, method, causal=True)
        for start, stop in [(t, t + 1) for t in range(7)] + [(0, 3), (3, 7), (5, 7), (6, 6)]:
            step = attend(q[:, :, start:stop], k[:, :, :stop], v[:, :, :stop], method, causal=True)
            torch.testing.assert_close(step, full[:, :, start:stop])
            step = attend(q[:, :, start:stop], k, v, method, causal=True, q_positions=torch.arange(start, stop))
            torch.testing.assert_close(step, full[:, :, start:stop])
        start = 40                                                             # the cache need not begin at 0
        late = torch.arange(start, start + 7)
        full = attend(q, k, v, method, causal=True, q_positions=late, k_positions=late)
        torch.testing.assert_close(attend(q[:, :, 5:], k, v, method, causal=True, k_positions=late), full[:, :, 5:])


def test_decoding_with_a_cache_gives_the_rows_of_the_full_result():
    check_decoding(attend)


def check_left_padding(attend, golden):
    """A batch padded on the left, its positions counted from the first real token, equals the rows one by one."""
    oracle = golden["positions"]["left_pad"]
    real = torch.tensor(oracle["inputs"]["attention_mask"], dtype=torch.bool)  # (2, 5)
    q, k, v = qkv()
    for pad in ("pad_as_0", "pad_as_1_hf"):                                    # the padding's own position: no matter
        positions = torch.tensor(oracle["expected"]["position_ids_" + pad])
        for method in (NoPE(), Table(2), Table(2, stretch=0.3)):
            out = attend(q, k, v, method, causal=True, mask=real[:, None, None], q_positions=positions,
                         k_positions=positions)
            last = attend(q[:, :, 4:], k, v, method, causal=True, mask=real[:, None, None], k_positions=positions)
            torch.testing.assert_close(last, out[:, :, 4:])
            for b in range(2):
                alone = attend(*(x[b:b + 1, :, real[b]] for x in (q, k, v)), method, causal=True)
                torch.testing.assert_close(out[b:b + 1, :, real[b]], alone)


def test_left_padded_batches(golden):
    check_left_padding(attend, golden)


def check_shuffled_positions(attend):
    """Tokens that travel together with their positions keep their results, causal or not."""
    q, k, v = qkv()
    for method, causal in itertools.product((NoPE(), Table(2), Table(2, stretch=0.3)), (False, True)):
        full = attend(q, k, v, method, causal=causal)
        for order in (torch.tensor([3, 0, 4, 1, 2]), torch.tensor([4, 3, 2, 1, 0])):
            keywords = {"q_positions": order, "k_positions": order, "causal": causal}
            shuffled = attend(*(x[:, :, order] for x in (q, k, v)), method, **keywords)
            torch.testing.assert_close(shuffled, full[:, :, order])
            del keywords["q_positions"]                                        # by default the keys', so the same
            shuffled = attend(*(x[:, :, order] for x in (q, k, v)), method, **keywords)
            torch.testing.assert_close(shuffled, full[:, :, order])
            shuffled, _ = attend(*(x[:, :, order] for x in (q, k, v)), method, return_weights=True, **keywords)
            torch.testing.assert_close(shuffled, full[:, :, order])


def test_shuffled_tokens_with_their_positions_keep_their_results():
    check_shuffled_positions(attend)


def test_causal_goes_by_positions_not_by_indices():
    q, k, v = qkv()
    reversed_positions = torch.arange(5).flip(0)
    _, weights = attend(q, k, v, NoPE(), q_positions=reversed_positions, k_positions=reversed_positions, causal=True,
                        return_weights=True)
    assert torch.equal(weights != 0, torch.ones(5, 5).triu().bool().expand(2, 2, 5, 5))
    _, weights = attend(q, k, v, NoPE(), q_positions=[3] * 5, k_positions=[3] * 5, causal=True, return_weights=True)
    assert (weights > 0).all()                                                 # equal positions see each other


@given(st.permutations(range(5)))
def test_without_positions_attention_is_permutation_equivariant(order):
    """Permuted tokens give permuted results, so any pooled result is the same."""
    torch.manual_seed(0)
    order = list(order)
    q, k, v = qkv()
    permuted = attend(q[:, :, order], k[:, :, order], v[:, :, order], NoPE())
    torch.testing.assert_close(permuted, attend(q, k, v, NoPE())[:, :, order])
    x, layer = torch.randn(2, 5, 8), SelfAttention(8, 2, NoPE())
    torch.testing.assert_close(layer(x[:, order]), layer(x)[:, order])
    torch.testing.assert_close(layer(x[:, order]).mean(1), layer(x).mean(1))


def test_a_causal_mask_or_a_position_breaks_equivariance():
    """Where a token stands then matters: reversing the sequence moves a result by far more than rounding."""
    x, layer = torch.randn(2, 5, 8), SelfAttention(8, 2, NoPE())
    biased, pe = SelfAttention(8, 2, Table(2)), Sinusoidal(8)
    for run in (lambda x: layer(x, causal=True), biased, lambda x: layer(pe.embed(x, 5))):
        assert (run(x.flip(1)) - run(x).flip(1)).abs().max() > 0.01
        assert (run(x.flip(1)).mean(1) - run(x).mean(1)).abs().max() > 1e-3


def check_weights(attend):
    """Each row sums to 1, the weights made the output, and an open door 5 has the last word."""
    q, k, v = qkv()
    for causal in (False, True):
        out, weights = attend(q, k, v, Table(2), causal=causal, return_weights=True)
        torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5))
        torch.testing.assert_close(weights @ v, out)
        if causal:
            assert not weights.triu(1).any()


def test_weights_are_a_distribution():
    check_weights(attend)


def check_doors_four_and_five(attend):
    """The three methods by hand, with and without a bias."""
    q, k, v = qkv()
    mask = torch.rand(2, 1, 5, 5) < 0.7
    for owner, biased in itertools.product((OpenLogits(), OpenValues(), OpenDoors()), (False, True)):
        method = Compose(Table(2), owner) if biased else owner
        seen = mask & torch.ones(5, 5, dtype=torch.bool).tril()
        logits = q @ k.mT / 2
        if isinstance(owner, OpenLogits):
            logits = logits * seen.sum(-1, keepdim=True)
        if biased:
            logits = logits + method.bias(torch.arange(5), torch.arange(5))
        weights = logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0)
        expected = weights @ v
        if isinstance(owner, OpenValues):
            expected = expected + torch.arange(5.0)[:, None]
        torch.testing.assert_close(attend(q, k, v, method, causal=True, mask=mask), expected)
        out, found = attend(q, k, v, method, causal=True, mask=mask, return_weights=True)
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(found, weights)


def test_doors_four_and_five_take_over():
    check_doors_four_and_five(attend)


def test_methods_are_told_the_positions():
    """int64, on the queries' device, one vector or one row per sequence; the queries' default is the keys' last."""
    told = []

    class Listener(PositionMethod):
        def bias(self, q_positions, k_positions):
            told.append((q_positions, k_positions))

    q, k, v = qkv(q_len=2)
    attend(q, k, v, Listener())
    attend(q, k, v, Listener(), k_positions=torch.tensor([9, 8, 7, 6, 5], dtype=torch.uint8))
    attend(q, k, v, Listener(), q_positions=[[1, 2], [3, 4]])
    assert [(a.tolist(), b.tolist()) for a, b in told] == [
        ([3, 4], [0, 1, 2, 3, 4]), ([6, 5], [9, 8, 7, 6, 5]), ([[1, 2], [3, 4]], [0, 1, 2, 3, 4])]
    assert all(t.dtype == torch.int64 for pair in told for t in pair)


@pytest.mark.parametrize("explicit", [False, True])
def test_zero_lengths(explicit):
    def shapes(q_len, k_len, **keywords):
        q, k, v = qkv(q_len=q_len, k_len=k_len)
        out = attend(q, k, v[..., :3], Table(2), return_weights=explicit, **keywords)
        return [tuple(x.shape) for x in (out if explicit else (out,))]

    assert shapes(0, 0, causal=True) == [(2, 2, 0, 3), (2, 2, 0, 0)][:1 + explicit]
    assert shapes(0, 4, causal=True) == [(2, 2, 0, 3), (2, 2, 0, 4)][:1 + explicit]
    assert shapes(3, 0, q_positions=[0, 1, 2]) == [(2, 2, 3, 3), (2, 2, 3, 0)][:1 + explicit]
    assert attend(*qkv(batch=0), NoPE(), causal=True).shape == (0, 2, 5, 4)


def test_a_query_without_keys_gets_zeros():
    q, k, v = qkv(q_len=3, k_len=0)
    assert not attend(q, k, v, NoPE(), q_positions=[0, 1, 2]).any()


@pytest.mark.parametrize("method", [NoPE(), Table(2), OpenDoors()])
def test_autocast_changes_no_angle_and_little_else(method):
    """Under autocast the products are bfloat16 (2**-8), the result stays close."""
    q, k, v = qkv()
    expected = attend(q, k, v, method, causal=True)
    with torch.autocast("cpu", torch.bfloat16):
        for explicit in (False, True):
            out = attend(q, k, v, method, causal=True, return_weights=explicit)
            out = out[0] if explicit else out
            torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.06)
        layer = SelfAttention(8, 2, method)
        assert layer(torch.randn(2, 5, 8), causal=True).dtype == torch.bfloat16


def test_under_inference_mode_and_no_grad_the_result_is_the_same():
    """To rounding: torch may choose another kernel where no gradient of the bias is needed."""
    (q, k, v), method = qkv(), Table(2)
    expected = attend(q, k, v, method, causal=True).detach()
    for mode in (torch.inference_mode(), torch.no_grad()):
        with mode:
            torch.testing.assert_close(attend(q, k, v, method, causal=True), expected)


def test_inputs_and_masks_are_not_changed():
    arguments = (*qkv(), torch.rand(2, 1, 5, 5) < 0.5, torch.tensor([4, 1, 2, 3, 0]))
    before = [x.clone() for x in arguments]
    q, k, v, mask, positions = arguments
    for explicit in (False, True):
        attend(q, k, v, Table(2), causal=True, mask=mask, q_positions=positions, return_weights=explicit)
    assert all(torch.equal(a, b) for a, b in zip(arguments, before))


def test_meta_tensors_have_meta_results():
    q, k, v = (x.to("meta") for x in qkv())
    assert attend(q, k, v, Table(2).to("meta"), causal=True, q_positions=torch.arange(5)).shape == (2, 2, 5, 4)
    with torch.device("meta"):
        layer = SelfAttention(8, 2, Compose(Sinusoidal(8), Table(2)))
        assert layer(torch.empty(2, 5, 8), causal=True).device.type == "meta"


def test_on_the_cpu_under_a_meta_default_device():
    (q, k, v), mask = qkv(), torch.rand(2, 1, 5, 5) < 0.5
    expected = attend(q, k, v, NoPE(), causal=True, mask=mask, q_positions=[4, 3, 2, 1, 0])
    with torch.device("meta"):
        assert torch.equal(attend(q, k, v, NoPE(), causal=True, mask=mask, q_positions=[4, 3, 2, 1, 0]), expected)


@pytest.mark.parametrize("change, error, message", [
    ({"q": torch.zeros(2, 5, 4)}, ValueError, r"q must have shape \(batch, heads, length, head_dim\), got \(2, 5, 4\)"),
    ({"v": torch.zeros(5)}, ValueError, r"v must have shape \(batch, heads, length, head_dim\), got \(5,\)"),
    ({"k": [[1.0]]}, TypeError, "k must be a tensor, got list"),
    ({"q": torch.zeros(2, 2, 5, 4).cfloat()}, TypeError, "q must be real floating point, got torch.complex64"),
    ({"v": torch.zeros(2, 2, 5, 4).long()}, TypeError, "v must be real floating point, got torch.int64"),
    ({"k": torch.zeros(2, 2, 5, 4).double()}, TypeError,
     "q, k and v must have one dtype, got torch.float32, torch.float64 and torch.float32"),
    ({"q": torch.zeros(1, 2, 5, 4)}, ValueError, r"must agree in batch and heads, .*, got \(1, 2, 5, 4\), \(2, 2"),
    ({"q": torch.zeros(2, 1, 5, 4)}, ValueError, r"must agree in batch and heads, .*, got \(2, 1, 5, 4\), \(2, 2"),
    ({"k": torch.zeros(2, 2, 5, 3)}, ValueError, r"q and k in head_dim, .*, \(2, 2, 5, 3\) and \(2, 2, 5, 4\)"),
    ({"k": torch.zeros(2, 2, 4, 4)}, ValueError, r"k and v in length, got .*, \(2, 2, 4, 4\) and \(2, 2, 5, 4\)"),
    ({"q": torch.zeros(2, 2, 5, 0), "k": torch.zeros(2, 2, 5, 0)}, ValueError, "head_dim must be at least 1, got 0"),
    ({"q": torch.zeros(2, 2, 6, 4)}, ValueError,
     "6 queries are more than 5 keys, so they cannot be the last of them: give q_positions"),
    ({"q": torch.zeros(2, 2, 6, 4), "k_positions": FIVE}, ValueError, "6 queries are more than 5 keys"),
    ({"method": NoPE}, TypeError, r"must be a PositionMethod such as NoPE\(\), got the class PositionMethod: call it"),
    ({"method": None}, TypeError, r"method must be a PositionMethod such as NoPE\(\), got NoneType"),
    ({"method": nn.Identity()}, TypeError, r"method must be a PositionMethod such as NoPE\(\), got Identity"),
    ({"method": Table(3)}, ValueError, r"bias must have shape \(2, 5, 5\) or \(2, 2, 5, 5\) .*, got \(3, 5, 5\)"),
    ({"method": Table(1)}, ValueError, r"bias must have shape \(2, 5, 5\) or \(2, 2, 5, 5\) .*, got \(1, 5, 5\)"),
    ({"method": Table(2, batch=1)}, ValueError, r"bias must have shape .*, got \(1, 2, 5, 5\)"),
    ({"q_positions": FIVE.float()}, TypeError, "q_positions must be integers, got dtype torch.float32"),
    ({"k_positions": FIVE.bool()}, TypeError, "k_positions must be integers, got dtype torch.bool"),
    ({"q_positions": FIVE - 1}, ValueError, "q_positions must not be negative, got -1"),
    ({"q_positions": 5}, TypeError, r"q_positions must be an integer tensor, got the int 5; write torch.arange\(5\)"),
    ({"q_positions": FIVE[:4]}, ValueError, r"q_positions must have shape \(5,\) or \(2, 5\), got \(4,\)"),
    ({"k_positions": FIVE[None]}, ValueError, r"k_positions must have shape \(5,\) or \(2, 5\), got \(1, 5\)"),
    ({"k_positions": FIVE.expand(2, 2, 5)}, ValueError, r"k_positions must have shape .*, got \(2, 2, 5\)"),
    ({"mask": torch.ones(2, 2, 5, 5)}, TypeError, "mask must be a bool tensor, True = may attend, got torch.float32"),
    ({"mask": [[True]]}, TypeError, "mask must be a bool tensor, True = may attend, got <class 'list'>"),
    ({"mask": torch.ones(5, 5).bool()}, ValueError,
     r"mask must have four dimensions broadcastable to \(2, 2, 5, 5\), got \(5, 5\)"),
    ({"mask": torch.ones(1, 1).bool()}, ValueError, r"broadcastable to \(2, 2, 5, 5\), got \(1, 1\)"),
    ({"mask": torch.ones(2, 2, 5, 5, 1).bool()}, ValueError, r"broadcastable to \(2, 2, 5, 5\), got \(2, 2, 5, 5, 1"),
    ({"mask": torch.ones(2, 2, 5, 4).bool()}, ValueError, r"broadcastable to \(2, 2, 5, 5\), got \(2, 2, 5, 4\)"),
    ({"mask": torch.ones(3, 1, 1, 5).bool()}, ValueError, r"broadcastable to \(2, 2, 5, 5\), got \(3, 1, 1, 5\)"),
])
def test_bad_input_is_named(change, error, message):
    q, k, v = qkv()
    arguments = {"q": q, "k": k, "v": v, "method": NoPE()} | change
    for explicit in (False, True):
        with pytest.raises(error, match=message):
            attend(**arguments, return_weights=explicit)


def check_self_attention(SelfAttention):
    """Four projections around attend, heads split in order."""
    torch.manual_seed(0)
    for heads, method in ((1, NoPE()), (2, Table(2, stretch=0.3)), (4, Table(4))):
        layer, x = SelfAttention(8, heads, method), torch.randn(2, 5, 8)
        positions, mask = torch.tensor([[4, 0, 2, 2, 6], [0, 1, 2, 3, 4]]), torch.rand(2, 1, 5, 5) < 0.7
        for keywords in ({}, {"causal": True}, {"mask": mask}, {"positions": positions, "causal": True, "mask": mask}):
            q, k, v = (torch.stack((x @ projection.weight.T).split(8 // heads, dim=-1), dim=1)
                       for projection in (layer.q_projection, layer.k_projection, layer.v_projection))
            given = {name: value for name, value in keywords.items() if name != "positions"}
            where = keywords.get("positions", torch.arange(5).expand(2, -1)).tolist()
            table = {"table": method.table, "stretch": method.stretch} if isinstance(method, Table) else {}
            out, _ = plain_attention(q, k, v, where, where, **given, **table)
            expected = torch.cat(out.float().unbind(1), dim=-1) @ layer.out_projection.weight.T
            torch.testing.assert_close(layer(x, **keywords), expected, rtol=2e-5, atol=2e-5)


def test_self_attention_is_four_projections_around_attend():
    check_self_attention(SelfAttention)


def test_self_attention_has_its_projections_and_the_methods_weights_only():
    names = ["q_projection.weight", "k_projection.weight", "v_projection.weight", "out_projection.weight"]
    assert sorted(SelfAttention(8, 2, Sinusoidal(8)).state_dict()) == sorted(names)
    assert sorted(SelfAttention(8, 2, Table(2)).state_dict()) == sorted([*names, "method.table"])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_self_attention_survives_copies_and_conversion(dtype):
    layer, x = SelfAttention(8, 2, Compose(Sinusoidal(8), Table(2))), torch.randn(2, 5, 8)
    expected = layer(x, causal=True)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(other(x, causal=True), expected)
    converted = copy.deepcopy(layer).to(dtype)(x.to(dtype), causal=True)
    assert converted.dtype == dtype
    torch.testing.assert_close(converted.float(), expected, rtol=0.05, atol=0.02)


def test_self_attention_of_nothing():
    layer = SelfAttention(8, 2, Table(2))
    assert layer(torch.zeros(2, 0, 8), causal=True).shape == (2, 0, 8)
    assert layer(torch.zeros(0, 5, 8), causal=True).shape == (0, 5, 8)
    layer(torch.zeros(2, 0, 8)).sum().backward()                               # an empty batch does not stop training
    assert not layer.out_projection.weight.grad.any()


@pytest.mark.parametrize("arguments, error, message", [
    ((8, 3, NoPE()), ValueError, "d_model must be divisible by num_heads, got 8 and 3"),
    ((8, 0, NoPE()), ValueError, "num_heads must be at least 1, got 0"),
    ((0, 1, NoPE()), ValueError, "d_model must be at least 1, got 0"),
    ((8.0, 2, NoPE()), TypeError, "d_model must be an int, got 8.0 of type float"),
    ((8, 2, NoPE), TypeError, "got the class PositionMethod: call it"),
    ((8, 2, "rope"), TypeError, "method must be a PositionMethod .*, got str"),
])
def test_bad_layers_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        SelfAttention(*arguments)


@pytest.mark.parametrize("x, keywords, error, message", [
    (torch.zeros(2, 5, 6), {}, ValueError, r"x must have shape \(batch, length, 8\), got \(2, 5, 6\)"),
    (torch.zeros(5, 8), {}, ValueError, r"x must have shape \(batch, length, 8\), got \(5, 8\)"),
    (torch.zeros(2, 5, 8, dtype=torch.int64), {}, TypeError, "x must be a real floating-point tensor, got torch.int64"),
    (torch.zeros(2, 5, 8), {"positions": 5}, TypeError, r"an integer tensor, got the int 5; write torch.arange\(5\)"),
    (torch.zeros(2, 5, 8), {"positions": torch.arange(5.0)}, TypeError, "must be integers, got dtype torch.float32"),
    (torch.zeros(2, 5, 8), {"positions": FIVE[:4]}, ValueError, r"must have shape \(5,\) or \(2, 5\), got \(4,\)"),
    (torch.zeros(2, 5, 8), {"mask": torch.ones(5, 5).bool()}, ValueError, "mask must have four dimensions"),
])
def test_bad_input_of_a_layer_is_named(x, keywords, error, message):
    with pytest.raises(error, match=message):
        SelfAttention(8, 2, NoPE())(x, **keywords)


@pytest.mark.parametrize("method, lengths", [(NoPE(), [(5, 5), (3, 5)]), (Table(2, stretch=0.3), [(3, 5), (4, 7)]),
                                             (Compose(Sinusoidal(4), OpenDoors()), [])])
def test_attend_compiles_to_one_graph_for_all_lengths(method, lengths):
    torch.compiler.reset()
    compiled = torch.compile(Caller(method), fullgraph=True, backend="eager", dynamic=True)
    for q_len, k_len in lengths:
        q, k, v = qkv(q_len=q_len, k_len=k_len)
        torch.testing.assert_close(compiled(q, k, v), Caller(method)(q, k, v))
    arguments = (*qkv(q_len=4), torch.rand(2, 1, 4, 5) < 0.7, torch.tensor([4, 0, 2, 3]))
    torch.testing.assert_close(compiled(*arguments), Caller(method)(*arguments))


def test_a_layer_with_sinusoidal_compiles_with_its_gradients():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = SelfAttention(8, 2, Compose(Sinusoidal(8), Table(2)))

        def forward(self, x):
            return self.layer(self.layer.method.embed(x, x.shape[1]), causal=True)

    torch.compiler.reset()
    model, x = Model(), torch.randn(2, 5, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    found = torch.autograd.grad(compiled(x).square().sum(), list(model.parameters()))
    torch.testing.assert_close(compiled(x), model(x))
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("check, old, new", [
    # the causal rule: turned round, strict, by index, forgotten
    (check_decoding, "k_positions[..., None, :] <= q", "k_positions[..., None, :] >= q"),
    (check_decoding, "k_positions[..., None, :] <= q", "k_positions[..., None, :] < q"),
    (check_shuffled_positions, "plain = by_default and", "plain ="),
    (check_against_plain_loops, "if causal and not is_causal:", "if causal and False:"),
    (check_decoding, "if causal and plain and q_len == k_len", "if causal and plain"),
    (check_decoding, "if by_default and q_len == 1:", "if by_default:"),
    (check_against_plain_loops, "if by_default and q_len == 1:", "if q_len >= 1:"),
    (check_decoding, "if by_default and q_len == 1:", "if q_len == 1:"),
    (check_left_padding, "else seen[:, None]", "else seen[:1, None]"),
    # the default positions: the first queries instead of the last
    (check_decoding, "return k_positions[..., k_len - q_len:], k", "return k_positions[..., :q_len], k"),
    (check_decoding, "return k_positions[..., k_len - q_len:], k", "return torch.arange(q_len), k"),
    # the mask: ignored, turned round, added to the causal rule instead of combined
    (check_masked_keys_have_no_influence, "allowed = _checked_mask(mask,", "allowed = _checked_mask(None,"),
    (check_against_plain_loops, "else allowed & seen", "else allowed | seen"),
    (check_against_plain_loops, "else allowed & seen", "else seen"),
    (check_masked_keys_have_no_influence, "logits.masked_fill(~attended", "logits.masked_fill(attended"),
    (check_masked_keys_have_no_influence, "else bias.masked_fill(~attended, -torch.inf)", "else bias"),
    (check_masked_keys_have_no_influence, "else bias.masked_fill(~attended, -torch.inf)",
     "else bias.masked_fill(~attended, -9.0)"),
    # rows that see nothing: not erased
    (check_rows_that_see_nothing, "return out if blind is None else out.masked_fill(blind, 0)", "return out"),
    (check_rows_that_see_nothing, "weights = weights.masked_fill(blind, 0)", "pass"),
    (check_rows_that_see_nothing, "if allowed is not None and not (by_default and mask is None):",
     "if mask is not None:"),
    # scale, bias, rotation and the open doors: dropped
    (check_against_plain_loops, ", scale=method.scale)", ")"),
    (check_against_plain_loops, "bias = bias.to(q.dtype).expand(", "bias = 0 * bias.to(q.dtype).expand("),
    (check_against_plain_loops, "logits = logits + bias.to(logits.dtype)", "pass"),
    (check_gradients, "bias = bias.to(q.dtype).expand(", "bias = bias.detach().to(q.dtype).expand("),
    (check_against_plain_loops, "q, k = method.rotate(q, k, q_positions, k_positions)", "pass"),
    (check_decoding, "method.rotate(q, k, q_positions, k_positions)",
     "method.rotate(q, k, k_positions[..., :q_len], k_positions)"),
    (check_against_plain_loops, "method.bias(q_positions, k_positions)", "method.bias(q_positions * 0, k_positions)"),
    (check_doors_four_and_five, ' or method.opens("logits") or method.opens("values")', ""),
    (check_doors_four_and_five, 'or method.opens("logits")', 'or False'),
    (check_doors_four_and_five, 'or method.opens("values")', 'or False'),
    (check_doors_four_and_five, "k_positions, allowed)", "k_positions, None)"),
    (check_doors_four_and_five, "k_positions, allowed)", "k_positions, mask)"),
    (check_doors_four_and_five, "out = method.values(weights, v, q_positions, k_positions)", "out = weights @ v"),
    # softmax over queries
    (check_weights, "torch.softmax(logits, dim=-1", "torch.softmax(logits, dim=-2"),
    (check_fused_is_used, "explicit = return_weights", "explicit = bias is not None or return_weights"),
    (check_fused_is_used, "explicit = return_weights", "explicit = not method.scale"),
    (check_fused_is_used, "if causal and not is_causal:", "if causal:"),
    (check_fused_is_used, " and bias is None and allowed is None", " and bias is None"),
    (check_shuffled_positions, "q_positions is None and k_positions is None\n", "q_positions is None\n"),
])
def test_the_checks_see_a_wrong_attend(mutant, golden, monkeypatch, check, old, new):
    wrong = mutant("attention", old, new).attend
    extra = {check_left_padding: (golden,), check_fused_is_used: (monkeypatch,)}.get(check, ())
    with pytest.raises(AssertionError):
        check(wrong, *extra)


@pytest.mark.parametrize("old, new", [
    ("out.transpose(1, 2).flatten(2)", "out.transpose(1, 2).flip(2).flatten(2)"),
    ("unflatten(-1, (self.num_heads, -1)).transpose(1, 2)", "unflatten(-1, (-1, self.num_heads)).permute(0, 3, 1, 2)"),
    ("(self.q_projection, self.k_projection,", "(self.k_projection, self.q_projection,"),
    ("q_positions=positions, k_positions=positions, causal", "causal"),
    ("q_positions=positions, k_positions=positions, causal", "q_positions=positions, causal"),
    ("causal=causal, mask=mask)", "mask=mask)"), ("causal=causal, mask=mask)", "causal=causal)"),
    ("return self.out_projection(", "return ("),
])
def test_the_checks_see_a_wrong_layer(mutant, old, new):
    with pytest.raises(AssertionError):
        check_self_attention(mutant("attention", old, new).SelfAttention)
