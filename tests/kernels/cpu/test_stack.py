"""Layers in one call leave the very bits of their operations one by one, and only layers that are so plain run so."""

from __future__ import annotations

from dataclasses import replace

import models_harness as harness
import numpy as np
import pytest
import torch

from quire.kernels.adapters import AdapterBank
from quire.kernels.cpu.stack import CpuStack
from quire.models.architectures import spec_from_config
from quire.models.decoder import Decoder
from quire.models.share import share_of
from tests.gguf_blocks import random_rows

# Wider than what any product of it keeps, with KV groups in turn, norms of heads, and biases.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 256,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": True,
    "use_sliding_window": True,
    "sliding_window": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
}
LENGTHS = (21, 9, 1, 14)
# What a file in Q4_K_M holds, in parts of one fused matrix too; rows of 96 or 128 are no multiple of K types' 256.
GGUF_KINDS = {"v_proj": "Q6_K", "q_proj": "Q4_K", "k_proj": "Q4_K", "gate_proj": "Q4_K", "up_proj": "Q5_K"}

one_variant = pytest.mark.parametrize("ops", [("generic", 2)], indirect=True)


def new_decoder(ops, weights, config=CONFIG, **parts):
    spec = spec_from_config(config, source="config.json")
    decoder = Decoder(spec, ops, device="cpu", dtype=torch.float32, max_position=128, **parts)
    generator = torch.Generator().manual_seed(3)
    for slot in decoder.weight_slots().values():
        if weights == "gguf" and len(slot.shape) == 2 and ".layers." in slot.name:
            kind = GGUF_KINDS.get(slot.name.split(".")[-2], "Q8_0")
            rows = random_rows(kind, *slot.shape, seed=len(slot.name))
            slot.load(_smaller(rows) if kind != "Q8_0" else rows)
        else:
            middle = 1.0 if "norm" in slot.name else 0.0
            slot.load(torch.empty(slot.shape).normal_(middle, 0.2, generator=generator))
    decoder.finish_loading()
    return decoder


def _smaller(rows):
    """K types' scales are products of two numbers, and the second has up to 6 bits."""
    blocks = rows.blocks.copy()
    for start in {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[rows.kind]:
        halves = blocks[..., start : start + 2].copy().view(np.float16)
        blocks[..., start : start + 2] = (halves / 256).astype(np.float16).view(np.uint8)
    return replace(rows, blocks=blocks)


def run(decoder, steps):
    """Every step's logits, and what the caches hold in the end."""
    sequences = harness.random_sequences(decoder.spec.vocab_size, LENGTHS)
    paged = harness.PagedRun(decoder, sequences, 16)
    logits = [torch.cat([part for _, part in sorted(paged.step(step).items())]) for step in steps]
    return torch.cat(logits), torch.stack(paged.kv)


def counting_runs(monkeypatch):
    """A list to which every run of the stack adds its number of tokens."""
    tokens, stack_run = [], CpuStack.run
    monkeypatch.setattr(CpuStack, "run", lambda self, x, *rest: tokens.append(len(x)) or stack_run(self, x, *rest))
    return tokens


@pytest.mark.parametrize("weights", ["gguf", "float32", "bfloat16", "int8"])
def test_a_stack_leaves_the_bits_of_its_operations(ops, weights, monkeypatch):
    ops.weight_dtype = "float32" if weights == "gguf" else weights
    decoder = new_decoder(ops, weights)
    tokens = counting_runs(monkeypatch)
    steps = harness.mixed(LENGTHS)
    stacked = run(decoder, steps)
    assert tokens == [sum(count for _, count in step) for step in steps] and {1} < set(tokens)
    decoder.stack = None
    alone = run(decoder, steps)
    assert stacked[0].isfinite().all() and stacked[0].std() > 0.1
    for ours, theirs in zip(stacked, alone, strict=True):
        assert torch.equal(ours.nan_to_num(), theirs.nan_to_num())


@one_variant
def test_steps_of_many_tokens_run_layer_by_layer(ops, monkeypatch):
    decoder = new_decoder(ops, "float32")
    tokens = counting_runs(monkeypatch)
    paged = harness.PagedRun(decoder, harness.random_sequences(61, (90,)), 16)
    for count in (65, 24, 1):
        paged.step([(0, count)])
    assert tokens == [24, 1]


@one_variant
def test_steps_with_adapters_run_layer_by_layer(ops, monkeypatch):
    bank = AdapterBank(2, 16, device="cpu", dtype=torch.float32, tile=ops.adapter_tile)
    decoder, plain = new_decoder(ops, "float32", adapters=bank), new_decoder(ops, "float32")
    tokens = counting_runs(monkeypatch)
    bank.values.normal_(0.0, 0.1)
    bank.host_ranks = [[16] * bank.num_matrices for _ in range(2)]
    sequence, expected = harness.random_sequences(61, (7,)), run(plain, [[(0, 7)]])[0]
    tokens.clear()
    assert torch.equal(harness.PagedRun(decoder, sequence, 16).step([(0, 7)])[0], expected)
    assert tokens == [7]
    adapted = harness.PagedRun(decoder, sequence, 16)
    adapted.adapters = bank.unpack_rows(torch.from_numpy(bank.pack_rows(np.full(7, 1))), 7)
    assert not torch.allclose(adapted.step([(0, 7)])[0], expected)
    assert tokens == [7]


@one_variant
@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
         "moe_intermediate_size": 32, "mlp_only_layers": [0]},
        {"architectures": ["Gemma3ForCausalLM"], "query_pre_attn_scalar": 32},
        {"architectures": ["Olmo2ForCausalLM"], "layer_types": ["full_attention"] * 5},
        {"num_hidden_layers": 1, "layer_types": ["full_attention"]},
    ],
    ids=["experts", "norms of branches", "wide norms", "one layer"],
)  # fmt: skip
def test_other_layers_make_no_stack(ops, changes):
    assert new_decoder(ops, "float32", {**CONFIG, **changes}).stack is None


@one_variant
def test_a_rank_whose_products_are_parts_of_sums_has_no_stack(ops):
    decoder = Decoder(
        spec := spec_from_config(CONFIG, source="config.json"), ops, device="cpu", dtype=torch.float32,
        max_position=128, share=share_of(spec, 0, tensor_size=2), ranks=object(),
    )  # fmt: skip
    decoder.finish_loading()
    assert decoder.stack is None
