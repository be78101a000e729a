"""The header of a safetensors file."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from fuzz.harness import Target
from quire.errors import WeightsError
from quire.weights.safetensors_checkpoint import read_header

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-safetensors")


def parse(data: bytes) -> None:
    path = Path(_FOLDER.name, "model.safetensors")
    path.write_bytes(data)
    entries = read_header(path)
    # Whatever is believed lies in the file, and no byte of it serves twice.
    assert sum(entry.num_bytes for entry in entries) <= len(data)
    assert all(8 <= entry.offset <= entry.offset + entry.num_bytes <= len(data) for entry in entries)


def seeds() -> list[bytes]:
    def tensor(dtype: str, shape: Any, start: Any, end: Any) -> dict[str, Any]:
        return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}

    good = {"a": tensor("F32", [2, 2], 0, 16), "b": tensor("BF16", [3], 16, 22), "__metadata__": {"format": "pt"}}
    odd = [tensor("F32", [2, 2], 8, 24), tensor("F32", [-2, -2], 0, 16), tensor("F32", ["4"], 0.0, 16), [], None, "x"]
    files = [_file(json.dumps(good | {"c": one})) for one in odd]
    return [_file(json.dumps(good)), *files, _file("[" * 60_000), _file('{"a":' * 30_000)]


def _file(header: str) -> bytes:
    text = header.encode()
    return len(text).to_bytes(8, "little") + text + b"\0" * 22


TARGET = Target(
    name="safetensors",
    parse=parse,
    refusals=(WeightsError,),
    words=(b'"', b"{", b"}", b"[", b"]", b":", b",", b'"shape"', b'"dtype"', b'"F32"', b"null", b"\x00", b"\xff"),
    seeds=seeds,
)
