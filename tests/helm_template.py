"""The part of Helm's template language that our chart uses, so that it can be tested where there is no helm."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_WORD = re.compile(r'"[^"]*"|\(|\)|\||:=|,|[^\s()|,]+')


def render(chart: Path, release: str, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Every document of every template, with values changed as by --set."""
    values = yaml.safe_load((chart / "values.yaml").read_text())
    for path, value in changes.items():
        *parents, last = path.split(".")
        place = values
        for name in parents:
            place = place[name]
        place[last] = value
    root = {"Values": values, "Release": {"Name": release}}
    documents = []
    for template in sorted((chart / "templates").glob("*.yaml")):
        text = _Template(template.read_text()).render(root)
        documents += [document for document in yaml.safe_load_all(text) if document]
    return documents


class _Template:
    def __init__(self, text: str) -> None:
        self._pieces: list[tuple[str, str]] = []  # ("text" or "action", what)
        at = 0
        for found in re.finditer(r"\{\{(-?)\s*(.*?)\s*\}\}", text, re.S):
            before = text[at : found.start()]
            self._pieces += [("text", before.rstrip() if found[1] else before), ("action", found[2])]
            at = found.end()
        self._pieces.append(("text", text[at:]))

    def render(self, root: dict[str, Any]) -> str:
        return "".join(self._block(iter(self._pieces), {"$": root}, root))

    def _block(self, pieces: Iterator[tuple[str, str]], names: dict[str, Any], dot: Any) -> list[str]:
        out = []
        for kind, what in pieces:
            if kind == "text":
                out.append(what)
            elif what == "end":
                return out
            elif what.startswith("if "):
                inner = self._until_end(pieces)
                if _evaluate(what[3:], names, dot):
                    out += self._block(iter(inner), names, dot)
            elif what.startswith("range "):
                inner = self._until_end(pieces)
                variables, _, source = what[6:].rpartition(":=")
                items = _evaluate(source, names, dot)
                pairs = items.items() if isinstance(items, dict) else enumerate(items)
                for key, item in sorted(pairs):
                    wanted = [name.strip() for name in variables.split(",") if name.strip()]
                    own = dict(zip(wanted, [item] if len(wanted) == 1 else [key, item], strict=True)) if wanted else {}
                    out += self._block(iter(inner), names | own, item)
            else:
                value = _evaluate(what, names, dot)
                out.append(str(value))
        return out

    def _until_end(self, pieces: Iterator[tuple[str, str]]) -> list[tuple[str, str]]:
        inner, depth = [], 1
        for kind, what in pieces:
            if kind == "action":
                depth += what.startswith(("if ", "range ")) - (what == "end")
                if not depth:
                    break
            inner.append((kind, what))
        return inner


def _evaluate(text: str, names: dict[str, Any], dot: Any) -> Any:
    words = _WORD.findall(text)
    value, rest = _pipeline(words, names, dot)
    assert not rest, f"{rest} is left of {text}"
    return value


def _pipeline(words: list[str], names: dict[str, Any], dot: Any) -> tuple[Any, list[str]]:
    value, has_value = None, False
    while True:
        arguments: list[Any] = []
        while words and words[0] not in ("|", ")"):
            if words[0] == "(":
                inner, words = _pipeline(words[1:], names, dot)
                words = words[1:]
                arguments.append(inner)
            else:
                arguments.append(_atom(words[0], names, dot))
                words = words[1:]
        if has_value:
            arguments.append(value)
        value, has_value = _call(arguments), True
        if not words or words[0] == ")":
            return value, words
        words = words[1:]


class _Function(str):
    """The name of one."""


def _atom(word: str, names: dict[str, Any], dot: Any) -> Any:
    if word.startswith('"'):
        return word[1:-1]
    if word.isdigit():
        return int(word)
    if word.startswith(("$", ".")):
        head, _, path = word.partition(".")
        value = names[head] if head else dot
        for name in filter(None, path.split(".")):
            value = value[name]
        return value
    return _Function(word)


def _call(arguments: list[Any]) -> Any:
    if not isinstance(arguments[0], _Function):
        (value,) = arguments
        return value
    name, *rest = arguments
    match str(name):
        case "quote":
            return json.dumps(str(rest[0]))
        case "toYaml":
            return yaml.safe_dump(rest[0], sort_keys=False).strip()
        case "nindent":
            return "\n" + "\n".join(" " * rest[0] + line for line in rest[1].splitlines())
        case "int":
            return int(rest[0])
        case "until":
            return list(range(rest[0]))
        case "add":
            return rest[0] + rest[1]
        case "div":
            return rest[0] // rest[1]
        case "printf":
            return rest[0].replace("%s", "{}").format(*rest[1:])
    raise AssertionError(f"the templates use {name}, which tests/helm_template.py does not have")
