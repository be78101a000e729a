"""SpeculativeConfig: how tokens are guessed before the model computes them, under vLLM's keys, checked once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import ConfigError
from quire.nearest import nearest

METHODS = ("ngram", "suffix", "draft_model")
MAX_SPECULATIVE_TOKENS = 128
_MAX_LOOKUP = 64  # tokens of an n-gram, and of a match

# By method: how many tokens are drafted at most, where nobody says.
_DEFAULT_TOKENS = {"ngram": 31, "suffix": 31, "draft_model": 5}


@dataclass(slots=True, frozen=True, kw_only=True)
class SpeculativeConfig:
    """`num_speculative_tokens` is the most that one step verifies of a sequence. How many it is, up to there, follows
    from what was accepted before and from what the step costs."""

    method: str
    num_speculative_tokens: int
    model: str | None = None  # of draft_model: an alias, a path or a hub id
    # ngram: how many of the last tokens must have stood there before. The longest match wins.
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 24
    # suffix: tokens of a match that are compared; answers that are remembered (0: only the request's own tokens);
    # drafts for each token that matched; and how probable a draft must be.
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 4.0
    suffix_decoding_min_token_prob: float = 0.02

    @classmethod
    def read(cls, given: Any) -> SpeculativeConfig:
        """From what a user wrote. None is left to the default."""
        if isinstance(given, SpeculativeConfig):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f'speculative_config must be a mapping such as {{"method": "ngram"}}, got {given!r}')
        values = {key: value for key, value in given.items() if value is not None}
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = nearest(key, known)
                hint = f"did you mean {near[0]}?" if near else f"the keys are {', '.join(known)}"
                raise ConfigError(f"speculative_config has no key {key!r}: {hint}")
        if "model" in values:
            values.setdefault("method", "draft_model")
        method = values.get("method")
        if method not in METHODS:
            raise ConfigError(f"method in speculative_config must be one of {', '.join(METHODS)}, got {method!r}")
        if (method == "draft_model") != ("model" in values):
            raise ConfigError(
                "the method draft_model needs a draft model: add model to speculative_config, or set spec_model"
                if method == "draft_model"
                else f"the method {method} drafts without a model: leave model out of speculative_config"
            )
        defaults = {field.name: field.default for field in fields(cls)}
        for key, value in values.items():
            for other, prefix in (("ngram", "prompt_lookup_"), ("suffix", "suffix_decoding_")):
                if other != method and key.startswith(prefix) and value != defaults[key]:
                    raise ConfigError(f"{key} in speculative_config is for method {other}, not {method}: leave it out")
        # One of the two alone is both, as in vLLM.
        if "prompt_lookup_max" in values or "prompt_lookup_min" in values:
            values.setdefault("prompt_lookup_max", values.get("prompt_lookup_min"))
            values.setdefault("prompt_lookup_min", values["prompt_lookup_max"])
        values.setdefault("num_speculative_tokens", _DEFAULT_TOKENS[method])
        return cls(**values)

    def __post_init__(self) -> None:
        self._check_count("num_speculative_tokens", 1, MAX_SPECULATIVE_TOKENS)
        self._check_count("prompt_lookup_min", 1, _MAX_LOOKUP)
        self._check_count("prompt_lookup_max", 1, _MAX_LOOKUP)
        self._check_count("suffix_decoding_max_tree_depth", 2, _MAX_LOOKUP)
        self._check_count("suffix_decoding_max_cached_requests", 0, 10_000_000)
        self._check_number("suffix_decoding_max_spec_factor", 1e-3, 1e3)
        self._check_number("suffix_decoding_min_token_prob", 0.0, 1.0)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"prompt_lookup_min={self.prompt_lookup_min} in speculative_config is more than "
                f"prompt_lookup_max={self.prompt_lookup_max}"
            )
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ConfigError(f"model in speculative_config must be an alias, a path or a hub id, got {self.model!r}")

    def _check_count(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(
                f"{name} in speculative_config must be a whole number from {low} to {high}, got {value!r}"
            )

    def _check_number(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
            raise ConfigError(f"{name} in speculative_config must be between {low:g} and {high:g}, got {value!r}")
