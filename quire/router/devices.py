"""Which of a machine's GPUs each replica takes."""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire.config import EngineConfig
from quire.errors import ConfigError


def device_environment(config: EngineConfig, index: int) -> dict[str, str]:
    """What a replica's process must see so that it takes GPUs of its own; nothing on a CPU."""
    gpus = [] if config.device == "cpu" else _visible_gpus()
    if not gpus:
        return {}
    num_each = config.num_ranks
    first = index * num_each
    if first + num_each > len(gpus):
        raise ConfigError(
            f"{index + 1} replicas need {(index + 1) * num_each} GPUs, and {len(gpus)} can be seen: lower "
            "data_parallel_size, or set CUDA_VISIBLE_DEVICES"
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + num_each])}


def _visible_gpus() -> list[str]:
    told = os.environ.get("CUDA_VISIBLE_DEVICES")
    if told is not None:
        return [name.strip() for name in told.split(",") if name.strip()]
    names = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
    return sorted((match[1] for match in names if match), key=int)
