"""SamplingParams: what a user may ask of one request, under the names that vLLM's users write.

Validation happens once, here. What the executor needs of it is lowered to `SamplingSpec`, plain data that can cross
a process boundary.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from quire.errors import BadRequestError
from quire.refusals import SAMPLING, reads_arguments, sift
from quire.structured import StructuredOutputsParams

if TYPE_CHECKING:
    PackedIds = array[int]
else:
    PackedIds = array  # without its brackets before Python 3.12, and whoever sends a spec reads its annotations

# Far more than anybody needs, and few enough that a request with all of them holds nobody up.
MAX_STOPS = 64
MAX_STOP_CHARS = 256
MAX_BAD_WORDS = 1000
MAX_BAD_WORD_CHARS = 128
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18  # as many tokens as the largest vocabularies have
_MAX_ID = 2**31 - 1
MAX_LOGIT_BIAS = 4096
MAX_CACHE_SALT_CHARS = 1024
MIN_PRIORITY, MAX_PRIORITY = -(2**31), 2**31 - 1
_PLAIN = {int, float, bool, str, type(None)}
_SWITCHES = (
    *("ignore_eos", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"),
    "include_stop_str_in_output",
    "deterministic",
)


class OutputKind(StrEnum):
    """What each streamed RequestOutput holds."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


def _understood(given: dict[str, Any]) -> dict[str, Any]:
    known = SamplingParams.__dataclass_fields__
    values = given if given.keys() <= known.keys() else sift(given, SAMPLING, known)
    return {name: value if type(value) in _PLAIN else plain(value) for name, value in values.items()}


