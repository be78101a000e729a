"""How long it takes from nothing to the first token: fresh processes, each timed by its parts.

Run as a program it is such a process: it takes engine arguments and its parent's clock, and prints what it measured.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from quire import EngineConfig
from quire.bench.machine import describe_machine
from quire.bench.report import RunReport
from quire.child import child_environment
from quire.errors import QuireError


def measure_startup(config: EngineConfig, *, repeats: int) -> RunReport:
    """The first process may find files that are not in the system's cache yet: it is reported apart."""
    runs: list[dict[str, float]] = []
    report = RunReport(workload="startup", machine=describe_machine())
    try:
        for _ in range(repeats):
            runs.append(_one(config))
            took = f"{runs[-1]['first_token_s']:.2f} s to the first token"
            print(f"quire: startup: {len(runs)} of {repeats} processes, {took}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        report.interrupted = True
    report.requests, report.completed = repeats, len(runs)
    report.settings = {key: getattr(config, key) for key in sorted(config.given | {"model"})}
    if not runs:
        return report
    names = list(runs[0])
    report.repeat_values = {name: [run[name] for run in runs] for name in names}
    ranked = sorted(runs, key=lambda run: run["first_token_s"])
    report.values = dict(ranked[(len(ranked) - 1) // 2])
    report.notes = [f"the first process took {runs[0]['first_token_s']:.2f} s to its first token"]
    return report


def _one(config: EngineConfig) -> dict[str, float]:
    given = {key: getattr(config, key) for key in config.given}
    request = {"config": given | {"model": config.model}, "started": time.time()}
    command = [sys.executable, "-P", "-m", "quire.bench.startup", json.dumps(request)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no reason given"]
        raise QuireError(f"the process that was started failed: {lines[-1].removeprefix('error: ')}")
    record: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return record


def main() -> int:
    """The program of the new process."""
    request: dict[str, Any] = json.loads(sys.argv[1])
    entered = time.time()
    try:
        from quire import LLMEngine
        from quire.bench.engines import run_workload

        imported = time.time()
        engine = LLMEngine.from_config(EngineConfig(**request["config"]))
        ready = time.time()
        run_workload(engine, [([11, 12, 13], 1)])
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    record = {
        "interpreter_s": entered - request["started"],
        "imports_s": imported - entered,
        **{f"{part.replace(' ', '_')}_s": seconds for part, seconds in engine.built.timeline_s.items()},
        "ready_s": ready - request["started"],
        "first_token_s": time.time() - request["started"],
    }
    print(json.dumps(record))
    return 0


if __name__ == "__main__":
    sys.exit(main())
