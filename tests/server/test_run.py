"""A server's life, in real processes: start, drain, two interrupts, the engine's death, and failures to start."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import serve_fakes
from serve_fakes import INFO, serving

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.server.run import loaded_model, ready_line, serve
from quire.server.settings import ModelSettings, ServerSettings


def test_health_says_starting_until_the_engine_is_ready_and_then_a_line_says_where() -> None:
    with serving(ready_delay_s=1.0) as server:
        status, body, headers = server.get("/health")
        assert (status, body["status"]) == (503, "starting")
        assert int(headers["retry-after"]) > 0
        status, body, headers = server.post("/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["code"]) == (503, "starting")
        assert "retry-after" in headers
        assert server.get("/v1/models")[0] == 503
        line = server.wait_for("ready at").string
        assert not any("engine_ready" in other for other in server.lines)  # one line says it
        assert f"http://127.0.0.1:{server.port}" in line
        assert "fake" in line
        assert "2 MiB KV cache" in line
        status, body, headers = server.get("/health")
        assert (status, body) == (200, {"status": "ok"})
        assert "server" not in headers
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_sigterm_lets_running_requests_finish_and_takes_no_new_ones() -> None:
    with serving(drain_timeout_s=20.0) as server:
        server.wait_for("ready at")
        stream = server.begin_stream(num_tokens=60)
        server.signal(signal.SIGTERM)
        server.wait_for("draining: 1 requests under way")
        status, body, headers = server.post("/v1/completions", {"prompt": "x"})
        assert (status, body["error"]["code"]) == (503, "draining")
        assert int(headers["retry-after"]) > 0
        assert server.get("/health")[1]["status"] == "draining"
        assert server.get("/load")[0] == 200
        rest = stream.read().decode()
        assert rest.count('"text":"x"') == 59
        assert rest.rstrip().endswith("data: [DONE]")
        assert server.exit_code() == 0


def test_after_the_drain_timeout_what_still_runs_is_told_and_the_server_exits() -> None:
    with serving(drain_timeout_s=0.3) as server:
        server.wait_for("ready at")
        stream = server.begin_stream(num_tokens=90_000)
        server.signal(signal.SIGTERM)
        rest = stream.read().decode()
        assert '"code":"stopped"' in rest and "stopped before this request finished" in rest
        assert server.exit_code() == 0
        assert any("1 requests are cut off" in line for line in server.lines)


def test_one_interrupt_drains_and_says_so_and_a_second_stops_at_once() -> None:
    with serving(drain_timeout_s=60.0) as server:
        server.wait_for("ready at")
        server.begin_stream(num_tokens=90_000)
        whole = server.connect()
        body = {"model": "fake", "prompt": [1], "max_tokens": 90_000}
        headers = {"content-type": "application/json", "x-request-id": "whole"}
        whole.request("POST", "/v1/completions", json.dumps(body), headers)
        while server.get("/load")[1]["server_load"] < 2:
            time.sleep(0.01)
        time.sleep(0.1)  # some tokens
        server.signal(signal.SIGINT)
        server.wait_for("Ctrl[+]C again stops at once")
        assert server.get("/health")[1]["status"] == "draining"
        server.signal(signal.SIGINT)
        assert server.exit_code() == 130
        (line,) = [line for line in server.lines if "request_id=whole" in line]
        assert "error=stopped" in line and "output_tokens=0" not in line  # nobody saw them, but they were made


def test_a_signal_while_starting_ends_it() -> None:
    with serving(ready_delay_s=60.0) as server:
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0


def test_killing_the_engine_tells_every_client_and_ends_the_server_with_a_failure() -> None:
    with serving() as server:
        pid = int(server.wait_for(r"engine pid (\d+)")[1])
        server.wait_for("ready at")
        streams = [server.begin_stream(num_tokens=90_000) for _ in range(3)]
        os.kill(pid, signal.SIGKILL)
        server.wait_for("3 open requests get an error, then the server exits")
        deadline_s = time.monotonic() + 20.0
        while (answer := server.get("/health"))[1]["status"] != "dead":
            assert time.monotonic() < deadline_s
        assert answer[0] == 503
        for stream in streams:
            rest = stream.read().decode()
            assert '"error":' in rest
            assert "/a/path" not in rest
        assert server.exit_code() == 1


def test_a_live_page_does_not_hold_up_the_exit() -> None:
    with serving(drain_timeout_s=30.0) as server:
        server.wait_for("ready at")
        connection = server.connect()
        connection.request("GET", "/live")
        server.responses.append(connection.getresponse())
        assert server.responses[0].status == 200
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
        assert not any("Traceback" in line for line in server.lines)


def test_an_engine_that_cannot_start_raises_its_own_error() -> None:
    def make(config: EngineConfig, settings: ServerSettings) -> serve_fakes.FakeEngine:
        return serve_fakes.FakeEngine(error=ConfigError("block_size is odd"))

    with pytest.raises(ConfigError, match="block_size is odd"):
        serve([ModelSettings(EngineConfig(model="fake"))], ServerSettings(port=0), make_engine=make)


def test_a_port_in_use_and_a_bad_certificate_are_told_before_the_engine_starts(tmp_path: Path) -> None:
    def never(config: EngineConfig, settings: ServerSettings) -> serve_fakes.FakeEngine:
        raise AssertionError("the engine was made")

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="in use"):
            serve([ModelSettings(EngineConfig())], ServerSettings(port=taken.getsockname()[1]), make_engine=never)
    (tmp_path / "cert.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"cert\.pem"):
        serve(
            [ModelSettings(EngineConfig())],
            ServerSettings(port=0, ssl_certfile=str(tmp_path / "cert.pem")),
            make_engine=never,
        )


def test_a_unix_socket_is_served_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    with serve_fakes.running([serve_fakes.__file__, json.dumps({"uds": str(path)}), "0"], "ready at unix:") as server:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
            client.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
            assert client.recv(1000).startswith(b"HTTP/1.1 200 OK")
        server.signal(signal.SIGTERM)
        assert server.exit_code() == 0
    assert not path.exists()


def test_a_unix_socket_that_another_server_has_put_there_stays(tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    command = [serve_fakes.__file__, json.dumps({"uds": str(path)}), "0"]
    with serve_fakes.running(command, "ready at unix:") as first:
        path.unlink()
        with serve_fakes.running(command, "ready at unix:"):
            first.signal(signal.SIGTERM)
            assert first.exit_code() == 0
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(path))


def test_a_terminal_that_goes_away_drains() -> None:
    with serving() as server:
        server.wait_for("ready at")
        stream = server.begin_stream(num_tokens=60)
        server.signal(signal.SIGHUP)
        server.wait_for("draining: 1 requests under way")
        assert stream.read().decode().rstrip().endswith("data: [DONE]")
        assert server.exit_code() == 0


def test_under_nohup_it_outlives_its_terminal() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # which a new process inherits
    try:
        with serving() as server:
            server.wait_for("ready at")
            server.signal(signal.SIGHUP)
            assert server.post("/v1/completions", {"model": "fake", "prompt": [1], "max_tokens": 20})[0] == 200
            assert server.get("/health")[1] == {"status": "ok"}
    finally:
        signal.signal(signal.SIGHUP, before)


def test_too_few_files_say_what_to_raise() -> None:
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        "from quire.cli.main import main; raise SystemExit(main(['serve', '--port', '0']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "may open 20 files" in done.stderr and "ulimit -n" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_log_names_what_was_loaded_and_under_which_names_it_is_served() -> None:
    assert loaded_model("smollm2", ()) == loaded_model("smollm2", ("smollm2",)) == "smollm2"
    assert loaded_model("/models/some.gguf", ("foo", "bar")) == "/models/some.gguf as foo, bar"
    with serving(served_model_names=["foo"]) as server:
        assert "loading fake as foo" in server.lines[-1]
        assert "s: fake as foo (FakeForCausalLM" in server.wait_for("ready at").string


def test_the_ready_line_is_one_line() -> None:
    line = ready_line("http://127.0.0.1:8000", "fake", INFO)
    assert "\n" not in line
    assert "1 MiB weights, 2 MiB KV cache" in line


def test_a_server_may_have_more_connections_than_a_shells_default_allows() -> None:
    with serving() as server:
        limits = Path(f"/proc/{server.process.pid}/limits")
        if not limits.exists():
            pytest.skip("needs /proc")
        line = next(line for line in limits.read_text().splitlines() if line.startswith("Max open files"))
        soft, hard = line.split()[3:5]
        assert soft == hard or int(soft) >= 65_536


def test_a_deadline_ends_a_stream_with_an_error_and_a_reply_with_a_504() -> None:
    with serving() as server:
        server.wait_for("ready at")
        body = {"model": "fake", "prompt": [1], "max_tokens": 90_000, "timeout": 0.2}
        status, answer, _ = server.post("/v1/completions", body)
        assert (status, answer["error"]["code"]) == (504, "timeout")
        logged = server.wait_for(r"error=timeout .* output_tokens=(\d+)")
        assert int(logged[1]) > 5  # one in 10 ms
        connection = server.connect()
        headers = {"content-type": "application/json", "x-request-timeout": "0.2"}
        del body["timeout"]
        connection.request("POST", "/v1/completions", json.dumps(body | {"stream": True}), headers)
        response = connection.getresponse()
        server.responses.append(response)
        text = response.read().decode()
        assert response.status == 200
        assert '"text":"x"' in text
        assert '"code":"timeout"' in text
