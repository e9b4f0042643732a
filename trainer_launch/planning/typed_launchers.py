"""Programs that start a job's workers themselves, also behind a wrapper or in a shell's text. Pure.

Only a place where a program's name can stand is looked at: `train.sh --launcher deepspeed` starts no deepspeed.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from trainer_launch.model.frozen import dataclass

OURS = "trainer-launch"
# By name, with the word that has to follow for workers to be started.
_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "accelerate-launch", "deepspeed", "composer", "dlrover-run", "ft_launcher"), ""),
    **dict.fromkeys((OURS, "hyperpodrun", "mpirun", "mpiexec", "mpiexec.hydra", "horovodrun"), ""),
    **dict.fromkeys(("accelerate",), "launch"),
    **dict.fromkeys(("tune", "colossalai", "lightning", "fabric"), "run"),
}
MODULES = frozenset(
    {
        *("torch.distributed.run", "torch.distributed.launch", "deepspeed.launcher.runner"),
        *("accelerate.commands.launch", "accelerate.commands.accelerate_cli", "paddle.distributed.launch"),
    }
)
# Their nodes meet as the PET_* variables say, with torchrun's own parser.
_TORCHRUN = frozenset({"torchrun", "torch.distributed.run"})
_LIKE_TORCHRUN = frozenset({"torch.distributed.launch", "tune run", "dlrover-run", "ft_launcher", "hyperpodrun"})
_MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "horovodrun"})
_SHELL = re.compile(r"(?:ba|da|z|a|k|)sh")
_SHELLS_TEXT = re.compile(r"-[a-zA-Z]*c")
_COMMANDS = re.compile(r"[;&|\n({]+")  # what stands between two commands of a shell
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)
_PYTHON = re.compile(r"python[0-9.]*")
_BEFORE_A_COMMAND = frozenset({"exec", "then", "do", "else", "!", "time", "command", "sudo"})
# Programs that run the command after their own options.
_WRAPPER = re.compile(
    r"env|uvx?|poetry|pipenv|pdm|pixi|hatch|rye|conda|(?:micro)?mamba|(?:io)?nice|nohup|numactl|taskset|stdbuf|setsid|"
    r"timeout|tini|dumb-init|catchsegv|xvfb-run|nsys|ncu|rocprof|py-spy|strace|ltrace|unshare|gosu"
)
_TAKES_A_VALUE = re.compile(r"--(?:with(?:-\w+)?|extra|group|package|python|name|prefix|unset)|-[a-zA-Z]")


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that starts workers, as it was typed."""

    name: str  # such as torchrun, accelerate launch
    words: tuple[str, ...]  # itself and what follows
    is_inside: bool = False  # behind a wrapper or in a shell's text, where our own parsers do not look

    @property
    def is_torchrun(self) -> bool:
        """Whether trainer-launch takes this command over with its options."""
        return self.name in _TORCHRUN

    @property
    def is_mpi(self) -> bool:
        """Whether it starts the ranks of MPI or Horovod."""
        return self.name in _MPI

    @property
    def nodes_meet(self) -> bool:
        """Whether its nodes find each other by the platform's variables."""
        return self.is_torchrun or self.is_mpi or self.name in _LIKE_TORCHRUN

    @property
    def script(self) -> str:
        """The training program it is to start, as our own command line begins with it."""
        for at, word in enumerate(self.words[1:], 1):
            if word in ("-m", "--module") and at + 1 < len(self.words) and self.words[at + 1] not in MODULES:
                return f"-m {self.words[at + 1]}"
            if word.endswith(".py"):
                return word
        return "SCRIPT.py"


def find(argv: Sequence[str]) -> Launcher | None:
    """The launcher in a command, if it is recognised; one of ours is found before all others."""
    text = _shells_text(argv)
    if text is None:
        return _in_words(tuple(argv))
    found = [_in_words(tuple(words.split()), is_inside=True) for words in _COMMANDS.split(text)]
    return min(filter(None, found), key=lambda launcher: launcher.name != OURS, default=None)


def runs_one_program(argv: Sequence[str]) -> bool:
    """Whether a command is a Python, or a wrapper such as env or uv; not a shell or another program."""
    name = _base(argv[0])
    return (_WRAPPER.fullmatch(name) or _PYTHON.fullmatch(name)) is not None


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
            found = find(words[at:])
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
        return f"{name} {needed}".strip() if needed in ("", following) else None
    if _PYTHON.fullmatch(name):
        words = tuple(itertools.dropwhile(lambda word: word[0:1] == "-" and word != "-m", words[1:]))
    return words[1] if words[:1] == ("-m",) and words[1:2] and words[1] in MODULES else None


def _without_assignments(words: tuple[str, ...]) -> tuple[str, ...]:
    at = 0
    while at < len(words) and (_ASSIGNMENT.fullmatch(words[at]) or words[at] in _BEFORE_A_COMMAND):
        at += 1
    return words[at:]


def _base(word: str) -> str:
    return word.rpartition("/")[2]
