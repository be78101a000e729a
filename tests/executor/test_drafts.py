"""Drafts in a real engine: whatever is guessed, every request gets the tokens, logprobs and text of plain decoding."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from scheduler.harness import Proposer

from quire import LLM, SamplingParams
from quire.outputs import RequestOutput
from quire.request import Sequence

PROMPTS = [[7 + i, 20, 30 + i, 9, 9, 40 + i][: 3 + i % 4] for i in range(10)]

KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 1.0, "seed": 5},
    "filtered": {"temperature": 0.9, "seed": 6, "top_p": 0.8, "top_k": 40, "min_p": 0.02},
    "penalties": {
        "temperature": 0.8,
        "seed": 7,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "bias": {"temperature": 1.0, "seed": 8, "logit_bias": {5: 4.0, 6: -4.0}},
    "min_tokens and stop tokens": {"temperature": 1.0, "seed": 9, "min_tokens": 9, "stop_token_ids": [*range(3, 60)]},
    "bad words": {"temperature": 1.0, "seed": 3, "bad_words": ["hello", " the", "ab"]},
    "n and logprobs": {"temperature": 1.0, "seed": 4, "n": 3, "logprobs": 2, "prompt_logprobs": 1},
}


class Oracle(Proposer):
    """Knows how each sequence will go on, and says so with a given accuracy."""

    def __init__(self, outputs: list[RequestOutput], accuracy: float) -> None:
        self._lines = {
            (tuple(output.prompt_token_ids), completion.index): list(completion.token_ids)
            for output in outputs
            for completion in output.outputs
        }
        self._accuracy = accuracy
        self._rng = random.Random(1)

    def propose(self, seq: Sequence) -> list[int] | int:
        line = self._lines[tuple(seq.request.prompt_token_ids), seq.index]
        known = line[seq.num_output_tokens :][: self._rng.randrange(6)]
        return [token if self._rng.random() < self._accuracy else token + 1 for token in known]


def make(tiny_model: Path, **fields: Any) -> LLM:
    settings = {"block_size": 4, "kv_cache_memory_bytes": 4 << 20, "num_threads": 1, "dtype": "float32", **fields}
    return LLM(model=str(tiny_model), load_format="dummy", device="cpu", seed=2, **settings)


def seen(outputs: list[RequestOutput]) -> list[Any]:
    """All but the top logprobs, which may be near ties: steps of other widths add up in another order."""
    return [
        (c.token_ids, c.text, c.finish_reason, c.stop_reason, c.logprobs and len(c.logprobs))
        for output in outputs
        for c in output.outputs
    ]


def logprobs(outputs: list[RequestOutput]) -> list[float]:
    lines = [c for output in outputs for c in output.outputs if c.logprobs]
    return [c.logprobs[i][token].logprob for c in lines for i, token in enumerate(c.token_ids)]


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_as_without_drafts(tiny_model: Path, kind: str, accuracy: float) -> None:
    llm = make(tiny_model)
    params = SamplingParams(max_tokens=24, **{"ignore_eos": True, **KINDS[kind]})
    plain = llm.generate(PROMPTS, params, use_tqdm=False)
    llm.reset_prefix_cache()
    core = llm.llm_engine.core
    num_steps = core.scheduler.stats.num_steps
    core.scheduler.drafter = Oracle(plain, accuracy)
    drafted = llm.generate(PROMPTS, params, use_tqdm=False)
    stats = core.scheduler.stats
    assert seen(drafted) == seen(plain)
    assert logprobs(drafted) == pytest.approx(logprobs(plain), abs=1e-4)
    assert stats.num_drafts > 20
    assert (stats.num_accepted_tokens > 0) == (accuracy > 0)
    if accuracy == 1.0 and "stop" not in kind:
        assert stats.num_steps - num_steps < num_steps  # that is what it is for
    core.kv.check()
    assert core.kv.num_used_blocks == 0


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_with_too_few_blocks_and_small_steps(tiny_model: Path, preemption: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True, presence_penalty=0.3)
    plain = make(tiny_model).generate(PROMPTS, params, use_tqdm=False)
    small = make(
        tiny_model,
        kv_cache_memory_bytes=100 << 10,
        max_model_len=64,
        max_num_batched_tokens=12,
        max_num_seqs=6,
        preemption=preemption,
        swap_space=0.01,
    )
    core = small.llm_engine.core
    core.scheduler.drafter = Oracle(plain, 0.8)
    drafted = small.generate(PROMPTS, params, use_tqdm=False)
    assert core.scheduler.stats.num_preemptions > 0
    assert seen(drafted) == seen(plain)
