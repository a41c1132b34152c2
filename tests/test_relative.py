"""Doors 4 and 5: Shaw, Transformer-XL, DeBERTa and Huang against their equations, stored values and published code."""
import pytest
import torch

from posenc_lib import DeBERTa, Huang, Shaw, TransformerXL, attend, deberta_bucket, relative
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

CLIP = 3


def clip(offset):
    return min(max(offset, -CLIP), CLIP) + CLIP


def head(h):
    return slice(h * HEAD_DIM, (h + 1) * HEAD_DIM)


class ShawEquation(Equation):
    """Shaw et al. 2018, equations 3 and 4."""

    def __init__(self, method):
        self.key_table, self.value_table = method.key_table, method.value_table

    def logit(self, h, q, k, i, j):
        return q @ (k + self.key_table[clip(j - i)]) / HEAD_DIM ** 0.5

    def value(self, h, v, i, j):
        return v + self.value_table[clip(j - i)]


class TransformerXLEquation(Equation):
    """Dai et al. 2019, section 3.3: four terms, with R_{i-j} written out."""

    def __init__(self, method):
        self.method = method

    def logit(self, h, q, k, i, j):
        m = self.method
        distance = (i - j) * 10000.0 ** (-torch.arange(0, D_MODEL, 2, dtype=torch.float64) / D_MODEL)
        r = m.position_projection.weight[head(h)] @ torch.cat((distance.sin(), distance.cos()))
        return (q @ k + q @ r + m.u[h] @ k + m.v[h] @ r) / HEAD_DIM ** 0.5


class DeBERTaEquation(Equation):
    """He et al. 2021, equations 2 to 4."""

    def __init__(self, method):
        self.method = method

    def row(self, i, j):
        distance, span = i - j, self.method.max_offset
        if self.method.num_buckets is not None:
            span = self.method.num_buckets
            distance = int(deberta_bucket([distance], span, self.method.max_offset))
        return 0 if distance <= -span else 2 * span - 1 if distance >= span else distance + span

    def logit(self, h, q, k, i, j):
        m = self.method
        key_row = m.key_projection.weight[head(h)] @ m.table[self.row(i, j)]
        row = self.row(j, i) if m.p2c_index == "paper" else self.row(i, j)
        query_row = m.query_projection.weight[head(h)] @ m.table[row]
        return (q @ k + q @ key_row + k @ query_row) / (3 * HEAD_DIM) ** 0.5


class HuangEquation(Equation):
    """Huang et al. 2020: the four methods."""

    def __init__(self, method):
        self.variant, self.table = method.variant, method.table

    def logit(self, h, q, k, i, j):
        a = self.table[min(abs(j - i), CLIP) if self.variant == 1 else clip(j - i)]
        logit = {1: lambda: (q @ k) * a, 2: lambda: (q @ k) * a, 3: lambda: (q * k * a).sum(),
                 4: lambda: (q + a) @ (k + a) - a @ a}[self.variant]()
        return logit / HEAD_DIM ** 0.5


def shaw(library):
    method = randomized(library.Shaw(HEAD_DIM, CLIP))
    return method, ShawEquation(method)


def shaw_in_blocks(library):
    """Two queries at a time, as long sequences are worked through."""
    library._QUERIES_AT_A_TIME = 2
    return shaw(library)


def transformer_xl(library):
    method = randomized(library.TransformerXL(D_MODEL, HEADS))
    return method, TransformerXLEquation(method)


def deberta(library, num_buckets=None, p2c_index="paper"):
    max_offset = 3 if num_buckets is None else 9
    method = randomized(library.DeBERTa(D_MODEL, HEADS, max_offset, num_buckets, p2c_index))
    return method, DeBERTaEquation(method)


def huang(variant):
    def build(library):
        method = randomized(library.Huang(HEAD_DIM, CLIP, variant))
        return method, HuangEquation(method)
    return build


