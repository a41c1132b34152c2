"""Lesson 09: what its text states in numbers, the data its pictures draw, and independent wrong answers."""
import math

import numpy as np
import pytest
import torch

from posenc_lib import TUPE, ALiBi, DeBERTa, Huang, T5Bias, TransformerXL, alibi_slopes, relative_offsets, t5_bucket
from posenc_lib.course.lessons import relative_bias as lesson

DEFAULTS = {name: control.value for name, control in lesson.BiasScene.controls.items()}


def settings(**changed):
    values = DEFAULTS | changed
    values.pop("position")
    return {"name" if name == "method" else name: value for name, value in values.items()}


# ---- the numbers of the text

def test_where_the_last_buckets_begin():
    encoder, decoder = t5_bucket(-torch.arange(500)), t5_bucket(-torch.arange(500), bidirectional=False)
    assert (encoder == 15).nonzero()[0].item() == 91 and (decoder == 31).nonzero()[0].item() == 113
    assert encoder[:8].tolist() == list(range(8)) and decoder[:16].tolist() == list(range(16))
    assert [(encoder == n).nonzero().flatten()[[0, -1]].tolist() for n in (8, 9, 10)] == [[8, 11], [12, 15], [16, 22]]
    used = t5_bucket(torch.arange(-500, 500)).unique().tolist()
    assert sorted(set(range(32)) - set(used)) == [16]


def test_parameters_of_a_layer_of_width_512():
    count = {name: sum(p.numel() for p in method.parameters()) for name, method in {
        "xl": TransformerXL(512, 8), "t5": T5Bias(8), "alibi": ALiBi(8), "tupe": TUPE(512, 8, 512),
        "deberta": DeBERTa(512, 8, 512, 256), **{n: Huang(64, 64, n) for n in (1, 2, 3, 4)}}.items()}
    assert count == {"xl": 512**2 + 2 * 512, "t5": 32 * 8, "alibi": 0, "tupe": 3 * 512**2 + 16,
                     "deberta": 3 * 512**2, 1: 65, 2: 129, 3: 129 * 64, 4: 129 * 64}


def test_t5_starts_with_logits_of_variance_one():
    torch.manual_seed(1)
    x, y = torch.randn(2, 4000, 64)
    q, k = x @ torch.randn(64, 16) * (64 * 16) ** -0.5, y @ torch.randn(64, 16) * 64**-0.5
    assert (q @ k.T).var().item() == pytest.approx(1, abs=0.4)


def test_alibi_beyond_the_training_length():
    assert ALiBi(8).bias(torch.tensor([999]), torch.arange(1000))[0, 0, 0] == -499.5
    assert torch.tensor(-499.5).exp() == 0


@pytest.mark.parametrize("num_heads", [2, 4, 8, 16])
def test_the_last_slope_is_one_256th(num_heads):
    assert alibi_slopes(num_heads)[-1] == 1 / 256


# ---- what the pictures draw

def test_the_table_of_terms_agrees_with_the_library():
    """A method's row is grey in the mixed columns exactly where the library's position part ignores the tokens."""
    kinds = {row[0]: row[1:5] for row in lesson.ROWS}
    for name in ("T5", "ALiBi", "TUPE"):
        assert kinds[name][1] is None and kinds[name][2] is None and kinds[name][3] is not None
    for name in ("DeBERTa", "Huang 4"):
        assert kinds[name][1] and kinds[name][2] and kinds[name][3] is None
    assert all(kinds["Transformer-XL"])
    for name in ("Huang 1, 2", "Huang 3", "RoPE (06)"):
        assert kinds[name][0][0] == lesson.TURNED and not any(kinds[name][1:])
    divisors = {row[0]: row[-1] for row in lesson.ROWS}
    for name, method, factor in (("TUPE", TUPE(16, 2, 9), "2d"), ("DeBERTa", DeBERTa(16, 2, 4), "3d")):
        assert factor in divisors[name] and method.scale == pytest.approx((int(factor[0]) * 8) ** -0.5)


