"""All kernels of a Llama-3.1-8B decode step in one graph: 32 layers with their own weights and KV, and the head."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.gpu_inputs import BLOCK_SIZE, LLAMA, Shape, attention_inputs, decodes, spread
from benchmarks.gpu_measure import Report, error, time_us
from benchmarks.gpu_products import PRODUCTS, new_layers
from quire.kernels.composed import ComposedLinear
from quire.kernels.interface import AttentionBatch, Norm, Normed, Rotary
from quire.kernels.triton import TritonOps
from quire.kernels.triton.linear import TritonLinear

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


class SeparateLinear(TritonLinear):
    """Each operation in its own launch."""

    __slots__ = ()

    multiply_rope_write = ComposedLinear.multiply_rope_write
    multiply_add_norm = ComposedLinear.multiply_add_norm
    multiply_act = ComposedLinear.multiply_act


class CublasLinear(SeparateLinear):
    __slots__ = ()

    def multiply(self, x: Normed) -> Tensor:
        assert isinstance(x, Tensor)
        return F.linear(x, self.weight, self.bias)


class Model:
    def __init__(self) -> None:
        self.ops = TritonOps("cuda", torch.bfloat16)
        self.layers = new_layers(self.ops, 32)
        self.head = self.ops.new_float_linear(*PRODUCTS["head"])
        self.head.randomize(0.02, 1000)
        self.norm = Norm(torch.ones(4096, device="cuda"), EPS)
        self.rotary = Rotary(torch.randn(8192, 128, device="cuda"))

    def multiplied_by(self, kind: type[TritonLinear]) -> Model:
        """The same weights in matrices of another kind."""
        model = copy(self)
        model.layers = [{name: self._as(kind, matrix) for name, matrix in layer.items()} for layer in self.layers]
        model.head = self._as(kind, self.head)
        return model

    @staticmethod
    def _as(kind: type[TritonLinear], matrix: TritonLinear) -> TritonLinear:
        matrix = copy(matrix)
        matrix.__class__ = kind
        return matrix

    def step(self, norm: Norm, token_ids: Tensor, batch: AttentionBatch, kvs: list[Tensor]) -> Tensor:
        ops = self.ops
        batch.decode_pieces.clear()  # each step cuts its sequences, as Decoder.forward has it
        residual = self.head.embed(token_ids)
        x = ops.norm(residual, norm)
        for i, (layer, kv) in enumerate(zip(self.layers, kvs, strict=True)):
            q = layer["qkv"].multiply_rope_write(x, self.rotary, kv, batch, LLAMA)
            x = layer["o"].multiply_add_norm(ops.attention(q, kv, batch, LLAMA), residual, norm)
            gated = layer["gate_up"].multiply_act(x, "silu")
            x = layer["down"].multiply_add_norm(gated, residual, norm if i < 31 else None)
        return self.head.logits(ops.normalize(residual, self.norm))


def run_step(report: Report) -> None:
    model = Model()
    variants = {
        "paired": model,
        "separate": model.multiplied_by(SeparateLinear),
        "cuBLAS": model.multiplied_by(CublasLinear),
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
        runs: dict[str, tuple[Model, Norm, AttentionBatch]]
        if rows <= 32:
            runs = {label: (variant, model.norm, batch) for label, variant in variants.items()}
        else:  # the table leaves all of these products to cuBLAS
            plain, folded = replace(batch, shared=None), replace(model.norm, is_folded=True)
            runs = {
                "cuBLAS": (variants["cuBLAS"], model.norm, plain),
                "cuBLAS, norms folded": (variants["paired"], folded, plain),
            }
            if batch.shared is not None:
                runs["and prefix read once"] = (variants["paired"], folded, batch)
        truth: Tensor | None = None
        for label, (variant, norm, placed) in runs.items():
            try:
                logits = variant.step(norm, token_ids, placed, kvs)
                truth = logits if truth is None else truth
                # Random weights of 32 layers amplify rounding: only nonsense would differ by this much.
                off = error(logits, truth)
                us = time_us([partial(variant.step, norm, token_ids, placed, kvs)], budget_ms=100)
            except Exception as exc:
                report.fail(f"step {name} {label}: {type(exc).__name__}: {str(exc).strip().splitlines()[-1:]}")
                continue
            report.add("step", f"{name} {label}", us, f"{rows * 1e6 / us:8.1f} tok/s  difference {off:.1e}")
            if math.isinf(off) or off > 0.2:
                report.fail(f"step {name} {label}: differs by {off:.2g}")
        del kv, kvs
        torch.cuda.empty_cache()
