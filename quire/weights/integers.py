"""Matrices in whole numbers of 4 and 8 bits, as AWQ, GPTQ and compressed-tensors store them: several tensors for each,
packed into words of 32 bits in orders of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quire.errors import WeightsError
from quire.models.spec import IntegerFormat
from quire.weights.checkpoint import TensorEntry, read_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from quire.kernels.stored_rows import IntegerRows

INTEGERS = "INT"  # the type of a matrix that several tensors make up
_FLOATS = ("F16", "BF16", "F32")
# A word of AWQ holds eight columns, the even ones first: where each of them is.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(slots=True, frozen=True)
class _Names:
    """What a layout calls a module's tensors. Codes, zeros, and the group of each column may be stored transposed."""

    codes: str
    scales: str
    zeros: str
    groups: str
    others: tuple[str, ...] = ()


_NAMES = {
    "awq": _Names("qweight", "scales", "qzeros", "g_idx"),
    "gptq": _Names("qweight", "scales", "qzeros", "g_idx"),
    "pack-quantized": _Names(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", others=("weight_shape",)
    ),
    "int-quantized": _Names("weight", "weight_scale", "weight_zero_point", "weight_g_idx"),
}


@dataclass(slots=True, frozen=True)
class _Parts:
    """The tensors of one matrix."""

    codes: TensorEntry
    scales: TensorEntry
    zeros: TensorEntry | None
    groups: TensorEntry | None


