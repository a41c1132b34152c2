"""The five doors, NoPE, Sinusoidal at door 1, and Compose."""
import copy
import itertools
import pickle

import pytest
import torch
from torch import nn

from posenc_lib import Compose, NoPE, PositionMethod, Sinusoidal, relative_offsets, sinusoidal_encoding

DOORS = ("embed", "rotate", "bias", "logits", "values")
P3 = torch.arange(3)


class Embed(PositionMethod):
    """x -> 2x + number: two of them in the wrong order give another answer."""

    def __init__(self, number):
        super().__init__()
        self.number = number

    def embed(self, x, positions):
        return 2 * x + self.number


class Rotate(Embed):
    def embed(self, x, positions):
        return x

    def rotate(self, q, k, q_positions, k_positions):
        return 2 * q + self.number, 3 * k - self.number


class Bias(PositionMethod):
    """A bias of offsets; `batch` gives it four dimensions."""

    def __init__(self, heads=2, batch=None):
        super().__init__()
        self.heads, self.batch = heads, batch

    def bias(self, q_positions, k_positions):
        bias = relative_offsets(q_positions, k_positions).float().expand(self.heads, -1, -1)
        return bias if self.batch is None else bias.expand(self.batch, -1, -1, -1)


class Logits(PositionMethod):
    def logits(self, q, k, q_positions, k_positions, mask=None):
        return super().logits(q, k, q_positions, k_positions, mask) + 7


class Values(PositionMethod):
    def values(self, weights, v, q_positions, k_positions):
        return weights @ v + 7


class Scale(PositionMethod):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale


def qk():
    return torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4)


def test_the_base_class_is_nope():
    assert NoPE is PositionMethod
    assert list(NoPE().state_dict()) == list(NoPE().parameters()) == []


def test_nope_leaves_every_door_shut(golden):
    q, k = qk()
    method = NoPE()
    assert method.embed(q, P3) is q
    assert all(a is b for a, b in zip(method.rotate(q, k, P3, P3), (q, k)))
    assert method.bias(P3, P3) is None and method.scale is None
    assert not any(method.opens(door) for door in DOORS)


def check_default_logits(logits, golden):
    oracle = golden["nope"]["identity"]
    q, k = (torch.tensor(oracle["inputs"][name], dtype=torch.float64) for name in "qk")
    for order, name in (([0, 1, 2], "logits"), ([2, 0, 1], "logits_perm_2_0_1")):
        torch.testing.assert_close(logits(q[order], k[order], P3, P3),
                                   torch.tensor(oracle["expected"][name], dtype=torch.float64), rtol=0, atol=1e-15)


def test_default_logits_match_the_oracle(golden):
    check_default_logits(NoPE().logits, golden)
    check_default_logits(Compose().logits, golden)


def check_scale(method):
    q, k = qk()
    for scale in (1.0, 0.25, 0.0):
        method.scale = scale
        torch.testing.assert_close(method.logits(q, k, P3, P3), q @ k.mT * scale)


def test_scale_replaces_the_square_root():
    check_scale(NoPE())


def test_values_are_the_weighted_sum():
    weights, v = torch.tensor([[0.25, 0.75], [1.0, 0.0]]), torch.tensor([[4.0, 0.0], [8.0, 4.0]])
    assert NoPE().values(weights, v, None, None).tolist() == [[7.0, 3.0], [4.0, 0.0]]


@pytest.mark.parametrize("method, opened", [
    (Embed(1), "embed"), (Rotate(1), "embed rotate"), (Bias(), "bias"), (Logits(), "logits"), (Values(), "values"),
    (Scale(1.0), ""), (Sinusoidal(4), "embed"), (Compose(), ""), (Compose(NoPE(), NoPE()), ""),
    (Compose(Sinusoidal(4), Bias()), "embed bias"), (Compose(Compose(Logits()), Bias()), "bias logits"),
])
def test_a_method_says_which_doors_it_opens(method, opened):
    assert [door for door in DOORS if method.opens(door)] == opened.split()


def test_a_subclass_of_compose_opens_its_own_doors_too():
    class Shifted(Compose):
        def values(self, weights, v, q_positions, k_positions):
            return super().values(weights, v, q_positions, k_positions) + 1

    assert Shifted(Bias()).opens("values") and Shifted(Bias()).opens("bias") and not Shifted(Bias()).opens("logits")


