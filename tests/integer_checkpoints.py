"""Matrices packed as AWQ, GPTQ and compressed-tensors store them, written here from what those formats say of
themselves, one number at a time; and whole tiny checkpoints of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rank_models import write_lively_model
from safetensors.torch import load_file, save_file
from torch import Tensor

AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # that the eight numbers of a word hold, from its lowest bits on


def pack(codes: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[n, m] -> [n, m * bits / 32] int32, the first of each word in its lowest bits."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    words = torch.zeros(codes.shape[0], codes.shape[1] // per_word, dtype=torch.int64)
    for place, column in enumerate(order):
        words |= codes[:, column::per_word].to(torch.int64) << (bits * place)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@dataclass(frozen=True)
class Quantized:
    """weight ~ (codes - zeros) * scales, columns grouped by `groups`."""

    codes: Tensor  # [rows, columns]
    zeros: Tensor  # [rows, groups]
    scales: Tensor
    groups: Tensor  # [columns]
    bits: int

    @property
    def meant(self) -> Tensor:
        return (self.codes - self.zeros[:, self.groups]).float() * self.scales.float()[:, self.groups]


def quantize(
    weight: Tensor, bits: int, group: int | None, *, symmetric: bool, shuffled: bool, dtype: torch.dtype
) -> Quantized:
    rows, columns = weight.shape
    group = group or columns
    groups = torch.arange(columns) // group
    if shuffled:
        groups = groups[torch.randperm(columns, generator=torch.Generator().manual_seed(columns))]
    top = 2**bits - 1
    zeros = torch.full((rows, columns // group), 2 ** (bits - 1))
    scales = torch.empty(rows, columns // group)
    for index in range(columns // group):
        part = weight[:, groups == index]
        if symmetric:
            scales[:, index] = part.abs().amax(1) / (top // 2)
        else:
            low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
            scales[:, index] = (high - low) / top
            zeros[:, index] = (-low / scales[:, index]).round().long().clamp(0, top)
    scales = scales.to(dtype)
    codes = (weight / scales.float()[:, groups]).round().long() + zeros[:, groups]
    return Quantized(codes.clamp(0, top), zeros, scales, groups, bits)


def awq(q: Quantized) -> dict[str, Tensor]:
    return {
        "qweight": pack(q.codes.T, 4, AWQ_COLUMNS),
        "qzeros": pack(q.zeros.T, 4, AWQ_COLUMNS),
        "scales": q.scales.T.contiguous(),
    }


def gptq(q: Quantized) -> dict[str, Tensor]:
    return {
        "qweight": pack(q.codes, q.bits).T.contiguous(),
        "qzeros": pack((q.zeros.T - 1) % 2**q.bits, q.bits),  # one less than they are
        "scales": q.scales.T.contiguous(),
        "g_idx": q.groups.to(torch.int32),
        "bias": torch.zeros(len(q.codes), dtype=torch.float16),
    }


def gptq_v2(q: Quantized) -> dict[str, Tensor]:
    return gptq(q) | {"qzeros": pack(q.zeros.T, q.bits)}


def packed(q: Quantized) -> dict[str, Tensor]:
    """Signed numbers plus half the range, along the columns; zeros along the rows."""
    return {
        "weight_packed": pack(q.codes, q.bits),
        "weight_scale": q.scales,
        "weight_shape": torch.tensor(q.codes.shape),
        "weight_zero_point": pack(q.zeros.T, q.bits).T.contiguous(),
        "weight_g_idx": q.groups.to(torch.int32),
    }


def eight_bits(q: Quantized) -> dict[str, Tensor]:
    return {"weight": (q.codes - 128).to(torch.int8), "weight_scale": q.scales}


def compressed(layout: str, inputs: dict[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int"} | weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True}


@dataclass(frozen=True)
class Format:
    config: dict[str, Any]
    store: Callable[[Quantized], dict[str, Tensor]]
    bits: int
    group: int | None
    symmetric: bool = False
    shuffled: bool = False
    dtype: torch.dtype = torch.float16
    on_cpu: str = "float32"  # what the native kernels hold

    def quantized(self, weight: Tensor) -> Quantized:
        return quantize(
            weight, self.bits, self.group, symmetric=self.symmetric, shuffled=self.shuffled, dtype=self.dtype
        )


def _gptq(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": False} | more


FORMATS = {
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        awq, 4, 32, on_cpu="Q5_0",
    ),
    "gptq": Format(_gptq(4, 32, sym=True), gptq, 4, 32, symmetric=True, on_cpu="Q4_0"),
    "gptq zeros": Format(_gptq(4, 64), gptq, 4, 64, on_cpu="Q5_0"),
    "gptq v2": Format(_gptq(4, 32, checkpoint_format="gptq_v2"), gptq_v2, 4, 32, on_cpu="Q5_0"),
    "gptq rows": Format(_gptq(4, -1), gptq, 4, None, on_cpu="Q5_0"),
    "gptq 8": Format(_gptq(8, 32, sym=True), gptq, 8, 32, symmetric=True, on_cpu="Q8_0"),
    "gptq 8 zeros": Format(_gptq(8, 32), gptq, 8, 32),
    "gptq desc_act": Format(_gptq(4, 32, desc_act=True), gptq, 4, 32, shuffled=True),
    "packed": Format(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=True),
        packed, 4, 32, symmetric=True, on_cpu="Q4_0",
    ),
    "packed zeros": Format(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=False),
        packed, 4, 32, on_cpu="Q5_0",
    ),
    "packed 8": Format(
        compressed("pack-quantized", num_bits=8, strategy="channel", symmetric=True),
        packed, 8, None, symmetric=True, on_cpu="Q8_0",
    ),
    "packed actorder": Format(
        compressed("pack-quantized", num_bits=4, strategy="group", group_size=32, symmetric=True, actorder="group"),
        packed, 4, 32, symmetric=True, shuffled=True,
    ),
    "w8a8": Format(
        compressed("int-quantized", TOKENS, num_bits=8, strategy="channel", symmetric=True),
        eight_bits, 8, None, symmetric=True, dtype=torch.float32,
    ),
}  # fmt: skip


def write_integer_model(path: Path, name: str, **changes: Any) -> tuple[Path, Path]:
    """A model in the format, and one in float32 that means the same numbers. Its down matrices of layer 1 are in
    neither: they stay as they were."""
    plain = write_lively_model(path / "plain", **({"intermediate_size": 192} | changes))
    kind = FORMATS[name]
    stored, meant = {}, load_file(plain / "model.safetensors")
    for key, tensor in meant.items():
        if "_proj" not in key or key == "model.layers.1.mlp.down_proj.weight":
            stored[key] = tensor
            continue
        quantized = kind.quantized(tensor)
        stored |= {f"{key.removesuffix('.weight')}.{part}": value for part, value in kind.store(quantized).items()}
        meant[key] = quantized.meant
    save_file(meant, plain / "model.safetensors")
    narrow = path / "narrow"
    narrow.mkdir()
    for file in plain.glob("token*.json"):
        (narrow / file.name).write_bytes(file.read_bytes())
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": kind.config}
    (narrow / "config.json").write_text(json.dumps(config))
    save_file(stored, narrow / "model.safetensors")
    return narrow, plain