CASES = {
    "Shaw": shaw, "Transformer-XL": transformer_xl,
    "DeBERTa": deberta, "DeBERTa, buckets": lambda library: deberta(library, 6),
    "DeBERTa, code": lambda library: deberta(library, None, "code"),
    "DeBERTa, buckets, code": lambda library: deberta(library, 6, "code"),
    "Huang 1": huang(1), "Huang 2": huang(2), "Huang 3": huang(3), "Huang 4": huang(4),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_its_equation(case):
    check(*CASES[case](relative))


def test_shaw_in_blocks_equals_its_equation(monkeypatch):
    monkeypatch.setattr(relative, "_QUERIES_AT_A_TIME", 2)
    check(*shaw(relative))


@pytest.mark.parametrize("max_offset", [0, 1, 200])
def test_the_band_of_shaw_at_any_width(max_offset, monkeypatch):
    """In place by blocks without gradients, in one go with them: the same logits."""
    monkeypatch.setattr(relative, "_QUERIES_AT_A_TIME", 7)
    method = randomized(Shaw(HEAD_DIM, max_offset))
    for q_range, k_range in (((0, 50), (0, 50)), ((40, 50), (0, 50)), ((0, 30), (90, 110)), ((300, 330), (0, 9))):
        q_positions, k_positions = torch.arange(*q_range), torch.arange(*k_range)
        q = torch.randn(2, HEADS, len(q_positions), HEAD_DIM, dtype=torch.float64)
        k = torch.randn(2, HEADS, len(k_positions), HEAD_DIM, dtype=torch.float64)
        with_gradients = method.logits(q, k, q_positions, k_positions)
        with torch.no_grad():
            torch.testing.assert_close(method.logits(q, k, q_positions, k_positions), with_gradients)


@pytest.mark.parametrize("case", CASES)
def test_the_check_sees_forgotten_positions_and_masks(case):
    method, equation = CASES[case](relative)
    for wrong in (IgnoresKeyPositions(method), IgnoresQueryPositions(method)):
        with pytest.raises(AssertionError):
            check(wrong, equation)
    for wrong in (attend_ignoring_the_mask, attend_ignoring_causality):
        with pytest.raises(AssertionError):
            check(method, equation, attend=wrong)


@pytest.mark.parametrize("case, old, new", [
    ("Shaw", "_times_shifted_keys(q, k, table, q_positions, k_positions)\n\n    def values",
     "_times_shifted_keys(q, k, -table, q_positions, k_positions)\n\n    def values"),
    ("Shaw", "+ _pick(q @ table.t(), rows)", ""), ("Shaw", "(k + table[0])", "k"),
    ("Shaw", "weights @ v + by_row", "weights @ v - by_row"),
    ("Shaw", "weights @ v + by_row.to(weights.dtype) @ table", "weights @ v"),
    ("Shaw", "table = checked_table(self.value_table", "table = checked_table(self.key_table"),
    ("Shaw", "rows = clip_offsets(relative_offsets(q_positions, k_positions), max_offset)",
     "rows = clip_offsets(-relative_offsets(q_positions, k_positions), max_offset)"),
    ("Shaw", "more = (table - table[0])", "more = table"),
    ("Shaw", "clip_offsets(relative_offsets(q_positions[..., queries]",
     "clip_offsets(-relative_offsets(q_positions[..., queries]"),
    ("in blocks", "queries, far:] += by_row[..., -1:]", "queries, far:] += by_row[..., -2:-1]"),
    ("in blocks", "queries, far:] += by_row[..., -1:]", "queries, far:] -= by_row[..., -1:]"),
    ("in blocks", "cached + start - max_offset", "cached + start - max_offset + 2"),
    ("in blocks", "cached + stop - 1 + max_offset", "cached + start + max_offset"),
    ("in blocks", "if consecutive else 0 ", "if not consecutive else 0 "),
    ("Transformer-XL", "along_sin * sin_i + along_cos * cos_i", "along_sin * sin_i - along_cos * cos_i"),
    ("Transformer-XL", "along_cos * sin_i - along_sin * cos_i", "along_sin * cos_i - along_cos * sin_i"),
    ("Transformer-XL", "(q + u) @ k", "q @ k"), ("Transformer-XL", "(q + v) @ weight", "q @ weight"),
    ("Transformer-XL", "+ turned @ encoded.transpose(-2, -1)", ""),
    ("Transformer-XL", "cat((sin_j, cos_j)", "cat((cos_j, sin_j)"),
    ("DeBERTa", "+ content_to_position", "- content_to_position"), ("DeBERTa", "+ position_to_content", ""),
    ("DeBERTa", "(3 * self.head_dim)", "(2 * self.head_dim)"),
    ("DeBERTa", "ij = -relative_offsets", "ij = relative_offsets"),
    ("DeBERTa", 'ji = -ij if self.p2c_index == "paper" else ij', "ji = ij"),
    ("DeBERTa, code", 'ji = -ij if self.p2c_index == "paper" else ij', "ji = -ij"),
    ("DeBERTa", "(self.key_projection, self.query_projection)", "(self.query_projection, self.key_projection)"),
    ("DeBERTa", "2 * self.span - 1)", "2 * self.span - 2)"),
    ("DeBERTa, buckets", "distance = deberta_bucket(distance, self.num_buckets, self.max_offset)", "pass"),
    ("Huang 1", "offsets.abs().clamp(max=self.max_offset)", "offsets.clamp(0, self.max_offset)"),
    ("Huang 2", "table[_for_heads(rows)]", "table.flip(0)[_for_heads(rows)]"),
    ("Huang 3", "(q * vector) @ k", "q @ k"), ("Huang 3", "rows == row", "rows == row + 1"),
    ("Huang 4", "logits + _pick(by_row, rows", "logits - _pick(by_row, rows"),
    ("Huang 4", "_pick(by_row, rows.transpose(-2, -1))", "_pick(by_row, rows.transpose(-2, -1).flip(-1))"),
    ("Huang 4", "_times_shifted_keys(q, k, table, q_positions, k_positions)\n        by",
     "_times_shifted_keys(q, k, 0 * table, q_positions, k_positions)\n        by"),
])
def test_the_check_sees_a_wrong_method(mutant, case, old, new):
    method, equation = (CASES | {"in blocks": shaw_in_blocks})[case](mutant("relative", old, new))
    with pytest.raises(AssertionError):
        check(method, equation)


@pytest.mark.parametrize("case", CASES)
def test_state(case):
    check_state(CASES[case](relative)[0])


@pytest.mark.parametrize("case", ["Shaw", "Transformer-XL", "DeBERTa, buckets", "Huang 1", "Huang 3", "Huang 4"])
def test_compiles(case):
    check_compiled(CASES[case](relative)[0])


def test_shaw_sums_small_weights_in_float32():
    """1 / 4096 vanishes beside 1 in bfloat16, so 4096 of them would not add up."""
    method = Shaw(HEAD_DIM, 1).to(torch.bfloat16)
    torch.nn.init.ones_(method.value_table)
    q, v = torch.zeros(2, 1, 1, 4096, HEAD_DIM, dtype=torch.bfloat16)
    out = attend(q[:, :, -1:], q, v, method)
    assert (out.float() - 1).abs().max() < 0.01


def test_transformer_xl_far_from_the_start():
    """Moving everything by a million changes float32 logits by rounding only."""
    method = TransformerXL(32, 2)
    q, k = torch.randn(2, 1, 2, 50, 16)
    near, far = (method.logits(q, k, p, p) for p in (torch.arange(50), torch.arange(50) + 10**6))
    assert (near - far).abs().max() < 2e-5


def float64(values):
    return torch.tensor(values, dtype=torch.float64)


def batch_of_one(given, *names):
    return [float64(given[name])[None, None] for name in names]


def load(method, **tables):
    method = method.double()
    method.load_state_dict({name.replace("__", "."): float64(value) for name, value in tables.items()})
    return method


def close(ours, expected):
    torch.testing.assert_close(ours.squeeze(0).squeeze(0), float64(expected), rtol=0, atol=2e-15)


def test_shaw_matches_the_stored_values(golden):
    given, expected = golden["shaw"]["k2_L4"]["inputs"], golden["shaw"]["k2_L4"]["expected"]
    method = load(Shaw(2, 2), key_table=given["aK"], value_table=given["aV"])
    q, k, v = batch_of_one(given, "q", "k", "v")
    close(method.logits(q, k, torch.arange(4), torch.arange(4)), expected["logits"])
    out, weights = attend(q, k, v, method, return_weights=True)
    close(weights, expected["attn"])
    close(out, expected["out"])
    torch.testing.assert_close(attend(q[:, :, -1:], k, v, method)[0, 0], float64(expected["out_last"]))


def test_transformer_xl_matches_the_stored_values(golden):
    case = golden["transformer_xl"]["q2_mem1"]
    given, expected = case["inputs"], case["expected"]
    q, k = batch_of_one(given, "q", "k")
    identity = torch.eye(4).tolist()
    method = load(TransformerXL(4, 1), u=[given["u"]], v=[given["v"]], position_projection__weight=identity)
    logits = method.logits(q, k, torch.arange(1, 3), torch.arange(3))
    close(logits, ((float64(expected["AC"]) + float64(expected["BD_true_all_distances"])) / 2).tolist())
    for ours, theirs in zip(logits[0, 0].tolist(), expected["score_scaled_causal"]):
        assert all(t is None or abs(o - t) < 2e-15 for o, t in zip(ours, theirs))


def test_deberta_matches_the_stored_values(golden):
    case = golden["deberta"]["scores_L3_d2"]
    given, expected = case["inputs"], case["expected"]
    q, k = batch_of_one(given, "Qc", "Kc")
    for p2c_index in ("paper", "code"):
        method = DeBERTa(4, 2, 2, p2c_index=p2c_index).double()          # head 0 is the case: table = [Kr | Qr], and
        table = torch.cat((float64(given["Kr"]), float64(given["Qr"])), dim=1)      # each projection picks its half
        pick = torch.eye(4, dtype=torch.float64)
        method.load_state_dict({"table": table, "key_projection.weight": pick,
                                "query_projection.weight": pick.roll(2, 0)})
        logits = method.logits(q.expand(1, 2, 3, 2), k.expand(1, 2, 3, 2), torch.arange(3), torch.arange(3))
        close(logits[:, 0], expected[f"score_{p2c_index}"])


def test_huang_matches_the_stored_values(golden):
    case = golden["huang2020"]["M1_M4_L3_d2"]
    given, expected = case["inputs"], case["expected"]
    q, k = batch_of_one(given, "q", "k")
    positions = torch.arange(3)
    for variant, table, key in ((1, "a_abs", "M1"), (2, "a_signed", "M2"), (3, "a_vec", "M3"),
                                (4, "a_vec", "M4_index_j_minus_i")):
        method = load(Huang(2, 2, variant), table=given[table])
        close(method.logits(q, k, positions, positions), expected[key])
    reversed_offsets = load(Huang(2, 2, 4), table=given["a_vec"][::-1])  # BERT's relative_key_query counts i - j
    close(reversed_offsets.logits(q, k, positions, positions), expected["M4_hf_index_i_minus_j"])


def test_shaw_attends_like_wav2vec2_bert():
    """Its "relative_key" is Shaw's keys, clipped at the same distance on both sides."""
    their = pytest.importorskip("transformers.models.wav2vec2_bert.modeling_wav2vec2_bert")
    config = their.Wav2Vec2BertConfig(hidden_size=24, num_attention_heads=3, position_embeddings_type="relative_key",
                                      left_max_position_embeddings=5, right_max_position_embeddings=5,
                                      attention_dropout=0.0, attn_implementation="eager")
    theirs = their.Wav2Vec2BertSelfAttention(config).eval()
    torch.nn.init.normal_(theirs.distance_embedding.weight)
    method = Shaw(8, 5)
    method.load_state_dict({"key_table": theirs.distance_embedding.weight, "value_table": torch.randn(11, 8)})
    x = torch.randn(2, 20, 24)
    q, k = (project(x).view(2, 20, 3, 8).transpose(1, 2) for project in (theirs.linear_q, theirs.linear_k))
    torch.testing.assert_close(attend(q, k, k, method, return_weights=True)[1], theirs(x)[1], rtol=1e-4, atol=1e-6)


def test_transformer_xl_attends_like_xlnet():
    """XLNet's attention core is Transformer-XL's, with a relative shift over all distances and one memory."""
    their = pytest.importorskip("transformers.models.xlnet.modeling_xlnet")
    theirs = their.XLNetRelativeAttention(their.XLNetConfig(d_model=12, n_head=3, d_inner=8, n_layer=1, dropout=0.0))
    method = TransformerXL(12, 3)
    for parameter in method.parameters():
        torch.nn.init.normal_(parameter)
    theirs.r_w_bias, theirs.r_r_bias = method.u, method.v
    q_len, k_len = 5, 8
    distances = torch.arange(k_len, -q_len, -1)
    angle = distances[:, None] * 10000.0 ** (-torch.arange(0, 12, 2) / 12)
    encoding = torch.cat((angle.sin(), angle.cos()), dim=-1)
    q, k, v = torch.randn(1, 3, q_len, 4), torch.randn(1, 3, k_len, 4), torch.randn(1, 3, k_len, 4)
    length_first = [x.permute(2, 0, 1, 3) for x in (q, k, v)]
    r = method.position_projection(encoding).view(-1, 1, 3, 4)
    _, weights = theirs.rel_attn_core(*length_first, r, output_attentions=True)                # (q, k, batch, heads)
    torch.testing.assert_close(attend(q, k, v, method, return_weights=True)[1], weights.permute(2, 3, 0, 1))


@pytest.mark.parametrize("num_buckets", [None, 8])
def test_deberta_attends_like_transformers(num_buckets):
    their = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    config = their.DebertaV2Config(hidden_size=12, num_attention_heads=3, relative_attention=True,
                                   pos_att_type=["c2p", "p2c"], position_buckets=num_buckets or -1,
                                   max_relative_positions=30, share_att_key=False)
    theirs = their.DisentangledSelfAttention(config).eval()
    method = DeBERTa(12, 3, 30, num_buckets, p2c_index="code")
    torch.nn.init.normal_(method.table)
    for name in ("key", "query"):
        weight = torch.nn.init.normal_(getattr(method, f"{name}_projection").weight)
        getattr(theirs, f"pos_{name}_proj").load_state_dict({"weight": weight, "bias": torch.zeros(12)})
    x = torch.randn(2, 28, 12)
    q, k, v = (project(x).view(2, 28, 3, 4).transpose(1, 2)
               for project in (theirs.query_proj, theirs.key_proj, theirs.value_proj))
    out, weights = theirs(x, torch.ones(2, 1, 28, 28), output_attentions=True, rel_embeddings=method.table)
    ours, our_weights = attend(q, k, v, method, return_weights=True)
    torch.testing.assert_close(our_weights, weights.view(2, 3, 28, 28), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(ours.transpose(1, 2).flatten(2), out, rtol=1e-4, atol=1e-5)


def with_table(method, name="table"):
    setattr(method, name, torch.nn.Parameter(torch.randn(5, 3)))
    return method


QKV = torch.zeros(3, 1, 2, 5, HEAD_DIM)


@pytest.mark.parametrize("call, error, message", [
    (lambda: Shaw(4, -1), ValueError, "max_offset must be at least 0, got -1"),
    (lambda: Shaw(4, 2.0), TypeError, "max_offset must be an int, got 2.0"),
    (lambda: Shaw(0, 2), ValueError, "head_dim must be at least 1, got 0"),
    (lambda: attend(*QKV, Shaw(8, 2)), ValueError, r"vectors of head_dim = 8, got q of shape \(1, 2, 5, 4\)"),
    (lambda: attend(*QKV[:2], torch.zeros(1, 2, 5, 3), Shaw(4, 2)), ValueError, "head_dim = 4, got v of shape"),
    (lambda: attend(*QKV, with_table(Shaw(4, 2), "key_table")), ValueError,
     r"the table must have shape \(5, 4\), got \(5, 3\)"),
    (lambda: attend(*QKV, with_table(Shaw(4, 2), "value_table")), ValueError, r"shape \(5, 4\), got \(5, 3\)"),
    (lambda: TransformerXL(9, 3), ValueError, r"must be even: the encoding needs \(sin, cos\) pairs, got 9"),
    (lambda: TransformerXL(8, 0), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: TransformerXL(8, 3), ValueError, "d_model must be divisible by num_heads, got 8 and 3"),
    (lambda: TransformerXL(8, 2, base=-1.0), ValueError, "base must be a finite number greater than 0"),
    (lambda: attend(*QKV, TransformerXL(16, 4)), ValueError, r"4 heads of head_dim 4, got q of shape \(1, 2, 5, 4\)"),
    (lambda: attend(*QKV, with_table(TransformerXL(8, 2), "u")), ValueError, r"must have shape \(2, 4\), got \(5, 3\)"),
    (lambda: DeBERTa(8, 2, 0), ValueError, "max_offset must be at least 1, got 0"),
    (lambda: DeBERTa(8, 0, 3), ValueError, "num_heads must be at least 1, got 0"),
    (lambda: DeBERTa(8, 3, 3), ValueError, "d_model must be divisible by num_heads, got 8 and 3"),
    (lambda: DeBERTa(8, 2, 30, 7), ValueError, "num_buckets must be even: .* got 7"),
    (lambda: DeBERTa(8, 2, 5, 8), ValueError, "max_distance must be greater than 5, .* got 5"),
    (lambda: DeBERTa(8, 2, 5, p2c_index="both"), ValueError, "must be \"paper\" .* or \"code\" .* got 'both'"),
    (lambda: attend(*QKV, DeBERTa(8, 1, 3)), ValueError, r"1 heads of head_dim 8, got q of shape \(1, 2, 5, 4\)"),
    (lambda: attend(*QKV, with_table(DeBERTa(8, 2, 3))), ValueError, r"must have shape \(6, 8\), got \(5, 3\)"),
    (lambda: Huang(4, -1), ValueError, "max_offset must be at least 0, got -1"),
    (lambda: Huang(4, 2, 5), ValueError, "variant must be 1, 2, 3 or 4, got 5"),
    (lambda: attend(*QKV, Huang(8, 2)), ValueError, "vectors of head_dim = 8, got q of shape"),
    (lambda: attend(*QKV, with_table(Huang(4, 2, 1))), ValueError, r"must have shape \(3,\), got \(5, 3\)"),
])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()
