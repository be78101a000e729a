from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from quire.weights import dequantize as module
from quire.weights.dequantize import Dequantizer
from tests.gguf_blocks import PACKED, QUANTIZED, by_package, random_blocks


@pytest.mark.parametrize("kind", QUANTIZED.values(), ids=lambda kind: kind.name)
def test_equals_the_gguf_package(kind):
    raw = random_blocks(kind.name, 96)
    shape = (12, 8 * kind.block_values)
    with Dequantizer(num_threads=1) as dequantizer:
        values = dequantizer.tensor(raw.reshape(-1), kind.name, shape)
    assert values.shape == shape
    np.testing.assert_array_equal(values.numpy().reshape(-1), by_package(raw, kind.name).reshape(-1))


@pytest.mark.parametrize("kind", QUANTIZED.values(), ids=lambda kind: kind.name)
def test_block_sizes_are_the_packages(kind):
    assert (kind.block_values, kind.block_bytes) == gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind.name]]


@pytest.mark.parametrize("name", ["Q4_1", "Q5_K"])
def test_threads_and_chunks_change_nothing(name, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK_VALUES", 1024)
    monkeypatch.setattr(module, "_THREADED_VALUES", 1)
    raw = random_blocks(name, 77)
    expected = by_package(raw, name).reshape(-1)
    for num_threads in (1, 4):
        with Dequantizer(num_threads) as dequantizer:
            values = dequantizer.tensor(raw.reshape(-1), name, expected.shape).numpy()
            np.testing.assert_array_equal(values, expected)


def test_quantized_tensors_share_one_scratch():
    large, small = random_blocks("Q8_0", 8), random_blocks("Q8_0", 2)
    with Dequantizer(1) as dequantizer:
        first = dequantizer.tensor(large.reshape(-1), "Q8_0", (256,))
        second = dequantizer.tensor(small.reshape(-1), "Q8_0", (64,))
        assert second.data_ptr() == first.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_types_are_not_copied(dtype):
    values = torch.randn(3, 5).to(dtype)
    raw = values.view(torch.uint8).numpy().reshape(-1)
    name = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    with Dequantizer(1) as dequantizer:
        read = dequantizer.tensor(raw, name, (3, 5))
    assert torch.equal(read, values)
    assert read.data_ptr() == values.data_ptr()


@pytest.mark.parametrize("name", PACKED)
def test_rows_are_the_stored_bytes(name):
    kind = QUANTIZED[name]
    raw = random_blocks(name, 24)
    shape = (6, 4 * kind.block_values)
    with Dequantizer() as dequantizer:
        rows = dequantizer.rows(raw.reshape(-1), name, shape)
        assert np.shares_memory(rows.blocks, raw)
        part = rows[1:3, kind.block_values : 3 * kind.block_values].unpacked().copy()
        assert rows.shape == shape
        expected = dequantizer.tensor(raw.reshape(-1), name, shape).numpy()
    assert np.array_equal(part, expected[1:3, kind.block_values : 3 * kind.block_values])


def test_types_without_a_kernel_have_no_rows():
    with Dequantizer() as dequantizer:
        assert dequantizer.rows(random_blocks("IQ4_XS", 1).reshape(-1), "IQ4_XS", (1, 256)) is None


@pytest.mark.parametrize(("name", "packed"), [("MXFP4", "Q5_0"), ("IQ4_NL", "Q8_0")])
def test_some_types_are_repacked_without_a_change(name, packed):
    raw = random_blocks(name, 32)
    if name == "MXFP4":
        raw[:, 0] = np.arange(104, 136)
        raw[3] = 0  # an exponent that no float16 has, of nothing but zeros
    with Dequantizer() as dequantizer:
        rows = dequantizer.rows(raw.reshape(-1), name, (4, 256))
        assert rows.kind == packed
        values = rows.unpacked().copy()
    assert np.array_equal(values.reshape(-1), by_package(raw, name).reshape(-1))


def test_a_scale_that_does_not_fit_is_unpacked():
    raw = random_blocks("MXFP4", 8)
    raw[:, 0] = 103
    with Dequantizer() as dequantizer:
        assert dequantizer.rows(raw.reshape(-1), "MXFP4", (1, 256)) is None
