from __future__ import annotations

from functools import partial

import gguf
import numpy as np
import pytest
import torch

from quire.errors import WeightsError
from quire.kernels.cpu import CpuOps, unavailable_reason
from quire.kernels.reference import ReferenceOps
from quire.kernels.stored_rows import QuantizedRows
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.models.slots import WeightSlot
from quire.weights import gguf_checkpoint, open_checkpoint
from quire.weights.gguf_checkpoint import GGUFCheckpoint, hugging_face_name
from tests.weights.conftest import FFN, HIDDEN, LAYERS, tiny_gguf_tensors

Q = gguf.GGMLQuantizationType


def load(path, recorder, arch="llama", **changes):
    checkpoint = GGUFCheckpoint(path)
    shapes = {hugging_face_name(t.stored_name, arch): t.shape for t in checkpoint._file.tensors}
    recorded = recorder({n: s for n, s in shapes.items() if n != "rope_freqs.weight"} | changes)
    checkpoint.load_into(recorded.slots, lambda name: False)
    return recorded.loaded


def permute(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, 2, half, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def test_llama_rows_are_put_back(write_gguf, gguf_tensors, recorder):
    original = gguf_tensors("llama")
    stored = dict(original)
    for layer in range(2):
        stored[f"blk.{layer}.attn_q.weight"] = permute(original[f"blk.{layer}.attn_q.weight"], 4)
        stored[f"blk.{layer}.attn_k.weight"] = permute(original[f"blk.{layer}.attn_k.weight"], 2)
    loaded = load(write_gguf(tensors=stored), recorder)
    assert len(loaded) == len(original)
    for name, tensor in original.items():
        np.testing.assert_array_equal(loaded[hugging_face_name(name, "llama")].numpy(), tensor)


def test_llama_biases_are_put_back_too(write_gguf, gguf_tensors, recorder):
    bias = np.arange(32, dtype=np.float32)
    tensors = gguf_tensors("llama") | {"blk.0.attn_q.bias": permute(bias, 4)}
    loaded = load(write_gguf(tensors=tensors), recorder)
    np.testing.assert_array_equal(loaded["model.layers.0.self_attn.q_proj.bias"].numpy(), bias)


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_qwen_is_taken_as_it_is(write_gguf, gguf_tensors, recorder, arch):
    loaded = load(write_gguf(arch), recorder, arch)
    original = gguf_tensors(arch)
    assert len(loaded) == len(original)
    for name, tensor in original.items():
        np.testing.assert_array_equal(loaded[hugging_face_name(name, arch)].numpy(), tensor)


def test_gemma_norms_lose_the_one(write_gguf, gguf_tensors, recorder):
    loaded = load(write_gguf("gemma3"), recorder, "gemma3")
    for name, tensor in gguf_tensors("gemma3").items():
        expected = tensor - 1 if name.endswith("norm.weight") else tensor
        np.testing.assert_array_equal(loaded[hugging_face_name(name, "gemma3")].numpy(), expected)
    for part in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"):
        assert f"model.layers.1.{part}.weight" in loaded
    assert "model.layers.1.post_feedforward_layernorm.weight" in loaded
    assert "model.layers.1.self_attn.q_norm.weight" in loaded


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_as_transformers_reads_it(write_gguf, gguf_tensors, recorder, kind):
    """Names, permutation and quantized values against transformers' own GGUF loader."""
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    matrices = [name for name, tensor in gguf_tensors("llama").items() if tensor.ndim == 2]
    path = write_gguf(quantize=dict.fromkeys(matrices, kind))
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    expected = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    loaded = load(path, recorder)
    assert loaded.keys() == expected.keys()
    for name, tensor in loaded.items():
        assert torch.equal(tensor.float(), expected[name].float()), name


def test_k_quants_of_a_whole_file(tmp_path, recorder):
    rng = np.random.default_rng(1)
    raw = rng.integers(0, 256, (4, 210), dtype=np.uint8)
    raw[:, 208:] = np.full((4, 1), 0.25, np.float16).view(np.uint8)
    embedding = raw.reshape(4, 210)
    writer = gguf.GGUFWriter(tmp_path / "k.gguf", "qwen2")
    for key, value in {
        "embedding_length": 256,
        "feed_forward_length": 1,
        "block_count": 1,
        "context_length": 8,
        "attention.head_count": 1,
    }.items():
        writer.add_uint32(f"qwen2.{key}", value)
    writer.add_float32("qwen2.attention.layer_norm_rms_epsilon", 1e-6)
    writer.add_tensor("token_embd.weight", embedding, raw_dtype=Q.Q6_K)
    writer.add_tensor("blk.0.attn_norm.weight", np.ones(256, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loaded = load(tmp_path / "k.gguf", recorder, "qwen2")
    expected = gguf.quants.dequantize(embedding, Q.Q6_K)
    np.testing.assert_array_equal(loaded["model.embed_tokens.weight"].numpy(), expected)


@pytest.mark.parametrize("kind", [Q.F16, Q.Q4_0, Q.Q5_0, Q.Q8_0], ids=lambda kind: kind.name)
@pytest.mark.parametrize("keeps_quantized", [False, True])
def test_a_slot_that_holds_a_part_gets_that_part(write_gguf, gguf_tensors, recorder, kind, keeps_quantized):
    """Some heads of q and k, whose rows the file has in another order, and some blocks of down's columns."""
    matrices = [name for name, tensor in gguf_tensors("llama").items() if tensor.ndim == 2]
    path = write_gguf(quantize=dict.fromkeys(matrices, kind))
    whole = load(path, recorder)
    parts = {
        "model.layers.1.self_attn.q_proj.weight": (slice(8, 24), slice(0, 32)),
        "model.layers.1.self_attn.k_proj.weight": (slice(8, 16), slice(0, 32)),
        "model.layers.1.mlp.down_proj.weight": (slice(0, 32), slice(32, 64)),
        "model.embed_tokens.weight": (slice(5, 16), slice(0, 32)),
    }
    loaded = {}

    def keep(name, part):
        rows = torch.from_numpy(part.unpacked()) if isinstance(part, QuantizedRows) else part
        loaded[name] = rows.clone()

    slots = {
        name: WeightSlot(
            name, tuple(tensor.shape), partial(keep, name), lambda std, seed: None, keeps_quantized, parts.get(name)
        )
        for name, tensor in whole.items()
    }
    GGUFCheckpoint(path).load_into(slots, lambda name: False)
    for name, part in parts.items():
        assert torch.equal(loaded[name].float(), whole[name][part].float()), name


def test_progress_ends_at_the_total(write_gguf, recorder, nothing_ignored):
    checkpoint = GGUFCheckpoint(write_gguf())
    recorded = recorder({hugging_face_name(t.stored_name, "llama"): t.shape for t in checkpoint._file.tensors})
    calls = []
    checkpoint.load_into(recorded.slots, nothing_ignored, progress=lambda *args: calls.append(args))
    total = sum(t.num_bytes for t in checkpoint._file.tensors)
    assert [done for done, _ in calls] == sorted(done for done, _ in calls)
    assert calls[-1] == (total, total)
    assert len(calls) == len(recorded.loaded)


def test_released_pages_do_not_change_what_is_read(write_gguf, recorder, monkeypatch):
    path = write_gguf()
    whole = load(path, recorder)
    monkeypatch.setattr(gguf_checkpoint, "_RELEASE_BYTES", 4096)
    again = load(path, recorder)
    assert all(torch.equal(whole[name], again[name]) for name in whole)


def test_rope_factors_are_no_weight(write_gguf, gguf_tensors, recorder):
    tensors = gguf_tensors("llama") | {"rope_freqs.weight": np.ones(4, np.float32)}
    assert "rope_freqs.weight" not in load(write_gguf(tensors=tensors), recorder)


def test_wrong_shape_names_file_tensor_and_both_shapes(write_gguf, recorder):
    changes = {"model.embed_tokens.weight": (17, 32)}
    with pytest.raises(WeightsError, match=r"tiny.gguf: tensor token_embd.weight has shape \[16, 32\].*\[17, 32\]"):
        load(write_gguf(), recorder, **changes)


def test_tensor_without_a_place_is_refused_by_its_own_name(write_gguf, gguf_tensors, recorder, nothing_ignored):
    tensors = gguf_tensors("llama") | {"blk.0.ssm_conv1d.weight": np.zeros(4, np.float32)}
    checkpoint = GGUFCheckpoint(write_gguf(tensors=tensors))
    shapes = {hugging_face_name(t.stored_name, "llama"): t.shape for t in checkpoint._file.tensors}
    del shapes["blk.0.ssm_conv1d.weight"]
    with pytest.raises(WeightsError, match=r"no place for: blk.0.ssm_conv1d.weight"):
        checkpoint.load_into(recorder(shapes).slots, nothing_ignored)


def test_overrides_replace_entries_of_the_config(write_gguf):
    checkpoint = GGUFCheckpoint(write_gguf(), hf_overrides={"max_position_embeddings": 64})
    assert checkpoint.config["max_position_embeddings"] == 64
    assert checkpoint.generation_config == {"eos_token_id": [2]}
    assert checkpoint.gguf_metadata["general.name"] == "Tiny"


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
