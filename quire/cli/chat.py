"""quire chat: a conversation in the terminal."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
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
from quire.params import SamplingParams, for_chat
from quire.weights import quire_home

if TYPE_CHECKING:
    from quire.cli.session import Session

_HELP = (
    "/reset forgets the conversation, /stats shows the cache and speed, /help this, /exit (or Ctrl-D) leaves; "
    'a line that ends in \\ goes on, and """ begins and ends several lines'
)
_QUOTES = '"""'
_HISTORY_LINES = 1000


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description=f"Talk with a model. {_HELP}.\nCtrl-C stops an answer or clears the line, twice at the prompt it "
        "leaves. In a pipe, every line is a turn.",
        usage="quire chat [flags]",
        formatter_class=WideHelp,
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_output_flags(parser)
    add_sampling_flags(parser, max_tokens=1024, has_n=False, is_chat=True)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    check_sampling(args)
    from quire.cli.session import Session  # torch is loaded from here on: bad flags fail before that

    session = Session(config, quiet=args.quiet, verbose=args.verbose)
    params = sampling_params(args, for_chat(session.engine.built.default_sampling))
    conversation = _Conversation(session, params, args.system)
    if not sys.stdin.isatty():
        for line in sys.stdin:
            if line.strip():
                conversation.take(line.strip())
        return 0
    if not args.quiet:
        print(f"quire: {_HELP}", file=sys.stderr)
    with _history():
        while (text := _read_turn()) is not None:
            if text.strip():
                conversation.take(text.strip())
    return 0


def _read_turn() -> str | None:
    """Read one turn from the terminal, which may be marked to go over several lines; None to leave. The first Ctrl-C
    clears the input, the second in a row leaves."""
    was_interrupted = False
    while True:
        try:
            return _read_lines()
        except EOFError:
            print(file=sys.stderr)
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            if was_interrupted:
                return None
            was_interrupted = True


def _read_lines() -> str:
    text = input("> ")
    if text.lstrip().startswith(_QUOTES):
        text = text.lstrip().removeprefix(_QUOTES)
        while _QUOTES not in text:
            text += "\n" + input(". ")
        return text.replace(_QUOTES, "", 1)
    while text.endswith("\\"):
        text = text[:-1] + "\n" + input(". ")
    return text


@contextlib.contextmanager
def _history() -> Iterator[None]:
    """Editing and a history for input(), kept for the next time."""
    try:
        import readline
    except ImportError:  # not on every system
        yield
        return
    path = quire_home() / "chat_history"
    with contextlib.suppress(OSError):
        readline.read_history_file(path)
    readline.set_history_length(_HISTORY_LINES)
    readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns it off: pasted lines are one text
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # a home that cannot be written costs the history and nothing else
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            readline.write_history_file(path)


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
        try:
            prompt = self._session.engine.render_chat(messages)
            # Closing it frees the blocks of a stopped answer now.
            with contextlib.closing(self._session.stream([prompt], self._params)) as stream:
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
        print(flush=True)
        # A stopped answer stays in the history: the user saw it.
        self._messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
