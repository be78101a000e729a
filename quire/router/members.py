"""What a set of replicas knows of each replica, its GPUs among it, and of each request under way."""

from __future__ import annotations

import asyncio
import os
import re
from dataclasses import dataclass
from pathlib import Path

from quire.config import EngineConfig
from quire.engine.client import EngineClient
from quire.errors import ConfigError
from quire.router.policy import Ticket


@dataclass(slots=True, eq=False)
class Member:
    """One replica: the engine that runs now, and who sees to it that one does."""

    name: str
    index: int  # which of the machine's devices are its
    client: EngineClient
    started: asyncio.Future[None]  # the first time that it is ready, or what kept it from that
    death: asyncio.Future[None]  # of the engine that runs now
    keeper: asyncio.Task[None] | None = None
    is_ready: bool = False
    is_draining: bool = False
    role: str = "both"
    num_failures: int = 0
    num_restarts: int = 0


@dataclass(slots=True, eq=False)
class Flight:
    """A request under way."""

    ticket: Ticket
    num_deaths: int = 0
    carrying: asyncio.Task[bool] | None = None
    num_failed_carries: int = 0


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
