"""Lesson 05: the numbers its text states, what its pictures draw, and wrong answers its checks must name."""
import numpy as np
import pytest
import torch

from posenc_lib import complex_encoding, frequencies, shift_matrix, sinusoidal_encoding
from posenc_lib.course.lessons import rotation as lesson


def codes(length, d_model, base=10000.0):
    return sinusoidal_encoding(length, d_model, base, dtype=torch.float64).numpy()


def test_codes_do_not_add():
    table = codes(8, 8)
    assert np.abs(table[3] + table[4] - table[7]).max() == pytest.approx(2.4, abs=0.005)
    z = complex_encoding(8, 8).numpy()
    assert np.allclose(z[3] * z[4], z[7], atol=1e-14)


@pytest.mark.parametrize("start", [1, 98, 1000])
def test_one_matrix_for_every_start(start):
    table = codes(1100, 8)
    assert np.allclose(shift_matrix(2, 8).numpy() @ table[start], table[start + 2], atol=1e-12)


def test_clockwise_in_sin_cos_order():
    assert [round(float(np.arctan2(np.cos(0.3 * p), np.sin(0.3 * p))), 3) for p in (0, 1, 2)] == [1.571, 1.271, 0.971]
    turned = lesson._rotation(np.pi / 2) @ [0.0, 1.0]               # a quarter turn from 12 o'clock
    assert np.allclose(turned, [1.0, 0.0])                          # points to 3 o'clock


@pytest.mark.parametrize("d_model, base, offset", [
    (16, 1e4, 4), (64, 1e4, 6), (128, 1e4, 12), (512, 1e4, 44), (4, 1e4, 4), (512, 1.0, 4)])
def test_first_rise(d_model, base, offset):
    assert lesson.first_rise(d_model, base) == offset
    similarity = codes(200, d_model, base) @ codes(200, d_model, base)[0]
    assert np.all(np.diff(similarity[:offset]) < 0) and similarity[offset] > similarity[offset - 1]


def test_first_rise_is_always_on_screen():
    reach = lesson.SimilarityScene.REACH
    for d_model in range(4, 513, 12):
        for exponent in np.arange(0, 6.05, 0.5):
            assert 1 < lesson.first_rise(d_model, 10**exponent, reach) < reach


@pytest.mark.parametrize("d_model, base", [(4, 1.0), (128, 1e4), (512, 1e6)])
def test_similarity_curve_is_the_dot_product(d_model, base):
    table = codes(61, d_model, base)
    assert np.allclose(lesson._similarity(60, d_model, base), table @ table[0] / (d_model / 2))
    assert np.allclose(lesson._products(61, d_model, base), table @ table.T / (d_model / 2), atol=1e-5)


def drawn_angle(line):
    x, y = line.get_data()
    return np.arctan2(x[1], y[1])


@pytest.mark.parametrize("values", [
    dict(d_model=16, base=1e4, pair="first", position=98, offset=2),
    dict(d_model=512, base=1.0, pair="last", position=200, offset=-24),
    dict(d_model=4, base=1e6, pair="middle", position=0, offset=0)])
def test_hands_show_the_code_before_and_after(values):
    scene = lesson.HandsScene()
    scene.frame(**values)
    i, w = scene.shown(values["d_model"], values["base"], values["pair"])
    assert w == pytest.approx(frequencies(values["d_model"], values["base"])[i].item())
    for n, start in enumerate((values["position"], 0)):
        for hand, p in ((scene.before[n], start), (scene.after[n], start + values["offset"])):
            assert np.exp(1j * drawn_angle(hand)) == pytest.approx(np.exp(1j * w * p))


def test_arrow_winds_the_whole_turn():
    for start, turn in ((0.3, 2.0), (-1.0, -24.0), (2.0, 0.0)):
        x, y = lesson._arc(start, turn)
        angle = np.unwrap(np.arctan2(x, y))
        assert angle[-1] - angle[0] == pytest.approx(turn)


def test_pairs_of_columns_that_move():
    table = codes(200, 8)
    for columns, moves in (([0, 1], True), ([1, 2], False), ([2, 3], True)):
        here, there = table[:-1, columns], table[1:, columns]
        best = np.linalg.lstsq(here, there, rcond=None)[0]
        assert np.allclose(here @ best, there) == moves


def rotation_part(product):
    """Independent of the notebook's: the part that commutes with a quarter turn of every pair, one pair at a time."""
    quarter = np.array([[0.0, 1.0], [-1.0, 0.0]])
    part = np.zeros_like(product)
    for i in range(0, len(product), 2):
        block = product[i:i + 2, i:i + 2]
        part[i:i + 2, i:i + 2] = (block + quarter @ block @ quarter.T) / 2
    return part


