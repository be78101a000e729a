"""`quire` where whoever started it has closed standard input, output or error."""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from observing_fakes import eventually

ROOT = Path(__file__).parent.parent.parent


def health(path: Path) -> int | None:
    """The status of /health; None while nobody listens."""
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.connect(str(path))
        connection.request("GET", "/health")
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


@pytest.mark.parametrize("closed", ["2>&-", "<&- >&- 2>&-"])
def test_a_server_serves_and_stops_with_closed_streams(closed: str, tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "q.sock"
    small = ["--load-format", "dummy", "--device", "cpu", "--num-threads", "1", "--kv-cache-memory-bytes", "4M"]
    quire = [sys.executable, "-m", "quire.cli.main", "serve", str(tiny_model), "--uds", str(path), *small]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    process = subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *quire], env=environment | {"PYTHONPATH": str(ROOT)}
    )
    try:
        eventually(lambda: process.poll() is not None or health(path) == 200, timeout_s=60)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()


def test_open_streams_stay_as_they_are() -> None:
    code = "from quire.cli.main import main; import sys; main(['env', '--json']); print('told', file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("{")
    assert done.stderr.endswith("told\n")
