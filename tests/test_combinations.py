"""docs/combinations.md, tried: every kind of request on every kind of engine gives what it gives on a plain one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, RequestOutput, SamplingParams

# Twice the same words, so that drafts have something to find; a shared beginning, so that prefixes are found.
SYSTEM = "one two three four five six seven eight nine ten " * 2
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}

NONDETERMINISTIC = ("adapters", "two ranks")  # engines that refuse `deterministic`

REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.9, "seed": 1},
    "top-k, top-p, min-p": {"temperature": 1.1, "seed": 2, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    "n": {"temperature": 0.9, "seed": 3, "n": 3},
    "logprobs": {"logprobs": 3},
    "prompt logprobs": {"prompt_logprobs": 2},
    "stop strings": {"temperature": 0.9, "seed": 4, "stop": ["e", "Q"]},
    "min tokens": {"temperature": 0.9, "seed": 5, "min_tokens": 12, "stop_token_ids": list(range(40))},
    "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bias": {"logit_bias": {"65": 3.0, "66": -100.0}},
    "bad words": {"bad_words": ["a", "bc"]},
    "allowed tokens": {"allowed_token_ids": list(range(60, 90))},
    "deterministic": {"temperature": 0.9, "seed": 7, "logprobs": 2, "deterministic": True},
    "structured": {"temperature": 0.9, "seed": 6, "max_tokens": 40, "structured_outputs": {"json": SCHEMA}},
}
ENGINES: dict[str, dict[str, Any]] = {
    "without a prefix cache": {"enable_prefix_caching": False},
    "prompts in chunks": {"max_num_batched_tokens": 32, "max_num_seqs": 16},
    "blocks of 4": {"block_size": 4},
    "few blocks, computed again": {"num_gpu_blocks_override": 24, "preemption": "recompute"},
    "few blocks, swapped": {"num_gpu_blocks_override": 24, "preemption": "swap", "swap_space_gb": 0.01},
    "drafts by n-gram": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
    "drafts by suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}},
    "batch invariance": {"batch_invariant": True},
    "adapters": {"enable_lora": True, "max_loras": 2},
    "two ranks": {"tensor_parallel_size": 2},
    "a disk level": {"num_gpu_blocks_override": 24, "kv_disk_path": "disk", "kv_disk_size": "64MiB"},
}


def make(model: Path, folder: Path, **settings: Any) -> LLM:
    if "kv_disk_path" in settings:
        settings["kv_disk_path"] = str(folder / settings["kv_disk_path"])
    return LLM(str(model), load_format="dummy", max_model_len=256, dtype="float32", **settings)


def ask(llm: LLM, deterministic: bool | None = None) -> dict[str, RequestOutput]:
    """Every kind of request, all of them at once; `deterministic`: whether all of them are, or none."""
    prompts = [f"{SYSTEM} number {i}: one two three" for i in range(len(REQUESTS))]
    params = [SamplingParams(**({"temperature": 0.0, "max_tokens": 24} | fields)) for fields in REQUESTS.values()]
    if deterministic is not None:
        params = [each.clone(deterministic=deterministic) for each in params]
    return dict(zip(REQUESTS, llm.generate(prompts, params, use_tqdm=False), strict=True))


def beams(llm: LLM) -> list[tuple[list[int], float]]:
    params = BeamSearchParams(beam_width=3, max_tokens=12)
    (output,) = llm.beam_search([{"prompt": SYSTEM}], params)
    return [(beam.tokens, beam.cum_logprob) for beam in output.sequences]


@pytest.fixture(scope="module")
def plain(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, RequestOutput], Any]:
    llm = make(tiny_model, tmp_path_factory.mktemp("plain"))
    return ask(llm), beams(llm)


@pytest.mark.parametrize("engine", ENGINES)
def test_every_request_on_every_engine(
    engine: str, tiny_model: Path, tmp_path: Path, plain: tuple[dict[str, RequestOutput], Any]
) -> None:
    expected, expected_beams = plain
    llm = make(tiny_model, tmp_path, **ENGINES[engine])
    for _ in range(2):  # the second time, what can be found in a cache or drafted from earlier answers is
        for kind, output in ask(llm, False if engine in NONDETERMINISTIC else None).items():
            check(kind, output, expected[kind])
        for (tokens, score), (wanted, wanted_score) in zip(beams(llm), expected_beams, strict=True):
            assert tokens == wanted and score == pytest.approx(wanted_score, abs=1e-3)


@pytest.mark.parametrize("engine", ["drafts by suffix", "few blocks, swapped", "a disk level"])
def test_every_request_marked_deterministic(
    engine: str, tiny_model: Path, tmp_path: Path, plain: tuple[dict[str, RequestOutput], Any]
) -> None:
    llm = make(tiny_model, tmp_path, **ENGINES[engine])
    for _ in range(2):
        for kind, output in ask(llm, True).items():
            check(kind, output, plain[0][kind])


@pytest.mark.parametrize("engine", ["drafts by suffix", "few blocks, swapped", "a disk level"])
def test_every_request_after_a_sleep(
    engine: str, tiny_model: Path, tmp_path: Path, plain: tuple[dict[str, RequestOutput], Any]
) -> None:
    llm = make(tiny_model, tmp_path, **ENGINES[engine])
    for keep_kv in (False, True):
        ask(llm)
        llm.sleep(keep_kv=keep_kv)
        llm.wake_up()
        for kind, output in ask(llm).items():
            check(kind, output, plain[0][kind])


def check(kind: str, output: RequestOutput, expected: RequestOutput) -> None:
    for mine, wanted in zip(output.outputs, expected.outputs, strict=True):
        assert (mine.token_ids, mine.text) == (wanted.token_ids, wanted.text), kind
        assert (mine.finish_reason, mine.stop_reason) == (wanted.finish_reason, wanted.stop_reason), kind
        assert (mine.logprobs is None) == (wanted.logprobs is None)
        for found, known in zip(mine.logprobs or (), wanted.logprobs or (), strict=True):
            check_logprobs(found, known)
    assert (output.prompt_logprobs is None) == (expected.prompt_logprobs is None)
    for found, known in zip(output.prompt_logprobs or (), expected.prompt_logprobs or (), strict=True):
        if known is not None:
            check_logprobs(found, known)


def check_logprobs(found: Any, known: Any) -> None:
    assert list(found) == list(known)
    assert [one.logprob for one in found.values()] == pytest.approx([one.logprob for one in known.values()], abs=1e-3)
