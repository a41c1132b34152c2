"""The scaling rules, the reading of published configs, and both against the package `transformers`."""
import importlib
import inspect
import math

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from posenc_lib import DynamicNTK, LinearScaling, Llama3, NTKAware, Rotary, YaRN, configs, frequencies, rotate, scaling

STRETCHING = [LinearScaling, NTKAware, lambda factor: DynamicNTK(factor, 64), lambda factor: YaRN(factor, 64),
              lambda factor: Llama3(factor, 64)]
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "rope_theta": 10000.0,
         "max_position_embeddings": 64}


def check_golden(scaling, golden):
    rules = {"linear_factor4": scaling.LinearScaling(4), "ntk_aware_static_alpha4": scaling.NTKAware(4),
             "yarn_d16_s4": scaling.YaRN(4, 2048), "llama3_d16": scaling.Llama3(8, 8192)}
    for name, rule in rules.items():
        case = golden["rope_scaling"][name]
        expected = torch.tensor(case["expected"]["inv_freq"], dtype=torch.float64)
        out = rule.frequencies(case["inputs"]["d"], case["inputs"]["base"])
        torch.testing.assert_close(out, expected, rtol=1e-14, atol=0, msg=name)
        assert rule.attention_factor == pytest.approx(case["expected"]["attention_factor"], rel=1e-15), name


def test_golden_frequencies(golden):
    check_golden(scaling, golden)


@pytest.mark.parametrize("old, new", [
    ("return frequencies(dim, base) / self.factor", "return frequencies(dim, base)"),
    ("/ (dim - 2)", "/ dim"),                                                                      # another new base
    ("turns in (self.beta_fast, self.beta_slow)", "turns in (self.beta_slow, self.beta_fast)"),
    ("math.floor(low), math.ceil(high)", "math.ceil(low), math.floor(high)"),
    ("plain / self.factor * ramp + plain * (1 - ramp)", "plain * ramp + plain / self.factor * (1 - ramp)"),
    ("0.1 * mscale * math.log(self.factor) + 1", "0.1 * mscale * math.log(self.factor)"),
    ("turns = self.original_length * plain / (2 * math.pi)", "turns = self.original_length * plain"),
    ("(self.high_freq_factor - self.low_freq_factor)).clamp", "self.high_freq_factor).clamp"),
])
def test_mutants_are_caught(old, new, mutant, golden):
    with pytest.raises(AssertionError):
        check_golden(mutant("scaling", old, new), golden)


@pytest.mark.parametrize("rule", STRETCHING)
@given(dim=st.integers(2, 64).map(lambda pairs: 2 * pairs), base=st.floats(2, 1e6), factor=st.floats(1, 64))
def test_every_rule_slows_pairs_down_by_at_most_the_factor(rule, dim, base, factor):
    plain = frequencies(dim, base)
    ratio = rule(factor).frequencies(dim, base) / plain
    assert ratio.dtype == torch.float64 and ratio.shape == (dim // 2,)
    assert (ratio <= 1 + 1e-12).all() and (ratio >= (1 - 1e-12) / factor).all()
    assert (ratio.diff() <= 1e-12).all(), "a slower pair is stretched less than a faster one"
    torch.testing.assert_close(rule(1).frequencies(dim, base, 64), plain, rtol=1e-15, atol=0)
    assert rule(1).attention_factor == 1


def test_linear_scaling_divides_the_positions():
    x = torch.randn(4, 8, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, torch.tensor([0, 4, 8, 12]), scaling=LinearScaling(4)), rotate(x, 4))


def test_dynamic_ntk_frequencies():
    rule, plain = DynamicNTK(4, 64), frequencies(16, 500.0)
    for length in (0, 1, 64):
        assert torch.equal(rule.frequencies(16, 500.0, length), plain)
    assert torch.equal(rule.frequencies(16, 500.0), plain)
    torch.testing.assert_close(rule.frequencies(16, 500.0, 96), NTKAware(4 * 96 / 64 - 3).frequencies(16, 500.0))
    rows = rule.frequencies(16, 500.0, torch.tensor([[1, 96], [64, 200]]))
    assert rows.shape == (2, 2, 8) and torch.equal(rows[0, 0], plain) and torch.equal(rows[1, 0], plain)
    torch.testing.assert_close(rows[0, 1], rule.frequencies(16, 500.0, 96))


