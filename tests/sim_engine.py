"""An engine process without a model or torch: the real loop and messages over a simulated executor.

Run as a script it is what `EngineProcessOptions.command` names; `sim_options` makes such options. Its vocabulary is the
256 bytes of the tiny model's tokenizer. Some tokens at the head of a prompt make the executor misbehave.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fakes
from sim_executor import SimExecutor
from sim_language import ToyLanguage

from quire import errors
from quire.engine.api import EngineInfo
from quire.engine.core import EngineCore
from quire.engine.launch import EngineProcessOptions
from quire.engine.messages import Launch
from quire.kv import KVManager
from quire.plan import StepPlan
from quire.scheduler import Scheduler, SchedulerConfig

HANG, BREAK, CRASH = 300, 301, 302  # sleep for hang_s; raise; segfault


@dataclass(slots=True, kw_only=True)
class SimSettings:
    num_blocks: int = 256
    block_size: int = 4
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 64
    max_model_len: int = 200
    num_host_blocks: int = 0
    depth: int = 1
    step_s: float = 0.0
    pace_file: str = ""  # what is in it, in seconds, goes for step_s: a test slows and hastens a running engine with it
    hang_s: float = 1.0
    verify: bool = True
    talks: int = 0  # lines of no log that every step writes to stderr, as a library would
    start_error: str = ""  # a class of quire.errors, or a signal's name, or "exit"


class SimEngineExecutor(SimExecutor):
    def __init__(self, settings: SimSettings) -> None:
        super().__init__(
            num_blocks=settings.num_blocks,
            block_size=settings.block_size,
            max_num_seqs=settings.max_num_seqs,
            num_host_blocks=settings.num_host_blocks,
            depth=settings.depth,
            language=ToyLanguage(vocab_size=256),
            verify=settings.verify,
        )
        self.settings = settings

    def submit(self, plan: StepPlan) -> int:
        heads = {new.token_ids[0] for new in plan.admitted}
        if HANG in heads:
            time.sleep(self.settings.hang_s)
        if BREAK in heads:
            raise RuntimeError("boom")
        if CRASH in heads:
            os.kill(os.getpid(), signal.SIGSEGV)
        for _ in range(self.settings.talks):
            print("a library says " + "something " * 100, file=sys.stderr)
        started_s = time.monotonic()
        while (left_s := started_s + self._step_s() - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.02))  # a change of pace is felt at once
        return super().submit(plan)

    def _step_s(self) -> float:
        file = self.settings.pace_file
        return float(Path(file).read_text()) if file else self.settings.step_s


def make_core(settings: SimSettings | None = None, **scheduling: Any) -> EngineCore:
    settings = settings or SimSettings()
    kv = KVManager(
        num_blocks=settings.num_blocks, block_size=settings.block_size, num_host_blocks=settings.num_host_blocks
    )
    config = SchedulerConfig(
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_model_len=settings.max_model_len,
        max_in_flight=settings.depth,
        **scheduling,
    )
    return EngineCore(Scheduler(config, kv), SimEngineExecutor(settings), kv)


def sim_options(settings: SimSettings | None = None, **options: Any) -> EngineProcessOptions:
    settings = settings or SimSettings()
    values = {name: getattr(settings, name) for name in SimSettings.__slots__}
    command = (sys.executable, str(Path(__file__)), json.dumps(values))
    return EngineProcessOptions(command=command, heartbeat_s=0.1, **options)


def _build(launch: Launch) -> tuple[EngineCore, EngineInfo]:
    settings = SimSettings(**json.loads(sys.argv[1]))
    error = settings.start_error
    if error.startswith("SIG"):
        print("about to fall", file=sys.stderr, flush=True)
        os.kill(os.getpid(), getattr(signal, error))
    if error == "exit":
        os._exit(3)
    if error:
        raise getattr(errors, error, ZeroDivisionError)("no start: lower something")
    core = make_core(settings)
    info = fakes.engine_info(
        model=launch.config.model,
        architecture="Sim",
        kernels="simulated",
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        block_size=settings.block_size,
        num_blocks=settings.num_blocks,
        num_host_blocks=settings.num_host_blocks,
        ledger_summary="KV cache",
        blocks_line=f"# CPU blocks: {settings.num_blocks}",
    )
    return core, info


if __name__ == "__main__":
    from quire.engine.process import main

    sys.exit(main(_build))
