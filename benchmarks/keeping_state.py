"""What a lost rank costs where the others keep their state, and where all read a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks import contestants, peers, schedule, trees
from benchmarks.measuring import Case, Reading, Section, Setup, wait_for
from benchmarks.peers import Launcher, versions_here, versions_of_peers
from tests.pods import missing
from trainer_launch.host import network

RANKS = 8
KILLS = {15: 3, 35: 4}  # steps, and the ranks that are killed in them
TURNS = tuple(f"{step}:{rank}" for step, rank in KILLS.items())
JOB = str(Path(__file__).with_name("keeping_state_job.py"))
BEGIN_S, BACK_S = 120.0, 60.0  # a start takes long on a busy machine
LOOK_S = 0.05  # between two looks at the memory
NAMES = (
    "trainer-launch, keeps state",
    "trainer-launch, checkpoint",
    "torchrun, checkpoint",
    "torchft",
    "torchft, expert",
    "nvrx in-process",
    "nvrx in-process, expert",
)
ALL, AGAIN, MEMORY = "SIGKILL to the next step of all ranks", "steps done again", "peak memory of all (PSS)"
SURVIVORS = "SIGKILL to the next step of the survivors"
ROWS = {ALL: "s", AGAIN: "", MEMORY: "MB"}
ON_SCHEDULE = {row: f"schedule of faults: {row}" for row in schedule.ROWS}
# A launcher for each replica group, as torchft's own component has it; its lighthouse is beside them.
REPLICAS = r"""
n=$1; port=$2; shift 2
for ((i = 0; i < n; i++)); do
    NUM_REPLICA_GROUPS=$n REPLICA_GROUP_ID=$i "$@" --master_port=$((port + i)) "$JOB" replica $TURNS &
done
wait
"""
# Plain processes: the wrapper does not work below torch.distributed.run, as its own example says.
PROCESSES = r"""
n=$1; shift
for ((i = 0; i < n; i++)); do RANK=$i LOCAL_RANK=$i "$@" & done
wait
"""


@dataclass(frozen=True)
class Line:
    """A step of a rank."""

    at_s: float
    rank: int
    step: int
    pid: int
    meeting: str


@dataclass(frozen=True)
class Way:
    """A launcher with its way of surviving; `loses` is how many ranks do not come back after each kill."""

    launcher: Launcher
    loses: int = 0


def lines_in(folder: str) -> list[Line]:
    """The steps so far, in their order."""
    path = Path(folder, "steps")
    words = [line.split() for line in path.read_text().split("\n")[:-1]] if path.exists() else []
    return [Line(float(at_s), int(rank), int(step), int(pid), meeting) for at_s, rank, step, pid, meeting in words]


def lines_after(lines: Sequence[Line], killed_s: float, step: int, rank: int) -> list[Line]:
    """The steps since this rank was killed in this step, but those of others that only write late."""
    last = max((line for line in lines if line.rank == rank and line.at_s < killed_s), key=lambda line: line.at_s)
    return [line for line in lines if line.at_s > killed_s and (line.meeting != last.meeting or line.step >= step)]


def once(way: Way) -> Mapping[str, Reading | float | str]:
    """One job with two killed ranks: the first is timed, at the second one the memory is looked at."""
    with trees.folder() as folder, way.launcher.beside() as more:
        env = {**way.launcher.env, **(more or {})}
        with trees.started(way.launcher.command(RANKS), env, folder) as job:
            readings: dict[str, Reading | float | str] = {}
            for number, (step, rank) in enumerate(KILLS.items()):
                mark = Path(folder, f"killed-{number}")
                job.wait_for(mark.exists, f"rank {rank} to be killed", BEGIN_S)
                wanted = RANKS - way.loses * (number + 1)
                after = functools.partial(_after, folder, float(mark.read_text()), step, rank)
                if number == 0:
                    job.wait_for(lambda: len(after()) >= wanted, f"{wanted} ranks to train again", BACK_S)  # noqa: B023
                    readings |= _costs(folder, float(mark.read_text()), step, rank, wanted)
                else:
                    readings[MEMORY] = _peak_mb(lambda: len(after()) >= wanted)  # noqa: B023
            return readings


def _after(folder: str, killed_s: float, step: int, rank: int) -> set[int]:
    return {line.rank for line in lines_after(lines_in(folder), killed_s, step, rank)}


def _costs(folder: str, killed_s: float, step: int, rank: int, wanted: int) -> dict[str, Reading | float | str]:
    lines = lines_in(folder)
    after, before = lines_after(lines, killed_s, step, rank), {line.pid for line in lines if line.at_s < killed_s}
    firsts: dict[int, Line] = {}
    for line in after:
        firsts.setdefault(line.rank, line)
    ranks = "" if wanted == RANKS else f"of {wanted} ranks"
    readings: dict[str, Reading | float | str] = {
        ALL: Reading(max(line.at_s for line in firsts.values()) - killed_s, ranks),
        AGAIN: float(max(0, step - min(line.step for line in after))),
    }
    if kept := [line for line in firsts.values() if line.pid in before]:
        readings[SURVIVORS] = max(line.at_s for line in kept) - killed_s
    return readings


def _peak_mb(is_back: Callable[[], bool]) -> float | str:
    """The most memory of all processes of the run until all ranks train again; a text: they do not."""
    peak, end_s = 0.0, time.monotonic() + BACK_S
    is_last = False
    while not is_last and time.monotonic() < end_s:
        is_last = is_back()
        peak = max(peak, trees.pss_mb(psutil.Process().children(recursive=True)))
        time.sleep(LOOK_S)
    return peak if is_last else f"never: not all ranks trained again within {BACK_S:g} s"


def _ours(name: str) -> Way:
    words = peers.OURS.command(RANKS)
    return Way(
        Launcher(
            name, lambda _: (*words, JOB, "generations" if name == NAMES[0] else "checkpoint", *TURNS), {}, 10.0
        )
    )


def _torchrun(name: str) -> Way:
    words = (
        *peers.TORCHRUN,
        "--standalone",
        "--max-restarts",
        "3",
        f"--nproc-per-node={RANKS}",
        JOB,
        "checkpoint",
        *TURNS,
    )
    return Way(Launcher(name, lambda _: words, peers.SHARED_OFF, 15.0))


def _torchft(name: str) -> Way:
    python = peers.python_of("torchft")
    torchrun = (python, "-m", "torch.distributed.run", "--nnodes=1", "--nproc_per_node=1", "--max_restarts=10")
    is_expert = name == NAMES[4]
    # The first are those of its README.
    sooner = ("--heartbeat_timeout_ms", "500") if is_expert else ()
    options = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000", *sooner)
    words = ("bash", "-c", REPLICAS, "replicas", str(RANKS), str(network.free_port()), *torchrun)
    env = {"JOB": JOB, "TURNS": " ".join(TURNS)} | ({"TUNED": "1"} if is_expert else {})
    beside = functools.partial(_lighthouse, str(Path(python).with_name("torchft_lighthouse")), options)
    return Way(Launcher(name, lambda _: words, env, 30.0, beside))


@contextlib.contextmanager
def _lighthouse(program: str, options: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """torchft's lighthouse, to which all replicas are connected."""
    port = network.free_port()
    argv = (program, *options, "--bind", f"127.0.0.1:{port}")
    with trees.started(argv, {}, os.environ.get("TMPDIR", trees.FOLDERS)):
        wait_for(lambda: peers.answers(port), "the lighthouse", 30.0, 0.05)
        yield {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}


