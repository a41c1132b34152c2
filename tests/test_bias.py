"""Door 3: T5Bias, ALiBi and TUPE against their equations in loops, stored values and the published code."""
import pytest
import torch

from posenc_lib import TUPE, ALiBi, Compose, T5Bias, attend, bias, t5_bucket
from tests.plain_attention import (
    D_MODEL,
    HEAD_DIM,
    HEADS,
    Equation,
    IgnoresKeyPositions,
    IgnoresQueryPositions,
    attend_ignoring_causality,
    attend_ignoring_the_mask,
    check,
    check_compiled,
    check_state,
    randomized,
)

T5_BUCKETS = dict(num_buckets=8, max_distance=20)


class T5Equation(Equation):
    """Raffel et al. 2020: q . k plus the number of the offset's bucket; mesh tensorflow leaves the scale out."""

    def __init__(self, table, bidirectional, scale):
        self.table, self.bidirectional, self.scale = table, bidirectional, scale

    def logit(self, h, q, k, i, j):
        bucket = int(t5_bucket([j - i], bidirectional=self.bidirectional, **T5_BUCKETS))
        return q @ k * self.scale + self.table[bucket, h]


class ALiBiEquation(Equation):
    """Press et al. 2022: minus slope times distance; keys after the query get nothing in the causal form."""

    def __init__(self, bidirectional):
        self.bidirectional = bidirectional

    def logit(self, h, q, k, i, j):
        distance = abs(i - j) if self.bidirectional else max(i - j, 0)
        return super().logit(h, q, k, i, j) - [1 / 16, 1 / 256][h] * distance


class TUPEEquation(Equation):
    """Ke et al. 2021: (q . k + p_i U_Q . p_j U_K) / sqrt(2 d), and [CLS] reset to two numbers a head."""

    def __init__(self, method):
        self.method = method

    def logit(self, h, q, k, i, j):
        m = self.method
        columns = slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)
        position = (m.query_projection.weight @ m.table[i])[columns] @ (m.key_projection.weight @ m.table[j])[columns]
        position = position / (2 * HEAD_DIM) ** 0.5
        if m.reset_cls:
            position = m.cls_to_others[h] if i == 0 else m.others_to_cls[h] if j == 0 else position
        return q @ k / (2 * HEAD_DIM) ** 0.5 + position


def t5(library, bidirectional=True, scale=None):
    method = randomized(library.T5Bias(HEADS, bidirectional=bidirectional, scale=scale, **T5_BUCKETS))
    return method, T5Equation(method.table, bidirectional, HEAD_DIM ** -0.5 if scale is None else scale)


def alibi(library, bidirectional=False):
    return library.ALiBi(HEADS, bidirectional), ALiBiEquation(bidirectional)


def tupe(library, reset_cls=True):
    method = randomized(library.TUPE(D_MODEL, HEADS, 40, reset_cls))
    return method, TUPEEquation(method)


