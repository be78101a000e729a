"""The default model out of its GGUF file against transformers: greedy tokens, logprobs, and what users see."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams

pytestmark = pytest.mark.model

PROMPTS = [
    "The first president of the United States was",
    "In mathematics, a prime number is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at one hundred degrees",
    "To make a cup of tea, first",
    "Shakespeare wrote many famous plays, including",
    "A triangle has three sides and",
    "The Great Wall of China was built",
    "Machine learning is a field of",
    "Dear Sir or Madam,\n\nI am writing to",
    "An apple a day keeps",
    "She opened the door and",
    "The speed of light is approximately",
    "Mount Everest is the",
    "The recipe calls for two cups of",
    "A computer program is a set of",
    "SELECT name, age FROM users WHERE",
    "List of colors: red, orange,",
    "Q: What is 2 + 2?\nA:",
    "Climate change is",
]
NUM_TOKENS = 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# How far ahead of the second the first token must be, at every step, for rounding not to decide between them.
MARGIN = 1e-2


@pytest.fixture(scope="module")
def llm(smollm2: Path) -> LLM:
    """In float32 by name: with dtype="auto" packed weights are multiplied by activations in 8 bits."""
    return LLM("smollm2", device="cpu", dtype="float32", kv_cache_memory_bytes=256 << 20)


@pytest.fixture(scope="module")
def oracle(smollm2: Path) -> Any:
    """Transformers reads the file twice, and its table of names once for each module: here once."""
    import gguf
    from transformers import AutoModelForCausalLM

    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return AutoModelForCausalLM.from_pretrained(
            smollm2.parent, gguf_file=smollm2.name, dtype=torch.float32, attn_implementation="eager"
        ).eval()


@pytest.fixture(scope="module")
def greedy(llm: LLM) -> list[tuple[list[int], list[int]]]:
    """(prompt ids, our greedy tokens), batched together."""
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


def test_greedy_tokens_are_transformers(oracle: Any, greedy: list[tuple[list[int], list[int]]]) -> None:
    """Where each of our tokens is transformers' likeliest given those before it, its greedy search gives the same text.

    One forward pass a prompt says so, and shows the margin: rounding must not be what decides.
    """
    for ids, tokens in greedy:
        assert len(tokens) == NUM_TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([ids + tokens[:-1]])).logits[0, len(ids) - 1 :]
        best = logits.topk(2)
        assert best.indices[:, 0].tolist() == tokens
        assert (best.values[:, 0] - best.values[:, 1]).min() > MARGIN


def test_alone_they_are_the_same(llm: LLM, greedy: list[tuple[list[int], list[int]]]) -> None:
    llm.reset_prefix_cache()
    for prompt, (_, tokens) in list(zip(PROMPTS, greedy, strict=True))[:3]:
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False)
        assert output.outputs[0].token_ids == tokens


@pytest.mark.parametrize(("width", "prompt"), [(2, PROMPTS[3]), (4, PROMPTS[5])])
def test_beams_are_transformers(llm: LLM, oracle: Any, width: int, prompt: str) -> None:
    """Texts, order and scores; benchmarks/beams.py compares more."""
    ends = sorted(llm.llm_engine.built.inputs.eos_token_ids)
    params = BeamSearchParams(beam_width=width, max_tokens=10, include_stop_str_in_output=True)
    (ours,) = llm.beam_search(prompt, params)
    ids = torch.tensor([llm.get_tokenizer().encode(prompt)])
    with torch.inference_mode():
        theirs = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=10,
            do_sample=False,
            eos_token_id=ends,
            pad_token_id=ends[0],
            output_scores=True,
            return_dict_in_generate=True,
        )
    for one, line, score in zip(ours.sequences, theirs.sequences.tolist(), theirs.sequences_scores, strict=True):
        assert one.tokens == line[: len(one.tokens)] and set(line[len(one.tokens) :]) <= {ends[0]}
        assert one.score == pytest.approx(float(score), abs=1e-4)


@pytest.mark.gpu
def test_cuda_gives_the_cpus_tokens(greedy: list[tuple[list[int], list[int]]]) -> None:
    cuda = LLM("smollm2", device="cuda", dtype="float32", kv_cache_memory_bytes=256 << 20)
    outputs = cuda.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [tokens for _, tokens in greedy]


def test_logprobs_are_transformers(llm: LLM, oracle: Any, greedy: list[tuple[list[int], list[int]]]) -> None:
    params = SamplingParams(
        temperature=0.7, seed=1, max_tokens=8, ignore_eos=True, logprobs=5, prompt_logprobs=5, presence_penalty=0.5
    )
    for ids, _ in greedy[:2]:
        [output] = llm.generate({"prompt_token_ids": ids}, params, use_tqdm=False)
        tokens = ids + output.outputs[0].token_ids
        with torch.inference_mode():
            truth = torch.log_softmax(oracle(torch.tensor([tokens])).logits[0].float(), dim=-1)
        assert output.prompt_logprobs is not None
        assert output.outputs[0].logprobs is not None
        assert output.prompt_logprobs[0] is None
        entries = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        assert len(entries) == len(tokens) - 1
        for position, entry in enumerate(entries):
            assert entry is not None
            token = tokens[position + 1]
            row = truth[position]
            assert entry[token].rank == int((row > row[token]).sum()) + 1
            for other, logprob in entry.items():
                assert abs(logprob.logprob - row[other].item()) < 1e-4
            assert set(row.topk(5).indices.tolist()) <= set(entry)
        total = sum(e[t].logprob for e, t in zip(output.outputs[0].logprobs, output.outputs[0].token_ids, strict=True))
        assert output.outputs[0].cumulative_logprob == pytest.approx(total)


def test_an_answer_that_makes_sense(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the chemical symbol for water?"}]
    [output] = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=48), use_tqdm=False)
    assert "H2O" in output.outputs[0].text.replace("₂", "2")
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("kwargs", [{"dtype": "bfloat16"}, {"dtype": "float16"}, {"quantization": "int8"}], ids=str)
def test_smaller_weights_stay_close(
    kwargs: dict[str, str], smollm2: Path, greedy: list[tuple[list[int], list[int]]]
) -> None:
    """Weights in 16 or 8 bits: the likeliest next token is mostly the same one."""
    small = LLM("smollm2", device="cpu", kv_cache_memory_bytes=256 << 20, **kwargs)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    same = total = 0
    for ids, tokens in greedy[:6]:
        [output] = small.generate({"prompt_token_ids": ids + tokens}, params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for position, token in enumerate(tokens, start=len(ids)):
            entry = output.prompt_logprobs[position]
            assert entry is not None
            same += entry[token].rank == 1
            total += 1
    assert same / total > 0.93
