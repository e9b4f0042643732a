"""The command that the user typed after `--`: its programs, wrappers and shells, by their words alone. Pure.

A command is a Python program, torchrun, a front end such as `accelerate launch`, or any other program. What stands
in front of it is of three kinds. A program that becomes the command (`numactl`, `env`, `nice`) goes in front of the
launcher. An init (`tini`) and a shell that only runs one command are dropped: the launcher needs none. All others,
such as `uv run` or a login shell, stay: they choose another Python, or go on beside the command.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from msgspec import Struct

from trainer_launch.model.errors import UsageError
from trainer_launch.model.redaction import redact_text
from trainer_launch.model.settings import PREFIX, Settings
from trainer_launch.planning.mpi_options import is_mpirun
from trainer_launch.planning.torchrun_options import (
    OPTIONS,
    QUESTIONS,
    TorchrunCommand,
    check_value,
    deepspeed_as_torchrun,
    split_command,
)

OURS = "trainer-launch"
_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
_ANY_PYTHON = re.compile(r"python[0-9.]*")
# Python's one-letter options that take nothing and change only how the program runs, and those that take a value.
_PLAIN_FLAGS = frozenset("bBdEiIOPqRsSuvx")
_FLAGS_WITH_VALUE = frozenset("WX")
_PLAIN_THEN_M = re.compile(r"-[bBdEiIOPqRsSuvx]+m")
_TORCHRUN = ("torchrun", "torch.distributed.run")  # by name, and as a module
_DEEPSPEED = ("deepspeed", "deepspeed.launcher.runner")


class CommandKind(str, Enum):
    """The kind of program that a command starts."""

    SCRIPT = "script"
    MODULE = "module"
    TORCHRUN = "torchrun"
    FRONT_END = "front end"
    PROGRAM = "program"


class Command(Struct, frozen=True, kw_only=True):
    """The command as typed, and its parts."""

    argv: tuple[str, ...]
    kind: CommandKind
    python: tuple[str, ...] = ()  # the interpreter and its own flags, when typed
    program: tuple[str, ...] = ()  # script or module name, and its arguments
    torchrun: TorchrunCommand | None = None
    is_deepspeed: bool = False  # torchrun's options were typed as those of `deepspeed`
    front_end: str = ""  # such as `accelerate launch`, which calls torch.distributed.run itself
    shell: str | None = None  # the script that a shell runs; "": none; None: there is no shell

    @property
    def is_worker(self) -> bool:
        """Whether an engine may start the command as a worker: a Python program that is no launcher itself."""
        return self.kind is CommandKind.SCRIPT or (
            self.kind is CommandKind.MODULE and self.program[0] not in MODULES
        )

    @property
    def reads_stdin(self) -> bool:
        """Whether the command is a Python that reads its program from standard input."""
        if self.kind is not CommandKind.PROGRAM or not _PYTHON.fullmatch(_base(self.argv[0])):
            return False
        at = _end_of_flags(self.argv)
        return at is not None and self.argv[at : at + 1] in ((), ("-",))


def parse_command(argv: Sequence[str]) -> Command:
    """Recognise `train.py …`, `-m pkg.mod …`, `python …`, `torchrun …`, `accelerate launch …`, or any program.

    Raises:
        UsageError: missing command, or torchrun's options do not parse.
    """
    words = tuple(argv)
    if not words or not words[0]:
        raise UsageError(
            "missing command; write it after --, as in: -- python train.py --lr 1e-3 "
            "(in a manifest: the container's args)"
        )
    if words[0].startswith("-m") and words[0] != "-m":  # python takes -mpkg.mod for -m pkg.mod
        words = ("-m", words[0][2:], *words[1:])
    python, program, is_module = _parts(words)
    if words[0].startswith("-") and not is_module:
        variable = PREFIX + words[0].partition("=")[0].lstrip("-").replace("-", "_").upper()
        ours = f"; an option of the launcher goes before --, or into {variable}" if words[0][:2] == "--" else ""
        raise UsageError(f"the command starts with {words[0]!r}; name a program, or -m and a Python module{ours}")
    made = partial(Command, argv=words, python=python)
    if python and not is_module:
        return made(kind=CommandKind.SCRIPT, program=program)
    name = program[0] if is_module else _base(program[0])
    if name == _TORCHRUN[is_module] and not _asks(program):
        return made(kind=CommandKind.TORCHRUN, torchrun=split_command(program[1:]))
    torchrun = deepspeed_as_torchrun(program[1:]) if name == _DEEPSPEED[is_module] else None
    if torchrun is not None:
        return made(kind=CommandKind.TORCHRUN, torchrun=torchrun, is_deepspeed=True)
    front_end = _front_end(program)
    if front_end and is_module == ("." in name):
        return made(kind=CommandKind.FRONT_END, front_end=front_end)
    if is_module:
        return made(kind=CommandKind.MODULE, program=program)
    return made(kind=CommandKind.SCRIPT if name.endswith(".py") else CommandKind.PROGRAM, program=program)


def _parts(words: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...], bool]:
    """Python with its flags, what it runs, and whether that is a module; () and all words of any other program."""
    if words[0] == "-m" and len(words) > 1:
        return (), words[1:], True
    at = (_end_of_flags(words) if _PYTHON.fullmatch(_base(words[0])) else None) or len(words)
    python, rest = words[:at], words[at:]
    if rest and _PLAIN_THEN_M.fullmatch(rest[0]):
        python, rest = (*python, rest[0][:-1]), ("-m", *rest[1:])  # python -um module
    if rest[:1] == ("-m",) and len(rest) > 1:
        return python, rest[1:], True
    return (python, rest, False) if rest and rest[0] not in ("-m", "-c", "-") else ((), words, False)


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


SHIMS = (
    *("torchrun", "mpirun", "mpiexec", "horovodrun", "deepspeed"),
    *("accelerate", "accelerate-launch", "fabric", "tune", "trl"),
)
# Front ends by name or module, with the words of which one has to follow; they call torch.distributed.run in
# their own process, or start the script as a child. "": any word.
_FRONT_ENDS = {
    **dict.fromkeys(("accelerate", "accelerate.commands.accelerate_cli"), "launch"),
    **dict.fromkeys(("accelerate-launch", "accelerate.commands.launch"), ""),
    **dict.fromkeys(
        ("fabric", "lightning.fabric.cli", "lightning_fabric.cli", "tune", "torchtune._cli.tune"), "run"
    ),
    "trl": "sft dpo grpo kto reward rloo",
}
_TUNE = ("tune", "torchtune._cli.tune")
_HELP = ("", "-h", "--help")
# Other launchers, likewise.
_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "deepspeed", "composer", "dlrover-run", "ft_launcher", OURS), ""),
    **dict.fromkeys(("hyperpodrun", "mpirun", "mpiexec", "horovodrun"), ""),
    **dict.fromkeys(("colossalai", "lightning"), "run"),
    **{name: following for name, following in _FRONT_ENDS.items() if "." not in name},
}
MODULES = frozenset(
    {
        *(_TORCHRUN[1], "torch.distributed.launch", "paddle.distributed.launch", _DEEPSPEED[1]),
        *(name for name in _FRONT_ENDS if "." in name),
    }
)
# They find the shim of torchrun or accelerate in its place; `clustered`, of Flyte 2, becomes it.
_STARTS_LAUNCHERS = frozenset(("axolotl", "llamafactory-cli", "swift", "xtuner", "clustered"))
# Their nodes meet as the PET_* variables say, with torchrun's own parser.
_LIKE_TORCHRUN = frozenset({"torch.distributed.launch", "dlrover-run", "ft_launcher", "hyperpodrun"})
MPI = frozenset({"mpirun", "mpiexec", "horovodrun"})


def _front_end(words: tuple[str, ...]) -> str:
    """The front end that a command or a module with its arguments is; "": none."""
    name, following, option = (_base(words[0]), *words[1:3], "", "")[:3]
    needed = _FRONT_ENDS.get(name)
    if needed is None or (needed and following not in needed.split()):
        return ""
    if name in _TUNE and (option in _HELP or not option.startswith("-")):
        return ""  # without an option of torchrun it runs the recipe in its own process
    return f"{name} {following}" if needed else name


class Launcher(Struct, frozen=True):
    """A program that starts workers, as it was typed."""

    name: str  # such as torchrun, accelerate launch
    words: tuple[str, ...]  # itself and what follows
    is_inside: bool = False  # behind a wrapper or in a shell's text, where our own parsers do not look
    is_hidden: bool = False  # behind a program that hides our shims from it, such as one that changes the user

    @property
    def is_torchrun(self) -> bool:
        """Whether trainer-launch takes this command over with its options."""
        return self.name in _TORCHRUN

    @property
    def is_shim(self) -> bool:
        """Whether a shim of this name would be found in its place."""
        return self.words[0] in SHIMS and not self.is_hidden

    @property
    def is_mpi(self) -> bool:
        """Whether the launcher starts ranks of MPI or Horovod."""
        return self.name in MPI

    @property
    def nodes_meet(self) -> bool:
        """Whether its nodes find each other by the platform's variables."""
        return self.is_torchrun or self.is_mpi or self.name in _LIKE_TORCHRUN


