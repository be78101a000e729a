"""Engines around one set of weights: each is as if it had been started with its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.bench.measure import measure
from quire.bench.workloads import fixed
from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.engine.variants import EngineVariants
from quire.errors import ConfigError
from quire.params import SamplingParams


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> EngineConfig:
    return EngineConfig(
        model=str(tiny_model),
        load_format="dummy",
        device="cpu",
        num_threads=1,
        kv_cache_memory_bytes=4 << 20,
        max_num_seqs=16,
        max_num_batched_tokens=256,
    )


@pytest.fixture(scope="module")
def bench(config: EngineConfig) -> EngineVariants:
    return EngineVariants(config)


def tokens(engine: LLMEngine) -> list[int]:
    engine.add_request("r", list(range(10, 60)), SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True))
    found: list[int] = []
    while engine.has_unfinished_requests():
        for output in engine.step():
            found = list(output.outputs[0].token_ids)
    return found


@pytest.mark.parametrize("changes", [{"block_size": 4}, {"block_size": 64}, {"max_num_seqs": 1}, {"num_blocks": 8}])
def test_answers_are_those_of_an_engine_of_its_own(
    bench: EngineVariants, config: EngineConfig, changes: dict[str, int]
) -> None:
    own = {name: value for name, value in changes.items() if name != "num_blocks"}
    alone = LLMEngine.from_config(config.replace(**own))
    assert tokens(bench.engine(**changes)) == tokens(alone)
    alone.close()


def test_the_weights_are_loaded_once(bench: EngineVariants) -> None:
    first, second = bench.engine(max_num_seqs=2), bench.engine(block_size=32)
    decoders = {id(each.built.executor.executor.worker.decoder) for each in (first, second, bench.base())}
    assert len(decoders) == 1


def test_settings_are_what_was_asked_for(bench: EngineVariants) -> None:
    engine = bench.engine(max_num_seqs=3, max_num_batched_tokens=64, num_blocks=20, block_size=8)
    report = measure(engine, fixed(300, num=6, num_in=8, num_out=4))
    assert report.kv is not None
    assert (report.kv.num_blocks, report.kv.block_size) == (20, 8)
    assert report.settings["max_num_seqs"] == 3 and report.settings["max_num_batched_tokens"] == 64
    assert max(sample.running for sample in report.samples) <= 3
    assert engine.max_model_len == min(20 * 8, bench.base().max_model_len)


def test_bytes_stay_the_same_with_another_block_size(bench: EngineVariants) -> None:
    base, other = bench.base().ledger, bench.engine(block_size=64).ledger
    assert other.block_bytes == 4 * base.block_bytes
    assert other.num_blocks == base.num_blocks // 4


def test_an_engine_left_in_the_middle_does_not_hurt_the_next(bench: EngineVariants) -> None:
    expected = tokens(bench.engine())
    left = bench.engine()
    left.add_request("gone", list(range(10, 40)), SamplingParams(max_tokens=50, ignore_eos=True))
    left.step()
    assert tokens(bench.engine()) == expected


def test_more_blocks_than_there_are(bench: EngineVariants) -> None:
    with pytest.raises(ConfigError, match="takes a machine with more memory"):
        bench.engine(num_blocks=10**9)
