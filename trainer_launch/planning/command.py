"""What the user typed after `--`, taken apart: a Python program, a torchrun command, or any program. Pure."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import PurePosixPath

from msgspec import Struct

from trainer_launch.model.errors import UsageError
from trainer_launch.model.settings import PREFIX
from trainer_launch.planning.torchrun_options import OPTIONS, TorchrunCommand, check_value, split_command

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


class Command(Struct, frozen=True, kw_only=True):
    """The command as typed, and its parts."""

    argv: tuple[str, ...]
    kind: Kind
    python: tuple[str, ...] = ()  # the interpreter and its own flags, when typed
    program: tuple[str, ...] = ()  # script or module name, and its arguments
    torchrun: TorchrunCommand | None = None
    shell: str | None = None  # the script that a shell runs; "": none; None: there is no shell

    @property
    def is_worker(self) -> bool:
        """Whether it is a Python program that an engine may start as a worker; a launcher of its own is none."""
        return self.kind is Kind.SCRIPT or (self.kind is Kind.MODULE and self.program[0] not in MODULES)

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
        UsageError: missing command, or torchrun's options do not parse.
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
        variable = PREFIX + words[0].partition("=")[0].lstrip("-").replace("-", "_").upper()
        ours = f"; an option of the launcher goes before --, or into {variable}" if words[0][:2] == "--" else ""
        raise UsageError(f"the command starts with {words[0]!r}; name a program, or -m and a Python module{ours}")
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


# -- programs that start a job's workers themselves --------------------------------------------


OURS = "trainer-launch"
SHIMS = ("torchrun", "mpirun", "mpiexec", "horovodrun", "accelerate", "accelerate-launch", "deepspeed", "tune")
# By name, with the words of which one has to follow for workers to be started.
_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "accelerate-launch", "deepspeed", "composer", "dlrover-run", "ft_launcher"), ""),
    **dict.fromkeys((OURS, "hyperpodrun", "mpirun", "mpiexec", "mpiexec.hydra", "horovodrun"), ""),
    **dict.fromkeys(("accelerate",), "launch"),
    **dict.fromkeys(("tune", "colossalai", "lightning", "fabric"), "run"),
    "trl": "sft dpo grpo kto reward rloo",
}
MODULES = frozenset(
    {
        *("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner"),
        *("accelerate.commands.launch", "accelerate.commands.accelerate_cli", "paddle.distributed.launch"),
    }
)
# Their nodes meet as the PET_* variables say, with torchrun's own parser.
_TORCHRUN_NAMES = frozenset({"torchrun", "torch.distributed.run"})
_LIKE_TORCHRUN = frozenset({"torch.distributed.launch", "tune run", "dlrover-run", "ft_launcher", "hyperpodrun"})
MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "horovodrun"})
_SHELL = re.compile(r"(?:ba|da|z|a|k|)sh")
_SHELLS_TEXT = re.compile(r"-[a-zA-Z]*c")
_LOGIN = re.compile(r"-[a-zA-Z]*[li][a-zA-Z]*|--login")  # its profile may set PATH anew
_COMMANDS = re.compile(r"[;&|\n({]+")  # what stands between two commands of a shell
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_ANY_PYTHON = re.compile(r"python[0-9.]*")
_BEFORE_A_COMMAND = frozenset({"exec", "then", "do", "else", "!", "time", "command", "sudo"})
# Programs that run the command after their own options.
_WRAPPER = re.compile(
    r"env|uvx?|poetry|pipenv|pdm|pixi|hatch|rye|conda|(?:micro)?mamba|(?:io)?nice|nohup|numactl|taskset|stdbuf|setsid|"
    r"timeout|tini|dumb-init|catchsegv|xvfb-run|nsys|ncu|rocprof|py-spy|strace|ltrace|unshare|gosu"
)
_TAKES_A_VALUE = re.compile(r"--(?:with(?:-\w+)?|extra|group|package|python|name|prefix|unset)|-[a-zA-Z]")


class Launcher(Struct, frozen=True):
    """A program that starts workers, as it was typed."""

    name: str  # such as torchrun, accelerate launch
    words: tuple[str, ...]  # itself and what follows
    is_inside: bool = False  # behind a wrapper or in a shell's text, where our own parsers do not look

    @property
    def is_torchrun(self) -> bool:
        """Whether trainer-launch takes this command over with its options."""
        return self.name in _TORCHRUN_NAMES

    @property
    def is_shim(self) -> bool:
        """Whether a shim of this name would be found in its place."""
        return self.words[0] in SHIMS

    @property
    def is_mpi(self) -> bool:
        """Whether it starts the ranks of MPI or Horovod."""
        return self.name in MPI

    @property
    def nodes_meet(self) -> bool:
        """Whether its nodes find each other by the platform's variables."""
        return self.is_torchrun or self.is_mpi or self.name in _LIKE_TORCHRUN

    @property
    def script(self) -> str:
        """The training program it is to start, as our own command line begins with it."""
        if self.name.startswith("trl "):
            return f"-m trl.scripts.{self.words[1]}"
        for at, word in enumerate(self.words[1:], 1):
            if word in ("-m", "--module") and at + 1 < len(self.words) and self.words[at + 1] not in MODULES:
                return f"-m {self.words[at + 1]}"
            if word.endswith(".py"):
                return word
        return "SCRIPT.py"


