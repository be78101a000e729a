"""What every executor has to keep of the contract in quire/plan.py, whatever it runs on.

The real scheduler and block manager drive each of them through random work: prompts in chunks, shared prefixes, forks,
beams, preemption by both ways, aborts, drafts that are right or wrong, several steps in flight. Each request must get
the tokens that it gets alone, and blocks and sequences are checked after every step.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from executor.test_graphs_played_back import PlainRing, with_graphs
from scheduler.harness import Proposer, Rig, make_request
from scheduler.test_drafts import rig_with_drafts

from quire.config import EngineConfig
from quire.engine.llm_engine import LLMEngine
from quire.executor import decode_graphs, mixed_graphs
from quire.executor.base import Executor
from quire.params import SamplingSpec
from quire.request import BeamSpec, Request, Sequence

NUM_BLOCKS, BLOCK_SIZE, MAX_LEN, NUM_ROWS = 72, 4, 100, 6
VOCAB = 50  # of the prompts: small, so that they share prefixes
STEPS = 10_000


class RightOrWrong(Proposer):
    """Drafts from what a run alone gave, of which some tokens are changed."""

    def __init__(self, lines: dict[tuple[str, int], list[int]], accuracy: float) -> None:
        self._lines, self._accuracy = lines, accuracy
        self._rng = random.Random(3)

    def propose(self, seq: Sequence) -> list[int] | int:
        if seq.num_pending_tokens:
            return 0
        line = self._lines[seq.request.request_id, seq.index][seq.num_output_tokens :]
        known = line[: self._rng.randrange(5)]
        return [token if self._rng.random() < self._accuracy else (token + 1) % VOCAB for token in known]


class WithDepth:
    """An executor that is given fewer steps at once than it would take."""

    def __init__(self, inner: Executor, depth: int) -> None:
        self.submit, self.collect, self.depth = inner.submit, inner.collect, depth


def local(weights: Path, **settings: Any) -> LLMEngine:
    config = EngineConfig(
        model=str(weights),
        device="cpu",
        load_format="dummy",
        dtype="float32",
        num_threads=1,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_LEN,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=24,
        num_gpu_blocks_override=NUM_BLOCKS,
        swap_space_gb=0.002,
        **settings,
    )
    return LLMEngine.from_config(config)


def with_playback(weights: Path) -> LLMEngine:
    engine = local(weights)
    with_graphs(engine)
    while engine.core.prepare_more():
        pass
    return engine


def among_ranks(weights: Path) -> LLMEngine:
    return local(weights, tensor_parallel_size=2)


MAKERS: dict[str, Callable[[Path], LLMEngine]] = {
    "local": local,
    "graphs played back": with_playback,
    "ranks": among_ranks,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.write_tiny_model(tmp_path_factory.mktemp("conformance"))


@pytest.fixture(scope="module")
def engines(weights: Path) -> Iterator[Callable[[str], LLMEngine]]:
    """Those with processes of their own are started once."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def engine(name: str) -> LLMEngine:
            made = MAKERS[name](weights)
            stack.callback(made.close)
            return made

        yield engine


@pytest.fixture(autouse=True)
def _on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (decode_graphs, mixed_graphs):
        monkeypatch.setattr(module, "StagingRing", PlainRing)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    yield


def requests(seed: int, count: int) -> list[Request]:
    """The same ones at each call."""
    rng = random.Random(seed)
    head = [rng.randrange(VOCAB) for _ in range(17)]
    made = [
        make_request(
            (head if rng.random() < 0.5 else []) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 30))],
            max_tokens=rng.randint(1, 30),
            n=rng.choice([1, 1, 1, 2]),
            seed=i,
            request_id=f"r{i}",
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice([None, None, None, 1]),
        )
        for i in range(count)
    ]
    for request in made[3::6]:
        request.n, request.beams, request.max_tokens = 3, BeamSpec(), min(request.max_tokens, 12)
        request.spec = SamplingSpec()
    return made


def run(rig: Rig, work: list[Request], rng: random.Random) -> set[str]:
    aborted, waiting = set(), list(work)
    while waiting or rig.scheduler.has_work:
        if waiting and rng.random() < 0.5:
            rig.add(waiting.pop(0))
        if rng.random() < 0.02 and rig.scheduler.requests:
            victim = rng.choice(list(rig.scheduler.requests))
            rig.abort(victim)
            aborted.add(victim)
        rig.step()
    return aborted


