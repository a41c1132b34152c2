"""Lesson 01: what its text states in numbers, the data its pictures draw, and independent wrong answers."""
import itertools

import numpy as np
import pytest
import torch

from posenc_lib import NoPE, SelfAttention
from posenc_lib.course.lessons import permutation as lesson

ALL_VALUES = list(itertools.product(lesson.ORDERS, (4, 16, 64), ("none", "causal")))


@pytest.fixture(scope="module")
def scene():
    return lesson.PermutationScene()


# ---- the law, by torch's own attention

def law_gaps(module, order, mask=None):
    x = torch.randn(1, 5, 16, dtype=torch.float64)
    y, moved = (module(z, z, z, attn_mask=mask)[0] for z in (x, x[:, order]))
    return [(moved - target).abs().max().item() for target in (y, y[:, order])] + [
        (moved.mean(1) - y.mean(1)).abs().max().item()]


@pytest.mark.parametrize("order", list(itertools.permutations(range(5)))[1::17])
def test_attention_is_equivariant_and_its_mean_invariant_only_without_a_mask(order):
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True).double()
    unmoved, moved, pooled = law_gaps(module, list(order))
    assert unmoved > 1e-3 and moved < 1e-12 and pooled < 1e-12
    causal = torch.ones(5, 5).triu(1).bool()
    _, moved, pooled = law_gaps(module, list(order), causal)
    assert moved > 1e-3 and pooled > 1e-3


def test_the_last_output_of_one_causal_layer_reads_a_bag_and_that_of_two_does_not():
    x = torch.randn(1, 5, 8, dtype=torch.float64)
    layers = [SelfAttention(8, 2, NoPE()).double() for _ in range(2)]
    for order in itertools.permutations(range(4)):
        shuffled = x[:, [*order, 4]]
        one, one_shuffled = layers[0](x, causal=True), layers[0](shuffled, causal=True)
        assert torch.allclose(one[:, -1], one_shuffled[:, -1])
        if order != (0, 1, 2, 3):
            two, two_shuffled = layers[1](one, causal=True), layers[1](one_shuffled, causal=True)
            assert not torch.allclose(two[:, -1], two_shuffled[:, -1])


def test_the_characters_reorder_as_stated():
    assert "".join("我爱吃苹果"[i] for i in (3, 4, 1, 0, 2)) == "苹果爱我吃"


# ---- the counting head

@pytest.mark.parametrize("length", [1, 2, 12, 300])
def test_counting_head(length):
    weights, out = lesson.counting_head(length)
    assert np.allclose(out, 1 / np.arange(1, length + 1), rtol=1e-12)
    assert np.allclose(weights, np.tri(length) / np.arange(1, length + 1)[:, None], rtol=1e-12)


def test_counting_in_bfloat16_has_490_readings_for_1024_positions():
    readings = (1 / torch.arange(1, 1025, dtype=torch.float64)).to(torch.bfloat16)
    assert len(readings.unique()) == 490
    assert readings[190] == readings[189] and len(readings[:190].unique()) == 190


# ---- the explorer's data

@pytest.mark.parametrize("order, d_model, mask", ALL_VALUES)
def test_run_attention_against_numpy(order, d_model, mask):
    x, weights, out = lesson.run_attention(lesson.ORDERS[order], d_model, mask == "causal")
    vectors, projections = lesson._weights()
    assert np.array_equal(x, vectors[list(lesson.ORDERS[order]), :d_model])
    q, k, v = (x @ w[:d_model, :d_model] / np.sqrt(d_model) for w in projections)
    e = np.exp(q @ k.T / np.sqrt(d_model)) * (np.tri(5) if mask == "causal" else 1)
    assert np.allclose(weights, e / e.sum(1, keepdims=True), atol=1e-12)
    assert np.allclose(out, weights @ v, atol=1e-12)


@pytest.mark.parametrize("order, d_model, mask", ALL_VALUES)
def test_the_sentence_says_what_the_numbers_say(scene, order, d_model, mask):
    gap = scene.runs(order, d_model, mask)[2]
    holds = mask == "none" or order == "as written"
    assert (gap.max() < 1e-12) == holds and (holds or gap.max() > 0.05)
    for marked in range(5):
        said = scene.describe(order, marked, d_model, mask)
        assert ("P f(X) holds" in said) == holds and ("P f(X) fails" in said) != holds
        assert ("'the' have equal outputs" in said) == (mask == "none")
        now = lesson.ORDERS[order].index(marked)
        assert (f"from position {marked} to {now}" in said) or (now == marked and f"stays at position {now}" in said)
        assert ("its output does not change" in said) == (gap[now].max() < 1e-12)


