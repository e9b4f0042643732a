"""One setting: its type, its default, its limits, and how text becomes its value. Pure."""

from __future__ import annotations

import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_TRUE, _FALSE = ("1", "true", "t", "yes", "y", "on"), ("0", "false", "f", "no", "n", "off")


class UnfitError(ValueError):
    """A value that does not fit; the text says what is expected."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a flag or variable may say. A minimum is `ge`, or `gt` where it is itself excluded."""

    default: Any
    description: str
    ge: float | None = None
    gt: float | None = None
    le: float | None = None

    def value_of(self, annotation: Any, value: object) -> object:
        """Text as the type of the setting; what is no text has it already.

        Raises:
            UnfitError: it is of another type, or beyond the limits.
        """
        if not isinstance(value, str):
            return value
        if typing.get_origin(annotation) is typing.Literal:
            return _one_of(typing.get_args(annotation), value)
        (kind,) = {*(typing.get_args(annotation) or (annotation,))} - {type(None)}
        if kind is bool:
            return _bool(value)
        return value if kind is str else self._number(kind, value)

    def _number(self, kind: type[int | float], text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")  # fits no limits
        least = self.gt if self.ge is None else self.ge
        above = least is None or (value > least if self.ge is None else value >= least)
        if value == value and above and (self.le is None or value <= self.le):
            return value
        raise UnfitError(f"expected {'a whole number' if kind is int else 'a number'}{self._limits()}")

    def _limits(self) -> str:
        above = f" above {self.gt:.10g}" if self.gt is not None else ""
        from_ = f" from {self.ge:.10g}" if self.ge is not None else ""
        joint = " to " if from_ else ", at most " if above else " of at most "
        return above + from_ + (f"{joint}{self.le:.10g}" if self.le is not None else "")


Field: Callable[..., Any] = Setting  # in a class body it stands for the value that instances have


def _one_of(known: tuple[str, ...], value: str) -> str:
    if value in known:
        return value
    *first, last = map(repr, known)
    raise UnfitError(f"expected {', '.join(first)} or {last}")


def _bool(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise UnfitError("expected true or false")
    return text.lower() in _TRUE
