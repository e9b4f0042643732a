"""Says what of a manifest the operators' published schemas would refuse, unknown fields included.

What is known is data, schemas/*.json: types distilled from published classes by tests/frameworks/distil.py, or by
hand where their source says so, and constraints.json, which also says what is not checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("schemas")
TYPE_FILES = ("kubernetes", "trainer", "training-operator", "mpi-operator", "other")
_PLAIN = {
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
    "number": (int, float),
    "int-or-string": (int, str),
    "quantity": (int, float, str),
}
_QUANTITY = re.compile(r"[+-]?(\d+|\d+\.\d*|\.\d+)([numkMGTPE]|[KMGTPE]i|[eE][+-]?\d+)?")
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
    short = {name.rpartition(".")[2]: name for name in known}
    if kind not in short:
        return [f"{kind} of {version} is not known"]
    name = short[kind]
    wrong = list(_object(document, name, kind))
    given = document.get("metadata", {}).get("name")
    if given is None:
        wrong.append(f"{kind}.metadata.name is missing")
    elif name in constraints()["names_of_one_label"] and not _ONE_LABEL.fullmatch(str(given)):
        wrong.append(f"{kind}.metadata.name: {given!r} is not a DNS label that begins with a letter")
    return wrong


def _object(given: Any, name: str, path: str) -> Iterator[str]:
    if not isinstance(given, dict):
        yield f"{path} is {given!r}; expected a mapping ({name})"
        return
    fields = {key.rstrip("!"): (words, key.endswith("!")) for key, words in types()[name].items()}
    for key, (_, required) in fields.items():
        required = required or bool(_rule(name, key).get("required"))
        if required and given.get(key) is None:
            yield f"{path}.{key} is missing"
    for key, value in given.items():
        here = f"{path}.{key}"
        if key not in fields:
            yield f"{here} is not a field of {name}"
        elif value is not None:
            wrong = list(_value(value, fields[key][0], here))
            yield from wrong or _bounds(value, _rule(name, key), here)
    chosen = [key for key in constraints()["at_most_one"].get(name, ()) if given.get(key) is not None]
    if len(chosen) > 1:
        yield f"{path} has {' and '.join(chosen)}; at most one of them may be there"


def _rule(name: str, key: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = constraints()["fields"].get(f"{name}.{key}", {})
    return found


def _value(given: Any, words: str, path: str) -> Iterator[str]:
    if words.startswith("["):
        if not isinstance(given, list):
            yield f"{path} is {given!r}; expected a list"
            return
        for place, one in enumerate(given):
            yield from _value(one, words[1:-1], f"{path}[{place}]")
    elif words.startswith("{"):
        if not isinstance(given, dict):
            yield f"{path} is {given!r}; expected a mapping"
            return
        for key, one in given.items():
            yield from _value(one, words[1:-1], f"{path}.{key}")
    elif words in _PLAIN:
        if not isinstance(given, _PLAIN[words]) or (isinstance(given, bool) and words != "boolean"):
            yield f"{path} is {given!r}; expected a value of the type {words}"
        elif words == "quantity" and not _QUANTITY.fullmatch(str(given)):
            yield f"{path} is {given!r}; expected a quantity, such as 500m or 8Gi"
    elif words != "any":
        yield from _object(given, words, path)


def _bounds(given: Any, rule: Mapping[str, Any], path: str) -> Iterator[str]:
    checks = {
        "one_of": lambda wanted: given in wanted,
        "items_of": lambda wanted: set(given) <= set(wanted),
        "keys": lambda wanted: given.keys() <= set(wanted),
        "pattern": lambda wanted: re.fullmatch(wanted, str(given)) is not None,
        "length": lambda wanted: wanted[0] <= len(str(given)) <= wanted[1],
        "least": lambda wanted: given >= wanted,
        "most": lambda wanted: given <= wanted,
        "most_items": lambda wanted: len(given) <= wanted,
        "unique": lambda wanted: len({one[wanted] for one in given}) == len(given),
        "required": lambda _: True,
    }
    for name, wanted in rule.items():
        if not checks[name](wanted):
            yield f"{path}: {given!r} breaks {name} {wanted}"
