"""One flag, three places to set it: the command line, a QUIRE_ variable, a YAML file. The first that has it wins.

    quire serve --max-num-seqs 64
    QUIRE_MAX_NUM_SEQS=64 quire serve
    echo "max-num-seqs: 64" > quire.yaml; quire serve --config quire.yaml        (or QUIRE_CONFIG=quire.yaml)

A value is read the same way wherever it stands, and an error names the place. A list on the command line replaces
one in the file, it does not add to it.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, install_hint
from quire.nearest import did_you_mean

PREFIX = "QUIRE_"
# Read by other parts of Quire, so no flags.
_OTHER_VARIABLES = {"QUIRE_HOME", "QUIRE_CPU_ISA"}
# Variables that Kubernetes sets in every pod beside a service named "quire".
_KUBERNETES = re.compile(r"QUIRE_(SERVICE_.*|PORT_\d+_.*)")
_SWITCH = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def read_text(text: str) -> str:
    return text


def read_count(text: str) -> int:
    """A whole number; 8k is 8000 and 8K is 8192, as vLLM reads them."""
    found = re.fullmatch(r"([+-]?\d{1,30})([kmgKMG]?)", text.strip())
    if found is None:
        raise ValueError("a whole number, like 4096 or 4K")
    return int(found[1]) * _SUFFIXES[found[2]]


def read_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        raise ValueError("JSON") from None


def read_json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


@dataclass(slots=True, frozen=True)
class Flag:
    """A setting under its one name; `drain_timeout` is --drain-timeout, QUIRE_DRAIN_TIMEOUT, and drain-timeout: in
    a file. `read` turns text into the value, or raises a ValueError that says what it wants."""

    name: str
    help: str = argparse.SUPPRESS
    _: KW_ONLY
    read: Callable[[str], Any] = read_text
    metavar: str | None = None
    aliases: tuple[str, ...] = ()  # further spellings on the command line
    is_switch: bool = False
    is_list: bool = False  # given several times; in a variable, with spaces between
    takes_several: bool = False  # a list that also takes several values after one flag
    is_secret: bool = False  # no message shows its value
    is_guard: bool = False  # given but empty is a mistake, not "not given": without it the server would be open

    @property
    def names(self) -> list[str]:
        """Its name and its other long spellings, as a file or a variable may have them."""
        return [self.name, *(a.removeprefix("--").replace("-", "_") for a in self.aliases if a.startswith("--"))]

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    def add_to(self, group: argparse._ArgumentGroup) -> None:
        """Values stay text here, and are read with those of the other places."""
        names = (*self.aliases, self.option)
        common: dict[str, Any] = {"dest": self.name, "default": argparse.SUPPRESS, "help": self.help}
        if self.is_switch:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **common)
            return
        if self.is_list:
            common |= {"action": "extend", "nargs": "+"} if self.takes_several else {"action": "append"}
        group.add_argument(*names, metavar=self.metavar or self.name.upper(), **common)

    def from_text(self, text: str, source: str) -> Any:
        """Read the text of a variable, or one value of the command line."""
        if self.is_guard and not text.strip():
            raise _empty(source)
        if self.is_switch:
            if text.strip().lower() not in _SWITCH:
                raise ConfigError(f"{source} must be true or false, got {text!r}")
            return _SWITCH[text.strip().lower()]
        try:
            return self.read(text)
        except ValueError as error:
            got = "" if self.is_secret else f", got {text!r}"
            raise ConfigError(f"{source} must be {error}{got}") from None

    def from_yaml(self, value: Any, source: str) -> Any:
        if self.is_guard and (value is None or value == []):
            raise _empty(source)
        if self.is_list:
            values = value if isinstance(value, list) else [value]
            return [self._one_from_yaml(one, source) for one in values]
        return self._one_from_yaml(value, source)

    def _one_from_yaml(self, value: Any, source: str) -> Any:
        if self.is_switch:
            if not isinstance(value, bool):
                raise ConfigError(f"{source} must be true or false, got {value!r}")
            return value
        if self.read in (read_json, read_json_or_text) and not isinstance(value, str):
            return value
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            got = "" if self.is_secret else f", got {value!r}"
            raise ConfigError(f"{source} must be one value{got}: put text in quotes")
        if self.is_secret and not isinstance(value, str):  # YAML reads 0123 as a number, and it would be another key
            raise ConfigError(f"{source} must be text: put it in quotes")
        return self.from_text(str(value), source)


def _empty(source: str) -> ConfigError:
    return ConfigError(f"{source} is given but empty: leave it out, or give it a value")


@dataclass(slots=True)
class Gathered:
    values: dict[str, Any] = field(default_factory=dict)  # only what was given somewhere
    sources: dict[str, str] = field(default_factory=dict)  # name -> where, for messages
    models: list[Gathered] = field(default_factory=list)  # the settings under each model of a file
    warnings: list[str] = field(default_factory=list)


def gather(flags: Iterable[Flag], args: argparse.Namespace, environ: Mapping[str, str]) -> Gathered:
    """Everything that was given: command line over environment over file."""
    by_name = {name: flag for flag in flags for name in flag.names}
    found = Gathered()
    path, source = getattr(args, "config", None), "--config"
    if path is None:
        path, source = environ.get(PREFIX + "CONFIG"), PREFIX + "CONFIG"
    if path is not None:
        if not path.strip():
            raise _empty(source)  # the file that was meant may hold the keys
        _take_file(found, path, by_name)
    _take_environment(found, environ, by_name)
    for name, value in vars(args).items():
        if name in by_name:
            flag = by_name[name]
            if isinstance(value, list):
                value = [flag.from_text(one, flag.option) for one in value]
            elif isinstance(value, str):
                value = flag.from_text(value, flag.option)
            found.values[name] = value
            found.sources[name] = flag.option
    return found


def _take_file(found: Gathered, path: str, flags: Mapping[str, Flag]) -> None:
    lines = read_yaml(path)
    models = lines.pop("models", [])
    if not isinstance(models, list) or not all(isinstance(one, dict) for one in models):
        raise ConfigError(f"models in {path} must be a list, with lines like `model: ./my-model` in each entry")
    _take_lines(found, lines, path, flags)
    for number, one in enumerate(models, 1):
        found.models.append(Gathered())
        _take_lines(found.models[-1], one, f"model {number} of {path}", flags)


def _take_lines(found: Gathered, lines: Mapping[Any, Any], path: str, flags: Mapping[str, Flag]) -> None:
    for key, value in lines.items():
        name = str(key).replace("-", "_")
        source = f"{key} in {path}"
        if name not in flags:
            hint = did_you_mean(name.replace("_", "-"), (known.replace("_", "-") for known in _shown(flags)))
            raise ConfigError(f"{source} is no flag of quire serve{hint}")
        flag = flags[name]
        if flag.name in found.values:
            raise ConfigError(f"{source} is given twice")
        if value is not None or flag.is_guard:
            found.values[flag.name] = flag.from_yaml(value, source)
            found.sources[flag.name] = source


def _shown(flags: Mapping[str, Flag]) -> list[str]:
    """The names that a suggestion may make: those that --help shows."""
    return [name for name, flag in flags.items() if flag.help is not argparse.SUPPRESS]


def _take_environment(found: Gathered, environ: Mapping[str, str], flags: Mapping[str, Flag]) -> None:
    by_variable = {PREFIX + name.upper(): flag for name, flag in flags.items()}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX) or variable in _OTHER_VARIABLES or variable == PREFIX + "CONFIG":
            continue
        flag = by_variable.get(variable)
        if flag is None:
            if not _KUBERNETES.fullmatch(variable):
                hint = did_you_mean(variable, [PREFIX + name.upper() for name in _shown(flags)])
                found.warnings.append(f"{variable} is set, but no flag has that name{hint}")
            continue
        if variable == "QUIRE_PORT" and text.startswith("tcp://"):
            found.warnings.append(
                f"QUIRE_PORT={text} is what Kubernetes sets beside a service named quire, and is left out: "
                "set enableServiceLinks: false in the pod, or use --port"
            )
            continue
        if not text.strip() and not flag.is_guard:
            continue
        values = text.split() or [text] if flag.is_list else [text]
        read = [flag.from_text(one, variable) for one in values]
        found.values[flag.name] = read if flag.is_list else read[0]
        found.sources[flag.name] = variable


def read_yaml(path: str) -> dict[Any, Any]:
    try:
        import yaml
    except ImportError:
        raise ConfigError(f"--config needs PyYAML: {install_hint('server')}") from None

    class Loader(yaml.SafeLoader):  # type: ignore[misc]
        """Plain YAML takes the last of two equal keys in silence."""

        def compose_mapping_node(self, anchor: Any) -> Any:
            # As written: once `<<` has merged another mapping in, a key may stand there twice with good reason.
            node = super().compose_mapping_node(anchor)
            keys = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
            for key, number in keys.most_common(1):
                if number > 1:
                    raise ConfigError(f"{key} in {path} is given twice")
            return node

    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
        # A subclass of SafeLoader, so it makes nothing but plain values.
        found = yaml.load(text, Loader=Loader)
    except OSError as error:
        raise ConfigError(f"--config {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark is not None else ""
        # Without the word at fault: an unquoted password that begins with * or ! is one.
        problem = re.sub(r"\b(alias|anchor|tag|handle) '.*'", r"\1", str(getattr(error, "problem", error)))
        raise ConfigError(f"--config {path} is not valid YAML{where}: {' '.join(problem.split())}") from None
    except ConfigError:
        raise
    except RecursionError:
        raise ConfigError(f"--config {path} is nested too deeply") from None
    except (ValueError, KeyError):  # PyYAML's own, of a date like 2024-13-45 or a tag like !!int
        raise ConfigError(f"--config {path}: a value is not what it looks like: put text in quotes") from None
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path} must hold lines like `port: 8000`")
    return found
