"""The engine's own process: `python -m quire.engine.process`, started by `quire.engine.launch` and by nobody else.

It reads what to run on standard input, builds the token side, and runs the loop until it is told to stop, a step fails,
or its parent is gone.
"""

from __future__ import annotations

import faulthandler
import select
import signal
import sys
import time
from collections.abc import Callable

import zmq

from quire.child import die_with_parent, log_to_parent, read_launch
from quire.engine.api import EngineInfo
from quire.engine.brownout import Brownout
from quire.engine.core import EngineCore
from quire.engine.launch import settle_for_serving
from quire.engine.link import commands as command_codec
from quire.engine.link import decode_launch
from quire.engine.link import messages as message_codec
from quire.engine.loop import EngineLoop, Receive
from quire.engine.messages import Command, ErrorInfo, Failed, Hello, Launch, Ready
from quire.engine.text_side import open_model
from quire.engine.watchdog import Watchdog, write_dump
from quire.errors import QuireError
from quire.log import get_logger


def build_core(launch: Launch) -> tuple[EngineCore, EngineInfo]:
    """The engine that the server asked for."""
    from quire.engine.build import build_token_side  # torch: not before the server has heard from us
    from quire.executor.stores import address_of

    config = launch.config
    opened = open_model(config)
    tokens = build_token_side(config, opened)
    backend, ledger = tokens.executor.backend, tokens.ledger
    tokens.smooth_for_readers(config)
    if backend.note:
        get_logger().warning("%s", backend.note)
    info = EngineInfo(
        model=config.model,
        fingerprint=opened.fingerprint(),
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
        pooling_labels=opened.spec.pooling_labels,
        ledger_summary=ledger.summary(),
        blocks_line=ledger.blocks_line(),
        ready_s=0.0,
        timeline_s=dict(tokens.executor.timeline_s),
        kv_address=address_of(tokens.executor.executor.stores),
        serves_determinism=backend.serves_determinism,
    )
    return tokens.core, info


def main(build: Callable[[Launch], tuple[EngineCore, EngineInfo]] = build_core) -> int:
    # The server decides when the engine ends; Ctrl-C reaches the whole terminal.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)  # stacks on demand, even while a call holds the interpreter
    launch = decode_launch(read_launch(sys.stdin.buffer))
    log_to_parent(launch.log_level)
    die_with_parent(launch.parent_pid, with_its_thread=launch.dies_with_parent_thread)
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
    options = launch.options
    loop = EngineLoop(
        core,
        receiver(commands),
        lambda message: outputs.send(message_codec.encode(message)),
        Brownout(options.brownout),
        publishes_cache=options.publishes_cache,
    )
    beats = _connect(outputs.context, launch.outputs_address)  # the watchdog's thread alone uses it from here on
    watchdog = Watchdog(
        loop.progress,
        lambda heartbeat: beats.send(message_codec.encode(heartbeat)),
        lambda num_steps, for_s: write_dump(core, loop.live_requests, options.dump_dir, num_steps, for_s),
        step_timeout_s=options.step_timeout_s,
        heartbeat_s=options.heartbeat_s,
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


if __name__ == "__main__":
    sys.exit(main())
