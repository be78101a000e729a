"""The engine's own process: `python -m quire.engine.process`, started by `quire.engine.launch` alone.

It reads what to run on standard input, builds the token side, and runs the loop until it is told to stop, a step fails,
or its parent is gone.
"""

from __future__ import annotations

import faulthandler
import signal
import sys
from collections.abc import Callable

from quire.child import die_with_parent, log_to_parent, read_launch
from quire.engine.api import EngineInfo
from quire.engine.brownout import Brownout
from quire.engine.core import EngineCore
from quire.engine.launch import settle_for_serving
from quire.engine.link import EngineEnd, decode_launch
from quire.engine.loop import EngineLoop
from quire.engine.messages import ErrorInfo, Failed, Launch, Ready
from quire.engine.text_side import open_model
from quire.engine.watchdog import Watchdog, write_dump
from quire.errors import QuireError
from quire.log import get_logger

_LAST_WORDS_S = 2.0  # for the server to read the last messages


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
    link = EngineEnd(launch.link)
    try:
        core, info = build(launch)
        _serve(core, info, launch, link)
    except Exception as error:
        if not isinstance(error, QuireError):
            get_logger().exception("the engine stopped")
        link.send(Failed(ErrorInfo.of(error)))
        return 1
    finally:
        link.close(_LAST_WORDS_S)
    return 0


def _serve(core: EngineCore, info: EngineInfo, launch: Launch, link: EngineEnd) -> None:
    options = launch.options
    loop = EngineLoop(
        core, link.receive, link.send, Brownout(options.brownout), publishes_cache=options.publishes_cache
    )
    watchdog = Watchdog(
        loop.progress,
        link.send,
        lambda num_steps, for_s: write_dump(core, loop.live_requests, options.dump_dir, num_steps, for_s),
        step_timeout_s=options.step_timeout_s,
        heartbeat_s=options.heartbeat_s,
    )
    settle_for_serving()
    # A supervisor may signal every process it finds; requests that drain need this one to go on.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    link.send(Ready(info))
    watchdog.start()
    try:
        loop.run()
    finally:
        watchdog.stop()
        core.close()


if __name__ == "__main__":
    sys.exit(main())