@reads_arguments(_understood)
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Every field is checked at construction; one that is unknown, or that vLLM has and Quire
    does not serve, is refused by name."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    skip_reading_prefix_cache: bool | None = None
    logits_processors: Sequence[Any] | None = None  # callables (output tokens, logits) -> logits; in this process only
    extra_args: dict[str, Any] | None = None  # for the engine's own logits processors
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None  # after so many tokens of thinking the thought is closed
    deterministic: bool = False  # tokens and logprobs depend on nothing but the request

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_stops()
        self._check_token_lists()
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise BadRequestError(f"{name} must be True or False, got {getattr(self, name)!r}", param=name)
        if self.output_kind not in list(OutputKind):
            kinds = ", ".join(OutputKind)
            raise BadRequestError(f"output_kind must be one of {kinds}, got {self.output_kind!r}", param="output_kind")
        self.output_kind = OutputKind(self.output_kind)
        if self.structured_outputs is not None:
            self._check_structured_outputs()
        self._check_processors()
        if not self.detokenize and self.stop:
            raise BadRequestError("stop strings need detokenize=True", param="stop")

    def _check_structured_outputs(self) -> None:
        given: Any = self.structured_outputs
        if isinstance(given, Mapping):
            given = self.structured_outputs = StructuredOutputsParams(**given)
        if not isinstance(given, StructuredOutputsParams):
            raise BadRequestError(
                f"structured_outputs must be a StructuredOutputsParams, got {given!r:.60}", param="structured_outputs"
            )
        if self.ignore_eos:
            raise BadRequestError(
                "structured_outputs end with the model's end token, which ignore_eos passes over: leave that out",
                param="ignore_eos",
            )

    def _check_processors(self) -> None:
        given = self.logits_processors
        if given is not None and (not isinstance(given, (list, tuple)) or not all(map(callable, given))):
            raise BadRequestError("logits_processors must be a list of callables", param="logits_processors")
        self.logits_processors = tuple(given) if given else None
        if self.extra_args is not None and not isinstance(self.extra_args, Mapping):
            raise BadRequestError(f"extra_args must map names to values, got {self.extra_args!r}", param="extra_args")
        self.extra_args = dict(self.extra_args) if self.extra_args else None

    def _check_numbers(self) -> None:
        check_integer(self.n, "n", at_least=1)
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(getattr(self, name), name, -2.0, 2.0)
        # Far from 1 the division by it leaves the floats' range.
        check_number(self.repetition_penalty, "repetition_penalty", 0.01, 100.0)
        check_number(self.temperature, "temperature", 0.0, math.inf)
        check_number(self.top_p, "top_p", 0.0, 1.0, open_low=True)
        check_number(self.min_p, "min_p", 0.0, 1.0)
        check_integer(self.top_k, "top_k", at_least=-1)
        if self.top_k == -1:  # vLLM's older spelling of "off"
            self.top_k = 0
        if self.seed is not None:
            check_integer(self.seed, "seed")
            if self.seed == -1:  # vLLM's older spelling of "no seed"
                self.seed = None
            elif not -(2**63) <= self.seed < 2**64:
                raise BadRequestError(f"seed must fit in 64 bits, got {self.seed}", param="seed")
        if self.thinking_token_budget is not None:
            check_integer(self.thinking_token_budget, "thinking_token_budget", at_least=-1)
            if self.thinking_token_budget == -1:  # vLLM's spelling of "no limit"
                self.thinking_token_budget = None
        if self.max_tokens is not None:
            check_integer(self.max_tokens, "max_tokens", at_least=1)
        check_integer(self.min_tokens, "min_tokens", at_least=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise BadRequestError(
                f"min_tokens ({self.min_tokens}) must be <= max_tokens ({self.max_tokens})", param="min_tokens"
            )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None:
                check_integer(value, name, at_least=-1)
        if self.temperature == 0.0 and self.n > 1:
            raise BadRequestError(
                f"n={self.n} with temperature=0 would give {self.n} equal texts: use n=1 or a temperature", param="n"
            )

    def _check_stops(self) -> None:
        stop = _texts([self.stop] if isinstance(self.stop, str) else self.stop)
        if stop is None:
            raise BadRequestError("stop must be a non-empty string or a list of them", param="stop")
        _at_most(stop, MAX_STOPS, "stop", "strings")
        _at_most(max(stop, key=len, default=""), MAX_STOP_CHARS, "stop", "characters in a string")
        self.stop = stop
        bad = _texts(self.bad_words)
        if bad is None:
            raise BadRequestError("bad_words must be a list of non-empty strings", param="bad_words")
        _at_most(bad, MAX_BAD_WORDS, "bad_words", "words")
        _at_most(max(bad, key=len, default=""), MAX_BAD_WORD_CHARS, "bad_words", "characters in a word")
        self.bad_words = bad or None

    def _check_token_lists(self) -> None:
        for name, limit in (("stop_token_ids", MAX_STOP_TOKEN_IDS), ("allowed_token_ids", MAX_ALLOWED_TOKEN_IDS)):
            value = getattr(self, name)
            if value is None:
                continue
            token_ids = plain_list(value)
            if token_ids is not None:
                _at_most(token_ids, limit, name, "token ids")
            if (
                token_ids is None
                or set(map(type, token_ids)) - {int}
                or min(token_ids, default=0) < 0
                or max(token_ids, default=0) > _MAX_ID
            ):
                raise BadRequestError(f"{name} must be a list of token ids from 0 to {_MAX_ID}", param=name)
            setattr(self, name, tuple(token_ids))
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise BadRequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
            # Four bytes an id, where a list takes forty; and what is made of it can share it.
            self.allowed_token_ids = array("i", self.allowed_token_ids)
        if self.logit_bias is not None:
            try:
                bias = {int(k): float(v) for k, v in self.logit_bias.items()}
            except (TypeError, ValueError, AttributeError):
                raise BadRequestError("logit_bias must map token ids to numbers", param="logit_bias") from None
            _at_most(bias, MAX_LOGIT_BIAS, "logit_bias", "tokens")
            if any(t < 0 or not -100.0 <= v <= 100.0 for t, v in bias.items()):
                raise BadRequestError("logit_bias needs token ids >= 0 and values in -100..100", param="logit_bias")
            self.logit_bias = bias

    @classmethod
    def from_optional(cls, **given: Any) -> SamplingParams:
        """Parameters with None for what is not given, as in vLLM; only max_tokens=None has a meaning: no limit."""
        return cls(**{name: value for name, value in given.items() if value is not None or name == "max_tokens"})

    def clone(self, **changes: Any) -> SamplingParams:
        """A checked copy with some fields changed."""
        return SamplingParams(**{f.name: getattr(self, f.name) for f in fields(self)} | changes)


@dataclass(slots=True, frozen=True, kw_only=True)
class ThinkingSpec:
    """A thought before the answer proper: a grammar begins after it, and a budget closes it."""

    is_open: bool  # the prompt ends inside it; else the answer may begin with `begin`
    begin: str
    end: str
    begin_id: int | None  # where it is one token
    end_id: int | None
    closing_ids: tuple[int, ...]  # what closes it when the budget is spent
    budget: int | None


@dataclass(slots=True, frozen=True, kw_only=True)
class SamplingSpec:
    """What the executor needs to sample one sequence: SamplingParams with strings resolved to token ids.

    `seed` and `index` key the counter-based randomness together with the position, so that the draw depends on
    nothing else: not on the batch, not on preemption.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    index: int = 0
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()  # banned until min_tokens are out: eos and stop_token_ids
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: PackedIds | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None  # top-k asked for; -1 is the whole vocabulary
    prompt_logprobs: int | None = None
    grammar: str | None = None  # of `quire.grammar`: which tokens may follow which
    logits_processors: tuple[Any, ...] = ()  # callables: these alone do not cross to another process
    extra_args: dict[str, Any] | None = None
    thinking: ThinkingSpec | None = None

    @property
    def is_constrained(self) -> bool:
        """Whether `quire.grammar` follows its tokens."""
        return self.grammar is not None or self.thinking is not None


def plain(value: Any) -> Any:
    """Python's own number for one of numpy's or a tensor; anything else as it is."""
    is_scalar = type(value) not in _PLAIN and getattr(value, "ndim", None) == 0
    return value.item() if is_scalar else value


def plain_list(values: Any) -> list[Any] | None:
    """Python's own numbers from a row of them, which may be an array of numpy's or a tensor. None: it is no row."""
    if hasattr(values, "tolist"):
        values = values.tolist()
    if isinstance(values, (str, bytes, bytearray, Mapping)) or not isinstance(values, Iterable):
        return None
    values = list(values)
    return values if set(map(type, values)) <= {int} else [plain(value) for value in values]


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _texts(given: Any) -> list[str] | None:
    """None: it is no row of texts, or one of them is empty."""
    texts = [] if given is None else plain_list(given)
    return None if texts is None or any(not isinstance(text, str) or not text for text in texts) else texts


def _at_most(values: Sized, limit: int, name: str, unit: str) -> None:
    if len(values) > limit:
        raise BadRequestError(f"{name} may have at most {limit:,} {unit}, and this has {len(values):,}", param=name)


def check_integer(value: object, name: str, at_least: int | None = None) -> None:
    if not _is_int(value):
        raise BadRequestError(f"{name} must be an integer, got {value!r}", param=name)
    if at_least is not None and value < at_least:  # type: ignore[operator]
        raise BadRequestError(f"{name} must be >= {at_least}, got {value}", param=name)


def check_number(value: object, name: str, low: float, high: float, *, open_low: bool = False) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value) or math.isinf(value):
        raise BadRequestError(f"{name} must be a finite number, got {value!r}", param=name)
    if value > high or value < low or (open_low and value == low):
        bounds = f"{'>' if open_low else '>='} {low:g}" + ("" if math.isinf(high) else f" and <= {high:g}")
        raise BadRequestError(f"{name} must be {bounds}, got {value}", param=name)


def for_chat(own: SamplingParams) -> SamplingParams:
    """A model's own defaults, for somebody who talks with it; sane ones where it says nothing of sampling. At
    temperature 1 a small model talks nonsense."""
    neutral = SamplingParams()
    if all(getattr(own, name) == getattr(neutral, name) for name in ("temperature", "top_p", "top_k", "min_p")):
        return own.clone(temperature=0.7, top_p=0.95)
    return own
