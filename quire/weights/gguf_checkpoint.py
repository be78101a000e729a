"""A GGUF file as a checkpoint: names, layouts and quantized blocks turned back into what Hugging Face stores."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.weights.checkpoint import FilesCheckpoint, TensorEntry
from quire.weights.gguf_config import ROPE_FACTORS, config_from_gguf, generation_config_from_gguf
from quire.weights.gguf_file import GGUFFile, read_gguf

if TYPE_CHECKING:
    from torch import Tensor

    from quire.models.slots import WeightSlot
    from quire.weights.dequantize import Bytes, Dequantizer

_WHOLE_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_EXPERTS = {"ffn_gate_exps": "gate_proj", "ffn_up_exps": "up_proj", "ffn_down_exps": "down_proj"}
# Gemma's layers have norms of what their branches add, OLMo 2's no others; gpt-oss calls its ffn_norm by such a name.
_OWN_NORMS = ("gemma2", "gemma3", "olmo2", "gpt-oss")
_IN_LAYER_OF_OWN_NORMS = _IN_LAYER | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_PERMUTED = ("llama", "smollm3", "granite", "granitemoe")  # rows of q and k, see _raw
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")

# Mapped bytes that were read count as this process's memory until the system wants them: give them back early.
_RELEASE_BYTES = 64 << 20


class GGUFCheckpoint(FilesCheckpoint):
    """One GGUF file."""

    __slots__ = ("_arch", "_file", "_tensors")

    def __init__(self, path: Path, *, hf_overrides: Mapping[str, Any] | None = None) -> None:
        file = read_gguf(path)
        self._file: GGUFFile = file
        self._tensors: list[TensorEntry] | None = None
        config = config_from_gguf(file) | dict(hf_overrides or {})
        self._arch: str = file.metadata["general.architecture"]
        super().__init__(
            path, config, generation_config=generation_config_from_gguf(file.metadata), gguf_metadata=file.metadata
        )

    def tensors(self) -> list[TensorEntry]:
        if self._tensors is None:
            stored = (t for t in self._file.tensors if t.stored_name != ROPE_FACTORS)  # that one is in the config
            self._tensors = [entry for tensor in stored for entry in _entries(tensor, self._arch)]
        return self._tensors

    def _fill(self, entries: list[TensorEntry], slots: Mapping[str, WeightSlot]) -> Iterator[TensorEntry]:
        from quire.weights.dequantize import Dequantizer

        entries = sorted(entries, key=lambda entry: entry.offset)
        released_to = entries[0].offset if entries else 0
        with Dequantizer() as dequantizer:
            for entry in entries:
                self._load(entry, slots[entry.name], dequantizer)
                released_to = self._release(released_to, entry.offset + entry.num_bytes)
                yield entry

    def _load(self, entry: TensorEntry, slot: WeightSlot, dequantizer: Dequantizer) -> None:
        raw, shape = self._raw(entry, slot.part[0] if slot.part else None)
        rows = dequantizer.rows(raw, entry.dtype, shape) if slot.keeps_quantized else None
        tensor: Any = self._tensor(replace(entry, shape=shape), raw, dequantizer) if rows is None else rows
        # Columns are cut behind the blocks' reading: a file's blocks may be longer than what shares a scale.
        slot.load(tensor[:, slot.part[1]] if slot.part and len(slot.part) == 2 else tensor)

    def _raw(self, entry: TensorEntry, rows: slice | None) -> tuple[Bytes, tuple[int, ...]]:
        """The stored bytes of all rows, or of some, and the shape of what they hold."""
        import numpy as np

        offset, num_bytes, shape = entry.offset, entry.num_bytes, entry.shape
        if rows is not None:
            row_bytes = num_bytes // shape[0]
            offset, num_bytes = offset + rows.start * row_bytes, (rows.stop - rows.start) * row_bytes
            shape = (rows.stop - rows.start, *shape[1:])
        raw = np.frombuffer(self._file.data, np.uint8, num_bytes, offset)
        if self._arch in _PERMUTED and (heads := self._permuted_heads(entry.name)) is not None:
            # llama.cpp rotates neighbours, Hugging Face the two halves of a head: its rows are interleaved. Undone on
            # the stored rows, which are several times smaller than the values. Parts of a tensor are whole heads.
            pairs = entry.shape[0] // heads // 2
            raw = raw.reshape(-1, pairs, 2, raw.size // shape[0]).swapaxes(1, 2).reshape(-1)
        return raw, shape

    def _tensor(self, entry: TensorEntry, raw: Bytes, dequantizer: Dequantizer) -> Tensor:
        tensor = dequantizer.tensor(raw, entry.dtype, entry.shape)
        if self._arch in ("gemma2", "gemma3") and entry.name.endswith("norm.weight"):
            tensor = tensor - 1  # llama.cpp stores 1 + weight, which is what Gemma multiplies by
        return tensor

    def _permuted_heads(self, name: str) -> int | None:
        if ".q_proj." in name:
            return int(self._file.metadata[f"{self._arch}.attention.head_count"])
        if ".k_proj." in name:
            metadata = self._file.metadata
            heads = metadata.get(
                f"{self._arch}.attention.head_count_kv", metadata[f"{self._arch}.attention.head_count"]
            )
            return int(heads[0] if isinstance(heads, list) else heads)
        return None

    def _release(self, start: int, end: int) -> int:
        """Tell the system that the bytes up to `end` were read; returns where to go on from."""
        if end - start < _RELEASE_BYTES:
            return start
        first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        self._file.data.madvise(mmap.MADV_DONTNEED, first, last - first)
        return last


def _entries(tensor: TensorEntry, arch: str) -> Iterator[TensorEntry]:
    """A tensor under its Hugging Face name; one that holds all experts of a layer as a tensor for each."""
    match = _LAYER_NAME.fullmatch(tensor.stored_name)
    if match is not None and match[2] in _EXPERTS and len(tensor.shape) == (3 if match[3] == "weight" else 2):
        num_experts = tensor.shape[0]
        num_bytes = tensor.num_bytes // num_experts
        for number in range(num_experts):
            name = f"model.layers.{match[1]}.mlp.experts.{number}.{_EXPERTS[match[2]]}.{match[3]}"
            offset = tensor.offset + number * num_bytes
            yield replace(tensor, name=name, shape=tensor.shape[1:], offset=offset, num_bytes=num_bytes)
        return
    entry = replace(tensor, name=hugging_face_name(tensor.stored_name, arch))
    if match is not None and match[2] == "ffn_gate_inp_shexp" and len(entry.shape) == 1:
        entry = replace(entry, shape=(1, *entry.shape))  # a matrix of one row
    yield entry


def hugging_face_name(stored_name: str, arch: str) -> str:
    """The Hugging Face name of a GGUF tensor; its own name where there is none."""
    stem, _, suffix = stored_name.rpartition(".")
    if stem in _WHOLE_MODEL:
        return f"{_WHOLE_MODEL[stem]}.{suffix}"
    match = _LAYER_NAME.fullmatch(stored_name)
    if match is None:
        return stored_name
    layer, part, suffix = match.groups()
    if part == "attn_sinks":
        return f"model.layers.{layer}.self_attn.sinks"
    name = (_IN_LAYER_OF_OWN_NORMS if arch in _OWN_NORMS else _IN_LAYER).get(part)
    return stored_name if name is None else f"model.layers.{layer}.{name}.{suffix}"
