"""A model split among ranks gives the tokens that it gives whole, whatever else is asked of the engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_models import write_lively_model

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.engine.variants import EngineVariants
from quire.errors import ConfigError, MemoryBudgetError
from quire.params import SamplingParams
from quire.structured import StructuredOutputsParams

DEGREES = [(3, 1), (2, 2)]  # heads that do not divide; stages. test_combinations has (2, 1), test_ray_ranks (1, 2)
HEAD = list(range(60, 93))  # what several prompts begin with


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively_model(tmp_path_factory.mktemp("lively"))


def config_of(model: Path, **changes: Any) -> EngineConfig:
    settings: dict[str, Any] = {
        "model": str(model),
        "device": "cpu",
        "dtype": "float32",
        "num_threads": 1,
        "block_size": 4,
        "max_model_len": 160,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 48,
        "num_gpu_blocks_override": 200,
        "swap_space_gb": 0.002,
    }
    return EngineConfig(**(settings | changes))


@pytest.fixture(scope="module")
def whole(model: Path) -> Iterator[EngineVariants]:
    variants = EngineVariants(config_of(model))
    yield variants
    variants.clear()


@pytest.fixture(scope="module", params=DEGREES, ids=lambda degrees: f"tp {degrees[0]}, pp {degrees[1]}")
def split(model: Path, request: pytest.FixtureRequest) -> Iterator[EngineVariants]:
    tensor_size, num_stages = request.param
    variants = EngineVariants(config_of(model, tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages))
    variants.base()
    yield variants
    variants.clear()


def work() -> list[tuple[list[int], SamplingParams]]:
    """Greedy and sampled, short and long, with everything that changes what is sampled."""
    asks: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "n": 3},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "logprobs": 3},
        {"temperature": 0.0, "prompt_logprobs": 2, "logprobs": 0},
        {"temperature": 1.2, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 0.7, "min_p": 0.05, "logit_bias": {7: 3.0, 99: -100.0}},
        {"temperature": 1.0, "allowed_token_ids": list(range(20, 200)), "min_tokens": 5},
        {"temperature": 0.0, "stop": ["A"]},
        {"temperature": 1.0, "stop_token_ids": [11, 12, 13]},
        {"temperature": 1.0, "max_tokens": 1},
        {"temperature": 1.0, "ignore_eos": False, "structured_outputs": StructuredOutputsParams(regex="[0-9]{4,9}x")},
    ]
    found = []
    for i, ask in enumerate(asks):
        own = [(i * 37 + j * 11) % 250 for j in range(3 + 7 * (i % 4))]
        settings = {"max_tokens": 24, "seed": 100 + i, "ignore_eos": True} | ask
        found.append((HEAD + own if i % 2 else own, SamplingParams(**settings)))
    return found


def run(engine: LLMEngine, aborted: str | None = None) -> dict[str, Any]:
    """Every request's outcome: tokens, text, why it ended, logprobs."""
    for i, (prompt, params) in enumerate(work()):
        engine.add_request(f"r{i}", prompt, params)
    found: dict[str, Any] = {}
    num_steps = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = (
                    [
                        (list(o.token_ids), o.text, o.finish_reason, o.stop_reason, entries(o.logprobs))
                        for o in output.outputs
                    ],
                    entries(output.prompt_logprobs),
                )
        num_steps += 1
        if num_steps == 6 and aborted:
            engine.abort_request(aborted)
    engine.core.kv.check()
    return found


def entries(logprobs: Any) -> Any:
    """Sums over ranks differ in the last bits."""
    if logprobs is None:
        return None
    return [
        None if each is None else {token: (Near(entry.logprob), entry.rank) for token, entry in each.items()}
        for each in logprobs
    ]


