"""Mixtures of experts: the router's choice, and a dense model's logits where experts are equal. `test_families.py` has
their logits against transformers'."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import models_harness as harness
import pytest
import torch

from quire.errors import UnsupportedModelError
from quire.executor.sizing import weight_bytes
from quire.kernels.cpu import CpuOps, unavailable_reason
from quire.kernels.reference import ReferenceOps
from quire.kernels.triton import TritonOps
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.models.tensors import checkpoint_tensors, tensor_kinds
from quire.weights import open_checkpoint
from tests.models.families import EXPERTS, saved, tiny_model

LENGTHS = (21, 9, 1)


@pytest.mark.parametrize("name", EXPERTS)
def test_experts_matter_in_these_tests(name, tmp_path):
    """With another number of experts a token the logits are others, so that the router's choice is tested."""
    spec, tensors = saved(tiny_model(EXPERTS[name]), tmp_path)
    assert spec.experts is not None
    sequences = harness.random_sequences(spec.vocab_size, (9,))
    changed = replace(spec, experts=replace(spec.experts, top_k=spec.experts.top_k - 1 or 2))
    ops = ReferenceOps("cpu", torch.float32)
    [logits], [others] = (
        harness.run_paged(some, tensors, ops, sequences, harness.whole((9,)), 16) for some in (spec, changed)
    )
    assert (logits - others).abs().max() > 0.01


@pytest.mark.parametrize("name", EXPERTS)
def test_checkpoint_tensors_are_the_decoders_slots(name, tmp_path):
    spec, tensors = saved(tiny_model(EXPERTS[name]), tmp_path)
    decoder = Decoder(spec, ReferenceOps("cpu", torch.float32), device="cpu", dtype=torch.float32, max_position=64)
    slots = {name: slot.shape for name, slot in decoder.weight_slots().items()}
    assert checkpoint_tensors(spec) == slots
    counted = Counter[tuple[int, ...]]()
    for kind in tensor_kinds(spec):
        counted[kind.shape] += kind.count
    assert counted == Counter(slots.values())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == slots


@pytest.mark.parametrize(("quantization", "name"), [(None, "bfloat16"), ("fp8", "fp8")])
def test_the_planner_knows_the_bytes_of_biases_and_sinks(quantization, name, tmp_path):
    spec, _ = saved(tiny_model(EXPERTS["gpt-oss"]), tmp_path)
    ops = TritonOps("cpu", torch.bfloat16, quantization=quantization)
    decoder = Decoder(spec, ops, device="cpu", dtype=torch.bfloat16, max_position=64)
    assert decoder.weight_bytes == weight_bytes(spec, name, 64)


def test_a_dense_model_made_into_equal_experts_stays_itself():
    """Whatever the router says, weights that sum to 1 over equal experts are the dense MLP."""
    model = harness.tiny_model("llama")
    config = model.config.to_dict()
    dense = harness.spec_of(model)
    tensors = dict(model.state_dict())
    spec = spec_from_config(
        config
        | {
            "architectures": ["MixtralForCausalLM"], "sliding_window": None, "num_local_experts": 4,
            "num_experts_per_tok": 2, "rope_scaling": None,
        },
        source="upcycled",
    )  # fmt: skip
    experts = {}
    for name, tensor in tensors.items():
        if ".mlp." in name:
            for number in range(4):
                experts[name.replace(".mlp.", f".mlp.experts.{number}.")] = tensor
        else:
            experts[name] = tensor
    for layer in range(spec.num_layers):
        experts[f"model.layers.{layer}.mlp.gate.weight"] = torch.randn(4, spec.hidden_size)
    sequences = harness.random_sequences(spec.vocab_size, LENGTHS)
    for ops in harness.cpu_backends():
        was, now = (
            harness.run_paged(some, some_tensors, ops, sequences, harness.mixed(LENGTHS), 16)
            for some, some_tensors in ((dense, tensors), (spec, experts))
        )
        for got, want in zip(now, was, strict=True):
            assert (got - want).abs().max() <= 1e-5


