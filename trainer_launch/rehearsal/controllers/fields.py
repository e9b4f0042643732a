"""One place in a manifest: its value, its path and its file, so that every complaint can say where. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trainer_launch.model.errors import UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.value_parsers import MAX_COUNT, shown

T = TypeVar("T")

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")

_OF_PODS = ("containers", "initContainers", "volumes", "restartPolicy", "terminationGracePeriodSeconds")


class _Required:
    """Stands for "no default": the field has to be there."""


REQUIRED = _Required()


@dataclass(frozen=True, slots=True)
class Field:
    """A value of a manifest; None stands for a field that is absent, as null does in Kubernetes."""

    value: Any
    path: str
    where: str  # file, document, kind and name

    def bad(self, expected: str, found: object | None = None) -> UsageError:
        """The one sentence about this field."""
        value = self.value if found is None else found
        text = "missing" if value is None else _said(value)
        return UsageError(f"{self.where}: {self.path or 'the document'} is {text}; expected {expected}")

    @property
    def given(self) -> bool:
        """Whether the field is there."""
        return self.value is not None

    # -- down -----------------------------------------------------------------------------------

    def get(self, *keys: str) -> Field:
        """A field below this one, absent when any on the way is."""
        found = self
        for key in keys:
            inner = found.mapping().get(key)
            found = Field(inner, f"{found.path}.{key}" if found.path else key, self.where)
        return found

    def items(self) -> list[Field]:
        """The members of a list; none when it is absent."""
        if self.value is None:
            return []
        if not isinstance(self.value, list):
            raise self.bad("a list")
        return [Field(value, f"{self.path}[{index}]", self.where) for index, value in enumerate(self.value)]

    def mapping(self) -> Mapping[str, Any]:
        """The keys and values of an object; none when it is absent."""
        if self.value is None:
            return {}
        if not isinstance(self.value, dict):
            raise self.bad("an object")
        for key in self.value:
            if not isinstance(key, str):
                raise self.bad("keys that are strings", key)
        return self.value

    def fields(self) -> list[tuple[str, Field]]:
        """The members of an object by name."""
        return [(key, self.get(key)) for key in self.mapping()]

    def only(self, known: Iterable[str]) -> None:
        """Refuse a field that nobody knows: a misspelled one would silently mean nothing."""
        words = tuple(known)
        for key in self.mapping():
            if key not in words:
                near = did_you_mean(key, words)
                advice = f"; {near}" if near else "; correct its name or remove it"
                if key in _OF_PODS and "replicatedJobs" in words:
                    advice = "; a pod's fields belong to replicatedJobs[].template.spec.template.spec"
                raise UsageError(f"{self.where}: unknown field {self.get(key).path}{advice}")

    # -- leaves ---------------------------------------------------------------------------------

    def text(self, default: str | _Required = REQUIRED) -> str:
        """A text."""
        if self.value is None:
            return self._default(default, "a string")
        if not isinstance(self.value, str):
            raise self.bad("a string; quote it" if isinstance(self.value, bool | int | float) else "a string")
        if "\0" in self.value:
            raise self.bad("a string without NUL")
        return self.value

    def name(self, default: str | _Required = REQUIRED) -> str:
        """What an object, container or volume may be called; it becomes a part of paths and host names."""
        found = self.text(default)
        if self.value is not None and _NAME.fullmatch(found) is None:
            raise self.bad("a name of letters, digits, '-' and '.', as in my-job, '-' and '.' only inside")
        return found

    def number(self, default: int | _Required = REQUIRED, *, least: int = 0, most: int = MAX_COUNT) -> int:
        """A whole number from `least` to `most`."""
        expected = f"a whole number from {least} to {most}"
        if self.value is None:
            return self._default(default, expected)
        if isinstance(self.value, bool) or not isinstance(self.value, int) or not least <= self.value <= most:
            raise self.bad(expected)
        return self.value

    def flag(self, default: bool = False) -> bool:
        """true or false."""
        if self.value is None:
            return default
        if not isinstance(self.value, bool):
            raise self.bad("true or false")
        return self.value

    def choice(self, words: tuple[str, ...], default: str | _Required = REQUIRED) -> str:
        """One of these words."""
        found = self.text(default)
        if found not in words and self.value is not None:
            raise self.bad(f"one of {', '.join(words)}")
        return found

    def texts(self) -> tuple[str, ...]:
        """A list of texts."""
        return tuple(item.text() for item in self.items())

    def _default(self, default: T | _Required, expected: str) -> T:
        if isinstance(default, _Required):
            raise self.bad(expected)
        return default


class _Unknown:
    """Stands for a field whose value is nobody's business."""


HIDDEN = _Unknown()


def _said(value: object) -> str:
    if isinstance(value, _Unknown):
        return "there"
    if isinstance(value, str):
        return shown(value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return f"the number {str(value)[:40]}"
    return "an object" if isinstance(value, dict) else f"a {type(value).__name__}"
