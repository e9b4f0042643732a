"""See through what stands in front of a training command: `numactl`, `env`, `tini`, `bash -c "torchrun …"`.

Pure. A program that changes this process and then becomes the command (`numactl`, `env`, `nice`, `taskset`) goes in
front of the launcher. An init (`tini`, `dumb-init`) is dropped: the launcher is one. A shell that runs one command
is dropped, too, but no login shell: its profile chooses the program. `accelerate launch` and `deepspeed` become
torchrun and variables, where all of their options have an equivalent, and so does `tune run`. All other wrappers,
such as `uv run`, stay: they choose another Python, or go on beside the command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from trainer_launch.model import NodeRange
from trainer_launch.model.errors import UsageError
from trainer_launch.planning.command import Kind, launcher_in, parse_command
from trainer_launch.planning.torchrun_options import render, split_command

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
        return Seen((), tuple(argv))
    return Seen(prefix, command)


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


# -- accelerate launch, deepspeed and tune run -------------------------------------------------


class _Form(NamedTuple):
    """A launcher's options that have an equivalent. A flag's words may be none: torchrun does so anyway."""

    name: str
    workers: str  # the option that says how many workers to start, without which nothing is known
    flags: Mapping[str, tuple[str, ...]]
    options: Mapping[str, str]  # by name: torchrun's
    variables: Mapping[str, str] = {}  # by name: what the launcher would set for it


_MODULE, _NO_PYTHON = {"--module": ("-m",)}, {"--no_python": ("--no-python",)}
_CPU = "--cpu"
# Source: accelerate's `commands/launch.py` and `utils/launch.py`.
_ACCELERATE = _Form(
    "accelerate launch",
    "--num_processes",
    {**_MODULE, **_NO_PYTHON, "-m": ("-m",), "--multi_gpu": (), _CPU: ()},
    {
        "--num_machines": "--nnodes",
        "--machine_rank": "--node-rank",
        "--main_process_ip": "--master-addr",
        "--main_process_port": "--master-port",
        "--max_restarts": "--max-restarts",
    },
    {
        "--mixed_precision": "ACCELERATE_MIXED_PRECISION",
        "--dynamo_backend": "ACCELERATE_DYNAMO_BACKEND",
        "--gradient_accumulation_steps": "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
    },
)
_NO_LOCAL_RANK = "--no_local_rank"
# Source: DeepSpeed's `launcher/runner.py` and `launcher/launch.py`.
_DEEPSPEED = _Form(
    "deepspeed",
    "--num_gpus",
    {**_MODULE, **_NO_PYTHON, _NO_LOCAL_RANK: (), "--no_ssh": ()},
    {
        "--num_nodes": "--nnodes",
        "--node_rank": "--node-rank",
        "--master_addr": "--master-addr",
        "--master_port": "--master-port",
    },
)
# Source: torchtune's `_cli/run.py`: without an option of torchrun it runs the recipe in its own process, so that is
# what each worker does.
_TORCHTUNE = _Form("tune run", "--nproc_per_node", {}, {})
_RECIPE = ("-m", "torchtune._cli.tune", "run")
_MODULES = {"accelerate.commands.launch": _ACCELERATE, "deepspeed.launcher.runner": _DEEPSPEED}
_MOST = re.compile(r"[1-9]\d{0,5}")
_HELP = ("", "-h", "--help")


class Typed(NamedTuple):
    """A launcher whose options torchrun may have, as it was typed."""

    form: _Form
    python: tuple[str, ...]  # in front of its module
    words: tuple[str, ...]  # its options and what it starts

    def defaults(self, env: Mapping[str, str]) -> str | None:
        """The path of the file that it takes options from which were not typed, if there is one."""
        if self.form is not _ACCELERATE:
            return "/job/hostfile" if self.form is _DEEPSPEED else None
        cache = env.get("XDG_CACHE_HOME") or f"{env.get('HOME', '')}/.cache"
        home = env.get("HF_HOME") or f"{cache}/huggingface"
        return None if _CPU in self.words else f"{home}/accelerate/default_config.yaml"


def typed_launcher(command: Sequence[str]) -> Typed | None:
    """`accelerate launch`, `deepspeed` or `tune run` of several; None: the command is something else.

    Raises:
        UsageError: torchrun's options do not parse.
    """
    words = tuple(command)
    name = words[0].rpartition("/")[2] if words else ""
    if name == "accelerate" and words[1:2] == ("launch",):
        return Typed(_ACCELERATE, (), words[2:])
    if name in ("accelerate-launch", "deepspeed"):
        return Typed(_DEEPSPEED if name == "deepspeed" else _ACCELERATE, (), words[1:])
    if name == "tune" and words[1:2] == ("run",) and "".join(words[2:3]) not in _HELP and words[2].startswith("-"):
        return Typed(_TORCHTUNE, (), words[2:])
    if name == "-m" or _PYTHON.fullmatch(name):
        parsed = parse_command(words)
        if parsed.kind is Kind.MODULE and parsed.program[0] in _MODULES:
            return Typed(_MODULES[parsed.program[0]], parsed.python, parsed.program[1:])
    return None


def as_torchrun(typed: Typed, nodes: NodeRange | None) -> tuple[tuple[str, ...], dict[str, str]] | None:
    """The same as torchrun and variables; None where an option has no equivalent.

    Raises:
        UsageError: accelerate's workers cannot be divided among the platform's nodes; torchtune's do not parse.
    """
    form, words = typed.form, typed.words
    if form is _TORCHTUNE:
        found = split_command(words)
        return ("torchrun", *render(found.options), *found.unknown, *_RECIPE, *found.program), {}
    given, flags, at = dict[str, str](), list[str](), 0
    while at < len(words) and words[at].startswith("-"):
        name, equals, value = words[at].partition("=")
        name = "--" + name[2:].replace("-", "_") if name.startswith("--") else name
        if name in form.flags and not equals:
            flags.append(name)
        elif name in form.options or name in form.variables or name == form.workers:
            at += not equals
            given[name] = value if equals else "".join(words[at : at + 1])
        else:
            return None
        at += 1
    workers = _workers(form, given, nodes)
    if workers is None or at >= len(words):
        return None
    program = words[at:]
    if form is _DEEPSPEED and _NO_LOCAL_RANK not in flags:
        program = (program[0], "--local_rank=${local_rank}", *program[1:])  # torchrun replaces it for each worker
    env = {form.variables[name]: value for name, value in given.items() if name in form.variables}
    env |= {"ACCELERATE_USE_CPU": "true"} if _CPU in flags else {}
    options = [f"{form.options[name]}={value}" for name, value in given.items() if name in form.options]
    options += [word for name in flags for word in form.flags[name]]
    torchrun = (*typed.python, "-m", "torch.distributed.run") if typed.python else ("torchrun",)
    return (*torchrun, f"--nproc-per-node={workers}", *options, *program), env


def _workers(form: _Form, given: Mapping[str, str], nodes: NodeRange | None) -> int | None:
    """Workers of each node: accelerate's `--num_processes` counts those of all.

    Raises:
        UsageError: they cannot be divided among the platform's nodes.
    """
    count, machines = given.get(form.workers, ""), given.get("--num_machines")
    if not _MOST.fullmatch(count) or not _MOST.fullmatch(machines or "1"):
        return None
    if form is _DEEPSPEED:
        return int(count)
    if machines is None and nodes is not None and nodes.fixed is None:
        return None  # nobody knows among how many
    workers, rest = divmod(int(count), int(machines or (nodes.min if nodes else 1)))
    if rest and machines is None and nodes is not None:
        raise UsageError(
            f"accelerate's {form.workers} is {count}, the total of all nodes, which {nodes} nodes cannot share "
            f"evenly; set it to a multiple of {nodes}"
        )
    return None if rest else workers