def _nvrx(name: str) -> Way:
    python = peers.python_of("nvrx")
    words = ("bash", "-c", PROCESSES, "processes", str(RANKS), python, JOB, "in_process", *TURNS)
    own = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(network.free_port())}
    return Way(Launcher(name, lambda _: words, own | ({"TUNED": "1"} if name == NAMES[6] else {}), 30.0), loses=1)


MAKERS = (_ours, _ours, _torchrun, _torchft, _torchft, _nvrx, _nvrx)


def opened() -> Setup:
    """All ways that are here; the schedule of faults is ours, and schedule.py has it for the others."""
    ways, absent = peers.those_here(dict(zip(NAMES, MAKERS, strict=True)))
    limit_s = 2 * (BEGIN_S + BACK_S)
    cases = [
        Case(way.launcher.who, ROWS, functools.partial(once, way), limit_s, way.launcher.about_s, {SURVIVORS: "s"})
        for way in ways
    ]
    if (why := missing()) is None:
        units = {ON_SCHEDULE[row]: unit for row, unit in schedule.ROWS.items()}
        limit_s = schedule.CALM_S + schedule.LIMIT_S + 60.0
        cases.append(Case(NAMES[0], units, on_schedule, limit_s, 70.0))
    else:
        absent["the schedule of faults"] = why
    return Setup(cases, absent)


def on_schedule() -> Mapping[str, Reading | float | str]:
    """The job of schedule.py, whose ranks keep their state."""
    return {ON_SCHEDULE[row]: reading for row, reading in schedule.once(contestants.keeping()).items()}


def versions() -> dict[str, str]:
    """Of all that take part."""
    here = versions_here("trainer-launch", "torch", "Python")
    return here | versions_of_peers({"torchft": "torchft", "nvrx": "nvidia-resiliency-ext"})


SECTION = Section(
    name="keeping-state",
    title="Keeping state",
    about=(
        "8 workers with gloo on one node, 104 MB of state in each; one gets SIGKILL. A checkpoint is saved every "
        "10 steps. torchft's ranks are replica groups; *expert*: 0.5 s without a heartbeat, 1 s for a collective. "
        "nvrx is nvidia-resiliency-ext's wrapper, which goes on without the rank. The schedule is the one "
        "above."
    ),
    beside=(*NAMES[:3], NAMES[4], NAMES[5]),
    pictured=(ALL,),
    open=opened,
    whos=NAMES,
    versions=versions,
    is_by_default=False,
)
