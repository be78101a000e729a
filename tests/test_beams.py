"""Beam search through LLM, AsyncLLM and the engine, on a tiny model; the scheduler's part is in scheduler/."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import fakes
import pytest

from quire import LLM, AsyncLLM, BeamSearchParams, CompletionOutput, SamplingParams
from quire.errors import BadRequestError

SETTINGS: dict[str, Any] = {
    "load_format": "dummy",
    "device": "cpu",
    "dtype": "float32",
    "num_threads": 1,
    "block_size": 8,
    "max_model_len": 256,
}
PROMPTS = [[(7 * i + j) % 200 + 3 for j in range(5 + 9 * i)] for i in range(4)]
PARAMS = BeamSearchParams(beam_width=4, max_tokens=20)


def make(model: Path, **settings: Any) -> LLM:
    return LLM(str(model), **{**SETTINGS, "num_gpu_blocks_override": 400, **settings})


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> LLM:
    return make(tiny_model)


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[list[int]]]:
    return [tokens_of(llm, [prompt])[0] for prompt in PROMPTS]


def tokens_of(llm: LLM, prompts: list[list[int]], params: BeamSearchParams = PARAMS) -> list[list[list[int]]]:
    outputs = llm.beam_search(prompts, params)
    return [[sequence.tokens for sequence in output.sequences] for output in outputs]


def shown(one: CompletionOutput) -> list[int]:
    """Without the end token, as beam_search gives them."""
    return one.token_ids[: len(one.token_ids) - (one.finish_reason == "stop")]


def test_every_beam_has_the_logprob_of_its_tokens(llm: LLM) -> None:
    prompt = PROMPTS[1]
    (output,) = llm.beam_search([prompt], BeamSearchParams(beam_width=5, max_tokens=12, length_penalty=0.7))
    assert [one.score for one in output.sequences] == sorted((one.score for one in output.sequences), reverse=True)
    assert len({tuple(one.tokens) for one in output.sequences}) == 5
    for one in output.sequences:
        assert one.tokens[: len(prompt)] == prompt and one.finish_reason == "length"
        (again,) = llm.generate([one.tokens], SamplingParams(max_tokens=1, prompt_logprobs=0), use_tqdm=False)
        assert again.prompt_logprobs is not None
        places = again.prompt_logprobs[len(prompt) :]
        logprobs = [entry[token] for entry, token in zip(places, one.tokens[len(prompt) :], strict=True)]
        assert one.cum_logprob == pytest.approx(sum(each.logprob for each in logprobs), abs=1e-4)
        assert one.score == pytest.approx(one.cum_logprob / 12**0.7)
        assert [each.rank for each in logprobs] == [next(iter(entry.values())).rank for entry in one.logprobs]


def test_one_beam_is_greedy(llm: LLM) -> None:
    ((found,),) = tokens_of(llm, [PROMPTS[0]], BeamSearchParams(beam_width=1, max_tokens=9, ignore_eos=True))
    (greedy,) = llm.generate([PROMPTS[0]], SamplingParams(temperature=0, max_tokens=9, ignore_eos=True), use_tqdm=False)
    assert found[len(PROMPTS[0]) :] == greedy.outputs[0].token_ids


def test_a_temperature_changes_what_beams_are_ranked_by(llm: LLM) -> None:
    hot = BeamSearchParams(beam_width=2, max_tokens=3, temperature=50.0)
    (output,) = llm.beam_search([PROMPTS[0]], hot)
    vocab = llm.llm_engine.built.inputs.vocab_size
    (entry,) = output.sequences[0].logprobs[0].values()
    assert entry.logprob == pytest.approx(-math.log(vocab), abs=0.2)


@pytest.mark.parametrize(
    "settings",
    [
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}},
        {"num_gpu_blocks_override": 22, "max_model_len": 100},
        {"num_gpu_blocks_override": 29, "max_model_len": 100, "enable_prefix_caching": False, "swap_space_gb": 0.01},
    ],
    ids=["no prefix cache", "chunks", "drafts for others", "few blocks", "few blocks, no prefix cache"],
)
def test_the_same_beams_in_any_company(
    tiny_model: Path, alone: list[list[list[int]]], settings: dict[str, Any]
) -> None:
    llm = make(tiny_model, **settings)
    assert tokens_of(llm, PROMPTS) == alone
    if "num_gpu_blocks_override" in settings:
        assert llm.llm_engine.core.scheduler.stats.num_preemptions > 0
    # Cached blocks, others' and its own, change nothing.
    engine = llm.llm_engine
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(f"beams-{i}", {"prompt_token_ids": prompt}, PARAMS)
        engine.add_request(f"other-{i}", {"prompt_token_ids": prompt}, SamplingParams(n=2, max_tokens=9, seed=i))
    done = {}
    while engine.has_unfinished_requests():
        done |= {output.request_id: output for output in engine.step() if output.finished}
    for i, prompt in enumerate(PROMPTS):
        assert [prompt + shown(one) for one in done[f"beams-{i}"].outputs] == alone[i]
    engine.core.kv.check()
    assert engine.core.kv.num_used_blocks == 0


def test_sliding_windows_keep_the_blocks_of_every_beam(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    model = fakes.write_tiny_model(tmp_path, **changes)
    wide, narrow = make(model), make(model, num_gpu_blocks_override=32, max_num_seqs=12)
    assert tokens_of(wide, PROMPTS) == tokens_of(narrow, PROMPTS)


def test_a_stop_token_ends_a_beam(llm: LLM) -> None:
    (plain,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True))
    stop = plain.sequences[0].tokens[len(PROMPTS[0]) + 2]
    params: dict[str, Any] = {"beam_width": 3, "max_tokens": 8, "ignore_eos": True, "stop_token_ids": [stop]}
    params |= {"length_penalty": 0.0, "early_stopping": True}
    (output,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(**params))
    ended = [one for one in output.sequences if one.finish_reason == "stop"]
    assert ended and all(one.stop_reason == stop and one.tokens[-1] != stop for one in ended)
    assert all(next(iter(one.logprobs[-1])) == stop for one in ended)
    (shown,) = llm.beam_search([PROMPTS[0]], BeamSearchParams(**params, include_stop_str_in_output=True))
    assert [one.tokens for one in shown.sequences] == [
        one.tokens + [stop] * (one.finish_reason == "stop") for one in output.sequences
    ]


def test_an_aborted_search_gives_its_blocks_back(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("gone", {"prompt_token_ids": PROMPTS[2]}, PARAMS)
    for _ in range(5):
        engine.step()
    (output,) = engine.abort_request("gone")
    assert [one.finish_reason for one in output.outputs] == ["abort"] * 4
    assert {len(one.token_ids) for one in output.outputs} == {5}  # what they had
    while engine.core.has_work:
        engine.step()
    engine.core.kv.check()
    assert engine.core.kv.num_used_blocks == 0


def test_async(tiny_model: Path, alone: list[list[list[int]]]) -> None:
    async def search() -> list[Any]:
        engine = AsyncLLM(str(tiny_model), **SETTINGS, num_gpu_blocks_override=400)
        try:
            prompt: Any = {"prompt_token_ids": PROMPTS[0]}
            return [output async for output in engine.beam_search(prompt, "one", PARAMS)]
        finally:
            engine.shutdown()

    (output,) = asyncio.run(search())
    assert output.finished
    assert [PROMPTS[0] + shown(one) for one in output.outputs] == alone[0]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"beam_width": 0}, "beam_width"),
        ({"beam_width": 2.5}, "beam_width"),
        ({"beam_width": 1000}, "beam_width"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0}, "temperature"),
        ({"length_penalty": float("nan")}, "length_penalty"),
        ({"early_stopping": "soon"}, "early_stopping"),
        ({"stop_token_ids": list(range(20))}, "stop_token_ids"),
        ({"top_p": 0.5}, "top_p"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"stop": ["x"]}, "stop"),
        ({"n": 2}, "n"),
        ({"seed": 1}, "seed"),
        ({"beam_widht": 2}, "beam_widht"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(given: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as refused:
        BeamSearchParams(**{"beam_width": 2, **given})
    assert refused.value.param == param


def test_what_means_nothing_is_taken() -> None:
    BeamSearchParams(beam_width=2, top_p=1.0, top_k=-1, presence_penalty=0.0, logprobs=0)  # type: ignore[call-arg]


def test_wider_than_the_engine_is_refused(llm: LLM, tiny_model: Path) -> None:
    small = make(tiny_model, max_num_seqs=4, max_num_batched_tokens=64)
    with pytest.raises(BadRequestError, match="max_num_seqs=4"):
        small.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=5, max_tokens=4))
    with pytest.raises(BadRequestError, match="vocabulary"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=60, max_tokens=4, stop_token_ids=[*range(8)]))
    with pytest.raises(BadRequestError, match="BeamSearchParams"):
        llm.beam_search([PROMPTS[0]], SamplingParams())  # type: ignore[arg-type]
