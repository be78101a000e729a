"""All kernels of a Llama-3.1-8B decode step in one graph: 32 layers with their own weights and KV, and the head."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_inputs import BLOCK_SIZE, LLAMA, Shape, attention_inputs, decodes, spread
from benchmarks.gpu_measure import Report, error, time_us
from benchmarks.gpu_products import PRODUCTS, new_layers
from quire.kernels.composed import ComposedOps
from quire.kernels.interface import AttentionBatch, FoldedNorm, LinearWeight, Unscaled
from quire.kernels.reference import DenseLinear
from quire.kernels.triton import TritonOps

EPS = 1e-5
SHAPES = {
    "1 x 320": decodes([320]),
    "1 x 2,048": decodes([2048]),
    "4 x 320": decodes([320] * 4),
    "16 x 136": decodes([136] * 16),
    "32 x 320": decodes([320] * 32),
    "64 x 843": decodes([843] * 64),
    "256 x 843": decodes([843] * 256),
    "256 x 2,048 + 64..128": Shape(
        [2048 + n for n in spread(256, 64, 128)], [1] * 256, prefix_groups=1, prefix_len=2048
    ),
}


class SeparateOps(TritonOps):
    """Each operation in its own launch."""

    linear_rope_write = ComposedOps.linear_rope_write
    linear_add_norm = ComposedOps.linear_add_norm
    linear_act = ComposedOps.linear_act


class CublasOps(SeparateOps):
    def linear(self, x: Tensor, weight: LinearWeight) -> Tensor:
        assert isinstance(weight, DenseLinear)
        return F.linear(x, weight.weight, weight.bias)


class Model:
    def __init__(self) -> None:
        ops = TritonOps("cuda", torch.bfloat16)
        self.layers = new_layers(ops, 32)
        self.head = ops.new_linear(*PRODUCTS["head"])
        self.head.randomize(0.02, 1000)
        self.norm = torch.ones(4096, device="cuda")
        self.cos_sin = torch.randn(8192, 128, device="cuda")

    def step(
        self, ops: TritonOps, norm: Tensor | FoldedNorm, token_ids: Tensor, batch: AttentionBatch, kvs: list[Tensor]
    ) -> Tensor:
        residual = ops.embed(token_ids, self.head)
        x: Tensor | Unscaled = ops.norm(residual, norm, EPS)
        for i, (layer, kv) in enumerate(zip(self.layers, kvs, strict=True)):
            q = ops.linear_rope_write(x, layer["qkv"], self.cos_sin, kv, batch, LLAMA)
            x = ops.linear_add_norm(ops.attention(q, kv, batch, LLAMA), layer["o"], residual, norm, EPS)
            gated = ops.linear_act(x, layer["gate_up"], "silu")
            x = ops.linear_add_norm(gated, layer["down"], residual, norm if i < 31 else None, EPS)
        return ops.logits(ops.rms_norm(residual, self.norm, EPS), self.head)


def run_step(report: Report) -> None:
    model = Model()
    variants: dict[str, TritonOps] = {
        "paired": TritonOps("cuda", torch.bfloat16),
        "separate": SeparateOps("cuda", torch.bfloat16),
        "cuBLAS": CublasOps("cuda", torch.bfloat16),
    }
    for name, shape in SHAPES.items():
        rows = len(shape.lens)
        _, kv, batch = attention_inputs(shape)
        kvs = [torch.empty_like(kv).normal_() for _ in model.layers]
        last = torch.tensor([n - 1 for n in shape.lens], device="cuda")
        blocks = batch.block_tables.gather(1, (last // BLOCK_SIZE)[:, None])[:, 0].long()
        batch.slots = blocks * BLOCK_SIZE + last % BLOCK_SIZE
        batch.max_kv_len = 8192  # a graph is captured for the longest sequence that a server allows
        token_ids = torch.randint(0, 128256, (rows,), device="cuda")
        runs: dict[str, tuple[TritonOps, Tensor | FoldedNorm, AttentionBatch]]
        if rows <= 32:
            runs = {label: (ops, model.norm, batch) for label, ops in variants.items()}
        else:  # the table leaves all of these products to cuBLAS
            plain, folded = replace(batch, shared=None), FoldedNorm(model.norm)
            runs = {
                "cuBLAS": (variants["cuBLAS"], model.norm, plain),
                "cuBLAS, norms folded": (variants["paired"], folded, plain),
            }
            if batch.shared is not None:
                runs["and prefix read once"] = (variants["paired"], folded, batch)
        truth: Tensor | None = None
        for label, (ops, norm, placed) in runs.items():
            try:
                logits = model.step(ops, norm, token_ids, placed, kvs)
                truth = logits if truth is None else truth
                # Random weights of 32 layers amplify rounding: only nonsense would differ by this much.
                off = error(logits, truth)
                us = time_us([partial(model.step, ops, norm, token_ids, placed, kvs)], budget_ms=100)
            except Exception as exc:
                report.fail(f"step {name} {label}: {type(exc).__name__}: {str(exc).strip().splitlines()[-1:]}")
                continue
            report.add("step", f"{name} {label}", us, f"{rows * 1e6 / us:8.1f} tok/s  difference {off:.1e}")
            if math.isinf(off) or off > 0.2:
                report.fail(f"step {name} {label}: differs by {off:.2g}")
        del kv, kvs
        torch.cuda.empty_cache()
