"""The rotary part of a config, in the spelling of transformers 4 (rope_theta, rope_scaling) or 5 (rope_parameters)."""

from __future__ import annotations

import math
from typing import Any

from quire.models.config_reader import MAX_INTEGER, MAX_NUMBER, ConfigReader, shown
from quire.models.spec import RopeSpec

DEFAULT_THETA = 10_000.0

# Keys beside a type's own numbers that change nothing here.
_COMMON_KEYS = {"type", "rope_type", "rope_theta", "finetuned", "original_max_position_embeddings"}
_YARN_KEYS = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
# By the names of layers/rotary.py, which is not imported: a config is read without torch.
KEYS_BY_TYPE = {
    "default": set[str](),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": _YARN_KEYS,
    "factors": {"factors"},
    "longrope": {"short_factor", "long_factor", "factor", "attention_factor"},
}
_TYPE_NAMES = {"su": "longrope"}  # as Phi 3's first configs called it


def read_rope(config: ConfigReader, head_dim: int, *, has_parts: bool = False) -> RopeSpec:
    """The rotary embedding of a model whose layers all turn alike. has_parts: it may turn a part of each head."""
    theta = config.number("rope_theta", DEFAULT_THETA)
    return _read_entry(config, _rope_entry(config), theta, head_dim, has_parts=has_parts)


def read_rope_by_layer_type(config: ConfigReader, head_dim: int) -> dict[str, RopeSpec]:
    """Gemma 3's two: for layers of full attention and of sliding attention, which is never scaled in the old form."""
    full_theta = config.number("rope_theta", 1_000_000.0)
    sliding_theta = config.number("rope_local_base_freq", DEFAULT_THETA)
    entry = config.part("rope_parameters")
    if entry is not None and (entry.get("full_attention") or entry.get("sliding_attention")):
        full, sliding = entry.part("full_attention"), entry.part("sliding_attention")
    else:
        full, sliding = _rope_entry(config), None
    return {
        "full_attention": _read_entry(config, full, full_theta, head_dim),
        "sliding_attention": _read_entry(config, sliding, sliding_theta, head_dim),
    }


def max_position_with_scaling(config: ConfigReader, rope: RopeSpec, default: int | None = None) -> int:
    """max_position_embeddings, or what yarn makes of the trained length where that is more: configs are told to add
    yarn's entry and to leave the rest."""
    max_position = config.integer("max_position_embeddings", default)
    if rope.scaling is not None and rope.scaling["rope_type"] == "yarn":
        scaled = int(rope.scaling["factor"] * rope.scaling["original_max_position_embeddings"])
        return min(max(max_position, scaled), MAX_INTEGER)
    return max_position


def _rope_entry(config: ConfigReader) -> ConfigReader | None:
    return config.part("rope_scaling") or config.part("rope_parameters")


def _read_entry(
    config: ConfigReader, entry: ConfigReader | None, theta: float, head_dim: int, *, has_parts: bool = False
) -> RopeSpec:
    share = config.number("partial_rotary_factor", 1.0)
    if has_parts and entry is not None:
        share = entry.number("partial_rotary_factor", share)
    if share > 1.0 or (share != 1.0 and not has_parts):
        raise config.error(
            f"{config.named('partial_rotary_factor')} is not 1: this architecture is served with heads that turn whole"
        )
    num_turned = None if share == 1.0 else int(head_dim * share)
    if num_turned is not None and (num_turned < 2 or num_turned % 2):
        raise config.error(f"partial_rotary_factor {share} of a head of {head_dim}: rotary embedding turns pairs")
    if entry is None:
        return RopeSpec(theta, num_turned=num_turned)
    rope_type = entry.text("rope_type", entry.get("type") or "default")
    rope_type = _TYPE_NAMES.get(rope_type, rope_type)
    if rope_type not in KEYS_BY_TYPE:
        served = ", ".join(sorted(KEYS_BY_TYPE))
        raise entry.error(f"rope_type {shown(rope_type)} is not served (there are {served})")
    unknown = entry.values.keys() - _COMMON_KEYS - KEYS_BY_TYPE[rope_type]
    if has_parts or entry.number("partial_rotary_factor", 1.0) == 1.0:
        unknown -= {"partial_rotary_factor"}
    if unknown:
        raise entry.error(f"{', '.join(sorted(unknown))[:200]} is not served with rope_type {rope_type!r}")
    scaling = _read_scaling(config, entry, rope_type, num_turned or head_dim)
    return RopeSpec(entry.number("rope_theta", theta), scaling, num_turned)


def _read_scaling(config: ConfigReader, entry: ConfigReader, rope_type: str, head_dim: int) -> dict[str, Any] | None:
    """The numbers of one type, complete: what layers/rotary.py reads."""
    if rope_type == "default":
        return None
    scaling: dict[str, Any] = {"rope_type": rope_type}
    if rope_type == "factors":
        scaling["factors"] = _read_factors(entry, "factors", head_dim)
        return scaling
    if rope_type == "longrope":
        return scaling | _read_longrope(config, entry, head_dim)
    scaling["factor"] = entry.number("factor")
    trained_length = config.integer("max_position_embeddings")
    if rope_type in ("llama3", "yarn"):
        # Given beside the entry, or in it, or not at all; the first wins, as in transformers.
        trained_length = config.integer(
            "original_max_position_embeddings", entry.integer("original_max_position_embeddings", trained_length)
        )
    if rope_type != "linear":
        scaling["original_max_position_embeddings"] = trained_length
    if rope_type == "llama3":
        scaling["low_freq_factor"] = entry.number("low_freq_factor")
        scaling["high_freq_factor"] = entry.number("high_freq_factor")
        if scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
            raise entry.error("high_freq_factor must be greater than low_freq_factor")
    if rope_type == "yarn":
        scaling["beta_fast"] = entry.number("beta_fast", 32.0)
        scaling["beta_slow"] = entry.number("beta_slow", 1.0)
        scaling["truncate"] = entry.flag("truncate", True)
        for key in ("attention_factor", "mscale", "mscale_all_dim"):
            scaling[key] = entry.optional_number(key)
    return scaling


def _read_longrope(config: ConfigReader, entry: ConfigReader, head_dim: int) -> dict[str, Any]:
    """The long factors are for engines whose sequences may grow past the trained length."""
    longest = config.integer("max_position_embeddings")
    trained = config.integer(
        "original_max_position_embeddings", entry.integer("original_max_position_embeddings", longest)
    )
    factor = entry.number("factor", longest / trained)
    magnitude = 1.0 if factor <= 1.0 else math.sqrt(1 + math.log(factor) / math.log(trained))
    return {
        "short_factor": _read_factors(entry, "short_factor", head_dim),
        "long_factor": _read_factors(entry, "long_factor", head_dim),
        "original_max_position_embeddings": trained,
        "attention_factor": entry.number("attention_factor", magnitude),
    }


def _read_factors(entry: ConfigReader, key: str, head_dim: int) -> list[float]:
    factors = entry.get(key)
    if not isinstance(factors, list | tuple) or len(factors) != head_dim // 2 or not all(map(_is_positive, factors)):
        raise entry.error(f"{key} must be {head_dim // 2} positive numbers, one for each pair of a head's elements")
    return [float(factor) for factor in factors]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and 0 < value < MAX_NUMBER
