"""What every checkpoint offers, and the check that its tensors are the model's: each slot filled exactly once."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.errors import WeightsError
from quire.models.tensors import checkpoint_tensors, is_ignored_tensor

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.slots import WeightSlot
    from quire.models.spec import ModelSpec

ProgressFn = Callable[[int, int], None]  # (done_bytes, total_bytes)
_SAMPLE_BYTES = 4096  # of a tensor's beginning and end, in a fingerprint


@dataclass(slots=True, frozen=True)
class TensorEntry:
    """One tensor as its file's header lists it."""

    name: str  # under its Hugging Face name, where it has one
    stored_name: str
    shape: tuple[int, ...]
    dtype: str  # as the format spells it: BF16, F32, Q4_1, ...
    file: Path
    offset: int  # of its first byte in the file
    num_bytes: int
    view: Callable[[Any], Any] | None = None  # takes it out of the stored tensor; None: it is that tensor

    def of(self, stored: Any) -> Any:
        """The tensor itself, given the stored one."""
        return stored if self.view is None else self.view(stored)


class Checkpoint(ABC):
    """A model on disk: its config now, its tensors when asked."""

    __slots__ = ("config", "generation_config", "gguf_metadata", "path")

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        *,
        generation_config: dict[str, Any] | None = None,
        gguf_metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.path = path
        self.config = config  # in the manner of Hugging Face's config.json, whatever the format
        self.generation_config = generation_config or {}
        self.gguf_metadata = gguf_metadata  # for the tokenizer; None unless the model is a GGUF file

    @abstractmethod
    def tensors(self) -> Sequence[TensorEntry] | None:
        """Every tensor of its files, from their headers; None where there are no files, only a config."""

    def check(self, spec: ModelSpec) -> None:
        """Check that the tensors are those of `spec`, which a config alone has told: before memory is taken for
        them."""
        entries = self.tensors()
        if entries is not None:
            match_tensors(
                entries, checkpoint_tensors(spec), lambda name: is_ignored_tensor(spec, name), source=self.path
            )

    def kv_scales(self, num_layers: int) -> list[tuple[float, float]] | None:
        """(k_scale, v_scale) of each layer, for a cache in 8 bits, where the files hold them."""
        return None

    @abstractmethod
    def load_into(
        self,
        slots: Mapping[str, WeightSlot],
        is_ignored: Callable[[str], bool],
        *,
        progress: ProgressFn | None = None,
        seed: int = 0,
    ) -> None:
        """Fill every slot, one tensor at a time. Names and shapes are checked before the first byte moves.

        The tensor that a slot is handed may lie in the mapped file or in memory that the next one reuses: slots copy.
        `seed` matters to dummy weights only.
        """


class FilesCheckpoint(Checkpoint):
    """A checkpoint whose tensors are in files."""

    __slots__ = ()

    @abstractmethod
    def tensors(self) -> Sequence[TensorEntry]: ...

    def load_into(
        self,
        slots: Mapping[str, WeightSlot],
        is_ignored: Callable[[str], bool],
        *,
        progress: ProgressFn | None = None,
        seed: int = 0,
    ) -> None:
        shapes = {name: tuple(slot.shape) for name, slot in slots.items()}
        entries = match_tensors(self.tensors(), shapes, is_ignored, source=self.path)
        total_bytes, done_bytes = sum(entry.num_bytes for entry in entries), 0
        for entry in self._fill(entries, slots):
            done_bytes += entry.num_bytes
            if progress is not None:
                progress(done_bytes, total_bytes)

    @abstractmethod
    def _fill(self, entries: list[TensorEntry], slots: Mapping[str, WeightSlot]) -> Iterator[TensorEntry]:
        """Fill the slots of these tensors in the files' own order; yields each when it is loaded."""


