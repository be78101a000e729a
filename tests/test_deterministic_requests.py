"""deterministic=True on an engine without batch_invariant: the bits of one that has it, or a refusal."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from test_batch_invariance import GREEDY, PROMPT, WITH_PROMPT, company, make, numbers, prompt_numbers

from quire import BeamSearchParams, SamplingParams
from quire.config import EngineConfig
from quire.engine.text_side import TextSide, open_model
from quire.errors import BadRequestError
from quire.kernels.cpu import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="the native kernels are not built")

MARKED, MARKED_PROMPT = GREEDY.clone(deterministic=True), WITH_PROMPT.clone(deterministic=True)
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "small steps": {"max_num_batched_tokens": 17, "max_num_seqs": 7},
    "computed again": {"num_gpu_blocks_override": 40, "preemption": "recompute", "max_num_seqs": 9},
    "swapped": {"num_gpu_blocks_override": 40, "preemption": "swap", "swap_space_gb": 0.02},
    "drafts": {"speculative_config": {"method": "ngram", "prompt_lookup_min": 1}},
    "token by token": {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 1, "max_num_seqs": 5},
}


def test_copies_among_others(tiny_model: Path) -> None:
    """Bitwise what an engine with batch_invariant gives to it alone, marked or not: the mark refuses or promises."""
    alone = make(tiny_model, dtype="float32").generate([PROMPT], WITH_PROMPT, use_tqdm=False)[0]
    expected, expected_prompt = numbers(alone), prompt_numbers(alone)
    rng = random.Random(1)
    num_cached = num_preemptions = 0
    for settings in SETTINGS.values():
        llm = make(tiny_model, dtype="float32", **settings, batch_invariant=False)
        work = [*company(rng, 9), *[(PROMPT, MARKED)] * 4, (PROMPT, MARKED_PROMPT), (PROMPT, WITH_PROMPT)]
        rng.shuffle(work)
        for (_, params), output in zip(work, llm.generate(*map(list, zip(*work, strict=True))), strict=True):
            if params in (MARKED, MARKED_PROMPT, WITH_PROMPT):
                assert numbers(output) == expected
                num_cached += output.num_cached_tokens
            if params in (MARKED_PROMPT, WITH_PROMPT):
                assert prompt_numbers(output) == expected_prompt
        num_preemptions += llm.llm_engine.core.scheduler.stats.num_preemptions
    assert num_cached > 0 and num_preemptions > 0


def test_it_finds_what_others_computed(tiny_model: Path) -> None:
    llm = make(tiny_model, dtype="float32", batch_invariant=False)
    plain, marked = (llm.generate([PROMPT], params, use_tqdm=False)[0] for params in (GREEDY, MARKED))
    assert plain.num_cached_tokens == 0 and marked.num_cached_tokens > 0
    assert numbers(plain) == numbers(marked)


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"enable_lora": True}, "enable_lora"),
        ({"logits_processors": ["test_deterministic_requests:Nothing"]}, "logits processors"),
    ],
)
def test_refused_by_name(tiny_model: Path, settings: dict[str, Any], why: str) -> None:
    llm = make(tiny_model, dtype="float32", batch_invariant=False, **settings)
    with pytest.raises(BadRequestError, match=why) as error:
        llm.generate([PROMPT], MARKED, use_tqdm=False)
    assert error.value.param == "deterministic"
    assert llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].finished


def test_ranks_are_refused_before_they_start(tiny_model: Path) -> None:
    config = EngineConfig(model=str(tiny_model), load_format="dummy", tensor_parallel_size=2)
    inputs = TextSide(config, open_model(config)).make_inputs(100)
    with pytest.raises(BadRequestError, match="split among ranks"):
        inputs.make_request("one", PROMPT, MARKED, arrival_s=0.0)


def test_kernels_without_one_order(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.executor.device.native.unavailable_reason", lambda: "it is a test")
    llm = make(tiny_model, dtype="float32", batch_invariant=False)
    with pytest.raises(BadRequestError, match="native CPU kernels"):
        llm.generate([PROMPT], MARKED, use_tqdm=False)


def test_beams_and_what_is_no_switch() -> None:
    with pytest.raises(BadRequestError, match="batch_invariant"):
        BeamSearchParams(beam_width=2, deterministic=True)  # type: ignore[call-arg]
    with pytest.raises(BadRequestError, match="deterministic must be True or False"):
        SamplingParams(deterministic=1)  # type: ignore[arg-type]


class Nothing:
    """An engine's logits processor that leaves everything as it is."""

    def __init__(self, *_: Any) -> None: ...

    def update_state(self, batch_update: Any) -> None: ...

    def apply(self, logits: Any) -> Any:
        return logits

    def is_argmax_invariant(self) -> bool:
        return False
