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

_HOMES = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.async_llm",
    "LLMEngine": "quire.engine.llm_engine",
    "EngineConfig": "quire.config",
    "SamplingParams": "quire.params",
    "OutputKind": "quire.params",
    "BatchUpdate": "quire.sampling",
    "LogitsProcessor": "quire.sampling",
    "MoveDirectionality": "quire.sampling",
    "BeamSearchParams": "quire.beams",
    "BeamSearchOutput": "quire.beams",
    "BeamSearchSequence": "quire.beams",
    "StructuredOutputsParams": "quire.structured",
    "RequestOutput": "quire.outputs",
    "CompletionOutput": "quire.outputs",
    "Logprob": "quire.outputs",
    "PoolingParams": "quire.pooling",
    "PoolerConfig": "quire.pooling",
    **dict.fromkeys(
        ("PoolingOutput", "PoolingRequestOutput", "EmbeddingOutput", "EmbeddingRequestOutput"), "quire.outputs"
    ),
    **dict.fromkeys(
        ("ClassificationOutput", "ClassificationRequestOutput", "ScoringOutput", "ScoringRequestOutput"),
        "quire.outputs",
    ),
    "TextPrompt": "quire.inputs",
    "TokensPrompt": "quire.inputs",
    "PromptType": "quire.inputs",
    "QuireError": "quire.errors",
}

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
