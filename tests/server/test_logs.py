from __future__ import annotations

import asyncio
import http.client
import io
import json
import logging
import os
import signal
from pathlib import Path

import pytest
from live_harness import page_server, sim_command
from observing_fakes import ToldEngine, eventually, output, prepared
from serve_fakes import running

from quire.engine.api import EngineLoad, EngineState
from quire.outputs import RequestMetrics
from quire.server.logs import LogWriter, RequestLog, set_up_logs, watch_engines
from quire.server.metrics import RequestSummary, ServerMetrics


def a_summary(request_id: str = "cmpl-1", tenant: str = "team-a") -> RequestSummary:
    metrics = ServerMetrics(ToldEngine(), "m", clock=lambda: 100.5)
    request = prepared(request_id, tenant=tenant, stop=["my secret stop"])
    measured = RequestMetrics(
        arrival_s=100.0, queue_s=0.0123456789, first_token_s=0.2, total_s=0.4, cache_outcome="cold", num_preemptions=1
    )
    last = output(request_id, [1, 2], finish_reason="length", metrics=measured, num_cached_tokens=3)
    metrics.on_output(request, last, 100.4)
    return metrics.on_finished(request, last, "length")


def finish(log: RequestLog, summary: RequestSummary, status: int = 200) -> None:
    log.finished(summary, endpoint="/v1/completions", model="smollm2", status=status, stream=True)


def test_a_request_is_one_json_line() -> None:
    stream = io.StringIO()
    finish(set_up_logs("json", "info", stream), a_summary())
    lines = stream.getvalue().splitlines()
    assert len(lines) == 1
    line = json.loads(lines[0])
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "event": "request",
        "request_id": "cmpl-1",
        "tenant": "team-a",
        "endpoint": "/v1/completions",
        "model": "smollm2",
        "stream": True,
        "status": 200,
        "finish_reason": "length",
        "prompt_tokens": 10,
        "cached_tokens": 3,
        "output_tokens": 2,
        "cache": "cold",
        "preemptions": 1,
        "queue_s": 0.012346,
        "first_token_s": 0.2,
        "total_s": 0.5,
    }


def test_the_same_line_as_text() -> None:
    stream = io.StringIO()
    finish(set_up_logs("text", "info", stream), a_summary(tenant=""))
    line = stream.getvalue()
    assert " info request request_id=cmpl-1 endpoint=/v1/completions model=smollm2 stream=true status=200 " in line
    assert line.endswith(" total_s=0.5\n")
    assert "tenant" not in line and "inter_token_s" not in line  # what is not known is left out
    assert "secret" not in line


def test_no_value_can_forge_a_field_or_a_line() -> None:
    stream = io.StringIO()
    log = set_up_logs("text", "info", stream)
    log.refused('a b" status=200\nfake', endpoint="/v1/completions", status=400, error_code="x", param="prompt")
    assert stream.getvalue().count("\n") == 1
    assert 'request_id="a b\\" status=200\\nfake" endpoint=/v1/completions status=400 error=x param=prompt' in (
        stream.getvalue()
    )


@pytest.mark.parametrize(("level", "statuses"), [("info", [200, 429, 500]), ("warning", [500]), ("error", [])])
def test_levels(level: str, statuses: list[int]) -> None:
    stream = io.StringIO()
    log = set_up_logs("json", level, stream)
    finish(log, a_summary())
    log.refused("r", endpoint="/v1/completions", status=429)
    finish(log, a_summary(), status=500)
    assert [json.loads(line)["status"] for line in stream.getvalue().splitlines()] == statuses


def test_an_event_may_be_told_in_a_sentence() -> None:
    stream = io.StringIO()
    set_up_logs("text", "info", stream).event("engine_ready", message="ready at 100 % of some address")
    assert stream.getvalue().endswith("Z info ready at 100 % of some address\n")
    stream = io.StringIO()
    set_up_logs("json", "info", stream).event("engine_ready", message="ready at an address")
    line = json.loads(stream.getvalue())
    assert (line["event"], line["message"]) == ("engine_ready", "ready at an address")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_plain_messages_and_tracebacks(log_format: str) -> None:
    stream = io.StringIO()
    set_up_logs(log_format, "info", stream)
    logging.getLogger("uvicorn.error").info("started %d", 1)
    try:
        raise ValueError("oops")
    except ValueError:
        logging.getLogger("quire").exception("it failed")
    if log_format == "text":
        first, second, *rest = stream.getvalue().splitlines()
        assert first.endswith(" info started 1") and second.endswith(" error it failed")
        assert rest[0].startswith("Traceback") and rest[-1] == "ValueError: oops"
    else:
        first, second = (json.loads(line) for line in stream.getvalue().splitlines())
        assert (first["event"], first["message"]) == ("log", "started 1")
        assert second["exception"].endswith("ValueError: oops")


