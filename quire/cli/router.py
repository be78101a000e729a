"""quire router: one address in front of servers that run already."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
from typing import Any

from quire.cli.parser import WideHelp, needs_server
from quire.router.alternatives import FIRST_TOKEN, POLICIES

_EPILOG = """\
Each request goes to the server whose first token comes soonest: the work queued there, and what of the prompt is not in
its cache, over its measured speed. Quire servers tell what they have cached, block by block (with API keys: to an
admin's key, --api-key); of other servers with OpenAI's API it is guessed from what was sent there before.

  quire router http://a:8000 http://b:8000
  quire router --port 9000 http://10.0.0.1:8000 http://10.0.0.2:8000
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "router",
        help="route requests to servers by their caches and load",
        description="One address in front of several servers of the same model.",
        usage="quire router [flags] URL [URL ...]",
        epilog=_EPILOG,
        formatter_class=WideHelp,
    )
    parser.set_defaults(run=run)
    parser.add_argument("urls", nargs="*", metavar="URL", help="a server, as http://host:port")
    parser.add_argument(
        "--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (default 127.0.0.1)"
    )
    parser.add_argument("--port", type=int, default=8080, metavar="N", help="port to listen on (default 8080; 0: any)")
    parser.add_argument(
        "--api-key", metavar="KEY", help="key for the router's own questions (default: QUIRE_ROUTER_API_KEY)"
    )
    names = ", ".join(POLICIES)
    parser.add_argument(
        "--policy", default=FIRST_TOKEN, metavar="NAME", help=f"how a server is chosen (default {FIRST_TOKEN}): {names}"
    )
    parser.add_argument("--log-level", default="info", metavar="LEVEL", help="debug, info, warning or error")


def run(args: argparse.Namespace) -> int:
    with needs_server("quire router"):
        from quire.router.servers import Servers
        from quire.server.listen import address_of, open_socket
        from quire.server.logs import set_up_logs
        from quire.server.proxy import run_proxy
        from quire.server.run import loop_factory
        from quire.server.settings import ServerSettings
    key = args.api_key or os.environ.get("QUIRE_ROUTER_API_KEY")
    servers = Servers(args.urls, api_key=key, policy=args.policy)
    settings = ServerSettings(host=args.host, port=args.port, log_level=args.log_level)
    listener = open_socket(settings)
    set_up_logs(settings.log_format, settings.log_level)
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # its lines about itself say nothing that ours do not

    async def serve() -> int:
        from quire.log import get_logger

        stop, at_once = asyncio.Event(), asyncio.Event()

        def on_interrupt() -> None:
            if stop.is_set():
                get_logger().info("interrupted again: stopping at once")
                at_once.set()
            else:
                get_logger().info("interrupted: running requests may finish; Ctrl+C again stops at once")
                stop.set()

        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        loop.add_signal_handler(signal.SIGINT, on_interrupt)
        address = address_of(listener, settings)
        num = len(servers.all)
        get_logger().info("routing at %s to %d server%s", address, num, "s" * (num != 1))
        await run_proxy(servers, listener, settings, stop, at_once)
        get_logger().info("stopped")
        return 130 if at_once.is_set() else 0

    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            return runner.run(serve())
    finally:
        listener.close()
