"""EngineConfig: spellings understood, everything else refused by name."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.config import EngineConfig
from quire.errors import ConfigError


def test_defaults_need_nothing() -> None:
    config = EngineConfig()
    assert (config.model, config.block_size, config.enable_prefix_caching) == ("smollm2", 16, True)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({"swap_space": 4}, {"swap_space_gb": 4}),
        ({"kv_cache_dtype": "fp16"}, {"kv_cache_dtype": "float16"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"dtype": "bf16"}, {"dtype": "bfloat16"}),
        ({"max_model_len": -1}, {"max_model_len": None}),
        ({"max_model_len": "auto"}, {"max_model_len": None}),
        ({"trust_remote_code": False}, {}),
        ({"pinned_prefixes": "You are"}, {"pinned_prefixes": ("You are",)}),
        ({"pinned_prefixes": [[1, 2], "a"]}, {"pinned_prefixes": ((1, 2), "a")}),
        ({"max_num_seqs": None}, {"max_num_seqs": None}),
        ({"long_prefill_token_threshold": 0}, {"long_prefill_token_threshold": None}),
        ({"max_num_seqs": np.int64(4), "seed": torch.tensor(3)}, {"max_num_seqs": 4, "seed": 3}),
        ({"gpu_memory_utilization": np.float32(0.5)}, {"gpu_memory_utilization": 0.5}),
        ({"pinned_prefixes": [np.array([1, 2]), torch.tensor([3])]}, {"pinned_prefixes": ((1, 2), (3,))}),
        ({"model": Path("/m"), "download_dir": Path("/d")}, {"model": "/m", "download_dir": "/d"}),
    ],
)
def test_spellings_that_vllm_users_write(written: dict[str, object], meant: dict[str, object]) -> None:
    config = EngineConfig(**written)
    for name, value in meant.items():
        assert getattr(config, name) == value
        assert type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"block_sise": 16}, ["block_sise", "Did you mean block_size"]),
        ({"block_size": 24}, ["4, 8, 16, 32, 64, 128", "24"]),
        ({"trust_remote_code": True}, ["trust_remote_code"]),
        ({"tensor_parallel_size": 0}, ["tensor_parallel_size"]),
        ({"pipeline_parallel_size": 1.5}, ["pipeline_parallel_size"]),
        ({"distributed_executor_backend": "mpi"}, ["distributed_executor_backend", "mp", "ray"]),
        ({"speculative_config": {"x": 1}}, ["speculative_config", "'x'"]),
        ({"speculative_config": {"method": "ngram", "promt_lookup_max": 3}}, ["did you mean prompt_lookup_max"]),
        ({"speculative_config": {"method": "eagle3"}}, ["ngram, suffix, draft_model", "eagle3"]),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 0}}, ["num_speculative_tokens", "128"]),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": 1000}}, ["num_speculative_tokens"]),
        ({"speculative_config": {"method": "ngram", "num_speculative_tokens": True}}, ["num_speculative_tokens"]),
        ({"speculative_config": {"method": "suffix", "prompt_lookup_max": 3}}, ["prompt_lookup_max", "suffix"]),
        ({"speculative_config": {"method": "draft_model"}}, ["add model"]),
        ({"speculative_config": {"method": "ngram", "model": "smollm2"}}, ["leave model out"]),
        ({"speculative_config": {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}}, ["more than"]),
        ({"speculative_config": "ngram"}, ["speculative_config", "mapping"]),
        ({"speculative_config": {"method": "ngram"}, "spec_method": "suffix"}, ["spec_method", "method"]),
        ({"spec_tokens": 4}, ["method"]),
        ({"spec_model": "smollm2", "tensor_parallel_size": 2}, ["draft model", "tensor_parallel_size"]),
        ({"speculative_model": "smollm2"}, ["speculative_model", "speculative_config"]),
        ({"swap_space": 1, "swap_space_gb": 1}, ["swap_space", "swap_space_gb"]),
        ({"dtype": "int3"}, ["dtype", "int3"]),
        ({"kv_cache_dtype": "int4"}, ["kv_cache_dtype"]),
        ({"gpu_memory_utilization": 1.5}, ["gpu_memory_utilization"]),
        ({"memory_share": 0.0}, ["memory_share"]),
        ({"enable_sleep_mode": True, "tensor_parallel_size": 2}, ["enable_sleep_mode"]),
        ({"max_num_seqs": 0}, ["max_num_seqs"]),
        ({"max_model_len": 10.5}, ["max_model_len"]),
        ({"preemption": "swap"}, ["swap_space_gb"]),
        ({"pinned_prefixes": ["a"], "enable_prefix_caching": False}, ["enable_prefix_caching"]),
        ({"pinned_prefixes": [""]}, ["pinned_prefixes"]),
        ({"quantization": "awq"}, ["fp8", "gguf", "int8", "awq"]),
        ({"quantization": "gptq_marlin"}, ["gptq_marlin", "read as it is, so leave this out"]),
        ({"quantization": "fp8", "dtype": "float32"}, ["contradict"]),
        ({"quantization": "int8", "dtype": "float16"}, ["contradict"]),
        ({"scheduling_policy": "lifo"}, ["fcfs, priority"]),
        ({"seed": "x"}, ["seed"]),
        ({"model": ""}, ["model"]),
        ({"download_dir": ""}, ["download_dir"]),
        ({"num_gpu_blocks_override": 0}, ["num_gpu_blocks_override"]),
        ({"num_gpu_blocks_override": 9, "kv_cache_memory_bytes": 9}, ["num_gpu_blocks_override", "give one"]),
    ],
)
def test_refused_by_name(written: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**written)
    for word in words:
        assert word in str(refused.value)


def test_a_config_is_never_mutated() -> None:
    config = EngineConfig(block_size=32)
    changed = config.replace(block_size=64)
    assert (config.block_size, changed.block_size) == (32, 64)
    with pytest.raises(AttributeError):
        config.block_size = 4  # type: ignore[misc]


def test_drafting_is_written_in_vllms_ways() -> None:
    long = EngineConfig(speculative_config={"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3})
    assert long.speculative_config is not None
    assert (long.speculative_config.prompt_lookup_min, long.speculative_config.prompt_lookup_max) == (3, 3)
    short = EngineConfig(spec_method="suffix", spec_tokens=8)
    assert short == EngineConfig(speculative_config={"method": "suffix", "num_speculative_tokens": 8, "model": None})
    assert EngineConfig(**dataclasses.asdict(short)) == short
    model = EngineConfig(spec_model="smollm2").speculative_config
    assert model is not None and model.method == "draft_model"
    assert EngineConfig(speculative_config=None, spec_method=None) == EngineConfig(speculative_config={})
