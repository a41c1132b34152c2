"""Lesson 06: the numbers its text states, what its pictures draw, and wrong answers its checks must name."""
import numpy as np
import pytest
import torch

from posenc_lib import Rotary, attend, frequencies, rotate, shift_matrix
from posenc_lib.course.lessons import rope as lesson


def turned_by_loop(x, positions, base, partner):
    """RoPE feature by feature with Python's own complex numbers; partner(n, dim) gives the two features of pair n."""
    y = np.array(x, dtype=float)
    dim = y.shape[-1]
    for p, position in enumerate(positions):
        for n in range(dim // 2):
            a, b = partner(n, dim)
            z = (y[..., p, a] + 1j * y[..., p, b]) * np.exp(1j * float(position) / base ** (2 * n / dim))
            y[..., p, a], y[..., p, b] = z.real, z.imag
    return y


def turned_in_place(x, positions, base):
    """First and second feature of each pair written one after the other into one array."""
    y = np.array(x)
    angle = np.outer(positions, base ** (-np.arange(0, y.shape[-1], 2) / y.shape[-1]))
    y[..., ::2] = y[..., ::2] * np.cos(angle) - y[..., 1::2] * np.sin(angle)
    y[..., 1::2] = y[..., ::2] * np.sin(angle) + y[..., 1::2] * np.cos(angle)
    return y


def neighbours(n, dim):
    return 2 * n, 2 * n + 1


def halves(n, dim):
    return n, n + dim // 2


@pytest.mark.parametrize("layout, partner", [("interleaved", neighbours), ("half", halves)])
def test_reference_solution_is_rope_in_both_layouts(layout, partner):
    x, positions = np.random.default_rng(0).normal(size=(2, 3, 8)), np.array([0, 3, 1000])
    wanted = turned_by_loop(x, positions, 100.0, partner)
    assert np.allclose(lesson._turned(x, positions, 100.0, layout=layout), wanted)
    assert np.allclose(rotate(torch.tensor(x), torch.tensor(positions), 100.0, layout=layout), wanted)


@pytest.mark.parametrize("p", [0, 1, 98])
def test_rotation_is_the_transposed_shift_matrix(p):
    x = torch.randn(1, 16, dtype=torch.float64)
    assert torch.allclose(rotate(x, torch.tensor([p]))[0], shift_matrix(p, 16).T @ x[0])
    quarter = rotate(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert quarter[0].tolist() == pytest.approx([0.5403, 0.8415], abs=5e-5)


def test_score_maps():
    rope, before = (lesson.token_scores(100, 64, before=flag) for flag in (False, True))
    assert max(np.ptp(np.diagonal(rope, k)) for k in range(-99, 100)) < 1e-11
    assert np.ptp(np.diagonal(before, 5)) > 0.3 * np.ptp(before)
    assert min(np.ptp(np.diagonal(before, k)) for k in range(-90, 91)) > 0.05 * np.ptp(before)
    assert not np.allclose(rope, rope.T)


def test_first_positions_that_half_types_lose():
    assert torch.tensor([256, 257]).to(torch.bfloat16).tolist() == [256, 256]
    assert torch.tensor([2048, 2049]).to(torch.float16).tolist() == [2048, 2048]
    assert torch.arange(4096).to(torch.bfloat16).unique().numel() == 769
    assert torch.arange(4096).to(torch.float16).unique().numel() == 3073


def test_collapse_starts_where_the_text_says():
    positions = np.arange(3000)
    exact = lesson.neighbour_scores(positions, torch.float64)
    assert np.ptp(exact) < 1e-9
    for dtype, first in ((torch.bfloat16, 256), (torch.float16, 2048)):
        off = ~np.isclose(lesson.neighbour_scores(positions, dtype), exact)
        assert off.argmax() == first and off[first:].mean() > 0.9


@pytest.mark.parametrize("start, offsets", [(256, {0, 2}), (512, {0, 4}), (1024, {0, 8}), (2048, {0, 16})])
def test_rounded_offsets(start, offsets):
    p = torch.arange(start, min(2 * start, 3000))
    assert set(((p + 1).to(torch.bfloat16).long() - p.to(torch.bfloat16).long()).tolist()) == offsets


@pytest.mark.parametrize("d, first, share", [(16, 4, 0.50), (64, 6, 0.45), (128, 12, 0.45)])
def test_mean_score_falls_in_waves(d, first, share):
    curve = lesson.mean_score(np.arange(300), d)
    rises = np.diff(curve) > 0
    assert curve[0] == 1 and rises.argmax() + 1 == first and rises.mean() == pytest.approx(share, abs=0.005)
    q = torch.randn(3000, 1, d, dtype=torch.float64, generator=torch.Generator().manual_seed(d))
    q /= q.norm(dim=-1, keepdim=True)
    moved = rotate(q, torch.tensor([20]))
    assert (rotate(q, torch.tensor([0])) * moved).sum(-1).mean().item() == pytest.approx(curve[20], abs=0.02)


def test_the_bound_in_the_paper_is_not_monotone():
    w, offsets = frequencies(64).numpy(), np.arange(257)
    bound = np.abs(np.cumsum(np.exp(1j * offsets[:, None] * w), axis=1)).mean(axis=1)
    assert bound[100] > bound[50] and bound[256] < bound[0]


def test_pairs_without_a_full_turn():
    w = frequencies(128).numpy()
    assert (2047 * w < 2 * np.pi).sum() == 23 and 2047 * w[63] == pytest.approx(0.2364, abs=5e-5)


def test_left_padding_by_column_is_harmless_and_a_mixture_is_not():
    torch.manual_seed(3)
    q, k, v = torch.randn(3, 1, 2, 6, 8, dtype=torch.float64)
    real, method = torch.tensor([[False, False, True, True, True, True]]), Rotary(8)
    alone = attend(q[:, :, 2:], k[:, :, 2:], v[:, :, 2:], method, causal=True)
    counted, columns = lesson.check_positions.right(real), torch.arange(6)[None]

    def outputs(q_positions, k_positions):
        return attend(q, k, v, method, causal=True, mask=real[:, None, None], q_positions=q_positions,
                      k_positions=k_positions)[:, :, 2:]

    assert counted.tolist() == [[0, 0, 0, 1, 2, 3]]
    assert torch.allclose(outputs(counted, counted), alone) and torch.allclose(outputs(columns, columns), alone)
    sees = real & torch.ones(6, 6, dtype=torch.bool).tril()
    for q_positions, same in ((columns[0], True), (torch.tensor([0, 1, 2, 3, 4, 3]), False)):
        mixed = attend(q, k, v, method, mask=sees[None, None], q_positions=q_positions, k_positions=columns[0])
        mixed = mixed[:, :, 2:]
        assert torch.allclose(mixed[:, :, :3], alone[:, :, :3])
        assert torch.allclose(mixed[:, :, 3], alone[:, :, 3], atol=1e-3) == same


def test_suspect_changes_lengths_and_squared_does_not():
    x = np.random.default_rng(0).normal(size=(100, 64))
    change = np.linalg.norm(lesson._suspect(x, np.arange(100)), axis=-1) / np.linalg.norm(x, axis=-1)
    assert change[0] == 1 and change.min() < 0.95 and change.max() > 1.05
    assert np.allclose(np.linalg.norm(lesson.squared(x, np.arange(100)), axis=-1), np.linalg.norm(x, axis=-1))
    two = np.random.default_rng(1).normal(size=(5, 2))
    assert np.allclose(lesson._suspect(two, np.arange(5)), lesson._turned(two, np.arange(5), 10000.0))


@pytest.mark.parametrize("values", [
    dict(head_dim=64, base=1e4, position=100, offset=2, key="another word"),
    dict(head_dim=4, base=1.0, position=60, offset=-60, key="same as query"),
    dict(head_dim=256, base=1e6, position=260, offset=60, key="another word")])
def test_explorer_shows_the_librarys_score_and_arrows(values):
    scene = lesson.RopeScene()
    scene.frame(**values)
    words, d = lesson._pairs_of_words(), values["head_dim"]
    i, j = values["position"], values["position"] + values["offset"]
    q, k = (torch.view_as_real(torch.tensor(words[name][:d // 2])).flatten()[None] for name in ("query", values["key"]))
    new_q, new_k = rotate(q, torch.tensor([i]), values["base"]), rotate(k, torch.tensor([j]), values["base"])
    score = (new_q * new_k).sum() / q.norm() / k.norm()
    assert scene.marker.get_ydata()[0] == pytest.approx(score.item())
    for n, pair in enumerate(scene.shown_pairs(d)):
        for arrows, vector in ((scene.q_arrows, new_q), (scene.k_arrows, new_k)):
            tip = arrows[n].get_xy()[3] - [scene.centres[n].real, scene.centres[n].imag]
            assert tip == pytest.approx(vector[0, 2 * pair:2 * pair + 2].numpy(), abs=1e-6)


def relative_by_loop(turn):
    q, k = np.random.default_rng(5).normal(size=(2, 1, 12))
    scores = [float((turn(q, np.array([i])) * turn(k, np.array([i + 7]))).sum()) for i in (0, 3, 50)]
    return max(scores) - min(scores) < 1e-9


def only_one_pair(turn):
    q, k = np.random.default_rng(5).normal(size=(2, 30, 2))
    q[:], k[:] = q[0], k[0]
    return np.ptp(np.diagonal(turn(q, np.arange(30)) @ turn(k, np.arange(30)).T, 3)) < 1e-9


@pytest.mark.parametrize("exercise, answer, words", [
    (lesson.check_rotate, lambda x, p, b: turned_by_loop(x, p, b, neighbours), "library's rotate"),
    (lesson.check_rotate, lambda x, p, b: rotate(torch.tensor(x), torch.tensor(p), b), "library's rotate"),
    (lesson.check_rotate, lambda x, p, b: turned_by_loop(x, p, b, halves), "dim/2"),
    (lesson.check_rotate, lambda x, p, b: turned_by_loop(x, -p, b, neighbours), "clockwise"),
    (lesson.check_rotate, lambda x, p, b: turned_by_loop(x, range(len(p)), b, neighbours), "row number"),
    (lesson.check_rotate, lambda x, p, b: turned_in_place(x, p, b), "a view"),
    (lesson.check_rotate, lambda x, p, b: turned_by_loop(x.swapaxes(1, 2), p, b, neighbours).swapaxes(1, 2), "HEAD"),
    (lesson.check_rotate, lambda x, p, b: turned_by_loop(x, p, b, neighbours).reshape(*x.shape[:2], -1), "shape"),
    (lesson.check_order, lambda dim: [*range(0, dim, 2), *range(1, dim, 2)], "first partners"),
    (lesson.check_order, lambda dim: torch.arange(dim).view(2, -1).T.flatten(), "the way back"),
    (lesson.check_order, lambda dim: torch.arange(dim).view(-1, 2).T.flatten(), "first partners"),
    (lesson.check_is_relative, relative_by_loop, "property"),
    (lesson.check_is_relative, only_one_pair, "single pair"),
    (lesson.check_is_relative, lambda turn: bool(np.allclose(turn(np.ones((3, 8)), np.zeros(3)), 1)), "position 0"),
    (lesson.check_positions, lambda mask: (mask.int().cumsum(1) - 1) * mask, "Each row counts"),
    (lesson.check_positions, lambda mask: (mask.float().cumsum(1) - 1).clamp(min=0), "integers"),
    (lesson.check_positions, lambda mask: mask.int().cumsum(1) - 1, "-1"),
    (lesson.check_positions, lambda mask: torch.arange(mask.shape[1])[None].repeat(len(mask), 1), "column numbers"),
])
def test_verdicts(exercise, answer, words):
    assert words in exercise(answer).message
