"""A GGUF file, up to where its tensors would be read: header, config, the check against the tensors, vocabulary."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from typing import Any

from fuzz.harness import Target
from quire.errors import ModelError
from quire.models.architectures import spec_from_config
from quire.text import Tokenizer
from quire.weights import open_checkpoint

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-gguf")
_HIDDEN, _INNER, _LAYERS = 8, 16, 2
_LETTERS = [chr(c) for c in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324))]
_UINT32, _INT32, _FLOAT32, _STRING, _ARRAY, _UINT64 = 4, 5, 6, 8, 9, 10


def parse(data: bytes) -> None:
    path = Path(_FOLDER.name, "model.gguf")
    path.write_bytes(data)
    checkpoint = open_checkpoint(path)
    spec = spec_from_config(checkpoint.config, source=str(path))
    checkpoint.check(spec)
    tokenizer = Tokenizer.from_gguf(checkpoint.gguf_metadata or {}, source=str(path))
    tokenizer.check_fits(spec.vocab_size, source=str(path))
    tokenizer.decode(tokenizer.encode("hello world"))


def seeds() -> list[bytes]:
    """Two models, and each of a llama's values replaced by what does not belong there."""
    pairs = _pairs("llama")
    odd: list[Any] = ["text", [1, 2], ["a", "b"], 0, 1.5, float("nan"), -1, 10**7, 2**32 - 1, 2**64 - 1]
    damaged = [_file("llama", pairs | {key: value}) for key in pairs for value in odd]
    return [_file("llama", pairs), _file("gemma3", _pairs("gemma3")), *damaged]


def _pairs(arch: str) -> dict[str, Any]:
    tokens = [*_LETTERS, "<|im_start|>", "<|im_end|>", "he"]
    return {
        "general.architecture": arch,
        "general.alignment": 32,
        "split.count": 1,
        f"{arch}.embedding_length": _HIDDEN,
        f"{arch}.feed_forward_length": _INNER,
        f"{arch}.block_count": _LAYERS,
        f"{arch}.context_length": 64,
        f"{arch}.attention.head_count": 2,
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.attention.key_length": 4,
        f"{arch}.attention.value_length": 4,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{arch}.attention.sliding_window": 8,
        f"{arch}.attention.sliding_window_pattern": 2,
        f"{arch}.rope.freq_base": 10_000.0,
        f"{arch}.rope.scaling.type": "yarn",
        f"{arch}.rope.scaling.factor": 2.0,
        f"{arch}.rope.scaling.original_context_length": 32,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 20,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * len(_LETTERS) + [3, 3, 1],
        "tokenizer.ggml.merges": ["h e"],
        "tokenizer.ggml.bos_token_id": len(_LETTERS),
        "tokenizer.ggml.eos_token_id": len(_LETTERS) + 1,
        "tokenizer.ggml.add_bos_token": 0,
        "tokenizer.chat_template": "{{ messages[0].content }}",
    }


def _shapes(arch: str) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (len(_LETTERS) + 3, _HIDDEN),
        "output_norm.weight": (_HIDDEN,),
    }
    for layer in range(_LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "attn_norm": (_HIDDEN,),
            "ffn_norm": (_HIDDEN,),
            "attn_q": (8, _HIDDEN),
            "attn_k": (4, _HIDDEN),
            "attn_v": (4, _HIDDEN),
            "attn_output": (_HIDDEN, 8),
            "ffn_gate": (_INNER, _HIDDEN),
            "ffn_up": (_INNER, _HIDDEN),
            "ffn_down": (_HIDDEN, _INNER),
        }
        if arch == "gemma3":
            parts |= {"attn_q_norm": (4,), "attn_k_norm": (4,), "post_attention_norm": (8,), "post_ffw_norm": (8,)}
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in parts.items()}
    return shapes


def _file(arch: str, pairs: dict[str, Any]) -> bytes:
    shapes = _shapes(arch)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs))
    header += b"".join(_text(key) + _value(value) for key, value in pairs.items())
    offset = 0
    for name, shape in shapes.items():
        header += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), 0, offset)
        num_bytes = 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        offset += -(-num_bytes // 32) * 32
    return header + b"\0" * (-len(header) % 32) + b"\0" * offset


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", _STRING) + _text(value)
    if isinstance(value, float):
        return struct.pack("<If", _FLOAT32, value)
    if isinstance(value, list):
        kind = _STRING if isinstance(value[0], str) else _INT32
        items = b"".join(_text(item) if kind == _STRING else struct.pack("<i", item) for item in value)
        return struct.pack("<IIQ", _ARRAY, kind, len(value)) + items
    if value < 0:
        return struct.pack("<Ii", _INT32, value)
    return struct.pack("<II", _UINT32, value) if value < 2**32 else struct.pack("<IQ", _UINT64, value)


TARGET = Target(
    name="gguf",
    parse=parse,
    refusals=(ModelError,),
    words=(
        *(struct.pack("<I", kind) for kind in range(13)),
        *(struct.pack("<Q", n) for n in (0, 1, 32, 10**7, 2**31, 2**32 - 1, 2**63, 2**64 - 1)),
        b"llama.",
        b"gemma3.",
        b"blk.0.",
        b".weight",
        b"rope_freqs.weight",
        b"\xff",
    ),
    seeds=seeds,
)
