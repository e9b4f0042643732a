"""A typed `mpirun …`: what is ours to decide (hosts, how many) is taken out, all other options stay. Pure.

Open MPI's and Hydra's options are told apart by nothing but their names, and both accept one dash or two.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from msgspec import Struct, field

from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import MAX_COUNT, parse_number

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