def launcher_in(argv: Sequence[str]) -> Launcher | None:
    """The launcher in a command, if it is recognised; one of ours is found before all others."""
    text = _shells_text(argv)
    if text is None:
        return _in_words(tuple(argv))
    found = [_in_words(tuple(words.split()), is_inside=True) for words in _COMMANDS.split(text)]
    return min(filter(None, found), key=lambda launcher: launcher.name != OURS, default=None)


def launcher_of(command: Command) -> Launcher | None:
    """The launcher in a command, or in the script that its shell runs."""
    found = launcher_in(command.argv)
    return launcher_in(("sh", "-c", command.shell)) if found is None and command.shell else found


def is_shell(word: str) -> bool:
    """Whether a program is a shell."""
    return _SHELL.fullmatch(_base(word)) is not None


def through_shims(argv: tuple[str, ...], shims: str) -> tuple[str, ...]:
    """The command where a wrapper or a login shell would put another folder before the shims in PATH."""
    launcher = launcher_in(argv)
    at = 0 if launcher is None else len(argv) - len(launcher.words)
    if launcher is not None and at and argv[at:] == launcher.words and launcher.is_shim:
        return (*argv[:at], f"{shims}/{argv[at]}", *argv[at + 1 :])
    for shell, word in enumerate(argv):
        text = _shells_text(argv[shell:]) if is_shell(word) else None
        if text is not None:
            at = argv.index(text, shell)
            is_login = any(_LOGIN.fullmatch(option) for option in argv[shell:at])
            return (*argv[:at], f"PATH={shlex.quote(shims)}:$PATH; {text}", *argv[at + 1 :]) if is_login else argv
    return argv


def runs_one_program(argv: Sequence[str]) -> bool:
    """Whether a command is a Python, or a wrapper such as env or uv; not a shell or another program."""
    name = _base(argv[0])
    return (_WRAPPER.fullmatch(name) or _ANY_PYTHON.fullmatch(name)) is not None


def _shells_text(argv: Sequence[str]) -> str | None:
    """The commands in `bash -c "…"`."""
    if _SHELL.fullmatch(_base(argv[0])):
        for option, text in itertools.pairwise(argv[1:]):
            if _SHELLS_TEXT.fullmatch(option):
                return text
            if not option.startswith("-"):
                break
    return None


def _in_words(words: tuple[str, ...], *, is_inside: bool = False) -> Launcher | None:
    """The launcher that a simple command starts, perhaps behind assignments and wrappers."""
    words, before = _without_assignments(words), ""
    is_wrapped = bool(words) and _WRAPPER.fullmatch(_base(words[0])) is not None
    for at, word in enumerate(words):
        name = None if _TAKES_A_VALUE.fullmatch(before) and is_wrapped else _named(words[at:])
        if name is not None:
            return Launcher(name, words[at:], is_inside or at > 0)
        if _shells_text(words[at:]) is not None:
            found = launcher_in(words[at:])
            return None if found is None else Launcher(found.name, found.words, is_inside=True)
        if not is_wrapped or word.endswith((".py", ".sh")):
            return None
        before = word
    return None


def _named(words: tuple[str, ...]) -> str | None:
    """The launcher that these words begin with."""
    name, following = _base(words[0]), words[1] if len(words) > 1 else ""
    if name in _LAUNCHERS:
        needed = _LAUNCHERS[name]
        return name if not needed else f"{name} {following}" if following in needed.split() else None
    if _ANY_PYTHON.fullmatch(name):
        words = tuple(itertools.dropwhile(lambda word: word[0:1] == "-" and word != "-m", words[1:]))
    return words[1] if words[:1] == ("-m",) and words[1:2] and words[1] in MODULES else None


def _without_assignments(words: tuple[str, ...]) -> tuple[str, ...]:
    at = 0
    while at < len(words) and (_ASSIGNMENT.fullmatch(words[at]) or words[at] in _BEFORE_A_COMMAND):
        at += 1
    return words[at:]


def _base(word: str) -> str:
    return word.rpartition("/")[2]


# -- seconds from SIGTERM to SIGKILL -----------------------------------------------------------


_OPTION = OPTIONS["shutdown_timeout"]
_VARIABLES = (_OPTION.variable, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


def grace_of(
    own_s: float, command: Command | None, env: Mapping[str, str], *, is_given: bool
) -> tuple[float, str | None]:
    """`own_s` where the user has set --grace (`is_given`), else torch's shutdown timeout; and a warning, if any.

    Raises:
        UsageError: the timeout is not a whole number.
    """
    typed = command.torchrun.options if command is not None and command.torchrun is not None else {}
    told = _told(typed, env)
    if told is None:
        return own_s, None
    name, timeout_s = told
    if not is_given:
        return timeout_s, None
    if timeout_s <= own_s:
        return own_s, None
    return own_s, (
        f"{name} is {timeout_s:g} s, but workers get SIGKILL after {own_s:g} s, because --grace is set; "
        f"set --grace to {timeout_s:g}, or remove it"
    )


def _told(typed: Mapping[str, str], env: Mapping[str, str]) -> tuple[str, float] | None:
    """The name and value that torchrun would use."""
    found = {_OPTION.flag: typed.get(_OPTION.name), **{name: env.get(name) for name in _VARIABLES}}
    for name, value in found.items():
        if value:
            return name, float(check_value(_OPTION, value, name))
    return None
