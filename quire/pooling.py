"""Requests that pool instead of sampling: what a user may ask of one, what the executor needs of it, and its result."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from quire.errors import BadRequestError, ConfigError
from quire.refusals import POOLING, reads_arguments, sift


class PoolingTask(StrEnum):
    """What is made of a prompt. The first two give one vector, the others one for each of its tokens."""

    EMBED = "embed"
    CLASSIFY = "classify"
    TOKEN_EMBED = "token_embed"
    TOKEN_CLASSIFY = "token_classify"

    @property
    def has_classes(self) -> bool:
        return self in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY)

    @property
    def is_by_token(self) -> bool:
        return self in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY)


class PoolingKind(StrEnum):
    """Which of a prompt's hidden states make its vector."""

    LAST = "last"
    MEAN = "mean"
    CLS = "cls"  # the first
    ALL = "all"  # a vector each


_TASKS = {task.value: task for task in PoolingTask} | {"score": PoolingTask.CLASSIFY, "encode": PoolingTask.TOKEN_EMBED}
# Older spellings of use_activation.
_SPELLINGS = ("normalize", "softmax", "activation")


def _understood(given: dict[str, Any]) -> dict[str, Any]:
    values = dict(given)
    for spelling in _SPELLINGS:
        if (value := values.pop(spelling, None)) is not None:
            if values.get("use_activation") not in (None, value):
                raise BadRequestError(f"{spelling} and use_activation are the same thing: give one", param=spelling)
            values["use_activation"] = value
    return sift(values, POOLING, PoolingParams.__dataclass_fields__)


@reads_arguments(_understood)
@dataclass(slots=True, kw_only=True)
class PoolingParams:
    """How to pool a prompt, under the names that vLLM's users write. None: as the model does it."""

    task: PoolingTask | str | None = None
    dimensions: int | None = None  # the first so many of an embedding, of a model that was trained for it
    use_activation: bool | None = None  # normalize embeddings; turn a classifier's logits into probabilities
    truncate_prompt_tokens: int | None = None  # keep the first so many tokens; -1: as many as the model takes
    skip_reading_prefix_cache: bool | None = None

    def __post_init__(self) -> None:
        if self.task is not None:
            if self.task not in _TASKS:
                raise BadRequestError(f"task must be one of {', '.join(_TASKS)}, got {self.task!r:.60}", param="task")
            self.task = _TASKS[self.task]
        for name, least in (("dimensions", 1), ("truncate_prompt_tokens", -1)):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < least):
                raise BadRequestError(f"{name} must be a whole number >= {least}, got {value!r:.60}", param=name)
        if self.truncate_prompt_tokens == 0:
            raise BadRequestError("truncate_prompt_tokens=0 leaves no token: give at least 1", param=name)
        for name in ("use_activation", "skip_reading_prefix_cache"):
            if getattr(self, name) not in (None, True, False):
                raise BadRequestError(f"{name} must be True or False, got {getattr(self, name)!r:.60}", param=name)

    def clone(self, **changes: Any) -> PoolingParams:
        return replace(self, **changes)


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolingSpec:
    """What an executor needs of it: resolved, never None."""

    kind: PoolingKind
    has_classes: bool = False  # whether the model's classifier follows
    is_activated: bool = True  # normalized, or as probabilities
    dimensions: int | None = None
    num_first_tokens: int | None = None  # of a pair of texts: those of the first


@dataclass(slots=True, frozen=True)
class Pooled:
    """One or more vectors of the same width, as float32 in the machine's order: small enough to travel as they are."""

    num_vectors: int
    data: bytes

    @property
    def width(self) -> int:
        return len(self.data) // 4 // self.num_vectors

    def floats(self) -> array[float]:
        """The numbers of all vectors, one vector after the other."""
        return array("f", self.data)

    def lists(self) -> list[list[float]]:
        floats, width = self.floats().tolist(), self.width
        return [floats[at : at + width] for at in range(0, len(floats), width)]


@dataclass(slots=True, frozen=True, kw_only=True)
class PoolerConfig:
    """What a user sets about an engine's pooling, in place of what the model's files say. None: as those say."""

    pooling_type: PoolingKind | None = None
    use_activation: bool | None = None

    @classmethod
    def read(cls, given: Any) -> PoolerConfig:
        """From a mapping with vLLM's keys."""
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise ConfigError(f"pooler_config must map names to values, got {given!r:.60}")
        names: dict[Any, str] = {
            "seq_pooling_type": "pooling_type",
            "normalize": "use_activation",
            "softmax": "use_activation",
        }
        values: dict[Any, Any] = {names.get(name, name): value for name, value in given.items() if value is not None}
        if unknown := sorted(set(values) - {"pooling_type", "use_activation"}):
            raise ConfigError(f"pooler_config: {unknown[0]} is not served (there are pooling_type and normalize)")
        kind = values.get("pooling_type")
        if kind is not None:
            kinds = {each.value: each for each in PoolingKind if each is not PoolingKind.ALL}
            if str(kind).lower() not in kinds:
                raise ConfigError(f"pooler_config: pooling_type must be LAST, MEAN or CLS, got {kind!r:.60}")
            values["pooling_type"] = kinds[str(kind).lower()]
        if values.get("use_activation") not in (None, True, False):
            raise ConfigError("pooler_config: normalize must be True or False")
        return cls(**values)
