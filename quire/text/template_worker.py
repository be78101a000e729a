"""The process that chat templates run in: a program of its own, which imports jinja2 and nothing of Quire.

A template is somebody else's program, and a loop of it cannot be interrupted in a thread. Here it can be stopped: a
task that takes more processor time than it may ends the process (SIGPROF), memory has a hard limit, and the jinja2
sandbox hides Python's internals. The parent only has to start another one.

A task is a length and marshalled data on stdin, an answer a length and JSON on stdout. Tasks:

    ("compile", key, source, marks)    compile and keep the template under the key
    ("render", key, variables)         the text that it makes

`marks` maps texts in the template's own words to what is written in their place (see `control_tokens.py`).
"""

from __future__ import annotations

import json
import marshal
import os
import re
import signal
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from jinja2 import Template, nodes

HEADER = struct.Struct("<Q")
MEMORY_BYTES = 512 << 20
MAX_TEXT_CHARS = 16 << 20
# Most that one expression of a template may ask for: repetitions, columns of padding, steps of a range.
MAX_REPEATS = 100_000
MAX_MESSAGE_CHARS = 500
_NUM_KEPT = 16
# Calls in which a number is a width or a count; in others it is a value.
_PADDING_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs", "to_bytes"})
_PADDING_FILTERS = ("batch", "center", "indent", "round", "slice", "tojson", "truncate", "wordwrap")
_WIDE = re.compile(r"[0-9]{6,}|\*")  # a width in a format, or one that comes as an argument


class RaisedByTemplate(Exception):
    """The template called raise_exception(...)."""


def make_environment() -> Any:
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """{% generation %}...{% endgeneration %} marks what the assistant said, for training; here it means nothing."""

        tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    def check_counts(what: str, *values: Any) -> None:
        for value in values:
            if isinstance(value, int) and abs(value) > MAX_REPEATS:
                raise SecurityError(f"{what} with {value:.6g}: more than {MAX_REPEATS:,}")

    def check_format(form: Any) -> None:
        if isinstance(form, str) and (wide := _WIDE.search(form)):
            raise SecurityError(f"a format with the width {wide[0][:20]}: more than five digits")

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**", "%"})

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            # jinja2 would print a forbidden attribute as "" and only refuse to go on from it.
            raise SecurityError(f"access to attribute {attribute!r} of {type(obj).__name__!r}")

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if operator == "%":
                check_format(left)
            elif operator == "**" or not (isinstance(left, (int, float)) and isinstance(right, (int, float))):
                check_counts(f"{operator!r}", left, right)
            return super().call_binop(context, operator, left, right)

        def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(obj, "__name__", "")
            if name in _PADDING_METHODS:
                check_counts(name, *args, *kwargs.values())
            return super().call(context, obj, *args, **kwargs)

        def wrap_str_format(self, value: Any) -> Any:
            wrapped = super().wrap_str_format(value)
            if wrapped is not None:
                check_format(value.__self__)
            return wrapped

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])

    def checked(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def outer(*args: Any, **kwargs: Any) -> Any:
            check_counts(name, *args[1:], *kwargs.values())
            return inner(*args, **kwargs)

        outer.__dict__.update(inner.__dict__)  # whether jinja2 hands it the environment
        return outer

    def format_(form: str, *args: Any, **kwargs: Any) -> Any:
        check_format(form)
        return plain_format(form, *args, **kwargs)

    filters, plain_format = environment.filters, environment.filters["format"]
    filters |= {"format": format_, "tojson": _tojson}
    for name in _PADDING_FILTERS:
        filters[name] = checked(name, filters[name])
    del environment.globals["lipsum"]
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own escapes <, > and & for web pages, which a prompt is not.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise RaisedByTemplate(message)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)