class Near(float):
    """Equal to floats that differ in the last bits only."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, float) and abs(self - other) < 1e-3

    __hash__ = float.__hash__


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
        {"num_blocks": 48, "preemption": "recompute"},
        {"num_blocks": 48, "preemption": "swap"},
        {"max_num_seqs": 3},
    ],
    ids=["plain", "chunks without a cache", "recompute", "swap", "few at a time"],
)
def test_tokens_are_those_of_the_whole_model(
    whole: EngineVariants, split: EngineVariants, changes: dict[str, Any]
) -> None:
    expected = run(whole.engine(**changes))
    engine = split.engine(**changes)
    assert run(engine) == expected
    if "preemption" in changes:
        assert engine.core.scheduler.stats.num_preemptions > 0
    assert len({token for outcome in expected.values() for each in outcome[0] for token in each[0]}) > 40


def test_steps_of_different_requests_fill_the_pipeline(split: EngineVariants) -> None:
    """No sequence is in two steps at once, and each step has its share of them."""
    engine = split.engine(enable_prefix_caching=False)
    num_stages = split.config.pipeline_parallel_size
    for i in range(8):
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        engine.add_request(f"r{i}", [i + 1, 3, 5], params)
    widths, in_flight = [], []
    while engine.has_unfinished_requests():
        engine.step()
        in_flight.append(engine.core.scheduler.num_in_flight)
        plan = engine.core.last_plan
        assert plan is not None
        widths.append(len(plan.spans))
    middle = slice(len(widths) // 3, 2 * len(widths) // 3)
    assert set(widths[middle]) == {8 // num_stages}
    assert min(in_flight[middle]) == engine.core.executor.depth - 1


def test_an_abort_leaves_the_others_alone(whole: EngineVariants, split: EngineVariants) -> None:
    expected, found = run(whole.engine(), "r4"), run(split.engine(), "r4")
    expected.pop("r4", None), found.pop("r4", None)  # how far it came depends on the steps in flight
    assert found == expected


def test_a_second_prompt_finds_the_first_ones_blocks(split: EngineVariants) -> None:
    engine = split.engine()
    first = run(engine)
    hits = engine.core.kv.counters.prefix.num_hit_tokens
    assert run(engine) == first
    assert engine.core.kv.counters.prefix.num_hit_tokens > hits + len(HEAD)


def test_levels_below_are_the_ranks_own_from_their_start(split: EngineVariants, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="from the start"):
        split.engine(kv_disk_path=str(tmp_path), kv_disk_size=1 << 20)


def test_the_ledger_counts_one_ranks_bytes(whole: EngineVariants, split: EngineVariants) -> None:
    """The rank with the most KV heads, so that no rank has less room than it says."""
    ledger, all_bytes = split.base().ledger, whole.base().ledger.block_bytes
    degree = split.config.tensor_parallel_size
    assert ledger.num_blocks == 200 and ledger.kv_bytes == 200 * ledger.block_bytes
    assert ledger.block_bytes == all_bytes * -(-3 // degree) // 3 // split.config.pipeline_parallel_size
    assert ledger.weight_bytes < whole.base().ledger.weight_bytes


def test_degrees_that_do_not_fit_are_refused_before_anything_starts(model: Path) -> None:
    with pytest.raises(ConfigError, match="use 1 to 6"):
        LLMEngine.from_config(config_of(model, tensor_parallel_size=7))
    with pytest.raises(ConfigError, match="use 1 to 2"):
        LLMEngine.from_config(config_of(model, pipeline_parallel_size=3))
    with pytest.raises(ConfigError, match="'mp' or 'ray'"):
        config_of(model, tensor_parallel_size=2, distributed_executor_backend="uni")


def test_a_rank_that_cannot_have_its_memory_says_what_one_process_would(model: Path) -> None:
    config = config_of(model, tensor_parallel_size=2, num_gpu_blocks_override=3, swap_space_gb=0.0)
    with pytest.raises(MemoryBudgetError, match=r"rank \d on .*max_model_len"):
        LLMEngine.from_config(config)


def test_ranks_that_share_no_memory(whole: EngineVariants, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on machines of their own: everything goes over gloo."""
    monkeypatch.setenv("QUIRE_SHARED_MEMORY_RANKS", "0")
    engine = LLMEngine.from_config(config_of(model, tensor_parallel_size=2, pipeline_parallel_size=2))
    assert run(engine) == run(whole.engine())
    engine.close()
