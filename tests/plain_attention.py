"""Attention with position in plain loops, and the situations in which a method has to agree with it."""
import copy
import pickle

import torch
from torch import nn

from posenc_lib import PositionMethod, attend

HEADS, HEAD_DIM = 2, 4
D_MODEL = HEADS * HEAD_DIM


class Equation:
    """A paper's equation for one query and one key, in float64; subclasses replace what the paper changes."""

    def logit(self, h, q, k, i, j):
        """Head h, vectors q and k (head_dim,), their positions i and j."""
        return q @ k / HEAD_DIM ** 0.5

    def value(self, h, v, i, j):
        return v


def randomized(method):
    """The method in float64 with every parameter drawn from N(0, 1): no term is zero."""
    method = method.double()
    for parameter in method.parameters():
        nn.init.normal_(parameter)
    return method


def loops(equation, q, k, v, q_positions, k_positions, allowed):
    """Weights and output, one query and one key at a time. Positions (batch, length), allowed (batch, q, k)."""
    weights = torch.zeros(*q.shape[:3], k.shape[2], dtype=torch.float64)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for n, i in enumerate(q_positions[b].tolist()):
                seen = allowed[b, n].nonzero().flatten().tolist()
                if seen:
                    j = k_positions[b].tolist()
                    logits = torch.stack([equation.logit(h, q[b, h, n], k[b, h, m], i, j[m]) for m in seen])
                    weights[b, h, n, seen] = logits.softmax(0)
                    out[b, h, n] = sum(weights[b, h, n, m] * equation.value(h, v[b, h, m], i, j[m]) for m in seen)
    return out, weights


def every_logit(equation, q, k, q_positions, k_positions):
    """(batch, heads, q, k), masked ones too: softmax would not show what a whole row has in common."""
    return torch.stack([torch.stack([torch.stack([torch.stack([
        equation.logit(h, q[b, h, n], k[b, h, m], i, j) for m, j in enumerate(k_positions[b].tolist())])
        for n, i in enumerate(q_positions[b].tolist())]) for h in range(q.shape[1])]) for b in range(q.shape[0])])


