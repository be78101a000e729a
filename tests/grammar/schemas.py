"""Schemas in the kinds that programs send: made by a generator, each from a number."""

from __future__ import annotations

import random
from typing import Any

FORMATS = ("date-time", "date", "time", "email", "ipv4", "uuid", "hostname")
PATTERNS = ("^[a-z]{2,6}$", "^[A-Z]{3}-[0-9]{2,4}$", "^(red|green|blue)+$", "^#[0-9a-f]{6}$", "[0-9]$", "^a.c$")
WORDS = ("name", "age", "tags", "price", "unit", "é-mail", "a b", "id", "kind", "size", "note", "when")


def schema_of(number: int) -> dict[str, Any]:
    """Every number is another schema; kinds come round in turn."""
    rng = random.Random(number)
    kinds = (_object, _array, _union, _recursive, _referring, _tuple, _intersection, _discriminated)
    return kinds[number % len(kinds)](rng, 2)


def _leaf(rng: random.Random) -> dict[str, Any]:
    match rng.randrange(9):
        case 0:
            return {"type": "string", "maxLength": rng.randint(1, 12)}
        case 1:
            return {"type": "string", "format": rng.choice(FORMATS)}
        case 2:
            return {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 20}
        case 3:
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
        case 4:
            return {"type": "number", "exclusiveMinimum": 0, "maximum": rng.choice((1, 2.5, 100))}
        case 5:
            return {"enum": rng.sample(["a", "b", 1, 2.5, None, True, {"x": [1]}, "c d"], rng.randint(1, 5))}
        case 6:
            return {"const": rng.choice(["fixed", 7, None, False, ["x", 1]])}
        case 7:
            return {"type": rng.choice([["integer", "null"], ["boolean", "null"]]), "maximum": 99, "minimum": -99}
        case _:
            return {"type": "integer", "multipleOf": rng.choice((2, 5, 25)), "minimum": 0, "maximum": 1000}


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    if depth <= 0 or rng.random() < 0.4:
        return _leaf(rng)
    return rng.choice((_object, _array, _union, _tuple))(rng, depth - 1)


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth - 1) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }
    if rng.random() < 0.2:
        made["additionalProperties"] = {"type": "boolean"}
    elif rng.random() < 0.2:
        made["patternProperties"] = {"^x-[a-z]{1,5}$": {"type": "integer", "minimum": 0, "maximum": 9}}
    return made


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    low = rng.randint(0, 2)
    return {"type": "array", "items": _any(rng, depth - 1), "minItems": low, "maxItems": low + rng.randint(0, 2)}


def _tuple(rng: random.Random, depth: int) -> dict[str, Any]:
    items = [_any(rng, depth - 1) for _ in range(rng.randint(1, 3))]
    return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(rng, depth - 1) for _ in range(rng.randint(2, 3))]}


def _recursive(rng: random.Random, depth: int) -> dict[str, Any]:
    node = _object(rng, 1)
    node["properties"]["children"] = {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


def _referring(rng: random.Random, depth: int) -> dict[str, Any]:
    made = _object(rng, depth)
    made["properties"]["other"] = {"$ref": "#/definitions/leaf"}
    made["required"].append("other")
    return made | {"definitions": {"leaf": _leaf(rng)}, "title": "A schema", "description": "with words"}


def _intersection(rng: random.Random, depth: int) -> dict[str, Any]:
    return {
        "allOf": [
            {"type": "object", "properties": {"a": _leaf(rng)}, "required": ["a"]},
            {"type": "object", "properties": {"b": _leaf(rng)}, "required": ["b"], "additionalProperties": True},
        ],
        "properties": {"c": {"type": "boolean"}},
        "type": "object",
    }


def _discriminated(rng: random.Random, depth: int) -> dict[str, Any]:
    def branch(tag: str) -> dict[str, Any]:
        properties = {"kind": {"const": tag}, "value": _leaf(rng)}
        return {"type": "object", "properties": properties, "required": ["kind", "value"]}

    return {"oneOf": [branch(tag) for tag in ("cat", "dog", "bird")]}
