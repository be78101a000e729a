"""Checkpoints in whole numbers: what every layout stores arrives exactly, and what is wrong is refused by its name."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import fakes
import pytest
import torch
from integer_checkpoints import FORMATS, TOKENS, compressed, write_integer_model
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.errors import ConfigError, UnsupportedModelError, WeightsError
from quire.kernels.reference import ReferenceOps
from quire.kernels.stored_rows import IntegerRows
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.models.share import share_of
from quire.weights.model import open_model
from quire.weights.safetensors_checkpoint import SafetensorsCheckpoint


def loaded(directory):
    checkpoint = SafetensorsCheckpoint(directory)
    spec = spec_from_config(checkpoint.config, source="test")
    checkpoint.check(spec)
    decoder = Decoder(spec, ReferenceOps("cpu", torch.float32), device="cpu", dtype=torch.float32, max_position=16)
    checkpoint.load_into(decoder.weight_slots(), decoder.is_ignored_weight)
    return decoder


@pytest.mark.parametrize("kind", FORMATS)
def test_what_a_file_means_is_what_is_loaded(kind, tmp_path):
    narrow, plain = write_integer_model(tmp_path, kind)
    for ours, theirs in zip(loaded(narrow)._matrices, loaded(plain)._matrices, strict=True):
        assert torch.equal(ours.weight, theirs.weight)


@pytest.mark.parametrize("kind", ["awq", "packed zeros", "w8a8"])
def test_each_rank_takes_its_part(kind, tmp_path):
    narrow, plain = write_integer_model(tmp_path, kind)
    checkpoint, meant = SafetensorsCheckpoint(narrow), load_file(plain / "model.safetensors")
    spec = spec_from_config(checkpoint.config, source="test")
    for rank in range(2):
        ops = ReferenceOps("cpu", torch.float32)
        share = share_of(spec, rank, 2)
        decoder = Decoder(
            spec, ops, device="cpu", dtype=torch.float32, max_position=16, share=share, ranks=SimpleNamespace()
        )
        slots, held = decoder.weight_slots(), {}
        keeping = {name: replace(slot, load=partial(held.__setitem__, name)) for name, slot in slots.items()}
        checkpoint.load_into(keeping, decoder.is_ignored_weight)
        for name, part in held.items():
            wanted = meant[name] if slots[name].part is None else meant[name][slots[name].part]
            assert torch.equal(part if isinstance(part, torch.Tensor) else part.unpacked(), wanted), name


def changed(directory, change):
    file = directory / "model.safetensors"
    tensors = load_file(file)
    name = change(tensors)
    save_file(tensors, file)
    return name


def missing_scales(tensors):
    del tensors[name := "model.layers.0.self_attn.q_proj.scales"]
    return name


def missing_groups(tensors):
    del tensors[name := "model.layers.0.self_attn.q_proj.g_idx"]
    return name


def wrong_shape(tensors):
    tensors[name := "model.layers.1.mlp.up_proj.qzeros"] = torch.zeros(3, 3, dtype=torch.int32)
    return name


def infinite(tensors):
    tensors[name := "model.layers.0.mlp.gate_proj.scales"].fill_(float("inf"))
    return name


def beyond(tensors):
    tensors[name := "model.layers.0.mlp.gate_proj.g_idx"][3] = 99
    return name


def real_bias(tensors):
    tensors[name := "model.layers.0.mlp.gate_proj.bias"][3] = 1
    return name


@pytest.mark.parametrize("change", [missing_scales, missing_groups, wrong_shape, infinite, beyond, real_bias])
def test_tensors_that_do_not_fit_are_named(change, tmp_path):
    narrow, _ = write_integer_model(tmp_path, "gptq desc_act")
    name = changed(narrow, change)
    with pytest.raises(WeightsError, match=name):
        loaded(narrow)


GPTQ, AWQ = FORMATS["gptq"].config, FORMATS["awq"].config
PACKED = {"num_bits": 4, "strategy": "group", "group_size": 32}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "bitsandbytes"}, "bitsandbytes weights"),
        (AWQ | {"bits": 3}, "bits is 3"),
        (AWQ | {"version": "gemv"}, "version is 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point is False"),
        (AWQ | {"group_size": "large"}, "group_size is 'large'"),
        (GPTQ | {"bits": 2}, "bits is 2"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format is True"),
        (GPTQ | {"dynamic": {"a": {"bits": 8}}}, "dynamic is {"),
        (compressed("marlin-24", **PACKED), "format 'marlin-24'"),
        (compressed("pack-quantized", **PACKED | {"num_bits": 2}), "num_bits is 2"),
        (compressed("pack-quantized", **PACKED | {"strategy": "tensor_group"}), "strategy is 'tensor_group'"),
        (compressed("pack-quantized", TOKENS, **PACKED), "input_activations"),
        (compressed("int-quantized", TOKENS, **PACKED), "num_bits is 4"),
        (compressed("int-quantized", TOKENS | {"dynamic": False}, num_bits=8, strategy="channel"), "dynamic is false"),
        (compressed("int-quantized", TOKENS, num_bits=8, strategy="channel", symmetric=False), "symmetric is False"),
        (compressed("pack-quantized", **PACKED) | {"transform_config": {"R1": {}}}, "transform_config"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_served_is_refused_by_its_field(config, words):
    with pytest.raises(UnsupportedModelError, match="quantization_config") as refused:
        spec_from_config(json.loads(json.dumps(fakes.TINY_LLAMA | {"quantization_config": config})), source="test")
    assert words in str(refused.value)


@pytest.mark.parametrize("kind", ["gptq zeros", "packed 8", "w8a8"])
def test_a_part_means_the_same_numbers(kind):
    quantized = FORMATS[kind].quantized(torch.randn(24, 128))
    group = FORMATS[kind].group or 128
    rows = IntegerRows(
        quantized.codes.to(torch.uint8), quantized.scales, quantized.zeros.short(), quantized.bits, group
    )
    for part in ((slice(3, 9), slice(None)), (slice(None), slice(64, 128)), (slice(1, 5), slice(32, 112))):
        assert torch.equal(rows[part].unpacked(), quantized.meant[part])
    order = torch.randperm(24)
    assert torch.equal(rows.with_rows(order).unpacked(), quantized.meant[order])


def test_columns_in_an_order_of_their_own_are_not_split():
    quantized = FORMATS["gptq desc_act"].quantized(torch.randn(24, 128))
    rows = IntegerRows(
        quantized.codes.to(torch.uint8), quantized.scales, quantized.zeros.short(), 4, 32, quantized.groups
    )
    assert torch.equal(rows[3:9, :].unpacked(), quantized.meant[3:9])
    with pytest.raises(WeightsError, match="desc_act"):
        rows[:, :64]


def test_blocks_of_gguf_are_asked_of_a_gguf_file_only(tmp_path):
    narrow, _ = write_integer_model(tmp_path, "awq")
    with pytest.raises(ConfigError, match="is none: leave it out"):
        open_model(EngineConfig(model=str(narrow), quantization="gguf"))
