"""batch_invariant=True: a request's logprobs are bitwise the same whatever is computed beside it."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch
from drafting.test_engine import free_drafts

from quire import LLM, BeamSearchParams, SamplingParams
from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.kernels.cpu import unavailable_reason

pytestmark = pytest.mark.skipif(unavailable_reason() is not None, reason="the native kernels are not built")

SETTINGS: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "num_threads": 2, "batch_invariant": True}
PROMPT = [(11 * i) % 250 + 3 for i in range(75)]
NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
WITH_PROMPT = GREEDY.clone(prompt_logprobs=2)
KINDS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "bfloat16 KV": {"dtype": "float32", "kv_cache_dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}
BLOOM = {"architectures": ["BloomForCausalLM"], "n_layer": 2, "n_head": 4, "layer_norm_epsilon": 1e-5}


def make(model: Path, **settings: Any) -> LLM:
    return LLM(
        str(model), **{**SETTINGS, "block_size": 8, "num_gpu_blocks_override": 400, "max_model_len": 256, **settings}
    )


def numbers(output: Any) -> list[Any]:
    """Tokens and logprobs of an answer, bit for bit."""
    one = output.outputs[0]
    return [one.token_ids, [{t: e.logprob.hex() for t, e in entry.items()} for entry in one.logprobs]]


def prompt_numbers(output: Any) -> list[Any]:
    return [entry and {t: e.logprob.hex() for t, e in entry.items()} for entry in output.prompt_logprobs]


def company(rng: random.Random, count: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests of all lengths, some of which begin as PROMPT does."""
    found = []
    for i in range(count):
        own = [rng.randrange(3, 300) for _ in range(rng.randint(1, 90))]
        prompt = PROMPT[: rng.choice([0, 0, 16, 40, 70])] + own
        found.append((prompt, SamplingParams(temperature=1.0, seed=i, max_tokens=rng.randint(1, 25), ignore_eos=True)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_copies_among_random_company(tiny_model: Path, kind: str) -> None:
    """In chunks of any size, with cache hits, preemption by both ways, and at other step budgets."""
    alone = make(tiny_model, **KINDS[kind], num_threads=1).generate([PROMPT], WITH_PROMPT, use_tqdm=False)[0]
    expected, expected_prompt = numbers(alone), prompt_numbers(alone)
    rng = random.Random(0)
    num_preemptions = num_cached = 0
    for settings in (
        {},
        {"max_num_batched_tokens": 17, "max_num_seqs": 7},
        {"num_gpu_blocks_override": 40, "preemption": "recompute", "max_num_seqs": 9},
        {"num_gpu_blocks_override": 40, "preemption": "swap", "swap_space_gb": 0.02, "enable_prefix_caching": False},
        {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 1, "max_num_seqs": 5},
    ):
        llm = make(tiny_model, **KINDS[kind], **settings)
        work = company(rng, 12) + [(PROMPT, GREEDY)] * 5 + [(PROMPT, WITH_PROMPT)]
        rng.shuffle(work)
        outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work], use_tqdm=False)
        for (_, params), output in zip(work, outputs, strict=True):
            if params in (GREEDY, WITH_PROMPT):
                assert numbers(output) == expected
                num_cached += output.num_cached_tokens
            if params == WITH_PROMPT:
                assert prompt_numbers(output) == expected_prompt
        num_preemptions += llm.llm_engine.core.scheduler.stats.num_preemptions
    assert num_preemptions > 0 and num_cached > 0


def test_fifty_copies_among_a_thousand_requests(tiny_model: Path) -> None:
    """Small ones, so that a step has up to hundreds of them."""
    alone, *_ = make(tiny_model, dtype="bfloat16").generate([PROMPT], GREEDY.clone(max_tokens=4), use_tqdm=False)
    rng = random.Random(0)
    work = [(PROMPT, GREEDY.clone(max_tokens=4))] * 50
    for i in range(950):
        prompt = PROMPT[: rng.choice([0, 0, 16, 40])] + [rng.randrange(3, 300) for _ in range(rng.randint(1, 9))]
        work.append((prompt, SamplingParams(seed=i, max_tokens=rng.randint(1, 4), ignore_eos=True, detokenize=False)))
    rng.shuffle(work)
    llm = make(tiny_model, dtype="bfloat16", num_gpu_blocks_override=1500, max_num_seqs=128)
    outputs = llm.generate([prompt for prompt, _ in work], [params for _, params in work], use_tqdm=False)
    copies = [output for (prompt, _), output in zip(work, outputs, strict=True) if prompt is PROMPT]
    assert len(copies) == 50 and all(numbers(output) == numbers(alone) for output in copies)


