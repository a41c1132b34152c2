"""Lesson 08: the numbers its text states, what its pictures draw, and wrong answers its checks must name."""
import numpy as np
import pytest
import torch

from posenc_lib import Shaw, attend, clip_offsets, relative_offsets
from posenc_lib.course.lessons import relative_vectors as lesson


def test_worked_example():
    rows = lesson.check_rows.right(torch.arange(2), torch.arange(3), 1)
    assert rows.tolist() == [[1, 2, 2], [0, 1, 2]]
    looked_up = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]])[rows]
    assert looked_up.tolist() == [[[0.3, 0.4], [0.5, 0.6], [0.5, 0.6]], [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]]


def test_rows_of_a_cache_and_rows_counted_from_0():
    assert lesson._rows([3, 4], range(5), 2).tolist() == [[0, 0, 1, 2, 3], [0, 0, 0, 1, 2]]
    assert lesson._rows([0, 1], range(5), 2).tolist() == [[2, 3, 4, 4, 4], [1, 2, 3, 4, 4]]


@pytest.mark.parametrize("seed", range(5))
def test_reference_answers_equal_the_library(seed):
    torch.manual_seed(seed)
    shaw = Shaw(head_dim=8, max_offset=2)
    q, k, v = (torch.randn(2, 3, length, 8) for length in (4, 7, 7))
    i, j = torch.arange(4), torch.arange(7)
    out = attend(q, k, v, shaw, q_positions=i, k_positions=j)
    rows = clip_offsets(relative_offsets(i, j), 2)
    one_head = lesson.shaw_head(q[1, 2], k[1, 2], v[1, 2], shaw.key_table, shaw.value_table, rows)
    assert torch.allclose(out[1, 2], one_head, atol=1e-5)
    assert torch.allclose(shaw.logits(q, k, i, j), lesson.shaw_logits(q, k, shaw.key_table), atol=1e-5)
    assert torch.equal(lesson.merge_heads(lesson.split_heads(v.flatten(1, 2), 2)), v.flatten(1, 2))


@pytest.mark.parametrize("length, looked_up, by_row, logits", [
    (512, 64, 2.015625, 8), (2048, 1024, 8.0625, 128), (4096, 4096, 16.125, 512)])
def test_bytes(length, looked_up, by_row, logits):
    assert [size / 2**20 for size in lesson.memory_bytes(length).values()] == [looked_up, logits, by_row]


def test_table_of_129_rows_is_33_kilobytes():
    assert 4 * (2 * 64 + 1) * 64 == 33024


@pytest.mark.parametrize("max_offset, position, d_model", [(4, 12, 16), (0, 0, 4), (31, 31, 128), (2, 20, 64)])
def test_explorer_draws_the_two_terms_and_their_weights(max_offset, position, d_model):
    scene = lesson.ClipScene()
    scene.frame(max_offset=max_offset, position=position, d_model=d_model)
    q, k, vectors = lesson._tokens(d_model)
    offset = [vectors[31 + max(-max_offset, min(max_offset, j - position))] @ q[position] for j in range(32)]
    logits = np.array([k[j] @ q[position] + offset[j] for j in range(32)]) / np.sqrt(d_model)
    assert np.allclose(scene.offset.get_ydata(), np.array(offset) / np.sqrt(d_model))
    assert np.allclose(scene.total.get_ydata(), logits)
    drawn = [segment[1, 1] for segment in scene.stems.get_segments()]
    assert np.allclose(drawn, torch.softmax(torch.tensor(logits), 0).numpy())
    grey = sum(patch.get_width() for patch in scene.far[:2])
    assert grey == sum(abs(j - position) > max_offset for j in range(32))


def test_everything_the_explorer_can_draw_fits_its_axes():
    scene = lesson.ClipScene()
    low, high = scene.logits.get_ylim()
    for position in range(32):
        for d_model in range(4, 129, 4):
            for max_offset in (0, 1, 2, 4, 8, 16, 31):
                content, offset = lesson.logits_of(position, d_model, max_offset)
                for values in (content, offset, content + offset):
                    assert low < values.min() and values.max() < high
                assert lesson._softmax(content + offset).max() < scene.weights.get_ylim()[1]


def test_a_wider_clip_keeps_the_steps_near_the_query():
    narrow, wide = (lesson.logits_of(12, 16, m)[1] for m in (4, 31))
    assert np.array_equal(narrow[8:17], wide[8:17]) and len(np.unique(narrow)) == 9 and len(np.unique(wide)) == 32
    assert np.ptp(lesson.logits_of(12, 16, 0)[1]) == 0


def on_the_cpu(q, k, table):
    return lesson.shaw_logits(q, k, table) * q.shape[-1] ** 0.5 / torch.tensor([q.shape[-1] ** 0.5], device="cpu")


def fails_for_three(q, k, table):
    if q.shape[-2] == 3:
        raise ValueError
    return lesson.shaw_logits(q, k, table)


def one_length(q, k, table):
    place = torch.arange(q.shape[-2])
    rows = clip_offsets(relative_offsets(place, place), len(table) // 2)
    return (q @ k.mT + torch.einsum("bhid,ijd->bhij", q, table[rows])) / q.shape[-1] ** 0.5


@pytest.mark.parametrize("exercise, answer, words", [
    (lesson.check_rows, lambda q, k, m: clip_offsets(relative_offsets(q, k), m), "cache"),
    (lesson.check_rows, lambda q, k, m: clip_offsets(relative_offsets(q, k), m).tolist(), "cache"),
    (lesson.check_rows, lambda q, k, m: clip_offsets(relative_offsets(q, k), m).float(), "integers"),
    (lesson.check_rows, lambda q, k, m: (k[None] - q[:, None]).abs(), "entry"),
    (lesson.check_rows, lambda q, k, m: clip_offsets(-relative_offsets(q, k), m), "key minus query"),
    (lesson.check_rows, lambda q, k, m: clip_offsets(relative_offsets(k, q), m), "shape"),
    (lesson.check_attention, lambda q, k, v, a, b, r: torch.softmax(
        (q @ k.T + (q @ a.T).gather(1, r)) / q.shape[1] ** 0.5, 1) @ v, "values do not get"),
    (lesson.check_attention, lambda q, k, v, a, b, r: lesson.shaw_head(q, k, v, a, a, r), "table of their own"),
    (lesson.check_split, lambda x, h: x.view(x.shape[0], -1, h, x.shape[-1] // h).transpose(1, 2), "any batch"),
    (lesson.check_split, lambda x, h: x.view(6, -1, h, x.shape[-1] // h).transpose(1, 2), "The 6 is still there"),
    (lesson.check_split, lambda x, h: x.view(x.shape[0], h, -1, x.shape[-1] // h), "mixes tokens"),
    (lesson.check_logits, on_the_cpu, "fixed device"),
    (lesson.check_logits, fails_for_three, "Which length"),
    (lesson.check_logits, one_length, "broadcast"),
    (lesson.check_merge, lambda out: out.permute(0, 2, 1, 3).reshape(len(out), out.shape[2], -1), "x + attention"),
    (lesson.check_merge, lambda out: out.transpose(1, 2).reshape(-1, out.shape[1] * out.shape[-1]), "one long list"),
])
def test_verdicts(exercise, answer, words):
    assert words in exercise(answer).message


def test_attempt_says_the_same_everywhere():
    assert lesson.attempt(lambda: torch.zeros(2, 3)) == "runs, output (2, 3)"
    assert lesson.attempt(lambda: 1 / 0) == lesson.attempt(lambda: torch.zeros(2) + torch.zeros(3)) == \
        "stops with an error"