def test_orders_are_permutations_and_named_rightly():
    for order in lesson.ORDERS.values():
        assert sorted(order) == [0, 1, 2, 3, 4]
    sentence = {name: " ".join(lesson.WORDS[i] for i in order) for name, order in lesson.ORDERS.items()}
    assert sentence["as written"] == sentence["the ↔ the"] == "the dog bites the man"
    assert sentence["nouns swapped"] == "the man bites the dog"
    assert lesson.ORDERS["the ↔ the"] != lesson.ORDERS["as written"]


# ---- exercises: answers written without a look at the lesson's own

def hint(check, answer):
    verdict = check(answer)
    assert verdict.status == "not yet"
    return verdict.message


def test_attention_answers():
    def by_loops(x, w_q, w_k, w_v):
        rows = []
        for i in range(len(x)):
            e = torch.stack([(x[i] @ w_q) @ (x[j] @ w_k) for j in range(len(x))]) / w_q.shape[1] ** 0.5
            rows.append(sum(a * (x[j] @ w_v) for j, a in enumerate(e.exp() / e.exp().sum())))
        return torch.stack(rows)

    def by_torch(x, w_q, w_k, w_v, **options):
        return torch.nn.functional.scaled_dot_product_attention(x @ w_q, x @ w_k, x @ w_v, **options)

    assert lesson.check_attention(by_loops).status == lesson.check_attention(by_torch).status == "correct"
    assert "not divided" in hint(lesson.check_attention, lambda *a: by_torch(*a, scale=1.0))
    assert "d_model" in hint(lesson.check_attention, lambda *a: by_torch(*a, scale=a[0].shape[1] ** -0.5))
    assert "square root is missing" in hint(lesson.check_attention, lambda *a: by_torch(*a, scale=1 / a[1].shape[1]))
    assert "dim=-1" in hint(lesson.check_attention, lambda x, q, k, v: (
        (x @ q @ (x @ k).T / q.shape[1] ** 0.5).softmax(0) @ (x @ v)))
    assert "relation" in hint(lesson.check_attention, lambda x, q, k, v: (
        x @ q @ (x @ k).T / q.shape[1] ** 0.5).softmax(-1))


def test_restore_answers():
    def by_loop(shuffled, order):
        out = torch.empty_like(shuffled)
        for new, old in enumerate(order):
            out[old] = shuffled[new]
        return out

    assert lesson.check_restore(by_loop).status == "correct"
    assert lesson.check_restore(lambda s, o: torch.eye(len(o))[o].T @ s).status == "correct"
    assert "once more" in hint(lesson.check_restore, lambda s, o: torch.eye(len(o))[o] @ s)
    assert "still f(PX)" in hint(lesson.check_restore, lambda s, o: s.clone())


def test_position_answers():
    assert lesson.check_position(lambda r: (1 - r) / r).status == "correct"
    assert "counted from 0" in hint(lesson.check_position, lambda r: r ** -1)
    assert "numbered the rows" in hint(lesson.check_position, lambda r: torch.arange(len(r)))


def test_kinds_are_right_by_trial_of_all_orders():
    x = torch.randn(5, 8, dtype=torch.float64)
    orders = [list(o) for o in itertools.permutations(range(5))]

    def kind(g):
        y = g(x)
        if all(torch.allclose(g(x[o]), y) for o in orders):
            return "invariant"
        return "equivariant" if y.dim() == 2 and all(torch.allclose(g(x[o]), y[o]) for o in orders) else "neither"

    maps = (lambda x: x - x.mean(dim=0), lambda x: x.max(dim=0).values, lambda x: x[0], lambda x: x.cumsum(dim=0))
    truth = [kind(g) for g in maps]
    assert lesson.check_kinds(truth).status == lesson.check_kinds([k.upper() for k in truth]).status == "correct"
    for answer in itertools.product(lesson.KINDS, repeat=4):
        wrong = [n for n in range(4) if answer[n] != truth[n]]
        if wrong:
            message = hint(lesson.check_kinds, list(answer))
            assert [n for n in range(4) if f"Map {n + 1}:" in message] == wrong
