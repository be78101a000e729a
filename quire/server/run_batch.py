"""`run_batch`: a file of requests answered into another file, by an engine that is started for it."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tqdm import tqdm

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.interrupt import run_until_interrupted
from quire.server.app import answering
from quire.server.context import ServedModel, ServerContext
from quire.server.life import ServerLife
from quire.server.logs import set_up_logs
from quire.server.request_files import (
    AnswerFile,
    EndpointCaller,
    RequestCounts,
    count_lines,
    numbered_lines,
    read_answered,
    run_lines,
)
from quire.server.run import process_engine
from quire.server.settings import ServerSettings

_CLOSE_S = 5.0
_WINDOWS = 2  # requests under way, in the engine's batches: one runs, one waits prepared


def run_batch(config: EngineConfig, settings: ServerSettings, input_path: Path, output_path: Path) -> RequestCounts:
    """Answer every line of the input that the output has no answer to yet. Raises a QuireError where it cannot go on;
    what was written until then stands."""
    _check_paths(input_path, output_path)
    answered = read_answered(output_path)
    counts = RequestCounts(total=count_lines(input_path, settings.max_body_bytes))
    if counts.total <= len(answered):
        why = f"{output_path} has all {len(answered)} answers" if answered else f"{input_path} has no line"
        print(f"quire: nothing to do: {why}", file=sys.stderr)
        return counts
    logs = set_up_logs(settings.log_format, settings.log_level)

    async def run() -> None:
        engine = process_engine(config, settings)
        life = ServerLife()
        model = ServedModel.of(settings.served_model_names or (config.model,), engine, settings, life)
        context = ServerContext(models=[model], settings=settings, logs=logs, life=life)
        is_done = False
        try:
            await engine.start()
            await engine.ready()
            life.ready()
            with (
                input_path.open("rb") as file,
                AnswerFile(output_path) as answers,
                tqdm(total=counts.total, initial=len(answered), unit=" requests", disable=None) as bar,
            ):

                def write(line: bytes, is_good: bool) -> None:
                    answers.write(line)
                    bar.update()

                await run_lines(
                    numbered_lines(file, settings.max_body_bytes),
                    EndpointCaller(answering(context)),
                    write,
                    counts,
                    answered=answered,
                    max_line_bytes=settings.max_body_bytes,
                    num_at_once=_WINDOWS * engine.info.max_num_seqs,
                )
            is_done = True
        finally:
            await engine.close(_CLOSE_S if is_done else 0.0)

    started_s = time.monotonic()
    try:
        run_until_interrupted(run())
    finally:
        told = f"{counts.completed} answered, {counts.failed} failed"
        before = f", {len(answered)} had been answered before" if answered else ""
        print(f"quire: {told}{before}, in {time.monotonic() - started_s:.1f} s: {output_path}", file=sys.stderr)
    return counts


def _check_paths(input_path: Path, output_path: Path) -> None:
    if not input_path.is_file():
        raise ConfigError(f"the input {input_path} is no file: it must be JSONL, a request a line")
    if output_path.exists() and (not output_path.is_file() or output_path.samefile(input_path)):
        raise ConfigError(f"the output {output_path} must be a file of its own")
    if not output_path.parent.is_dir():
        raise ConfigError(f"the output's folder {output_path.parent} does not exist: create it first")
