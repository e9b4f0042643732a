"""The options of mpirun and horovodrun: what they take, and where the training command begins. Pure.

What is ours to decide (hosts, how many) is taken out, and all other options stay. Open MPI's and Hydra's options
differ in nothing but their names, and both accept one dash or two. Horovod's are those of 0.28, compared
with its own parser by a test: PID 1 imports no Horovod.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import MAX_COUNT, parse_number

_MPIRUNS = re.compile(r"(mpirun|mpiexec)([.-](openmpi|mpich|hydra|intel))?|orterun|prterun|mpiexec\.hydra")
_HOROVODRUN = "horovodrun"
_NUMBER = frozenset(("np", "n", "c", "num-proc"))
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
_OF_MPIRUN = _NUMBER | _HOSTS | _FILES | _NAMED | frozenset((_OF_OPEN_MPI + _OF_HYDRA).split())
MCA_VARIABLES = ("OMPI_MCA_", "PRTE_MCA_")  # and a parameter's name
MIN_NUMBER = ("min-num-proc", "min-np")
DISCOVERY, SLOTS, SSH_PORT = "host-discovery-script", "slots-per-host", ("ssh-port", "p")
INTERFACES = ("network-interfaces", "network-interface")
COOLDOWN = "blacklist-cooldown-range"
_VALUED = f"""
np num-proc {" ".join(MIN_NUMBER)} max-num-proc max-np {SLOTS} H hosts hostfile {DISCOVERY} {" ".join(SSH_PORT)}
ssh-identity-file i {" ".join(INTERFACES)} start-timeout output-filename config-file elastic-timeout reset-limit
fusion-threshold-mb cycle-time-ms cache-capacity timeline-filename log-level autotune-log-file
autotune-warmup-samples autotune-steps-per-sample autotune-bayes-opt-max-samples autotune-gaussian-process-noise
stall-check-warning-time-seconds stall-check-shutdown-time-seconds mpi-args binding-args num-nccl-streams
thread-affinity gloo-timeout-seconds
"""
_FLAGS = """
version v check-build cb help h prefix-output-with-timestamp prefix-timestamp disable-cache verbose tcp gloo mpi
jsrun autotune no-autotune hierarchical-allreduce no-hierarchical-allreduce torus-allreduce no-torus-allreduce
hierarchical-allgather no-hierarchical-allgather timeline-mark-cycles no-timeline-mark-cycles no-stall-check
stall-check mpi-threads-disable no-mpi-threads-disable log-with-timestamp log-without-timestamp log-hide-timestamp
no-log-hide-timestamp
"""
OF_HOROVODRUN: Mapping[str, int] = {  # and how many values each takes
    **dict.fromkeys(_FLAGS.split(), 0),
    **dict.fromkeys(_VALUED.split(), 1),
    COOLDOWN: 2,
}
_QUESTIONS = frozenset(("-h", "--help", "-v", "--version", "-cb", "--check-build"))


class Typed(Struct, frozen=True, kw_only=True):
    """A command of mpirun or horovodrun, taken apart."""

    mpirun: str  # as typed: a name or a path
    kept: tuple[str, ...] = ()  # its options, without those below
    number: int | None = None  # of ranks
    hosts: str | None = None  # of -H
    hostfile: str | None = None
    named: tuple[str, ...] = ()  # variables that ranks shall have
    names: frozenset[str] = frozenset()  # of options and of MCA parameters that were given
    values: Mapping[str, str] = field(default_factory=dict)  # of those that have one
    program: tuple[str, ...] = ()

    @property
    def is_elastic(self) -> bool:
        """Whether hosts may come and go, by Horovod's own rule."""
        return not self.names.isdisjoint((DISCOVERY, *MIN_NUMBER))

    def number_of(self, *names: str) -> int | None:
        """The value of an option, by any of its names, that counts something.

        Raises:
            UsageError: it is no number of at least 1.
        """
        name = next((name for name in names if name in self.values), None)
        return None if name is None else _number(self.mpirun, self.values[name], f"--{names[0]}")


def is_mpirun(word: str) -> bool:
    """Whether a command's first word is an mpirun of some kind."""
    return _MPIRUNS.fullmatch(_base(word)) is not None


def is_horovodrun(argv: Sequence[str]) -> bool:
    """Whether a command is horovodrun, and asks it for more than words about itself."""
    return _base(argv[0]) == _HOROVODRUN and _QUESTIONS.isdisjoint(argv[1:2])


def _base(word: str) -> str:
    return word.rpartition("/")[2]


def parse(words: Sequence[str]) -> Typed:
    """Take `mpirun [options] program …` apart; in an unknown option's place nothing is taken for its value.

    Raises:
        UsageError: an option lacks its value, a number is none, there is no program, or horovodrun has no such
            option.
    """
    kept: list[str] = []
    named: list[str] = []
    values_of: dict[str, str] = {}
    names: set[str] = set()
    single: dict[str, str] = {}
    at = 1
    while at < len(words) and words[at].startswith("-") and words[at] != "--":
        option, joined, value = words[at].partition("=")
        name = option.lstrip("-")
        values = 0 if joined else _count(words[0], name)
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
    at += "--" in words[at : at + 1]
    program = tuple(words[at:])
    if not program:
        raise UsageError(f"{words[0]} has no program to run; write it after its options")
    if ":" in program and "number" in single:  # several programs, each with its own number: not ours to change
        kept += ["-np", single.pop("number")]
    number = single.get("number")
    return Typed(
        mpirun=words[0],
        kept=tuple(kept),
        number=None if number is None else _number(words[0], number, "the number of processes"),
        hosts=single.get("hosts"),
        hostfile=single.get("file"),
        named=tuple(named),
        names=frozenset(names),
        values=values_of,
        program=program,
    )


def _count(program: str, name: str) -> int:
    """How many of the next words belong to an option."""
    if _base(program) != _HOROVODRUN:
        return 2 if name in _SETS else int(name in _OF_MPIRUN)
    if name not in OF_HOROVODRUN:
        raise UsageError(
            f"unknown option of horovodrun: {name[:60]!r}; write it in full, or a new one as --NAME=VALUE"
        )
    return OF_HOROVODRUN[name]


def _kind(name: str) -> str:
    """The kind of an option that is ours to decide; "": it is the user's."""
    kinds = (("number", _NUMBER), ("hosts", _HOSTS), ("file", _FILES))
    return next((kind for kind, options in kinds if name in options), "")


def _number(program: str, text: str, what: str) -> int:
    number = parse_number(text, 1, MAX_COUNT)
    if number is None:
        raise UsageError(f"{program}: {what} is {text[:40]!r}; expected a number from 1")
    return number
