"""quire chat: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import TYPE_CHECKING, Any

from quire.cli.options import (
    add_engine_flags,
    add_output_flags,
    add_sampling_flags,
    check_sampling,
    engine_config,
    sampling_params,
)
from quire.cli.parser import WideHelp
from quire.errors import BadRequestError
from quire.params import SamplingParams

if TYPE_CHECKING:
    from quire.cli.session import Session

_HELP = "/reset forgets the conversation, /stats shows the cache and speed, /help this, /exit (or Ctrl-D) leaves"


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description=f"Talk with a model. {_HELP}.\nCtrl-C stops an answer. In a pipe, every line is a turn.",
        usage="quire chat [flags]",
        formatter_class=WideHelp,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_output_flags(parser)
    add_sampling_flags(parser, max_tokens=1024, has_n=False)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    check_sampling(args)
    from quire.cli.session import Session  # torch is loaded from here on: bad flags fail before that

    session = Session(config, quiet=args.quiet, verbose=args.verbose)
    params = sampling_params(args, session.engine.built.default_sampling)
    conversation = _Conversation(session, params, args.system)
    if sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  gives input() history and editing
        if not args.quiet:
            print(f"quire: {_HELP}", file=sys.stderr)
    while (line := _read_line()) is not None:
        if line.strip():
            conversation.take(line.strip())
    return 0


def _read_line() -> str | None:
    interactive = sys.stdin.isatty()
    try:
        return input("> " if interactive else "")
    except (EOFError, KeyboardInterrupt):
        if interactive:
            print(file=sys.stderr)
        return None


class _Conversation:
    """The history, and what a line does to it."""

    def __init__(self, session: Session, params: SamplingParams, system: str | None) -> None:
        self._session = session
        self._params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = list(self._start)

    def take(self, line: str) -> None:
        if line in ("/exit", "/quit"):
            raise SystemExit(0)
        if line == "/reset":
            self._messages = list(self._start)
            print("quire: forgotten", file=sys.stderr)
        elif line == "/stats":
            self._session.print_account()
        elif line == "/help":
            print(f"quire: {_HELP}", file=sys.stderr)
        elif line.startswith("/"):
            print(f"quire: unknown command {line.split()[0]}. {_HELP}", file=sys.stderr)
        else:
            self._answer(line)

    def _answer(self, line: str) -> None:
        messages = [*self._messages, {"role": "user", "content": line}]
        pieces: list[str] = []
        stream = None
        try:
            stream = self._session.stream([self._session.engine.render_chat(messages)], self._params)
            for output in stream:
                pieces.append(output.outputs[0].text)
                sys.stdout.write(output.outputs[0].text)
                sys.stdout.flush()
                if output.outputs[0].error:
                    print(f"quire: {output.outputs[0].error}", file=sys.stderr)
        except KeyboardInterrupt:
            print(" [stopped]", end="", file=sys.stderr)
        except BadRequestError as error:
            print(f"quire: {error}. /reset starts a new conversation", file=sys.stderr)
            return
        finally:
            if stream is not None:
                stream.close()  # type: ignore[attr-defined]  # frees the blocks of a stopped answer now
        print(flush=True)
        # A stopped answer stays in the history: the user saw it.
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