CASES = {
    "T5, both ways": t5, "T5, causal": lambda library: t5(library, False),
    "T5, unscaled as published": lambda library: t5(library, scale=1.0),
    "ALiBi": alibi, "ALiBi, symmetric": lambda library: alibi(library, True),
    "TUPE": tupe, "TUPE, no reset": lambda library: tupe(library, False),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_its_equation(case):
    check(*CASES[case](bias))


@pytest.mark.parametrize("case", CASES)
def test_the_check_sees_forgotten_positions_and_masks(case):
    method, equation = CASES[case](bias)
    for wrong in (IgnoresKeyPositions(method), IgnoresQueryPositions(method)):
        with pytest.raises(AssertionError):
            check(wrong, equation)
    for wrong in (attend_ignoring_the_mask, attend_ignoring_causality):
        with pytest.raises(AssertionError):
            check(method, equation, attend=wrong)


@pytest.mark.parametrize("case, old, new", [
    ("T5, both ways", "by_head[:, t5_bucket(offsets", "by_head[:, t5_bucket(-offsets"),
    ("T5, both ways", "by_head[:, t5_bucket(offsets", "0 * by_head[:, t5_bucket(offsets"),
    ("T5, both ways", ".flip(-2)", ""),
    ("T5, both ways", "torch.arange(start, stop", "torch.arange(start + 1, stop + 1"),
    ("T5, both ways", "biases.movedim(1, 0)", "biases.movedim(1, 0).flip(0)"),
    ("T5, unscaled as published", 'else _checks.positive_number(scale, "scale")', "else None"),
    ("ALiBi", "slopes.view(-1, *[1] * offsets.dim()) * nearness", "slopes.view(-1, *[1] * offsets.dim()) * -nearness"),
    ("ALiBi", "offsets.clamp(max=0)", "-offsets.abs()"),
    ("ALiBi", "offsets.clamp(max=0)", "offsets"),
    ("ALiBi, symmetric", "-offsets.abs()", "offsets.clamp(max=0)"),
    ("TUPE", "q = q * self.scale", "q = q * -self.scale"),
    ("TUPE", "(2 * d_model // num_heads)", "(d_model // num_heads)"),
    ("TUPE", "return q @ k.transpose", "return 0 * q @ k.transpose"),
    ("TUPE", "self._project(self.key_projection, k_positions)", "self._project(self.query_projection, k_positions)"),
    ("TUPE", "q.masked_fill(q_is_cls, 0)", "q"), ("TUPE", "k.masked_fill(k_is_cls, 0)", "k"),
    ("TUPE", "~q_is_cls * one", "one.expand(*q.shape[:-1], 1)"),
    ("TUPE, no reset", "unflatten(-1, (self.num_heads, -1))", "unflatten(-1, (-1, self.num_heads)).transpose(-2, -1)"),
])
def test_the_check_sees_a_wrong_method(mutant, case, old, new):
    method, equation = CASES[case](mutant("bias", old, new))
    with pytest.raises(AssertionError):
        check(method, equation)


@pytest.mark.parametrize("case", CASES)
def test_state(case):
    method = check_state(CASES[case](bias)[0])
    positions = torch.arange(30, 36)
    before = method.bias(positions, positions)
    with torch.autocast("cpu", torch.bfloat16):
        if "TUPE" not in case:                                           # TUPE's is a product, and follows autocast
            assert torch.equal(method.bias(positions, positions), before)
    half = method.to(torch.bfloat16).bias(positions, positions)
    if "T5" in case:
        assert torch.equal(half, before.to(torch.bfloat16))              # the same buckets
    if "ALiBi" in case:
        assert torch.equal(half, before) and not method.state_dict()


@pytest.mark.parametrize("case", ["T5, both ways", "ALiBi", "TUPE"])
def test_compiles(case):
    check_compiled(CASES[case](bias)[0])


@pytest.mark.parametrize("case", CASES)
def test_shapes_and_the_two_ways_of_building(case):
    """Consecutive positions take the windows, one batched row takes the general way: the same numbers."""
    method, _ = CASES[case](bias)
    q_positions, k_positions = torch.arange(5, 9), torch.arange(2, 12)
    fast = method.bias(q_positions, k_positions)
    assert fast.shape == (HEADS, 4, 10)
    general = method.bias(q_positions[None], k_positions)
    assert general.shape == (1, HEADS, 4, 10)
    torch.testing.assert_close(general[0], fast, rtol=0, atol=0 if "TUPE" not in case else 1e-12)
    one = method.bias(q_positions[1:2].int(), k_positions.int())
    torch.testing.assert_close(one, fast[:, 1:2], rtol=0, atol=0 if "TUPE" not in case else 1e-12)
    assert method.bias(q_positions[:0], k_positions).shape == (HEADS, 0, 10)
    assert method.bias(q_positions, k_positions[:0]).shape == (HEADS, 4, 0)


def test_gradients_of_both_ways_agree():
    method, _ = t5(bias)
    q_positions, k_positions = torch.arange(5, 25), torch.arange(2, 12)
    upstream = torch.randn(HEADS, 20, 10, dtype=torch.float64)
    fast, = torch.autograd.grad(method.bias(q_positions, k_positions), method.table, upstream)
    general, = torch.autograd.grad(method.bias(q_positions[None], k_positions), method.table, upstream[None])
    torch.testing.assert_close(fast, general)


def test_alibi_of_any_number_of_heads():
    """12 heads have slopes that are no binary fractions: float32 with two roundings."""
    offsets = torch.arange(1000)[None] - torch.arange(1000)[:, None]
    powers = [2.0 ** -e for e in range(1, 9)] + [2.0 ** -(e / 2) for e in range(1, 9, 2)]
    exact = torch.tensor(powers, dtype=torch.float64)[:, None, None] * offsets.clamp(max=0)
    ours = ALiBi(12).bias(torch.arange(1000), torch.arange(1000))
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours.double(), exact, rtol=1.2e-7, atol=0)


def test_alibi_attends_like_bloom():
    """BLOOM adds + slope j, one row a head: under a causal mask the weights are the same."""
    bloom = pytest.importorskip("transformers.models.bloom.modeling_bloom")
    q, k, v = torch.randn(3, 1, 12, 7, HEAD_DIM)
    row = bloom.build_alibi_tensor(torch.ones(1, 7), 12, torch.float32)                # (heads, 1, 7)
    causal = torch.ones(7, 7).tril().log()
    theirs = (q @ k.transpose(-2, -1) / HEAD_DIM ** 0.5 + row + causal).softmax(-1)
    torch.testing.assert_close(attend(q, k, v, ALiBi(12), causal=True, return_weights=True)[1], theirs)


