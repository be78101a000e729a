"""Scales of an 8-bit KV cache: where they come from, and that they are fixed before anything is written."""

from __future__ import annotations

import json
from types import SimpleNamespace

import models_harness as harness
import pytest
import torch
from safetensors.torch import save_file

from quire.config import EngineConfig
from quire.errors import ConfigError, WeightsError
from quire.executor.batch import PersistentBatch
from quire.executor.build import _widen_kv_scales
from quire.executor.clock import StepClock
from quire.executor.kv_scales import known_kv_scales, read_scales
from quire.executor.worker import ElsewhereSampled, Worker
from quire.kernels.reference import ReferenceOps
from quire.plan import StepPlan
from quire.weights.float8 import read_kv_scales
from quire.weights.safetensors_checkpoint import list_tensors

FP8 = torch.float8_e4m3fn
VLLM = {"model_type": "llama", "kv_cache": {"dtype": "float8_e4m3fn", "scaling_factor": {"0": {"1": 0.5, "0": 2}}}}


@pytest.mark.parametrize(
    ("given", "expected"),
    [({"kv_scales": [[0.1, 0.2], [1, 3]]}, [(0.1, 0.2), (1.0, 3.0)]), (VLLM, [(2.0, 2.0), (0.5, 0.5)])],
)
def test_a_file_of_either_kind(given, expected, tmp_path):
    (tmp_path / "scales.json").write_text(json.dumps(given))
    assert read_scales(tmp_path / "scales.json", 2) == expected
    config = EngineConfig(kv_cache_dtype="fp8", quantization_param_path=str(tmp_path / "scales.json"))
    assert known_kv_scales(config, None, 2) == expected


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_scales": [[0.1, 0.2]]}, "those of 1 layers"),
        ({"kv_scales": [[0.1, 0.2], [0.0, 1.0]]}, "layer 1"),
        ({"kv_scales": [[0.1, 0.2], [1.0]]}, "layer 1"),
        ({"kv_cache": {"scaling_factor": {"0": {"0": 1.0, "1": 1.0}, "1": {"0": 2.0, "1": 1.0}}}}, "no scales"),
        ({"kv_cache": {"scaling_factor": {"0": {"0": 1.0, "2": 1.0}}}}, "no scales"),
        ([], "no scales"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(given, words, tmp_path):
    (tmp_path / "scales.json").write_text(json.dumps(given))
    with pytest.raises(ConfigError, match=words):
        read_scales(tmp_path / "scales.json", 2)


def test_a_file_that_is_none_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_scales(tmp_path / "scales.json", 2)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": "auto"},
        {"quantization_param_path": "x.json"},
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"kv_disk_path": "/tmp/x", "kv_disk_size": 1 << 30},
    ],
)
def test_what_measured_scales_do_not_go_with(changes):
    with pytest.raises(ConfigError, match="calculate_kv_scales"):
        EngineConfig(**{"kv_cache_dtype": "fp8", "calculate_kv_scales": True} | changes)


@pytest.mark.parametrize(
    ("k", "v"),
    [
        ("k_scale", "v_scale"),
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),
        ("k_proj.output_scale", "v_proj.output_scale"),
    ],
)
def test_a_checkpoints_own(k, v, tmp_path):
    tensors = {}
    for layer in range(2):
        tensors[f"model.layers.{layer}.self_attn.{k}"] = torch.tensor(0.25 + layer)
        tensors[f"model.layers.{layer}.self_attn.{v}"] = torch.tensor([0.5])
    save_file(tensors, tmp_path / "model.safetensors")
    entries = list_tensors(tmp_path)
    assert read_kv_scales(entries, 2) == [(0.25, 0.5), (1.25, 0.5)]
    assert read_kv_scales(entries, 3) is None  # a layer has none


def test_a_placeholder_is_no_scale_and_one_a_head_is_refused(tmp_path):
    name = "model.layers.0.self_attn.kv_scale"
    for value, expected in ((torch.tensor(2.0), [(2.0, 2.0)]), (torch.tensor(-1.0), None)):
        save_file({name: value}, tmp_path / "model.safetensors")
        assert read_kv_scales(list_tensors(tmp_path), 1) == expected
    save_file({name: torch.ones(4)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match="one scale for all heads"):
        read_kv_scales(list_tensors(tmp_path), 1)


def test_the_first_step_measures_before_it_writes():
    """Its tokens have larger keys than the scales were made for; a second step changes nothing."""
    model = harness.tiny_model("llama")
    spec = harness.spec_of(model)
    decoder = harness.load_decoder(spec, model.state_dict(), ReferenceOps("cpu", torch.float32))
    decoder.set_kv_scales([(1e-6, 5.0)] * spec.num_layers)
    batch = PersistentBatch(num_rows=2, max_model_len=32, block_size=4, device=torch.device("cpu"))
    kv = [torch.zeros(8, 2, spec.num_kv_heads, 4, spec.head_dim, dtype=FP8) for _ in range(spec.num_layers)]
    cache = SimpleNamespace(layers=kv, device_blocks=kv[0], start_moves=lambda: None)
    worker = Worker(decoder, cache, batch, ElsewhereSampled())
    backend = SimpleNamespace(device=torch.device("cpu"), activation_dtype=torch.float32)
    loaded = SimpleNamespace(decoder=decoder, backend=backend, config=EngineConfig(block_size=4))
    worker.measure_scales = lambda token_ids: _widen_kv_scales(loaded, token_ids)
    assert not worker.capture_more()
    seen = []
    for row in range(2):
        plan = StepPlan(row)
        batch.admit(row, list(range(3 + row, 10)), 0, [(0, [2 * row, 2 * row + 1])])
        plan.spans.add(row, 6, False)
        worker.forward(plan, StepClock(on_gpu=False))
        seen.append(list(decoder.kv_scales))
    assert all(k > 1e-4 and v == 5.0 for k, v in seen[0]) and seen[0] == seen[1]
    assert worker.measure_scales is None
    written = torch.stack([layer.float() for layer in kv])[:, :1, 0]
    assert written.isfinite().all() and 0 < written.abs().max() < 448  # none is past the range