def test_the_engines_life_is_logged_once_per_change() -> None:
    stream = io.StringIO()
    log = set_up_logs("json", "info", stream)
    engine = ToldEngine()

    async def live() -> None:
        engine.state = EngineState.STARTING
        watch = asyncio.create_task(watch_engines(lambda: {"m": engine}, log, interval_s=0.001))
        for state, level in [
            (EngineState.STARTING, 0),
            (EngineState.READY, 0),
            (EngineState.READY, 2),
            (EngineState.READY, 0),
            (EngineState.STUCK, 0),
            (EngineState.READY, 0),
            (EngineState.DEAD, 0),
        ]:
            engine.state, engine.now_load = state, EngineLoad(brownout_level=level, kv_usage=0.97)
            await asyncio.sleep(0.02)
        watch.cancel()

    asyncio.run(live())
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("brownout", "warning"),
        ("brownout", "info"),
        ("engine_stuck", "error"),
        ("engine_ready", "info"),  # again: the first time, who started it says so
        ("engine_dead", "error"),
    ]
    assert (lines[0]["brownout_level"], lines[0]["was"], lines[0]["kv_usage"]) == (2, 0, 0.97)
    assert lines[0]["means"] == "shorter answers for new requests"


@pytest.fixture
def pipe() -> tuple[int, int]:
    return os.pipe()


def log_to(writer: LogWriter) -> logging.Logger:
    logger = logging.Logger("test", level=logging.INFO)
    logger.addHandler(writer)
    return logger


def read_all(descriptor: int) -> str:
    with open(descriptor, "rb") as stream:
        return stream.read().decode()


def test_lines_come_out_in_order(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1])
    logger = log_to(writer)
    for index in range(100):
        logger.info("line %d – ü", index)
    writer.flush()
    os.close(pipe[1])
    assert read_all(pipe[0]).splitlines() == [f"line {index} – ü" for index in range(100)]


def fill(pipe: tuple[int, int]) -> int:
    """Fill it with as many bytes as it holds: whoever writes one more waits."""
    os.set_blocking(pipe[1], False)
    num_bytes = 0
    try:
        while True:
            num_bytes += os.write(pipe[1], b"." * 4096)
    except BlockingIOError:
        os.set_blocking(pipe[1], True)
        return num_bytes


def test_a_log_that_nobody_reads_holds_nobody_up(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1], max_waiting_bytes=50 * (len("line 10\n") + 64))
    logger = log_to(writer)
    num_before = fill(pipe)
    logger.info("stuck")
    eventually(lambda: not writer._lines)
    for index in range(10, 90):
        logger.info("line %d", index)
    writer.flush()  # as at the program's end
    assert writer._is_writing  # it has not waited for the reader
    # Now somebody reads.
    found = os.read(pipe[0], num_before)
    while b"left out" not in found:
        found += os.read(pipe[0], 100_000)
    lines = found[num_before:].decode().splitlines()
    assert lines[:51] == ["stuck", *(f"line {index}" for index in range(10, 60))]
    assert lines[51] == "30 log lines were left out here: nobody read this log for a while"
    logger.info("and on")
    assert os.read(pipe[0], 100) == b"and on\n"


def test_what_waits_is_bounded_in_bytes_and_a_line_is_cut(pipe: tuple[int, int]) -> None:
    writer = LogWriter(pipe[1])
    logger = log_to(writer)
    fill(pipe)
    logger.info("stuck")
    eventually(lambda: not writer._lines)
    for _ in range(1_000):  # 1 GB
        logger.info("%s", "ü" * 1_000_000)
    assert 100 < len(writer._lines) < 1_000
    assert sum(map(len, writer._lines)) <= 4 << 20
    assert writer._lines[0].decode().endswith("ü... (1000000 characters, cut here)\n")
    assert all(len(line) < 33_000 for line in writer._lines)
    os.close(pipe[0])


def test_a_closed_log_is_no_error(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    writer = LogWriter(pipe[1])
    logger = log_to(writer)
    logger.info("nobody hears this")
    writer.flush()
    logger.info("nor this")
    writer.flush()


def test_a_server_serves_on_when_nobody_reads_its_log(tiny_model: Path) -> None:
    body = json.dumps({"model": str(tiny_model), "prompt": [1, 2, 3], "max_tokens": 1, "ignore_eos": True})
    with page_server(sim_command(tiny_model, {"num_blocks": 64, "max_model_len": 100, "verify": False})) as url:
        connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=20)
        for _ in range(400):  # a line of over 200 characters each, and a pipe holds 65,536
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            reply = connection.getresponse()
            assert reply.status == 200, reply.read()
            reply.read()
        connection.close()


@pytest.mark.parametrize("is_closed", [False, True], ids=["full", "closed"])
def test_an_engine_that_talks_runs_on_when_nobody_reads_the_log(tiny_model: Path, is_closed: bool) -> None:
    command = sim_command(tiny_model, {"num_blocks": 64, "max_model_len": 100, "verify": False, "talks": 40})
    with running(command) as server:
        server.wait_for("ready at")
        if is_closed:
            assert server.process.stderr is not None
            server.process.stderr.close()
        body = {"model": str(tiny_model), "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        for _ in range(4):  # 200 KB and more each time, and two pipes hold 131,072 bytes
            assert server.post("/v1/completions", body)[0] == 200
        server.signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
