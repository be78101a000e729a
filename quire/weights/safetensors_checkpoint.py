"""A directory of safetensors: one file, or shards with an index.

Headers are read and held against the files' sizes before anything is loaded, so that a half-fetched shard is an error
at once and not after minutes. The tensors themselves come through the safetensors library, memory-mapped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import WeightsError
from quire.models.architectures import spec_from_config, stored_names
from quire.models.config_reader import ConfigReader
from quire.models.quantization import read_quantization
from quire.models.spec import CheckpointFormat, IntegerFormat, ModelSpec
from quire.models.stored_names import StoredNames
from quire.models.tensors import checkpoint_tensors
from quire.weights.checkpoint import FilesCheckpoint, TensorEntry, check_apart, read_tensor
from quire.weights.files import open_regular, read_json_object
from quire.weights.float8 import Float8Scales, read_kv_scales
from quire.weights.integers import INTEGERS, IntegerTensors
from quire.weights.mxfp4 import DTYPE as MXFP4_DTYPE
from quire.weights.mxfp4 import Mxfp4Scales, is_mxfp4

if TYPE_CHECKING:
    from quire.models.slots import WeightSlot

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_FP8 = "F8_E4M3"
_OTHER_BYTES = {_FP8: 1, MXFP4_DTYPE: 1, "I8": 1, "I32": 4, "I64": 8}
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_BASE_MODULES = ("embed_tokens.", "layers.")
_BASE_NAMES = r"^(?=(embed_tokens|layers|norm)\.)"
_MAX_NAME_CHARS = 256  # of a tensor; messages hold it


class SafetensorsCheckpoint(FilesCheckpoint):
    """config.json and *.safetensors in one directory."""

    __slots__ = ("_format", "_integers", "_tensors")

    def __init__(self, path: Path, *, hf_overrides: Mapping[str, Any] | None = None) -> None:
        self._tensors: list[TensorEntry] | None = None
        config = read_json_object(path / "config.json") | dict(hf_overrides or {})
        generation = path / "generation_config.json"
        super().__init__(path, config, generation_config=read_json_object(generation) if generation.is_file() else None)
        self._format = read_quantization(ConfigReader(config, str(path / "config.json")))
        self._integers = IntegerTensors(self._format) if isinstance(self._format, IntegerFormat) else None

    def tensors(self) -> list[TensorEntry]:
        if self._tensors is None:
            entries = list_tensors(self.path)
            if self._integers is not None:
                entries = list(self._integers.joined(entries))
            self._tensors = list(self._parts(entries))
        return self._tensors

    def check(self, spec: ModelSpec) -> None:
        super().check(spec)
        if spec.integers is None:
            return
        # GPTQ's tools write a bias for every module, all zeros where the model has none.
        shapes = checkpoint_tensors(spec)
        for entry in self.tensors():
            if entry.name.endswith(".bias") and entry.name not in shapes and bool(read_tensor(entry).any()):
                raise WeightsError(
                    f"{entry.file}: tensor {entry.stored_name} is a bias that the model has no place for: the config "
                    "describes another model"
                )

    def _parts(self, entries: list[TensorEntry]) -> Iterator[TensorEntry]:
        """The tensors under the names that the decoder has for them; a fused one is an entry for each of its parts."""
        names = stored_names(self.config)
        if any(entry.stored_name.startswith(_BASE_MODULES) for entry in entries):
            # Saved without a head, so that nothing stands before the layers' names: embedding models often are.
            names = replace(names, renames=(*names.renames, (_BASE_NAMES, "model.")))
        if names == StoredNames():
            yield from entries
            return
        spec = spec_from_config(self.config, source=str(self.path / "config.json"))
        shapes = checkpoint_tensors(spec)
        for entry in entries:
            for part in names.parts(entry.stored_name, entry.shape, shapes, spec.head_dim):
                num_bytes = entry.num_bytes * math.prod(part.shape) // max(1, math.prod(entry.shape))
                yield replace(entry, name=part.name, shape=part.shape, view=part.view, num_bytes=num_bytes)

    def kv_scales(self, num_layers: int) -> list[tuple[float, float]] | None:
        return read_kv_scales(self.tensors(), num_layers)

    def _fill(self, entries: list[TensorEntry], slots: Mapping[str, WeightSlot]) -> Iterator[TensorEntry]:
        from safetensors import SafetensorError, safe_open

        exponents = Mxfp4Scales(self.tensors())
        scales = Float8Scales(self._format if isinstance(self._format, CheckpointFormat) else None, self.tensors())
        by_file: dict[Path, list[TensorEntry]] = {}
        for entry in entries:
            if is_mxfp4(entry):
                exponents.check(entry)
            elif entry.dtype == _FP8:
                scales.check(entry)
            elif entry.dtype not in (*_DTYPE_BYTES, INTEGERS):
                raise WeightsError(
                    f"{entry.file}: tensor {entry.stored_name} is stored as {entry.dtype}, Quire reads "
                    f"{', '.join(_DTYPE_BYTES)} and {_FP8}, and integers where quantization_config says what they "
                    "mean: use an unquantized checkpoint or a GGUF file"
                )
            by_file.setdefault(entry.file, []).append(entry)
        for file, in_file in by_file.items():
            try:
                with safe_open(file, framework="pt", device="cpu") as opened:
                    for entry in sorted(in_file, key=lambda entry: entry.offset):  # the disk's own order
                        slot, name = slots[entry.name], entry.stored_name
                        tensor: Any
                        if is_mxfp4(entry):
                            read = exponents.rows_of if slot.keeps_quantized else exponents.values_of
                            tensor = read(entry, opened.get_tensor(name))
                        elif entry.dtype == INTEGERS:
                            assert self._integers is not None
                            tensor = _viewed(entry, self._integers.rows_of(entry))
                        elif entry.dtype == _FP8:
                            tensor = _viewed(entry, scales.rows_of(entry, opened.get_tensor(name)))
                        elif entry.view is None and slot.part is not None:
                            tensor = opened.get_slice(name)  # of which only the part is read
                        else:
                            tensor = entry.of(opened.get_tensor(name))
                        slot.load(tensor if slot.part is None else tensor[slot.part])
                        yield entry
            except SafetensorError as error:  # the library refuses what our reading of the header let pass
                raise WeightsError(f"{file}: the library cannot read it ({error}): fetch it again") from error


def _viewed(entry: TensorEntry, rows: Any) -> Any:
    """Quantized rows as they are, or unpacked where the tensor is a part of what is stored."""
    return rows if entry.view is None else entry.of(rows.unpacked())


def list_tensors(directory: Path) -> list[TensorEntry]:
    """Every tensor of the directory's weight files, from their headers; WeightsError if a file is not whole."""
    index_path = directory / INDEX_NAME
    if not index_path.is_file():
        return [entry for file in _unindexed_files(directory) for entry in read_header(file)]
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{index_path}: has no weight_map: fetch it again")
    entries: dict[tuple[str, str], TensorEntry] = {}
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard or not 0 < len(shard.encode()) < 256:
            raise WeightsError(f"{index_path}: names the shard {str(shard)[:80]!r}, expected a file beside the index")
    shards = sorted(set(weight_map.values()))
    for number, shard in enumerate(shards, 1):
        file = directory / shard
        if not file.exists():
            raise WeightsError(
                f"{file}: missing: shard {number} of {len(shards)} that {INDEX_NAME} names: fetch it again"
            )
        entries |= {(shard, entry.stored_name): entry for entry in read_header(file)}
    for name, shard in weight_map.items():
        if (shard, name) not in entries:
            raise WeightsError(
                f"{directory / shard}: lacks the tensor {name} that {INDEX_NAME} puts there: fetch both again"
            )
    return list(entries.values())