@pytest.mark.model
@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_packed_weights(smollm2: Path, dtype: str) -> None:
    """Products with a quantized file: by activations in 8 bits, and exactly."""
    prompts = [PROMPT[:n] for n in (1, 7, 30, 75)]
    settings: dict[str, Any] = {"device": "cpu", "batch_invariant": True, "kv_cache_memory_bytes": 64 << 20}
    llm = LLM("smollm2", dtype=dtype, max_num_batched_tokens=40, max_num_seqs=5, max_model_len=512, **settings)
    params = GREEDY.clone(max_tokens=6)
    alone = []
    for prompt in prompts:
        llm.reset_prefix_cache()
        alone.append(numbers(llm.generate([prompt], params, use_tqdm=False)[0]))
    llm.reset_prefix_cache()
    for _ in range(2):  # the second time with cache hits
        assert [numbers(one) for one in llm.generate(prompts * 2, params, use_tqdm=False)] == alone * 2


def test_drafts_forks_and_beams_change_nothing(tiny_model: Path) -> None:
    plain = make(tiny_model, dtype="float32")
    drafting = make(tiny_model, dtype="float32", speculative_config={"method": "ngram", "prompt_lookup_min": 1})
    free_drafts(drafting)
    prompts = [PROMPT, PROMPT[:20] * 3, PROMPT[5:]]
    expected = [numbers(plain.generate([prompt], GREEDY, use_tqdm=False)[0]) for prompt in prompts]
    assert [numbers(output) for output in drafting.generate(prompts, GREEDY, use_tqdm=False)] == expected
    assert drafting.llm_engine.core.scheduler.stats.num_accepted_tokens > 0
    # Forks: sequence 0 of several draws what it draws alone, from the same logits.
    drawn = SamplingParams(n=3, seed=5, max_tokens=9, ignore_eos=True, logprobs=1)
    several = plain.generate(prompts, drawn, use_tqdm=False)
    for prompt, output in zip(prompts, several, strict=True):
        (alone,) = plain.generate([prompt], drawn.clone(n=1), use_tqdm=False)
        assert numbers(alone) == numbers(output)
    beams = BeamSearchParams(beam_width=3, max_tokens=10)
    together = plain.beam_search(prompts, beams)
    for prompt, found in zip(prompts, together, strict=True):
        (own,) = make(tiny_model, dtype="float32", max_num_batched_tokens=16, max_num_seqs=3).beam_search(
            [prompt], beams
        )
        assert [one.tokens for one in own.sequences] == [one.tokens for one in found.sequences]
        assert [one.cum_logprob for one in own.sequences] == [one.cum_logprob for one in found.sequences]


def test_sliding_windows(tmp_path: Path) -> None:
    changes = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20}
    model = fakes.write_tiny_model(tmp_path, **changes)
    (alone,) = make(model, dtype="float32").generate([PROMPT], GREEDY, use_tqdm=False)
    for budget in (9, 50):
        llm = make(model, dtype="float32", max_num_batched_tokens=budget, max_num_seqs=4)
        outputs = llm.generate([PROMPT, PROMPT[:30], PROMPT], [GREEDY] * 3, use_tqdm=False)
        assert numbers(outputs[0]) == numbers(outputs[2]) == numbers(alone)


def test_the_variable_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not EngineConfig().batch_invariant
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    assert EngineConfig().batch_invariant and not EngineConfig(batch_invariant=False).batch_invariant
    with pytest.raises(ConfigError, match="batch_invariant"):
        EngineConfig(tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="batch_invariant"):
        EngineConfig(batch_invariant="yes")


@pytest.mark.parametrize(
    ("settings", "needed"),
    [
        ({"dtype": "float32"}, "dtype='bfloat16' or 'float16'"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, "a KV cache in the activations' dtype"),
        ({"dtype": "bfloat16", "quantization": "fp8"}, "not quantized"),
        ({"dtype": "bfloat16"}, "compute capability 9.0"),
        ({"dtype": "bfloat16", "hf_overrides": BLOOM}, "ALiBi"),
    ],
    ids=str,
)
def test_what_a_gpu_does_not_serve_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Path, settings: dict[str, Any], needed: str
) -> None:
    monkeypatch.setattr("quire.executor.device._device", lambda wanted: torch.device("cuda", 0))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device=None: (8, 9))
    monkeypatch.setattr("quire.kernels.triton.unavailable_reason", lambda: None)
    with pytest.raises(ConfigError, match=f"batch_invariant on a GPU needs .*{needed}"):
        make(tiny_model, **{"device": "cuda", "num_threads": None, **settings})
