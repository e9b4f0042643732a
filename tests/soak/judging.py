"""What must hold of a job's steps, and of its pods that are looked at again and again. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from statistics import median

from tests.soak.faults import CHECKPOINT_STEPS
from tests.soak.looking import LAUNCHER, Look, Process
from tests.survival.jobs import Step

ROLES = {LAUNCHER: 1, "server": 1, "worker": 1, "sleep": 1}  # the first node has a store, a fork of the server, too
SEGMENTS = 1  # the worker's
LAUNCHER_KB_PER_HOUR = 2048.0
OTHERS_KB_PER_HOUR = 16_384.0  # torch's own libraries live there
MORE_FDS, MORE_THREADS = 3, 1  # than at a process's first look, without being a leak: a connection that ends later
TMP_BYTES, TMP_FILES = 400_000, 16
CLOSE_WAIT = 0
INCIDENTS = 11  # ten are kept; one that nobody was told of stays until the next
WARM_UP = 0.5  # of a process's samples are left out: buffers fill, modules are loaded on first use
HOUR_S = 3600.0
MIN_SAMPLES, MIN_S = 12, 300.0

Points = Sequence[tuple[float, float]]  # seconds, value


def broken(steps: Sequence[Step], keeps_state: bool) -> list[str]:
    """Where a step was left out, or lost beyond the checkpoint, or two starts trained at a time."""
    found, over = [], set[str]()
    for a, b in itertools.pairwise(steps):
        if b.start == a.start:
            if b.number != a.number + 1:
                found.append(f"step {b.number} after step {a.number} of the same start")
            continue
        over.add(a.start)
        if b.start in over:
            found.append(f"start {b.start} went on at step {b.number} although {a.start} had begun")
        # The checkpoint is written before the line, and whoever is killed between them leaves no line.
        bases = {_checkpoint(a.number), _checkpoint(a.number + 1)} | (
            {a.number, a.number + 1} if keeps_state else set()
        )
        if b.number - 1 not in bases:
            found.append(f"step {b.number} after step {a.number} and a new start")
    return found


def done_again(steps: Sequence[Step]) -> list[str]:
    """Where a job whose ranks keep their state did a step again."""
    return [
        f"step {b.number} was done again after step {a.number}, though ranks had kept their state"
        for a, b in itertools.pairwise(steps)
        if b.number <= a.number
    ]


def _checkpoint(step: int) -> int:
    return step // CHECKPOINT_STEPS * CHECKPOINT_STEPS


def longest_s(steps: Sequence[Step], from_s: float, until_s: float) -> float:
    """The longest time in which no step was done beyond those done before."""
    news = [from_s, *(step.at_s for step in _new(steps) if from_s < step.at_s < until_s), until_s]
    return max(b - a for a, b in itertools.pairwise(news))


def _new(steps: Iterable[Step]) -> Iterable[Step]:
    highest = 0
    for step in steps:
        if step.number > highest:
            highest = step.number
            yield step


def strange(look: Look) -> list[str]:
    """What no well pod shows, a sentence each."""
    found = []
    right = ROLES | ({"server": 2} if look.node == 0 else {})
    if dict(look.roles) != right:
        found.append(f"pod {look.node} has the processes {look.roles}, where {right} are right")
    for what, count, bound in (
        ("segments of shared memory", look.segments, SEGMENTS),
        ("files in TMPDIR", look.tmp_files, TMP_FILES),
        ("incidents", look.incidents, INCIDENTS),
        ("bytes in TMPDIR", look.tmp_bytes, TMP_BYTES),
        ("sockets whose peer has gone", look.close_wait, CLOSE_WAIT),
    ):
        if count > bound:
            found.append(f"pod {look.node} has {count} {what}, where {bound} are right")
    return found


def grown(first: Process, now: Process) -> list[str]:
    """What a process has more than at its first look."""
    found = []
    for what, before, after, more in (
        ("descriptors", first.fds, now.fds, MORE_FDS),
        ("threads", first.threads, now.threads, MORE_THREADS),
    ):
        if after > before + more:
            found.append(f"{now.role} {now.pid} has {after} {what}, and had {before} at its first look")
    return found


Key = tuple[int, str, int]  # node, role, pid


def histories(looks: Sequence[Look]) -> dict[Key, list[tuple[float, Process]]]:
    """What each long-lived process was seen to be, with the time of each look."""
    found: dict[Key, list[tuple[float, Process]]] = {}
    for look in looks:
        for process in look.long_lived:
            found.setdefault((look.node, process.role, process.pid), []).append((look.at_s, process))
    return found


def growing(seen: Mapping[Key, Sequence[tuple[float, Process]]]) -> list[str]:
    """Whose memory is not flat."""
    found = []
    for (node, role, pid), history in seen.items():
        slope = kb_per_hour([(at_s, process.memory_kb) for at_s, process in history])
        bound = LAUNCHER_KB_PER_HOUR if role == LAUNCHER else OTHERS_KB_PER_HOUR
        if slope > bound:
            found.append(
                f"the memory of {role} {pid} of pod {node} grows by {slope:.0f} KiB per hour, more than {bound:.0f}"
            )
    return found


def kb_per_hour(points: Points) -> float:
    """The median of the slopes between any two, without the warm-up; 0 where there are too few points to tell.

    One step, such as modules that the first hang loads, counts for little unless it comes in the middle of them.
    """
    kept = points[int(len(points) * WARM_UP) :]
    if len(kept) < MIN_SAMPLES or kept[-1][0] - kept[0][0] < MIN_S:
        return 0.0
    return HOUR_S * median(
        (after - before) / (end_s - begin_s)
        for (begin_s, before), (end_s, after) in itertools.combinations(kept, 2)
    )
