"""The thread beside the engine's loop: tells the server that the loop gets on, and writes down what it did if not."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from quire.engine.core import EngineCore
from quire.engine.messages import Heartbeat
from quire.log import get_logger
from quire.plan import StepPlan
from quire.request import Request

_MAX_REQUESTS_IN_DUMP = 2000


@dataclass(slots=True)
class Progress:
    """How far the loop is. The loop writes it, the watchdog reads it: each field is replaced whole."""

    num_steps: int = 0
    step_started_s: float | None = None  # None while the loop waits for work


class Watchdog:
    """Sends a heartbeat every so often; writes one dump about each step that runs longer than `step_timeout_s`."""

    def __init__(
        self,
        progress: Progress,
        send: Callable[[Heartbeat], None],
        dump: Callable[[int, float], str],
        *,
        step_timeout_s: float,
        heartbeat_s: float,
    ) -> None:
        """`send` is called in the watchdog's own thread, and `dump` with the steps done and the seconds stuck."""
        self._progress = progress
        self._send = send
        self._dump = dump
        self._step_timeout_s = step_timeout_s
        self._heartbeat_s = heartbeat_s
        self._dumped: tuple[float, str] | None = None  # when the step began that was dumped, and where to
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="quire-watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(self._heartbeat_s):
            self._send(self.beat(time.monotonic()))

    def beat(self, now_s: float) -> Heartbeat:
        """Look at the loop once."""
        num_steps, started_s = self._progress.num_steps, self._progress.step_started_s
        path = None
        if started_s is not None:
            if self._dumped is not None and self._dumped[0] == started_s:
                path = self._dumped[1]
            elif now_s - started_s > self._step_timeout_s:
                path = self._dump(num_steps, now_s - started_s)
                self._dumped = (started_s, path)
        return Heartbeat(now_s, num_steps, started_s, path or None)


def write_dump(
    core: EngineCore, requests: Callable[[], list[Request]], folder: str, num_steps: int, for_s: float
) -> str:
    """Write down what the engine was doing: requests by id, state and length, the last plan, stacks; no prompts.

    Returns the file's path, or nothing where it could not be written: a full disk must not end the watch.
    """
    lines = [f"engine process {os.getpid()}: step {num_steps + 1} has run for {for_s:.1f} s", ""]
    parts: list[tuple[str, Callable[[], list[str]]]] = [
        ("the loop", lambda: _loop_lines(core)),
        ("last plan", lambda: _plan_lines(core.last_plan)),
        ("requests", lambda: _request_lines(requests())),
        ("stacks", _stack_lines),
    ]
    for title, part in parts:
        lines.append(f"== {title} ==")
        try:
            lines += part()
        except Exception as error:  # the loop may be changing what is read here
            lines.append(f"(not readable: {error!r})")
        lines.append("")
    try:
        # A new file under a random name, for this user alone: others may write to the folder too.
        descriptor, path = tempfile.mkstemp(".txt", f"quire-stuck-{os.getpid()}-{num_steps + 1}-", folder)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write("\n".join(lines))
    except OSError as error:
        get_logger().error("a step hangs, and what it was doing could not be written to %s: %s", folder, error)
        return ""
    get_logger().error("step %d has run for %.1f s: what the engine was doing is in %s", num_steps + 1, for_s, path)
    return path


def _loop_lines(core: EngineCore) -> list[str]:
    kv, scheduler = core.kv, core.scheduler
    return [
        f"{scheduler.num_running} running, {scheduler.num_waiting} waiting, {scheduler.num_swapped} swapped, "
        f"{scheduler.num_in_flight} steps in flight",
        f"{kv.num_used_blocks} of {kv.num_blocks} blocks in use, {kv.num_free_blocks} free",
    ]


def _plan_lines(plan: StepPlan | None) -> list[str]:
    if plan is None:
        return ["none yet"]
    spans = plan.spans
    return [
        f"step {plan.step}: {len(spans)} sequences, {sum(spans.num_tokens)} tokens, {sum(spans.samples)} sample",
        f"longest span {max(spans.num_tokens, default=0)}, drafts for {len(spans.drafts)}",
        f"{len(plan.admitted)} admitted, {len(plan.released)} released, {len(plan.forks)} forks, "
        f"{len(plan.appended)} longer tables, "
        f"{len(plan.copies)} copies, {len(plan.moves)} moves",
    ]


def _request_lines(requests: list[Request]) -> list[str]:
    lines = [f"{len(requests)} in all"]
    for request in requests[:_MAX_REQUESTS_IN_DUMP]:
        for seq in list(request.sequences):
            lines.append(
                f"{request.request_id} [{seq.index}] {seq.state.name.lower()} row {seq.row} "
                f"prompt {seq.num_prompt_tokens} output {seq.num_output_tokens} of {request.max_tokens} "
                f"computed {seq.num_computed_tokens} pending {seq.num_pending_tokens} "
                f"preemptions {seq.num_preemptions} priority {request.priority}"
            )
    return lines


def _stack_lines() -> list[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    for ident, frame in sys._current_frames().items():
        lines.append(f"-- {names.get(ident, 'unnamed')}")
        lines += [line.rstrip("\n") for line in traceback.format_stack(frame)]
    return lines
