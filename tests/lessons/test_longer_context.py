"""Lesson 07: what its text states in numbers, the small model over several seeds, the data its pictures draw."""
import math

import numpy as np
import pytest
import torch

from posenc_lib import DynamicNTK, LinearScaling, Llama3, NTKAware, Rotary, YaRN, attend, frequencies
from posenc_lib.course.lessons import longer_context as lesson


def turns_of(dim, base, original):
    return [original / (2 * math.pi * base ** (2 * i / dim)) for i in range(dim // 2)]


@pytest.mark.parametrize("dim, base, original, slow", [
    (128, 1e4, 4096, 18), (128, 1e6, 32768, 24), (64, 5e5, 8192, 14), (128, 5e5, 8192, 29)])
def test_pairs_without_a_full_turn(dim, base, original, slow):
    turns = turns_of(dim, base, original)
    assert sum(n < 1 for n in turns) == slow
    assert np.allclose(lesson.turns(frequencies(dim, base), original), turns)


def test_numbers_of_llama_2():
    turns = turns_of(128, 1e4, 4096)
    assert round(turns[0]) == 652 and turns[45] > 1 > turns[46] and round(360 * turns[63]) == 27
    old = frequencies(128)
    assert NTKAware(4).frequencies(128)[10] / old[10] == pytest.approx(0.80, abs=0.005)
    assert old[-1] / DynamicNTK(4, 4096).frequencies(128, length=16384)[-1] == pytest.approx(13)


def test_code_llamas_base_is_ntk_aware_with_factor_93():
    assert 100 ** (126 / 128) == pytest.approx(93, abs=0.1)
    assert torch.allclose(NTKAware(100 ** (126 / 128)).frequencies(128), frequencies(128, 1e6))


def test_softmax_over_more_keys():
    factor = 0.1 * math.log(64) + 1
    for margin, keys, shown in ((8, 64, 0.979), (8, 4096, 0.421), (8 * factor**2, 4096, 0.9996)):
        logits = torch.zeros(keys, dtype=torch.float64)
        logits[0] = margin
        assert logits.softmax(0)[0].item() == pytest.approx(shown, abs=5e-4)
    assert (0.1 * math.log(40) + 1) ** 2 == pytest.approx(1.874, abs=5e-4)
    assert YaRN(4, 2048).attention_factor ** 2 == pytest.approx(1.296, abs=5e-4)


# ---- the small model

STRETCHED = {"none": None, "interpolation": LinearScaling(4), "NTK-aware": NTKAware(4),
             "dynamic NTK": DynamicNTK(4, 64), "YaRN": YaRN(4, 64), "Llama 3": Llama3(4, 64)}


@pytest.fixture(scope="module", params=range(3))
def reader(request):
    torch.manual_seed(request.param)
    return lesson.train(lesson.Reader(), seed=request.param)


def test_reader_is_rope_attention(reader):
    tokens, _ = lesson.texts(3, 40, torch.Generator().manual_seed(1))
    q = reader.query[None, :, None].expand(3, 2, 40, lesson.HEAD_DIM)
    k = torch.stack([torch.stack([reader.key[kind] for kind in text], dim=1) for text in tokens.tolist()])
    for rule in STRETCHED.values():
        _, weights = attend(q, k, k, Rotary(lesson.HEAD_DIM, scaling=rule), return_weights=True)
        assert torch.allclose(reader(tokens, rule).softmax(-1), weights[:, :, -1], atol=1e-5)


def test_texts_and_their_targets():
    tokens, target = lesson.texts(50, 64, torch.Generator().manual_seed(0))
    assert (tokens.sum(1) == lesson.MARKS).all() and (target[:, 0] == 60).all()
    for text, (_, newest) in zip(tokens.tolist(), target.tolist()):
        assert text[newest] == 1 and sum(text[newest + 1:]) == 0


def test_reader_keeps_the_margins_that_the_lesson_prints(reader):
    short = {name: lesson.accuracy(reader, rule, 64) for name, rule in STRETCHED.items()}
    long = {name: lesson.accuracy(reader, rule, 256) for name, rule in STRETCHED.items()}
    assert min(short["none"]) > 0.97 and short["none"] == short["dynamic NTK"]
    assert all(long[name][0] > 0.98 for name in STRETCHED if name != "interpolation")
    assert long["interpolation"][0] == short["interpolation"][0] == 0
    newest = {name: accuracy[1] for name, accuracy in long.items()}
    assert 0.25 <= newest["none"] <= 0.45 <= newest["NTK-aware"] <= 0.70
    assert 0.63 < newest["dynamic NTK"] < 0.85
    assert newest["dynamic NTK"] > newest["NTK-aware"] + 0.05 and newest["NTK-aware"] > newest["none"] + 0.05
    assert newest["interpolation"] > 0.98 and min(newest["YaRN"], newest["Llama 3"]) > 0.84


def test_interpolation_moves_the_peak_to_four_times_the_distance(reader):
    peaks = {name: lesson.score_curves(reader, rule)[0].argmax() for name, rule in STRETCHED.items()}
    assert peaks.pop("interpolation") == 12 and set(peaks.values()) == {3}


def test_further_training(reader):
    tuned = {rule: lesson.train(reader, rule, length=256, steps=50, batch=32) for rule in (None, YaRN(4, 64))}
    none, yarn = (lesson.accuracy(model, rule, 256) for rule, model in tuned.items())
    assert min(yarn) > 0.985 and none[0] == 1 and 0.87 < none[1] < 0.95
    assert lesson.accuracy(reader, YaRN(4, 64), 256)[1] < yarn[1], "train returned a copy"
    for steps, low, high in ((50, 0, 0.1), (200, 0.97, 1)):
        tuned = lesson.train(reader, LinearScaling(4), length=256, steps=steps, batch=32)
        back, newest = lesson.accuracy(tuned, LinearScaling(4), 256)
        assert low <= back <= high and newest > 0.97


def test_nearer_marks_score_higher_down_to_about_50(reader):
    newest = lesson.score_curves(reader)[1]
    assert (np.diff(newest[1:51]) < 0).all() and newest[64:].max() > newest[50]
    assert (newest[64:].max() > newest[40]) and 1 - 0.75**lesson.MARKS == pytest.approx(0.684, abs=5e-4)


def test_score_curves_are_sums_of_waves(reader):
    q, keys = reader.query.detach().double().numpy(), reader.key.detach().double().numpy()
    q, keys = (a[..., ::2] + 1j * a[..., 1::2] for a in (q, keys))
    turn = np.exp(-1j * np.arange(256)[:, None] * frequencies(lesson.HEAD_DIM).numpy())
    for curve, head, kind in zip(lesson.score_curves(reader), (0, 1), (0, 1)):
        waves = (q[head].conj() * keys[kind, head] * turn).real.sum(-1) / lesson.HEAD_DIM**0.5
        assert np.allclose(curve, waves, atol=1e-4)


# ---- the explorer

@pytest.mark.parametrize("values, beyond", [
    ({"rule": "none"}, 18), ({"rule": "interpolation"}, 0), ({"rule": "NTK-aware"}, 17), ({"rule": "YaRN"}, 0),
    ({"rule": "Llama 3"}, 0), ({"rule": "dynamic NTK"}, 0), ({"factor": 6}, 3), ({"factor": 7}, 0),
    ({"rule": "YaRN", "original_length": 64}, 47)])
def test_pairs_that_reach_unseen_angles(values, beyond):
    scene = lesson.StretchScene()
    values = {name: control.value for name, control in scene.controls.items()} | values
    scene.frame(**values)
    assert len(scene.beyond.get_xdata()) == beyond
    assert f"{beyond} of them have reached" in scene.describe(**values)


def test_explorer_draws_the_rule():
    scene = lesson.StretchScene()
    values = dict(rule="Llama 3", factor=8, base=5e5, original_length=8192, position=1e5, head_dim=64)
    scene.frame(**values)
    x, ratio = scene.edit.get_data()
    assert np.allclose(x, 2 * np.arange(32) / 64)
    assert np.allclose(ratio, Llama3(8, 8192).frequencies(64, 5e5) / frequencies(64, 5e5))
    assert np.allclose(scene.seen.get_ydata(), turns_of(64, 5e5, 8192))
    hand = scene.hands[0].get_xydata()[1]
    assert np.allclose(hand, [np.sin(100_000), np.cos(100_000)])


def test_dynamic_ntk_bends_at_the_original_length():
    scene = lesson.StretchScene()
    values = {name: control.value for name, control in scene.controls.items()} | {"rule": "dynamic NTK"}
    for position, bent in ((1000, False), (4095, False), (4096, True), (20000, True)):
        plain, new, *_ = scene.numbers(**values | {"position": float(position)})
        assert (not np.array_equal(plain, new)) == bent


# ---- answers that the lesson does not list

@pytest.mark.parametrize("check, answer", [
    (lesson.check_seen, 23), (lesson.check_seen, 25), (lesson.check_logits, 1.9), (lesson.check_config, [15, 14, 3]),
    (lesson.check_config, [18, 0, 14]), (lesson.check_base, lambda base, factor, dim: base * factor ** (dim / 2)),
    (lesson.check_ratio, lambda turns, factor, slow=1, fast=4: np.ones(len(turns)))])
def test_other_wrong_answers(check, answer):
    assert check(answer).status == "not yet"


def test_published_llama_3_2():
    rotary = Rotary.from_config(lesson.LLAMA_3_2_1B)
    assert (rotary.head_dim, rotary.base, rotary.layout) == (64, 5e5, "half")
    turns = turns_of(64, 5e5, 8192)
    bands = [sum(n >= 4 for n in turns), sum(1 < n < 4 for n in turns), sum(n <= 1 for n in turns)]
    assert lesson.check_config(bands).status == "correct"