@pytest.mark.parametrize("method", lesson.METHODS)
def test_matrix_is_constant_along_diagonals_unless_absolute(method):
    matrix = lesson.bias_matrix(**settings(method=method, head=3))
    spread = max(np.ptp(np.diagonal(matrix, n)) for n in range(-120, 1))
    assert (spread > 0.1) if method == "TUPE" else (spread < 1e-4)
    assert np.isnan(matrix).any() == (method in lesson.CAUSAL)
    offsets = relative_offsets(torch.arange(128), torch.arange(128)).numpy()
    if method.startswith("ALiBi"):
        seen = ~np.isnan(matrix)
        assert np.allclose(matrix[seen], -(2.0**-3) * np.abs(offsets[seen]))


def test_base_one_makes_transformer_xl_one_wave():
    row = lesson.bias_matrix(**settings(method="Transformer-XL", base=1.0))[64]
    distance = 64 - np.arange(128)
    basis = np.stack([np.ones(128), np.cos(distance), np.sin(distance)], axis=1)
    fitted = basis @ np.linalg.lstsq(basis, row, rcond=None)[0]
    assert np.abs(fitted - row).max() < 1e-4


def test_four_buckets_leave_before_here_and_after():
    row = lesson.bias_matrix(**settings(method="T5 encoder", num_buckets=4))[64]
    assert len(set(row[:64])) == len(set(row[65:])) == 1 and len(set(row)) == 3
    assert len(set(lesson.bias_matrix(**settings(method="T5 encoder"))[0][1:])) == 15


def test_weights_are_a_softmax_over_the_visible_keys():
    row = np.array([0.0, 1.0, np.nan])
    e = math.e
    assert np.allclose(lesson.row_weights(row), [1 / (1 + e), e / (1 + e), 0])


def test_the_picture_of_the_shift_tells_distances():
    x = np.tile(np.arange(5.0)[::-1], (3, 1))
    assert lesson._shift(x).tolist() == [[2, 1, 0, 0, 0], [3, 2, 1, 0, 0], [4, 3, 2, 1, 0]]
    assert lesson._shift(x, keep=False).tolist() == [[2, 1, 0, 0, 4], [3, 2, 1, 0, 0], [4, 3, 2, 1, 0]]


# ---- answers from outside

def test_bucket_check_accepts_the_library_and_a_loop():
    def by_the_library(offsets, num_buckets, max_distance):
        return t5_bucket(torch.tensor(offsets), num_buckets=num_buckets, max_distance=max_distance)

    def by_a_loop(offsets, num_buckets, max_distance):
        n, out = num_buckets // 2, []
        for r in offsets:
            e, a = n // 2, abs(int(r))
            near = a if a < e else min(e + int(math.log(a / e) / math.log(max_distance / e) * (n - e)), n - 1)
            out.append(near + (n if r > 0 else 0))
        return np.array(out)

    assert lesson.check_bucket(by_the_library).status == lesson.check_bucket(by_a_loop).status == "correct"


def test_slopes_check_accepts_the_library_and_names_the_eight_head_rule():
    assert lesson.check_slopes(alibi_slopes).status == "correct"
    assert "exponents must end at 8" in lesson.check_slopes(lambda n: [0.5 ** (h + 1) for h in range(n)]).message


def test_rows_check_knows_the_published_code():
    def code(i, j, s):
        row = max(0, min(2 * s - 1, i - j + s))
        return row, row

    def by_floats(i, j, s):
        return tuple(float(row) for row in lesson.check_rows.right(i, j, s))

    assert "published code" in lesson.check_rows(code).message
    assert "integers" in lesson.check_rows(by_floats).message


def test_shift_check_accepts_indexing():
    def by_index(x):
        queries, keys = x.shape
        return np.array([[x[i, j + queries - 1 - i] if j <= i + keys - queries else 0 for j in range(keys)]
                         for i in range(queries)])

    assert lesson.check_shift(by_index).status == "correct"


def test_four_terms_check_sees_a_lost_projection_and_a_swap():
    def swapped(w, p, W_Q, W_K):
        return [(a @ W_Q) @ (b @ W_K).T for a, b in ((w, w), (p, w), (w, p), (p, p))]

    def right(w, p, W_Q, W_K):
        return [(a @ W_Q) @ (b @ W_K).T for a, b in ((w, w), (w, p), (p, w), (p, p))]

    assert lesson.check_four_terms(right).status == "correct"
    assert "changed places" in lesson.check_four_terms(swapped).message
