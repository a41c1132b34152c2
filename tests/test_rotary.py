"""Rotation of queries and keys: against exact arithmetic, by its identities, and through attention."""
import copy
import math
import pickle

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from posenc_lib import (
    AxialRotary,
    DynamicNTK,
    LinearScaling,
    Llama3,
    NTKAware,
    Rotary,
    SelfAttention,
    YaRN,
    attend,
    complex_encoding,
    frequencies,
    rotary,
    rotate,
    shift_matrix,
)

LAYOUTS = ["interleaved", "half"]
RULES = [None, LinearScaling(4), NTKAware(4), DynamicNTK(4, 8), YaRN(4, 2048), Llama3(8, 8192)]
HALF_TYPES = [torch.bfloat16, torch.float16]
P5 = torch.arange(5)


def qk(batch=2, heads=3, q_len=5, k_len=7, head_dim=8, dtype=torch.float64):
    return tuple(torch.randn(batch, heads, length, head_dim, dtype=dtype) for length in (q_len, k_len))


def check_golden(rotary, golden):
    case = golden["rope"]["rotate_d6"]
    x = torch.tensor(case["inputs"]["x"], dtype=torch.float64).expand(5, 6)
    positions = torch.tensor(case["inputs"]["positions"])
    for layout, key in (("interleaved", "interleaved"), ("half", "half_split")):
        expected = torch.tensor(case["expected"][key], dtype=torch.float64)
        torch.testing.assert_close(rotary.rotate(x, positions, layout=layout), expected, rtol=0, atol=1e-9)
        both = rotary.Rotary(6, layout=layout).rotate(x[None, None], x[None, None], positions, positions)
        torch.testing.assert_close(both, (expected[None, None],) * 2, rtol=0, atol=1e-9)
    case = golden["rope"]["partial_rotary_dim4_of_6"]
    for layout, key in (("interleaved", "interleaved"), ("half", "half_split")):
        out = rotary.rotate(x[:1], torch.tensor(case["inputs"]["positions"]), rotary_dim=4, layout=layout)
        torch.testing.assert_close(out, torch.tensor(case["expected"][key], dtype=torch.float64), rtol=0, atol=1e-12)
        assert torch.equal(out[:, 4:], x[:1, 4:])


def test_golden_values(golden):
    check_golden(rotary, golden)