def launcher_in(argv: Sequence[str], *, is_inside: bool = False, is_hidden: bool = False) -> Launcher | None:
    """The launcher in a command, if it is recognised; one of ours is found before all others."""
    words = _without_assignments(tuple(argv))
    while (name := _named(words)) is None and (behind := _behind(words)) is not None:
        is_hidden |= _base(words[0]) in _HIDE_SHIMS
        words, is_inside = behind, True
    if name is not None:
        return Launcher(name, words, is_inside, is_hidden)
    is_hidden |= bool(words) and _base(words[0]) in _HIDE_SHIMS
    parts = _COMMANDS.split(_shells_text(words) or "")
    launchers = [launcher_in(part.split(), is_inside=True, is_hidden=is_hidden) for part in parts if part.strip()]
    return min(filter(None, launchers), key=lambda launcher: launcher.name != OURS, default=None)


def launcher_of(command: Command) -> Launcher | None:
    """The launcher in a command, or in the script that its shell runs."""
    launcher = launcher_in(command.argv)
    return launcher_in(("sh", "-c", command.shell)) if launcher is None and command.shell else launcher


def starts_launchers(command: Command) -> bool:
    """Whether a command is a shell, a wrapper or a program that may start a launcher, whose shim it would find."""
    if command.kind is not CommandKind.PROGRAM or _base(command.argv[0]) in _HIDE_SHIMS:
        return False
    launcher = launcher_in(command.argv)
    is_inside = launcher is not None and launcher.is_inside and not launcher.is_hidden
    return is_inside or command.shell is not None or is_starter(command.argv)


