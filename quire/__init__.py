"""Quire: LLM inference and serving on paged KV memory.

The public names. They are imported when first used, so that `import quire` is instant and torch is loaded only by
what needs it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.beams import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from quire.config import EngineConfig
    from quire.engine.llm_engine import LLMEngine
    from quire.errors import QuireError
    from quire.inputs import TextPrompt, TokensPrompt
    from quire.llm import LLM
    from quire.outputs import (
        ClassificationRequestOutput,
        CompletionOutput,
        EmbeddingRequestOutput,
        Logprob,
        PoolingRequestOutput,
        RequestOutput,
        ScoringRequestOutput,
    )
    from quire.params import OutputKind, SamplingParams
    from quire.pooling import PoolerConfig, PoolingParams
    from quire.structured import StructuredOutputsParams

__version__ = "0.1.0"

_NAMES = {
    "quire.llm": "LLM",
    "quire.async_llm": "AsyncLLM",
    "quire.engine.llm_engine": "LLMEngine",
    "quire.config": "EngineConfig",
    "quire.params": "SamplingParams OutputKind",
    "quire.sampling": "BatchUpdate LogitsProcessor MoveDirectionality",
    "quire.beams": "BeamSearchParams BeamSearchOutput BeamSearchSequence",
    "quire.structured": "StructuredOutputsParams",
    "quire.outputs": """RequestOutput CompletionOutput Logprob PoolingOutput PoolingRequestOutput EmbeddingOutput
        EmbeddingRequestOutput ClassificationOutput ClassificationRequestOutput ScoringOutput ScoringRequestOutput""",
    "quire.pooling": "PoolingParams PoolerConfig",
    "quire.inputs": "TextPrompt TokensPrompt PromptType",
    "quire.errors": "QuireError",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

# What vLLM's users call some of them.
_ALIASES = {
    "AsyncLLMEngine": "AsyncLLM",
    "EngineArgs": "EngineConfig",
    "AsyncEngineArgs": "EngineConfig",
    "RequestOutputKind": "OutputKind",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "EngineConfig",
    "LLMEngine",
    "Logprob",
    "OutputKind",
    "PoolerConfig",
    "PoolingParams",
    "PoolingRequestOutput",
    "QuireError",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    name = _ALIASES.get(name, name)
    if name not in _HOMES:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