def test_yarn_keeps_fast_pairs_and_divides_slow_ones():
    for truncate in (True, False):
        ratio = YaRN(4, 2048, truncate=truncate).frequencies(128) / frequencies(128)
        turns = 2048 * frequencies(128) / (2 * math.pi)
        slack = 2 if truncate else 1                 # whole pair numbers move the ends by up to one pair
        assert (ratio[turns > 32 * slack] == 1).all()
        torch.testing.assert_close(ratio[turns < 1 / slack], torch.full_like(ratio[turns < 1 / slack], 0.25))
    all_slow, all_fast = YaRN(4, 8, beta_slow=9).frequencies(16), YaRN(4, 10**6).frequencies(16, 10.0)
    torch.testing.assert_close(all_slow[1:], frequencies(16)[1:] / 4)          # the ramp's ends stay in 0..dim-1
    torch.testing.assert_close(all_fast, frequencies(16, 10.0))


def test_yarns_attention_factor():
    log = math.log(40)
    assert YaRN(1, 8).attention_factor == 1
    assert YaRN(40, 8).attention_factor == 0.1 * log + 1
    assert YaRN(40, 8, attention_factor=1.5, mscale=3).attention_factor == 1.5
    assert YaRN(40, 8, mscale=1.0, mscale_all_dim=1.0).attention_factor == 1
    assert YaRN(40, 8, mscale=0.707, mscale_all_dim=0.5).attention_factor == (0.0707 * log + 1) / (0.05 * log + 1)
    assert YaRN(40, 8, mscale=0.707).attention_factor == pytest.approx(0.0707 * log + 1)


def test_llama3_keeps_fast_pairs_and_divides_slow_ones():
    plain = frequencies(128, 5e5)
    ratio, turns = Llama3(8, 8192).frequencies(128, 5e5) / plain, 8192 * plain / math.tau
    assert (ratio[turns >= 4] == 1).all() and (ratio[turns <= 1] == 0.125).all()
    between = (turns > 1) & (turns < 4)
    torch.testing.assert_close(ratio[between], 0.125 + 0.875 * (turns[between] - 1) / 3)


@pytest.mark.parametrize("call, error, message", [
    (lambda: LinearScaling(0.5), ValueError, "factor must be at least 1: .*got 0.5"),
    (lambda: NTKAware(0), ValueError, "factor must be a finite number greater than 0, got 0"),
    (lambda: DynamicNTK(-2, 8), ValueError, "factor must be a finite number greater than 0"),
    (lambda: YaRN(0.9, 8), ValueError, "factor must be at least 1"),
    (lambda: Llama3(math.inf, 8), ValueError, "factor must be a finite number"),
    (lambda: LinearScaling("4"), TypeError, "factor must be a real number, got '4' of type str"),
    (lambda: DynamicNTK(2, 0), ValueError, "original_length must be at least 1, got 0"),
    (lambda: YaRN(2, 8.0), TypeError, "original_length must be an int, got 8.0"),
    (lambda: YaRN(2, 8, beta_fast=1, beta_slow=1), ValueError, "beta_fast must exceed beta_slow, got 1 and 1"),
    (lambda: YaRN(2, 8, attention_factor=0), ValueError, "attention_factor must be a finite number greater than 0"),
    (lambda: Llama3(2, 8, 4, 1), ValueError, "high_freq_factor must exceed low_freq_factor, got 1 and 4"),
    (lambda: LinearScaling(2).frequencies(7), ValueError, "dim must be even"),
    (lambda: DynamicNTK(2, 8).frequencies(8, length=-1), ValueError, "length must be at least 0, got -1"),
    (lambda: DynamicNTK(2, 8).frequencies(8, length=9.0), TypeError, "length must be an int, got 9.0"),
])
def test_bad_rules_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def rope(parameters, **config):
    return LLAMA | {"rope_scaling": parameters} | config


YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA31 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
DEEPSEEK = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn"}


