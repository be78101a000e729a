"""The engine's own process: `python -m quire.engine.process`, started by `quire.engine.launch` and by nobody else.

It reads what to run on standard input, builds the token side, and runs the loop until it is told to stop, a step fails,
or its parent is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import logging
import os
import select
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable
from typing import BinaryIO

import zmq

from quire.engine.api import EngineInfo
from quire.engine.brownout import Brownout
from quire.engine.core import EngineCore
from quire.engine.launch import LOG_MARK, settle_for_serving
from quire.engine.link import commands as command_codec
from quire.engine.link import decode_launch
from quire.engine.link import messages as message_codec
from quire.engine.loop import EngineLoop, Receive
from quire.engine.messages import Command, ErrorInfo, Failed, Hello, Launch, Ready
from quire.engine.text_side import open_model
from quire.engine.watchdog import Watchdog, write_dump
from quire.errors import QuireError
from quire.log import get_logger

_PR_SET_PDEATHSIG = 1


def build_core(launch: Launch) -> tuple[EngineCore, EngineInfo]:
    """The engine that the server asked for."""
    from quire.engine.build import build_token_side  # torch: not before the server has heard from us

    config = launch.config
    opened = open_model(config)
    tokens = build_token_side(config, opened)
    backend, ledger = tokens.executor.backend, tokens.ledger
    tokens.smooth_for_readers(config)
    if backend.note:
        get_logger().warning("%s", backend.note)
    info = EngineInfo(
        model=config.model,
        architecture=opened.spec.architecture,
        device=backend.device.type,
        dtype=backend.weight_dtype,
        kv_dtype=str(backend.kv_dtype).removeprefix("torch."),
        kernels=backend.kernels,
        vocab_size=opened.spec.vocab_size,
        max_model_len=ledger.max_model_len,
        max_num_seqs=tokens.executor.max_num_seqs,
        max_num_batched_tokens=tokens.executor.max_num_batched_tokens,
        block_size=ledger.block_size,
        num_blocks=ledger.num_blocks,
        num_host_blocks=ledger.num_host_blocks,
        block_bytes=ledger.block_bytes,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        ledger_summary=ledger.summary(),
        blocks_line=ledger.blocks_line(),
        ready_s=0.0,
        timeline_s=dict(tokens.executor.timeline_s),
    )
    return tokens.core, info


def main(build: Callable[[Launch], tuple[EngineCore, EngineInfo]] = build_core) -> int:
    # The server decides when the engine ends; Ctrl-C reaches the whole terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    if hasattr(signal, "SIGUSR1"):  # stacks on demand, even while a call holds the interpreter
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    launch = read_launch(sys.stdin.buffer)
    _log_to_parent(launch.log_level)
    _die_with_parent(launch)
    context = zmq.Context()
    outputs = _connect(context, launch.outputs_address)
    commands = context.socket(zmq.PULL)
    commands.setsockopt(zmq.RCVHWM, 0)
    commands.bind(launch.commands_address)
    outputs.send(message_codec.encode(Hello()))
    try:
        core, info = build(launch)
        _serve(core, info, launch, commands, outputs)
    except Exception as error:
        if not isinstance(error, QuireError):
            get_logger().exception("the engine stopped")
        outputs.send(message_codec.encode(Failed(ErrorInfo.of(error))))
        return 1
    finally:
        commands.close(linger=0)
        outputs.close(linger=2000)
        context.term()
    return 0


def _serve(
    core: EngineCore, info: EngineInfo, launch: Launch, commands: zmq.Socket[bytes], outputs: zmq.Socket[bytes]
) -> None:
    loop = EngineLoop(
        core,
        receiver(commands),
        lambda message: outputs.send(message_codec.encode(message)),
        Brownout(launch.brownout),
        publishes_cache=launch.publishes_cache,
    )
    beats = _connect(outputs.context, launch.outputs_address)  # the watchdog's thread alone uses it from here on
    watchdog = Watchdog(
        loop.progress,
        lambda heartbeat: beats.send(message_codec.encode(heartbeat)),
        lambda num_steps, for_s: write_dump(core, loop.live_requests, launch.dump_dir, num_steps, for_s),
        step_timeout_s=launch.step_timeout_s,
        heartbeat_s=launch.heartbeat_s,
    )
    settle_for_serving()
    # A supervisor may signal every process it finds; requests that drain need this one to go on.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    outputs.send(message_codec.encode(Ready(info)))
    watchdog.start()
    try:
        loop.run()
    finally:
        watchdog.stop()
        beats.close(linger=0)
        core.close()


def read_launch(stream: BinaryIO) -> Launch:
    (size,) = struct.unpack("<Q", stream.read(8))
    return decode_launch(stream.read(size))


def receiver(commands: zmq.Socket[bytes]) -> Receive:
    """Reads the socket without waiting, or waits for it."""
    descriptor = commands.FD

    def receive(wait_s: float | None) -> Command | None:
        if wait_s is None:
            return command_codec.decode(commands.recv())
        until_s = time.perf_counter() + wait_s
        while True:
            # Asked first: the descriptor tells only of what comes after a vain question.
            try:
                return command_codec.decode(commands.recv(zmq.NOBLOCK))
            except zmq.Again:
                pass
            left_s = until_s - time.perf_counter()
            if left_s <= 0:
                return None
            select.select([descriptor], [], [], left_s)  # to the microsecond, where a poll knows milliseconds

    return receive


def _connect(context: zmq.Context[zmq.Socket[bytes]], address: str) -> zmq.Socket[bytes]:
    """A way out that never blocks: what the server has not read yet waits in memory, not in the loop."""
    socket = context.socket(zmq.PUSH)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    return socket


class _ParentHandler(logging.Handler):
    """Log lines go to the parent as what they are, and it formats them like its own."""

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if record.exc_info:
            text = f"{text}\n{logging.Formatter().formatException(record.exc_info)}"
        sys.stderr.write(f"{LOG_MARK}{json.dumps([record.levelno, text])}\n")
        sys.stderr.flush()


def _log_to_parent(level: int) -> None:
    logger = logging.getLogger("quire")
    logger.addHandler(_ParentHandler())
    logger.setLevel(level)
    logger.propagate = False


def _die_with_parent(launch: Launch) -> None:
    """Twice: the kernel's own way where there is one, and the end of standard input, which works everywhere."""
    if launch.dies_with_parent_thread and sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launch.parent_pid:  # it was gone before the kernel was asked
            os._exit(1)

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="quire-parent-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
