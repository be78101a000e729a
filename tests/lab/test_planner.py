"""The planner against the engine: to the block where the cache's size is known, and the same functions elsewhere."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
import torch

from quire import LLM
from quire.config import GIB, EngineConfig
from quire.errors import ConfigError, DownloadError
from quire.executor.memory import cuda_kv_budget
from quire.executor.sizing import adapted_step_bytes, adapter_bytes, layers_bytes, weight_bytes
from quire.kernels.reference import ReferenceOps
from quire.lab import shapes
from quire.lab.device_plan import DRIVER_BYTES, DevicePlan, plan_device
from quire.lab.planner import Plan, make_plan
from quire.lab.shapes import SHAPES, read_model_spec
from quire.lab.traffic import Kind
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.models.share import share_of
from quire.models.spec import ModelSpec
from quire.weights import open_checkpoint

TINY = spec_from_config(fakes.TINY_LLAMA, source="test")
LLAMA = spec_from_config(SHAPES["llama-3.1-8b"].config, source="llama-3.1-8b")
FLAG_FIELDS = {"--max-model-len", "--max-num-seqs", "--kv-cache-memory-bytes", "--kv-cache-dtype"}


def engine_blocks(model: str, **kwargs: Any) -> tuple[int, int, int]:
    llm = LLM(model=model, device="cpu", num_threads=1, **kwargs)
    ledger = llm.llm_engine.ledger
    return ledger.num_blocks, ledger.max_model_len, ledger.activation_bytes


def planned_blocks(spec: ModelSpec, **kwargs: Any) -> tuple[int, int, int]:
    plan = make_plan(EngineConfig(**kwargs), spec, device="cpu")
    assert plan.is_exact
    ledger = plan.chosen.ledger
    assert ledger is not None
    return ledger.num_blocks, ledger.max_model_len, ledger.activation_bytes


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"kv_cache_memory_bytes": (4 << 20) + 12345},
        {"kv_cache_memory_bytes": 1 << 20, "block_size": 32, "kv_cache_dtype": "bfloat16"},
        {"kv_cache_memory_bytes": 1 << 20, "max_model_len": 100, "max_num_seqs": 7, "max_num_batched_tokens": 33},
        {"kv_cache_memory_bytes": 200_000, "enable_chunked_prefill": False},
        {"num_gpu_blocks_override": 37},
    ],
)
def test_blocks_are_the_engines(tiny_model: Path, settings: dict[str, Any]) -> None:
    spec = spec_from_config(open_checkpoint(tiny_model, load_format="dummy").config, source="tiny")
    assert planned_blocks(spec, **settings) == engine_blocks(str(tiny_model), load_format="dummy", **settings)


@pytest.mark.model
@pytest.mark.parametrize("settings", [{}, {"kv_cache_memory_bytes": 100_000_000, "block_size": 8}])
def test_blocks_are_the_engines_for_the_default_model(smollm2: Path, settings: dict[str, Any]) -> None:
    spec = read_model_spec("smollm2")
    assert planned_blocks(spec, **settings) == engine_blocks(str(smollm2), skip_tokenizer_init=True, **settings)


@pytest.mark.model
def test_the_default_models_shape_is_its_files(smollm2: Path) -> None:
    of_file = spec_from_config(open_checkpoint(smollm2).config, source="file")
    of_shape = spec_from_config(SHAPES["smollm2"].config, source="shape")
    for name in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "hidden_size", "intermediate_size"):
        assert getattr(of_shape, name) == getattr(of_file, name), name
    for name in ("vocab_size", "max_position", "tie_embeddings"):
        assert getattr(of_shape, name) == getattr(of_file, name), name


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_is_served(name: str) -> None:
    spec = spec_from_config(SHAPES[name].config, source=name)
    billions = weight_bytes(spec, "float16", 1) / 2e9
    stated = {"smollm2": 0.135, "qwen2.5-7b": 7.62, "mistral-7b": 7.25, "llama-3.2-1b": 1.24, "llama-3.2-3b": 3.21}
    stated |= {"llama-3.1-8b": 8.03, "llama-3.1-70b": 70.6, "qwen3-8b": 8.19, "qwen3-0.6b": 0.596}
    assert billions == pytest.approx(stated[name], rel=0.01)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_the_decoders(changes: dict[str, Any], dtype: str) -> None:
    config = fakes.TINY_LLAMA | changes
    if "Qwen3ForCausalLM" in config["architectures"]:
        del config["mlp_bias"]
    spec = spec_from_config(config, source="test")
    device, torch_dtype = torch.device("cpu"), getattr(torch, dtype)
    decoder = Decoder(spec, ReferenceOps(device, torch_dtype), device=device, dtype=torch_dtype, max_position=100)
    assert weight_bytes(spec, dtype, 100) == decoder.weight_bytes


def test_a_gpus_budget_is_the_engines_function_of_the_same_parts() -> None:
    config = EngineConfig()
    device = plan_device(config, LLAMA, device="cuda", memory_bytes=80 * GIB)
    taken = device.weight_bytes + DRIVER_BYTES
    budget = cuda_kv_budget(
        config,
        free_bytes=80 * GIB - taken,
        total_bytes=80 * GIB,
        activation_bytes=device.step_bytes + device.graph_bytes + device.batch_bytes,
    )
    assert device.kv_budget_bytes == budget
    assert device.token_bytes == 2 * 32 * 8 * 128 * 2
    assert device.ledger is not None
    assert device.ledger.num_blocks == budget // (16 * device.token_bytes)


def test_a_gpus_step_with_adapters_is_planned_as_the_engine_counts_what_it_measured() -> None:
    """Measured without adapters on a Hopper GPU, where a kernel activates what it multiplies."""
    config = EngineConfig(enable_lora=True, max_lora_rank=16, max_model_len=4096)
    largest = (1024, 8192, 4096, 16, 1)
    planned = plan_device(config, LLAMA, device="cuda", memory_bytes=80 * GIB).step_bytes
    measured = layers_bytes(LLAMA, "bfloat16", 8192) - 8192 * 2 * 14336 * 2
    without = plan_device(EngineConfig(max_model_len=4096), LLAMA, device="cuda", memory_bytes=80 * GIB).step_bytes
    assert planned == adapted_step_bytes(config, LLAMA, "bfloat16", without, *largest)
    assert adapted_step_bytes(config, LLAMA, "bfloat16", measured, *largest) == planned
    assert planned - without == 3 * 16 * 4 * 8192


def test_blocks_that_are_asked_for_are_planned_on_a_gpu_too() -> None:
    config = EngineConfig(num_gpu_blocks_override=1000)
    device = plan_device(config, LLAMA, device="cuda", memory_bytes=80 * GIB)
    assert device.ledger is not None
    assert device.ledger.num_blocks == 1000
    assert make_plan(config, LLAMA, device="cuda", memory_bytes=80 * GIB).is_exact
    too_many = plan_device(config.replace(num_gpu_blocks_override=10**6), LLAMA, device="cuda", memory_bytes=80 * GIB)
    assert too_many.problem is not None


def test_smaller_kv_values_make_more_blocks_and_ranks_share_heads() -> None:
    plan = make_plan(EngineConfig(), LLAMA, device="cuda", memory_bytes=80 * GIB)
    token_bytes = {(c.kv_dtype, c.tensor_parallel): c.token_bytes for c in plan.choices}
    assert token_bytes[("fp8", 1)] * 2 == token_bytes[("bfloat16", 1)] == token_bytes[("float32", 1)] // 2
    assert [token_bytes[("bfloat16", n)] for n in (1, 2, 4, 8)] == [131072, 65536, 32768, 16384]
    assert not plan.skipped
    assert not plan.is_exact


def test_a_plan_of_a_split_model_is_that_of_its_largest_rank() -> None:
    def device(spec: ModelSpec, **degrees: int) -> DevicePlan:
        return plan_device(EngineConfig(num_gpu_blocks_override=100, **degrees), spec, device="cpu", memory_bytes=None)

    for size, heads in ((1, 8), (2, 4), (3, 3), (8, 1), (16, 1)):
        found = device(LLAMA, tensor_parallel_size=size)
        assert found.block_bytes * 8 == device(LLAMA).block_bytes * heads and found.tensor_parallel == size
    # The last stage has the head, and so fewer layers: the first has 17 of 32.
    assert device(LLAMA, pipeline_parallel_size=2).block_bytes * 32 == device(LLAMA).block_bytes * 17
    smol = spec_from_config(SHAPES["smollm2"].config, source="s")
    assert device(smol, tensor_parallel_size=2).block_bytes * 3 == device(smol).block_bytes * 2
    plan = make_plan(EngineConfig(tensor_parallel_size=2), smol, device="cuda", memory_bytes=8 * GIB)
    assert not plan.skipped and {choice.tensor_parallel for choice in plan.choices} == {1, 2, 4, 8}
    values = 2 * plan.held_spec.num_layers * plan.held_spec.num_kv_heads * plan.held_spec.head_dim
    assert plan.chosen.token_bytes == values * 2  # the formula that is printed
    with pytest.raises(ConfigError, match="use 1 to 9"):
        make_plan(EngineConfig(tensor_parallel_size=10), smol, device="cpu")


@pytest.mark.parametrize(("heads", "columns", "degrees"), [((28, 4), 18944, (4, 1)), ((2, 2), 8960, (2, 3))])
def test_a_split_models_plan_is_of_the_rank_with_the_most(
    heads: tuple[int, int], columns: int, degrees: tuple[int, int]
) -> None:
    """All have as many KV heads, but not as many columns of the MLP."""
    config = EngineConfig(enable_lora=True, tensor_parallel_size=degrees[0], pipeline_parallel_size=degrees[1])
    spec = replace(LLAMA, num_heads=heads[0], num_kv_heads=heads[1], intermediate_size=columns)
    found = plan_device(config, spec, device="cuda", memory_bytes=80 * GIB)
    shares = [share_of(spec, rank, *degrees).spec(spec) for rank in range(config.num_ranks)]
    slots = [adapter_bytes(config, share, "bfloat16") for share in shares]
    assert found.adapter_bytes == max(slots) > min(slots)
    assert found.weight_bytes == max(weight_bytes(share, "bfloat16", LLAMA.max_position) for share in shares)


def with_flags(plan: Plan) -> EngineConfig:
    values: dict[str, Any] = {}
    for flag in plan.flags:
        assert flag.name in FLAG_FIELDS
        name = flag.name.removeprefix("--").replace("-", "_")
        values[name] = flag.value if name == "kv_cache_dtype" else int(flag.value)
    return EngineConfig(**values)


@pytest.mark.parametrize(
    ("memory", "mix", "concurrency"),
    [
        (80 * GIB, [Kind(1024, 256)], None),
        (22 * GIB, [Kind(500, 100)], 30),
        (24 * GIB, [Kind(200, 400, 3.0), Kind(6000, 300, 1.0)], 40),
        (80 * GIB, [Kind(100, 100)], 3000),
    ],
)
def test_the_flags_make_what_they_promise(memory: int, mix: list[Kind], concurrency: int | None) -> None:
    plan = make_plan(EngineConfig(), LLAMA, device="cuda", memory_bytes=memory, mix=mix, concurrency=concurrency)
    again = make_plan(with_flags(plan), LLAMA, device="cuda", memory_bytes=memory, mix=mix, concurrency=concurrency)
    # The engine measures what is left for the cache: a plan for a GPU elsewhere must not fix it to what it reckons.
    assert not again.is_exact and "--kv-cache-memory-bytes" not in {flag.name for flag in plan.flags}
    assert again.chosen == plan.advised
    assert again.chosen.fit is not None
    if concurrency is not None:
        assert again.chosen.fit.typical >= min(concurrency, again.max_num_seqs)
    # What was advised needs no more advice.
    assert not again.flags


def test_a_cpu_that_has_the_memory_is_told_to_use_it() -> None:
    smol = spec_from_config(SHAPES["smollm2"].config, source="s")
    mix = [Kind(256, 256)]
    plan = make_plan(EngineConfig(), smol, device="cpu", memory_bytes=8 * GIB, mix=mix, concurrency=100)
    assert {flag.name for flag in plan.flags} == {"--max-model-len", "--kv-cache-memory-bytes", "--max-num-seqs"}
    assert plan.advised is not None
    assert plan.advised.fit is not None
    assert plan.advised.fit.typical >= 100
    small = make_plan(EngineConfig(), smol, device="cpu", memory_bytes=2 * GIB, mix=mix, concurrency=100)
    assert "--kv-cache-dtype" in {flag.name for flag in small.flags}


def test_what_does_not_fit_says_why_and_what_would() -> None:
    plan = make_plan(EngineConfig(), LLAMA, device="cuda", memory_bytes=12 * GIB)
    assert plan.chosen.ledger is None
    assert plan.chosen.problem is not None
    assert "do not fit in 12.00 GiB" in plan.chosen.problem
    assert "several of them (-tp, -pp)" in plan.chosen.problem
    assert "max_num_batched_tokens" not in plan.chosen.problem  # the weights alone are too much
    assert all(c.ledger is not None for c in plan.choices if c.tensor_parallel == 8)
    config = EngineConfig(kv_cache_memory_bytes=100 * GIB)
    problem = plan_device(config, LLAMA, device="cuda", memory_bytes=80 * GIB).problem
    assert problem is not None
    assert "lower it to" in problem


def test_the_plan_as_data_is_json() -> None:
    plan = make_plan(EngineConfig(), LLAMA, device="cuda", memory_bytes=80 * GIB, mix=[Kind(10, 10)], concurrency=5)
    data = json.loads(json.dumps(plan.to_data()))
    assert data["chosen"]["ledger"]["num_blocks"] == plan.chosen.ledger.num_blocks  # type: ignore[union-attr]
    assert len(data["choices"]) == 12
    assert data["wanted_kv_bytes"] == plan.wanted_kv_bytes


def test_an_unknown_name_without_a_network_lists_the_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Path:
        raise DownloadError("the hub cannot be reached")

    monkeypatch.setattr(shapes, "resolve_model", refuse)
    with pytest.raises(DownloadError, match=r"cannot be reached\. Shapes .* Did you mean llama-3\.1-8b\?"):
        read_model_spec("Llama-3.1-8")
