"""batch_invariant=True on CUDA: the same bits alone, in company, in chunks, after preemption, with drafts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import fakes
import pytest
from drafting.test_engine import free_drafts
from test_batch_invariance import GREEDY, PROMPT, WITH_PROMPT, company, numbers, prompt_numbers

from quire import LLM, SamplingParams

pytestmark = pytest.mark.gpu

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "mistral": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20},
}


def make(model: Path, **settings: Any) -> LLM:
    values = {"load_format": "dummy", "device": "cuda", "batch_invariant": True, "dtype": "bfloat16", "block_size": 8}
    return LLM(str(model), **{**values, "num_gpu_blocks_override": 400, "max_model_len": 256, **settings})


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_copies_among_random_company(tmp_path: Path, family: str, dtype: str) -> None:
    model = fakes.write_tiny_model(tmp_path, **FAMILIES[family])
    (alone,) = make(model, dtype=dtype, enforce_eager=True).generate([PROMPT], WITH_PROMPT, use_tqdm=False)
    rng = random.Random(0)
    num_preemptions = num_cached = 0
    for settings in (
        {},
        {"max_num_batched_tokens": 17, "max_num_seqs": 7},
        {"num_gpu_blocks_override": 40, "preemption": "recompute", "max_num_seqs": 9},
        {"num_gpu_blocks_override": 40, "preemption": "swap", "swap_space_gb": 0.02, "enable_prefix_caching": False},
    ):
        llm = make(model, dtype=dtype, **settings)
        work = company(rng, 20) + [(PROMPT, GREEDY)] * 5 + [(PROMPT, WITH_PROMPT)]
        rng.shuffle(work)
        outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work], use_tqdm=False)
        for (_, params), output in zip(work, outputs, strict=True):
            if params in (GREEDY, WITH_PROMPT):
                assert numbers(output) == numbers(alone)
                num_cached += output.num_cached_tokens
            if params == WITH_PROMPT:
                assert prompt_numbers(output) == prompt_numbers(alone)
        num_preemptions += llm.llm_engine.core.scheduler.stats.num_preemptions
    assert num_cached > 0 and (num_preemptions > 0 or family == "mistral")


def test_fifty_copies_among_a_thousand_requests_and_without_the_switch(tiny_model: Path) -> None:
    """Greedy and drawn ones. Without the switch some differ, or the test would prove nothing."""
    rng = random.Random(0)
    drawn = SamplingParams(seed=3, temperature=1.0, top_p=0.9, max_tokens=12, ignore_eos=True, logprobs=3)
    work = [(PROMPT, GREEDY)] * 25 + [(PROMPT, drawn)] * 25
    for i in range(950):
        prompt = PROMPT[: rng.choice([0, 0, 16, 40])] + [rng.randrange(3, 300) for _ in range(rng.randint(1, 60))]
        work.append((prompt, SamplingParams(seed=i, max_tokens=rng.randint(1, 40), ignore_eos=True, detokenize=False)))
    rng.shuffle(work)
    num_different = []
    for is_invariant in (True, False):
        llm = make(tiny_model, num_gpu_blocks_override=4000, max_num_seqs=256, batch_invariant=is_invariant)
        greedy_alone, drawn_alone = (numbers(llm.generate([PROMPT], p, use_tqdm=False)[0]) for p in (GREEDY, drawn))
        llm.reset_prefix_cache()
        outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work], use_tqdm=False)
        pairs = [
            (numbers(output), drawn_alone if params is drawn else greedy_alone)
            for (prompt, params), output in zip(work, outputs, strict=True)
            if prompt is PROMPT
        ]
        assert len(pairs) == 50
        num_different.append(sum(one != other for one, other in pairs))
    assert num_different[0] == 0 and num_different[1] > 0


def test_drafts_and_forks_change_nothing(tiny_model: Path) -> None:
    plain = make(tiny_model)
    drafting = make(tiny_model, speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    free_drafts(drafting)
    prompts = [PROMPT, PROMPT[:20] * 3, PROMPT[5:]]
    expected = [numbers(plain.generate([prompt], GREEDY, use_tqdm=False)[0]) for prompt in prompts]
    assert [numbers(output) for output in drafting.generate(prompts, GREEDY, use_tqdm=False)] == expected
    assert drafting.llm_engine.core.scheduler.stats.num_accepted_tokens > 0
    several = SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True, logprobs=1)
    for prompt, output in zip(prompts, plain.generate(prompts, several, use_tqdm=False), strict=True):
        (alone,) = plain.generate([prompt], several.clone(n=1), use_tqdm=False)
        assert numbers(alone) == numbers(output)
