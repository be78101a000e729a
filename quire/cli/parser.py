"""The parser of `quire` and, as argparse gives subcommands their parent's class, of all its commands."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

from quire.errors import ConfigError, install_hint
from quire.nearest import did_you_mean

_LIKE_A_FLAG = re.compile(r"--?[A-Za-z][\w-]*")  # no negative number, and no text that begins with a dash
_REQUIRED = "the following arguments are required: "  # argparse's words

# What llama.cpp calls some of our flags. These are hints only: none of its names is taken.
_LLAMA_CPP = {
    "-m": "model",
    "-hf": "model",
    "--hf-repo": "model",
    "-a": "served-model-name",
    "--alias": "served-model-name",
    "-c": "max-model-len",
    "--ctx-size": "max-model-len",
    "-n": "max-tokens",
    "--predict": "max-tokens",
    "--n-predict": "max-tokens",
    "-p": "port",
    "-t": "num-threads",
    "--threads": "num-threads",
    "-np": "max-num-seqs",
    "--parallel": "max-num-seqs",
    "-b": "max-num-batched-tokens",
    "--batch-size": "max-num-batched-tokens",
    "-ngl": "device",
    "--gpu-layers": "device",
    "--n-gpu-layers": "device",
    "-ctk": "kv-cache-dtype",
    "--cache-type-k": "kv-cache-dtype",
    "-md": "spec-model",
    "--model-draft": "spec-model",
    "--draft-max": "spec-tokens",
    "--lora": "lora-modules",
    "--embedding": "runner",
    "--embeddings": "runner",
    "-sys": "system",
    "--system-prompt": "system",
}


class Parser(argparse.ArgumentParser):
    """Takes flags by their whole names only, and tells a mistake in one line that names the command's own help."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        # A prefix is a trap: --gpu-memory would be --gpu-memory-utilization, and the next flag makes it ambiguous.
        super().__init__(*args, **{"allow_abbrev": False, **kwargs})
        self._arguments: list[str] = []

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses what it does not know. argparse would hand that to the parent, which cannot say what was meant."""
        self._arguments = list(sys.argv[1:] if args is None else args)
        namespace, unknown = super().parse_known_args(self._arguments, namespace)
        if unknown:
            self.error(self._about_extra(next((word for word in unknown if word != "--"), "--")))
        return namespace, unknown

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """argparse takes prefixes of flags with one dash whatever allow_abbrev says: -p 8000 would be -pp 8000."""
        return [found for found in super()._get_option_tuples(option_string) if option_string.startswith(found[1])]

    def error(self, message: str) -> NoReturn:
        # A mistyped flag's value is taken for something else, and that may be what argparse complains about.
        flag = self._unknown_flag()
        if flag is not None:
            message = f"{flag} is no flag of {self.prog}{self._meant(flag)}"
        elif (found := self._unknown_command()) is not None:
            word, commands = found
            near = did_you_mean(word, commands) or f": there are {', '.join(commands)}"
            message = f"{word!r} is no command of {self.prog}{near}"
        elif message.startswith(_REQUIRED):
            message += self._what_there_is(message.removeprefix(_REQUIRED))
        self.exit(2, f"quire: error: {message} (see {self.prog} --help)\n")

    def _about_extra(self, word: str) -> str:
        whole = word.partition("=")[0].partition(".")[0]
        if whole in self._option_string_actions:  # vLLM sets one entry of a JSON flag so
            return f"{word.partition('=')[0]} sets one entry, and {whole} takes them all, as JSON"
        lists = [action.metavar for action in self._actions if not action.option_strings and action.nargs == "*"]
        if lists:  # argparse takes a list in one piece
            return f"{word!r} stands apart from the other {lists[0]}s: put the flags before or behind all of them"
        if "--model" in self._option_string_actions and not word.startswith("-"):
            return f"{word!r} is one argument too many (a model is given as --model {word:.60})"
        return f"{word!r} is one argument too many"

    def _meant(self, flag: str) -> str:
        names = self._names()
        word = flag.lstrip("-")
        ours = word if flag != f"--{word}" and word in names else _LLAMA_CPP.get(flag)
        if ours in names:
            return f": did you mean --{ours}?"
        return did_you_mean(word, names, prefix="--") if len(word) > 1 else ""

    def _what_there_is(self, missing: str) -> str:
        """The choices of an argument that is missing, where it has any."""
        for action in self._actions:
            if action.choices is not None and missing in (action.metavar, action.dest):
                return f": there are {', '.join(map(str, action.choices))}"
        return ""

    def _unknown_flag(self) -> str | None:
        # Behind the name of another command, the flags are that command's.
        hands_on = any(action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions)
        is_value = False
        for argument in self._arguments:
            flag, equals, _ = argument.partition("=")
            if argument == "--" or (hands_on and not is_value and not argument.startswith("-")):
                return None
            is_flag = _LIKE_A_FLAG.fullmatch(flag) is not None
            known = self._option_string_actions.get(flag)
            if is_flag and known is None and flag[:2] not in self._option_string_actions:  # -q8 is -q with its value
                return flag
            is_value = known is not None and known.nargs != 0 and not equals
        return None

    def _unknown_command(self) -> tuple[str, list[str]] | None:
        """A word where a command should stand, and the commands that there are."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                word = next((argument for argument in self._arguments if not argument.startswith("-")), None)
                if word is not None and word not in action.choices:
                    return word, list(action.choices)
        return None

    def _names(self) -> list[str]:
        """The long flags that --help shows, without their dashes."""
        shown = [action for action in self._actions if action.help is not argparse.SUPPRESS]
        return [o.removeprefix("--") for action in shown for o in action.option_strings if o.startswith("--")]


@contextmanager
def needs_server(command: str) -> Iterator[None]:
    """Around a command's imports of the server: a package that is missing is told with how to get it."""
    try:
        yield
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] == "quire":
            raise
        raise ConfigError(f"{command} needs the package {error.name}: {install_hint('server')}") from None


class WideHelp(argparse.RawDescriptionHelpFormatter):
    """Wide enough that most flags have their help on the same line."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=118)
