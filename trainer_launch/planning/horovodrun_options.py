"""horovodrun's options as plain data: names, what they take, and where the training command begins.

PID 1 imports no Horovod, so it reads a command line with this table (compared with Horovod's own parser by a test).
Written for Horovod 0.28.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType

from msgspec import Struct

from trainer_launch.model.errors import UsageError
from trainer_launch.planning.launcher_options import Option, split


def _flags(names: str) -> tuple[Option, ...]:
    """Options without a value, none of which means anything to us."""
    return tuple(Option(name.replace("-", "_"), (f"--{name}",), 0) for name in names.split())


def _valued(names: str) -> tuple[Option, ...]:
    return tuple(Option(name.replace("-", "_"), (f"--{name}",)) for name in names.split())


OPTIONS: tuple[Option, ...] = (
    Option("num_proc", ("--num-proc", "-np")),
    Option("min_num_proc", ("--min-num-proc", "--min-np")),
    Option("max_num_proc", ("--max-num-proc", "--max-np")),
    Option("slots", ("--slots-per-host",)),
    Option("hosts", ("--hosts", "-H")),
    Option("hostfile", ("--hostfile", "-hostfile")),
    Option("host_discovery_script", ("--host-discovery-script",)),
    Option("ssh_port", ("--ssh-port", "-p")),
    Option("ssh_identity_file", ("--ssh-identity-file", "-i")),
    Option("nics", ("--network-interfaces",)),
    Option("nic", ("--network-interface",)),
    Option("cooldown_range", ("--blacklist-cooldown-range",), 2),
    Option("version", ("--version", "-v"), 0),
    Option("check_build", ("--check-build", "-cb"), 0),
    Option("prefix_timestamp", ("--prefix-output-with-timestamp", "-prefix-timestamp"), 0),
    *_valued("start-timeout output-filename config-file elastic-timeout reset-limit"),
    *_valued("fusion-threshold-mb cycle-time-ms cache-capacity timeline-filename log-level"),
    *_valued("autotune-log-file autotune-warmup-samples autotune-steps-per-sample"),
    *_valued("autotune-bayes-opt-max-samples autotune-gaussian-process-noise"),
    *_valued("stall-check-warning-time-seconds stall-check-shutdown-time-seconds"),
    *_valued("mpi-args binding-args num-nccl-streams thread-affinity gloo-timeout-seconds"),
    *_flags("disable-cache verbose tcp gloo mpi jsrun autotune no-autotune"),
    *_flags("hierarchical-allreduce no-hierarchical-allreduce torus-allreduce no-torus-allreduce"),
    *_flags("hierarchical-allgather no-hierarchical-allgather"),
    *_flags("timeline-mark-cycles no-timeline-mark-cycles no-stall-check stall-check"),
    *_flags("mpi-threads-disable no-mpi-threads-disable"),
    *_flags("log-with-timestamp log-without-timestamp log-hide-timestamp no-log-hide-timestamp"),
)
_HELP = Option("help", ("--help", "-h"), 0)
_BY_NAME: Mapping[str, Option] = MappingProxyType({option.name: option for option in OPTIONS})
_ONLY_ASKS = ("version", "check_build", "help")
_QUESTIONS = frozenset(("-h", "--help", "-v", "--version", "-cb", "--check-build"))


class HorovodCommand(Struct, frozen=True):
    """A horovodrun command line taken apart: options in the order they were typed, then the program."""

    typed: tuple[tuple[str, tuple[str, ...]], ...]  # name and values
    program: tuple[str, ...]
    unknown: tuple[str, ...] = ()  # --name=value words of a newer Horovod, handed on as they are

    def value(self, name: str) -> str | None:
        """The one value of an option, the last one if it was typed twice; None: not typed."""
        found = [values for typed, values in self.typed if typed == name]
        return found[-1][0] if found and found[-1] else None

    def has(self, name: str) -> bool:
        """Whether an option was typed."""
        return any(typed == name for typed, _ in self.typed)

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may come and go, by Horovod's own rule."""
        return self.has("host_discovery_script") or self.has("min_num_proc")

    @property
    def only_asks(self) -> bool:
        """Whether it only wants to be told something."""
        return any(self.has(name) for name in _ONLY_ASKS)

    def number(self, name: str) -> int | None:
        """An option that counts something.

        Raises:
            UsageError: it is no number of at least 1.
        """
        text = self.value(name)
        if text is None:
            return None
        if not (text.isascii() and text.isdigit() and len(text) < 8 and int(text) > 0):
            raise UsageError(f"horovodrun's {_BY_NAME[name].flag} is {text[:60]!r}; expected a number, at least 1")
        return int(text)


def is_horovodrun(argv: Sequence[str]) -> bool:
    """Whether a command is horovodrun, and asks it for more than words about itself."""
    if PurePosixPath(argv[0]).name != "horovodrun":
        return False
    return not any(word in _QUESTIONS for word in argv[1:2])


def split_command(argv: Sequence[str]) -> HorovodCommand:
    """Take `horovodrun [options] python train.py …` apart, without the leading `horovodrun`.

    Raises:
        UsageError: an option that horovodrun does not know, one without its value, or no program.
    """
    found = split(argv, (*OPTIONS, _HELP), "horovodrun")
    command = HorovodCommand(found.typed, found.program, found.unknown)
    if not command.program and not command.only_asks:
        raise UsageError(
            "the horovodrun command names no program; write: horovodrun -np 4 [options] python train.py"
        )
    return command


def render(command: HorovodCommand, *, without: Sequence[str] = ()) -> tuple[str, ...]:
    """The options as typed, in full, but for the ones that are ours to say."""
    words: list[str] = []
    for name, values in command.typed:
        if name in without or name not in _BY_NAME:
            continue
        flag = _BY_NAME[name].flag
        words += [f"{flag}={values[0]}"] if len(values) == 1 else [flag, *values]
    return (*words, *command.unknown)
