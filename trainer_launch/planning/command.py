"""What the user typed after `--`, taken apart: a Python program, a torchrun command, or any program. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from pathlib import PurePosixPath

from trainer_launch.model.errors import UsageError
from trainer_launch.model.frozen import dataclass
from trainer_launch.planning import typed_launchers
from trainer_launch.planning.torchrun_options import TorchrunCommand, split_command

_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
# Python's one-letter options that take nothing and change only how the program runs, and those that take a value.
_PLAIN_FLAGS = frozenset("bBdEiIOPqRsSuvx")
_FLAGS_WITH_VALUE = frozenset("WX")
_PLAIN_THEN_M = re.compile(r"-[bBdEiIOPqRsSuvx]+m")
_TORCHRUN = "torch.distributed.run"


class Kind(str, Enum):
    """What kind of program a command starts."""

    SCRIPT = "script"
    MODULE = "module"
    TORCHRUN = "torchrun"
    PROGRAM = "program"


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """The command as typed, and its parts."""

    argv: tuple[str, ...]
    kind: Kind
    python: tuple[str, ...] = ()  # the interpreter and its own flags, when typed
    program: tuple[str, ...] = ()  # script or module name, and its arguments
    torchrun: TorchrunCommand | None = None

    @property
    def is_worker(self) -> bool:
        """Whether it is a Python program that an engine may start as a worker; a launcher of its own is none."""
        return self.kind is Kind.SCRIPT or (
            self.kind is Kind.MODULE and self.program[0] not in typed_launchers.MODULES
        )

    @property
    def reads_stdin(self) -> bool:
        """Whether it is a Python that reads its program from standard input."""
        if self.kind is not Kind.PROGRAM or not _PYTHON.fullmatch(PurePosixPath(self.argv[0]).name):
            return False
        at = _end_of_flags(self.argv)
        return at is not None and self.argv[at : at + 1] in ((), ("-",))


def parse_command(argv: Sequence[str]) -> Command:
    """Recognise `train.py …`, `-m pkg.mod …`, `python … train.py …`, `torchrun … train.py …`, or any program.

    Raises:
        UsageError: there is no command, or torchrun's options do not parse.
    """
    words = tuple(argv)
    if not words or not words[0]:
        raise UsageError(
            "missing command; write it after --, as in: -- python train.py --lr 1e-3 "
            "(in a manifest: the container's args)"
        )
    name = PurePosixPath(words[0]).name
    if words[:2] == ("-m", _TORCHRUN):
        return Command(argv=words, kind=Kind.TORCHRUN, torchrun=split_command(words[2:]))
    if words[0] == "-m" and len(words) > 1:
        return Command(argv=words, kind=Kind.MODULE, program=words[1:])
    if words[0].startswith("-"):
        raise UsageError(f"the command starts with {words[0]!r}; name a program, or -m and a Python module")
    if name == "torchrun":
        return Command(argv=words, kind=Kind.TORCHRUN, torchrun=split_command(words[1:]))
    if _PYTHON.fullmatch(name):
        return _python_command(words)
    if name.endswith(".py"):
        return Command(argv=words, kind=Kind.SCRIPT, program=words)
    return Command(argv=words, kind=Kind.PROGRAM, program=words)


def _python_command(words: tuple[str, ...]) -> Command:
    """`python [flags] script.py …` or `python [flags] -m module …`; anything else is just a program."""
    at = _end_of_flags(words)
    if at is None:
        return Command(argv=words, kind=Kind.PROGRAM, program=words)
    python, rest = words[:at], words[at:]
    if rest and _PLAIN_THEN_M.fullmatch(rest[0]):
        python, rest = (*python, rest[0][:-1]), ("-m", *rest[1:])  # python -um module
    if rest[:2] == ("-m", _TORCHRUN):
        return Command(argv=words, kind=Kind.TORCHRUN, python=python, torchrun=split_command(rest[2:]))
    if rest[:1] == ("-m",) and len(rest) > 1:
        return Command(argv=words, kind=Kind.MODULE, python=python, program=rest[1:])
    if rest and rest[0] not in ("-m", "-c", "-"):
        return Command(argv=words, kind=Kind.SCRIPT, python=python, program=rest)
    return Command(argv=words, kind=Kind.PROGRAM, program=words)


def _end_of_flags(words: tuple[str, ...]) -> int | None:
    """Where Python's own options end: at -m, - or the script; None when they are of a kind that we leave alone."""
    at = 1
    while (
        at < len(words)
        and words[at].startswith("-")
        and words[at] not in ("-", "-m")
        and not _PLAIN_THEN_M.fullmatch(words[at])
    ):
        letters = words[at][1:]
        values = [place for place, letter in enumerate(letters) if letter in _FLAGS_WITH_VALUE]
        plain = letters[: values[0]] if values else letters
        if not letters or not set(plain) <= _PLAIN_FLAGS:
            return None  # -c, --version, -mmodule …
        at += 2 if values and values[0] == len(letters) - 1 else 1
    return at
