"""The `quire` command: one file a subcommand, each with add_parser() and run()."""

from __future__ import annotations

import importlib
import os
import sys
from typing import TYPE_CHECKING

import quire
from quire.errors import BadRequestError, ConfigError, QuireError

if TYPE_CHECKING:
    from quire.cli.parser import Parser


# Modules of quire.cli, in the order of --help.
_COMMANDS = (
    *("generate", "chat", "serve", "router", "run_batch", "kv", "models", "bench", "plan", "sim", "lab"),
    *("env", "completion"),
)


def main(argv: list[str] | None = None) -> int:
    try:
        open_closed_streams()
        args = make_parser().parse_args(argv)
        return int(args.run(args))
    except QuireError as error:
        print(f"quire: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, (ConfigError, BadRequestError)) else 1
    except KeyboardInterrupt:
        print("quire: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) left. Point stdout at nothing, or Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a full disk behind stdout, say
        print(f"quire: error: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def open_closed_streams() -> None:
    """Point the standard streams that our parent has closed (`quire serve 2>&-`) at the null device, before
    anything else is opened. A socket that got the number of one would be taken for it: libraries write there, libuv
    aborts on closing it, and an engine would inherit it."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(descriptor)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            assert null == descriptor, "the lowest free number: those below are open"
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, mode, closefd=False))


def make_parser() -> Parser:
    # Commands are imported here, where main() takes Ctrl-C: they are nearly all of the time until a command runs.
    from quire.cli.parser import Parser

    parser = Parser(
        prog="quire", description="LLM inference on paged KV memory.", epilog="quire COMMAND --help shows its options."
    )
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in _COMMANDS:
        importlib.import_module(f"quire.cli.{name}").add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
