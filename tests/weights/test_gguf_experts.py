"""Experts out of a GGUF file, which keeps all of a layer's in one tensor."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.kernels.cpu import CpuOps, unavailable_reason
from quire.kernels.reference import ReferenceOps
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.weights import open_checkpoint
from tests.weights.conftest import FFN, HIDDEN, LAYERS, tiny_gguf_tensors

NUM_EXPERTS, SHARED = 3, 32
ARCHITECTURES = {
    "llama": ("MixtralForCausalLM", True),
    "qwen2moe": ("Qwen2MoeForCausalLM", False),
    "qwen3moe": ("Qwen3MoeForCausalLM", True),
    "granitemoe": ("GraniteMoeForCausalLM", True),
    "olmoe": ("OlmoeForCausalLM", False),
    "gpt-oss": ("GptOssForCausalLM", True),
}


def experts_tensors(arch):
    tensors = tiny_gguf_tensors(arch if arch == "olmoe" else arch.removesuffix("moe"))
    rng = np.random.default_rng(1)
    for layer in range(LAYERS):
        block = f"blk.{layer}"
        for name in ("gate", "up", "down"):
            del tensors[f"{block}.ffn_{name}.weight"]
        shapes = {"gate_exps": (FFN, HIDDEN), "up_exps": (FFN, HIDDEN), "down_exps": (HIDDEN, FFN)}
        shapes = {name: (NUM_EXPERTS, *shape) for name, shape in shapes.items()} | {"gate_inp": (NUM_EXPERTS, HIDDEN)}
        if arch == "qwen2moe":
            shapes |= {"gate_shexp": (SHARED, HIDDEN), "up_shexp": (SHARED, HIDDEN), "down_shexp": (HIDDEN, SHARED)}
            shapes["gate_inp_shexp"] = (HIDDEN,)
        if arch == "gpt-oss":
            for name, rows in {"gate_exps": FFN, "up_exps": FFN, "down_exps": HIDDEN}.items():
                tensors[f"{block}.ffn_{name}.bias"] = rng.normal(size=(NUM_EXPERTS, rows)).astype(np.float32)
            tensors[f"{block}.ffn_gate_inp.bias"] = rng.normal(size=NUM_EXPERTS).astype(np.float32)
        tensors |= {
            f"{block}.ffn_{name}.weight": rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()
        }
    return tensors


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_expert_is_found_and_stays_packed(write_gguf, arch):
    tensors = experts_tensors(arch)
    packed = {name: gguf.GGMLQuantizationType.Q8_0 for name in tensors if name.endswith("_exps.weight")}
    pairs = {f"{arch}.expert_count": NUM_EXPERTS, f"{arch}.expert_used_count": 2}
    if arch != "llama":
        pairs[f"{arch}.expert_feed_forward_length"] = FFN
    if arch == "gpt-oss":
        pairs["gpt-oss.attention.sliding_window"] = 8
    checkpoint = open_checkpoint(write_gguf(arch, tensors=tensors, metadata=pairs, quantize=packed))
    spec = spec_from_config(checkpoint.config, source="test")
    name, normalizes = ARCHITECTURES[arch]
    assert spec.architecture == name and spec.experts is not None
    assert (spec.experts.num_experts, spec.experts.top_k, spec.experts.normalizes) == (NUM_EXPERTS, 2, normalizes)
    assert spec.experts.shared_intermediate_size == (SHARED if arch == "qwen2moe" else None)
    checkpoint.check(spec)
    decoder = Decoder(spec, CpuOps(num_threads=1), device="cpu", dtype=torch.float32, max_position=16)
    checkpoint.load_into(decoder.weight_slots(), decoder.is_ignored_weight)
    for layer in range(LAYERS):
        mlp = decoder._layers[layer].mlp
        for number, (gate_up, down) in enumerate(zip(mlp.experts.gate_ups, mlp.experts.downs, strict=True)):
            assert set(gate_up.kinds) == set(down.kinds) == {"Q8_0"}
            for matrix, names in ((gate_up, ("gate", "up")), (down, ("down",))):
                stored = [tensors[f"blk.{layer}.ffn_{name}_exps.weight"][number] for name in names]
                expected = torch.from_numpy(np.concatenate(stored))
                held = matrix.embed(torch.arange(len(expected)))
                assert (held - expected).abs().max() < 0.02
        router = torch.from_numpy(tensors[f"blk.{layer}.ffn_gate_inp.weight"])
        assert torch.equal(mlp.experts.router.embed(torch.arange(NUM_EXPERTS)), router)
        if arch == "gpt-oss":
            down = mlp.experts.downs[1]
            assert torch.equal(down.bias, torch.from_numpy(tensors[f"blk.{layer}.ffn_down_exps.bias"][1]))
            sinks = decoder._layers[layer].attention.spec.sinks
            assert torch.equal(sinks, torch.from_numpy(tensors[f"blk.{layer}.attn_sinks.weight"]))


@pytest.mark.parametrize("arch", ["gemma2", "smollm3", "granite", "olmo2"])
def test_dense_families_of_llama_cpp_are_read(write_gguf, arch):
    pairs = {f"{arch}.attention.sliding_window": 8} if arch == "gemma2" else {}
    if arch == "granite":
        pairs |= {"granite.attention.scale": 0.25, "granite.residual_scale": 0.5, "granite.logit_scale": 8.0}
    checkpoint = open_checkpoint(write_gguf(arch, metadata=pairs))
    spec = spec_from_config(checkpoint.config, source="test")
    assert (spec.attention_scale, spec.logit_scale) == ((0.25, 0.125) if arch == "granite" else (8**-0.5, 1.0))
    checkpoint.check(spec)
    decoder = Decoder(spec, ReferenceOps("cpu", torch.float32), device="cpu", dtype=torch.float32, max_position=16)
    checkpoint.load_into(decoder.weight_slots(), decoder.is_ignored_weight)
