"""A JSON variable as one contract reads it: every step checks the type and knows where it is."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from trainer_launch.contracts.source import Source
from trainer_launch.model import Endpoint, Json
from trainer_launch.model.errors import ContractError
from trainer_launch.model.value_parsers import MAX_COUNT, parse_endpoint, parse_host

_WORD = re.compile(r"[A-Za-z0-9_.-]{1,63}")


class JsonView:
    """One value inside a JSON variable, and its place (`task.index`)."""

    def __init__(self, source: Source, variable: str, value: Json, place: str = "") -> None:
        self._source = source
        self._variable = variable
        self.value = value
        self.place = place

    @classmethod
    def of(cls, source: Source, variable: str, field: str) -> JsonView:
        """The whole object that `variable` holds."""
        return cls(source, variable, source.json_object(variable, field))

    def error(self, expected: str) -> ContractError:
        """The one sentence for this value."""
        where = f"{self._variable} at {self.place[:80]}" if self.place else self._variable
        return self._source.error(where, _short(self.value), expected)

    def get(self, key: str) -> JsonView:
        """The value under `key` of an object; None stands for one that is absent."""
        place = f"{self.place}.{key}" if self.place else key
        return JsonView(self._source, self._variable, self.mapping().get(key), place)

    def mapping(self) -> Mapping[str, Json]:
        """This value as an object."""
        if not isinstance(self.value, dict):
            raise self.error("a JSON object")
        return self.value

    def items(self) -> tuple[tuple[str, JsonView], ...]:
        """The entries of an object, by words; in their order, as Go writes them: who wrote it may not have."""
        if not all(_WORD.fullmatch(key) for key in self.mapping()):
            raise self.error("keys of letters, digits, '_', '.' and '-'")
        return tuple((key, self.get(key)) for key in sorted(self.mapping()))

    def list(self) -> tuple[JsonView, ...]:
        """The items of a list."""
        if not isinstance(self.value, list):
            raise self.error("a JSON list")
        return tuple(
            JsonView(self._source, self._variable, item, f"{self.place}[{at}]")
            for at, item in enumerate(self.value)
        )

    def word(self) -> str:
        """A short plain text."""
        if not isinstance(self.value, str) or not _WORD.fullmatch(self.value):
            raise self.error("a word of letters, digits, '_', '.' and '-'")
        return self.value

    def index(self) -> int:
        """A whole number of at least 0."""
        return self._number(0, MAX_COUNT)

    def port(self) -> int:
        """A TCP port."""
        return self._number(1, 65535)

    def host(self) -> str:
        """A host name or an IP address."""
        host = parse_host(self.value) if isinstance(self.value, str) else None
        if host is None:
            raise self.error("a host name")
        return host

    def address(self) -> Endpoint:
        """HOST:PORT."""
        endpoint = parse_endpoint(self.value, None, least_port=1) if isinstance(self.value, str) else None
        if endpoint is None:
            raise self.error("HOST:PORT")
        return endpoint

    def _number(self, least: int, most: int) -> int:
        # bool is an int to Python, and 1.0 is not one to the controllers
        if type(self.value) is not int or not least <= self.value <= most:
            raise self.error(f"a whole number from {least} to {most}")
        return self.value


def _short(value: Json) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value)
    except (ValueError, RecursionError):  # a number too long to print, or a nest too deep
        return f"a {type(value).__name__}"
