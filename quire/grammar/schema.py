"""JSON schemas, checked before they are compiled: what the compiler does not know is named with its place, and what
would cost it seconds is refused by number.

The compiler bounds its own work by fuel, with three exceptions that are counted here: nesting, `multipleOf` (its states
are as many as the number) and optional properties (their cost is quadratic in an object).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from quire.errors import BadRequestError

MAX_DEPTH = 64
MAX_SCHEMA_CHARS = 2**18
MAX_PARTS = 20_000
_MAX_OPTIONAL_SQUARED = 1_000_000  # 1,000 optional properties in one object: a quarter of a second
_MAX_MULTIPLES = 20_000

# Keywords that restrict an answer and that the compiler cannot enforce.
UNSUPPORTED = frozenset(
    {
        *("not", "if", "then", "else", "uniqueItems", "contains", "minContains", "maxContains", "propertyNames"),
        *("dependencies", "dependentRequired", "dependentSchemas", "unevaluatedItems", "unevaluatedProperties"),
        *("additionalItems", "$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "x-guidance"),
    }
)
FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
_SCHEMAS = ("items", "additionalProperties")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAPS = ("properties", "patternProperties", "$defs", "definitions")


def checked_schema(schema: Any, where: str, *, closed: bool = False) -> Any:
    """A copy that the compiler takes as it is meant. `closed`: objects that do not say so have no other properties.

    Raises BadRequestError with the place of what is wrong.
    """
    _check_depth(schema, where)
    if len(json.dumps(schema)) > MAX_SCHEMA_CHARS:
        raise _bad(where, f"a schema may have {MAX_SCHEMA_CHARS:,} characters: make it smaller")
    work = _Work()
    return _checked(schema, where, closed, work)


class _Work:
    """What compiling a schema will cost, as far as the compiler does not count it."""

    def __init__(self) -> None:
        self.num_parts = 0
        self.optional_squared = 0
        self.multiples = 0


def _checked(schema: Any, where: str, closed: bool, work: _Work) -> Any:
    work.num_parts += 1
    if work.num_parts > MAX_PARTS:
        raise _bad(where, f"a schema may have {MAX_PARTS:,} parts: make it smaller")
    if isinstance(schema, bool):
        return schema
    if not isinstance(schema, dict):
        raise _bad(where, f"must be a schema (an object, or true or false), and is {schema!r:.60}")
    for name in schema:
        if name in UNSUPPORTED and schema[name] not in (None, False):
            raise _bad(f"{where}.{name}", f"the keyword {name} is not supported: leave it out")
    made = {name: value for name, value in schema.items() if name not in UNSUPPORTED}
    if "format" in made and _may_be(made, "string") and made["format"] not in FORMATS:
        known = ", ".join(sorted(FORMATS))
        raise _bad(f"{where}.format", f"the format {made['format']!r:.60} is not supported: {known} are")
    _count(made, where, work)
    for name in _SCHEMAS:
        if name in made:
            if name == "items" and isinstance(made[name], list):
                raise _bad(f"{where}.items", "a list of items is called prefixItems now: write that")
            made[name] = _checked(made[name], f"{where}.{name}", closed, work)
    for name in _LISTS:
        if name in made:
            if not isinstance(made[name], list):
                raise _bad(f"{where}.{name}", "must be a list of schemas")
            made[name] = [_checked(one, f"{where}.{name}[{i}]", closed, work) for i, one in enumerate(made[name])]
    for name in _MAPS:
        if name in made:
            if not isinstance(made[name], dict):
                raise _bad(f"{where}.{name}", "must be an object of schemas")
            made[name] = {
                key: _checked(one, f"{where}.{name}.{key:.80}", closed, work) for key, one in made[name].items()
            }
    if closed and _may_be(made, "object") and ("properties" in made or made.get("type") == "object"):
        made.setdefault("additionalProperties", False)
    if "oneOf" in made and "anyOf" not in made and _are_told_apart(made["oneOf"]):
        made["anyOf"] = made.pop("oneOf")  # no answer fits two of them, so it means the same
    return made


def _count(schema: dict[str, Any], where: str, work: _Work) -> None:
    properties, required = schema.get("properties"), schema.get("required")
    if isinstance(properties, dict):
        names = {name for name in required if isinstance(name, str)} if isinstance(required, list) else set()
        work.optional_squared += sum(name not in names for name in properties) ** 2
        if work.optional_squared > _MAX_OPTIONAL_SQUARED:
            raise _bad(f"{where}.properties", "too many optional properties: make them required, or fewer than 1,000")
    step = schema.get("multipleOf")
    if isinstance(step, (int, float)) and not isinstance(step, bool):
        digits = repr(step).partition("e")[0].replace(".", "").strip("-0") or "0"
        work.multiples += int(digits) if len(digits) < 10 else 10**9
        if work.multiples > _MAX_MULTIPLES:
            raise _bad(f"{where}.multipleOf", f"the digits of all multipleOf may add up to {_MAX_MULTIPLES:,}")


def _may_be(schema: dict[str, Any], kind: str) -> bool:
    given = schema.get("type")
    return given is None or given == kind or (isinstance(given, list) and kind in given)


def _are_told_apart(branches: list[Any]) -> bool:
    """Whether all are objects with a required property in common whose values differ: a discriminated union."""
    if not branches or not all(isinstance(one, dict) and one.get("type") == "object" for one in branches):
        return False
    first = branches[0].get("required")
    for name in first if isinstance(first, list) else ():
        seen: list[str] = []
        for one in branches:
            required, properties = one.get("required"), one.get("properties")
            if not isinstance(required, list) or name not in required or not isinstance(properties, dict):
                break
            tag = properties.get(name)
            if not isinstance(tag, dict) or ("const" not in tag and not isinstance(tag.get("enum"), list)):
                break
            seen += [json.dumps(value) for value in ([tag["const"]] if "const" in tag else tag["enum"])]
        else:
            if len(set(seen)) == len(seen):
                return True
    return False


def _check_depth(schema: Any, where: str) -> None:
    """Check how deep a schema is nested, without recursion: it may be deep."""
    level: list[Any] = [schema]
    for _ in range(MAX_DEPTH):
        level = [one for part in level for one in _parts(part)]
        if not level:
            return
    raise _bad(where, f"a schema may be nested {MAX_DEPTH} deep: use $defs and $ref")


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from (one for one in value.values() if isinstance(one, (dict, list)))
    elif isinstance(value, list):
        yield from (one for one in value if isinstance(one, (dict, list)))


def _bad(where: str, what: str) -> BadRequestError:
    return BadRequestError(f"{where}: {what}", param=where)
