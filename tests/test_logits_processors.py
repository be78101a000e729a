"""Logits processors: callables that a request brings, and plugins that an engine is made with."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from quire import LLM, AsyncLLM, BatchUpdate, BeamSearchParams, SamplingParams
from quire.errors import BadRequestError, ConfigError
from quire.params import SamplingSpec
from quire.sampling import MoveDirectionality
from quire.sampling.processors import LogitsProcessors

SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "num_gpu_blocks_override": 200,
    "max_model_len": 256,
}
PROMPTS = [[i + 3, i + 5, i + 7] for i in range(6)]


def make(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return make(tiny_model)


def only(token: int) -> Any:
    def processor(token_ids: list[int], logits: Tensor) -> Tensor:
        banned = torch.full_like(logits, -torch.inf)
        banned[token] = 0.0
        return banned

    return processor


def counting(token_ids: list[int], logits: Tensor) -> Tensor:
    """The next token is the number of tokens so far."""
    return only(10 + len(token_ids))(token_ids, logits)  # type: ignore[no-any-return]


def raising(token_ids: list[int], logits: Tensor) -> Tensor:
    if len(token_ids) == 3:
        raise ValueError("no more")
    return logits


def tokens(llm: LLM, params: Any, prompts: Any = PROMPTS) -> list[list[int]]:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_sees_the_tokens_so_far(llm: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, max_tokens=5, ignore_eos=True, logits_processors=[counting])
    assert tokens(llm, params, PROMPTS[:2]) == [[10, 11, 12, 13, 14]] * 2


def test_processors_run_in_their_order_and_for_their_request_alone(llm: LLM) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    chained = plain.clone(logits_processors=[only(9), lambda _, logits: logits.roll(1)])
    with_prompt = plain.clone(logits_processors=[lambda prompt, output, logits: only(prompt[0])(output, logits)])
    alone = tokens(llm, plain)
    mixed = tokens(llm, [plain, chained, with_prompt, plain, plain, chained])
    assert [mixed[0], mixed[3], mixed[4]] == [alone[0], alone[3], alone[4]]
    assert mixed[1] == mixed[5] == [10] * 6 and mixed[2] == [PROMPTS[2][0]] * 6


def test_with_n_seeds_logprobs_penalties_and_preemption(tiny_model: Path, llm: LLM) -> None:
    def cold(token_ids: list[int], logits: Tensor) -> Tensor:
        return logits + 3.0 * (torch.arange(len(logits)) % 7 == len(token_ids) % 7)

    params = SamplingParams(
        n=2, seed=4, max_tokens=30, ignore_eos=True, presence_penalty=0.5, logprobs=1, logits_processors=[cold]
    )
    few = make(tiny_model, num_gpu_blocks_override=20, block_size=8, max_model_len=100)
    assert tokens(few, params) == tokens(llm, params)
    assert few.llm_engine.core.scheduler.stats.num_preemptions > 0
    (output,) = llm.generate([PROMPTS[0]], params.clone(n=1), use_tqdm=False)
    (again,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=1, logprobs=1), use_tqdm=False)
    # Logprobs are the model's own, from before the processors.
    assert output.outputs[0].logprobs is not None and again.outputs[0].logprobs is not None
    best = max(again.outputs[0].logprobs[0].values(), key=lambda one: one.logprob)
    assert max(one.logprob for one in output.outputs[0].logprobs[0].values()) == pytest.approx(best.logprob, abs=1e-5)


def test_with_drafts_the_tokens_are_the_same(tiny_model: Path, llm: LLM) -> None:
    def repeating(token_ids: list[int], logits: Tensor) -> Tensor:
        return only(20 + len(token_ids) % 3)(token_ids, logits)  # type: ignore[no-any-return]

    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logits_processors=[repeating])
    drafting = make(tiny_model, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    assert tokens(drafting, params) == tokens(llm, params)


@pytest.mark.parametrize(
    "processor", [raising, lambda ids, logits: None, lambda ids, logits: logits[:5]], ids=["raises", "None", "shape"]
)
def test_one_that_fails_ends_its_request_and_nothing_else(llm: LLM, processor: Any) -> None:
    plain = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    alone = tokens(llm, plain)
    outputs = llm.generate(PROMPTS, [plain, plain.clone(logits_processors=[processor]), *[plain] * 4], use_tqdm=False)
    failed = outputs[1].outputs[0]
    assert failed.finish_reason == "error" and "logits processor" in (failed.error or "")
    assert len(failed.token_ids) == (3 if processor is raising else 0)
    del outputs[1], alone[1]
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert llm.llm_engine.core.kv.num_used_blocks == 0


def test_async_and_their_cost(tiny_model: Path) -> None:
    async def run() -> tuple[list[int], dict[str, float]]:
        engine = AsyncLLM(str(tiny_model), **SETTINGS)
        try:
            params = SamplingParams(max_tokens=4, ignore_eos=True, logits_processors=[counting])
            async for output in engine.generate({"prompt_token_ids": PROMPTS[0]}, params, "one"):
                last = output
            metrics = await engine.get_metrics()
        finally:
            engine.shutdown()
        parts = {m.labels["part"]: m.value for m in metrics if m.name == "quire:step_seconds_total"}
        return last.outputs[0].token_ids, parts

    found, parts = asyncio.run(run())
    assert found == [10, 11, 12, 13]
    assert 0 < parts["logits_processors"] <= parts["sample"]


def test_bad_ones_are_refused() -> None:
    for given in ("x", [3], 5):
        with pytest.raises(BadRequestError, match="logits_processors"):
            SamplingParams(logits_processors=given)  # type: ignore[arg-type]


# -- plugins


class Forced:
    """vLLM's interface: `extra_args={"force": token}` forces a token."""

    made: ClassVar[list[Any]] = []

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.tokens: dict[int, int] = {}
        self.outputs: dict[int, list[int]] = {}
        self.made.append(self)

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for place, params, _, output in batch_update.added:
            self.tokens.pop(place, None)
            if params.extra_args:
                self.tokens[place] = params.extra_args["force"]
                self.outputs[place] = output
        for place in batch_update.removed:
            self.tokens.pop(place, None)
        for start, end, how in batch_update.moved:
            assert how is MoveDirectionality.UNIDIRECTIONAL
            self.tokens.pop(end, None)
            if start in self.tokens:
                self.tokens[end] = self.tokens.pop(start)
        assert all(place < batch_update.batch_size for place in self.tokens)

    def apply(self, logits: Tensor) -> Tensor:
        for place, token in self.tokens.items():
            if token < 0:
                raise RuntimeError("negative")
            logits[place] = -torch.inf
            logits[place, token] = 0.0
        return logits


