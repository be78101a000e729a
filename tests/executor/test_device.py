"""Choosing device, dtypes and kernels, and refusing what does not go together."""

from __future__ import annotations

from dataclasses import replace

import fakes
import numpy as np
import pytest
import torch

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.executor import device
from quire.executor.device import choose_backend, device_of_rank
from quire.kernels import cpu as native
from quire.kernels.stored_rows import QuantizedRows
from quire.models.architectures import spec_from_config
from quire.models.spec import CheckpointFormat

SPEC = spec_from_config(fakes.TINY_LLAMA, source="test")


def test_a_cpu_takes_float32_unless_told() -> None:
    backend = choose_backend(EngineConfig(device="cpu"), SPEC)
    assert (backend.device.type, backend.weight_dtype, backend.kv_dtype) == ("cpu", "float32", torch.float32)
    half = choose_backend(EngineConfig(device="cpu", dtype="bfloat16"), SPEC)
    assert (half.weight_dtype, half.kv_dtype) == ("bfloat16", torch.bfloat16)
    mixed = choose_backend(EngineConfig(device="cpu", kv_cache_dtype="fp16"), SPEC)
    assert (mixed.weight_dtype, mixed.kv_dtype) == ("float32", torch.float16)


def test_a_start_tells_which_types_are_held_packed_and_what_multiplies_them() -> None:
    if native.unavailable_reason() is not None:
        pytest.skip("plain torch holds nothing packed")
    told = []
    for dtype in ("auto", "float32"):
        backend = choose_backend(EngineConfig(device="cpu", dtype=dtype), SPEC)
        assert isinstance(backend.ops, native.CpuOps) and backend.shown_weights == "float32"
        matrix = backend.ops.new_linear(32, 64)
        matrix.load_rows(0, QuantizedRows("Q8_0", np.zeros((32, 2, 34), np.uint8), 32, np.zeros_like))
        told.append(backend.shown_weights)
    assert told == ["Q8_0 with 8-bit activations", "Q8_0 with float32 activations"]


def test_more_threads_than_processors_are_warned_of(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.unavailable_reason() is not None:
        pytest.skip("the native kernels alone have threads of their own")
    warned: list[str] = []
    monkeypatch.setattr(device.get_logger(), "warning", warned.append)
    monkeypatch.setattr(device, "usable_cpus", lambda: [0])
    choose_backend(EngineConfig(device="cpu", num_threads=1), SPEC)
    assert not warned
    choose_backend(EngineConfig(device="cpu", num_threads=2), SPEC)
    assert "num_threads=2 is more than the 1 processors" in warned[0] and len(warned) == 1


def test_without_native_kernels_torch_serves_float32_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "unavailable_reason", lambda: "no compiler was found")
    backend = choose_backend(EngineConfig(device="cpu"), SPEC)
    assert backend.ops.name == "reference"
    assert backend.note is not None
    assert "no compiler was found" in backend.note
    for config in (EngineConfig(device="cpu", dtype="float16"), EngineConfig(device="cpu", quantization="int8")):
        with pytest.raises(ConfigError, match="no compiler was found"):
            choose_backend(config, SPEC)


def test_a_library_older_than_its_sources_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "unavailable_reason", lambda: f"{native.STALE}: run the build")
    with pytest.raises(ConfigError, match="older than their sources: run the build"):
        choose_backend(EngineConfig(device="cpu"), SPEC)


@pytest.mark.skipif(native.unavailable_reason() is not None, reason=str(native.unavailable_reason()))
def test_what_the_backend_cannot_serve_is_refused_with_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="head dimension of 24"):
        choose_backend(EngineConfig(device="cpu"), replace(SPEC, head_dim=24))
    monkeypatch.setattr(native.CpuOps, "supported_block_sizes", lambda self, head_dim: (16, 32))
    with pytest.raises(ConfigError, match="choose one of 16, 32"):
        choose_backend(EngineConfig(device="cpu", block_size=4), SPEC)


def test_8_bit_floats_are_for_gpus() -> None:
    with pytest.raises(ConfigError, match="on a CPU use 'int8'"):
        choose_backend(EngineConfig(device="cpu", quantization="fp8"), SPEC)
    with pytest.raises(ConfigError, match="stay packed without it"):
        choose_backend(EngineConfig(device="cpu", quantization="gguf"), SPEC)
    stored = replace(SPEC, fp8=CheckpointFormat())
    assert choose_backend(EngineConfig(device="cpu"), stored).weight_dtype == "float32"


def test_devices_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.torch.cuda, "is_available", lambda: False)
    for name in ("tpu", "mps", "nonsense:1"):
        with pytest.raises(ConfigError, match="auto, cpu or cuda"):
            choose_backend(EngineConfig(device=name), SPEC)
    with pytest.raises(ConfigError, match="torch sees no CUDA GPU"):
        choose_backend(EngineConfig(device="cuda"), SPEC)
    assert choose_backend(EngineConfig(), SPEC).device.type == "cpu"


def test_every_rank_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    config = EngineConfig(model="m", device="cuda", tensor_parallel_size=3)
    assert [device_of_rank(config, rank).index for rank in range(2)] == [0, 1]
    with pytest.raises(ConfigError, match="3 ranks need a GPU each, and torch sees 2 here"):
        device_of_rank(config, 2)
    monkeypatch.setenv("QUIRE_RANKS_PER_GPU", "2")
    assert [device_of_rank(config, rank).index for rank in range(3)] == [0, 0, 1]
    assert device_of_rank(config.replace(device="cpu"), 2).type == "cpu"
