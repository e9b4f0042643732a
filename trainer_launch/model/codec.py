"""Values as JSON: what our own processes tell each other, read by the types of its fields.

msgspec reads and writes it. Here is what it leaves open: how much is read, long texts, names that are printable,
texts with bytes that are no UTF-8, and one error for whatever does not fit.
"""

from __future__ import annotations

import functools
import json
import threading
from typing import Annotated, Any, Generic, NoReturn, TypeAlias, TypeVar

import msgspec
from msgspec import Meta, Struct

MAX_LINE_BYTES = 65536  # with its newline
MAX_FILE_BYTES = 1 << 20
MAX_TEXT = 2000  # characters; escaped at their worst they take 12 KB
MAX_NUMBER = 2**53  # exact in every JSON reader
MAX_NAME = 253  # as in DNS
MAX_NODES = 65536  # of a job
MAX_RANKS = 1024  # of one node
_MAX_COMPLAINT = 200
_T = TypeVar("_T")
_BUILDING = threading.RLock()

Count: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_NUMBER)]
Whole: TypeAlias = Annotated[int, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Amount: TypeAlias = Annotated[float, Meta(ge=0, le=1e12)]
Real: TypeAlias = Annotated[float, Meta(ge=-1e12, le=1e12)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e15)]
Port: TypeAlias = Annotated[int, Meta(ge=1, le=65535)]
Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
# A name goes into logs and orders ranks.
Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=r"\A[ -~]*\Z")]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]


class MessageError(Exception):
    """The data that was read is not what was expected; the sentence says why."""


class Tagged(Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=str.lower):
    """A message of a conversation, whose kinds are told apart by the names of their classes."""


class Codec(Generic[_T]):
    """The messages of one conversation, a JSON object and a newline each; with `max_text`, texts are cut to it."""

    def __init__(self, kinds: Any, *, max_bytes: int = MAX_LINE_BYTES, max_text: int | None = None) -> None:
        self._kinds = kinds  # a union, which is no type
        self._max_bytes = max_bytes
        self._max_text = max_text

    def encode(self, message: _T) -> bytes:
        """Write a message as its line.

        Raises:
            MessageError: it is too long.
        """
        line = encode(message, self._max_text)
        if len(line) >= self._max_bytes:
            name = type(message).__name__.lower()
            raise MessageError(f"a message is at most {self._max_bytes} bytes, this {name} {len(line) + 1}")
        return line + b"\n"

    def decode(self, line: bytes) -> _T:
        """Read a line, with or without its newline.

        Raises:
            MessageError: it is no message of this conversation.
        """
        return decode(self._kinds, line, self._max_bytes)  # type: ignore[no-any-return]


def encode(value: object, max_text: int | None = None) -> bytes:
    """A value as a JSON object; with `max_text`, texts are cut to so many characters."""
    try:
        data = msgspec.json.encode(value, enc_hook=dict)
        if max_text is not None and len(data) > max_text:
            data = msgspec.json.encode(_cut(msgspec.to_builtins(value, enc_hook=dict), max_text))
        return data
    except UnicodeEncodeError:  # Python's json escapes bytes of file names and variables that are no UTF-8
        plain = _cut(msgspec.to_builtins(value, enc_hook=dict), max_text)
        return json.dumps(plain, separators=(",", ":")).encode()


def decode(kind: type[_T], data: bytes | str, max_bytes: int = MAX_FILE_BYTES) -> _T:
    """The value of this kind that a JSON object is.

    Raises:
        MessageError: it is none.
    """
    if len(data) > max_bytes:
        raise MessageError(f"expected at most {max_bytes} bytes, got {len(data)}")
    try:
        try:
            return decoder(kind).decode(data)  # type: ignore[no-any-return, arg-type]
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:  # no JSON, or a text that `encode` left to Python's json
            return msgspec.convert(json.loads(data, parse_constant=_refuse), kind)
    except msgspec.ValidationError as problem:
        raise MessageError(_complaint(problem)) from None
    except (ValueError, RecursionError):
        raise MessageError("not JSON") from None


def decoded(kind: type[_T], data: bytes | None, max_bytes: int = MAX_FILE_BYTES) -> _T | None:
    """The same; None where it is none, as of a file that somebody else may have written."""
    try:
        return decode(kind, data or b"", max_bytes)
    except MessageError:
        return None


def convert(kind: type[_T], value: object) -> _T:
    """The value of this kind that a part of a decoded JSON object is; `kind` may be a union.

    Raises:
        MessageError: it is none.
    """
    decoder(kind)  # type: ignore[arg-type] # so that what msgspec knows of it is complete
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as problem:
        raise MessageError(_complaint(problem)) from None


@functools.cache
def decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of a kind, built by one thread at a time.

    msgspec 0.22 publishes what it knows of a Struct before that is complete: another thread that decodes it
    meanwhile reads a null pointer.
    """
    with _BUILDING:
        return msgspec.json.Decoder(kind)


def _complaint(problem: msgspec.ValidationError) -> str:
    text = ascii(str(problem)[:_MAX_COMPLAINT])[1:-1]  # it quotes what strangers sent
    return text[:1].lower() + text[1:]


def _refuse(word: str) -> NoReturn:
    raise ValueError(word)  # NaN and infinities


def _cut(value: Any, most: int | None) -> Any:
    if isinstance(value, str):
        return value[:most]
    if isinstance(value, dict):
        return {key: _cut(part, most) for key, part in value.items()}
    return [_cut(part, most) for part in value] if isinstance(value, list | tuple) else value
