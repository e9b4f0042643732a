"""A hello and a ring over MPI itself, and who is at fault where it fails: first one mpirun for all, then pairs.

A pair that cannot talk may end or hang all of MPI, so pairs are tested by an mpirun each, as `localise` asks for.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import shlex
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.host import deadline_subprocess
from trainer_launch.model import Member, hostfile
from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.findings import Finding, Scope, Status
from trainer_launch.model.units import listed
from trainer_launch.mpi import mpirun_command
from trainer_launch.mpi.mpirun_command import Dialect
from trainer_launch.mpi.ssh_client import Client
from trainer_launch.planning.typed_mpirun import Typed
from trainer_launch.preflight import fault_isolation
from trainer_launch.preflight.check import Where, at_once, check
from trainer_launch.preflight.cluster import pair_results
from trainer_launch.preflight.cluster.pair_results import Tested
from trainer_launch.preflight.fault_isolation import Pair, Trial
from trainer_launch.preflight.mpi.host_queries import AT_ONCE, Hosts, Launcher, argv_on
from trainer_launch.preflight.thresholds import Thresholds

RING = "mpi-ring"
_PROGRAM = Path(__file__).parents[1] / "children" / "mpi_ring.py"
_ALL_S, _PER_HOST_S = 30.0, 0.2  # for the first mpirun
_PAIR_S = 20.0
_PAIRS_AT_ONCE = 8
_HAS_S = 20.0  # for the question whether mpi4py is there
_SHOWN = 300
_LOAD = "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI"
_MICRO = 1e6
_ACTION_BUILD = "build mpi4py with mpirun's MPI, or point MPI4PY_MPIABI and LD_LIBRARY_PATH to it"
_PYTHON = re.compile(r"python(3(\.[0-9]+)?)?")
# Of the options of mpirun those that say how ranks talk; others would change what is printed, or where ranks are.
_ABOUT_TALKING = {
    **dict.fromkeys(("mca", "gmca", "prtemca", "pmixmca", "genv", "env"), 2),
    **dict.fromkeys(("x", "prefix", "iface"), 1),
}
Way = Callable[[Sequence[str], Sequence[str]], tuple[Sequence[str], Mapping[str, str]]]  # hosts, program: mpirun


class Heard(Struct, frozen=True, kw_only=True):
    """What a ring said."""

    hello: tuple[str, ...] = ()
    pairs: tuple[tuple[int, int, float, float], ...] = ()  # ranks, seconds, bytes per second
    why: str = ""  # not whole

    @property
    def is_whole(self) -> bool:
        """Whether it came to its end."""
        return not self.why


@check(RING, Where.MPI)
def mpi_ring(hosts: Hosts) -> Iterator[Finding]:
    """A hello and a ring over MPI itself come to their end, and no pair of hosts is slow."""
    if hosts.launcher.settings.level == "quick":
        return
    launcher, client, dialect = hosts.launcher, hosts.client, hosts.dialect
    if client is None or dialect is None:
        unknown = f"{launcher.mpirun} is not a known MPI" if launcher.mpirun else "Horovod's ranks do not use MPI"
        yield mpi_ring.skipped("no host accepts the key" if client is None else unknown)
        return

    def has(host: str, command: str) -> deadline_subprocess.Ended:
        return deadline_subprocess.run(argv_on(host, command, client), launcher.subject.env, _HAS_S)

    way = _way(launcher, dialect, client)
    yield from findings(tuple(hosts.let_in), _python(launcher.typed.program), way, has, launcher.thresholds)


def findings(
    hosts: Sequence[str],
    python: str,
    mpirun: Way,
    has: Callable[[str, str], deadline_subprocess.Ended],
    thresholds: Thresholds,
) -> Iterator[Finding]:
    """Test the hosts; `has` runs a shell's command on a host, by ssh."""
    if len(hosts) < 2:
        yield mpi_ring.skipped("there are fewer than two hosts to test")
        return
    lacking = _lacking(hosts, python, has)
    if lacking:
        why = lacking[next(iter(lacking))]
        yield mpi_ring.skipped(f"{python} has no mpi4py that works on {listed(list(lacking))}: {why}")
        return
    program = (python, "-c", _PROGRAM.read_text(encoding="utf-8"))
    first = _run(hosts, program, mpirun, _ALL_S + _PER_HOST_S * len(hosts))
    if first.is_whole and len(first.hello) < len(hosts):
        text = f"each rank sees a world of one: the mpi4py of {python} belongs to another MPI than mpirun"
        yield mpi_ring.unknown(text, scope=Scope.JOB, action=_ACTION_BUILD)
        return
    tests = [Tested(fault_isolation.pair(one, other), ("", ""), int(rate)) for one, other, _, rate in first.pairs]
    rounds: list[list[Tested]] = []
    if first.is_whole:
        rounds += [[test for test in tests if test.ends in chosen] for chosen in _rounds(len(hosts))]
    trial = _judged(len(hosts), rounds, thresholds)
    while chosen := fault_isolation.next_round(trial):
        rounds.append(_round(chosen, hosts, program, mpirun))
        trial = _judged(len(hosts), rounds, thresholds)
    tests = _flat(rounds)
    faulty = fault_isolation.verdict(trial)
    for finding in pair_results.findings(hosts, faulty, tests, thresholds):
        yield _renamed(finding, first)
    if not first.is_whole and not (faulty.nodes or faulty.links or faulty.unresolved):
        text = f"a hello over all hosts failed, while each pair passes: {first.why}"
        action = "run it again; if it fails again, see mpirun's output"
        yield mpi_ring.warned(text, scope=Scope.JOB, action=action)


