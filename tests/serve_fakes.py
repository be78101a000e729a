"""A server with an engine that needs no model: a real process to signal and to kill, for the tests of its life.

Run as a program, it serves: `python tests/serve_fakes.py '{"port": 0, "drain_timeout_s": 5}' [ready_delay_s]`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import http.client
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fakes
from observing_fakes import ToldEngine, prepared

from quire.config import EngineConfig
from quire.engine.api import EngineState, PreparedRequest
from quire.errors import EngineDeadError, QuireError
from quire.log import get_logger
from quire.outputs import CompletionOutput, RequestOutput
from quire.params import OutputKind, SamplingParams
from quire.server.settings import ModelSettings, ServerSettings

ROOT = Path(__file__).parent.parent
INFO = fakes.engine_info(
    model="fake",
    architecture="FakeForCausalLM",
    vocab_size=256,
    max_model_len=100_000,
    max_num_seqs=8,
    max_num_batched_tokens=256,
    ledger_summary="memory: 1 MiB weights,\n 2 MiB KV cache",
    blocks_line="KV cache: 64 blocks of 16 tokens",
    ready_s=0.1,
)


class FakeEngine(ToldEngine):
    """Gives "x" every `token_s` seconds. Its process is a `cat`, which ends with us; its death is the engine's."""

    info = INFO

    def __init__(self, *, ready_delay_s: float = 0.0, token_s: float = 0.01, error: QuireError | None = None) -> None:
        super().__init__()
        self.state = EngineState.STARTING
        self.num_open_streams = 0
        self.closed_grace_s: float | None = None
        self._ready_delay_s = ready_delay_s
        self._token_s = token_s
        self._error = error
        self._dead = asyncio.Event()
        self._callbacks: list[Callable[[str], None]] = []
        self._child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self._child = await asyncio.create_subprocess_exec("cat", stdin=subprocess.PIPE)
        self._waiter = asyncio.create_task(self._wait())

    async def _wait(self) -> None:
        assert self._child is not None
        await self._child.wait()
        self.state = EngineState.DEAD
        self._dead.set()
        for callback in self._callbacks:
            callback("killed")

    async def ready(self) -> None:
        await asyncio.sleep(self._ready_delay_s)
        if self._error is not None:
            raise self._error
        self.state = EngineState.READY
        assert self._child is not None
        # Through the log, as a thread writes it: a line of our own could come before an earlier one of the server's.
        get_logger().info("engine pid %d", self._child.pid)

    def on_death(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)

    async def close(self, grace_s: float) -> None:
        self.closed_grace_s = grace_s
        self._callbacks.clear()
        if self._child is not None:
            if self._child.returncode is None:
                self._child.kill()
            await self._waiter
            assert self._child.stdin is not None
            self._child.stdin.close()

    def prepare(
        self, request_id: str, prompt: Any, params: SamplingParams, *, tenant: str = "", **_: Any
    ) -> PreparedRequest:
        num_tokens = len(prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt)
        now_s = time.monotonic()
        return prepared(request_id, num_prompt_tokens=num_tokens, arrival_s=now_s, asked=params, tenant=tenant)

    async def stream(self, request: PreparedRequest) -> AsyncGenerator[RequestOutput, None]:
        self.num_open_streams += 1
        dead = asyncio.ensure_future(self._dead.wait())
        try:
            number = request.request.max_tokens
            is_final_only = request.params.output_kind is OutputKind.FINAL_ONLY
            for i in range(number):
                request.num_made_tokens[:] = [i]
                await asyncio.wait({dead}, timeout=self._token_s)
                if self._dead.is_set():
                    raise EngineDeadError("killed, says /a/path")
                is_last = i == number - 1
                if is_final_only and not is_last:
                    continue
                count = number if is_final_only else 1
                yield output_of(request, "x" * count, [120] * count, "length" if is_last else None)
        finally:
            dead.cancel()
            self.num_open_streams -= 1

    async def call(self, name: str, **arguments: Any) -> Any:
        return {}


def output_of(request: PreparedRequest, text: str, ids: list[int], finish_reason: str | None) -> RequestOutput:
    completion = CompletionOutput(0, text, ids, finish_reason=finish_reason)
    return RequestOutput(
        request.request.request_id, "p", request.request.prompt_token_ids, [completion], finish_reason is not None
    )


# -- a real process

_PATIENCE_S = 60.0  # for a line that must come


@dataclasses.dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    lines: list[str] = dataclasses.field(default_factory=list)
    responses: list[http.client.HTTPResponse] = dataclasses.field(default_factory=list)
    connections: list[http.client.HTTPConnection] = dataclasses.field(default_factory=list)

    def wait_for(self, pattern: str) -> re.Match[str]:
        """The first line on stderr that matches, among those read already too."""
        assert self.process.stderr is not None
        give_up = threading.Timer(_PATIENCE_S, self.process.kill)  # its stderr ends then, and so does our reading
        give_up.start()
        try:
            for line in itertools.chain(tuple(self.lines), self._fresh_lines(self.process.stderr)):
                if found := re.search(pattern, line):
                    return found
        finally:
            give_up.cancel()
        raise AssertionError(f"no line with {pattern!r} in: {''.join(self.lines)}")

    def _fresh_lines(self, stderr: IO[str]) -> Iterator[str]:
        for line in stderr:
            self.lines.append(line)
            yield line

    def connect(self, timeout_s: float = 10.0) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        self.connections.append(connection)
        return connection

    def get(self, path: str) -> tuple[int, dict[str, Any], dict[str, str]]:
        return self._answer("GET", path, None)

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any], dict[str, str]]:
        return self._answer("POST", path, body)

    def _answer(self, method: str, path: str, body: dict[str, Any] | None) -> tuple[int, Any, dict[str, str]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60.0)
        content = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, content, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, json.loads(response.read()), dict(response.getheaders())
        finally:
            connection.close()

    def begin_stream(self, num_tokens: int) -> http.client.HTTPResponse:
        """A streamed completion whose first chunk is here."""
        body = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": num_tokens, "stream": True}
        connection = self.connect()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        self.responses.append(response)
        assert response.status == 200, response.read()
        assert response.readline().startswith(b"data: ")
        return response

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def exit_code(self, timeout_s: float = 20.0) -> int:
        code = self.process.wait(timeout_s)
        assert self.process.stderr is not None
        self.lines += self.process.stderr.readlines()
        return code


@contextmanager
def serving(ready_delay_s: float = 0.0, **settings: Any) -> Iterator[Server]:
    """The program below, in a process of its own, with its socket open."""
    with running([str(Path(__file__)), json.dumps({"port": 0, **settings}), str(ready_delay_s)]) as server:
        yield server


@contextmanager
def running(command: list[str], listening: str = r"listening at http://127\.0\.0\.1:(\d+)") -> Iterator[Server]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    environment |= {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.PIPE, text=True)
    server = Server(process, 0)
    try:
        found = server.wait_for(listening)
        server.port = int(found[1]) if found.groups() else 0
        yield server
    finally:
        for opened in (*server.responses, *server.connections):
            opened.close()
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        assert process.stderr is not None
        process.stderr.close()


def main() -> int:
    from quire.server.run import serve

    settings = ServerSettings(**json.loads(sys.argv[1]))
    ready_delay_s = float(sys.argv[2])
    return serve(
        [ModelSettings(EngineConfig(model="fake"))],
        settings,
        make_engine=lambda config, settings: FakeEngine(ready_delay_s=ready_delay_s),
    )


if __name__ == "__main__":
    sys.exit(main())