class IntegerTensors:
    """The matrices of one checkpoint, found by their modules' names."""

    def __init__(self, stored: IntegerFormat) -> None:
        self._format = stored
        self._names = _NAMES[stored.layout]
        self._parts: dict[str, _Parts] = {}

    def joined(self, entries: Iterable[TensorEntry]) -> Iterator[TensorEntry]:
        """The entries, those of one matrix as one, under the name and with the shape that it has in a model."""
        found = {entry.stored_name: entry for entry in entries}
        names, taken = self._names, set()
        for name, entry in found.items():
            module, _, last = name.rpartition(".")
            if last != names.codes or entry.dtype not in ("I32", "I8"):
                continue
            beside = {part: found.get(f"{module}.{part}") for part in (names.scales, names.zeros, names.groups)}
            wanted = [names.scales] + [names.zeros] * self._format.has_zeros + [names.groups] * self._format.has_order
            for part in wanted:
                if beside[part] is None:
                    raise WeightsError(
                        f"{entry.file}: tensor {name} is in {self._format.bits} bits, and {module}.{part} is missing: "
                        "fetch the checkpoint again"
                    )
            taken |= {f"{module}.{part}" for part in (*beside, *names.others)} | {name}
            scales = beside[names.scales]
            assert scales is not None
            zeros = beside[names.zeros] if self._format.has_zeros else None
            parts = _Parts(entry, scales, zeros, beside[names.groups] if self._format.has_order else None)
            shape = self._checked_shape(parts)
            whole = f"{module}.weight"
            self._parts[whole] = parts
            num_bytes = entry.num_bytes + scales.num_bytes + (zeros.num_bytes if zeros else 0)
            yield replace(entry, name=whole, stored_name=whole, shape=shape, dtype=INTEGERS, num_bytes=num_bytes)
        yield from (entry for name, entry in found.items() if name not in taken)

    def rows_of(self, weight: TensorEntry) -> IntegerRows:
        from quire.kernels.stored_rows import IntegerRows

        parts, (rows, columns) = self._parts[weight.stored_name], weight.shape
        stored = read_tensor(parts.scales)
        scales = (stored.T if self._is_transposed else stored.reshape(rows, -1)).contiguous()
        if not bool(scales.isfinite().all()):
            raise WeightsError(
                f"{parts.scales.file}: tensor {parts.scales.stored_name} holds a scale that is no number: fetch it "
                "again"
            )
        return IntegerRows(
            self._codes(parts, columns),
            scales,
            self._zeros(parts, rows),
            self._format.bits,
            self._format.group or columns,
            self._groups(parts, scales.shape[1]),
            self._format.rounds_inputs,
        )

    @property
    def _is_transposed(self) -> bool:
        """Whether inputs come first."""
        return self._format.layout in ("awq", "gptq")

    def _checked_shape(self, parts: _Parts) -> tuple[int, int]:
        """Rows and columns of the matrix, after every tensor's shape and type proved to fit."""
        layout, per_word = self._format.layout, 32 // self._format.bits
        shape = parts.codes.shape
        if len(shape) != 2:
            raise _unfit(parts.codes, "two dimensions")
        if layout == "awq":
            rows, columns = shape[1] * per_word, shape[0]
        elif layout == "gptq":
            rows, columns = shape[1], shape[0] * per_word
        else:
            rows, columns = shape[0], shape[1] * (per_word if layout == "pack-quantized" else 1)
        group = self._format.group or columns
        if columns % group:
            raise _unfit(parts.codes, f"columns in groups of {group}, not {columns}")
        groups = columns // group
        words = -(-rows // per_word)
        expected = [
            (parts.codes, [shape], ("I8",) if layout == "int-quantized" else ("I32",)),
            (
                parts.scales,
                [(groups, rows)] if self._is_transposed else [(rows, groups), (rows,) * (groups == 1)],
                _FLOATS,
            ),
            (parts.zeros, [(groups, words) if self._is_transposed else (words, groups)], ("I32",)),
            (parts.groups, [(columns,)], ("I32",)),
        ]
        for entry, shapes, dtypes in expected:
            if entry is not None and (entry.shape not in shapes or entry.dtype not in dtypes):
                raise _unfit(entry, f"{list(shapes[0])} in {', '.join(dtypes)} for {[rows, columns]}")
        return rows, columns

    def _codes(self, parts: _Parts, columns: int) -> Tensor:
        import torch

        words = read_tensor(parts.codes)
        if self._format.layout == "int-quantized":
            return (words.to(torch.int16) + 128).to(torch.uint8)
        if self._format.layout == "awq":
            return _in_awq_order(_unpacked(words, 4)).T.contiguous()
        return _unpacked(words.T if self._is_transposed else words, self._format.bits)[:, :columns]

    def _zeros(self, parts: _Parts, rows: int) -> Tensor | None:
        import torch

        if parts.zeros is None:
            return None
        words = read_tensor(parts.zeros)
        zeros = _unpacked(words if self._is_transposed else words.T, self._format.bits)
        if self._format.layout == "awq":
            zeros = _in_awq_order(zeros)
        # The sum has as many bits as what is stored: a zero of 0 is stored as all ones where one is to be added.
        zeros = (zeros.to(torch.int16) + self._format.zero_offset) & ((1 << self._format.bits) - 1)
        zeros = zeros.T[:rows].contiguous()
        return None if bool((zeros == 1 << (self._format.bits - 1)).all()) else zeros

    def _groups(self, parts: _Parts, count: int) -> Tensor | None:
        import torch

        if parts.groups is None:
            return None
        groups = read_tensor(parts.groups).to(torch.int64)
        if not bool(((groups >= 0) & (groups < count)).all()):
            raise WeightsError(
                f"{parts.groups.file}: tensor {parts.groups.stored_name} names groups beyond the {count} that there "
                "are: fetch it again"
            )
        in_order = torch.arange(len(groups)) // (len(groups) // count)
        return None if torch.equal(groups, in_order) else groups


def _unfit(entry: TensorEntry, expected: str) -> WeightsError:
    return WeightsError(
        f"{entry.file}: tensor {entry.stored_name} has shape {list(entry.shape)} and type {entry.dtype}, which does "
        f"not fit its quantization_config: expected {expected}"
    )


def _unpacked(words: Tensor, bits: int) -> Tensor:
    """[n, words] int32 -> [n, numbers] uint8: the lowest bits of a word come first."""
    import torch

    in_bytes = words.contiguous().view(torch.uint8)
    return in_bytes if bits == 8 else torch.stack((in_bytes & 15, in_bytes >> 4), -1).flatten(1)


def _in_awq_order(codes: Tensor) -> Tensor:
    return codes.reshape(len(codes), -1, 8)[:, :, list(_AWQ_PLACES)].flatten(1)
