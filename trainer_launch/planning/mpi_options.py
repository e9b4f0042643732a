"""The options of mpirun and horovodrun: what they take, and where the training command begins. Pure.

Of a typed `mpirun …`, what is ours to decide (hosts, how many) is taken out, and all other options stay. Open MPI's
and Hydra's options are told apart by nothing but their names, and both accept one dash or two. Horovod's are those
of 0.28, compared with its own parser by a test: PID 1 imports no Horovod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from types import MappingProxyType

from msgspec import Struct, field

from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import MAX_COUNT, parse_number
from trainer_launch.planning.torchrun_options import Option, split

_NAMES = re.compile(r"(mpirun|mpiexec)([.-](openmpi|mpich|hydra|intel))?|orterun|prterun|mpiexec\.hydra")
_NUMBER = frozenset(("np", "n", "c"))
_HOSTS = frozenset(("H", "host", "hosts"))
_FILES = frozenset(("hostfile", "machinefile", "f", "machine"))
_NAMED = frozenset(("x", "envlist", "genvlist"))
_SETS = frozenset(("mca", "gmca", "prtemca", "pmixmca", "env", "genv"))  # a name and a value
_OF_OPEN_MPI = """
N npernode npersocket wd wdir path prefix map-by rank-by bind-to output-filename timeout tune am app personality
dvm dvm-uri stdin output display runtime-options rtos cpu-set cpu-list rf rankfile report-pid report-uri
launch-agent ppr preload-files pset xterm default-hostfile max-vm-size fwd-environment keep-alive
"""
_OF_HYDRA = """
ppn perhost launcher rmk bootstrap launcher-exec bootstrap-exec iface membind prepend-pattern outfile-pattern
errfile-pattern nameserver configfile topolib demux usize ranks-per-proc localhost info umask
"""
_OTHERS = frozenset((_OF_OPEN_MPI + _OF_HYDRA).split())
# With none of these, ranks fill the slots of the list in order.
_PLACING = "N npernode npersocket map-by rank-by bynode pernode rf rankfile ppn perhost ppr rr"
_PLACING_PARAMETERS = """
rmaps_base_mapping_policy rmaps_base_schedule_policy rmaps_default_mapping_policy rmaps_base_ranking_policy
rmaps_default_ranking_policy rmaps_base_bynode rmaps_base_pernode rmaps_base_n_pernode rmaps_base_n_persocket
rmaps_base_pattern rmaps_ppr_pattern rmaps_rank_file_path orte_rankfile
"""
MCA_VARIABLES = ("OMPI_MCA_", "PRTE_MCA_")  # and a parameter's name
_ONE_VALUE = _NUMBER | _HOSTS | _FILES | _NAMED | _OTHERS


class Typed(Struct, frozen=True, kw_only=True):
    """A command of mpirun, taken apart."""

    mpirun: str  # as typed: a name or a path
    kept: tuple[str, ...] = ()  # its options, without those below
    number: int | None = None  # of ranks
    hosts: str | None = None  # of -H
    hostfile: str | None = None
    named: tuple[str, ...] = ()  # variables that ranks shall have
    names: frozenset[str] = frozenset()  # of options and of MCA parameters that were given
    values: Mapping[str, str] = field(default_factory=dict)  # of those that have one
    program: tuple[str, ...] = ()


def is_mpirun(word: str) -> bool:
    """Whether a command's first word is an mpirun of some kind."""
    return _NAMES.fullmatch(word.rpartition("/")[2]) is not None


def parse(words: Sequence[str]) -> Typed:
    """Take `mpirun [options] program …` apart; in an unknown option's place nothing is taken for its value.

    Raises:
        UsageError: an option lacks its value, a number is none, or there is no program.
    """
    kept: list[str] = []
    named: list[str] = []
    names: set[str] = set()
    values_of: dict[str, str] = {}
    single: dict[str, str] = {}
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        option, joined, value = words[at].partition("=")
        name = option.lstrip("-")
        values = 0 if joined else 2 if name in _SETS else 1 if name in _ONE_VALUE else 0
        if at + values >= len(words):
            raise UsageError(f"{words[0]}: {words[at]} lacks its value; see {words[0]} --help")
        if values == 1:
            value = words[at + 1]
        names.add(name)
        values_of[name] = value
        if name in _SETS and values:
            names.add(words[at + 1])
            values_of[words[at + 1]] = words[at + 2]
        kind = _kind(name)
        if kind and (joined or values):
            single[kind] = f"{single[kind]},{value}" if kind == "hosts" and kind in single else value
        else:
            kept += words[at : at + 1 + values]
        if name in _NAMED:
            named += [word.partition("=")[0] for word in value.split(",")]
        at += 1 + values
    at += words[at : at + 1] == ("--",)
    program = tuple(words[at:])
    if not program:
        raise UsageError(f"{words[0]} has no program to run; write it after its options")
    if ":" in program and "number" in single:  # several programs, each with its own number: not ours to change
        kept += ["-np", single.pop("number")]
    return Typed(
        mpirun=words[0],
        kept=tuple(kept),
        number=_number(words[0], single.get("number")),
        hosts=single.get("hosts"),
        hostfile=single.get("file"),
        named=tuple(named),
        names=frozenset(names),
        values=values_of,
        program=program,
    )


def fills_slots(typed: Typed, env: Mapping[str, str]) -> bool:
    """Whether ranks fill the slots of the list in order, as nobody has said otherwise."""
    parameters = _PLACING_PARAMETERS.split()
    told = any(env.get(f"{prefix}{name}") for prefix in MCA_VARIABLES for name in parameters)
    return not told and typed.names.isdisjoint((*_PLACING.split(), *parameters))


def _kind(name: str) -> str:
    """Which of ours an option is, if any."""
    kinds = (("number", _NUMBER), ("hosts", _HOSTS), ("file", _FILES))
    return next((kind for kind, known in kinds if name in known), "")


def _number(program: str, text: str | None) -> int | None:
    if text is None:
        return None
    number = parse_number(text, 1, MAX_COUNT)
    if number is None:
        raise UsageError(f"{program}: the number of processes is {text[:40]!r}; expected a number from 1")
    return number


# -- horovodrun -------------------------------------------------------------------------------


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
