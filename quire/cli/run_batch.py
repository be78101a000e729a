"""quire run-batch: a file of requests in OpenAI's batch format, answered into another file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from quire.cli.parser import WideHelp, needs_server
from quire.errors import ConfigError

_EPILOG = """\
A line of the input is a request:
  {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], "max_tokens": 64}}
A line of the output is its answer, in the order in which they come; custom_id says whose. Lines that are no requests
are answered with an error. Run again after an interruption, it goes on with the lines that have no answer yet.

  quire run-batch -i requests.jsonl -o answers.jsonl
  quire run-batch -i requests.jsonl -o answers.jsonl --model ./my-model --max-num-seqs 256
"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "run-batch",
        help="answer a file of requests in OpenAI's batch format",
        description="Answer a file of requests in OpenAI's batch format, as the server would answer them.",
        usage="quire run-batch -i FILE -o FILE [MODEL] [flags]",
        epilog=_EPILOG,
        formatter_class=WideHelp,
    )
    parser.set_defaults(run=run)
    from quire.cli.serve import GROUPS

    parser.add_argument("positional_models", nargs="*", metavar="MODEL", help="the model; the same as --model")
    parser.add_argument("-i", "--input-file", required=True, metavar="FILE", help="requests, one a line")
    parser.add_argument("-o", "--output-file", required=True, metavar="FILE", help="where the answers go")
    parser.add_argument("--config", metavar="FILE", help="a YAML file with any of the flags below")
    for title in ("model", "engine"):
        group = parser.add_argument_group(title)
        for flag in GROUPS[title]:
            flag.add_to(group)


def run(args: argparse.Namespace) -> int:
    with needs_server("quire run-batch"):
        from quire.server.run_batch import run_batch
    from dataclasses import replace

    from quire.cli.serve import read

    for name in ("input_file", "output_file"):
        if "://" in getattr(args, name):
            raise ConfigError(f"{name} must be a file on this machine, got {getattr(args, name)}: fetch it first")
    models, settings, _ = read(args, os.environ)
    if len(models) > 1:
        raise ConfigError("quire run-batch runs one model: serve several with quire serve --batch-dir")
    counts = run_batch(
        models[0].config, replace(settings, log_level="warning"), Path(args.input_file), Path(args.output_file)
    )
    return 1 if counts.failed else 0
