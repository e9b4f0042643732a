"""See through what stands in front of a training command: `numactl`, `env`, `tini`, `bash -c "torchrun …"`.

Pure. A program that changes this process and then becomes the command (`numactl`, `env`, `nice`, `taskset`) goes in
front of the launcher. An init (`tini`, `dumb-init`) is dropped: the launcher is one. A shell that runs one command
is dropped, too. `accelerate launch` becomes torchrun and variables, where all of its options have an equivalent.
All other wrappers, such as `uv run`, stay: they choose another Python, or go on beside the command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer_launch.planning.command import launcher_in

_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_SHELL = re.compile(r"(?:ba|da|z|a|k)?sh")
_SHELLS_OWN = re.compile(r"""[$`&|;<>(){}*?~#!\n\\[\]]""")  # what only a shell understands, apart from quotes
_KEYWORDS = frozenset({"if", "for", "while", "case", "until", "cd", "export", "source", ".", "set", "eval", "time"})


class _Options(NamedTuple):
    """A wrapper's options; all others end the search, so that nothing is guessed."""

    flags: str = ""  # one letter each
    values: str = ""  # letters that take a value
    long_flags: tuple[str, ...] = ()
    long_values: tuple[str, ...] = ()
    words: int = 0  # what it takes before the command, such as taskset's mask


_BECOME_THE_COMMAND = {
    "env": _Options("", "uC", (), ("--unset", "--chdir")),  # -i would take the platform's variables away
    "nice": _Options("", "n", (), ("--adjustment",)),
    "ionice": _Options("t", "cn", ("--ignore",), ("--class", "--classdata")),
    "nohup": _Options(),
    "numactl": _Options(
        "l",
        "NmCip",
        ("--localalloc", "--all"),
        ("--cpunodebind", "--membind", "--physcpubind", "--interleave", "--preferred"),
    ),
    "stdbuf": _Options("", "ioe", (), ("--input", "--output", "--error")),
    "taskset": _Options("a", "", ("--all-tasks",), (), 1),
}
_TASKSET_LIST = frozenset({"-c", "--cpu-list", "-ac"})
_INITS = {
    "tini": _Options("sgvw", "pe"),
    "dumb-init": _Options("vc", "r", ("--verbose", "--single-child"), ("--rewrite",)),
    "catatonit": _Options("g"),
}


class Seen(NamedTuple):
    """A command without its wrappers."""

    prefix: tuple[str, ...]  # what goes in front of the launcher
    command: tuple[str, ...]
    env: Mapping[str, str]  # variables that stand for options of `accelerate launch`


def see_through(argv: Sequence[str]) -> Seen:
    """Take off what can be taken off safely; the command as it is where nothing can."""
    prefix: tuple[str, ...] = ()
    command = tuple(argv)
    while command:
        name = command[0].rpartition("/")[2]
        if name in _INITS:
            inner = _behind(command, _INITS[name])
        elif name in _BECOME_THE_COMMAND:
            inner = _behind(command, _BECOME_THE_COMMAND[name])
        else:
            inner = _only_command(command) if _SHELL.fullmatch(name) else None
        if not inner:
            break
        if name in _BECOME_THE_COMMAND:
            prefix += command[: len(command) - len(inner)]
        command = inner
    if not _is_training(command):
        return Seen((), tuple(argv), {})
    taken_over = _accelerate(command)
    return Seen(prefix, *taken_over) if taken_over else Seen(prefix, command, {})


def _is_training(command: Sequence[str]) -> bool:
    """Whether the launcher knows what it begins with, so that it is better off without the wrapper."""
    if not command:
        return False
    name = command[0].rpartition("/")[2]
    found = launcher_in(command)
    return name.endswith(".py") or _PYTHON.fullmatch(name) is not None or found is not None


def _behind(words: tuple[str, ...], options: _Options) -> tuple[str, ...] | None:
    """The command behind a wrapper and its options; None where one of them is unknown."""
    at, more = 1, options.words
    while at < len(words):
        word = words[at]
        if word == "--":
            return words[at + 1 :] if not more else None
        if word in _TASKSET_LIST and options.words:
            at += 1
        elif word.startswith("-") and word != "-":
            if (taken := _taken(word, options)) is None:
                return None
            at += taken
        elif more:
            more, at = more - 1, at + 1
        elif _ASSIGNMENT.fullmatch(word) and words[0].endswith("env"):
            at += 1
        else:
            return words[at:]
    return None


def _taken(word: str, options: _Options) -> int | None:
    """How many words an option takes; None where it is unknown."""
    name, equals, _ = word.partition("=")
    if name in options.long_flags and not equals:
        return 1
    if name in options.long_values:
        return 1 if equals else 2
    letters = word[1:]
    if options.values == "n" and letters.isdecimal():  # nice -10
        return 1
    first = next((at for at, letter in enumerate(letters) if letter in options.values), None)
    if word.startswith("--") or not set(letters[:first]) <= set(options.flags):
        return None
    return 2 if first == len(letters) - 1 else 1


def _only_command(words: tuple[str, ...]) -> tuple[str, ...] | None:
    """The command of `bash -c "COMMAND"`, where it is one and needs no shell."""
    option, *rest = words[1:] or ("",)
    if not re.fullmatch(r"-[elux]*c", option) or len(rest) != 1 or _SHELLS_OWN.search(rest[0]):
        return None
    try:
        inner = shlex.split(rest[0])
    except ValueError:
        return None
    inner = inner[1:] if inner[:1] == ["exec"] else inner
    if not inner or inner[0] in _KEYWORDS or _ASSIGNMENT.fullmatch(inner[0]):
        return None
    return tuple(inner)


# -- accelerate launch -------------------------------------------------------------------------

_AS_TORCHRUN = {
    "--num_machines": "--nnodes",
    "--machine_rank": "--node-rank",
    "--main_process_ip": "--master-addr",
    "--main_process_port": "--master-port",
    "--max_restarts": "--max-restarts",
}
_AS_VARIABLE = {
    "--mixed_precision": "ACCELERATE_MIXED_PRECISION",
    "--dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
    "--gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
}
_SAME = {"--multi_gpu": (), "-m": ("-m",), "--module": ("-m",), "--no_python": ("--no-python",)}


def _accelerate(command: tuple[str, ...]) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """`accelerate launch` as torchrun and variables; None where an option has no equivalent.

    Source: accelerate's `commands/launch.py` and `utils/launch.py`. Its own configuration file is not read, so
    `--num_processes` has to be typed.
    """
    if command[0].rpartition("/")[2] != "accelerate" or command[1:2] != ("launch",):
        return None
    given, flags, env, at = dict[str, str](), list[str](), dict[str, str](), 2
    while at < len(command) and command[at].startswith("-"):
        name, equals, value = command[at].partition("=")
        name = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
        if name == "--cpu":
            env["ACCELERATE_USE_CPU"] = "true"
        elif name in _SAME and not equals:
            flags += _SAME[name]
        elif name in (*_AS_TORCHRUN, *_AS_VARIABLE, "--num_processes"):
            if not equals:
                at += 1
                value = command[at] if at < len(command) else ""
            given[name] = value
        else:
            return None
        at += 1
    workers = _workers(given)
    if workers is None or at >= len(command):
        return None
    env |= {_AS_VARIABLE[name]: value for name, value in given.items() if name in _AS_VARIABLE}
    options = [
        word for name, value in given.items() if name in _AS_TORCHRUN for word in (_AS_TORCHRUN[name], value)
    ]
    return ("torchrun", f"--nproc-per-node={workers}", *options, *flags, *command[at:]), env


def _workers(given: Mapping[str, str]) -> int | None:
    """Workers of each machine: `--num_processes` counts those of all."""
    numbers = [given.get("--num_processes", ""), given.get("--num_machines", "1")]
    if not all(re.fullmatch(r"[1-9]\d{0,5}", number) for number in numbers):
        return None
    workers, rest = divmod(int(numbers[0]), int(numbers[1]))
    return workers if workers and not rest else None