def is_starter(argv: Sequence[str]) -> bool:
    """Whether a program starts torchrun or accelerate as a child: it is made for that, or the command names one."""
    names_launcher = launcher_in(argv) is None and any(word in SHIMS for word in argv[1:])
    return names_launcher or _base(argv[0]) in _STARTS_LAUNCHERS


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


def _asks(words: tuple[str, ...]) -> bool:
    """Whether a program is only asked about itself."""
    return len(words) > 1 and words[1] in QUESTIONS


def _named(words: tuple[str, ...]) -> str | None:
    """The launcher that these words begin with."""
    name, following = _base(words[0]) if words else "", words[1] if len(words) > 1 else ""
    if name not in _LAUNCHERS and is_mpirun(name):  # mpirun.openmpi, prterun
        name = "mpirun"
    if _asks(words):
        return None
    if name in _LAUNCHERS:
        needed = _LAUNCHERS[name]
        return name if not needed else f"{name} {following}" if following in needed.split() else None
    if _ANY_PYTHON.fullmatch(name):
        words = tuple(itertools.dropwhile(lambda word: word[0:1] == "-" and word != "-m", words[1:]))
    is_module = words[:1] == ("-m",) and len(words) > 1 and words[1] in MODULES and not _asks(words[1:])
    return words[1] if is_module else None


