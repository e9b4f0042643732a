"""What may happen to a parser: it returns a value, or raises an error of ours with one sentence for people."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer_launch.model.errors import LaunchError

T = TypeVar("T")
MAX_SENTENCE = 2_000  # characters
_TEMPORARY = tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None)
FOLDER = _TEMPORARY.name  # for parsers that read files; each has names of its own


@dataclass(frozen=True, slots=True)
class Refused:
    """The parser's own error."""

    kind: type[BaseException]
    text: str


def attempt(
    parse: Callable[..., T],
    *args: Any,
    kinds: tuple[type[BaseException], ...] = (LaunchError,),
    names: str = "",
    hides: Iterable[str] = (),
    plain: bool = True,
) -> T | Refused:
    """What the parser returns, or its refusal: a sentence with `names` in it, and without what it has to hide.

    Not `plain` are words of a program that stands in for another, which repeats what it was given.
    """
    try:
        return parse(*args)
    except kinds as problem:
        text = str(problem)
        if plain:
            assert_sentence(text)
        assert names in text, f"{text!r} does not name {names!r}"
        for secret in hides:
            assert secret not in text, f"{text!r} shows {secret!r}"
        return Refused(type(problem), text)


def assert_sentence(text: str) -> None:
    """One line that a terminal and a log can show."""
    assert text.strip(), "an error without words"
    assert text.isprintable(), f"not printable: {text!r}"
    assert len(text) <= MAX_SENTENCE, f"{len(text)} characters: {text[:200]!r}"


def assert_encodable(text: str) -> None:
    """It can be written to a file or a socket as it is."""
    text.encode()


def assert_terminal(text: str) -> None:
    """Lines that a terminal can show, and that can be written anywhere."""
    assert all(c == "\n" or c.isprintable() for c in text), f"not printable: {text!r}"
    text.encode()


def text_of(data: bytes) -> str:
    """As Python gives variables and arguments: bytes that are no UTF-8 are surrogates."""
    return data.decode("utf-8", "surrogateescape")
