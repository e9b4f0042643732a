"""Says what of a manifest the operators' published schemas would refuse, unknown fields included, by `jsonschema`.

What is known is data, schemas/*.json: types distilled from published classes by tests/frameworks/distil.py, or by
hand where their source says so, and constraints.json, which also says what is not checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, ValidationError, validators

FOLDER = Path(__file__).with_name("schemas")
TYPE_FILES = ("kubernetes", "trainer", "training-operator", "mpi-operator", "other")
_QUANTITY = r"^[+-]?(\d+|\d+\.\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?$"
_PLAIN: Mapping[str, Mapping[str, Any]] = {
    **{name: {"type": name} for name in ("string", "integer", "boolean", "number")},
    "int-or-string": {"type": ["integer", "string"]},
    "quantity": {"type": ["number", "string"], "pattern": _QUANTITY},
    "any": {},
}
_ONE_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")


@cache
def types() -> Mapping[str, Mapping[str, str]]:
    """Fields by type."""
    found: dict[str, Mapping[str, str]] = {}
    for name in TYPE_FILES:
        for key, fields in json.loads((FOLDER / f"{name}.json").read_text())["types"].items():
            assert key not in found, f"two types are called {key}"
            found[key] = fields
    return found


@cache
def constraints() -> Mapping[str, Any]:
    """What holds beside the types."""
    found: Mapping[str, Any] = json.loads((FOLDER / "constraints.json").read_text())
    return found


def wrong_in(document: Any) -> list[str]:
    """What is wrong, a sentence for each; nothing: it would be taken, as far as is checked."""
    if not isinstance(document, dict) or not isinstance(document.get("kind"), str):
        return ["this is no object of Kubernetes: it has no kind"]
    version, kind = document.get("apiVersion"), document["kind"]
    known = constraints()["kinds"].get(version, ())
    name = {name.rpartition(".")[2]: name for name in known}.get(kind)
    if name is None:
        return [f"{kind} of {version} is not known"]
    errors = _validator(name).iter_errors(_without_nulls(document))
    wrong = [f"{kind}{error.json_path.removeprefix('$')}: {error.message}" for error in errors]
    given = document.get("metadata", {}).get("name")
    if given is None:
        wrong.append(f"{kind}.metadata: 'name' is a required property")
    elif name in constraints()["names_of_one_label"] and not _ONE_LABEL.fullmatch(str(given)):
        wrong.append(f"{kind}.metadata.name: {given!r} is not a DNS label that begins with a letter")
    return wrong


def _without_nulls(value: Any) -> Any:
    """A field that is null is as good as none."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


@cache
def _validator(name: str) -> Any:
    extended = validators.extend(Draft202012Validator, {"uniqueBy": _unique_by})
    return extended({"$ref": f"#/$defs/{name}", "$defs": {key: _object(key) for key in types()}})


def _unique_by(_validator: object, key: str, items: Any, _schema: object) -> Iterator[ValidationError]:
    names = [item.get(key) for item in items if isinstance(item, dict)] if isinstance(items, list) else []
    for name in sorted({str(name) for name in names if names.count(name) > 1}):
        yield ValidationError(f"{names.count(name)} items have the same {key} {name!r}")


def _object(name: str) -> Mapping[str, Any]:
    fields = {key.rstrip("!"): words for key, words in types()[name].items()}
    rules = {key: constraints()["fields"].get(f"{name}.{key}", {}) for key in fields}
    one_too_many = combinations(constraints()["at_most_one"].get(name, ()), 2)
    return {
        "type": "object",
        "properties": {key: {**_value(words), **dict(_bounds(rules[key]))} for key, words in fields.items()},
        "required": [key for key in fields if f"{key}!" in types()[name] or rules[key].get("required")],
        "additionalProperties": False,
        "allOf": [{"not": {"required": list(pair)}} for pair in one_too_many],
    }


def _value(words: str) -> Mapping[str, Any]:
    if words.startswith("["):
        return {"type": "array", "items": _value(words[1:-1])}
    if words.startswith("{"):
        return {"type": "object", "additionalProperties": _value(words[1:-1])}
    return _PLAIN.get(words) or {"$ref": f"#/$defs/{words}"} if words != "any" else {}


def _bounds(rule: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A rule of constraints.json in the words of JSON Schema, and one more: `uniqueBy` a key of the items."""
    words = {
        "one_of": "enum",
        "least": "minimum",
        "most": "maximum",
        "most_items": "maxItems",
        "unique": "uniqueBy",
        "pattern": "pattern",
    }
    for name, wanted in rule.items():
        if name in words:
            yield words[name], f"^(?:{wanted})$" if name == "pattern" else wanted
        elif name == "length":
            yield from zip(("minLength", "maxLength"), wanted, strict=True)
        elif name == "keys":
            yield "propertyNames", {"enum": wanted}
        elif name == "items_of":
            yield "items", {"enum": wanted}
        else:
            assert name == "required", name
