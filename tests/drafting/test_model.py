"""A draft model: guesses by a second decoder whose blocks go by the same numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fakes
import numpy as np
import pytest
from drafting.test_engine import free_drafts
from executor.test_drafts import PROMPTS, make, seen

from quire import LLM, SamplingParams
from quire.errors import ConfigError, WeightsError

GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def with_draft(model: Path, draft: Path, **fields: Any) -> LLM:
    llm = make(model, speculative_config={"model": str(draft), "num_speculative_tokens": 4}, **fields)
    free_drafts(llm)
    return llm


def check(llm: LLM) -> None:
    """The draft model's KV is what a draft model that ran every token from the start would have, wherever it is said to
    be there."""
    worker = llm.llm_engine.core.executor.worker  # type: ignore[attr-defined]
    assert (worker.draft._num_full <= worker.batch.block_size).all()
    # Where both models are the same one, so must their KV be, in every block that is full.
    full = np.flatnonzero(worker.draft._num_full == worker.batch.block_size)
    full = full[full < worker.cache.spare_block]
    ours, theirs = worker.cache.device_blocks[:, full], worker.draft._cache.device_blocks[:, full]
    assert len(full) > 10
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-4)


def test_a_draft_model_that_is_the_model_itself_is_always_right(tiny_model: Path) -> None:
    expected = make(tiny_model).generate(PROMPTS, GREEDY, use_tqdm=False)
    llm = with_draft(tiny_model, tiny_model)
    assert seen(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == seen(expected)
    stats = llm.llm_engine.core.scheduler.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 250
    assert stats.num_steps < 15
    check(llm)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_kv_of_both_stays_in_step_through_preemption_forks_and_the_prefix_cache(
    tiny_model: Path, preemption: str
) -> None:
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True, n=2, top_k=2)
    prompts = [[5, 6, 7, 8, 9, 10, 11, 12, *prompt] for prompt in PROMPTS]
    expected = make(tiny_model).generate(prompts, params, use_tqdm=False)
    small = with_draft(
        tiny_model,
        tiny_model,
        kv_cache_memory_bytes=200 << 10,
        max_model_len=64,
        max_num_batched_tokens=24,
        max_num_seqs=6,
        preemption=preemption,
        swap_space=0.01,
    )
    for _ in range(2):
        assert seen(small.generate(prompts, params, use_tqdm=False)) == seen(expected)
        check(small)
    stats = small.llm_engine.core.scheduler.stats
    assert stats.num_preemptions > 0 and 0.3 < stats.num_accepted_tokens / stats.num_draft_tokens < 1


def test_another_model_drafts_and_a_long_prompt_is_caught_up_with(tiny_model: Path, tmp_path: Path) -> None:
    other = fakes.write_tiny_model(tmp_path / "other", num_hidden_layers=1)
    prompts = [[(7 * i + j) % 90 + 5 for j in range(130)] for i in range(3)]
    expected = make(tiny_model).generate(prompts, GREEDY, use_tqdm=False)
    llm = with_draft(tiny_model, other)
    monkey = pytest.MonkeyPatch()
    monkey.setattr("quire.executor.draft_model._CHUNK", 32)
    try:
        assert seen(llm.generate(prompts, GREEDY, use_tqdm=False)) == seen(expected)
    finally:
        monkey.undo()
    assert llm.llm_engine.core.scheduler.stats.num_draft_tokens > 50
    ledger, alone = llm.llm_engine.ledger, make(tiny_model).llm_engine.ledger
    assert ledger.block_bytes > alone.block_bytes and ledger.weight_bytes > alone.weight_bytes
    assert ledger.num_blocks < alone.num_blocks  # of the same memory


def test_what_cannot_draft_is_refused_by_name(tiny_model: Path, tmp_path: Path) -> None:
    small = fakes.write_tiny_model(tmp_path / "small", vocab_size=300)
    sizes = make(tiny_model).llm_engine.spec.vocab_size
    with pytest.raises(ConfigError, match=rf"300 tokens and .* one of {sizes}"):
        with_draft(tiny_model, small)
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 16}
    windowed = fakes.write_tiny_model(tmp_path / "windowed", **changes)
    with pytest.raises(ConfigError, match="sliding window"):
        with_draft(tiny_model, windowed)
    with pytest.raises(WeightsError, match="nowhere"):
        with_draft(tiny_model, tmp_path / "nowhere")


def test_a_draft_model_that_misses_is_left_alone_and_tried_again(tiny_model: Path) -> None:
    from quire.drafting import ModelDrafter
    from quire.request import Request, Sequence, SequenceState
    from quire.speculation import SpeculativeConfig
    from quire.step_costs import StepCosts, StepKind

    costs = StepCosts(prefill_tokens_per_s=1e3)
    for _ in range(20):
        costs.observe_step(StepKind(1, 0), device_s=1e-2, total_s=1e-2)
        costs.observe_step(StepKind(1, 0, 4), device_s=14e-3, total_s=14e-3)
    drafter = ModelDrafter(SpeculativeConfig.read({"model": "x", "num_speculative_tokens": 4}), costs, max_position=200)
    request = Request(request_id="a", prompt_token_ids=[1] * 8, max_tokens=900, end_token_ids=frozenset())
    seq = Sequence(request, 0, [1] * 8, state=SequenceState.RUNNING, num_computed_tokens=7, max_len=908)
    asked = []
    for _ in range(180):
        asked.append(drafter.draft([seq], 100).get(seq.seq_id, 0))
        if asked[-1]:
            drafter.judged(seq, asked[-1], 0)
        seq.token_ids.append(1)
        seq.num_computed_tokens += 1
    assert asked[0] == 4 and 0 < sum(map(bool, asked[20:])) < 16
    seq.token_ids += [1] * 100
    seq.num_computed_tokens += 100
    assert not drafter.draft([seq], 100)  # the draft model knows no such position
    drafter.ended(seq)
    assert not drafter._chances and not drafter._begun
