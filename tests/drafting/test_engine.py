"""Drafting in a real engine: tokens, logprobs and texts are those of plain decoding, whatever a request asks for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import fakes
import pytest
from executor.test_drafts import KINDS, PROMPTS, logprobs, make, seen

from quire import LLM, AsyncLLM, OutputKind, SamplingParams
from quire.kernels.cpu import unavailable_reason


def free_drafts(llm: LLM | AsyncLLM) -> None:
    """Whatever is guessed is verified: which drafts would pay is not the question here."""
    engine = llm.llm_engine if isinstance(llm, LLM) else llm.engine
    fakes.draft_for_free(engine.core.scheduler)


# A vocabulary of few tokens, so that something is always found.
FEW = {"allowed_token_ids": [*range(40, 44)]}
ASKED: dict[str, dict[str, Any]] = {
    **{name: kind for name, kind in KINDS.items() if name != "bad words"},
    "bad words": {**KINDS["bad words"], "bad_words": ["ab", "c d"]},
    "min_tokens and stop tokens": {"temperature": 1.0, "seed": 9, "min_tokens": 9, "stop_token_ids": [40]},
    "stop string": {"temperature": 1.0, "seed": 11, "stop": ["a", "B", "9"], "include_stop_str_in_output": True},
}


@pytest.mark.parametrize("method", ["ngram", "suffix", "draft_model"])
def test_the_same_answers_as_without(tiny_model: Path, method: str) -> None:
    model = str(tiny_model) if method == "draft_model" else None  # itself: it is always right where it is greedy
    plain, drafting = make(tiny_model), make(tiny_model, speculative_config={"method": method, "model": model})
    free_drafts(drafting)
    stats = drafting.llm_engine.core.scheduler.stats
    for kind, fields in ASKED.items():
        params = SamplingParams(max_tokens=30, **{"ignore_eos": True, **FEW, **fields})
        before, verified = stats.num_accepted_tokens, stats.num_draft_tokens
        expected = plain.generate(PROMPTS, params, use_tqdm=False)
        outputs = drafting.generate(PROMPTS, params, use_tqdm=False)
        assert seen(outputs) == seen(expected), kind
        assert logprobs(outputs) == pytest.approx(logprobs(expected), abs=1e-4), kind
        found = [output.metrics for output in outputs]
        assert sum(m.num_accepted_tokens for m in found if m) == stats.num_accepted_tokens - before
        assert "stop" in kind or stats.num_draft_tokens > verified, kind
    core = drafting.llm_engine.core
    assert stats.num_accepted_tokens > 200
    core.kv.check()
    assert core.kv.num_used_blocks == 0
    by_name = {metric.name: metric.value for metric in drafting.get_metrics() if "spec_decode" in metric.name}
    assert by_name["vllm:spec_decode_num_accepted_tokens_total"] == stats.num_accepted_tokens
    assert by_name["vllm:spec_decode_num_draft_tokens_total"] == stats.num_draft_tokens
    assert by_name["vllm:spec_decode_num_drafts_total"] == stats.num_drafts
    of_places = [m for m in drafting.get_metrics() if m.name == "vllm:spec_decode_num_accepted_tokens_per_pos_total"]
    assert [m.labels["position"] for m in of_places] == [str(place) for place in range(len(of_places))]
    assert sum(m.value for m in of_places) == stats.num_accepted_tokens


@pytest.mark.skipif(unavailable_reason() is not None, reason="the native kernels are not built")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_drafts_leave_the_bits_of_plain_decoding(tiny_model: Path, dtype: str) -> None:
    """On a CPU drafts are attended to as decodes are."""
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=2, **FEW)
    settings: dict[str, Any] = {"dtype": dtype, "enable_prefix_caching": False}
    plain, drafting = make(tiny_model, **settings), make(tiny_model, speculative_config={"method": "ngram"}, **settings)
    free_drafts(drafting)
    expected, outputs = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (plain, drafting))
    assert seen(outputs) == seen(expected) and logprobs(outputs) == logprobs(expected)
    assert drafting.llm_engine.core.scheduler.stats.num_accepted_tokens > 20


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_with_too_few_blocks_small_steps_and_shared_prefixes(tiny_model: Path, preemption: str) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True, presence_penalty=0.3, **FEW)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, *prompt] for prompt in PROMPTS]
    expected = make(tiny_model).generate(prompts, params, use_tqdm=False)
    small = make(
        tiny_model,
        kv_cache_memory_bytes=100 << 10,
        max_model_len=64,
        max_num_batched_tokens=12,
        max_num_seqs=6,
        preemption=preemption,
        swap_space=0.01,
        speculative_config={"method": "suffix"},
    )
    free_drafts(small)
    for _ in range(2):  # the second time from the prefix cache, and from the first answers
        assert seen(small.generate(prompts, params, use_tqdm=False)) == seen(expected)
    stats = small.llm_engine.core.scheduler.stats
    assert stats.num_preemptions > 0 and 0 < stats.num_accepted_tokens < stats.num_draft_tokens
    small.llm_engine.core.kv.check()


def test_a_second_run_of_the_same_request_is_drafted_from_the_first(tiny_model: Path) -> None:
    llm = make(tiny_model, speculative_config={"method": "suffix"})
    free_drafts(llm)
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=1, ignore_eos=True)
    first, second = (llm.generate([PROMPTS[0]], params, use_tqdm=False)[0] for _ in range(2))
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    assert second.metrics is not None and second.metrics.num_accepted_tokens > 40


def test_rejected_drafts_are_found_by_nobody_in_the_prefix_cache(tiny_model: Path) -> None:
    """Blocks are full of wrong drafts now and then; a prompt that spells them must not find them."""
    plain, drafting = make(tiny_model), make(tiny_model, speculative_config={"method": "ngram"})
    free_drafts(drafting)
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, **FEW)
    outputs = drafting.generate(PROMPTS, params, use_tqdm=False)
    stats = drafting.llm_engine.core.scheduler.stats
    assert stats.num_accepted_tokens < stats.num_draft_tokens
    again = [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
    greedy = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=0)
    ours, theirs = (llm.generate(again, greedy, use_tqdm=False) for llm in (drafting, plain))
    assert any(output.num_cached_tokens for output in ours)
    assert seen(ours) == seen(theirs) and logprobs(ours) == pytest.approx(logprobs(theirs), abs=1e-4)


def test_layers_with_a_sliding_window(tmp_path: Path) -> None:
    """Blocks behind the window are given back while drafts reach ahead of it."""
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    model = fakes.write_tiny_model(tmp_path / "windowed", **changes)
    plain, drafting = make(model), make(model, speculative_config={"method": "suffix"})
    free_drafts(drafting)
    params = SamplingParams(max_tokens=80, temperature=1.0, seed=3, ignore_eos=True, **FEW)
    expected = plain.generate(PROMPTS, params, use_tqdm=False)
    assert seen(drafting.generate(PROMPTS, params, use_tqdm=False)) == seen(expected)
    assert drafting.llm_engine.core.scheduler.stats.num_accepted_tokens > 20
    drafting.llm_engine.core.kv.check()


def test_a_stream_gets_several_tokens_at_once_and_all_of_them(tiny_model: Path) -> None:
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, output_kind=OutputKind.DELTA, **FEW)
    expected = make(tiny_model).generate([PROMPTS[0]], params, use_tqdm=False)[0].outputs[0].token_ids

    async def read() -> list[list[int]]:
        settings: dict[str, Any] = {"block_size": 4, "kv_cache_memory_bytes": 4 << 20, "num_threads": 1, "seed": 2}
        engine = AsyncLLM(str(tiny_model), load_format="dummy", device="cpu", spec_method="ngram", **settings)
        free_drafts(engine)
        try:
            outputs = [output async for output in engine.generate(PROMPTS[0], params, "a")]
            assert outputs[-1].metrics is not None and outputs[-1].metrics.num_accepted_tokens > 10
            return [output.outputs[0].token_ids for output in outputs]
        finally:
            engine.shutdown()

    pieces = asyncio.run(read())
    assert [token for piece in pieces for token in piece] == expected
    assert max(map(len, pieces)) > 1


def test_a_model_with_a_draft_model_keeps_its_blocks_on_disk(tiny_model: Path, tmp_path: Path) -> None:
    """The two models' blocks are allocated together, and a store has the model's own."""
    settings: dict[str, Any] = {"kv_disk_path": str(tmp_path), "kv_disk_size": 64 << 20}
    llm = make(tiny_model, speculative_config={"method": "draft_model", "model": str(tiny_model)}, **settings)
    params = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    prompt = [5 + i % 90 for i in range(80)]
    [expected] = llm.generate([prompt], params, use_tqdm=False)
    core = llm.llm_engine.core
    core.settle(60.0)
    llm.reset_prefix_cache()
    [output] = llm.generate([prompt], params, use_tqdm=False)
    [store] = llm.llm_engine.built.executor.executor.stores
    assert store.counters.num_stored > 0 and not store.counters.num_errors  # whether they are loaded is up to rates
    assert seen([output]) == seen([expected])