class Sharper:
    """Argmax-invariant: keeps what is within 1e-3 of the likeliest."""

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        pass

    def apply(self, logits: Tensor) -> Tensor:
        return logits.masked_fill(logits < logits.amax(1, keepdim=True) - 1e-3, -torch.inf)


def test_a_plugin_sees_its_requests_wherever_they_stand(tiny_model: Path, llm: LLM) -> None:
    engine = make(tiny_model, logits_processors=[Forced], max_num_seqs=4, max_num_batched_tokens=16)
    plain = SamplingParams(temperature=0.0, ignore_eos=True)
    params = [
        plain.clone(max_tokens=2 + 3 * (i % 4), extra_args={"force": 30 + i} if i % 3 else None) for i in range(12)
    ]
    prompts = [[i + 3] * (1 + 5 * (i % 5)) for i in range(12)]
    found = tokens(engine, params, prompts)
    plainly = tokens(llm, [one.clone(extra_args=None) for one in params], prompts)
    assert found == [[30 + i] * params[i].max_tokens if i % 3 else plainly[i] for i in range(12)]  # type: ignore[operator]


def test_one_that_keeps_the_likeliest_makes_every_draw_greedy(tiny_model: Path, llm: LLM) -> None:
    engine = make(tiny_model, logits_processors=f"{__name__}:Sharper")
    drawn = SamplingParams(temperature=0.7, seed=3, max_tokens=8, ignore_eos=True)
    assert tokens(engine, drawn) == tokens(llm, drawn.clone(temperature=0.0))


def test_a_plugin_that_raises_ends_the_requests_of_its_step(tiny_model: Path) -> None:
    engine = make(tiny_model, logits_processors=[Forced])
    (output,) = engine.generate([PROMPTS[0]], SamplingParams(max_tokens=4, extra_args={"force": -1}), use_tqdm=False)
    assert output.outputs[0].finish_reason == "error" and "negative" in (output.outputs[0].error or "")
    good = SamplingParams(max_tokens=4, ignore_eos=True, extra_args={"force": 8})
    assert tokens(engine, good, [PROMPTS[0]]) == [[8] * 4]


def test_what_is_no_plugin_and_what_it_does_not_go_with_is_refused(tiny_model: Path, llm: LLM) -> None:
    for name in ("nowhere:Nothing", "json:JSONDecoder", "json"):
        with pytest.raises(ConfigError, match="logits_processors"):
            make(tiny_model, logits_processors=[name])
    with pytest.raises(ConfigError, match="speculative_config"):
        make(tiny_model, logits_processors=[Forced], speculative_config={"method": "ngram"})
    with pytest.raises(ConfigError, match="ranks"):
        make(tiny_model, logits_processors=[Forced], tensor_parallel_size=2)
    with pytest.raises(BadRequestError, match="extra_args"):
        llm.generate([PROMPTS[0]], SamplingParams(extra_args={"force": 1}), use_tqdm=False)
    with pytest.raises(BadRequestError, match="beam search"):
        make(tiny_model, logits_processors=[Forced]).beam_search([PROMPTS[0]], BeamSearchParams(beam_width=2))


def test_batch_updates_fill_holes_from_the_end() -> None:
    processors = LogitsProcessors([Forced(None, torch.device("cpu"), False)])
    for row in range(5):
        processors.add(row, SamplingSpec(extra_args={"force": 40 + row}), [1, 2], 1)
    for rows in ([0, 1, 2, 3], [0, 1, 2, 3], [4, 3], [2, 4, 0], [1], [3, 2, 1, 0, 4]):
        logits = torch.zeros(len(rows), 60)
        assert not processors.apply(logits, rows)
        assert logits.argmax(1).tolist() == [40 + row for row in rows]
