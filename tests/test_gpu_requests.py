"""Kinds of requests on CUDA that leave the plain path: drafts, a draft model, beams, grammars. The CPU's tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import fakes
import pytest

from quire import LLM, BeamSearchParams, SamplingParams, StructuredOutputsParams

pytestmark = pytest.mark.gpu

_RNG = random.Random(3)
PROMPTS = [[_RNG.randrange(256) for _ in range(_RNG.randint(4, 20))] * 3 for _ in range(24)]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "blue"]}, "sizes": {"type": "array", "maxItems": 3}},
    "required": ["kind", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fakes.write_model_with_margins(tmp_path_factory.mktemp("gpu"))


def make(weights: Path, **kwargs: Any) -> LLM:
    return LLM(model=str(weights), **{"kv_cache_memory_bytes": 4 << 20, "dtype": "float32", **kwargs})


def answers(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params, use_tqdm=False)]


def num_different(ours: list[list[int]], theirs: list[list[int]]) -> int:
    return sum(mine != other for mine, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
@pytest.mark.parametrize("settings", [{}, {"enforce_eager": True}, {"max_num_batched_tokens": 48}], ids=str)
def test_drafts_change_no_token(weights: Path, method: str, settings: dict[str, Any]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    plain = answers(make(weights, device="cuda"), params)
    speculation = {"method": method} | ({"model": str(weights)} if method == "draft_model" else {})
    llm = make(weights, device="cuda", speculative_config=speculation, **settings)
    fakes.draft_for_free(llm.llm_engine.core.scheduler)
    for _ in range(2):  # then earlier answers are known
        # Where two tokens are about as likely, a batch of another size may round to the other one.
        assert num_different(answers(llm, params), plain) <= 2
    stats = llm.llm_engine.core.scheduler.stats
    assert stats.num_accepted_tokens > 500


def test_beams_are_the_cpus(weights: Path) -> None:
    params = BeamSearchParams(beam_width=4, max_tokens=20, ignore_eos=True)
    found = []
    for device in ("cpu", "cuda"):
        outputs = make(weights, device=device).beam_search([{"prompt_token_ids": p} for p in PROMPTS], params)
        found.append([[beam.tokens for beam in output.sequences] for output in outputs])
    assert sum(a != b for a, b in zip(*found, strict=True)) <= 2


@pytest.mark.parametrize("speculation", [None, {"method": "suffix"}], ids=str)
def test_grammars_hold_and_give_the_cpus_tokens(weights: Path, speculation: Any) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=120, structured_outputs=StructuredOutputsParams(json=SCHEMA))
    expected = answers(make(weights, device="cpu", num_threads=1), params)
    llm = make(weights, device="cuda", speculative_config=speculation)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    assert num_different([output.outputs[0].token_ids for output in outputs], expected) <= 2
    texts = [output.outputs[0].text for output in outputs if output.outputs[0].finish_reason == "stop"]
    assert all(json.loads(text.lstrip("\ufffd"))["kind"] in ("red", "blue") for text in texts)
