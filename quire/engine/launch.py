"""Starting the engine's process, and what a process that serves does about garbage."""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from quire.child import ChildProcess
from quire.engine.brownout import BrownoutSettings
from quire.errors import ConfigError


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineProcessOptions:
    """Options of the engine's process that a server sets beside the EngineConfig."""

    step_timeout_s: float = 60.0  # a step that takes longer is stuck
    dump_dir: str = field(default_factory=tempfile.gettempdir)  # where the watchdog writes what it saw
    heartbeat_s: float = 1.0
    brownout: BrownoutSettings = field(default_factory=BrownoutSettings)
    publishes_cache: bool = False  # for a router: the engine tells which blocks its prefix cache gains and loses
    environment: Mapping[str, str] = field(default_factory=dict)  # added to ours
    isolated_tenants: tuple[str, ...] = ()  # tenants that find only their own cached prefixes; empty: all share
    # A command to run instead of this interpreter's quire.engine.process. It gets the same input.
    command: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("step_timeout_s", "heartbeat_s"):
            if not 0 < getattr(self, name) <= 1e9:
                raise ConfigError(f"{name} must be more than 0 seconds, got {getattr(self, name):g}")


class EngineProcess(ChildProcess):
    """A running engine process."""

    def __init__(
        self,
        options: EngineProcessOptions,
        launch: bytes,
        on_exit: Callable[[int], None],
        descriptors: Sequence[int] = (),
    ) -> None:
        command = options.command or (sys.executable, "-P", "-m", "quire.engine.process")
        super().__init__(command, launch, on_exit, environment=options.environment, descriptors=descriptors)


def keep_what_is_built() -> None:
    """Model, kernels and modules stay: without this, each full collection would walk over all of them."""
    gc.collect()
    gc.freeze()


def settle_for_serving() -> None:
    """For a process that serves from now on: young garbage, too, need not be looked for at every step."""
    keep_what_is_built()
    gc.set_threshold(10_000, 10, 10)