def match_tensors(
    entries: Iterable[TensorEntry],
    shapes: Mapping[str, tuple[int, ...]],
    is_ignored: Callable[[str], bool],
    *,
    source: Path,
) -> list[TensorEntry]:
    """The entries to load, in their order; WeightsError unless they fill every shape once and nothing is left over."""
    wanted: dict[str, TensorEntry] = {}
    unexpected: list[str] = []
    for entry in entries:
        if entry.name not in shapes:
            if not is_ignored(entry.name):
                unexpected.append(entry.stored_name)
            continue
        if entry.name in wanted:
            other = wanted[entry.name].file
            where = f"twice in {other}" if other == entry.file else f"in both {other} and {entry.file}"
            raise WeightsError(f"tensor {entry.stored_name} stands {where}: remove the file that does not belong there")
        expected = shapes[entry.name]
        if entry.shape != expected:
            raise WeightsError(
                f"{entry.file}: tensor {entry.stored_name} has shape {list(entry.shape)}, the model's config asks for "
                f"{list(expected)}: config and weights are of different models, fetch both again"
            )
        wanted[entry.name] = entry
    missing = [name for name in shapes if name not in wanted]
    if missing:
        raise WeightsError(
            f"{source}: {_count(missing)} of the model missing: {_some(missing)}. The checkpoint is incomplete or its "
            "config describes another model: fetch it again"
        )
    if unexpected:
        raise WeightsError(
            f"{source}: {_count(unexpected)} that the model has no place for: {_some(unexpected)}. The config "
            "describes another model, or the checkpoint has parts that Quire does not run: use one that fits"
        )
    return list(wanted.values())


def read_tensor(entry: TensorEntry) -> Tensor:
    """One stored tensor out of its safetensors file. Many are read faster with their file opened once."""
    from safetensors import safe_open

    with safe_open(entry.file, framework="pt", device="cpu") as opened:
        tensor: Tensor = opened.get_tensor(entry.stored_name)
    return tensor


def check_apart(entries: Iterable[TensorEntry]) -> None:
    """Check that no two tensors of a file share bytes. So what a model takes is in proportion to its file, whatever the
    header says."""
    end, before = 0, ""
    for entry in sorted(entries, key=lambda entry: (entry.offset, entry.num_bytes)):
        if entry.offset < end:
            raise WeightsError(
                f"{entry.file}: corrupt header: tensors {before} and {entry.stored_name} overlap: fetch it again"
            )
        end, before = entry.offset + entry.num_bytes, entry.stored_name


def weights_fingerprint(checkpoint: Checkpoint, seed: int) -> tuple[str, str]:
    """Which weights these are, in few bytes read, for what outlives the process that computed with them.

    The first digest is of every tensor's name, shape, dtype, first and last bytes: a copy elsewhere has the same. The
    second is of the files' sizes and times of change, which a copy does not share. A change of a tensor changes one of
    the two.
    """
    digest, of_files = hashlib.sha256(), hashlib.sha256()
    tensors = checkpoint.tensors()
    if tensors is None:  # made up from a seed
        return f"dummy, seed {seed}", ""
    files: dict[Path, None] = {}
    for entry in sorted(tensors, key=lambda entry: entry.name):
        files.setdefault(entry.file)
        digest.update(repr((entry.name, entry.shape, entry.dtype, entry.offset)).encode())
        with entry.file.open("rb") as file:
            num_sampled = min(_SAMPLE_BYTES, entry.num_bytes)
            for at in (entry.offset, entry.offset + entry.num_bytes - num_sampled):
                file.seek(at)
                digest.update(file.read(num_sampled))
    for path in sorted(files):
        status = path.stat()
        of_files.update(repr((path.name, status.st_size, status.st_mtime_ns)).encode())
    return digest.hexdigest(), of_files.hexdigest()


def _count(names: list[str]) -> str:
    return "1 tensor" if len(names) == 1 else f"{len(names)} tensors"


def _some(names: list[str], at_most: int = 5) -> str:
    return ", ".join(names[:at_most]) + (f" and {len(names) - at_most} more" if len(names) > at_most else "")