def check_results(rig: Rig) -> None:
    """A result has an entry for each row that samples, and as many tokens as its span allows."""
    for plan, result in zip(rig.history, rig.results, strict=True):
        rows = plan.sampled_rows()
        assert result.step == plan.step and len(result.tokens) == len(rows)
        beams = {row for group in plan.beams for row in group.rows}
        assert beams <= set(rows)
        for group, candidates in zip(plan.beams, result.candidates, strict=True):
            assert len(candidates) == len({(one.parent, one.token_id) for one in candidates}) == group.num_candidates
            scores = [one.score for one in candidates]
            assert scores == sorted(scores, reverse=True)
            for one in candidates:
                assert one.score == pytest.approx(group.scores[one.parent] + one.logprob, abs=1e-5)
        for i, (row, tokens) in enumerate(zip(rows, result.tokens, strict=True)):
            if row in beams:
                assert not tokens and i not in result.logprobs
                continue
            drafts = plan.spans.drafts.get(row, [])
            most = 1 + (drafts if isinstance(drafts, int) else len(drafts))
            assert 1 <= len(tokens) <= most or i in result.failed
            assert i not in result.logprobs or len(result.logprobs[i]) == len(tokens)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_real_executor(engines: Callable[[str], LLMEngine], name: str, preemption: str) -> None:
    engine = engines(name)
    executor = engine.core.executor
    num_host_blocks = engine.ledger.num_host_blocks
    count = 30 if name == "ranks" else 60

    def rig(num_blocks: int, depth: int | None = None) -> Rig:
        executor.reset()  # type: ignore[attr-defined]
        return Rig(
            executor=executor if depth is None else WithDepth(executor, depth),
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            num_host_blocks=min(num_host_blocks, 40),
            max_num_seqs=NUM_ROWS,
            max_num_batched_tokens=24,
            max_model_len=MAX_LEN,
            preemption=preemption,
        )

    lines: dict[tuple[str, int], list[int]] = {}
    for request in requests(1, count):
        alone = rig(NUM_BLOCKS)
        alone.add(request)
        alone.run()
        lines |= {(request.request_id, i): line for i, line in enumerate(alone.outputs(request))}
    # What a draft follows is known only where no step is in flight, so that deep ones get a second run without.
    for depth in {1, executor.depth}:
        crowd = rig(30, depth)
        if depth == 1:
            crowd.scheduler.drafter = RightOrWrong(lines, 0.7)
        work = requests(1, count)
        aborted = run(crowd, work, random.Random(2))
        crowd.check_idle()
        check_results(crowd)
        stats = crowd.scheduler.stats
        assert stats.num_preemptions > 0
        assert any(group.parents for plan in crowd.history for group in plan.beams)
        assert depth > 1 or 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        for request in work:
            ours = crowd.outputs(request)
            if request.beams is not None and request.request_id in aborted:
                continue  # which beams there are before the end says nothing of it
            theirs = [lines[request.request_id, i] for i in range(request.n)]
            if request.request_id in aborted:
                assert all(a == b[: len(a)] for a, b in zip(ours, theirs, strict=False))
            else:
                assert ours == theirs


@pytest.mark.parametrize("name", ["local", "graphs played back"])
def test_a_step_runs_behind_the_load_that_it_awaits(engines: Callable[[str], LLMEngine], name: str) -> None:
    """Requests that come alone, from host memory: each gets the tokens that it gets from a cache."""
    engine = engines(name)
    engine.core.executor.reset()  # type: ignore[attr-defined]
    rig = Rig(
        executor=engine.core.executor,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_host_blocks=min(engine.ledger.num_host_blocks, 40),
        host_block_s=0.0,
        prefill_tokens_per_s=1.0,
        max_num_seqs=NUM_ROWS,
        max_num_batched_tokens=24,
        max_model_len=MAX_LEN,
    )
    for length in (BLOCK_SIZE + 1, 3 * BLOCK_SIZE, 3 * BLOCK_SIZE + 2):
        requests = [make_request(length, max_tokens=5) for _ in range(2)]
        requests[1].prompt_token_ids = requests[0].prompt_token_ids = [each % VOCAB for each in range(length, 0, -1)]
        rig.add(requests[0])
        rig.run()
        assert rig.kv.reset_prefix_cache()
        first = len(rig.history)
        rig.add(requests[1])
        rig.run()
        assert rig.history[first].awaits_loads and rig.history[first].spans.rows
        assert rig.outputs(requests[1]) == rig.outputs(requests[0])
        rig.check_idle()


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_simulated_executor_for_ten_thousand_steps(depth: int) -> None:
    rng = random.Random(depth)
    num_steps, seed = 0, 0
    while num_steps < STEPS // 3 + 1:
        seed += 1
        rig = rig_with_drafts(
            seed,
            rng.choice([0.0, 0.4, 0.9]),
            depth=depth,
            block_size=rng.choice([4, 8]),
            num_blocks=rng.randint(60, 90),
            num_host_blocks=30,
            windows=rng.choice([(None,), (None, 8), (12,)]),
            transfer_steps=rng.randrange(3),
            preemption=rng.choice(["recompute", "swap"]),
            max_num_batched_tokens=24,
        )
        run(rig, requests(seed, 40), rng)
        rig.check_idle()
        check_results(rig)
        num_steps += len(rig.history)


def test_what_is_called_an_executor_has_its_methods(weights: Path) -> None:
    executor: Executor = local(weights).core.executor
    assert executor.depth >= 1
    executor.close()