@pytest.mark.parametrize("config, expected", [
    (LLAMA, Rotary(16, layout="half")),
    ({"head_dim": 8}, Rotary(8, layout="half")),
    (LLAMA | {"head_dim": 64, "rope_scaling": None}, Rotary(64, layout="half")),
    (LLAMA | {"head_dim": None, "rope_parameters": {}}, Rotary(16, layout="half")),
    ({"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, Rotary(8, 5e5, layout="half")),
    (LLAMA | {"partial_rotary_factor": 0.25}, Rotary(16, rotary_dim=4, layout="half")),
    (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, Rotary(16, rotary_dim=8, layout="half")),
    (rope({"type": "linear", "factor": 4}), Rotary(16, layout="half", scaling=LinearScaling(4))),
    (rope({"type": "dynamic", "factor": 4}), Rotary(16, layout="half", scaling=DynamicNTK(4, 64))),
    (rope({"rope_type": "dynamic", "factor": 4, "original_max_position_embeddings": 32}),
     Rotary(16, layout="half", scaling=DynamicNTK(4, 32))),
    (rope({"rope_type": "yarn", "type": "yarn"} | YARN), Rotary(16, layout="half", scaling=YaRN(4.0, 32768))),
    (rope({"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096, "finetuned": True}),
     Rotary(16, layout="half", scaling=YaRN(16.0, 4096))),
    (rope({"type": "yarn", "original_max_position_embeddings": 32, "truncate": False, "attention_factor": None}),
     Rotary(16, layout="half", scaling=YaRN(2.0, 32, truncate=False))),
    (rope({"rope_type": "llama3"} | LLAMA31, rope_theta=5e5),
     Rotary(16, 5e5, layout="half", scaling=Llama3(8.0, 8192, 1.0, 4.0))),
    ({"model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "qk_rope_head_dim": 64,
      "rope_theta": 10000, "max_position_embeddings": 163840, "rope_scaling": DEEPSEEK},
     Rotary(64, scaling=YaRN(40, 4096, 32, 1, mscale=1.0, mscale_all_dim=1.0))),
    ({"model_type": "gpt_neox", "hidden_size": 2048, "num_attention_heads": 16, "rotary_pct": 0.25,
      "rotary_emb_base": 10000}, Rotary(128, rotary_dim=32, layout="half")),
    ({"model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64}, Rotary(256, rotary_dim=64)),
    ({"model_type": "phi", "hidden_size": 2560, "num_attention_heads": 32, "partial_rotary_factor": 0.4},
     Rotary(80, rotary_dim=32, layout="half")),
])
def test_spellings_of_published_configs(config, expected):
    before = repr(config)
    assert repr(Rotary.from_config(config)) == repr(expected) and repr(config) == before
    assert Rotary.from_config(config, layout="interleaved").layout == "interleaved"


@pytest.mark.parametrize("config, error, message", [
    ([], TypeError, "config must be a dict such as the one in config.json, got list"),
    ({}, ValueError, "config needs head_dim, or a hidden_size that num_attention_heads divides"),
    ({"hidden_size": 10, "num_attention_heads": 3}, ValueError, "got hidden_size 10 and num_attention_heads 3"),
    (LLAMA | {"head_dim": 15}, ValueError, "head_dim must be even"),
    (LLAMA | {"partial_rotary_factor": 0.2}, ValueError, "rotary_dim must be even.*got 3"),
    (LLAMA | {"partial_rotary_factor": 1.5}, ValueError, "rotary_dim must be at most the head's 16 dimensions, got 24"),
    (rope("yarn"), TypeError, r"rope_parameters \(rope_scaling\) must be a dict, got 'yarn'"),
    (rope({"type": "longrope", "short_factor": [1], "long_factor": [2]}), ValueError,
     "longrope .* is not supported; known types: default, linear, dynamic, yarn, llama3"),
    (rope({"type": "su"}), ValueError, "longrope .* is not supported"),
    (rope({"type": "mrope", "mrope_section": [16, 24, 24]}), ValueError, "mrope .* is not supported; known types"),
    (rope({"rope_type": "default", "mrope_section": [16, 24, 24]}), ValueError, "mrope .* is not supported"),
    (rope({"type": "ntk", "factor": 2}), ValueError, "unknown rope type 'ntk'; known types: default, linear, dynamic"),
    (rope({"type": "linear", "factor": 2, "beta_fast": 32}), ValueError,
     "unknown keys in the rope dict of type 'linear': beta_fast; "
     "known keys: factor, partial_rotary_factor, rope_theta, rope_type, type"),
    (rope({"type": "linear", "scale": 2}), ValueError, "unknown keys .*: scale; known keys: factor"),
    (rope({"factor": 2}), ValueError, "unknown keys in the rope dict of type 'default': factor"),
    (rope({"type": "linear"}), ValueError, "the rope dict of type 'linear' lacks factor"),
    (rope({"type": "linear", "factor": 0.5}), ValueError, "factor must be at least 1"),
    ({"head_dim": 8, "rope_scaling": {"type": "yarn", "factor": 2}}, ValueError, "lacks original_max_position_emb"),
    (rope({"type": "yarn", "rope_type": "linear"}), ValueError, "rope type is given twice .*'linear', 'yarn'"),
    (rope({"rope_theta": 5e5}), ValueError, "rope_theta is given twice with different values: 500000.0, 10000.0"),
    (rope({"type": "linear", "factor": 2}, rope_parameters={"rope_type": "linear", "factor": 4}), ValueError,
     "rope dict is given twice"),
    (rope({"type": "yarn"} | YARN, original_max_position_embeddings=64), ValueError, "given twice .*32768, 64"),
    (rope({"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "default"}}), ValueError,
     "one dict for each kind of layer, .*choose one"),
])
def test_bad_configs_are_named(config, error, message):
    with pytest.raises(error, match=message):
        Rotary.from_config(config)


def transformers(module):
    pytest.importorskip("transformers")
    return importlib.import_module(f"transformers.models.{module}")


def oracle(model, name, settings, q, k, positions):
    """cos and sin, and q and k rotated by `transformers`; and the whole config as a dict."""
    modeling = transformers(f"{model}.modeling_{model}")
    config = getattr(transformers(f"{model}.configuration_{model}"), f"{name}Config")(**settings)
    embedding = getattr(modeling, f"{name}RotaryEmbedding")(config)
    cos, sin = embedding(q, positions[None])
    return cos, sin, modeling.apply_rotary_pos_emb(q, k, cos, sin), config.to_dict()


SIZES = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128}
NEOX = {"hidden_size": 64, "num_attention_heads": 2, "max_position_embeddings": 128}
CASES = [
    ("llama", "Llama", SIZES),
    ("llama", "Llama", SIZES | {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
    ("llama", "Llama", SIZES | {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ("llama", "Llama", SIZES | {"max_position_embeddings": 60,
                                "rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}),
    ("llama", "Llama", SIZES | {"rope_scaling": {"rope_type": "llama3", "original_max_position_embeddings": 32,
                                                 "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}}),
    ("qwen2", "Qwen2", SIZES | {"rope_theta": 1e6}),
    ("qwen2", "Qwen2", SIZES | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                                 "original_max_position_embeddings": 32}}),
    ("qwen2", "Qwen2", SIZES | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "beta_slow": 2,
                                                 "truncate": False, "attention_factor": 1.5,
                                                 "original_max_position_embeddings": 32}}),
    ("qwen2", "Qwen2", SIZES | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale": 0.707,
                                                 "mscale_all_dim": 0.5, "original_max_position_embeddings": 32}}),
    ("gpt_neox", "GPTNeoX", NEOX | {"rotary_pct": 0.25}),
    ("gpt_neox", "GPTNeoX", NEOX | {"rotary_pct": 0.5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    ("cohere", "Cohere", SIZES),                     # adjacent pairs
]


@pytest.mark.parametrize("model, name, settings", CASES)
def test_transformers_agrees_within_its_float32_angles(model, name, settings):
    q, k = torch.randn(2, 1, 2, 128, 32)
    positions = torch.arange(128)
    _, _, expected, config = oracle(model, name, settings, q, k, positions)
    method = Rotary.from_config(config)
    out = method.rotate(q, k, positions, positions)
    for ours, theirs in zip(out, expected):          # their angles, up to 127, are off by a few float32 roundings
        assert (ours - theirs).abs().max() < 8 * 2**-24 * 127 * float(q.abs().max())
    wrong = Rotary.from_config(config, layout="half" if method.layout == "interleaved" else "interleaved")
    assert (wrong.rotate(q, k, positions, positions)[0] - expected[0]).abs().max() > 0.5, "the layout would not matter"


def test_of_the_two_this_library_is_the_exact_one(exact_angle):
    """cos and sin of the fastest pairs at position 100,000, against 60 digits: within 6e-8 here, off by 1e-3 there."""
    q, p = torch.zeros(1, 1, 1, 32), torch.tensor([100_000])
    cos, sin, _, config = oracle("llama", "Llama", SIZES, q, q, p)
    one = torch.cat((torch.ones(1, 1, 1, 16), torch.zeros(1, 1, 1, 16)), dim=-1)
    ours = Rotary.from_config(config).rotate(one, one, p, p)[0].flatten().tolist()
    theirs = cos.flatten()[:16].tolist() + sin.flatten()[:16].tolist()
    exact = [mpmath.cos(exact_angle(100_000, i, 32)) for i in range(16)]
    exact += [mpmath.sin(exact_angle(100_000, i, 32)) for i in range(16)]
    assert max(abs(a - b) for a, b in zip(ours, exact)) <= 6e-8
    assert max(abs(a - b) for a, b in zip(theirs, exact)) > 1e-3


@pytest.mark.parametrize("model_type", [*sorted(configs._INTERLEAVED), "gemma", "gpt_neox", "llama", "mistral", "phi",
                                        "qwen2"])
def test_model_types_with_adjacent_pairs(model_type):
    """Read from the models' code: which of them rotate features 2i and 2i + 1."""
    folder = model_type.removesuffix("_text")
    source = inspect.getsource(transformers(f"{folder}.modeling_{folder}"))
    adjacent = any(mark in source for mark in ("0::2]", " ::2]", "view_as_complex", "apply_rotary_pos_emb_interleave"))
    assert adjacent == (model_type in configs._INTERLEAVED)
