"""Every error that Quire raises on purpose.

    QuireError
    ├── ConfigError          an argument, flag or combination of them (also a ValueError)
    ├── ModelError           a model that cannot be loaded: says which file, what was expected, what to do
    │   ├── UnsupportedModelError    an architecture or feature that Quire does not have
    │   ├── WeightsError             a missing, truncated, foreign or misshapen weight file or tensor
    │   └── TokenizerError           a tokenizer or chat template that is missing, broken or does not fit
    │       └── TemplateLimitError       a chat template that took more time or memory than it may; `.limit` says which
    ├── DownloadError        a model that could not be fetched or failed its checksum
    ├── MemoryBudgetError    weights or KV cache do not fit; says which value would (also a MemoryError)
    ├── BadRequestError      a request's field; `.param` names it (also a ValueError)
    │   └── ContextLengthError       a prompt, with the answer asked for, that does not fit into max_model_len
    ├── EngineDeadError      the engine stopped after an internal failure; `__cause__` has it
    └── RankError            a rank of a split model died, hangs or does not fit the others: names rank, host and cause

Our own bugs are `assert` or built-in exceptions, never one of these.
"""

from __future__ import annotations

from dataclasses import dataclass


def install_hint(extra: str) -> str:
    """The command that adds an optional part. PyPI's `quire` is another project."""
    return f"pip install 'quire-llm[{extra}]'"


class QuireError(Exception):
    """Base of everything that Quire raises on purpose."""


class ConfigError(QuireError, ValueError):
    """An argument is unknown, out of range, or contradicts another one."""


class ModelError(QuireError):
    """A model cannot be loaded."""


class UnsupportedModelError(ModelError):
    """The model needs an architecture or feature that Quire does not have."""


class WeightsError(ModelError):
    """A weight file or tensor is missing, truncated, foreign or misshapen."""


class TokenizerError(ModelError):
    """A tokenizer or chat template is missing, broken or does not fit the model."""


class TemplateLimitError(TokenizerError):
    """A chat template was stopped; `limit` says what it did, without naming the template."""

    def __init__(self, message: str, *, limit: str = "") -> None:
        super().__init__(message)
        self.limit = limit


class DownloadError(QuireError):
    """A model could not be fetched, or what came fails its checksum."""


class MemoryBudgetError(QuireError, MemoryError):
    """Weights or KV cache do not fit; the message names the flag and the value that would."""


class BadRequestError(QuireError, ValueError):
    """A request is malformed or can never be served; `param` names the field at fault."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(BadRequestError):
    """A prompt, or the answer that was asked for behind it, does not fit into max_model_len."""

    @classmethod
    def of(cls, max_model_len: int, why: str, *, param: str) -> ContextLengthError:
        # Client libraries shorten the conversation when they read these words, which are OpenAI's.
        return cls(f"This model's maximum context length is {max_model_len} tokens (max_model_len): {why}", param=param)


class EngineDeadError(QuireError):
    """The engine stopped after an internal failure and takes no more requests."""


class RankError(QuireError):
    """A rank of a model that is split among several ended, or cannot work with the others."""


@dataclass(slots=True, frozen=True)
class ErrorInfo:
    """An error on its way to the other side."""

    kind: str  # a class of quire.errors by name; anything else arrives as a plain QuireError
    message: str
    param: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        if isinstance(error, QuireError):
            return cls(type(error).__name__, str(error), getattr(error, "param", None))
        return cls("", f"{type(error).__name__}: {error}")

    def to_error(self) -> QuireError:
        kind: type[QuireError] = globals().get(self.kind, QuireError)
        assert issubclass(kind, QuireError)
        if issubclass(kind, BadRequestError):
            return kind(self.message, param=self.param)
        return kind(self.message)