_SHELL = re.compile(r"(?:ba|da|z|a|k|)sh")
_SHELLS_TEXT = re.compile(r"-[a-zA-Z]*c")
_LOGIN = re.compile(r"-[a-zA-Z]*[li][a-zA-Z]*|--login")  # its profile may set PATH anew
_COMMANDS = re.compile(r"[;&|\n({]+")  # what stands between two commands of a shell
_SHELLS_OWN = re.compile(r"""[$`&|;<>(){}*?~#!\n\\[\]]""")  # what only a shell understands, apart from quotes
_KEYWORDS = frozenset({"if", "for", "while", "case", "until", "cd", "export", "source", ".", "set", "eval", "time"})
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_BEFORE_A_COMMAND = frozenset({"exec", "then", "do", "else", "!", "time", "command"})
CHANGE_USER = ("setpriv", "gosu", "su-exec", "setuidgid", "s6-setuidgid", "chpst")  # and become the command
# Programs that become the command, and options with which they do not, or take the platform's variables away.
_BECOME_THE_COMMAND = {
    "env": ("-i", "-S", "--split-string", "--ignore-environment", "-"),
    "taskset": ("-p", "--pid"),
    "chrt": ("-p", "--pid"),
    "prlimit": ("-p", "--pid"),
    **dict.fromkeys(("nice", "ionice", "nohup", "numactl", "stdbuf", "hwloc-bind", *CHANGE_USER), ()),
}
# Behind them our shims are out of reach: another user may not read our folder, another root has no such folder.
_HIDE_SHIMS = frozenset((*CHANGE_USER, "runuser", "su", "sudo", "doas", "chroot"))
_INITS = ("tini", "dumb-init", "catatonit")
_WRAPPER = re.compile(
    "|".join((*_BECOME_THE_COMMAND, *_INITS, *sorted(_HIDE_SHIMS)))
    + "|uvx?|poetry|pipenv|pdm|pixi|hatch|rye|conda|(?:micro)?mamba|"
    "setsid|timeout|catchsegv|xvfb-run|nsys|ncu|rocprof|py-spy|strace|ltrace|unshare"
)
_TAKES_A_VALUE = re.compile(r"--(?:with(?:-\w+)?|extra|group|package|python|name|prefix|unset|chdir)|-[a-zA-Z]")
_LETTERS = (  # that take no value
    "numactl l, taskset a, ionice t, catatonit g, dumb-init vc, tini sgvw, env i0v, timeout v, chpst vVP, "
    "unshare muinpUCTrcf, sudo EHnisSbkP"
)
_FLAGS = frozenset(
    f"{wrapper} -{letter}" for wrapper, letters in map(str.split, _LETTERS.split(", ")) for letter in letters
)


class Unwrapped(NamedTuple):
    """A command without its wrappers."""

    prefix: tuple[str, ...]  # what goes in front of the launcher
    command: tuple[str, ...]


def see_through(argv: Sequence[str]) -> Unwrapped:
    """Take off what can be taken off safely; the command as it is where nothing can."""
    prefix: tuple[str, ...] = ()
    command, changes_user = tuple(argv), False
    while command:
        name, inner = _base(command[0]), None
        if is_shell(name):
            inner = _only_command(command)
        elif (behind := _behind(command)) and name in (*_BECOME_THE_COMMAND, *_INITS):
            words = command[: len(command) - len(behind)]
            options = {word.partition("=")[0] for word in words[1:]}
            is_plain = options.isdisjoint(_BECOME_THE_COMMAND.get(name, ()))
            inner = behind if is_plain and not any(map(_is_program, words, words[1:])) else None
        if not inner:
            break
        if name in _BECOME_THE_COMMAND:
            prefix += command[: len(command) - len(inner)]
            changes_user |= name in CHANGE_USER
        command = inner
    if not command or not (_trains(command[0]) or launcher_in(command) or changes_user):
        return Unwrapped((), tuple(argv))
    return Unwrapped(prefix, command)


def _is_program(before: str, word: str) -> bool:
    """Whether a word behind a wrapper is a program that is not recognised, as ./prog in `nice ./prog python`."""
    return "/" in word and not (word.startswith("-") or before.startswith("-") or _ASSIGNMENT.fullmatch(word))


def is_shell(word: str) -> bool:
    """Whether a program is a shell."""
    return _SHELL.fullmatch(_base(word)) is not None


