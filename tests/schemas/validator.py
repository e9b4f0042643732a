"""Documents against the published schemas, by the `jsonschema` package.

Stricter than they are: an object that does not say `additionalProperties` has no others, so that what is new is
published with the change that makes it. Readers have to bear new keys.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError

SCHEMAS = Path(__file__).parents[2] / "trainer_launch" / "schemas"
NAMES = sorted(path.name.partition(".")[0] for path in SCHEMAS.glob("*.schema.json"))


@cache
def schema(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((SCHEMAS / f"{name}.schema.json").read_text())
    return loaded


EVENTS = [one["properties"]["event"]["const"] for one in schema("event")["oneOf"]]


def violations(name: str, document: Any) -> list[str]:
    """Where a document is not as the schema of that name says."""
    return [text for error in _validator(name).iter_errors(document) for text in _sentences(error)]


@cache
def _validator(name: str) -> Draft202012Validator:
    return Draft202012Validator(_closed(schema(name)))


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(inner) for key, inner in schema.items()}
    # A property may be called `properties`; a schema of an object says that it is one.
    if "object" in schema.get("type", ()) and "properties" in schema:
        closed.setdefault("additionalProperties", False)
    return closed


def _sentences(error: ValidationError) -> Iterator[str]:
    """Of alternatives that a constant tells apart, the one that is meant speaks."""
    if error.validator != "oneOf" or not error.context:
        yield f"{error.json_path}: {error.message}"
        return
    found = [list(errors) for _, errors in groupby(error.context, lambda one: one.relative_schema_path[0])]
    for nearest in min(found, key=lambda errors: (any(one.validator == "const" for one in errors), len(errors))):
        yield from _sentences(nearest)
