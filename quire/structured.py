"""StructuredOutputsParams: what an answer must look like, under vLLM's names."""

from __future__ import annotations

import dataclasses
import enum
import json as jsonlib
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quire.errors import BadRequestError
from quire.refusals import STRUCTURED, reads_arguments, sift

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
MAX_CHOICES = 4096
MAX_TEXT_CHARS = 2**18  # of a schema, a regular expression or a grammar


def _understood(given: dict[str, Any]) -> dict[str, Any]:
    return sift(given, STRUCTURED, StructuredOutputsParams.__dataclass_fields__)


@reads_arguments(_understood)
@dataclass(slots=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one of `KINDS`. A schema may be JSON text, a dict, a Pydantic model or a dataclass."""

    json: str | bool | dict[str, Any] | type | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None  # Lark, GBNF or EBNF
    json_object: bool | None = None
    structural_tag: str | dict[str, Any] | None = None
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        self.json_object = self.json_object or None
        given = [name for name in KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise _bad("", f"needs exactly one of {', '.join(KINDS)}, and has {found}")
        if self.json is not None:
            self.json = _schema(self.json)
        if isinstance(self.structural_tag, str):
            self.structural_tag = _parsed(self.structural_tag, "structural_tag")
        if self.structural_tag is not None and not isinstance(self.structural_tag, dict):
            raise _bad("structural_tag", "must be an object, or JSON text of one")
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _bad(name, f"must be a non-empty text, got {value!r:.60}")
            if value is not None and len(value) > MAX_TEXT_CHARS:
                raise _bad(name, f"may have {MAX_TEXT_CHARS:,} characters, and has {len(value):,}")
        for name in ("disable_any_whitespace", "disable_additional_properties", "json_object"):
            if not isinstance(getattr(self, name), (bool, type(None))):
                raise _bad(name, f"must be true or false, got {getattr(self, name)!r:.60}")
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise _bad("whitespace_pattern", "contradicts disable_any_whitespace: give one")
        if not given[0].startswith("json"):
            for name in ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern"):
                if getattr(self, name):
                    raise _bad(name, f"is for JSON, and {given[0]} is given")
        if self.choice is not None:
            self._check_choice()

    def to_json(self) -> str:
        """All of it as text: what caches know it by."""
        try:
            return jsonlib.dumps({name: getattr(self, name) for name in self.__dataclass_fields__}, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise _bad("", f"must be plain JSON data: {error}") from None

    @classmethod
    def from_json(cls, text: str) -> StructuredOutputsParams:
        return cls(**jsonlib.loads(text))

    def _check_choice(self) -> None:
        choice = self.choice
        is_list = isinstance(choice, Sequence) and not isinstance(choice, (str, bytes))
        if not is_list or not choice or any(not isinstance(one, str) or not one for one in choice):
            raise _bad("choice", "must be a list of non-empty texts")
        if len(choice) > MAX_CHOICES or sum(map(len, choice)) > MAX_TEXT_CHARS:
            raise _bad("choice", f"may have {MAX_CHOICES:,} texts of {MAX_TEXT_CHARS:,} characters together")
        self.choice = list(dict.fromkeys(choice))


def _schema(given: Any) -> Any:
    """A schema as plain data."""
    if isinstance(given, str):
        given = _parsed(given, "json")
    elif isinstance(given, type) or get_origin(given) is not None:
        make = getattr(given, "model_json_schema", None)
        given = make() if make is not None else json_schema_of(given)
    elif isinstance(given, Mapping):
        given = dict(given)
    if not isinstance(given, (dict, bool)):
        raise _bad("json", f"must be a JSON schema: an object, or true or false; got {given!r:.60}")
    return given


def _parsed(text: str, name: str) -> Any:
    if len(text) > MAX_TEXT_CHARS:
        raise _bad(name, f"may have {MAX_TEXT_CHARS:,} characters, and has {len(text):,}")
    try:
        return jsonlib.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(name, f"is no JSON: {error}") from None


def _bad(name: str, what: str) -> BadRequestError:
    where = f"structured_outputs.{name}" if name else "structured_outputs"
    return BadRequestError(f"{where} {what}", param=where)


_PLAIN_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}


def json_schema_of(kind: Any) -> dict[str, Any]:
    """The schema of a dataclass, and of the types that its fields may have."""
    defs: dict[str, Any] = {}
    schema = _of_type(kind, defs)
    return schema | {"$defs": defs} if defs else schema


def _of_type(kind: Any, defs: dict[str, Any]) -> dict[str, Any]:
    origin, args = get_origin(kind), get_args(kind)
    if kind in _PLAIN_TYPES:
        return {"type": _PLAIN_TYPES[kind]}
    if kind is Any:
        return {}
    if kind in (list, dict):
        return {"type": "array" if kind is list else "object"}
    if origin is Literal:
        return {"enum": list(args)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_of_type(one, defs) for one in args]}
    if origin is list:
        return {"type": "array", "items": _of_type(args[0], defs)}
    if origin is dict and args[0] is str:
        return {"type": "object", "additionalProperties": _of_type(args[1], defs)}
    if origin is tuple and Ellipsis not in args:
        items = [_of_type(one, defs) for one in args]
        return {"type": "array", "prefixItems": items, "minItems": len(items), "items": False}
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.value for member in kind]}
    if isinstance(kind, type) and hasattr(kind, "model_json_schema"):
        raise _bad("json", f"{kind.__name__} is a Pydantic model inside a dataclass: hand in a Pydantic model of both")
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _of_dataclass(kind, defs)
    raise _bad("json", f"has no schema for {kind!r}: give a dataclass, a Pydantic model or a JSON schema")


def _of_dataclass(kind: type, defs: dict[str, Any]) -> dict[str, Any]:
    name = kind.__qualname__.replace("<locals>", "").replace("/", "")
    if name not in defs:
        defs[name] = {}  # one that refers to itself finds this
        hints = get_type_hints(kind)
        given = dataclasses.fields(kind)
        none = dataclasses.MISSING
        defs[name] = {
            "type": "object",
            "properties": {field.name: _of_type(hints[field.name], defs) for field in given},
            "required": [field.name for field in given if field.default is none and field.default_factory is none],
            "additionalProperties": False,
        }
    return {"$ref": f"#/$defs/{name}"}
