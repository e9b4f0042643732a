"""As much of JSON Schema as the published ones use; a word that is not known here fails.

Stricter than the schemas: an object that does not say `additionalProperties` has no others, so that what is new is
published with the change that makes it. Readers have to bear new keys.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

SCHEMAS = Path(__file__).parents[2] / "trainer_launch" / "schemas"
NAMES = sorted(path.name.partition(".")[0] for path in SCHEMAS.glob("*.schema.json"))
_SILENT = {"$schema", "title", "description"}
_TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
    "integer": int,
    "number": (int, float),
}


@cache
def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    return loaded


def violations(name: str, document: Any) -> list[str]:
    """Where a document is not as the schema of that name says."""
    return list(_check(document, schema(name), "$"))


def _check(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    for word, said in schema.items():
        if word not in _SILENT:
            yield from globals()[f"_{word}"](value, said, at, schema)
    if isinstance(value, dict) and "properties" in schema and "additionalProperties" not in schema:
        yield from _additionalProperties(value, False, at, schema)


def _type(value: Any, said: Any, at: str, _: Any) -> Iterator[str]:
    kinds = [said] if isinstance(said, str) else said
    is_bool = isinstance(value, bool)
    if not any(isinstance(value, _TYPES[kind]) and is_bool <= (kind == "boolean") for kind in kinds):
        yield f"{at} is {value!r}, not {kinds}"


def _required(value: Any, said: list[str], at: str, _: Any) -> Iterator[str]:
    if isinstance(value, dict):
        yield from (f"{at} has no {key}" for key in said if key not in value)


def _properties(value: Any, said: dict[str, Any], at: str, _: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key in value.keys() & said.keys():
            yield from _check(value[key], said[key], f"{at}.{key}")


def _additionalProperties(value: Any, said: Any, at: str, schema: Any) -> Iterator[str]:
    for key in value.keys() - schema.get("properties", {}).keys() if isinstance(value, dict) else ():
        if said is False:
            yield f"{at} has {key}"
        elif said is not True:
            yield from _check(value[key], said, f"{at}.{key}")


def _items(value: Any, said: Any, at: str, _: Any) -> Iterator[str]:
    for number, item in enumerate(value or ()):
        yield from _check(item, said, f"{at}[{number}]")


def _prefixItems(value: Any, said: list[Any], at: str, _: Any) -> Iterator[str]:
    for number, (item, schema) in enumerate(zip(value or (), said, strict=False)):
        yield from _check(item, schema, f"{at}[{number}]")


def _minItems(value: Any, said: int, at: str, _: Any) -> Iterator[str]:
    if value is not None and len(value) < said:
        yield f"{at} has {len(value)} items, fewer than {said}"


def _maxItems(value: Any, said: int, at: str, _: Any) -> Iterator[str]:
    if value is not None and len(value) > said:
        yield f"{at} has {len(value)} items, more than {said}"


def _oneOf(value: Any, said: list[Any], at: str, _: Any) -> Iterator[str]:
    """Of alternatives that a constant tells apart, the one that is meant speaks."""
    found = [list(_check(value, schema, at)) for schema in said]
    if sum(not wrong for wrong in found) != 1:
        yield from min(found, key=lambda wrong: (any("not '" in text for text in wrong), len(wrong)), default=())


def _enum(value: Any, said: list[Any], at: str, _: Any) -> Iterator[str]:
    if value not in said:
        yield f"{at} is {value!r}, not one of {said}"


def _const(value: Any, said: Any, at: str, _: Any) -> Iterator[str]:
    if value != said:
        yield f"{at} is {value!r}, not {said!r}"


def _minimum(value: Any, said: float, at: str, _: Any) -> Iterator[str]:
    if isinstance(value, int | float) and value < said:
        yield f"{at} is {value}, below {said}"


def _pattern(value: Any, said: str, at: str, _: Any) -> Iterator[str]:
    if not re.search(said, value):
        yield f"{at} is {value!r}, not as {said}"
