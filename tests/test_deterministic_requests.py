"""deterministic=True on an engine that is not batch invariant: that request alone has the bits of one that is."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from test_batch_invariance import GREEDY, KINDS, PROMPT, WITH_PROMPT, company, make, numbers, prompt_numbers

from quire import BeamSearchParams, SamplingParams
from quire.config import EngineConfig
from quire.engine.text_side import TextSide, open_model
from quire.errors import BadRequestError
from quire.executor.batch import invariant_runs
from quire.kernels.cpu import unavailable_reason
from quire.request import cache_scope

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


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_marked_copies_among_others(tiny_model: Path, kind: str) -> None:
    """Bitwise what an engine with batch_invariant gives to it alone; the unmarked copies beside it are not."""
    alone = make(tiny_model, **KINDS[kind]).generate([PROMPT], WITH_PROMPT, use_tqdm=False)[0]
    expected, expected_prompt = numbers(alone), prompt_numbers(alone)
    rng = random.Random(1)
    num_cached = num_preemptions = num_others = 0
    for settings in SETTINGS.values():
        llm = make(tiny_model, **KINDS[kind], **settings, batch_invariant=False)
        work = [*company(rng, 9), *[(PROMPT, MARKED)] * 4, (PROMPT, MARKED_PROMPT), (PROMPT, WITH_PROMPT)]
        rng.shuffle(work)
        for (_, params), output in zip(work, llm.generate(*map(list, zip(*work, strict=True))), strict=True):
            if params in (MARKED, MARKED_PROMPT):
                assert numbers(output) == expected
                num_cached += output.num_cached_tokens
            if params == MARKED_PROMPT:
                assert prompt_numbers(output) == expected_prompt
            if params == WITH_PROMPT:
                num_others += prompt_numbers(output) != expected_prompt
        num_preemptions += llm.llm_engine.core.scheduler.stats.num_preemptions
    assert num_cached > 0 and num_preemptions > 0
    assert num_others > 0  # else the mark proves nothing


def test_its_blocks_are_its_own(tiny_model: Path) -> None:
    """A prefix that another request computed has other last bits: it is not found. What a marked one computed is."""
    llm = make(tiny_model, dtype="float32", batch_invariant=False)
    (plain,) = llm.generate([PROMPT], GREEDY, use_tqdm=False)
    first, second = (llm.generate([PROMPT], MARKED, use_tqdm=False)[0] for _ in range(2))
    assert (plain.num_cached_tokens, first.num_cached_tokens) == (0, 0) and second.num_cached_tokens > 0
    assert numbers(first) == numbers(second)
    assert cache_scope(None, is_deterministic=True) not in (None, cache_scope("deterministic "), cache_scope("0:"))
    invariant = make(tiny_model, dtype="float32")
    for params, is_cached in ((GREEDY, False), (MARKED, True)):  # there every request is alike, and shares
        assert bool(invariant.generate([PROMPT], params, use_tqdm=False)[0].num_cached_tokens) == is_cached


def test_forks_and_draws(tiny_model: Path) -> None:
    drawn = SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True, logprobs=1, deterministic=True)
    expected = make(tiny_model, dtype="float32").generate([PROMPT], drawn, use_tqdm=False)[0]
    llm = make(tiny_model, dtype="float32", batch_invariant=False, max_num_batched_tokens=50, max_num_seqs=8)
    work = [*company(random.Random(2), 6), (PROMPT, drawn)]
    output = llm.generate(*map(list, zip(*work, strict=True)), use_tqdm=False)[-1]
    for mine, wanted in zip(output.outputs, expected.outputs, strict=True):
        assert (mine.token_ids, mine.logprobs) == (wanted.token_ids, wanted.logprobs)


def test_streamed_and_ended_early(tiny_model: Path) -> None:
    """Deltas of one marked request, beside one that is ended in the middle."""
    (alone,) = make(tiny_model, dtype="float32").generate([PROMPT], GREEDY, use_tqdm=False)
    engine = make(tiny_model, dtype="float32", batch_invariant=False).llm_engine
    for name, prompt in (("one", PROMPT), ("other", PROMPT[3:])):
        engine.add_request(name, {"prompt_token_ids": prompt}, MARKED.clone(output_kind="delta"))
    tokens: list[int] = []
    while engine.has_unfinished_requests():
        tokens += [t for out in engine.step() if out.request_id == "one" for t in out.outputs[0].token_ids]
        if len(tokens) == 4:
            engine.abort_request("other")
    assert tokens == alone.outputs[0].token_ids


def test_runs() -> None:
    for flags, runs in (("0000", ()), ("1111", ((0, 4),)), ("01101", ((1, 3), (4, 5))), ("100", ((0, 1),))):
        assert invariant_runs(np.array([flag == "1" for flag in flags])) == runs


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


def test_sliding_windows(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}
    model = fakes.write_tiny_model(tmp_path, **changes)
    (alone,) = make(model, dtype="float32").generate([PROMPT], GREEDY, use_tqdm=False)
    llm = make(model, dtype="float32", batch_invariant=False, max_num_batched_tokens=50, max_num_seqs=4)
    outputs = llm.generate([PROMPT, PROMPT[:30], PROMPT], [MARKED, GREEDY, MARKED], use_tqdm=False)
    assert numbers(outputs[0]) == numbers(outputs[2]) == numbers(alone)


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
