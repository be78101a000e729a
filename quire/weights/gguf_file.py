"""The header of a GGUF file: its metadata and where each tensor lies.

Read with struct over a memory map, because the `gguf` package's reader needs more than a second for a vocabulary of
49,000. Layout, little-endian: magic, version, number of tensors, number of metadata pairs; the pairs; the tensors'
names, shapes, types and offsets; padding; the data.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import WeightsError
from quire.weights.checkpoint import TensorEntry, check_apart
from quire.weights.files import open_regular

MAGIC = b"GGUF"
_VERSIONS = (2, 3)  # equal to read; version 1 had 32-bit lengths
_DEFAULT_ALIGNMENT = 32
_MAX_DIMS = 4
_MAX_NAME_CHARS = 256  # of a tensor or a key; messages hold them
_MAX_ITEMS = 1 << 24  # of an array of numbers, each of which takes many times its bytes here; vocabularies are smaller

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass(slots=True, frozen=True)
class TensorType:
    """How values are stored: in blocks of so many values and bytes."""

    name: str
    block_values: int
    block_bytes: int


TENSOR_TYPES = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
}


@dataclass(slots=True, frozen=True)
class GGUFFile:
    """A parsed header and the map that the tensors' bytes are read from."""

    path: Path
    metadata: dict[str, Any]
    tensors: tuple[TensorEntry, ...]  # under their own GGUF names; shapes with rows first
    data: mmap.mmap


def read_gguf(path: Path) -> GGUFFile:
    """Map the file and read its header; WeightsError if it is not whole, or nothing that Quire reads."""
    try:
        with open_regular(path) as file:
            start = file.read(8)
            _check_start(path, start)
            # Copy-on-write, not read-only: torch refuses to look at memory that it may not write. Nobody writes.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error.strerror or error}") from error
    reader = _Reader(path, data)
    try:
        metadata, tensors = reader.header()
    except struct.error:  # a fixed-size field lies past the end
        raise reader.truncated() from None
    return GGUFFile(path, metadata, tensors, data)


def _check_start(path: Path, start: bytes) -> None:
    if len(start) < 8:
        raise WeightsError(f"{path}: {len(start)} bytes are no GGUF file: fetch it again")
    magic, version = start[:4], int.from_bytes(start[4:], "little")
    if magic != MAGIC:
        raise WeightsError(f"{path}: not a GGUF file: it begins with {magic!r}, not {MAGIC!r}{_guess(magic)}")
    if version in _VERSIONS:
        return
    if int.from_bytes(start[4:], "big") in (1, *_VERSIONS):
        raise WeightsError(f"{path}: a big-endian GGUF file, Quire reads little-endian ones: convert it again")
    raise WeightsError(
        f"{path}: GGUF version {version}, Quire reads {' and '.join(map(str, _VERSIONS))}: convert the model again "
        "with a current llama.cpp"
    )


def _guess(magic: bytes) -> str:
    if magic in (b"lmgg", b"tjgg", b"fmgg", b"algg"):
        return " (a llama.cpp file from before GGUF): convert the model again"
    if magic.startswith((b"PK", b"\x80")):
        return " (it looks like PyTorch's pickle): use the model's safetensors or GGUF files"
    if magic.startswith((b"<", b"vers")):
        return " (it looks like a web page or a Git LFS pointer): fetch the file itself"
    return ": give a .gguf file or a directory with config.json and safetensors"


