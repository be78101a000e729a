"""Logging never waits for who reads the log."""

from __future__ import annotations

import http.client
import json
import logging
import os
import signal
from pathlib import Path

import pytest
from live_harness import eventually, page_server, sim_command
from serve_fakes import running

from quire.server.logs import LogWriter


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
    with running(command[1:]) as server:
        server.wait_for("ready at")
        if is_closed:
            assert server.process.stderr is not None
            server.process.stderr.close()
        body = {"model": str(tiny_model), "prompt": [1, 2, 3], "max_tokens": 5, "ignore_eos": True}
        for _ in range(4):  # 200 KB and more each time, and two pipes hold 131,072 bytes
            assert server.post("/v1/completions", body)[0] == 200
        server.signal(signal.SIGTERM)
        assert server.process.wait(20) == 0
