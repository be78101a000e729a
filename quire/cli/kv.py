"""`quire kv`: look at a server's KV levels, and warm, pin or expire prompts in them."""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from quire.cli.parser import WideHelp
from quire.errors import ConfigError, QuireError

_EXAMPLES = """examples:
  quire kv levels
  quire kv warm --prompt-file system_prompt.txt
  quire kv pin --prompt "You are a helpful assistant."
  quire kv expire --older-than 86400"""
_TIMEOUT_S = 600.0  # a long prompt may have to be computed


def add_parser(subparsers: argparse._SubParsersAction[Any]) -> None:
    parser = subparsers.add_parser(
        "kv",
        help="KV levels of a server: look, warm, pin, expire",
        description="Look at the levels of a running server's KV cache, and change what is in them.",
        epilog=_EXAMPLES,
        formatter_class=WideHelp,
    )
    parser.add_argument("action", choices=("levels", "warm", "pin", "unpin", "expire"), help="what to do")
    prompt = parser.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt, as a completion would have it")
    prompt.add_argument("--prompt-file", metavar="PATH", help="a file that holds it; - is standard input")
    prompt.add_argument("--older-than", type=float, metavar="SECONDS", help="expire what was not used for so long")
    parser.add_argument("--cache-salt", metavar="TEXT", help="the salt of the requests that it is for")
    parser.add_argument("--tenant", metavar="NAME", help="the key whose requests it is for, where there are several")
    parser.add_argument("--engine", metavar="NAME", help="of several replicas, which")
    parser.add_argument("--url", default="http://127.0.0.1:8000", metavar="URL", help="the server (default port 8000)")
    parser.add_argument("--api-key", metavar="KEY", help="default: the variable QUIRE_API_KEY")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    body: dict[str, Any] | None = None
    if args.action != "levels":
        body = {"action": args.action}
        given = {"prompt": _prompt(args), "cache_salt": args.cache_salt, "tenant": args.tenant}
        body |= {name: value for name, value in given.items() if value is not None}
        if args.older_than is not None:
            body["older_than_s"] = args.older_than
    answer = _send(args, body)
    if body is None:
        _show(answer)
    else:
        print(json.dumps(answer))
    return 0


def _prompt(args: argparse.Namespace) -> str | None:
    if args.prompt_file is None:
        return str(args.prompt) if args.prompt is not None else None
    if args.prompt_file == "-":
        return sys.stdin.read()
    try:
        return Path(args.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {args.prompt_file}: {error}") from None


def _send(args: argparse.Namespace, body: dict[str, Any] | None) -> dict[str, Any]:
    url = args.url.rstrip("/") + "/debug/kv/levels" + (f"?engine={args.engine}" if args.engine else "")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--url must begin with http:// or https://, got {args.url!r}")
    headers = {"content-type": "application/json"}
    if key := args.api_key or os.environ.get("QUIRE_API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    data = None if body is None else json.dumps(body).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=_TIMEOUT_S) as reply:
            answer: dict[str, Any] = json.loads(reply.read())
            return answer
    except urllib.error.HTTPError as error:
        try:
            message = json.loads(error.read())["error"]["message"]
        except (ValueError, KeyError, TypeError):
            message = error.reason
        raise QuireError(f"{args.url} answered {error.code}: {message}") from None
    except (urllib.error.URLError, ValueError, OSError) as error:
        reason = getattr(error, "reason", error)
        raise QuireError(f"no answer from {args.url}: {reason}. Is quire serve running there?") from None


def _show(answer: dict[str, Any]) -> None:
    for level in answer["levels"]:
        name = level.pop("level")
        # Counts and bytes to the last digit, seconds as far as they are known.
        shown = ((key, f"{value:,.0f}" if value == int(value) else f"{value:,.4g}") for key, value in level.items())
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in shown))
    for key, value in answer.items():
        if key != "levels":
            print(f"{key}: {value:,}")
