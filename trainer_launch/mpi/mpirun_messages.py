"""What mpirun says of the end of its job: who failed, which host was lost, which could not be reached. Pure.

Of Open MPI 4 and 5, MPICH and Intel MPI; and ssh's own words, which come through mpirun's stderr.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace

from trainer_launch.model import exit_codes

_FATAL = frozenset(
    (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
)
_MAX_CHARS = 400  # of a line that is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What was said so far; None: nothing."""

    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    host: str | None = None  # where the first rank failed
    lost: str | None = None  # a host that mpirun has lost, by its name
    unreached: str | None = None  # a host that no daemon could be started on, or "" when it was not named
    words: str = ""  # why not


def heard(said: Said, line: str) -> Said:
    """Take one line of mpirun's stderr in; what was said first stands."""
    for pattern, take in _PATTERNS:
        found = pattern.search(line[:_MAX_CHARS])
        if found:
            return take(said, found)
    return said


def _first(said: Said, rank: int | None, code: int | None, number: int | None, host: str | None) -> Said:
    """What a rank itself has printed may look the same: no failure has the code 0, or one that no process has."""
    code, number = exit_codes.failing(code), exit_codes.deadly(number)
    return replace(
        said,
        rank=said.rank if said.rank is not None else rank,
        exit_code=said.exit_code if said.exit_code is not None else code,
        signal=said.signal if said.signal is not None else number,
        host=said.host or host,
    )


def _of_hydra(number: int) -> tuple[int | None, int | None]:
    """MPICH's banner, which it prints for ranks that died of a signal, gives the signal as their exit code."""
    return (None, number) if number in _FATAL else (number, None)


def _unreached(said: Said, found: re.Match[str]) -> Said:
    if said.words:
        return said
    return replace(said, unreached=found.groupdict().get("host") or "", words=found[0].strip()[:200])


_Take = Callable[[Said, "re.Match[str]"], Said]
_HOST = r"(?P<host>[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252})"
_HOST2 = _HOST.replace("host", "host2")
_PATTERNS: tuple[tuple[re.Pattern[str], _Take], ...] = (
    # -- Open MPI --
    (
        re.compile(rf"noticed that process rank (\d+) with PID \d+ on node {_HOST} exited on(?: signal (\d+))?"),
        lambda said, f: _first(said, int(f[1]), None, int(f[3]) if f[3] else None, f["host"]),
    ),
    (  # Open MPI 5 breaks that line
        re.compile(r"^signal (\d+) \("),
        lambda said, f: _first(said, None, None, int(f[1]), None) if said.rank is not None else said,
    ),
    (
        re.compile(r"^\s*Process name:\s*\[\S+,(\d+)\]\s*$"),
        lambda said, f: _first(said, int(f[1]), None, None, None),
    ),
    (  # below the rank's name: programs write such a line, too
        re.compile(r"^\s*Exit code:\s*(\d+)"),
        lambda said, f: _first(said, None, int(f[1]), None, None) if said.rank is not None else said,
    ),
    (
        re.compile(r"MPI_ABORT was invoked on rank (\d+) "),
        lambda said, f: _first(said, int(f[1]), None, None, None),
    ),
    (
        re.compile(rf"^\s*Remote daemon:? ?.*? on node {_HOST}"),
        lambda said, f: replace(said, lost=said.lost or f["host"]),
    ),
    (
        re.compile(
            r"(?:ORTE|PRTE|PRRTE) .*has (?:lost communication|unexpectedly failed)|daemon failed to report back"
        ),
        lambda said, f: said if said.lost or said.words else replace(said, unreached="", words=f[0]),
    ),
    (
        re.compile(r"unable to find the specified executable"),
        lambda said, f: _first(said, None, exit_codes.NOT_FOUND, None, None),
    ),
    (
        re.compile(r"unable to launch the specified application as it could not access"),
        lambda said, f: _first(said, None, exit_codes.NOT_EXECUTABLE, None, None),
    ),
    # -- Hydra --
    (
        re.compile(r"execvp error on file .*\((No such file|Permission denied)"),
        lambda said, f: _first(
            said, None, exit_codes.NOT_FOUND if f[1].startswith("No") else exit_codes.NOT_EXECUTABLE, None, None
        ),
    ),
    (
        re.compile(rf"^=\s+(?:RANK (\d+) )?PID \d+ RUNNING AT {_HOST}"),
        lambda said, f: _first(said, int(f[1]) if f[1] else None, None, None, f["host"]),
    ),
    (re.compile(r"^=\s+EXIT CODE: (\d+)"), lambda said, f: _first(said, None, *_of_hydra(int(f[1])), None)),
    (re.compile(r"^=\s+KILLED BY SIGNAL: (\d+)"), lambda said, f: _first(said, None, None, int(f[1]), None)),
    (
        re.compile(r"THE EXIT STRING: .*\(signal (\d+)\)"),
        lambda said, f: replace(_first(said, None, None, int(f[1]), None), exit_code=None),
    ),
    (
        re.compile(r"MPI_Abort\(.*\) - process (\d+)"),
        lambda said, f: _first(said, int(f[1]), None, None, None),
    ),
    (
        re.compile(r"^Abort\(-?\d+\) on node \d+ \(rank (\d+) in comm 0\)"),
        lambda said, f: _first(said, int(f[1]), None, None, None),
    ),
    # -- ssh --
    # Hydra keeps one ssh for each host, and says nothing itself when that ends.
    (
        re.compile(rf"^(?:Connection to {_HOST} closed by remote host|Timeout, server {_HOST2} not responding)"),
        lambda said, f: replace(said, lost=said.lost or f["host"] or f["host2"]),
    ),
    (re.compile(rf"ssh: connect to host {_HOST} port \d+: .*"), _unreached),
    (re.compile(rf"ssh: Could not resolve hostname {_HOST}: .*"), _unreached),
    (re.compile(rf"(?:\S+@)?{_HOST}: Permission denied \(.*"), _unreached),
    (re.compile(r"Host key verification failed.*"), _unreached),
    (re.compile(r"kex_exchange_identification: .*"), _unreached),
    (re.compile(rf"No \S+ host key is known for \[?{_HOST}\]?.*"), _unreached),
)