def situations():
    """(name, q_positions, k_positions, causal, mask or None): None means the default positions."""
    arange, batch = torch.arange, 2
    padded = torch.tensor([[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]])
    real = torch.tensor([[0, 0, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()[:, None, None]
    some = torch.rand(batch, 1, 6, 6, generator=torch.Generator().manual_seed(1)) < 0.6
    some[0, :, 2] = some[1, :, 0] = False                                # two queries that may attend to nothing
    return [
        ("everything", arange(6), arange(6), False, None),
        ("causal", arange(6), arange(6), True, None),
        ("memory before the queries", arange(9, 12), arange(4, 12), True, None),
        ("more queries than keys", arange(7), arange(3, 6), False, None),
        ("far apart", arange(20, 26), arange(4), False, None),
        ("gaps and any order", torch.tensor([9, 2, 3, 30]), torch.tensor([7, 0, 1, 31, 8]), True, None),
        ("left padding", padded, padded, True, real),
        ("positions of one side batched", padded, arange(2, 8), False, None),
        ("masked, two rows fully", arange(6), arange(6), False, some),
    ]


def check(method, equation, attend=attend, tolerance=1e-10):
    """The method equals its equation in every situation: logits, weights, output; with gradients or not; row by row."""
    for name, q_positions, k_positions, causal, mask in situations():
        q_len, k_len = q_positions.shape[-1], k_positions.shape[-1]
        q = torch.randn(2, HEADS, q_len, HEAD_DIM, dtype=torch.float64)
        k, v = torch.randn(2, 2, HEADS, k_len, HEAD_DIM, dtype=torch.float64)
        i, j = q_positions.expand(2, q_len), k_positions.expand(2, k_len)
        allowed = torch.ones(2, q_len, k_len, dtype=torch.bool) if mask is None else mask[:, 0].expand(2, q_len, k_len)
        if causal:
            allowed = allowed & (j[:, None] <= i[..., None])
        with torch.no_grad():
            expected_out, expected = loops(equation, q, k, v, i, j, allowed)
            expected_logits = every_logit(equation, q, k, i, j)
        given = dict(q_positions=q_positions, k_positions=k_positions, causal=causal, mask=mask)
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                out, weights = attend(q, k, v, method, return_weights=True, **given)
                fused = attend(q, k, v, method, **given)
                logits = method.logits(q, k, q_positions, k_positions)
                bias = method.bias(q_positions, k_positions)
                logits = logits if bias is None else logits + bias
            for what, ours, theirs in (("logits", logits, expected_logits), ("weights", weights, expected),
                                       ("out", out, expected_out),
                                       ("out without weights", fused, expected_out)):
                assert (ours - theirs).abs().max() < tolerance, f"{name}: {what}, gradients {grad}"
        for n in range(q_len):                                           # decoding: one query, all keys so far
            row = attend(q[:, :, n:n + 1], k, v, method, k_positions=k_positions, causal=causal,
                         q_positions=q_positions[..., n:n + 1], mask=mask if mask is None else mask[:, :, -1:]
                         if mask.shape[2] == 1 else mask[:, :, n:n + 1])
            assert (row - expected_out[:, :, n:n + 1]).abs().max() < tolerance, f"{name}: row {n} alone"


class IgnoresKeyPositions(PositionMethod):
    """A method as if its author had forgotten that keys have positions of their own."""

    def __init__(self, method):
        super().__init__()
        self.method, self.scale = method, method.scale

    def opens(self, door):
        return self.method.opens(door)

    def _wrong(self, k_positions):
        return torch.arange(k_positions.shape[-1]).expand(k_positions.shape)

    def bias(self, q_positions, k_positions):
        return self.method.bias(q_positions, self._wrong(k_positions))

    def logits(self, q, k, q_positions, k_positions, mask=None):
        return self.method.logits(q, k, q_positions, self._wrong(k_positions), mask)

    def values(self, weights, v, q_positions, k_positions):
        return self.method.values(weights, v, q_positions, self._wrong(k_positions))


class IgnoresQueryPositions(IgnoresKeyPositions):
    """Queries counted from 0, although they are the last ones of the sequence."""

    def bias(self, q_positions, k_positions):
        return self.method.bias(self._wrong(q_positions), k_positions)

    def logits(self, q, k, q_positions, k_positions, mask=None):
        return self.method.logits(q, k, self._wrong(q_positions), k_positions, mask)

    def values(self, weights, v, q_positions, k_positions):
        return self.method.values(weights, v, self._wrong(q_positions), k_positions)


def attend_ignoring_the_mask(*args, mask=None, **kwargs):
    return attend(*args, **kwargs)


def attend_ignoring_causality(*args, causal=False, **kwargs):
    return attend(*args, **kwargs)


def check_state(method):
    """Pickling, deep copies, autocast and the meta device change nothing; gradients reach every parameter."""
    method = method.float()
    for parameter in method.parameters():
        nn.init.normal_(parameter, std=0.5)
    q, k, v = torch.randn(3, 2, HEADS, 5, HEAD_DIM)
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    given = dict(q_positions=positions[:, -3:], k_positions=positions, causal=True)
    expected = attend(q[:, :, -3:], k, v, method, **given)
    for other in (pickle.loads(pickle.dumps(method)), copy.deepcopy(method), method.to("cpu")):
        assert torch.equal(attend(q[:, :, -3:], k, v, other, **given), expected)
    with torch.autocast("cpu", torch.bfloat16):
        under_autocast = attend(q[:, :, -3:], k, v, method, **given)
    assert (under_autocast - expected).abs().max() < 0.25                # bfloat16 products, but positions as they were
    if list(method.parameters()):
        (expected ** 2).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in method.parameters())
    meta = copy.deepcopy(method).to("meta")
    assert attend(*(x.to("meta") for x in (q, k, v)), meta).shape == q.shape
    half = copy.deepcopy(method).to(torch.bfloat16)
    assert attend(*(x.bfloat16() for x in (q, k, v)), half).dtype == torch.bfloat16
    for empty in (0, 3):
        assert attend(q[:, :, :0], k[:, :, :empty], v[:, :, :empty], method).shape == (2, HEADS, 0, HEAD_DIM)
    return method


@torch.no_grad()
def check_compiled(method):
    """One graph without a break, and the same numbers: left padding, three queries after a cache."""
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 2, HEADS, 5, HEAD_DIM, dtype=torch.float64)
    positions = torch.tensor([[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]])
    given = dict(q_positions=positions[:, -3:], k_positions=positions, causal=True)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    expected = attend(q[:, :, -3:], k, v, method, **given)
    torch.testing.assert_close(compiled(q[:, :, -3:], k, v, method, **given), expected)