def test_sinusoidal_adds_the_encoding():
    x = torch.randn(2, 5, 8)
    for method, base in ((Sinusoidal(8), 10000.0), (Sinusoidal(8, base=50), 50.0)):
        assert torch.equal(method.embed(x, 5), x + sinusoidal_encoding(5, 8, base))
        assert torch.equal(method.embed(x, torch.arange(5) + 9), x + sinusoidal_encoding(torch.arange(5) + 9, 8, base))
        per_row = torch.tensor([[0, 0, 0, 1, 2], [4, 3, 2, 1, 0]], dtype=torch.int32)
        assert torch.equal(method.embed(x, per_row), x + sinusoidal_encoding(per_row, 8, base))
        assert torch.equal(method.embed(x, [4, 3, 2, 1, 0]), x + sinusoidal_encoding(5, 8, base).flip(0))
    assert Sinusoidal(8).embed(x[:, :0], 0).shape == (2, 0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sinusoidal_follows_the_input(dtype, device):
    x = torch.zeros(1, 5, 8, dtype=dtype, device=device)
    out = Sinusoidal(8).embed(x, 5)
    assert out.dtype == dtype and out.device == x.device
    assert torch.equal(out[0].cpu(), sinusoidal_encoding(5, 8, dtype=dtype))


@pytest.mark.parametrize("method", [NoPE(), Sinusoidal(8), Compose(Sinusoidal(8), NoPE())])
def test_a_method_without_weights_has_no_state_and_cannot_go_stale(method):
    """Nothing is stored, so nothing changes with .to(), a meta device, pickling, copying or earlier calls."""
    x = torch.randn(2, 5, 8)
    expected = method.embed(x, 5)
    assert not method.state_dict() and not list(method.parameters()) and not list(method.buffers())
    method.embed(torch.randn(1, 9, 8).half(), torch.arange(9) + 1000)
    for other in (method, copy.deepcopy(method), pickle.loads(pickle.dumps(method)), copy.deepcopy(method).bfloat16(),
                  copy.deepcopy(method).to("meta"), copy.deepcopy(method).double().train(), method.eval()):
        assert torch.equal(other.embed(x, 5), expected)
        assert other.extra_repr() == method.extra_repr()
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        assert torch.equal(method.embed(x, 5), expected)
    method.load_state_dict({}, strict=True)


def test_sinusoidal_built_and_used_under_a_meta_default_device():
    x = torch.randn(1, 3, 8)
    expected = Sinusoidal(8).embed(x, 3)
    with torch.device("meta"):
        method = Sinusoidal(8)
        assert torch.equal(method.embed(x, 3), expected)
        assert torch.equal(method.embed(x, [0, 1, 2]), expected)
        assert method.embed(torch.empty(1, 3, 8), 3).device.type == "meta"
    assert torch.equal(method.embed(x, 3), expected)


def test_gradients_pass_through_sinusoidal_unchanged():
    x = torch.randn(1, 3, 8, requires_grad=True)
    Sinusoidal(8).embed(x, 3).sum().backward()
    assert torch.equal(x.grad, torch.ones(1, 3, 8))


def test_sinusoidal_says_its_parameters():
    assert str(Sinusoidal(8)) == "Sinusoidal(d_model=8, base=10000)"
    assert Sinusoidal(8).scale is None


@pytest.mark.parametrize("x, positions, error, message", [
    (torch.zeros(2, 5, 6), 5, ValueError, r"x must have shape \(batch, length, 8\), got \(2, 5, 6\)"),
    (torch.zeros(5, 8), 5, ValueError, r"x must have shape \(batch, length, 8\), got \(5, 8\)"),
    (torch.zeros(2, 5, 8, dtype=torch.int64), 5, TypeError, "x must be a real floating-point tensor, got torch.int64"),
    (torch.zeros(2, 5, 8, dtype=torch.complex64), 5, TypeError, "x must be a real .* tensor, got torch.complex64"),
    ([[1.0]], 5, TypeError, "x must be a real floating-point tensor, got list"),
    (torch.zeros(2, 5, 8), 4, ValueError, r"positions must have shape \(5,\) or \(2, 5\), got \(4,\)"),
    (torch.zeros(2, 5, 8), torch.arange(6), ValueError, r"positions must have shape \(5,\) or \(2, 5\), got \(6,\)"),
    (torch.zeros(2, 5, 8), torch.zeros(1, 5, dtype=torch.int64), ValueError, r"must have shape .*, got \(1, 5\)"),
    (torch.zeros(2, 5, 8), torch.zeros(5, 2, dtype=torch.int64), ValueError, r"must have shape .*, got \(5, 2\)"),
    (torch.zeros(2, 5, 8), torch.tensor(5), ValueError, r"must have shape .*, got \(\)"),
    (torch.zeros(2, 5, 8), torch.arange(5.0), TypeError, "positions must be integers, got dtype torch.float32"),
    (torch.zeros(2, 5, 8), torch.arange(5) - 1, ValueError, "positions must not be negative, got -1"),
    (torch.zeros(2, 5, 8), -1, ValueError, r"positions \(a length\) must be at least 0, got -1"),
    (torch.zeros(2, 5, 8), True, TypeError, "positions must be integers, got dtype torch.bool"),
    (torch.zeros(2, 5, 8), None, TypeError, "positions must be 64-bit integers .*, got None"),
])
def test_bad_input_of_sinusoidal_is_named(x, positions, error, message):
    with pytest.raises(error, match=message):
        Sinusoidal(8).embed(x, positions)


@pytest.mark.parametrize("arguments, error, message", [
    ((7,), ValueError, r"d_model must be even: the encoding needs \(sin, cos\) pairs, got 7"),
    ((8, 0.0), ValueError, "base must be a finite number greater than 0, got 0.0"),
    ((8.0,), TypeError, "d_model must be an int, got 8.0"),
    ((8, "x"), TypeError, "base must be a real number, got 'x'"),
])
def test_bad_parameters_of_sinusoidal_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        Sinusoidal(*arguments)


def check_compose(Compose):
    x, (q, k) = torch.randn(1, 3, 4), qk()
    same = torch.testing.assert_close
    same(Compose(Embed(1), Embed(10)).embed(x, P3), 2 * (2 * x + 1) + 10)      # the first method first
    same(Compose(Embed(10), Embed(1)).embed(x, P3), 2 * (2 * x + 10) + 1)
    both = Compose(Rotate(1), Rotate(10)).rotate(q, k, P3, P3)
    same(both, (2 * (2 * q + 1) + 10, 3 * (3 * k - 1) - 10))

    offsets = relative_offsets(P3, P3).float()
    same(Compose(Bias(), NoPE(), Bias(), Bias()).bias(P3, P3), 3 * offsets.expand(2, 3, 3))
    same(Compose(Bias(), Bias(batch=5)).bias(P3, P3), 2 * offsets.expand(5, 2, 3, 3))
    same(Compose(Bias(batch=5), Bias()).bias(P3, P3), 2 * offsets.expand(5, 2, 3, 3))
    assert Compose(NoPE(), Embed(1)).bias(P3, P3) is None

    plain, ones = q @ k.mT / 2, torch.ones(1, 2, 3, 3)
    for methods, logits, values in [((), plain, ones @ k), ((Bias(), Logits()), plain + 7, ones @ k),
                                    ((Values(), Embed(1)), plain, ones @ k + 7),
                                    ((Bias(), Scale(1.0)), 2 * plain, ones @ k),
                                    ((Embed(1), Compose(Scale(1.0))), 2 * plain, ones @ k)]:
        same(Compose(*methods).logits(q, k, P3, P3), logits)
        same(Compose(*methods).values(ones, k, P3, P3), values)
        assert Compose(*methods).scale == (1.0 if torch.equal(logits, 2 * plain) else None)


def test_compose_opens_its_methods_doors_in_turn():
    check_compose(Compose)


def test_an_empty_compose_is_nope():
    q, k = qk()
    empty = Compose()
    assert empty.embed(q, P3) is q and empty.rotate(q, k, P3, P3)[1] is k and empty.bias(P3, P3) is None
    assert empty.scale is None and not any(empty.opens(door) for door in DOORS)


def test_nested_is_the_same_as_flat():
    x, (q, k) = torch.randn(1, 3, 4), qk()
    parts = Embed(1), Rotate(2), Bias(), Logits(), Embed(3)
    flat, nested = Compose(*parts), Compose(Compose(parts[0]), Compose(*parts[1:4], Compose()), parts[4])
    for door, given in (("embed", (x, P3)), ("rotate", (q, k, P3, P3)), ("bias", (P3, P3)), ("logits", (q, k, P3, P3)),
                        ("values", (q @ k.mT, k, P3, P3))):
        torch.testing.assert_close(getattr(nested, door)(*given), getattr(flat, door)(*given), rtol=0, atol=0)
        assert nested.opens(door) == flat.opens(door)


def test_scale_is_the_owners():
    assert Compose(Bias(), Scale(1.0)).scale == Compose(Compose(Scale(1.0)), NoPE()).scale == 1.0
    assert Compose(Bias(), Logits()).scale is None
    owner = Scale(1.0)
    composed = Compose(owner)
    owner.scale = 0.5                                                          # read when asked, so it cannot go stale
    assert composed.scale == 0.5


@pytest.mark.parametrize("first, second", list(itertools.product(
    [Logits(), Values(), Scale(1.0), Compose(Logits()), Compose(NoPE(), Compose(Scale(0.5)))], repeat=2)))
def test_two_owners_are_refused(first, second):
    names = f"{type(first).__name__}, {type(second).__name__}"
    with pytest.raises(ValueError, match=f"at most one method may own logits, values or scale, got 2: {names}"):
        Compose(first, Bias(), second)


@pytest.mark.parametrize("given, name", [(NoPE, "type"), (nn.Linear(2, 2), "Linear"), (None, "NoneType"), ("x", "str")])
def test_compose_takes_methods_only(given, name):
    with pytest.raises(TypeError, match=f"Compose takes PositionMethods, got {name}"):
        Compose(NoPE(), given)


@pytest.mark.parametrize("first, second, shapes", [
    (Bias(2), Bias(3), r"\(2, 3, 3\) and \(3, 3, 3\)"),
    (Bias(1), Bias(2), r"\(1, 3, 3\) and \(2, 3, 3\)"),
    (Bias(2, batch=4), Bias(3), r"\(4, 2, 3, 3\) and \(3, 3, 3\)"),
    (Bias(2, batch=4), Bias(2, batch=5), r"\(4, 2, 3, 3\) and \(5, 2, 3, 3\)"),
    (Bias(2, batch=1), Bias(2, batch=5), r"\(1, 2, 3, 3\) and \(5, 2, 3, 3\)"),
])
def test_biases_that_differ_are_not_broadcast(first, second, shapes):
    with pytest.raises(ValueError, match=f"biases must agree in heads, q and k .*, got {shapes} from Bias"):
        Compose(first, second).bias(P3, P3)


def test_compose_registers_its_methods():
    class Table(PositionMethod):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.zeros(2))

    shared = Table()
    assert list(Compose(NoPE(), shared).state_dict()) == ["methods.1.table"]
    assert len(list(Compose(shared, shared).parameters())) == 1
    assert [type(m) for m in pickle.loads(pickle.dumps(Compose(NoPE(), Sinusoidal(4)))).methods] == [NoPE, Sinusoidal]


