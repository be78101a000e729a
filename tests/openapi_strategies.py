"""Random request bodies from an OpenAPI document: such as it allows, and such as it does not."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_EXTREMES = st.sampled_from(
    [0, -1, 1, 2**31 - 1, 2**31, 2**63, -(2**63), 10**40, 1e308, -1e308, 1e-308, 0.5, True, "", "0", [], {}, None, [[]]]
)


def of_schema(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> st.SearchStrategy[Any]:
    """Values that the schema allows. Of numbers many are at a limit."""
    if "$ref" in schema:
        return of_schema(schemas[schema["$ref"].rsplit("/", 1)[1]], schemas)
    if "anyOf" in schema:
        return st.one_of(*(of_schema(one, schemas) for one in schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema.get("type"):
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            low, high = schema.get("minimum", -(2**40)), schema.get("maximum", 2**40)
            return st.sampled_from([low, high]) | st.integers(max(low, -9), min(high, 300))
        case "number":
            low, high = schema.get("minimum", schema.get("exclusiveMinimum", -1e300)), schema.get("maximum", 1e300)
            is_open = "exclusiveMinimum" in schema
            return st.floats(low, high, exclude_min=is_open) | st.floats(
                max(low, 0.0), min(high, 2.0), exclude_min=is_open
            )
        case "string":
            return st.text(min_size=schema.get("minLength", 0), max_size=12)
        case "array":
            most = min(schema.get("maxItems", 4), 4)
            return st.lists(
                of_schema(schema.get("items", {}), schemas), min_size=schema.get("minItems", 0), max_size=most
            )
        case "object" if "properties" in schema:
            required = set(schema.get("required", ()))
            fields = {name: of_schema(field, schemas) for name, field in schema["properties"].items()}
            return st.sets(st.sampled_from(sorted(fields)), max_size=6).flatmap(
                lambda chosen: st.fixed_dictionaries({name: fields[name] for name in sorted(required | chosen)})
            )
        case "object":
            return st.dictionaries(
                st.text(max_size=6), of_schema(schema.get("additionalProperties") or {}, schemas), max_size=3
            )
    return _ANY


@st.composite
def mutated(draw: st.DrawFn, bodies: st.SearchStrategy[Any], names: list[str]) -> bytes:
    """An allowed body with something done to it."""
    body = draw(bodies)
    match draw(st.sampled_from(["replace", "replace", "replace", "nested", "unknown", "drop", "cut", "flip", "other"])):
        case "replace":
            body[draw(st.sampled_from(names))] = draw(_ANY | _EXTREMES)
        case "nested":
            holders = [value for value in body.values() if isinstance(value, (list, dict)) and value]
            if holders:
                holder = draw(st.sampled_from(holders))
                key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
                holder[key] = draw(_ANY | _EXTREMES)
        case "unknown":
            body[draw(st.text(max_size=10))] = draw(_ANY)
        case "drop":
            body.pop(draw(st.sampled_from(names)), None)
        case "cut":
            whole = json.dumps(body).encode()
            return whole[: draw(st.integers(0, len(whole) - 1))]
        case "flip":
            whole = bytearray(json.dumps(body, ensure_ascii=draw(st.booleans())).encode("utf-8", "surrogatepass"))
            whole[draw(st.integers(0, len(whole) - 1))] = draw(st.integers(0, 255))
            return bytes(whole)
        case "other":
            return json.dumps(draw(_ANY)).encode()
    return json.dumps(body).encode()
