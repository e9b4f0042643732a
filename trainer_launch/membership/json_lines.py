"""Messages as lines of JSON: a set of frozen values, each with a check for every field."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any

from trainer_launch.membership.field_checks import MAX_TEXT, Check, UnfitError

MAX_LINE_BYTES = 65536  # with its newline


class ProtocolError(Exception):
    """A line is not a message of ours; the sentence says why."""


class Vocabulary:
    """The messages of one conversation. A message's kind is its class's name, in small letters."""

    def __init__(self, checks: Mapping[type, Mapping[str, Check]], free_texts: Collection[str] = ()) -> None:
        self._checks = checks
        self._free_texts = frozenset(free_texts)  # fields that may be cut
        self._kinds = {made: made.__name__.lower() for made in checks}
        self._classes: dict[str, type[Any]] = {kind: made for made, kind in self._kinds.items()}
        self._names = {made: tuple(field.name for field in fields(made)) for made in checks}

    def render(self, message: object) -> bytes:
        """Write a message as its line; free text that is too long is cut."""
        kind = self._kinds[type(message)]
        values = {key: getattr(message, key) for key in self._names[type(message)]}
        for key in self._free_texts & values.keys():
            values[key] = values[key] and values[key][:MAX_TEXT]
        line = json.dumps({"kind": kind, **values}, separators=(",", ":")).encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ProtocolError(f"a message is at most {MAX_LINE_BYTES} bytes, this {kind} {len(line)}")
        return line

    def read(self, line: bytes) -> tuple[type[Any], dict[str, Any]]:
        """A line's message and its fields, which are not checked yet; with or without its newline."""
        if len(line) > MAX_LINE_BYTES:
            raise ProtocolError(f"a line is at most {MAX_LINE_BYTES} bytes, found {len(line)}")
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
            raise ProtocolError("not JSON") from None
        if not isinstance(values, dict):
            raise ProtocolError("not a JSON object")
        kind = values.pop("kind", None)
        made = self._classes.get(kind) if isinstance(kind, str) else None
        if made is None:
            shown = ascii(kind[:40]) if isinstance(kind, str) else f"of a {type(kind).__name__}"
            raise ProtocolError(f"no message has the kind {shown}")
        return made, values

    def make(self, made: type[Any], values: Mapping[str, Any]) -> Any:
        """The value, if all of its fields are there and fit."""
        checks, kind = self._checks[made], self._kinds[made]
        if values.keys() != checks.keys():
            raise ProtocolError(f"a {kind} has the fields {', '.join(checks) or 'none'}")
        try:
            return made(**{key: check(values[key]) for key, check in checks.items()})
        except UnfitError as problem:
            raise ProtocolError(f"a {kind} has a field that is not {problem}") from None
