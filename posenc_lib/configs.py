"""Reading the rotary settings of published models: config.json, in its old and its new spelling."""
from collections.abc import Mapping

from .scaling import DynamicNTK, LinearScaling, Llama3, YaRN

_RULES = {"default": None, "linear": LinearScaling, "dynamic": DynamicNTK, "yarn": YaRN, "llama3": Llama3}
_LENGTH = "original_max_position_embeddings"
_KEYS = {                                            # rope type -> keys of its settings, as published
    "default": (), "linear": ("factor",), "dynamic": ("factor", _LENGTH),
    "yarn": ("factor", _LENGTH, "attention_factor", "beta_fast", "beta_slow", "finetuned", "mscale", "mscale_all_dim",
             "truncate"),
    "llama3": ("factor", _LENGTH, "low_freq_factor", "high_freq_factor"),
}
_COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
_REFUSED = {"longrope": "longrope (short and long factors, one a pair)", "su": "longrope (here by its old name, su)",
            "mrope": "mrope (positions made of time, height and width)"}
_INTERLEAVED = {                                     # model types whose published weights expect adjacent pairs
    "codegen", "cohere", "cohere2", "deepseek_v2", "deepseek_v3", "ernie4_5", "glm", "glm4", "gptj", "helium",
    "llama4_text"}


def read_rotary(config: Mapping) -> dict:
    """Rotary's arguments from a model's whole config dict; see Rotary.from_config."""
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be a dict such as the one in config.json, got {type(config).__name__}")
    rope = _the_one("rope dict", [config.get("rope_parameters") or None, config.get("rope_scaling") or None]) or {}
    kind = _rope_type(rope)

    def setting(*names):
        return _the_one(names[0], [place.get(name) for place in (rope, config) for name in names])

    head_dim = setting("head_dim") if config.get("qk_rope_head_dim") is None else config["qk_rope_head_dim"]
    if head_dim is None:
        width, heads = setting("hidden_size", "n_embd"), setting("num_attention_heads", "n_head")
        if not width or not heads or width % heads:
            raise ValueError("config needs head_dim, or a hidden_size that num_attention_heads divides, got "
                             f"hidden_size {width} and num_attention_heads {heads}")
        head_dim = width // heads
    portion = setting("partial_rotary_factor", "rotary_pct", "rope_pct")
    portion = None if portion is None else int(head_dim * portion)
    rotary_dim = _the_one("rotary_dim", [portion, config.get("rotary_dim")])
    base = setting("rope_theta", "rotary_emb_base")
    adjacent = config.get("rope_interleave") or config.get("model_type") in _INTERLEAVED
    return {"head_dim": head_dim, "base": 10000.0 if base is None else base, "rotary_dim": rotary_dim,
            "layout": "interleaved" if adjacent else "half", "scaling": _scaling(kind, rope, config)}


def _rope_type(rope: Mapping) -> str:
    """The type of a rope dict whose keys are all known."""
    if not isinstance(rope, Mapping):
        raise TypeError(f"rope_parameters (rope_scaling) must be a dict, got {rope!r}")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ValueError(f"rope_parameters has one dict for each kind of layer, {sorted(rope)}: choose one with "
                         "{**config, 'rope_parameters': config['rope_parameters'][kind]}")
    kind = _the_one("rope type", [rope.get("rope_type"), rope.get("type")]) or "default"
    kind = "mrope" if "mrope_section" in rope else kind
    if kind not in _RULES:
        problem = f"{_REFUSED[kind]} is not supported" if kind in _REFUSED else f"unknown rope type {kind!r}"
        raise ValueError(f"{problem}; known types: {', '.join(_RULES)}")
    unknown = sorted(set(rope) - {*_COMMON, *_KEYS[kind]})
    if unknown:
        raise ValueError(f"unknown keys in the rope dict of type {kind!r}: {', '.join(unknown)}; "
                         f"known keys: {', '.join(sorted({*_COMMON, *_KEYS[kind]}))}")
    return kind


def _scaling(kind: str, rope: Mapping, config: Mapping):
    """The rule of a rope dict. Where no original length is published it is max_position_embeddings; a YaRN factor
    that is not published is max_position_embeddings / the original length, as in DeepSeek's configs."""
    if kind == "default":
        return None
    settings = {key: rope[key] for key in _KEYS[kind] if rope.get(key) is not None}
    settings.pop("finetuned", None)                  # changes no number
    if _LENGTH in _KEYS[kind]:
        settings.pop(_LENGTH, None)
        longest = config.get("max_position_embeddings")
        original = _the_one(_LENGTH, [rope.get(_LENGTH), config.get(_LENGTH)]) or longest
        if original is None:
            raise ValueError(f"the rope dict of type {kind!r} lacks {_LENGTH}")
        settings["original_length"] = original
        if kind == "yarn" and longest:
            settings.setdefault("factor", longest / original)
    if "factor" not in settings:
        raise ValueError(f"the rope dict of type {kind!r} lacks factor")
    return _RULES[kind](**settings)


def _the_one(what: str, values: list):
    """The value that is not None; a ValueError if there are two that differ."""
    values = [value for value in values if value is not None]
    if any(value != values[0] for value in values):
        raise ValueError(f"{what} is given twice with different values: {', '.join(map(repr, values))}")
    return values[0] if values else None