def test_a_token_does_not_depend_on_its_batch(tmp_path):
    """Other tokens choose other experts: neither the grouping nor the order of sums may show."""
    spec, tensors = saved(tiny_model(EXPERTS["qwen2-moe"]), tmp_path)
    sequences = harness.random_sequences(spec.vocab_size, (9, 9, 5))
    for ops in harness.cpu_backends():
        if ops.name != "cpu":
            continue
        together = harness.run_paged(spec, tensors, ops, sequences, harness.token_by_token((9, 9, 5)), 16)
        alone = harness.run_paged(spec, tensors, ops, sequences[1:2], harness.token_by_token((9,)), 16)
        assert torch.equal(together[1], alone[0])


@pytest.mark.parametrize("name", ["qwen2-moe-dense-layer", "qwen3-moe", "gpt-oss"])
def test_triton_kernels_give_the_logits_of_transformers(name, tmp_path):
    """Interpreted where there is no GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = tiny_model(EXPERTS[name])
    spec, tensors = saved(model, tmp_path)
    sequences = harness.random_sequences(spec.vocab_size, (4, 2))
    expected = [harness.oracle_logits(model, sequence) for sequence in sequences]
    ops = TritonOps(torch.device(device), torch.float32)
    logits = harness.run_paged(spec, tensors, ops, sequences, harness.mixed((4, 2)), 16, device=device)
    for got, want in zip(logits, expected, strict=True):
        assert (got - want).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9: more than the 4 experts"),
        ({"num_local_experts": 0}, "num_local_experts is 0"),
        ({"num_local_experts": 10**6}, "num_local_experts is 1,000,000"),
        ({"mlp_only_layers": "all"}, "mlp_only_layers"),
    ],
)
def test_a_wrong_config_is_refused_by_its_key(change, complaint):
    config = harness.tiny_model("llama").config.to_dict() | {
        "architectures": ["MixtralForCausalLM"], "sliding_window": None, "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    with pytest.raises(UnsupportedModelError, match=complaint):
        spec_from_config(config | change, source="config.json")


@pytest.mark.skipif(unavailable_reason() is not None, reason=str(unavailable_reason()))
def test_experts_in_mxfp4_stay_packed_and_exact(tmp_path):
    """As gpt-oss is published: blocks of 32 numbers, two in a byte, and exponents beside them. On a GPU they are
    unpacked to the same numbers."""
    from safetensors.torch import load_file, save_file

    saved(tiny_model(EXPERTS["gpt-oss"]), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors, wide = load_file(file), {}
    numbers = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat((numbers, -numbers))
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(115, 125, (experts, rows, columns // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        in_order = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), dim=-1).flatten(3)
        wide[name] = (in_order * 2.0 ** (scales.float() - 127)[..., None]).flatten(2)
    save_file(tensors, file)
    checkpoint = open_checkpoint(tmp_path, hf_overrides={"quantization_config": {"quant_method": "mxfp4"}})
    spec = spec_from_config(checkpoint.config, source="config.json")
    decoder = Decoder(spec, CpuOps(num_threads=1), device="cpu", dtype=torch.float32, max_position=64)
    checkpoint.load_into(decoder.weight_slots(), decoder.is_ignored_weight)
    experts = decoder._layers[1].mlp.experts
    ops = TritonOps("cpu", torch.bfloat16)  # which has 16 bits for each of their numbers
    dense = Decoder(spec, ops, device="cpu", dtype=torch.bfloat16, max_position=64)
    checkpoint.load_into(dense.weight_slots(), dense.is_ignored_weight)
    for kept, other in zip(experts.downs, dense._layers[1].mlp.experts.downs, strict=True):
        assert torch.equal(kept.embed(torch.arange(kept.out_features)), other.weight.float())
    for number, (gate_up, down) in enumerate(zip(experts.gate_ups, experts.downs, strict=True)):
        assert set(gate_up.kinds) == set(down.kinds) == {"Q5_0"}
        both = wide["model.layers.1.mlp.experts.gate_up_proj"][number]
        expected = torch.cat((both[0::2], both[1::2]))
        assert torch.equal(gate_up.embed(torch.arange(len(expected))), expected)
        expected = wide["model.layers.1.mlp.experts.down_proj"][number]
        assert torch.equal(down.embed(torch.arange(len(expected))), expected)