@pytest.mark.parametrize("decoder", [False, True])
def test_t5_attends_like_transformers(decoder):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = t5.T5Config(d_model=24, d_kv=6, num_heads=4, relative_attention_num_buckets=16,
                         relative_attention_max_distance=40, is_decoder=decoder, dropout_rate=0.0)
    theirs = t5.T5Attention(config, has_relative_attention_bias=True).eval()
    torch.nn.init.normal_(theirs.relative_attention_bias.weight)
    ours = T5Bias(4, 16, 40, bidirectional=not decoder, scale=1.0)
    ours.load_state_dict({"table": theirs.relative_attention_bias.weight})
    positions = torch.arange(90)
    torch.testing.assert_close(ours.bias(positions, positions), theirs.compute_bias(90, 90)[0], rtol=0, atol=0)
    x = torch.randn(2, 90, 24)
    q, k, v = (projection(x).view(2, 90, 4, 6).transpose(1, 2) for projection in (theirs.q, theirs.k, theirs.v))
    out = theirs.o(attend(q, k, v, ours).transpose(1, 2).flatten(2))
    torch.testing.assert_close(out, theirs(x)[0], rtol=1e-4, atol=1e-5)


def test_tupe_matches_the_stored_values(golden):
    case = golden["tupe"]["untied_abs_1head_d4"]
    given, expected = case["inputs"], case["expected"]
    for reset, key in ((False, "bias"), (True, "bias_reset_cls")):
        method = TUPE(4, 1, 3, reset_cls=reset).double()
        state = {"table": given["P"], "query_projection.weight": list(zip(*given["UQ"])),      # the file writes p U,
                 "key_projection.weight": list(zip(*given["UK"]))}                             # Linear computes p W^T
        if reset:
            state["cls_to_others"] = [given["theta1_cls_to_others"]]
            state["others_to_cls"] = [given["theta2_others_to_cls"]]
        method.load_state_dict({name: torch.tensor(value, dtype=torch.float64) for name, value in state.items()})
        ours = method.bias(torch.arange(3), torch.arange(3))[0]
        torch.testing.assert_close(ours, torch.tensor(expected[key], dtype=torch.float64), rtol=0, atol=1e-15)


def test_methods_compose():
    """TUPE owns the scale, T5 adds its bias."""
    absolute, relative = randomized(TUPE(D_MODEL, HEADS, 9)), randomized(T5Bias(HEADS))
    positions = torch.arange(9)
    both = Compose(absolute, relative)
    assert both.scale == (2 * HEAD_DIM) ** -0.5
    torch.testing.assert_close(both.bias(positions, positions),
                               absolute.bias(positions, positions) + relative.bias(positions, positions))


def wrong_table(method):
    method.table = torch.nn.Parameter(torch.randn(5, 3))
    return method.bias(torch.arange(4), torch.arange(4))


QKV = torch.zeros(3, 1, 2, 5, HEAD_DIM)


@pytest.mark.parametrize("call, error, message", [
    (lambda: T5Bias(0), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: T5Bias(2, 33), ValueError, "num_buckets must be even: .* got 33"),
    (lambda: T5Bias(2, 1), ValueError, "num_buckets must be at least 2, got 1"),
    (lambda: T5Bias(2, 32, 8), ValueError, "max_distance must be greater than 8, .* got 8"),
    (lambda: T5Bias(2, scale=0.0), ValueError, "scale must be a finite number greater than 0, got 0.0"),
    (lambda: wrong_table(T5Bias(2)), ValueError, r"the table must have shape \(32, 2\), got \(5, 3\)"),
    (lambda: attend(*QKV, T5Bias(3)), ValueError, r"bias must have shape \(2, 5, 5\) .* got \(3, 5, 5\)"),
    (lambda: ALiBi(0), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: ALiBi(2).bias(torch.ones(3), torch.arange(3)), TypeError, "q_positions must be integers"),
    (lambda: ALiBi(2).bias(torch.arange(3), torch.arange(3) - 1), ValueError, "positions must not be negative"),
    (lambda: attend(*QKV, ALiBi(3)), ValueError, r"bias must have shape \(2, 5, 5\) .* got \(3, 5, 5\)"),
    (lambda: TUPE(8, 0, 4), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: TUPE(8, 3, 4), ValueError, "d_model must be divisible by num_heads, got 8 and 3"),
    (lambda: TUPE(8, 2, 0), ValueError, "max_len must be at least 1, got 0"),
    (lambda: attend(*QKV, TUPE(8, 2, 4)), ValueError, "the table has max_len = 4 rows, got position 4"),
    (lambda: wrong_table(TUPE(8, 2, 4)), ValueError, r"the table must have shape \(4, 8\), got \(5, 3\)"),
    (lambda: attend(*QKV, TUPE(8, 4, 9)), ValueError, r"bias must have shape \(2, 5, 5\) .* got \(4, 5, 5\)"),
])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
