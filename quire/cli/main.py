"""The `quire` command: one file a subcommand, each with add_parser() and run()."""

from __future__ import annotations

import argparse
import os
import sys

import quire
from quire.cli import bench, chat, env, generate, lab, models, plan, pull, serve
from quire.cli.standard_streams import open_closed_streams
from quire.errors import BadRequestError, ConfigError, QuireError

_COMMANDS = (generate, chat, serve, pull, models, bench, plan, lab, env)


def main(argv: list[str] | None = None) -> int:
    open_closed_streams()
    parser = argparse.ArgumentParser(
        prog="quire", description="LLM inference on paged KV memory.", epilog="quire COMMAND --help shows its options."
    )
    parser.add_argument("--version", action="version", version=f"quire {quire.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
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


if __name__ == "__main__":
    sys.exit(main())
