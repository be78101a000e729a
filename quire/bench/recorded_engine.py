"""An engine process that keeps what its steps computed and took: `quire.engine.process`, and a file at its end.

`bench/replicas.py` starts it, with the folder of the file as its argument.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from quire.bench.profile import STEP_COLUMNS
from quire.bench.steps import StepWatch
from quire.engine import process
from quire.engine.api import EngineInfo
from quire.engine.core import EngineCore
from quire.engine.messages import Launch
from quire.plan import StepPlan, StepResult

# When each step began and ended, by the clock that all processes share; the processor's seconds of the step itself; and
# those since the step before ended, with all that the loop does around a step.
TIME_COLUMNS = ("began_s", "ended_s", "step_s", "seconds")


class _StepRecorder(StepWatch):
    """Stands in for the engine's executor. Seconds are those of the loop's own thread, whose clock stands still while
    others have the core: what other threads of the process do beside the steps does not count."""

    def __init__(self, core: EngineCore, path: Path) -> None:
        super().__init__(core, every_step=False)
        self._path = path
        self._columns: dict[str, list[float]] = {name: [] for name in (*TIME_COLUMNS, *STEP_COLUMNS)}
        self._began = (0.0, 0.0)
        self._last_s = time.thread_time()

    def submit(self, plan: StepPlan) -> int:
        self._began = (time.monotonic(), time.thread_time())
        return super().submit(plan)

    def collect(self, ticket: int) -> StepResult:
        num_before = len(self.steps)
        result = super().collect(ticket)
        now_s, (began_s, began_at_s) = time.thread_time(), self._began
        if len(self.steps) > num_before:
            load = self.steps.pop().load
            times = (began_s, time.monotonic(), now_s - began_at_s, now_s - self._last_s)
            loads = (float(getattr(load, name)) for name in STEP_COLUMNS)
            for column, value in zip(self._columns.values(), (*times, *loads), strict=True):
                column.append(value)
        self._last_s = now_s
        return result

    def close(self) -> None:
        self._path.write_text(json.dumps(self._columns))
        super().close()


def _build(launch: Launch) -> tuple[EngineCore, EngineInfo]:
    core, info = process.build_core(launch)
    assert core.executor.depth == 1, "a step that is planned beside another has no time of its own"
    core.executor = _StepRecorder(core, Path(sys.argv[1]) / f"{os.getpid()}.json")
    return core, info


if __name__ == "__main__":
    sys.exit(process.main(_build))
