"""An engine that is made once: a tiny model with random weights and a small cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine


@pytest.fixture(scope="session")
def tiny_flags(tiny_model: Path) -> list[str]:
    flags = ["--model", str(tiny_model), "--load-format", "dummy", "--device", "cpu", "--num-threads", "1"]
    return [*flags, "--kv-cache-memory-bytes", str(8 << 20)]


@pytest.fixture(scope="session")
def shared_engine(tiny_model: Path) -> LLMEngine:
    config = EngineConfig(
        model=str(tiny_model), load_format="dummy", device="cpu", num_threads=1, kv_cache_memory_bytes=8 << 20
    )
    return LLMEngine.from_config(config)


@pytest.fixture
def engine(shared_engine: LLMEngine) -> Iterator[LLMEngine]:
    """512 blocks of 16 tokens, at most 64 sequences and 512 tokens a step; nothing runs, nothing is cached."""
    yield shared_engine
    assert not shared_engine.has_unfinished_requests(), "a test left requests behind"
    shared_engine.core.kv.check()
    assert shared_engine.reset_prefix_cache()
