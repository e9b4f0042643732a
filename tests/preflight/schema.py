"""As much of JSON Schema as the published one uses; a word that is not known here fails."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).parents[2] / "trainer_launch" / "preflight" / "report.schema.json"
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


def violations(document: Any) -> list[str]:
    """Where a document is not as the schema says."""
    return list(_check(document, json.loads(SCHEMA.read_text()), "$"))


def _check(value: Any, schema: dict[str, Any], at: str) -> Iterator[str]:
    for word, said in schema.items():
        if word not in _SILENT:
            yield from globals()[f"_{word}"](value, said, at, schema)


def _type(value: Any, said: Any, at: str, _: Any) -> Iterator[str]:
    kinds = [said] if isinstance(said, str) else said
    is_bool = isinstance(value, bool)
    if not any(isinstance(value, _TYPES[kind]) and is_bool <= (kind == "boolean") for kind in kinds):
        yield f"{at} is {value!r}, not {kinds}"


def _required(value: Any, said: list[str], at: str, _: Any) -> Iterator[str]:
    yield from (f"{at} has no {key}" for key in said if key not in value)


def _properties(value: Any, said: dict[str, Any], at: str, _: Any) -> Iterator[str]:
    for key in value.keys() & said.keys():
        yield from _check(value[key], said[key], f"{at}.{key}")


def _additionalProperties(value: Any, said: bool, at: str, schema: Any) -> Iterator[str]:
    assert said is False
    yield from (f"{at} has {key}" for key in value.keys() - schema["properties"].keys())


def _items(value: Any, said: Any, at: str, _: Any) -> Iterator[str]:
    for number, item in enumerate(value):
        yield from _check(item, said, f"{at}[{number}]")


def _enum(value: Any, said: list[Any], at: str, _: Any) -> Iterator[str]:
    if value not in said:
        yield f"{at} is {value!r}, not one of {said}"


def _const(value: Any, said: Any, at: str, _: Any) -> Iterator[str]:
    if value != said:
        yield f"{at} is {value!r}, not {said!r}"


def _minimum(value: Any, said: float, at: str, _: Any) -> Iterator[str]:
    if value is not None and value < said:
        yield f"{at} is {value}, below {said}"


def _pattern(value: Any, said: str, at: str, _: Any) -> Iterator[str]:
    if not re.search(said, value):
        yield f"{at} is {value!r}, not as {said}"
