"""What a child of ours is told when it is started: one typed value, printed as one JSON object with a version.

A child gets it as an argument, in a variable or in a file of a private directory; `host/process_boundary.py` lists
them all. Both ends are of one version of this package, so one that is not ours is a mistake of our own.
"""

from __future__ import annotations

from typing import TypeVar

from trainer_launch.model.errors import InternalError
from trainer_launch.model.json_lines import MAX_FILE_BYTES, Codec, MessageError

VERSION = 1
_T = TypeVar("_T")


def printed(spec: object) -> str:
    """The spec as one line."""
    return Codec(type(spec), version=VERSION, max_bytes=MAX_FILE_BYTES).encode(spec).decode().rstrip()


def parsed(kind: type[_T], text: str | bytes) -> _T:
    """The spec that was printed.

    Raises:
        InternalError: it is none of this kind and version.
    """
    try:
        return Codec(kind, version=VERSION, max_bytes=MAX_FILE_BYTES).decode(text)  # type: ignore[no-any-return]
    except MessageError as problem:
        raise InternalError(f"this process was started with an invalid launch spec: {problem}") from None
