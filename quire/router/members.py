"""What a set of replicas knows of each replica, and of each request under way."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from quire.engine.client import EngineClient
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
