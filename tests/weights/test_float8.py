"""Checkpoints in 8-bit floats: what every format stores arrives exactly, and what is wrong is refused by its name."""

from __future__ import annotations

import json

import fakes
import pytest
import torch

from quire.errors import UnsupportedModelError, WeightsError
from quire.executor.sizing import weight_bytes
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import TritonOps
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.models.tensors import checkpoint_tensors, is_ignored_tensor
from quire.weights.safetensors_checkpoint import SafetensorsCheckpoint

FP8 = torch.float8_e4m3fn
PLAIN = spec_from_config(fakes.TINY_LLAMA, source="test")


def compressed(strategy, **changes):
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True} | changes
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": {"dynamic": True}}}
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


FORMATS = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "block": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 32]},
    "compressed tensor": compressed("tensor"),
    "compressed channel": compressed("channel"),
    "compressed block": compressed("block", block_structure=[48, 32]),
}


def scales_for(kind, rows, columns):
    if "block" in kind:
        return torch.rand(-(-rows // 48), -(-columns // 32)) + 0.1
    return torch.rand(rows, 1) + 0.1 if "channel" in kind else torch.rand(()) + 0.1


def spread(scales, rows, columns):
    """One for each number."""
    if scales.ndim == 0:
        return scales.expand(rows, columns)
    block = (1, columns) if scales.shape == (rows, 1) else (48, 32)
    return scales.repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]


def tiny_checkpoint(kind):
    """The tensors of a file, and the numbers that they mean."""
    stored, meant = {}, {}
    for name, shape in checkpoint_tensors(PLAIN).items():
        if "_proj" not in name:
            stored[name] = meant[name] = torch.randn(shape)
            continue
        values, scales = torch.randn(shape).to(FP8), scales_for(kind, *shape)
        stored[name] = values
        stored[f"{name}_scale{'_inv' if kind == 'block' else ''}"] = scales
        stored[name.replace("weight", "input_scale")] = torch.ones(1)
        meant[name] = values.float() * spread(scales, *shape)
    return stored, meant


def decoder_of(spec):
    return Decoder(spec, ReferenceOps("cpu", torch.float32), device="cpu", dtype=torch.float32, max_position=16)


@pytest.mark.parametrize("kind", FORMATS)
def test_what_a_file_means_is_what_is_loaded(kind, write_safetensors):
    stored, meant = tiny_checkpoint(kind)
    items = list(stored.items())
    config = fakes.TINY_LLAMA | {"quantization_config": FORMATS[kind]}
    directory = write_safetensors(dict(items[::2]), dict(items[1::2]), config=config)
    checkpoint = SafetensorsCheckpoint(directory)
    spec = spec_from_config(checkpoint.config, source="test")
    assert spec.fp8 is not None and not spec.fp8.wide_modules
    checkpoint.check(spec)
    decoder, expected = decoder_of(spec), decoder_of(PLAIN)
    checkpoint.load_into(decoder.weight_slots(), decoder.is_ignored_weight)
    for name, slot in expected.weight_slots().items():
        slot.load(meant[name])
    for ours, theirs in zip(decoder._matrices, expected._matrices, strict=True):
        assert torch.equal(ours.weight, theirs.weight)


def wrong_shape(stored):
    name = "model.layers.1.mlp.up_proj.weight_scale"
    stored[name] = torch.ones(3, 1)
    return name


def infinite(stored):
    name = "model.layers.0.self_attn.q_proj.weight_scale"
    stored[name] = stored[name] * float("inf")
    return name


def absent(stored):
    name = "model.layers.0.self_attn.k_proj.weight_scale"
    del stored[name]
    return name


def of_integers(stored):
    name = "model.layers.0.mlp.down_proj.weight_scale"
    stored[name] = stored[name].to(torch.int32)
    return name


@pytest.mark.parametrize("spoil", [wrong_shape, infinite, absent, of_integers])
def test_bad_scales_are_named(spoil, write_safetensors):
    stored, _ = tiny_checkpoint("compressed channel")
    name = spoil(stored)
    config = fakes.TINY_LLAMA | {"quantization_config": FORMATS["compressed channel"]}
    checkpoint = SafetensorsCheckpoint(write_safetensors(stored, config=config))
    decoder = decoder_of(spec_from_config(checkpoint.config, source="test"))
    with pytest.raises(WeightsError, match=name):
        checkpoint.load_into(decoder.weight_slots(), decoder.is_ignored_weight)


def test_narrow_weights_without_a_config_are_named(write_safetensors):
    stored, _ = tiny_checkpoint("compressed tensor")
    checkpoint = SafetensorsCheckpoint(write_safetensors(stored, config=fakes.TINY_LLAMA))
    decoder = decoder_of(PLAIN)
    with pytest.raises(WeightsError, match="quantization_config"):
        checkpoint.load_into(decoder.weight_slots(), lambda name: name.endswith("scale"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "hqq"}, "hqq weights"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt is 'e5m2'"),
        ({"quant_method": "fp8", "activation_scheme": "guess"}, "activation_scheme"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4-pack-quantized"),
        ({"quant_method": "compressed-tensors"}, "config_groups"),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": {}}}, "a says nothing of weights"),
        (compressed("channel", type="int"), "int of 8 bits"),
        (compressed("channel", num_bits=4), "float of 4 bits"),
        (compressed("group"), "strategy 'group'"),
        (compressed("block", block_structure="wide"), "block_structure"),
        ("fp8", "quantization_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_other_formats_are_refused_by_name(config, words):
    with pytest.raises(UnsupportedModelError, match="quantization_config") as refused:
        spec_from_config(fakes.TINY_LLAMA | {"quantization_config": config}, source="test")
    assert words in str(refused.value)


def test_a_checkpoint_with_scales_of_its_cache_alone_is_not_quantized():
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    config = {"quant_method": "compressed-tensors", "format": "dense", "config_groups": {}, "kv_cache_scheme": scheme}
    spec = spec_from_config(fakes.TINY_LLAMA | {"quantization_config": config}, source="test")
    assert spec.fp8 is None and is_ignored_tensor(spec, "model.layers.0.self_attn.k_scale")


def test_modules_that_stay_wide_are_known(write_safetensors):
    kept = ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.down_proj"]
    config = {"quant_method": "fp8", "modules_to_not_convert": kept}
    spec = spec_from_config(json.loads(json.dumps(fakes.TINY_LLAMA | {"quantization_config": config})), source="test")
    assert spec.fp8 is not None and spec.fp8.wide_modules == ("model.layers.0.mlp.down_proj",)


@pytest.mark.parametrize(
    ("kept", "wide"),
    [
        ("model.layers.0.mlp.down_proj", [(False, True), (False, False)]),
        ("model.layers.1", [(False, False), (True, True)]),
        ("self_attn", [(True, False), (True, False)]),
        ("re:.*layers[.]1[.].*_proj$", [(False, False), (True, True)]),
        ("model.layers.0.self_attn.qkv_proj", [(True, False), (False, False)]),
        ("model.layers.10", [(False, False), (False, False)]),
    ],
)
def test_a_part_of_a_layer_stays_wide_as_a_whole(kept, wide):
    """And the planner knows what that takes, on a backend that holds the others in 8 bits."""
    config = {"quant_method": "fp8", "modules_to_not_convert": ["lm_head", kept]}
    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "attention_bias": True}
    spec = spec_from_config(fakes.TINY_LLAMA | small | {"quantization_config": config}, source="test")
    assert [(layer.wide_attention, layer.wide_mlp) for layer in spec.layers] == wide
    ops = TritonOps("cpu", torch.bfloat16, quantization="fp8")
    decoder = Decoder(spec, ops, device="cpu", dtype=torch.bfloat16, max_position=32)
    assert decoder.weight_bytes == weight_bytes(spec, "fp8", 32)