@pytest.mark.parametrize("seed", range(4))
def test_random_projections_see_absolute_positions(seed):
    table = codes(100, 64)
    w_q, w_k = np.random.default_rng(seed).normal(size=(2, 64, 64)) / 8
    logits, cut = table @ w_q @ w_k.T @ table.T, table @ rotation_part(w_q @ w_k.T) @ table.T
    assert np.ptp(np.diagonal(logits, 5)) > 0.3 * np.ptp(logits)
    assert np.ptp(np.diagonal(cut, 5)) < 1e-12
    assert not np.allclose(logits, logits.T) and not np.allclose(cut, cut.T)


def test_built_head_looks_ahead_and_words_disturb_it():
    table, ahead = codes(100, 64), shift_matrix(3, 64).numpy().T

    def right(x):
        return int(((x @ ahead @ x.T)[:97].argmax(axis=1) == np.arange(97) + 3).sum())

    assert right(table) == 97
    tokens = np.random.default_rng(0).normal(size=(100, 64))
    assert [right(factor * tokens + table) for factor in (0.25, 0.5, 1)] == [51, 6, 1]


@pytest.mark.parametrize("seed", range(3))
def test_training_finds_rotations(seed):
    """The claims about the trained head hold for other seeds than the notebook's, with the margins it prints."""
    torch.manual_seed(seed)
    inputs, target = sinusoidal_encoding(100, 64), torch.arange(97) + 3
    query, key = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))
    optimiser = torch.optim.Adam([*query.parameters(), *key.parameters()], lr=0.01)
    for _ in range(200):
        loss = torch.nn.functional.cross_entropy(query(inputs[:97]) @ key(inputs).T / 8, target)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    learned = (query.weight.T @ key.weight).detach().double().numpy()
    table = codes(2000, 64)

    def hits(product, start, stop):
        rows = table[start:stop]
        return ((rows @ product @ rows.T)[:-3].argmax(axis=1) == np.arange(3, len(rows))).mean()

    rotations = rotation_part(learned)
    assert hits(learned, 0, 100) == 1 and hits(learned, 100, 200) > 0.9
    assert hits(rotations, 0, 2000) == 1 and hits(learned - rotations, 100, 200) < 0.02
    assert (rotations**2).sum() > 0.5 * (learned**2).sum()
    logits = table[:100] @ learned @ table[:100].T
    assert np.ptp(np.diagonal(logits, 3)) > 0.4 * np.ptp(logits)


def pair(angle):
    return np.array([np.sin(angle), np.cos(angle)])


def textbook_rotation(offset, d_model, base):
    blocks = [np.array([[np.cos(t), -np.sin(t)], [np.sin(t), np.cos(t)]])
              for t in offset / base ** (np.arange(0, d_model, 2) / d_model)]
    matrix = np.zeros((d_model, d_model))
    for i, block in enumerate(blocks):
        matrix[2 * i:2 * i + 2, 2 * i:2 * i + 2] = block
    return matrix


def half_layout_matrix(offset, d_model, base):
    order = np.r_[0:d_model:2, 1:d_model:2]
    return shift_matrix(offset, d_model, base).numpy()[np.ix_(order, order)]


@pytest.mark.parametrize("exercise, answer, words", [
    (lesson.check_shift_matrix, lambda k, d, b: shift_matrix(k, d, b).numpy(), "library's shift_matrix"),
    (lesson.check_shift_matrix, textbook_rotation, "k positions back"),
    (lesson.check_shift_matrix, half_layout_matrix, "all sines first"),
    (lesson.check_shift_matrix, lambda k, d, b: shift_matrix(k, d, 1.0).numpy(), "its own frequency"),
    (lesson.check_shift_matrix, lambda k, d, b: shift_matrix(k, d, 1 / b).numpy(), "MINUS"),
    (lesson.check_shift_matrix, lambda k, d, b: np.eye(3), "shape"),
    (lesson.check_compose, lambda p, k: (p + k), "do not add"),
    (lesson.check_compose, lambda p, k: lesson._composed(p, np.where(np.arange(len(k)) % 2, k, -k)), "p - k"),
    (lesson.check_offset, lambda u, v, w: np.arctan2(v[0] * u[1] - v[1] * u[0], v @ u) / w, "its sign"),
    (lesson.check_offset, lambda u, v, w: np.arccos(np.clip(u[0] * v[0] + u[1] * v[1], -1, 1)) / w, "sign is lost"),
    (lesson.check_offset, lambda u, v, w: (np.angle(v[1] + 1j * v[0]) - np.angle(u[1] + 1j * u[0])) / w, "whole turn"),
    (lesson.check_projection, lambda k, d: shift_matrix(-k, d).numpy(), "direction"),
    (lesson.check_projection, lambda k, d: shift_matrix(k, d).numpy(), "p - offset"),
])
def test_verdicts(exercise, answer, words):
    assert words in exercise(answer).message


def test_offset_probes_tell_the_folded_angles_apart():
    right = lesson.check_offset.right
    assert [round(right(*probe)) for probe in lesson.check_offset.probes] == [5, -5, 250]
    assert right(pair(3.0), pair(3.5), 0.1) == pytest.approx(5)
