"""Frozen dataclasses as JSON objects: written field by field, and read back by the types of their fields.

All that our own processes tell each other is written so: messages of the coordinator, of the cluster preflight and
of the fork server, files of the runtime directory, and what a child is told when it is started. A field holds
numbers, texts, booleans, enums, literals, tuples, mappings, named tuples (lists in JSON) or dataclasses, or None;
`Annotated` with a `Bound` narrows it. Whatever does not fit is a MessageError.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeAlias,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from msgspec import Struct
from msgspec.structs import fields

from trainer_launch.model.errors import InternalError

MAX_LINE_BYTES = 65536  # with its newline
MAX_FILE_BYTES = 1 << 20
MAX_TEXT = 2000  # characters; escaped at their worst they take 24 KB
MAX_ITEMS = 65536
MAX_NUMBER = 2**53  # exact in every JSON reader
_MAX_NAME = 253  # as in DNS
_Reader: TypeAlias = Callable[[Any], Any]
_T = TypeVar("_T")


class MessageError(Exception):
    """What was read is not what was expected; the sentence says why."""


class Bound(NamedTuple):
    """What a field may hold: numbers from `low` to `high`, or texts, tuples and mappings of such a length.

    Without one a text may be as long as its line or file. Only a float without an upper limit may be NaN.
    """

    low: float = 0
    high: float = MAX_NUMBER
    fits: Callable[[Any], bool] | None = None
    expected: str = ""  # in an error, where `fits` says no
    cut: bool = False  # a text that is too long is written as far as it fits


def _is_name(text: str) -> bool:
    return text.isascii() and text.isprintable()


Count: TypeAlias = Annotated[int, Bound()]
Amount: TypeAlias = Annotated[float, Bound(0, 1e12)]
Port: TypeAlias = Annotated[int, Bound(1, 65535)]
# A name goes into logs and orders ranks.
Name: TypeAlias = Annotated[str, Bound(1, _MAX_NAME, _is_name, "printable ASCII")]
Text: TypeAlias = Annotated[str, Bound(0, MAX_TEXT)]
Printable: TypeAlias = Annotated[str, Bound(0, MAX_TEXT, str.isprintable, "printable")]
FreeText: TypeAlias = Annotated[str, Bound(0, MAX_TEXT, cut=True)]


def encode(value: object) -> bytes:
    """A value as a JSON object."""
    return _dumped(_shape(type(value)).values(value))


def decode(kind: type[_T], data: bytes | str, max_bytes: int = MAX_FILE_BYTES) -> _T:
    """The value of this kind that a JSON object is.

    Raises:
        MessageError: it is none.
    """
    return _shape(kind).read(_object(data, max_bytes))  # type: ignore[no-any-return]


class Codec:
    """The messages of one conversation, a JSON object and a newline each; its `kind` is the class's name.

    With a `version`, every message has it, and those of other versions are refused.
    """

    def __init__(self, *kinds: type, version: int | None = None, max_bytes: int = MAX_LINE_BYTES) -> None:
        self._names = {kind: kind.__name__.lower() for kind in kinds}
        self._kinds: dict[str, type] = {name: kind for kind, name in self._names.items()}
        self._head = {} if version is None else {"v": version}
        self._max_bytes = max_bytes

    def encode(self, message: object) -> bytes:
        """Write a message as its line.

        Raises:
            MessageError: it is too long.
        """
        name = self._names[type(message)]
        line = _dumped({**self._head, "kind": name, **_shape(type(message)).values(message)}) + b"\n"
        if len(line) > self._max_bytes:
            raise MessageError(f"a message is at most {self._max_bytes} bytes, this {name} {len(line)}")
        return line

    def decode(self, line: bytes | str) -> Any:
        """Read a line, with or without its newline.

        Raises:
            MessageError: it is no message of this conversation.
        """
        values = _object(line, self._max_bytes)
        for key, version in self._head.items():
            if (told := values.pop(key, None)) != version:
                raise MessageError(f"a message of version {told!r:.20}: expected version {version}")
        name = values.pop("kind", None)
        kind = self._kinds.get(name) if isinstance(name, str) else None
        if kind is None:
            shown = ascii(name[:40]) if isinstance(name, str) else f"of a {type(name).__name__}"
            raise MessageError(f"no message has the kind {shown}")
        return _shape(kind).read(values)


def _dumped(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    """What json does not know itself."""
    if isinstance(value, Enum):
        return value.value
    return dict(value) if isinstance(value, Mapping) else _shape(type(value)).values(value)


def _object(data: bytes | str, max_bytes: int) -> dict[str, Any]:
    if len(data) > max_bytes:
        raise MessageError(f"at most {max_bytes} bytes are expected, found {len(data)}")
    try:
        values = json.loads(data)
    except (ValueError, RecursionError):
        raise MessageError("not JSON") from None
    if not isinstance(values, dict):
        raise MessageError("not a JSON object")
    return values


# -- fields by their types --------------------------------------------------------------------


class _UnfitError(Exception):
    """Its text says what was expected."""


class _Shape:
    def __init__(self, kind: type[Any]) -> None:
        hints = get_type_hints(kind, include_extras=True)
        self._kind = kind
        self._names = tuple(field.name for field in fields(kind))
        self._readers = {name: _reader(hints[name]) for name in self._names}
        self._needed = {one.name for one in fields(kind) if one.required}
        self._cuts = tuple((name, most) for name in self._names if (most := _cut_at(hints[name])) is not None)

    def values(self, value: object) -> dict[str, Any]:
        """What is written of a value."""
        values = {name: getattr(value, name) for name in self._names}
        for name, most in self._cuts:
            values[name] = values[name] and values[name][:most]
        return values

    def read(self, values: Mapping[str, Any]) -> Any:
        """The value, if all fields fit, none is unknown, and none without a default is missing."""
        what, readers = self._kind.__name__.lower(), self._readers
        if not self._needed <= values.keys() <= readers.keys():
            raise MessageError(f"a {what} has the fields {', '.join(readers) or 'none'}")
        try:
            return self._kind(**{name: readers[name](value) for name, value in values.items()})
        except _UnfitError as problem:
            raise MessageError(f"a {what} has a field that is not {problem}") from None


_shapes: dict[type, _Shape] = {}


def _shape(kind: type) -> _Shape:
    found = _shapes.get(kind)
    if found is None:
        found = _shapes[kind] = _Shape(kind)
    return found


def _reader(hint: Any, bound: Bound | None = None) -> _Reader:
    """What checks a value of this type, and makes it of what JSON has for it."""
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _reader(*parts)
    if origin in (Union, UnionType):
        return _optional(parts)
    if origin is tuple and parts[1:] == (...,):
        return _items(_reader(parts[0]), bound or Bound(high=MAX_ITEMS))
    if origin is tuple:
        return _row(tuple, list(map(_reader, parts)))
    if origin is Literal or (isinstance(hint, type) and issubclass(hint, Enum)):
        return _one_of({one.value if isinstance(one, Enum) else one: one for one in parts or hint})
    if origin is not None and issubclass(origin, Mapping):
        return _mapping(_reader(parts[0]), _reader(parts[1]), bound or Bound(high=MAX_ITEMS))
    if issubclass(hint, tuple):
        hints = get_type_hints(hint, include_extras=True)
        return _row(hint._make, [_reader(hints[name]) for name in hint._fields])
    if isinstance(hint, type) and issubclass(hint, Struct):
        return _nested(hint)
    return _SCALARS[hint](bound)


def _cut_at(hint: Any) -> int | None:
    bounds = [one for one in (hint, *get_args(hint)) if get_origin(one) is Annotated]
    return next((int(one.__metadata__[0].high) for one in bounds if one.__metadata__[0].cut), None)


def _whole(bound: Bound | None) -> _Reader:
    low, high = (-MAX_NUMBER, MAX_NUMBER) if bound is None else (int(bound.low), int(bound.high))

    def read(value: Any) -> int:
        if type(value) is not int or not low <= value <= high:  # a bool is an int, and is not meant
            raise _UnfitError(f"a number from {low} to {high}")
        return value

    return read


def _real(bound: Bound | None) -> _Reader:
    low, high = (-1e12, 1e12) if bound is None else (bound.low, bound.high)

    def read(value: Any) -> float:
        if type(value) in (int, float) and (low <= value <= high or (value != value and high == math.inf)):
            with contextlib.suppress(OverflowError):  # an int may be beyond every float
                return float(value)
        raise _UnfitError(f"a number from {low:g} to {high:g}")

    return read


def _text(bound: Bound | None) -> _Reader:
    low, high, fits, expected, _ = bound or Bound()

    def read(value: Any) -> str:
        if not isinstance(value, str) or not low <= len(value) <= high or (fits is not None and not fits(value)):
            raise _UnfitError(f"a text of {low} to {high} characters{expected and f': {expected}'}")
        return value

    return read


def _flag(_bound: Bound | None) -> _Reader:
    return _one_of({True: True, False: False})


def _one_of(words: Mapping[Any, Any]) -> _Reader:
    kinds = {type(word) for word in words}

    def read(value: Any) -> Any:
        if type(value) not in kinds or value not in words:
            raise _UnfitError(f"one of {', '.join(map(str, words))}")
        return words[value]

    return read


def _optional(parts: Sequence[Any]) -> _Reader:
    (part,) = (part for part in parts if part is not type(None))
    reader = _reader(part)
    return lambda value: None if value is None else reader(value)


def _items(item: _Reader, bound: Bound) -> _Reader:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not bound.low <= len(value) <= bound.high:
            raise _UnfitError(f"a list of {bound.low} to {bound.high} items")
        items = tuple(map(item, value))
        if bound.fits is not None and not bound.fits(items):
            raise _UnfitError(bound.expected)
        return items

    return read


def _row(made: Callable[[list[Any]], Any], readers: Sequence[_Reader]) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, list) or len(value) != len(readers):
            raise _UnfitError(f"a list of {len(readers)} values")
        return made([one(part) for one, part in zip(readers, value, strict=True)])

    return read


def _mapping(key: _Reader, item: _Reader, bound: Bound) -> _Reader:
    def read(value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict) or not bound.low <= len(value) <= bound.high:
            raise _UnfitError(f"an object of {bound.low} to {bound.high} entries")
        return {key(name): item(one) for name, one in value.items()}

    return read


def _nested(kind: type) -> _Reader:
    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _UnfitError("an object")
        return _shape(kind).read(value)

    return read


_SCALARS: Mapping[Any, Callable[[Bound | None], _Reader]] = {int: _whole, float: _real, str: _text, bool: _flag}


# -- launch specs: what a child of ours is told when it is started ------------------------------

# One typed value, as an argument, in a variable or in a file of a private directory (`host/runtime_directory.py`).
# Both ends are of one version of this package, so one that is not ours is a mistake of our own.

SPEC_VERSION = 1


def printed_spec(spec: object) -> str:
    """The spec as one line."""
    return Codec(type(spec), version=SPEC_VERSION, max_bytes=MAX_FILE_BYTES).encode(spec).decode().rstrip()


def parsed_spec(kind: type[_T], text: str | bytes) -> _T:
    """The spec that was printed.

    Raises:
        InternalError: it is none of this kind and version.
    """
    try:
        return Codec(kind, version=SPEC_VERSION, max_bytes=MAX_FILE_BYTES).decode(text)  # type: ignore[no-any-return]
    except MessageError as problem:
        raise InternalError(f"this process was started with an invalid launch spec: {problem}") from None
