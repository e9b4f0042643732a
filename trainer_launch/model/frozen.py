"""Frozen dataclasses that cost little to define: PID 1 loads some hundred and fifty, and makes objects of few.

`dataclasses` compiles six methods for each class. Here all classes share them, and `__init__` is compiled when the
first object of a class is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError
from operator import attrgetter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from dataclasses import replace as replace  # mypy checks the fields of its calls
else:
    _set = object.__setattr__

    def dataclass(*, frozen: bool, slots: bool, kw_only: bool = False) -> Callable[[type], type]:
        """`dataclasses.dataclass` for what is frozen and has slots."""
        if not (frozen and slots):
            raise TypeError("frozen=True and slots=True are needed")
        return lambda cls: _made(cls, kw_only)

    def replace(value: Any, /, **changes: Any) -> Any:
        """A faster `dataclasses.replace`, for dataclasses with slots, no bases and no `__post_init__`."""
        new = object.__new__(type(value))
        for name in value.__slots__:
            _set(new, name, changes[name] if name in changes else getattr(value, name))
        return new


def _made(cls: type, kw_only: bool) -> type:
    for name, method in vars(_Shared).items():
        if callable(method) and name not in vars(cls):
            setattr(cls, name, method)
    made: type = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
    names = [field.name for field in dataclasses.fields(made) if field.compare]
    made._compared = attrgetter(*names) if names else type  # type: ignore[attr-defined]
    return made


class _Shared:
    def __init__(self, *args: Any, **named: Any) -> None:
        cls = next(one for one in type(self).__mro__ if vars(one).get("__init__") is _Shared.__init__)
        cls.__init__ = init = _compiled(cls)  # type: ignore[misc]
        init(self, *args, **named)

    def __repr__(self) -> str:
        words = (f"{name}={getattr(self, name)!r}" for name in _names(self))
        return f"{type(self).__qualname__}({', '.join(words)})"

    def __eq__(self, other: object) -> bool:
        if other.__class__ is not self.__class__:
            return NotImplemented
        told: Any = self
        return bool(told._compared(self) == told._compared(other))

    def __hash__(self) -> int:
        told: Any = self
        return hash(told._compared(self))

    def __setattr__(self, name: str, value: object) -> None:
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def __getstate__(self) -> list[Any]:
        return [getattr(self, name) for name in _names(self)]

    def __setstate__(self, state: list[Any]) -> None:
        for name, value in zip(_names(self), state, strict=True):
            object.__setattr__(self, name, value)


def _names(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value)]


def _compiled(cls: Any) -> Callable[..., None]:
    """Its `__init__`, as `dataclasses` would make it."""
    head, body = ["self"], []
    names: dict[str, Any] = {"_set": object.__setattr__}
    for field in sorted(dataclasses.fields(cls), key=lambda field: bool(field.kw_only)):
        if field.kw_only and "*" not in head:
            head.append("*")
        default, value = f"_default_{field.name}", field.name
        if field.default_factory is not MISSING:
            names[default] = field.default_factory
            value = f"{default}() if {field.name} is _set else {field.name}"
            head.append(f"{field.name}=_set")
        elif field.default is not MISSING:
            names[default] = field.default
            head.append(f"{field.name}={default}")
        else:
            head.append(field.name)
        body.append(f"_set(self, {field.name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("self.__post_init__()")
    exec(f"def __init__({', '.join(head)}):\n    " + "\n    ".join(body or ["pass"]), names)
    made: Callable[..., None] = names["__init__"]
    return made