def _unindexed_files(directory: Path) -> list[Path]:
    single = directory / SINGLE_NAME
    if single.is_file():
        return [single]
    # Mistral's releases bring the same weights a second time, under their own names, in consolidated.safetensors.
    files = sorted(f for f in directory.glob("*.safetensors") if not f.name.startswith("consolidated"))
    if files:
        return files
    pickles = sorted([*directory.glob("*.bin"), *directory.glob("*.pth"), *directory.glob("*.pt")])
    if pickles:
        raise WeightsError(
            f"{directory}: weights only as PyTorch pickles ({pickles[0].name}), which can run code when read: "
            "use safetensors or GGUF"
        )
    raise WeightsError(f"{directory}: has no *.safetensors: fetch the weights, or use load_format='dummy'")


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file, after its sizes proved right."""
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        prefix = opened.read(8)
        header_bytes = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or size < 8 + header_bytes or header_bytes > _MAX_HEADER_BYTES:
            if header_bytes > _MAX_HEADER_BYTES:
                raise _foreign(file, prefix)
            raise WeightsError(
                f"{file}: truncated: the header needs {8 + header_bytes:,} bytes, the file has {size:,}: fetch it again"
            )
        text = opened.read(header_bytes)
    try:
        header = json.loads(text)
        entries = [
            _entry(file, name, info, 8 + header_bytes) for name, info in header.items() if name != "__metadata__"
        ]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _foreign(file, prefix) from None
    check_apart(entries)
    end = max((entry.offset + entry.num_bytes for entry in entries), default=8 + header_bytes)
    if end != size:
        what = "truncated" if size < end else "too long"
        raise WeightsError(f"{file}: {what}: its header describes {end:,} bytes, the file has {size:,}: fetch it again")
    return entries


def _entry(file: Path, name: str, info: Mapping[str, Any], data_start: int) -> TensorEntry:
    shape = tuple(info["shape"])
    start, end = info["data_offsets"]
    dtype = str(info["dtype"])
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)) or len(name) > _MAX_NAME_CHARS:
        raise ValueError("not the numbers of a header")
    value_bytes = (_DTYPE_BYTES | _OTHER_BYTES).get(dtype)
    if start > end or (value_bytes is not None and end - start != math.prod(shape) * value_bytes):
        raise WeightsError(
            f"{file}: corrupt header: tensor {name} of shape {list(shape)} and type {dtype} at bytes {start} to {end}: "
            "fetch it again"
        )
    return TensorEntry(name, name, shape, dtype, file, data_start + start, end - start)


def _foreign(file: Path, start: bytes) -> WeightsError:
    hint = " (a Git LFS pointer: run `git lfs pull`)" if start.startswith(b"version") else ""
    return WeightsError(f"{file}: not a safetensors file, its header is not readable{hint}: fetch it again")