class Templates:
    """Compiled templates by key: those that were used last."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Template] = OrderedDict()
        self._environment = make_environment()

    def run(self, task: tuple[Any, ...]) -> dict[str, Any]:
        """The answer to a task. Failures are answers too."""
        from jinja2.exceptions import SecurityError, TemplateSyntaxError

        try:
            kind, key, *rest = task
            if kind == "compile":
                return self._compile(key, *rest)
            template = self._kept.get(key)
            if template is None:
                return {"error": "unknown"}
            self._kept.move_to_end(key)
            return _render(template, *rest)
        except MemoryError:
            return {"error": "memory"}
        except SecurityError as error:
            return _failure("forbidden", str(error))
        except RaisedByTemplate as error:
            return _failure("raised", str(error))
        except TemplateSyntaxError as error:
            return _failure("failed", f"line {error.lineno}: {error.message}")
        except Exception as error:  # whatever a foreign program does wrong
            return _failure("failed", str(error), f" ({type(error).__name__})")

    def _compile(self, key: str, source: str, marks: Mapping[str, str]) -> dict[str, Any]:
        tree = self._environment.parse(source)
        facts = {"wants_parts": _loops_over_content(tree), "takes_strings": _tests_for_string(tree)}
        if marks:
            _mark(tree, marks)
        self._kept[key] = self._environment.from_string(tree)
        if len(self._kept) > _NUM_KEPT:
            self._kept.popitem(last=False)
        return facts


def _failure(kind: str, message: str, what: str = "") -> dict[str, Any]:
    """A template's words, but not a whole conversation of them."""
    cut = message if len(message) <= MAX_MESSAGE_CHARS else message[:MAX_MESSAGE_CHARS] + "..."
    return {"error": kind, "message": cut + what}


def _render(template: Template, variables: dict[str, Any]) -> dict[str, Any]:
    parts: list[str] = []
    num_chars = 0
    for part in template.generate(variables):
        parts.append(part)
        num_chars += len(part)
        if num_chars > MAX_TEXT_CHARS:
            return {"error": "text"}
    return {"text": "".join(parts)}


def _mark(tree: nodes.Template, marks: Mapping[str, str]) -> None:
    from jinja2 import nodes

    longest_first = sorted(marks, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)))

    def marked(text: str) -> str:
        return pattern.sub(lambda found: marks[found[0]], text)

    for data in tree.find_all(nodes.TemplateData):
        data.data = marked(data.data)
    for const in tree.find_all(nodes.Const):
        if isinstance(const.value, str):
            const.value = marked(const.value)


def _loops_over_content(tree: nodes.Template) -> bool:
    """Whether the template walks through a message's parts."""
    from jinja2 import nodes

    for loop in tree.find_all(nodes.For):
        match loop.iter:
            case nodes.Getattr(attr="content") | nodes.Getitem(arg=nodes.Const(value="content")):
                return True
            case nodes.Name(name="content"):
                return True
    return False


def _tests_for_string(tree: nodes.Template) -> bool:
    """Whether the template takes plain text as well."""
    from jinja2 import nodes

    return any(test.name == "string" for test in tree.find_all(nodes.Test))


def serve(tasks: BinaryIO, answers: BinaryIO, cpu_s: float) -> None:
    """Answer tasks until their end, each within that processor time."""
    templates = Templates()
    while len(header := tasks.read(HEADER.size)) == HEADER.size:
        data = tasks.read(HEADER.unpack(header)[0])
        signal.setitimer(signal.ITIMER_PROF, cpu_s)  # it ends the process: a loop hears nothing else
        try:
            answer = json.dumps(templates.run(marshal.loads(data)), ensure_ascii=False).encode("utf-8", "surrogatepass")
        except MemoryError:
            answer = b'{"error": "memory"}'
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.write(HEADER.pack(len(answer)) + answer)
        answers.flush()


def _limit_ourselves() -> None:
    import contextlib
    import resource

    for kind, limit in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS has no RLIMIT_AS
            resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    cpu_s, *sys.path[:0] = sys.argv[1:]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    _limit_ourselves()
    serve(os.fdopen(0, "rb"), os.fdopen(1, "wb"), float(cpu_s))