def runs_single_program(argv: Sequence[str]) -> bool:
    """Whether a command is a Python, or a wrapper such as env or uv; not a shell or another program."""
    name = _base(argv[0])
    return (_WRAPPER.fullmatch(name) or _ANY_PYTHON.fullmatch(name)) is not None


def _behind(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The command behind a wrapper and its options; None: no command of a kind that is recognised."""
    if not words or not _WRAPPER.fullmatch(_base(words[0])):
        return None
    before = wrapper = _base(words[0])
    for at, word in enumerate(words[1:], 1):
        is_value = _TAKES_A_VALUE.fullmatch(before) and f"{wrapper} {before}" not in _FLAGS
        if not is_value:
            if word.endswith(".sh"):
                return None
            if _trains(word) or is_shell(word) or _WRAPPER.fullmatch(_base(word)) or _named(words[at:]):
                return words[at:]
        before = word
    return None


def _only_command(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The command of `bash -c "COMMAND"`, where it is one and needs no shell."""
    option, *rest = words[1:] or ("",)
    if not re.fullmatch(r"-[eux]*c", option) or len(rest) != 1 or _SHELLS_OWN.search(rest[0]):
        return None
    try:
        inner = shlex.split(rest[0])
    except ValueError:
        return None
    inner = inner[1:] if inner[:1] == ["exec"] else inner
    if not inner or inner[0] in _KEYWORDS or _ASSIGNMENT.fullmatch(inner[0]):
        return None
    return tuple(inner)


def _shells_text(argv: Sequence[str]) -> str | None:
    """The commands in `bash -c "…"` or `su USER -c "…"`."""
    if argv and (is_shell(argv[0]) or _base(argv[0]) in ("su", "runuser")):
        for option, text in itertools.pairwise(argv[1:]):
            if _SHELLS_TEXT.fullmatch(option):
                return text
            if not option.startswith("-") and is_shell(argv[0]):
                break
    return None


def _trains(word: str) -> bool:
    """Whether a program is a Python or its script."""
    return word.endswith(".py") or _ANY_PYTHON.fullmatch(_base(word)) is not None


def _without_assignments(words: tuple[str, ...]) -> tuple[str, ...]:
    at = 0
    while at < len(words) and (_ASSIGNMENT.fullmatch(words[at]) or words[at] in _BEFORE_A_COMMAND):
        at += 1
    return words[at:]


def _base(word: str) -> str:
    return word.rpartition("/")[2]


# Kubernetes', and a shell's; torchrun itself replaces its own.
_REFERENCE = re.compile(r"(?<!\$)\$(?:\(([A-Za-z_][\w.-]*)\)|\{(\w+)\}|([A-Za-z_]\w*))")


def unexpanded(argv: Sequence[str], env: Mapping[str, str]) -> str | None:
    """A warning about a reference to a variable that was not expanded; None: there is none, or a shell reads it."""
    if any(is_shell(word) for word in argv):
        return None
    for word in argv[1:]:
        match = _REFERENCE.search(word)
        name = match[match.lastindex or 0] if match else ""
        start = f"{match[0] if match else ''} in the argument {redact_text(word)[:60]!r} was not expanded"
        if match and match[1]:
            return f"{start}: Kubernetes expands it only if the container's env defines {name}; define it there"
        if match and name in env:
            return f"{start}: no shell reads the command; in a manifest write $({name}), or run it with bash -c"
    return None


_OPTION = OPTIONS["shutdown_timeout"]
_VARIABLES = (_OPTION.variable, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")


def grace_of(own_s: float, command: Command | None, env: Mapping[str, str], *, is_given: bool) -> float:
    """Seconds between SIGTERM and SIGKILL: `own_s` where --grace was given, else torch's shutdown timeout.

    A longer one counts as the longest that --grace takes: the kernel waits for 24 days at most.

    Raises:
        UsageError: the timeout is not a whole number.
    """
    typed = command.torchrun.options if command is not None and command.torchrun is not None else {}
    values = {_OPTION.flag: typed.get(_OPTION.name), **{name: env.get(name) for name in _VARIABLES}}
    name, value = next(((name, value) for name, value in values.items() if value), ("", None))
    if is_given or value is None:
        return own_s
    return min(float(check_value(_OPTION, value, name)), Settings.model_fields["grace"].most)
