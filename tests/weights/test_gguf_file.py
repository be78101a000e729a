from __future__ import annotations

import struct
import time

import gguf
import numpy as np
import pytest

from quire.errors import WeightsError
from quire.weights.gguf_file import read_gguf


def test_metadata_and_tensors_as_the_package_reads_them(write_gguf):
    tokens = ["a", "é", "日本", "", "\U0001f600"]
    path = write_gguf(
        metadata={"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.scores": [0.5, -1.0], "x.flag": True, "x.n": 7}
    )
    file = read_gguf(path)
    assert file.metadata["tokenizer.ggml.tokens"] == tokens
    assert file.metadata["tokenizer.ggml.scores"] == [0.5, -1.0]
    assert file.metadata["x.n"] == 7
    assert file.metadata["general.architecture"] == "llama"
    reference = {t.name: t for t in gguf.GGUFReader(path).tensors}
    assert {t.stored_name for t in file.tensors} == set(reference)
    for tensor in file.tensors:
        other = reference[tensor.stored_name]
        assert tensor.shape == tuple(reversed(other.shape.tolist()))
        assert (tensor.offset, tensor.num_bytes) == (other.data_offset, other.n_bytes)
        assert tensor.dtype == other.tensor_type.name


def test_every_kind_of_metadata(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "kinds.gguf", "llama")
    values = {
        "uint8": 200,
        "int8": -100,
        "uint16": 60_000,
        "int16": -30_000,
        "uint32": 4_000_000_000,
        "int32": -2_000_000_000,
        "uint64": 2**63,
        "int64": -(2**62),
        "float32": 0.5,
        "float64": 0.1,
        "bool": True,
        "string": "text",
    }
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = read_gguf(tmp_path / "kinds.gguf").metadata
    assert {kind: metadata[f"x.{kind}"] for kind in values} == values


def test_alignment_of_the_file_is_respected(tmp_path, write_gguf):
    writer = gguf.GGUFWriter(tmp_path / "aligned.gguf", "llama")
    writer.add_custom_alignment(256)
    writer.add_tensor("a", np.arange(3, dtype=np.float32))
    writer.add_tensor("b", np.arange(5, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "aligned.gguf")
    for tensor, count in zip(file.tensors, (3, 5), strict=True):
        assert tensor.offset % 256 == 0
        assert np.frombuffer(file.data, np.float32, count, tensor.offset).tolist() == list(range(count))


def test_the_file_is_never_written(write_gguf):
    path = write_gguf()
    before = path.read_bytes()
    file = read_gguf(path)
    file.data[0:4] = b"XXXX"  # the map is private
    assert path.read_bytes() == before


def test_a_cut_anywhere_is_an_error_that_names_the_file(write_gguf):
    path = write_gguf(metadata={"tokenizer.ggml.tokens": ["one", "two", "three"]})
    whole = path.read_bytes()
    cut_path = path.with_name("cut.gguf")
    last = max(t.offset + t.num_bytes for t in read_gguf(path).tensors)
    header = min(t.offset for t in read_gguf(path).tensors)
    for length in [*range(0, header, 13), *range(header, last, 4999), last - 1]:
        cut_path.write_bytes(whole[:length])
        with pytest.raises(WeightsError, match=r"cut.gguf") as caught:
            read_gguf(cut_path)
        assert "fetch it again" in str(caught.value)
    cut_path.write_bytes(whole[:last])
    read_gguf(cut_path)


def test_truncated_data_names_the_tensor_and_sizes(write_gguf):
    path = write_gguf()
    last = max(read_gguf(path).tensors, key=lambda t: t.offset)
    size = last.offset + last.num_bytes - 8
    with path.open("r+b") as file:
        file.truncate(size)
    with pytest.raises(WeightsError, match=f"truncated: tensor {last.stored_name} needs .* the file has {size:,}"):
        read_gguf(path)


@pytest.mark.parametrize(
    ("start", "says"),
    [
        (b"GGUF" + struct.pack("<I", 1), "version 1"),
        (b"GGUF" + struct.pack("<I", 9), "version 9"),
        (b"GGUF" + struct.pack(">I", 3), "big-endian"),
        (b"PK\x03\x04    ", "PyTorch"),
        (b"\x80\x02\x8a\x0a    ", "PyTorch"),
        (b"version https://git-lfs", "LFS"),
        (b"<!DOCTYPE html>", "web page"),
        (b"lmgg\x01\x00\x00\x00", "before GGUF"),
        (b"whatever else", "not a GGUF file"),
        (b"GG", "2 bytes"),
        (b"", "0 bytes"),
    ],
)
def test_foreign_files_are_refused_by_kind(tmp_path, start, says):
    path = tmp_path / "foreign.gguf"
    path.write_bytes(start + (b"\0" * 64 if len(start) > 4 else b""))
    with pytest.raises(WeightsError, match=says) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


def test_absurd_counts_do_not_allocate(tmp_path):
    path = tmp_path / "absurd.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60) + b"\0" * 64)
    with pytest.raises(WeightsError, match="truncated"):
        read_gguf(path)
    key = struct.pack("<Q", 1) + b"k"
    for item in (struct.pack("<IIQ", 9, 6, 2**40), struct.pack("<IIQ", 9, 8, 2**40), struct.pack("<IQ", 8, 2**62)):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + item + b"\0" * 64)
        with pytest.raises(WeightsError, match="truncated"):
            read_gguf(path)


def test_unknown_value_type_is_named(tmp_path):
    path = tmp_path / "odd.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 3) + b"key" + struct.pack("<I", 77) + b"\0" * 64)
    with pytest.raises(WeightsError, match="key has a value of unknown type 77"):
        read_gguf(path)


def write_one_tensor(path, type_id, dims=(256,), num_dims=None):
    info = struct.pack("<Q", 1) + b"w" + struct.pack(f"<I{len(dims)}Q", num_dims or len(dims), *dims)
    info += struct.pack("<IQ", type_id, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info + b"\0" * 2048)


@pytest.mark.parametrize(("type_id", "name"), [(9, "Q8_1"), (40, "NVFP4"), (999, "unknown type 999")])
def test_unknown_quantization_is_named_with_the_known_ones(tmp_path, type_id, name):
    path = tmp_path / "iq.gguf"
    write_one_tensor(path, type_id)
    with pytest.raises(WeightsError, match=f"tensor w is quantized as {name}, Quire reads F32, F16, Q4_0"):
        read_gguf(path)


def test_misfitting_tensors(tmp_path):
    path = tmp_path / "misfit.gguf"
    write_one_tensor(path, 3, dims=(40,))
    with pytest.raises(WeightsError, match="rows of 40 values, Q4_1 needs a multiple of 32"):
        read_gguf(path)
    write_one_tensor(path, 0, dims=(4,), num_dims=9)
    with pytest.raises(WeightsError, match="tensor w has 9 dimensions"):
        read_gguf(path)


def test_split_files_are_refused(write_gguf):
    for count in (3, "3", [1, 2]):
        path = write_gguf(metadata={"split.count": count, "split.no": 1})
        with pytest.raises(WeightsError, match=r"a part of a GGUF file that was split.*--merge"):
            read_gguf(path)


def test_a_large_vocabulary_is_read_quickly(write_gguf):
    tokens = [f"token{i}" for i in range(100_000)]
    path = write_gguf(metadata={"tokenizer.ggml.tokens": tokens})
    started = time.process_time()
    assert read_gguf(path).metadata["tokenizer.ggml.tokens"] == tokens
    assert time.process_time() - started < 0.5  # about 0.05 on an idle core; the package's reader takes seconds