class _Reader:
    """A position in the header. Every length is held against the file's end before it is believed."""

    __slots__ = ("_data", "_path", "_position", "_size")

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 8

    def header(self) -> tuple[dict[str, Any], tuple[TensorEntry, ...]]:
        num_tensors, num_pairs = self._unpack("<QQ")
        self._expect(num_pairs * 13 + num_tensors * 32)  # the least that so many can take
        metadata: dict[str, Any] = {}
        for _ in range(num_pairs):
            key = self._name()
            metadata[key] = self._value(key, self._unpack("<I")[0])
        if (count := metadata.get("split.count", 0)) not in (0, 1):
            raise WeightsError(
                f"{self._path}: a part of a GGUF file that was split (split.count is {count!r}): join the parts first "
                "with llama.cpp's `llama-gguf-split --merge`"
            )
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if type(alignment) is not int or alignment <= 0 or alignment % 8:
            raise self._corrupt(f"general.alignment is {alignment!r}, not a multiple of 8")
        infos = [self._tensor_info() for _ in range(num_tensors)]
        data_start = -(-self._position // alignment) * alignment
        tensors = tuple(self._entry(*info, data_start=data_start) for info in infos)
        check_apart(tensors)
        return metadata, tensors

    def truncated(self, what: str = "its header", needed: int | None = None) -> WeightsError:
        wants = "more" if needed is None else f"{needed:,}"
        return WeightsError(
            f"{self._path}: truncated: {what} needs {wants} bytes, the file has {self._size:,}: fetch it again"
        )

    def _corrupt(self, what: str) -> WeightsError:
        return WeightsError(f"{self._path}: corrupt GGUF header: {what}: fetch the file again")

    def _expect(self, num_bytes: int) -> None:
        if self._position + num_bytes > self._size:
            raise self.truncated(needed=self._position + num_bytes)

    def _unpack(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from(layout, self._data, self._position)
        self._position += struct.calcsize(layout)
        return values

    def _string(self) -> str:
        (length,) = self._unpack("<Q")
        self._expect(length)
        start = self._position
        self._position = start + length
        return self._data[start : start + length].decode("utf-8", "replace")

    def _name(self) -> str:
        name = self._string()
        if len(name) > _MAX_NAME_CHARS:
            raise self._corrupt(f"a name of {len(name):,} characters")
        return name

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item_kind, count = self._unpack("<IQ")
            if item_kind == _STRING:
                return self._strings(count)
            if item_kind in _SCALARS:
                self._expect(count)
                if count > _MAX_ITEMS:
                    raise self._corrupt(f"{key} has {count:,} entries")
                return list(self._unpack(f"<{count}{_SCALARS[item_kind]}"))
            raise self._corrupt(f"{key} is an array of values of unknown type {item_kind}")
        if kind in _SCALARS:
            return self._unpack(f"<{_SCALARS[kind]}")[0]
        raise self._corrupt(f"{key} has a value of unknown type {kind}")

    def _strings(self, count: int) -> list[str]:
        """The tight loop: a vocabulary and its merges are some 100,000 strings."""
        self._expect(count * 8)
        data, size, position = self._data, self._size, self._position
        unpack_length = struct.Struct("<Q").unpack_from
        strings: list[str] = []
        append = strings.append
        for _ in range(count):
            start = position + 8
            position = start + unpack_length(data, position)[0]
            if position > size:
                raise self.truncated(needed=position)
            append(data[start:position].decode("utf-8", "replace"))
        self._position = position
        return strings

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._name()
        (num_dims,) = self._unpack("<I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise self._corrupt(f"tensor {name} has {num_dims} dimensions")
        dims = self._unpack(f"<{num_dims}Q")
        type_id, offset = self._unpack("<IQ")
        return name, tuple(reversed(dims)), type_id, offset  # GGUF lists the contiguous dimension first

    def _entry(self, name: str, shape: tuple[int, ...], type_id: int, offset: int, *, data_start: int) -> TensorEntry:
        kind = TENSOR_TYPES.get(type_id)
        if kind is None:
            raise WeightsError(
                f"{self._path}: tensor {name} is quantized as {_type_name(type_id)}, Quire reads "
                f"{', '.join(t.name for t in TENSOR_TYPES.values())}: use a file quantized as one of these"
            )
        if shape[-1] % kind.block_values:
            raise self._corrupt(
                f"tensor {name} has rows of {shape[-1]} values, {kind.name} needs a multiple of {kind.block_values}"
            )
        num_bytes = math.prod(shape) // kind.block_values * kind.block_bytes
        start = data_start + offset
        if start + num_bytes > self._size:
            raise self.truncated(f"tensor {name}", needed=start + num_bytes)
        return TensorEntry(name, name, shape, kind.name, self._path, start, num_bytes)


def _type_name(type_id: int) -> str:
    from gguf.constants import GGMLQuantizationType

    try:
        return str(GGMLQuantizationType(type_id).name)
    except ValueError:
        return f"unknown type {type_id}"
