"""A model's config.json, up to the spec that a decoder is built from."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import fakes

from fuzz.harness import Target
from quire.errors import ModelError
from quire.models.architectures import ARCHITECTURES, spec_from_config
from quire.models.tensors import checkpoint_tensors
from quire.weights import open_checkpoint

_FOLDER = tempfile.TemporaryDirectory(prefix="fuzz-config")
_GEMMA = {"sliding_window": 8, "query_pre_attn_scalar": 32, "max_window_layers": 1, "use_sliding_window": True}


def parse(data: bytes) -> None:
    path = Path(_FOLDER.name, "config.json")
    path.write_bytes(data)
    checkpoint = open_checkpoint(path, load_format="dummy")
    checkpoint_tensors(spec_from_config(checkpoint.config, source=str(path)))


def seeds() -> list[bytes]:
    """A config for each architecture and way of scaling, and one with each value replaced by what does not belong."""
    llama = fakes.TINY_LLAMA | {"sliding_window": None}
    llama["rope_scaling"] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    configs: list[dict[str, Any]] = [fakes.TINY_LLAMA | _GEMMA | {"architectures": [name]} for name in ARCHITECTURES]
    for scaling in (
        {"rope_type": "linear", "factor": 8.0},
        {"rope_type": "dynamic", "factor": 8.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        {"rope_type": "factors", "factors": [1] * 16},
    ):
        configs.append(fakes.TINY_LLAMA | {"rope_scaling": scaling})
    odd: list[Any] = ["text", [], [[]], {}, True, 0, -1, 0.5, 1e300, 10**400, 10**9, 2**32 - 1]
    configs += [llama | {key: value} for key in llama for value in odd]
    configs += [llama | {"rope_scaling": llama["rope_scaling"] | {"factor": value}} for value in odd]
    return [json.dumps(config).encode() for config in [llama, *configs]] + [b'{"a":' * 40_000]


TARGET = Target(
    name="model_config",
    parse=parse,
    refusals=(ModelError,),
    words=(b'"', b"{", b"}", b"[", b"]", b":", b",", b"null", b"true", b"1e999", b"NaN", b"Infinity", b"\\u0000"),
    seeds=seeds,
)