def _rounds(n_hosts: int) -> Iterator[tuple[Pair, ...]]:
    """The rounds that are of use where nothing has failed."""
    trial = Trial(n_nodes=n_hosts)
    while chosen := fault_isolation.next_round(trial):
        yield chosen
        trial = fault_isolation.record(trial, dict.fromkeys(chosen, True))


def _judged(n_hosts: int, rounds: Sequence[Sequence[Tested]], thresholds: Thresholds) -> Trial:
    return pair_results.judged(Trial(n_nodes=n_hosts), rounds, pair_results.Standard(thresholds, _flat(rounds)))


def _flat(rounds: Sequence[Sequence[Tested]]) -> list[Tested]:
    return [test for tests in rounds for test in tests]


def _round(chosen: Sequence[Pair], hosts: Sequence[str], program: Sequence[str], mpirun: Way) -> list[Tested]:
    def one(ends: Pair) -> Tested:
        heard = _run([hosts[end] for end in ends], program, mpirun, _PAIR_S)
        rate = int(heard.pairs[0][3]) if heard.pairs else 0
        return Tested(ends, (heard.why, heard.why), rate)

    return list(at_once(chosen, one, _PAIRS_AT_ONCE).values())


def _run(hosts: Sequence[str], program: Sequence[str], mpirun: Way, limit_s: float) -> Heard:
    token = os.urandom(12).hex()
    argv, env = mpirun(hosts, (*program, token))
    began_s = time.monotonic()
    told = deadline_subprocess.run(argv, env, limit_s)
    heard = read(token, told.out)
    if heard.is_whole and told.code == 0:
        return heard
    lines = [line.strip() for line in told.err.splitlines() if line.strip(" -=\t")]
    how = f"no end within {time.monotonic() - began_s:.0f} s" if told.code is None else f"exit code {told.code}"
    return replace(heard, why=f"{how}: {lines[0][:_SHOWN]}" if lines else how)


def read(token: str, text: str) -> Heard:
    """What a ring has printed; it is not whole without its last line."""
    said: dict[str, Any] = {}
    for line in text.splitlines():
        first, _, rest = line.partition(" ")
        if first == token:
            with contextlib.suppress(*MALFORMED):
                said |= json.loads(rest)
    hello: tuple[str, ...] = ()
    found: tuple[tuple[int, int, float, float], ...] = ()
    try:
        read = ((int(a), int(b), float(s), float(r)) for a, b, s, r in said.get("pairs") or ())
        found = tuple(pair for pair in read if all(map(math.isfinite, pair)))
        hello = tuple(str(name) for name in said.get("hello") or ())
    except MALFORMED:
        said.pop("pairs", None)
    return Heard(hello=hello, pairs=found, why="" if "pairs" in said else "it did not come to its end")


def _lacking(
    hosts: Sequence[str], python: str, has: Callable[[str, str], deadline_subprocess.Ended]
) -> dict[str, str]:
    """Hosts whose ranks could not begin, and why; MPI itself is loaded and not entered."""
    question = f"{shlex.quote(python)} -c {shlex.quote(_LOAD)}"
    told = at_once(hosts, lambda host: has(host, question), AT_ONCE)
    return {host: one.why(_SHOWN) for host, one in told.items() if one.code != 0}


def _renamed(finding: Finding, first: Heard) -> Finding:
    """Under our name; with the latency, which other tests do not have."""
    told = (first.why,) if first.why else ()
    finding = replace(finding, check=RING, evidence=(*finding.evidence, *told))
    if finding.status is Status.PASS and first.pairs:
        times = [seconds * _MICRO for _, _, seconds, _ in first.pairs]
        words = f"; latency {statistics.median(times):.0f} µs in the middle, {max(times):.0f} µs at most"
        return replace(finding, text=f"over MPI, {finding.text}{words}")
    return replace(finding, text=f"over MPI, {finding.text}")


# -- the mpirun of the ring ----------------------------------------------------------------------


def _way(launcher: Launcher, dialect: Dialect, client: Client) -> Way:
    config, env_of, env = client.files.client, client.account.added_to, launcher.subject.env
    taken, numbers = launcher.typed, itertools.count()  # several run at once

    def way(hosts: Sequence[str], program: Sequence[str]) -> tuple[Sequence[str], Mapping[str, str]]:
        path = f"{launcher.folder}/hosts-{next(numbers)}"
        members = [Member(host, 1) for host in hosts]
        ours = Typed(
            mpirun=taken.mpirun, kept=_about_talking(taken.kept), named=taken.named, program=tuple(program)
        )
        if dialect.is_hydra:
            Path(path).write_text(hostfile.render_hydra(members), encoding="utf-8")
            argv = mpirun_command.hydra_argv(ours, path, len(hosts), mpirun_command.but_secrets(env))
            return argv, env_of(mpirun_command.hydra_env(env, dialect.name, config))
        Path(path).write_text(hostfile.render_open_mpi(members), encoding="utf-8")
        argv = mpirun_command.openmpi_argv(
            ours, path, len(hosts), mpirun_command.allowed(env), is_root=os.geteuid() == 0
        )
        return argv, env_of(mpirun_command.openmpi_env(env, dialect.major, config))

    return way


def _about_talking(kept: Sequence[str]) -> tuple[str, ...]:
    words = list(kept)
    found: list[str] = []
    while words:
        word = words.pop(0)
        count = _ABOUT_TALKING.get(word.lstrip("-"), 0) if word.startswith("-") else 0
        if count:
            found += [word, *words[:count]]
            del words[:count]
    return tuple(found)


def _python(program: Sequence[str]) -> str:
    first = program[0] if program else ""
    return first if _PYTHON.fullmatch(PurePosixPath(first).name) else "python3"
