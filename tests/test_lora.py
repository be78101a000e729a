"""Adapters end to end: the tokens of merged weights, whatever else is in the batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import adapter_files
import pytest

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import BadRequestError
from quire.executor.sizing import adapter_bytes
from quire.lora.request import LoRARequest

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lora")
    model = adapter_files.write_model(root / "model")
    adapter_files.write_adapter(root / "a", model, rank=4, seed=1)
    adapter_files.write_adapter(root / "b", model, rank=20, seed=2, use_rslora=True, lora_alpha=3)
    adapter_files.write_adapter(root / "c", model, rank=1, seed=3, modules=("v_proj", "down_proj"))
    for name in "abc":
        adapter_files.write_merged(root / f"merged-{name}", model, root / name)
    return root


def make(model: Path, **kwargs: Any) -> LLM:
    return LLM(str(model), **{"dtype": "float32", "kv_cache_memory_bytes": "4MiB", "device": "cpu"} | kwargs)


def adapted(files: Path, **kwargs: Any) -> LLM:
    return make(files / "model", **{"enable_lora": True, "max_loras": 3, "max_lora_rank": 32} | kwargs)


def prompts(count: int, seed: int = 5) -> list[dict[str, list[int]]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(250) for _ in range(rng.randint(2, 40))]} for _ in range(count)]


def requests(files: Path) -> list[LoRARequest | None]:
    return [None, *(LoRARequest(name, number, str(files / name)) for number, name in enumerate("abc", 1))]


def tokens(outputs: Any) -> list[list[int]]:
    return [one.token_ids for output in outputs for one in output.outputs]


@pytest.fixture(scope="module")
def expected(files: Path) -> list[list[int]]:
    """The answers to 16 prompts with none, a, b, c in turn: each alone with merged weights."""
    work, found = prompts(16), [[0]] * 16
    for kind, name in enumerate(("model", "merged-a", "merged-b", "merged-c")):
        found[kind::4] = tokens(make(files / name).generate(work[kind::4], GREEDY, use_tqdm=False))
    return found


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"max_loras": 1},
        {"max_loras": 2, "max_cpu_loras": 2, "max_num_batched_tokens": 16, "max_num_seqs": 5},
        {"num_gpu_blocks_override": 12, "kv_cache_memory_bytes": None, "swap_space_gb": 0.01},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"enable_prefix_caching": False, "block_size": 4},
    ],
    ids=["all", "one-slot", "chunks", "preempted", "drafts", "small-blocks"],
)
def test_mixed_with_each_other_and_with_none(files: Path, expected: list[list[int]], kwargs: dict[str, Any]) -> None:
    llm = adapted(files, **kwargs)
    for _ in range(2):  # the second time prompts are in the cache
        outputs = llm.generate(prompts(16), GREEDY, lora_request=requests(files) * 4, use_tqdm=False)
        assert tokens(outputs) == expected
    assert outputs[1].lora_request == requests(files)[1] and outputs[0].lora_request is None
    assert len({tuple(line) for line in tokens(outputs)}) == 16


def test_several_answers_beams_and_logprobs(files: Path) -> None:
    llm, merged = adapted(files), make(files / "merged-a")
    request, prompt = requests(files)[1], prompts(1)
    several = SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=8, logprobs=2, prompt_logprobs=1)
    ours, theirs = llm.generate(prompt, several, lora_request=request), merged.generate(prompt, several)
    assert tokens(ours) == tokens(theirs)
    for a, b in zip(ours[0].outputs, theirs[0].outputs, strict=True):
        assert a.cumulative_logprob == pytest.approx(b.cumulative_logprob, abs=1e-3)
    assert ours[0].prompt_logprobs and len(ours[0].prompt_logprobs) == len(prompt[0]["prompt_token_ids"])
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    found = llm.beam_search(prompt, beams, lora_request=request)[0].sequences
    assert [one.tokens for one in found] == [one.tokens for one in merged.beam_search(prompt, beams)[0].sequences]
    chat = [{"role": "user", "content": "hello"}]
    assert tokens(llm.chat(chat, GREEDY, lora_request=request)) == tokens(merged.chat(chat, GREEDY))


def test_another_adapter_of_the_same_name_finds_none_of_the_old_ones_blocks(files: Path, tmp_path: Path) -> None:
    llm, prompt = adapted(files, max_loras=1), [{"prompt_token_ids": list(range(2, 80))}]
    adapter_files.write_adapter(tmp_path / "x", files / "model", seed=1)
    first = llm.generate(prompt, GREEDY, lora_request=LoRARequest("x", 1, str(tmp_path / "x")))
    again = llm.generate(prompt, GREEDY, lora_request=LoRARequest("x", 1, str(tmp_path / "x")))
    assert again[0].num_cached_tokens and tokens(again) == tokens(first)
    adapter_files.write_adapter(tmp_path / "x", files / "model", seed=9)
    other = llm.generate(prompt, GREEDY, lora_request=LoRARequest("x", 1, str(tmp_path / "x"), load_inplace=True))
    assert not other[0].num_cached_tokens and tokens(other) != tokens(first)
    assert not llm.generate(prompt, GREEDY)[0].num_cached_tokens


def test_blocks_on_disk_come_back_to_their_own_adapter(files: Path, tmp_path: Path) -> None:
    """Over a restart, each adapter finds what it had computed of a prompt, and nothing that another had."""
    work = [{"prompt_token_ids": list(range(2, 80))}] * 3
    expected = [tokens(make(files / name).generate(work[0], GREEDY))[0] for name in ("model", "merged-a", "merged-b")]
    disk = {"kv_disk_path": str(tmp_path), "kv_disk_size": "8MiB"}
    for is_restart in (False, True):
        llm = adapted(files, **disk)
        if not is_restart:
            assert tokens(llm.generate(work[:2], GREEDY, lora_request=requests(files)[:2])) == expected[:2]
            llm.llm_engine.core.settle(60.0)
        else:
            outputs = llm.generate(work, GREEDY, lora_request=requests(files)[:3])
            assert tokens(outputs) == expected
            num_cached = [output.num_cached_tokens for output in outputs]
            assert num_cached[0] and num_cached[1] and not num_cached[2]
        llm.llm_engine.close()


def test_what_is_refused(files: Path) -> None:
    request = requests(files)[1]
    with pytest.raises(BadRequestError, match="enable_lora=True"):
        make(files / "model").generate("x", GREEDY, lora_request=request)
    llm = adapted(files, max_lora_rank=8)
    with pytest.raises(BadRequestError, match=r"lora_A.weight has rank 20, and max_lora_rank is 8: raise it"):
        llm.generate("x", GREEDY, lora_request=requests(files)[2])
    with pytest.raises(BadRequestError, match="no such folder"):
        llm.generate("x", GREEDY, lora_request=LoRARequest("n", 9, str(files / "nowhere")))
    llm.generate("x", GREEDY, lora_request=request)
    with pytest.raises(BadRequestError, match="lora_int_id=1 is the adapter 'a'"):
        llm.generate("x", GREEDY, lora_request=LoRARequest("other", 1, str(files / "c")))
    with pytest.raises(BadRequestError, match="lora_request must be a LoRARequest or a list of them"):
        llm.generate("x", GREEDY, lora_request="a")
    for wrong in ({"lora_name": ""}, {"lora_int_id": 0}, {"lora_path": ""}):
        with pytest.raises(BadRequestError, match=next(iter(wrong))):
            LoRARequest(**{"lora_name": "a", "lora_int_id": 1, "lora_path": "p"} | wrong)
    assert len(tokens(llm.generate("x", GREEDY, lora_request=request))) == 1  # it goes on


@pytest.mark.gpu
@pytest.mark.parametrize("kwargs", [{}, {"enforce_eager": True}, {"max_loras": 1}])
def test_on_a_gpu_the_tokens_of_merged_weights(files: Path, expected: list[list[int]], kwargs: dict[str, Any]) -> None:
    llm = adapted(files, device="cuda", **kwargs)
    for count in (16, 16, 1):  # one token at a time has kernels of its own
        outputs = llm.generate(prompts(16)[:count], GREEDY, lora_request=(requests(files) * 4)[:count], use_tqdm=False)
        assert tokens(outputs) == expected[:count]
    for i in range(1, 4):
        assert tokens(llm.generate(prompts(16)[i], GREEDY, lora_request=requests(files)[i])) == [expected[i]]


@pytest.mark.gpu
def test_on_a_gpu_graphs_change_nothing(files: Path) -> None:
    work, chosen = prompts(48, seed=8), requests(files) * 12
    params = [SamplingParams(temperature=0.0, max_tokens=4 + i, ignore_eos=True) for i in range(48)]
    found = []
    for eager in (False, True):
        llm = adapted(files, device="cuda", dtype="bfloat16", enforce_eager=eager)
        while not eager and llm.llm_engine.core.prepare_more():
            pass
        found.append(tokens(llm.generate(work, params, lora_request=chosen, use_tqdm=False)))
    same = sum(a == b for a, b in zip(*found, strict=True))
    assert same >= 44, f"{same} of 48 answers are the same"  # steps of other sizes round differently


FAMILIES: dict[str, dict[str, Any]] = {
    "heads that turn in part": {
        "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "partial_rotary_factor": 0.5, "pad_token_id": 0,
        "sliding_window": None,
    },
    "norms of branches": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 32, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"],
    },
    "an MLP without a gate": {
        "architectures": ["Starcoder2ForCausalLM"], "model_type": "starcoder2", "norm_epsilon": 1e-5, "use_bias": True,
        "sliding_window": 32, "hidden_act": "gelu_pytorch_tanh",
    },
    "experts": {
        "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    model = adapter_files.write_model(tmp_path / "model", **FAMILIES[name])
    modules = ("q_proj", "k_proj", "o_proj") if name == "experts" else adapter_files.MODULES
    adapter = adapter_files.write_adapter(tmp_path / "a", model, modules=modules)
    merged = make(adapter_files.write_merged(tmp_path / "merged", model, adapter))
    llm = make(model, enable_lora=True)
    work, request = prompts(4), LoRARequest("a", 1, str(adapter))
    found = tokens(llm.generate(work, GREEDY, lora_request=[request, None] * 2, use_tqdm=False))
    assert found[::2] == tokens(merged.generate(work[::2], GREEDY, use_tqdm=False))
    assert found[1::2] == tokens(make(model).generate(work[1::2], GREEDY, use_tqdm=False))
    ledger, engine = llm.llm_engine.ledger, llm.llm_engine
    assert ledger.adapter_bytes == adapter_bytes(engine.config, engine.spec, "float32")
