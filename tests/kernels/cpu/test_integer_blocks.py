"""Matrices of other quantized formats in GGUF's blocks: the same numbers, or unpacked."""

from __future__ import annotations

import pytest
import torch
from integer_checkpoints import FORMATS, write_integer_model

from quire import LLM, SamplingParams
from quire.kernels.stored_rows import IntegerRows


def rows_of(kind, weight):
    quantized = FORMATS[kind].quantized(weight)
    zeros = None if FORMATS[kind].symmetric else quantized.zeros.short()
    groups = quantized.groups if FORMATS[kind].shuffled else None
    group = FORMATS[kind].group or weight.shape[1]
    codes = quantized.codes.to(torch.uint8)
    return IntegerRows(codes, quantized.scales, zeros, quantized.bits, group, groups), quantized.meant


@pytest.mark.parametrize("kind", FORMATS)
def test_products_are_those_of_the_unpacked_matrix_bit_for_bit(ops, kind):
    ops.exact = True
    rows, meant = rows_of(kind, torch.randn(70, 192))
    linear, plain = ops.new_linear(70, 192), ops.new_linear(70, 192)
    linear.load_rows(0, rows)
    plain.load_rows(0, meant)
    assert linear.kinds == (FORMATS[kind].on_cpu,)
    for num_rows in (1, 5, 41):
        x = torch.randn(num_rows, 192)
        assert torch.equal(linear.multiply(x), plain.multiply(x))


def test_codes_at_the_ends_of_their_range(ops):
    ops.exact = True
    codes = torch.arange(16, dtype=torch.uint8).repeat(34, 4)
    zeros = (torch.arange(68, dtype=torch.int16) % 16).reshape(34, 2)
    for scales in (torch.ones(34, 2), torch.full((34, 2), 2.0**-24)):  # the smallest of float16
        rows = IntegerRows(codes, scales.half(), zeros, 4, 32)
        linear = ops.new_linear(34, 64)
        linear.load_rows(0, rows)
        assert linear.kinds == ("Q5_0",)
        assert torch.equal(linear.multiply(torch.eye(64)).T, rows.unpacked())


def test_scales_that_float16_does_not_hold_are_not_rounded(ops):
    rows = IntegerRows(torch.full((32, 32), 3, dtype=torch.uint8), torch.full((32, 1), 0.1), None, 4, 32)
    linear = ops.new_linear(32, 32)
    linear.load_rows(0, rows)
    assert linear.kinds == ("float32",)


PROMPTS = ["One day a small bird", "and", "Weights in few bits are read faster, because"]


def tokens_of(path):
    llm = LLM(str(path), max_model_len=128, dtype="float32", device="cpu", num_threads=1)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=16, ignore_eos=True), use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize("kind", ["awq", "gptq desc_act", "w8a8"])
def test_tokens_are_those_of_the_unpacked_model(kind, tmp_path):
    narrow, plain = write_integer_model(tmp_path, kind)
    assert tokens_of(narrow) == tokens_of(plain)