@pytest.mark.parametrize("old, new", [
    ("x = method.embed(x, positions)", "x = x + method.embed(x, positions)"),
    ("for method in self.methods:\n            x =", "for method in reversed(self.methods):\n            x ="),
    ("for method in self.methods:\n            q, k", "for method in reversed(self.methods):\n            q, k"),
    ("for method in self.methods:\n            q, k", "for method in self.methods[:1]:\n            q, k"),
    ("else total + bias", "else bias"), ("else total + bias", "else total"),
    ("return owner.logits(", "return super().logits("), ("return owner.values(", "return super().values("),
    ("next((owner.scale for owner in self._owners()), None)", "None"),
])
def test_the_checks_see_a_wrong_compose(mutant, old, new):
    with pytest.raises(AssertionError):
        check_compose(mutant("method", old, new, PositionMethod=PositionMethod).Compose)


@pytest.mark.parametrize("old, new", [
    ("(q * scale) @", "q @"), ("** -0.5 if", "** 0.5 if"), ("if self.scale is None", "if not self.scale"),
    ("k.transpose(-2, -1)", "k.flip(-2).transpose(-2, -1)"),
])
def test_the_checks_see_wrong_logits(mutant, golden, old, new):
    wrong = mutant("method", old, new).NoPE()
    with pytest.raises(AssertionError):
        check_default_logits(wrong.logits, golden)
        check_scale(wrong)
