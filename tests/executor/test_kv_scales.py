"""Scales of an 8-bit KV cache: where they come from, and that they are fixed before anything is written."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import models_harness as harness
import pytest
import torch
from safetensors.torch import save_file

from quire.config import EngineConfig
from quire.errors import ConfigError, WeightsError
from quire.executor.batch import PersistentBatch
from quire.executor.clock import StepClock
from quire.executor.device import Backend
from quire.executor.kv_scales import fit_cache, known_kv_scales, read_scales
from quire.executor.profile import prompts_step
from quire.executor.stores import describe_blocks
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
    worker.measure_scales = lambda token_ids: fit_cache(decoder, BACKEND, block_size=4, token_ids=token_ids)
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


def _decoder(name="llama", **changes):
    model = harness.tiny_model(name)
    spec = replace(harness.spec_of(model), **changes)
    return harness.load_decoder(spec, model.state_dict(), ReferenceOps("cpu", torch.float32))


BACKEND = Backend(torch.device("cpu"), ReferenceOps("cpu", torch.float32), torch.float32, FP8, "float32", "plain")


def _states(decoder, kv_dtype, num_tokens=40):
    """Hidden states of a prompt that is read through a cache, and what that holds of the layers' keys and values."""
    inputs, num_blocks = prompts_step(decoder, torch.device("cpu"), 4, num_tokens, num_tokens)
    spec = decoder.spec
    kv = torch.zeros(spec.num_layers, num_blocks, 2, spec.num_kv_heads, 4, spec.head_dim).to(kv_dtype)
    token_ids = torch.arange(num_tokens) * 3 % spec.vocab_size
    return decoder.forward(token_ids, inputs.attention, list(kv.unbind(0))), kv


def test_scales_bring_the_largest_value_into_range():
    decoder = _decoder()
    fit_cache(decoder, BACKEND, block_size=16)
    scales, offsets = decoder.kv_scales, decoder.kv_offsets
    assert all(0 < k < 448 and 0 < v < 448 for k, v in scales)
    fit_cache(decoder, BACKEND, block_size=4)  # it depends neither on what is there already nor on blocks
    torch.testing.assert_close(torch.tensor(decoder.kv_scales), torch.tensor(scales), rtol=1e-4, atol=0.0)
    torch.testing.assert_close(decoder.kv_offsets, offsets)
    fit_cache(decoder, BACKEND, block_size=16, known=[(7.0, 1e-9)] * len(scales))
    assert decoder.kv_scales == [(7.0, 1e-9)] * len(scales)
    fit_cache(decoder, BACKEND, block_size=16, known=[(1e-9, 3.0)] * len(scales))
    assert all(k > 1e-4 and v == 3.0 for k, v in decoder.kv_scales)  # keys less an offset would not fit


def test_offsets_change_nothing_but_the_rounding():
    decoder = _decoder("llama-biases")
    for layer in decoder._layers:  # as Qwen2.5's: one number that all keys have, far larger than the rest
        first = layer.attention.spec.num_heads * layer.attention.spec.head_dim
        layer.attention.qkv.bias[first + layer.attention.spec.head_dim // 2 - 1] = 60.0
    expected, plain = _states(decoder, torch.float32)
    fit_cache(decoder, BACKEND, block_size=4)
    offsets = decoder.kv_offsets
    rounded, _ = _states(decoder, FP8)
    decoder.set_kv_scales([(1.0, 1.0)] * decoder.spec.num_layers)
    shifted, kv = _states(decoder, torch.float32)  # nothing is rounded here
    assert offsets.dtype == torch.float32 and (shifted - expected).abs().max() <= 1e-3 * expected.abs().max()
    assert kv[:, :, 0].square().mean() < 0.5 * plain[:, :, 0].square().mean()
    fit_cache(decoder, BACKEND, block_size=4, with_offsets=False)
    assert decoder.kv_offsets is None
    without, _ = _states(decoder, FP8)
    assert (rounded - expected).norm() < 0.75 * (without - expected).norm()


def test_the_first_tokens_key_is_a_number_of_the_format():
    decoder = _decoder(bos_token_id=0)
    fit_cache(decoder, BACKEND, block_size=4)
    _, kv = _states(decoder, torch.float32)  # token 0 at position 0, as in what was measured
    first = kv[:, 0, 0, :, 0]
    torch.testing.assert_close(first.to(FP8).float(), first, rtol=1e-4, atol=1e-4)


def test_a_cap_and_a_sink_see_a_shift():
    decoder = _decoder(attention_softcap=20.0)
    fit_cache(decoder, BACKEND, block_size=4)
    assert decoder.kv_offsets is None
    assert not replace(decoder.spec, attention_softcap=None, sinks=True).ignores_key_shifts


def test_what_blocks_are_made_with_is_in_their_identity(monkeypatch):
    monkeypatch.setattr("quire.executor.stores.weights_fingerprint", lambda checkpoint, seed: ("", ""))
    decoder = _decoder()
    seen = set()
    for shift in (None, 0.0, 1e-3):
        fit_cache(decoder, BACKEND, block_size=4)
        decoder.set_kv_offsets(None if shift is None else decoder.kv_offsets + shift)
        seen.add(describe_blocks(EngineConfig(), None, BACKEND, decoder))
    assert len(seen) == 3
