"""Who is put into the pods of the survival matrix and of the schedule of faults: launcher, contract, helpers."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks import peers
from benchmarks.peers import SHARED_OFF, TORCHRUN
from tests.pods import Job
from tests.survival import jobs

HANG_TIMEOUT_S = "5"
EXPERT = {**SHARED_OFF, "PET_RDZV_CONF": "last_call_timeout=1,keep_alive_interval=1"}
MASTER_PORT = 23480
NAMES = (
    "trainer-launch, fixed",
    "trainer-launch, elastic",
    "torchrun, elastic",
    "torchrun, expert",
    "ft_launcher, elastic",
    "dlrover-run, elastic",
)
SCHEDULED = (*NAMES[:2], *NAMES[3:])  # those that a schedule of faults is for


@contextlib.contextmanager
def nothing(_job: Job) -> Iterator[None]:
    """No helper."""
    yield


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A launcher in pods of a contract."""

    name: str
    contract: jobs.Contract
    words: tuple[str, ...]  # before the script
    more: Mapping[str, str] | Callable[[int], Mapping[str, str]] = lambda _: {}
    without: tuple[str, ...] = ()  # how variables begin that it must not get
    helpers: tuple[str, ...] = ()  # hosts beside the pods
    beside: Callable[[Job], contextlib.AbstractContextManager[None]] = nothing

    @property
    def is_elastic(self) -> bool:
        return self.contract is jobs.ELASTIC

    def argv(self, script: str, *, is_hang: bool) -> tuple[str, ...]:
        """What each pod runs; this project is told how long a silence is a hang, where that is asked."""
        hang = ("--hang-timeout", HANG_TIMEOUT_S) if is_hang and self.words[-1] == "--" else ()
        if hang:
            return (*self.words[:-1], *hang, "--", script)
        return (*self.words, script)

    def env(self, node: int, restarts: int = 3) -> dict[str, str]:
        """The pod's variables; torchrun survives nothing without a budget, which Trainer v2 does not give."""
        given = self.contract.env_of(node)
        kept = {name: value for name, value in given.items() if not name.startswith(self.without or ("\0",))}
        more = self.more(node) if callable(self.more) else self.more
        return {**kept, **more, "PET_MAX_RESTARTS": str(restarts)}


TORCHRUN_EXPERT = Contestant(name=NAMES[3], contract=jobs.ELASTIC, words=TORCHRUN, more=EXPERT)


def ours() -> list[Contestant]:
    """This project, in both contracts."""
    words = (sys.executable, "-m", "trainer_launch", "run", "--grace", "5", "--")
    return [
        Contestant(name=name, contract=contract, words=words)
        for name, contract in zip(NAMES[:2], (jobs.FIXED, jobs.ELASTIC), strict=True)
    ]


def keeping() -> Contestant:
    """This project, in an elastic job whose ranks keep their state."""
    [_, elastic] = ours()
    return replace(elastic, name="trainer-launch, keeps state", more={"KEEPS_STATE": "1"})


def here() -> tuple[list[Contestant], dict[str, str]]:
    """All that are on this machine, in the order of the table; and why the others are not."""
    torchrun = Contestant(name=NAMES[2], contract=jobs.ELASTIC, words=TORCHRUN)
    others, absent = peers.those_here(dict(zip(NAMES[4:], (_nvrx, _dlrover), strict=True)))
    return [*ours(), torchrun, TORCHRUN_EXPERT, *others], absent


def scheduled() -> tuple[list[Contestant], dict[str, str]]:
    """Those of `SCHEDULED` that are on this machine, in its order; and why the others are not."""
    found, absent = here()
    return [who for who in found if who.name in SCHEDULED], absent


def _nvrx(name: str) -> Contestant:
    program = peers.program_of("nvrx", "ft_launcher")
    # Told 1:3, it begins with one node, and keeps the others as spares.
    return Contestant(name=name, contract=jobs.ELASTIC, words=(program,), more={"PET_NNODES": "3"})


def _dlrover(name: str) -> Contestant:
    python, program = peers.python_of("dlrover"), peers.program_of("dlrover", "dlrover-run")
    return Contestant(
        name=name,
        contract=jobs.ELASTIC,
        words=(program, "--nnodes", "1:3", "--nproc-per-node", "1"),
        more=lambda node: {
            "DLROVER_MASTER_ADDR": f"dlrover-master:{MASTER_PORT}",
            "NODE_ID": str(node),
            "NODE_RANK": str(node),
            "NODE_NUM": "3",
            "WORKER_NUM": "3",
        },
        without=("PET_",),
        helpers=("dlrover-master",),
        beside=functools.partial(_master, python),
    )


@contextlib.contextmanager
def _master(python: str, job: Job) -> Iterator[None]:
    """DLRover's master, on the host behind those of the pods."""
    words: Sequence[str] = peers.master(python, MASTER_PORT, 3)
    process = job.hosts[-1].start(("sh", "-c", 'exec "$@" >/dev/null 2>&1', "master", *words), {})
    try:
        yield
    finally:
        process.kill()