def test_layouts_differ_by_the_published_permutation(golden):
    case = golden["rope"]["layout_permutation"]["expected"]
    index = case["interleaved_to_half_index"]
    x = torch.randn(4, 6, dtype=torch.float64)
    there = rotate(x[:, index], 4, layout="half")
    torch.testing.assert_close(there, rotate(x, 4)[:, index])
    torch.testing.assert_close(there[:, case["half_to_interleaved_index"]], rotate(x, 4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("base, dim", [(10000.0, 64), (1.0, 2), (500000.0, 128), (1000000.0, 6)])
def test_float32_rotations_are_exact_to_rounding(layout, base, dim, exact_angle, device):
    """The vector (1, 0) of every pair turns into (cos, sin), each within 6e-8 of 60-digit arithmetic."""
    positions = [0, 1, 2, 44, 710, 2**16, 100000, 10**6, 2**24 - 1]
    one = torch.zeros(len(positions), dim, device=device)
    one.view(-1, *((dim // 2, 2) if layout == "interleaved" else (2, dim // 2))).select(
        -1 if layout == "interleaved" else -2, 0).fill_(1)
    out = rotate(one, torch.tensor(positions, device=device), base, layout=layout).tolist()
    for p, row in zip(positions, out):
        for i in {0, dim // 4, dim // 2 - 1}:
            angle = exact_angle(p, i, dim, base)
            cos, sin = (row[2 * i], row[2 * i + 1]) if layout == "interleaved" else (row[i], row[i + dim // 2])
            assert abs(cos - mpmath.cos(angle)) <= 6e-8 and abs(sin - mpmath.sin(angle)) <= 6e-8, f"{p=} {i=}"


def check_three_forms(rotary):
    """Real form = complex form = block-diagonal matrix; the matrix is the transpose of the encoding's shift matrix."""
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    positions = torch.tensor([0, 1, 2, 30, 31, 5000])
    z = torch.view_as_complex(x.unflatten(-1, (4, 2))) * complex_encoding(positions, 8)
    by_matrix = torch.stack([x[:, n] @ shift_matrix(int(p), 8) for n, p in enumerate(positions)], dim=1)
    out = rotary.rotate(x, positions)
    torch.testing.assert_close(out, torch.view_as_real(z).flatten(-2), rtol=0, atol=1e-12)
    torch.testing.assert_close(out, by_matrix, rtol=0, atol=1e-10)
    half = rotary.rotate(x[..., [0, 2, 4, 6, 1, 3, 5, 7]], positions, layout="half")
    torch.testing.assert_close(half, out[..., [0, 2, 4, 6, 1, 3, 5, 7]], rtol=0, atol=1e-12)


def test_three_forms_are_equal():
    check_three_forms(rotary)


def test_counter_clockwise():
    turned = rotate(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    torch.testing.assert_close(turned, torch.tensor([[0.5403023, 0.8414710]]))


def check_relative(rotary, layout="interleaved", rotary_dim=None, scaling=None):
    """On a 100 x 100 grid of positions the score is a function of j - i, and lengths are kept."""
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    method = rotary.Rotary(8, layout=layout, rotary_dim=rotary_dim, scaling=scaling)
    positions = torch.arange(100)
    turned_q, turned_k = method.rotate(*(t.expand(1, 1, 100, 8) for t in (q, k)), positions, positions)
    scores = (turned_q @ turned_k.transpose(-2, -1))[0, 0]
    for offset in range(-99, 100):
        diagonal = scores.diagonal(offset)
        assert (diagonal - diagonal[0]).abs().max() < 1e-12, f"offset {offset}"
    assert (scores[0] - scores[0, 0]).abs().max() > 0.1, "the position has no influence"
    assert (scores - scores.T).abs().max() > 0.1, "the direction has no influence"
    if scaling is None or scaling.attention_factor == 1:
        torch.testing.assert_close(turned_q.norm(dim=-1), q.norm().expand(1, 1, 100))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("scaling", RULES, ids=lambda rule: type(rule).__name__)
def test_scores_depend_on_the_offset_alone_and_norms_are_kept(layout, rotary_dim, scaling):
    check_relative(rotary, layout, rotary_dim, scaling)


@given(i=st.integers(0, 2**20), j=st.integers(0, 2**20), shift=st.integers(0, 2**20), layout=st.sampled_from(LAYOUTS),
       pairs=st.integers(1, 16), base=st.floats(1, 1e6))
def test_shifting_both_positions_changes_no_score(i, j, shift, layout, pairs, base):
    q, k = torch.randn(2, 1, 2 * pairs, dtype=torch.float64)

    def score(i, j):
        turned = (rotate(t, torch.tensor([p]), base, layout=layout) for t, p in ((q, i), (k, j)))
        return float(torch.linalg.vecdot(*turned))
    assert abs(score(i, j) - score(i + shift, j + shift)) < 1e-7


CHANGES = [                                          # what goes wrong, piece of source, its replacement, what notices
    ("sign", "* table[0]).flatten", "* table[0].conj()).flatten", "golden"),
    ("sign, half", "value=sign", "value=-sign", "golden"),
    ("layout", "form = layout if", 'form = "half" if', "golden"),
    ("adjacent frequencies in the half layout", "torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)",
     "tuple(t.repeat_interleave(2, -1) for t in (cos, sin))", "relative, half"),
    ("frequencies from dim", "_curve(scaling, rotary_dim,", "_curve(scaling, x.shape[-1],", "golden"),
    ("frequencies from head_dim", "(self.scaling, self.rotary_dim, self.base, k_",
     "(self.scaling, self.head_dim, self.base, k_", "methods"),
    ("positions ignored", "theta = angles(positions,", "theta = angles(0 * positions,", "relative"),
    ("k at q's positions", "_turned(k, k_positions, c", "_turned(k, q_positions[..., :1].expand(2, 7), c", "methods"),
    ("attention factor lost", "cast(cos * factor, dtype), cast(sin * factor, dtype)",
     "cast(cos, dtype), cast(sin, dtype)", "factor"),
    ("attention factor on cos only", "cast(sin * factor,", "cast(sin,", "factor"),
    ("table of other positions", "_same(known_positions, positions)", "known_positions.shape == positions.shape",
     "tables"),
    ("table of changed positions", "(settings, positions.clone(),", "(settings, positions,", "tables"),
    ("table of other frequencies", "_same(known_frequency, frequency)", "True", "tables"),
    ("table of another factor", "(dtype, form, *curve)", "(dtype, form, *curve[:2], curve[3])", "tables"),
    ("length of the batch", "length = positions.amax(dim=-1) + 1", "length = positions.amax() + 1", "rows"),
    ("length of the row", "length = positions.amax(dim=-1) + 1", "length = torch.tensor(positions.shape[-1])", "rows"),
]


@pytest.mark.parametrize("old, new, check", [change[1:] for change in CHANGES], ids=[what for what, *_ in CHANGES])
def test_mutants_are_caught(old, new, check, mutant, golden):
    checks = {"golden": lambda module: check_golden(module, golden), "relative": check_relative,
              "relative, half": lambda module: check_relative(module, "half"),
              "methods": check_methods_rotate_like_the_function, "factor": check_attention_factor,
              "tables": check_tables_are_never_stale, "rows": check_each_row_has_its_own_length}
    with pytest.raises(AssertionError):
        checks[check](mutant("rotary", old, new))


def check_methods_rotate_like_the_function(rotary):
    q, k = qk()
    q_positions, k_positions = torch.tensor([[9, 3, 4, 0, 70], [1, 1, 2, 3, 5]]), torch.arange(7)
    for layout in LAYOUTS:
        for rotary_dim in (None, 4):
            method = rotary.Rotary(8, 500.0, layout=layout, rotary_dim=rotary_dim)
            out = method.rotate(q, k, q_positions, k_positions)
            for x, positions, turned in ((q, q_positions, out[0]), (k, k_positions.expand(2, 7), out[1])):
                for row in range(2):
                    expected = rotate(x[row], positions[row], 500.0, rotary_dim=rotary_dim, layout=layout)
                    torch.testing.assert_close(turned[row], expected)


def test_methods_rotate_like_the_function():
    check_methods_rotate_like_the_function(rotary)


def test_frequencies_follow_from_the_rotary_dim():
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(rotate(torch.cat((x, x), dim=-1), 3, rotary_dim=4), torch.cat((rotate(x, 3), x), dim=-1))


def check_attention_factor(rotary):
    q, k = qk(q_len=7)
    positions = torch.arange(7)
    for layout in LAYOUTS:
        without = YaRN(4, 64, attention_factor=1)
        plain = rotary.Rotary(8, layout=layout, scaling=without).rotate(q, k, positions, positions)
        for rule, factor in ((YaRN(4, 64), 0.1 * math.log(4) + 1), (YaRN(4, 64, attention_factor=3), 3)):
            turned = rotary.Rotary(8, layout=layout, scaling=rule).rotate(q, k, positions, positions)
            torch.testing.assert_close(turned, tuple(factor * t for t in plain))
            torch.testing.assert_close(turned[0] @ turned[1].mT, factor**2 * (plain[0] @ plain[1].mT))
    partly = rotary.Rotary(8, rotary_dim=4, scaling=YaRN(4, 64)).rotate(q, k, positions, positions)
    assert torch.equal(partly[0][..., 4:], q[..., 4:])


def test_yarns_attention_factor_scales_q_and_k_so_logits_carry_its_square():
    check_attention_factor(rotary)


def check_each_row_has_its_own_length(rotary):
    """Dynamic NTK: what a row gets depends neither on its batch mates, nor on what was called before."""
    rule = DynamicNTK(4, 8)
    method = rotary.Rotary(8, scaling=rule)
    q, k = qk(batch=3, q_len=4, k_len=4)
    positions = torch.tensor([[0, 1, 2, 3], [0, 0, 12, 13], [37, 38, 39, 40]])
    together = method.rotate(q, k, positions, positions)
    for row, length in enumerate((4, 14, 41)):
        alone = method.rotate(q[row:row + 1], k[row:row + 1], positions[row], positions[row])
        torch.testing.assert_close((together[0][row], together[1][row]), (alone[0][0], alone[1][0]))
        z = torch.view_as_complex(q[row].unflatten(-1, (4, 2)))
        theta = positions[row][:, None] * rule.frequencies(8, length=length)
        expected = torch.view_as_real(z * torch.polar(torch.ones_like(theta), theta)).flatten(-2)
        torch.testing.assert_close(alone[0][0], expected)
    assert torch.equal(method.rotate(q, k, positions, positions)[0], together[0])
    last = method.rotate(q[:, :, -1:], k, positions[:, -1:], positions)[0]     # the keys set the length, not the query
    first = method.rotate(q[:, :, :1], k, positions[:, :1], positions)[0]
    torch.testing.assert_close((first, last), (together[0][:, :, :1], together[0][:, :, -1:]))


def test_dynamic_ntk_is_a_function_of_each_rows_length():
    check_each_row_has_its_own_length(rotary)


def test_dynamic_ntk_up_to_the_original_length_is_plain():
    q, k = qk(q_len=7)
    positions = torch.arange(7)
    torch.testing.assert_close(Rotary(8, scaling=DynamicNTK(4, 7)).rotate(q, k, positions, positions),
                               Rotary(8).rotate(q, k, positions, positions), rtol=0, atol=0)


METHODS = [Rotary(8, layout=layout, rotary_dim=rotary_dim, scaling=scaling) for layout in LAYOUTS
           for rotary_dim, scaling in ((None, None), (4, YaRN(4, 64)), (None, DynamicNTK(4, 6)))]
METHODS += [AxialRotary(8, (4, 5))]


@pytest.mark.parametrize("method", METHODS, ids=range(len(METHODS)))
class TestThroughAttention:
    def test_decoding_with_a_cache_gives_the_rows_of_the_full_result(self, method):
        q, k, v = torch.randn(3, 2, 3, 9, 8, dtype=torch.float64)
        for length in (1, 4, 9):                     # each step against the full result of that length
            full = attend(q[:, :, :length], k[:, :, :length], v[:, :, :length], method, causal=True)
            step = attend(q[:, :, length - 1:length], k[:, :, :length], v[:, :, :length], method)
            torch.testing.assert_close(step, full[:, :, -1:])

    def test_left_padding_changes_nothing(self, method):
        layer = SelfAttention(24, 3, method).double()
        x = torch.randn(1, 6, 24, dtype=torch.float64)
        padded = torch.cat((torch.randn(1, 3, 24, dtype=torch.float64), x), dim=1)
        positions = torch.tensor([[0, 0, 0, 0, 1, 2, 3, 4, 5]])
        mask = (torch.arange(9) >= 3)[None, None, None]
        out = layer(padded, positions, causal=True, mask=mask)
        torch.testing.assert_close(out[:, 3:], layer(x, causal=True))

    def test_has_no_state_and_survives_copies(self, method):
        assert not method.state_dict() and not list(method.buffers())
        q, k = qk(dtype=torch.float32)
        positions = torch.arange(7)
        expected = method.rotate(q, k, positions[2:], positions)
        copies = copy.deepcopy(method), pickle.loads(pickle.dumps(method)), copy.deepcopy(method).to(torch.bfloat16)
        for twin in copies:
            assert repr(twin) == repr(method)
            torch.testing.assert_close(twin.rotate(q, k, positions[2:], positions), expected, rtol=0, atol=0)

    def test_follows_meta_tensors_and_ignores_a_meta_default_device(self, method):
        q, k = qk(dtype=torch.bfloat16)
        positions = torch.arange(7)
        expected = method.rotate(q, k, positions[2:], positions)
        out = method.rotate(q.to("meta"), k.to("meta"), positions[2:].to("meta"), positions.to("meta"))
        assert [(t.device.type, t.shape, t.dtype) for t in out] == [("meta", t.shape, t.dtype) for t in (q, k)]
        with torch.device("meta"):
            rotary._recent = ()
            again = method.rotate(q, k, positions[2:], positions)
        torch.testing.assert_close(again, expected, rtol=0, atol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [None, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF_TYPES])
def test_the_plain_path_computes_the_same(layout, rotary_dim, dtype, monkeypatch):
    """The path of other devices and of torch.compile, taken here on the CPU."""
    q, k = qk(dtype=dtype)
    method = Rotary(8, layout=layout, rotary_dim=rotary_dim, scaling=YaRN(4, 64))
    positions = torch.randint(0, 10**6, (2, 7))
    fast = method.rotate(q, k, positions[:, 2:], positions)
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    plain = method.rotate(q, k, positions[:, 2:], positions)
    assert all(t.dtype == dtype for t in plain)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    torch.testing.assert_close(fast, plain, rtol=0, atol=tolerance)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_half_types_are_rotated_in_float32_and_rounded_once(layout, dtype, device, monkeypatch):
    monkeypatch.setattr(rotary, "_BLOCK", 1000)      # several blocks, the last one shorter
    x = torch.randn(2, 3, 50, 8, device=device).to(dtype)
    positions = torch.arange(99_950, 100_000, device=device)
    out = rotate(x, positions, layout=layout, rotary_dim=6)
    exact = rotate(x.double().cpu(), positions.cpu(), layout=layout, rotary_dim=6)
    assert out.dtype == dtype and out.device == x.device
    bound = torch.finfo(dtype).eps / 2 * exact.abs() + 1e-6
    assert ((out.double().cpu() - exact).abs() <= bound).all()
    with torch.autocast(device, dtype=torch.bfloat16):
        assert torch.equal(rotate(x, positions, layout=layout, rotary_dim=6), out)


def test_half_precision_positions_would_collapse():
    """What the float64 angles avoid: in bfloat16 positions 256 and 257 are one number, in float16 2048 and 2049."""
    for dtype, position in ((torch.bfloat16, 256), (torch.float16, 2048)):
        pair = torch.tensor([position, position + 1])
        assert pair.to(dtype)[0] == pair.to(dtype)[1]
        turned = rotate(torch.ones(2, 8, dtype=dtype), pair)
        assert (turned[0] - turned[1]).abs().max() > 0.1


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [None, 4])
def test_gradients_of_both_orders(layout, rotary_dim):
    q = torch.randn(1, 2, 3, 6, dtype=torch.float64, requires_grad=True)

    def turn(q):
        return rotate(q, torch.tensor([[5, 0, 70]]), layout=layout, rotary_dim=rotary_dim, scaling=YaRN(2, 16))
    assert torch.autograd.gradcheck(turn, q) and torch.autograd.gradgradcheck(turn, q)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_is_the_rotation_back(layout, dtype, monkeypatch):
    monkeypatch.setattr(rotary, "_BLOCK", 64)
    x = torch.randn(2, 3, 7, 8, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)
    rotate(x, 7, layout=layout).backward(gradient)
    there = rotate(x.grad, 7, layout=layout)
    torch.testing.assert_close(there, gradient, rtol=0, atol=1e-6 if dtype == torch.float32 else 0.04)
    summed, = torch.autograd.grad(rotate(x, 7, layout=layout).sum(), x)        # a gradient without strides of its own
    torch.testing.assert_close(rotate(summed, 7, layout=layout), torch.ones_like(x), rtol=0, atol=0.02)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_works_inside_function_transforms(layout, dtype):
    rotary._recent = ()
    x = torch.randn(4, 2, 3, 5, 8, dtype=dtype)

    def loss(x):
        return rotate(x, P5, layout=layout).float().pow(3).sum()
    gradients = torch.func.vmap(torch.func.grad(loss))(x)
    torch.testing.assert_close(torch.func.vmap(lambda x: rotate(x, P5, layout=layout), in_dims=3, out_dims=3)(
        x.movedim(0, 3)), rotate(x, P5, layout=layout).movedim(0, 3))
    leaf = x.clone().requires_grad_()                # and the table they used is fit for use outside
    torch.testing.assert_close(gradients, torch.autograd.grad(loss(leaf), leaf)[0])


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_forward_mode_derivatives(layout, dtype):
    """The rotation is linear: its derivative in a direction is the direction turned."""
    x, tangent = torch.randn(2, 2, 3, 5, 8).to(dtype)
    expected = rotate(x, P5, layout=layout), rotate(tangent, P5, layout=layout)
    assert all(map(torch.equal, torch.func.jvp(lambda x: rotate(x, P5, layout=layout), (x,), (tangent,)), expected))
    with forward_ad.dual_level():
        out = rotate(forward_ad.make_dual(x, tangent), P5, layout=layout)
        assert all(map(torch.equal, forward_ad.unpack_dual(out), expected))


@pytest.mark.parametrize("start, length", [(0, 256), (7, 1000), (2**24 - 3000, 3000)])
def test_tables_of_consecutive_positions_are_as_exact_as_those_of_any(start, length):
    """They are products of few sines and cosines; with two positions swapped every angle is computed."""
    positions, curve = torch.arange(start, start + length), (64, 10000.0, 1.25, None)
    swapped = torch.cat((positions[1:2], positions[:1], positions[2:]))
    table, = rotary._build_table(positions, curve, torch.float32, "interleaved")
    exact, = rotary._build_table(swapped, curve, torch.float64, "interleaved")
    assert (table[2:] - exact[2:]).abs().max() < 1.25 * 2**-24 * 2**0.5 + 1e-8


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_through_checkpointing(layout, dtype):
    x = torch.randn(2, 3, 5, 8, dtype=dtype, requires_grad=True)

    def loss(x):
        return rotate(x, P5, layout=layout).float().pow(3).sum()
    again, = torch.autograd.grad(checkpoint(loss, x, use_reentrant=False), x)
    assert torch.equal(again, torch.autograd.grad(loss(x), x)[0])


class LearnedFrequencies:
    attention_factor = 1.0

    def __init__(self, frequency):
        self.frequency = frequency

    def frequencies(self, dim, base, length=None):
        return self.frequency


@pytest.mark.parametrize("layout", LAYOUTS)
def test_frequencies_can_be_learned(layout):
    x = torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True)
    frequency = torch.rand(4, dtype=torch.float64, requires_grad=True)

    def turn(x, frequency):
        return rotate(x, P5, layout=layout, scaling=LearnedFrequencies(frequency))
    assert torch.autograd.gradcheck(turn, (x, frequency))
    for _ in range(2):                               # no table of an earlier call comes back with its graph
        turn(x.detach(), frequency).sum().backward()


def check_tables_are_never_stale(rotary):
    """The same call gives the same answer whatever was called before, and a table is built once for equal positions."""
    q, k = qk(q_len=7, dtype=torch.float32)
    calls = [(rotary.Rotary(8, base, layout=layout, scaling=scaling), start) for layout in LAYOUTS
             for base, scaling in ((1e4, None), (1e4, YaRN(4, 64)), (1e4, YaRN(4, 64, attention_factor=2)), (5e2, None),
                                   (1e4, LinearScaling(2)), (1e4, LinearScaling(3)))
             for start in (0, 3)]

    def answer(method, start):
        return method.rotate(q, k, torch.arange(start, start + 7), torch.arange(7))
    fresh = []
    for call in calls:
        rotary._recent = ()
        fresh.append(answer(*call))
    for call, expected in 2 * list(zip(calls, fresh)):
        assert torch.equal(answer(*call)[0], expected[0]) and torch.equal(answer(*call)[1], expected[1])

    positions, method = torch.arange(7), rotary.Rotary(8)
    method.rotate(q, k, positions, positions)
    positions += 3                                   # changed by the caller afterwards
    torch.testing.assert_close(method.rotate(q, k, positions, torch.arange(7))[0], fresh[1][0], rtol=0, atol=0)
    method.base = 500.0
    torch.testing.assert_close(method.rotate(q, k, positions, torch.arange(7))[0], fresh[7][0], rtol=0, atol=0)


def test_tables_are_never_stale():
    check_tables_are_never_stale(rotary)


def test_tables_are_built_once_for_several_layers(monkeypatch):
    built = []
    original = rotary._build_table
    monkeypatch.setattr(rotary, "_build_table", lambda *arguments: built.append(1) or original(*arguments))
    rotary._recent = ()
    q, k = qk(q_len=7)
    for _ in range(4):                               # four layers, each with its own method and positions
        Rotary(8).rotate(q, k, torch.arange(7), torch.arange(7))
    assert len(built) == 1
    for start in range(10):
        Rotary(8).rotate(q, k, torch.arange(start, start + 7), torch.arange(7))
    assert len(rotary._recent) == rotary._KEPT
    monkeypatch.setattr(rotary, "_LARGEST", 100)
    rotary._recent = ()
    Rotary(8).rotate(q, k, torch.arange(7), torch.arange(7))
    assert rotary._recent == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tables_from_inference_mode_can_be_trained_with(layout):
    rotary._recent = ()
    x = torch.randn(2, 3, 5, 8)
    with torch.inference_mode():
        expected = rotate(x, P5.clone(), layout=layout)
    leaf = x.clone().requires_grad_()
    out = rotate(leaf, P5, layout=layout)
    out.sum().backward()
    assert torch.equal(out, expected) and leaf.grad is not None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_strides_will_do_and_the_input_stays(layout, dtype):
    plain = torch.randn(2, 5, 3, 8).to(dtype)
    flat = torch.randn(1 + 2 * 3 * 5 * 8).to(dtype)
    wide = torch.randn(2, 3, 5, 19).to(dtype)
    for x in (plain.transpose(1, 2), flat[1:].view(2, 3, 5, 8), wide[..., 1:9], wide[..., ::2][..., :8],
              plain[:1, :1].expand(2, 3, 3, 8), plain[:0], plain[:, :, :0]):
        before = x.clone()
        for rotary_dim in (None, 4):
            out = rotate(x, x.shape[-2], layout=layout, rotary_dim=rotary_dim)
            expected = rotate(before.contiguous(), x.shape[-2], layout=layout, rotary_dim=rotary_dim)
            torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)    # rounding differs with the strides
        assert torch.equal(x, before)


def test_shapes_of_the_function():
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64)
    positions = torch.tensor([[4, 0, 1, 2, 3], [9, 9, 9, 0, 1]])
    out = rotate(x, positions)
    for row in range(2):
        torch.testing.assert_close(out[row], rotate(x[row], positions[row]))
        torch.testing.assert_close(out[row, 1], rotate(x[row, 1], positions[row].tolist()))
    torch.testing.assert_close(out[:, 0], rotate(x[:, 0], positions))
    torch.testing.assert_close(rotate(x, 5), rotate(x, P5.to(torch.uint8)))


@pytest.mark.parametrize("method", [Rotary(8), Rotary(8, scaling=DynamicNTK(4, 2)), AxialRotary(8, (2, 3))], ids=str)
def test_lengths_of_zero(method):
    q, k = qk(q_len=5, k_len=0)
    out = method.rotate(q, k, P5, torch.arange(0))
    assert out[0].shape == q.shape and out[1].shape == k.shape


def test_axial_rotary_turns_half_by_row_and_half_by_column():
    height, width = 3, 4
    q, k = qk(q_len=12, k_len=12)
    positions = torch.arange(12)
    turned_q, turned_k = AxialRotary(8, (height, width), 100.0).rotate(q, k, positions, positions)
    for p in range(12):
        row, column = divmod(p, width)
        for x, out in ((q, turned_q), (k, turned_k)):
            expected = torch.cat((rotate(x[:, 0, p:p + 1, :4], torch.tensor([row]), 100.0),
                                  rotate(x[:, 0, p:p + 1, 4:], torch.tensor([column]), 100.0)), dim=-1)
            torch.testing.assert_close(out[:, 0, p:p + 1], expected)
    same_q, same_k = AxialRotary(8, (height, width)).rotate(q[:, :, :1].expand(q.shape), k[:, :, :1].expand(k.shape),
                                                            positions, positions)
    scores = (same_q @ same_k.mT)[0, 0].view(height, width, height, width)
    torch.testing.assert_close(scores[0, 1, 1, 3], scores[1, 0, 2, 2])         # one row down, two columns to the right
    assert not torch.isclose(scores[0, 1, 1, 3], scores[0, 3, 1, 1])


def test_values_are_left_alone():
    v = torch.randn(1, 1, 5, 8)
    q = k = torch.zeros(1, 1, 5, 8)                  # nothing to turn: all weights equal
    torch.testing.assert_close(attend(q, k, v, Rotary(8)), v.mean(dim=2, keepdim=True).expand_as(v))


class Caller(nn.Module):
    """A method's door 2 as a module, for torch.compile."""

    def __init__(self, method):
        super().__init__()
        self.method = method

    def forward(self, *arguments):
        return self.method.rotate(*arguments)


@pytest.mark.parametrize("method", [METHODS[2], METHODS[4], METHODS[6]], ids=["dynamic", "partial yarn", "axial"])
def test_compiles_to_one_graph(method):
    torch.compiler.reset()
    compiled = torch.compile(Caller(method), fullgraph=True, backend="eager")
    positions = torch.tensor([[2, 9, 3, 4, 5, 6, 17], [0, 0, 0, 1, 2, 3, 4]])
    q, k = qk()
    for arguments in ((q, k, positions[:, 2:], positions), (q, k, torch.arange(2, 7), torch.arange(7))):
        torch.testing.assert_close(compiled(*arguments), method.rotate(*arguments))


def test_a_layer_compiles_with_its_gradients():
    torch.compiler.reset()
    layer = SelfAttention(16, 2, Rotary(8, scaling=DynamicNTK(4, 3)))
    x = torch.randn(2, 5, 16, requires_grad=True)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    out, expected = compiled(x, causal=True), layer(x, causal=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out.pow(2).sum(), x), torch.autograd.grad(expected.pow(2).sum(), x))


X = torch.zeros(2, 3, 5, 8)


@pytest.mark.parametrize("call, error, message", [
    (lambda: Rotary(7), ValueError, r"head_dim must be even: the encoding needs \(sin, cos\) pairs, got 7"),
    (lambda: Rotary(0), ValueError, "head_dim must be at least 1, got 0"),
    (lambda: Rotary(8.0), TypeError, "head_dim must be an int, got 8.0"),
    (lambda: Rotary(8, 0), ValueError, "base must be a finite number greater than 0, got 0"),
    (lambda: Rotary(8, float("nan")), ValueError, "base must be a finite number greater than 0, got nan"),
    (lambda: Rotary(8, rotary_dim=10), ValueError, "rotary_dim must be at most the head's 8 dimensions, got 10"),
    (lambda: Rotary(8, rotary_dim=3), ValueError, "rotary_dim must be even"),
    (lambda: Rotary(8, rotary_dim=0), ValueError, "rotary_dim must be at least 1, got 0"),
    (lambda: Rotary(8, layout="neox"), ValueError, "layout must be .*got 'neox'"),
    (lambda: Rotary(8, scaling=4), TypeError, r"scaling must be None or a rule such as LinearScaling\(4\), got 4"),
    (lambda: Rotary(8, scaling=YaRN), TypeError, "scaling must be None or a rule"),
    (lambda: Rotary(2, scaling=NTKAware(2)), ValueError, "needs two pairs, .* got dim=2"),
    (lambda: Rotary(8, 1.0, scaling=YaRN(2, 8)), ValueError, "YaRN needs a base above 1"),
    (lambda: rotate(X[..., :7], 5), ValueError, "x's last dimension must be even"),
    (lambda: rotate(X, 6), ValueError, r"positions must have shape \(5,\) or \(2, 5\), got \(6,\)"),
    (lambda: rotate(X, torch.zeros(3, 5, dtype=torch.int64)), ValueError, r"positions must have shape .*got \(3, 5\)"),
    (lambda: rotate(X, torch.arange(5.0)), TypeError, "positions must be integers, got dtype torch.float32"),
    (lambda: rotate(X, torch.arange(-1, 4)), ValueError, "positions must not be negative, got -1"),
    (lambda: rotate(X, -1), ValueError, r"positions \(a length\) must be at least 0, got -1"),
    (lambda: rotate(X, True), TypeError, "positions must be integers|must be 64-bit integers"),
    (lambda: rotate(X.long(), 5), TypeError, "x must be a real floating-point tensor, got torch.int64"),
    (lambda: rotate(X.to(torch.complex64), 5), TypeError, "x must be a real .* tensor, got torch.complex64"),
    (lambda: rotate([1.0], 1), TypeError, "x must be a real floating-point tensor, got list"),
    (lambda: rotate(X[0, 0, 0], 5), ValueError, r"x must have shape \(..., length, dim\), got \(8,\)"),
    (lambda: rotate(X, 5, layout="pairs"), ValueError, "layout must be"),
    (lambda: rotate(X, 5, -1.0), ValueError, "base must be a finite number greater than 0"),
    (lambda: Rotary(8).rotate(X[..., :6], X, P5, P5), ValueError, r"q must have shape \(batch, heads, length, 8\)"),
    (lambda: Rotary(8).rotate(X, X[0], P5, P5), ValueError, r"k must have shape \(batch, heads, length, 8\)"),
    (lambda: Rotary(8).rotate(X, X.to(torch.complex64), P5, P5), TypeError, "k must be a real floating-point tensor"),
    (lambda: Rotary(8).rotate(X, X, P5.float(), P5), TypeError, "q_positions must be integers"),
    (lambda: Rotary(8).rotate(X, X, P5, P5[:4]), ValueError, r"k_positions must have shape \(5,\) or \(2, 5\)"),
    (lambda: Rotary(8).rotate(X, X, 5, P5), TypeError, r"q_positions must be an integer tensor.*torch.arange\(5\)"),
    (lambda: AxialRotary(6, (2, 2)), ValueError, "head_dim must be divisible by 4: pairs for row and column, got 6"),
    (lambda: AxialRotary(0, (2, 2)), ValueError, "head_dim must be at least 1"),
    (lambda: AxialRotary(8, 4), ValueError, r"grid must be \(height, width\), got 4"),
    (lambda: AxialRotary(8, (2, 0)), ValueError, "width must be at least 1, got 0"),
    (lambda: AxialRotary(8, (2, 2)).rotate(X, X, P5, P5), ValueError, r"positions must be below 2 \* 2 = 4 .*got 4"),
])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_frequencies_of_the_plain_method_are_the_sinusoidal_ones():
    one = torch.tensor([[1.0, 0.0] * 4], dtype=torch.float64)
    turned = rotate(one, torch.tensor([1])).view(4, 2)
    torch.testing.assert_close(torch.atan2(turned[:, 1], turned[:, 0]), frequencies(8))
