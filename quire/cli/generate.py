"""quire generate: continue prompts, streaming."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from typing import Any

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
from quire.params import for_chat


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="continue prompts (arguments, or one from stdin)",
        description="Continue prompts, all batched together. Text goes to stdout, statistics to stderr.",
        usage="quire generate [PROMPT ...] [flags]",
        formatter_class=WideHelp,
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="without any, stdin is one prompt")
    parser.add_argument("--chat", action="store_true", help="treat each prompt as a user's message to a chat model")
    parser.add_argument("--system", metavar="TEXT", help="a system message before each prompt (implies --chat)")
    parser.add_argument("--json", action="store_true", help="one JSON object per prompt on stdout, no streaming")
    add_output_flags(parser)
    add_sampling_flags(parser, max_tokens=256, has_n=True)
    add_engine_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    config = engine_config(args)
    check_sampling(args)
    prompts = args.prompts or [_from_stdin(quiet=args.quiet)]
    for index, prompt in enumerate(prompts):
        if not prompt:
            which = f"prompt {index}" if len(prompts) > 1 else "the prompt"
            raise BadRequestError(f"{which} is empty: give it some text", param="prompt")
    from quire.cli.session import Session  # torch is loaded from here on: bad flags fail before that

    session = Session(config, quiet=args.quiet, verbose=args.verbose)
    is_chat = args.chat or args.system is not None
    own = session.engine.built.default_sampling
    params = sampling_params(args, for_chat(own) if is_chat else own)
    inputs: list[Any] = list(prompts)
    if is_chat:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        inputs = [session.engine.render_chat([*system, {"role": "user", "content": p}]) for p in prompts]
    printer = _JsonPrinter(prompts) if args.json else _TextPrinter(prompts, params.n, has_headings=not args.quiet)
    try:
        for output in session.stream(inputs, params):
            printer.add(output)
    finally:
        printer.close()
        if session.account.seconds and not args.quiet and not args.json:  # a prompt that is refused took none
            session.print_account()
    for failure in printer.failures.values():
        print(f"quire: {failure}", file=sys.stderr)
    return 1 if printer.failures else 0


def _from_stdin(*, quiet: bool) -> str:
    if sys.stdin.isatty() and not quiet:
        print("quire: reading the prompt from the terminal, end with Ctrl-D", file=sys.stderr)
    text = sys.stdin.read().rstrip("\n")
    if not text:
        raise BadRequestError("no prompt: give one as an argument or on stdin", param="prompt")
    return text


class _TextPrinter:
    """Streams the first unfinished text; the others wait their turn, so that texts never mix."""

    def __init__(self, prompts: list[str], n: int, *, has_headings: bool) -> None:
        self._keys = [(p, i) for p in range(len(prompts)) for i in range(n)]
        self._prompts = prompts
        self._waiting: dict[tuple[int, int], list[str]] = {key: [] for key in self._keys}
        self._done: set[tuple[int, int]] = set()
        self.failures: dict[tuple[int, int], str] = {}
        self._current = 0
        self._headed = False
        self._has_headings = has_headings and len(self._keys) > 1

    def add(self, output: Any) -> None:
        prompt = int(output.request_id)
        for completion in output.outputs:
            key = (prompt, completion.index)
            if completion.text:
                self._waiting[key].append(completion.text)
            if completion.finish_reason is not None and key not in self._done:
                self._done.add(key)
                if completion.error:
                    self.failures[key] = f"prompt {prompt} failed: {completion.error}"
        self._print_ready()

    def _print_ready(self) -> None:
        while self._current < len(self._keys):
            key = self._keys[self._current]
            self._head(key)
            sys.stdout.write("".join(self._waiting[key]))
            self._waiting[key].clear()
            if key not in self._done:
                break
            sys.stdout.write("\n")
            self._current += 1
            self._headed = False
        sys.stdout.flush()

    def _head(self, key: tuple[int, int]) -> None:
        if not self._headed and self._has_headings:
            print(f"{'' if self._current == 0 else chr(10)}> {self._prompts[key[0]]}")
        self._headed = True

    def close(self) -> None:
        if self._current < len(self._keys) and self._headed:
            sys.stdout.write("\n")  # interrupted in mid-line
        sys.stdout.flush()


class _JsonPrinter:
    """One object per prompt, when it is done."""

    def __init__(self, prompts: list[str]) -> None:
        self._prompts = prompts
        self._outputs: dict[int, dict[int, dict[str, Any]]] = {}  # by prompt and index
        self.failures: dict[tuple[int, int], str] = {}

    def add(self, output: Any) -> None:
        prompt = int(output.request_id)
        outputs = self._outputs.setdefault(prompt, {})
        for c in output.outputs:
            found = outputs.setdefault(c.index, {"text": [], "token_ids": []})
            found["text"].append(c.text)
            found["token_ids"] += c.token_ids
            found |= {"finish_reason": c.finish_reason, "stop_reason": c.stop_reason, "error": c.error}
            if c.error:
                self.failures[prompt, c.index] = f"prompt {prompt} failed: {c.error}"
        if output.finished:
            record = {
                "prompt": self._prompts[prompt],
                "outputs": [one | {"text": "".join(one["text"])} for _, one in sorted(outputs.items())],
                "num_prompt_tokens": len(output.prompt_token_ids),
                "num_cached_tokens": output.num_cached_tokens,
                "metrics": asdict(output.metrics),
            }
            print(json.dumps(record, ensure_ascii=False), flush=True)

    def close(self) -> None:
        sys.stdout.flush()
