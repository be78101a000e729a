"""`quire completion`: a script that completes commands, flags and models in a shell, made from the parser itself."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quire.weights.aliases import alias_names

_SHELLS = {
    "bash": 'eval "$(quire completion bash)" in ~/.bashrc',
    "zsh": 'eval "$(quire completion zsh)" in ~/.zshrc, after compinit',
    "fish": "quire completion fish > ~/.config/fish/completions/quire.fish",
}


@dataclass(slots=True, frozen=True)
class _Command:
    path: tuple[str, ...]  # () for quire itself, ("bench", "serve")
    subcommands: dict[str, str]  # and what --help says of each
    flags: dict[str, tuple[str, list[str] | None]]  # help, and the values: a list, [] for any, None for a switch
    models: list[str]  # where an argument is one


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "completion",
        help="print a script that completes commands and flags in a shell",
        description="Print a shell's completion script. To use it:\n"
        + "\n".join(f"  {shell:5} {how}" for shell, how in _SHELLS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=list(_SHELLS), metavar="SHELL", help=", ".join(_SHELLS))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from quire.cli.main import make_parser

    commands = list(_commands(make_parser(), ()))
    if args.shell == "zsh":
        print("autoload -Uz bashcompinit && bashcompinit")  # and then as in bash
    print((_fish if args.shell == "fish" else _bash)(commands))
    return 0


def _commands(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[_Command]:
    flags: dict[str, tuple[str, list[str] | None]] = {}
    subcommands: dict[str, str] = {}
    models: list[str] = []
    inner: list[tuple[str, argparse.ArgumentParser]] = []
    for action in parser._actions:
        if action.help is argparse.SUPPRESS:
            continue
        if isinstance(action, argparse._SubParsersAction):
            subcommands = {choice.dest: choice.help or "" for choice in action._choices_actions}
            inner = list(action.choices.items())
        values = None if action.nargs == 0 else [str(choice) for choice in action.choices or ()]
        if "model" in action.dest and "len" not in action.dest and not values:
            values = alias_names()
        if action.option_strings:
            text = (action.help or "").replace("%%", "%")
            flags |= dict.fromkeys(action.option_strings, (text, values))
        elif not inner:
            models = values or []
    yield _Command(path, subcommands, flags, models)
    for name, other in inner:
        yield from _commands(other, (*path, name))


def _bash(commands: list[_Command]) -> str:
    words, values, steps = [], [], []
    for command in commands:
        path = "".join(f" {name}" for name in command.path)
        offered = [*command.subcommands, *command.models, *command.flags]
        words.append(f"    {shlex.quote(path)}) words={shlex.quote(' '.join(offered))} ;;")
        steps += [shlex.quote(f"{path} {name}") for name in command.subcommands]
        for flag, (_, taken) in command.flags.items():
            if taken is not None:
                values.append(f"    {shlex.quote(f'{path} {flag}')}) words={shlex.quote(' '.join(taken))} ;;")
    return "\n".join(
        [
            "_quire() {",
            '  local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} path="" words="" word',
            '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do',
            f'    case "$path $word" in {"|".join(steps)}) path="$path $word" ;; esac',
            "  done",
            '  case "$path" in',
            *words,
            "  esac",
            '  case "$path $before" in',
            *values,
            "  esac",
            '  COMPREPLY=($(compgen -W "$words" -- "$current"))',
            "}",
            "complete -o bashdefault -o default -F _quire quire",
        ]
    )


def _fish(commands: list[_Command]) -> str:
    lines = []
    for command in commands:
        seen = [f"__fish_seen_subcommand_from {name}" for name in command.path]
        unseen = [f"not __fish_seen_subcommand_from {' '.join(command.subcommands)}"] if command.subcommands else []
        where = f"complete -c quire -n {_fish_text('; and '.join([*seen, *unseen]) or 'true')}"
        for name, text in command.subcommands.items():
            lines.append(f"{where} -f -a {name} -d {_fish_text(text)}")
        if command.models:
            lines.append(f"{where} -a {_fish_text(' '.join(command.models))}")
        for flag, (text, values) in command.flags.items():
            kind = "l" if flag.startswith("--") else "s" if len(flag) == 2 else "o"
            option = f"-{kind} {flag.lstrip('-')}"
            takes = "" if values is None else f" -x -a {_fish_text(' '.join(values))}" if values else " -r"
            lines.append(f"{where} {option}{takes} -d {_fish_text(text)}")
    return "\n".join(lines)


def _fish_text(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
