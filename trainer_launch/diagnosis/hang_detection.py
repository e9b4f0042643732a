"""Decide whether this node's workers hang: samples in, verdict out. Pure; `watch` takes the samples and acts.

Strong signs of life are output, reported progress, collectives that advance, and what a main thread writes. Weak
signs are CPU time, wake-ups and reads of a main thread. T is the timeout:

- stopped: a worker is suspended (SIGSTOP) for T. Nobody else is asked, and nobody is idle: the others wait for it.
- idle: a worker shows no strong sign for T, and does no more than wait: next to no CPU time, wake-ups and reads.
  Where nobody can explain what it waits for, all workers must be idle: ranks work in lockstep, and often only
  rank 0 has any strong sign. While they start, `PATIENCE` * T: until a worker's first collective, or until strong
  signs have come for T.
- busy: somebody does use CPU, but the node has shown progress for at least T before, and then none for
  `PATIENCE` * T and for `USUAL` times the longest pause that it had. Without strong signs being busy is no hang.

A collective that never ends may sleep (gloo) or spin (NCCL): the first is idle, the second busy, whose fault it is.

A worker that a debugger holds pauses everything, and so does a gap in our own observation: we were suspended too.

Whose main thread counts: a worker's own, and that of a program that it waits for. All else beside them, threads and
children alike, counts only once it does more than a writer of metrics does, which outlives a hang: W&B and MLflow
with their system metrics take at most 1 % of a CPU and 140 KB/s, even where they look each second. A backward
pass, a thread that evaluates, a compiler or a data loader takes more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model.units import named_ranks

PATIENCE = 3  # times the timeout, where there may be a good reason: starting, busy, waiting for another node
USUAL = 10  # times the longest pause between strong signs is no longer usual
LEARN = 5  # pauses, before anything is known about them
REMEMBER = 100  # pauses
AUTO_FLOOR_S = 60.0  # no learned timeout is shorter
UNLEARNED_S = 1800.0  # before it is learned; it allows for the start as well, and for a computation
_WINDOW = 10  # looks that are compared: half of a timeout
# What is next to nothing, at once and in each second more.
_IDLE = (
    (0.05, 0.02),  # CPU seconds, a few ticks: gloo's own thread, which wakes up 100 times a second, takes 0.002
    (4, 1.0),  # going to sleep: a data loader's consumer looks after its workers every 5 s
    (0, 0),  # bytes written
    (256, 64.0),  # bytes read: a wake-up through a pipe takes a few
)
# What threads and children beside a main thread may take for metrics and logs.
_BESIDE = (
    (0.1, 0.05),  # CPU seconds
    (512 << 10, 256 << 10),  # bytes read and written
)


class Rules(Struct, frozen=True, kw_only=True):
    """The timeouts that the user asked for."""

    timeout_s: float | None  # None: learn it from the pauses between strong signs
    # The timeout before anything is learned; None: there is none. A rank that computes for less makes progress.
    unlearned_s: float | None = None
    weak_signs: bool = True  # False: the work is done elsewhere, so being idle here says nothing

    @property
    def pace_s(self) -> float:
        """Between two looks."""
        return min(10.0, max(0.25, (self.timeout_s or AUTO_FLOOR_S) / 20))


class WatchedWorker(Struct, frozen=True):
    """A training process; the same number with another start is another worker."""

    name: str  # as people call it: `rank 3`
    pid: int
    started: int
    rank: int | None = None
    local_rank: int | None = None
    stacks: str | None = None  # where it writes its threads' stacks when it is asked


class Activity(Struct, frozen=True, kw_only=True):
    """The work so far of a process of a worker: of its main thread, and of all its other threads."""

    pid: int
    parent: int = 0
    started: int = 0
    age_s: float = 0.0
    state: str = "S"  # of its main thread, as /proc has it; T: suspended, t: held by a debugger, D: in the kernel
    waits_for_child: bool = False  # its main thread, for that a child ends
    cpu_s: float = 0.0  # of its main thread
    switches: int = 0  # how often its main thread went to sleep by itself
    read: int = 0  # bytes, by its main thread
    written: int = 0  # likewise, less what it was asked for
    output_ns: int = 0  # when a file that is its output has changed
    beside_cpu_s: float = 0.0  # of its other threads, and of children that have ended
    beside_bytes: int = 0  # that its other threads have read and written, less what they were asked for

    @property
    def key(self) -> tuple[int, int]:
        """The pid and the start, which a later process of this pid does not share."""
        return self.pid, self.started

    @property
    def counts(self) -> tuple[float, ...]:
        """The counters of its main thread: CPU seconds, times that it went to sleep, bytes written and read."""
        return self.cpu_s, self.switches, self.written, self.read


class Sample(Struct, frozen=True, kw_only=True):
    """A look at a worker."""

    processes: tuple[Activity, ...]  # the worker's own first, then everything below it
    signs: tuple[int, ...] = ()  # strong ones: whatever changes
    has_joined: bool = False  # it has entered a collective, so it is no longer starting

    @property
    def state(self) -> str:
        """Of the worker's main thread."""
        return self.processes[0].state


class Work(NamedTuple):
    """The remembered work of a main thread, or of all that is beside the main threads."""

    since: tuple[float, ...]  # its counters some time ago
    since_at_s: float
    work_at_s: float  # when they last rose by more than next to nothing

    def observed(
        self, now: tuple[float, ...], at_s: float, window_s: float, little: Sequence[tuple[float, float]]
    ) -> Work:
        """With the counters as they are now; `little` is next to nothing of each."""
        for_s = at_s - self.since_at_s
        is_little = all(
            count - before <= floor + rate * for_s
            for count, before, (floor, rate) in zip(now, self.since, little, strict=True)
        )
        if is_little and for_s < window_s:
            return self
        return Work(now, at_s, self.work_at_s if is_little else at_s)


class Track(Struct, frozen=True):
    """The remembered signs of a worker."""

    born_at_s: float
    last: Sample
    main_threads: Mapping[tuple[int, int], Work]
    beside: Work
    beside_counts: tuple[float, float]  # CPU seconds and bytes so far
    quiet_at_s: float  # since then it did next to nothing
    stopped_at_s: float | None = None
    sign_at_s: float | None = None  # its own last strong sign

    @property
    def idle_at_s(self) -> float:
        """Since then it has shown no sign of any kind."""
        return self.quiet_at_s if self.sign_at_s is None else max(self.quiet_at_s, self.sign_at_s)


class WatchedNode(Struct, frozen=True):
    """The remembered signs of all workers of this node."""

    tracks: Mapping[WatchedWorker, Track]
    at_s: float
    first_sign_at_s: float | None = None  # of these workers
    sign_at_s: float | None = None
    pauses_s: tuple[float, ...] = ()  # between strong signs, also of earlier workers


class Quiet(NamedTuple):
    """How long ago one worker has done something; None: not since it is watched."""

    sign_s: float | None  # a strong sign
    work_s: float | None  # more than wait, unless it computes for too long
    may_spin: bool = False  # it is busy without progress, as those are that wait in NCCL


class HangKind(Enum):
    """How workers hang."""

    STOPPED = "stopped"
    IDLE = "idle"
    BUSY = "busy"


class Hang(Struct, frozen=True, kw_only=True):
    """A verdict."""

    kind: HangKind
    workers: tuple[WatchedWorker, ...]  # who is evidently to blame, or all
    for_s: float
    limit_s: float  # the timeout that was taken
    text: str
    is_partial: bool = False  # other workers are at work, or have been within the timeout
    is_early: bool = False  # nothing is learned yet, so that only evidence counts


def begin(at_s: float) -> WatchedNode:
    """Nothing is known."""
    return WatchedNode({}, at_s)


def observe(node: WatchedNode, samples: Mapping[WatchedWorker, Sample], at_s: float, rules: Rules) -> WatchedNode:
    """Take in one look at all workers that are alive."""
    has_others = any(worker not in node.tracks for worker in samples)
    is_held = any(sample.state == "t" for sample in samples.values())
    if has_others or is_held or at_s - node.at_s > max(5.0, 4 * rules.pace_s):
        fresh = {worker: _begun(sample, at_s) for worker, sample in samples.items()}
        if has_others:
            return WatchedNode(fresh, at_s, pauses_s=node.pauses_s)
        first_s, last_s = node.first_sign_at_s, node.sign_at_s
        if first_s is not None and last_s is not None:  # it stays known for how long there was progress before
            first_s, last_s = at_s - (last_s - first_s), at_s
        return replace(node, tracks=fresh, at_s=at_s, first_sign_at_s=first_s, sign_at_s=last_s)
    tracks = {
        worker: _follow(node.tracks[worker], sample, at_s, rules.pace_s, is_program=worker.rank is None)
        for worker, sample in samples.items()
    }
    node_now = replace(node, tracks=tracks, at_s=at_s)
    if all(track.sign_at_s != at_s for track in tracks.values()):
        return node_now
    first_s = at_s if node.first_sign_at_s is None else node.first_sign_at_s
    pauses_s = node.pauses_s if node.sign_at_s is None else (*node.pauses_s, at_s - node.sign_at_s)[-REMEMBER:]
    return replace(node_now, first_sign_at_s=first_s, sign_at_s=at_s, pauses_s=pauses_s)


def limit_s(node: WatchedNode, rules: Rules) -> float | None:
    """The timeout: as it was given, or as it was learned; None: not yet."""
    if rules.timeout_s is not None:
        return rules.timeout_s
    return max(AUTO_FLOOR_S, USUAL * max(node.pauses_s)) if len(node.pauses_s) >= LEARN else rules.unlearned_s


def judge(node: WatchedNode, rules: Rules, *, is_explained: bool = False) -> Hang | None:
    """Say who hangs, if anybody does; where that `is_explained` by all nodes, some idle workers suffice to ask."""
    limit = limit_s(node, rules)
    if limit is None or not node.tracks:
        return None
    idle = _idle(node, rules, limit, is_explained=is_explained) if rules.weak_signs else None
    return _stopped(node, limit) or idle or _busy(node, rules, limit)


def quiet(node: WatchedNode, all_rules: Sequence[Rules]) -> dict[WatchedWorker, Quiet]:
    """The last signs of each worker."""
    spinning, endless = set[WatchedWorker](), set[WatchedWorker]()
    for rules in all_rules:
        limit = limit_s(node, rules)
        hang = None if limit is None else _busy(node, rules, limit)
        if hang is not None:
            spinning.update(hang.workers)
            if hang.for_s >= (rules.unlearned_s or 0.0):
                endless.update(hang.workers)
    return {
        worker: Quiet(
            None if track.sign_at_s is None else node.at_s - track.sign_at_s,
            None if worker in endless else node.at_s - track.quiet_at_s,
            may_spin=worker in spinning,
        )
        for worker, track in node.tracks.items()
    }


def others_s(hang: Hang) -> float:
    """How long workers that merely wait give another node's: until a busy one there would have been found out."""
    return PATIENCE * hang.limit_s + min(10.0, max(2.0, hang.limit_s / 4))


def _begun(sample: Sample, at_s: float) -> Track:
    mains = {process.key: Work(process.counts, at_s, at_s) for process in sample.processes}
    return Track(at_s, sample, mains, Work((0.0, 0.0), at_s, at_s), (0.0, 0.0), at_s)


def _follow(track: Track, sample: Sample, at_s: float, pace_s: float, *, is_program: bool) -> Track:
    """Take in one look; every main thread counts in a program, whose shape is unknown.

    Who has children there may only look after them, as torchrun does ten times a second: its wake-ups do not
    count.
    """
    window_s, before = _WINDOW * pace_s, {process.key: process for process in track.last.processes}
    # A moment ago, too: that its last child has ended is no work.
    parents = {each.parent for each in (*track.last.processes, *sample.processes)} if is_program else set[int]()
    mains = {}
    for process in sample.processes:
        work = track.main_threads.get(process.key, Work(process.counts, at_s, at_s))
        if process.pid in parents:
            work = work._replace(since=(work.since[0], process.switches, *work.since[2:]))
        mains[process.key] = work.observed(process.counts, at_s, window_s, _IDLE)
    counted = [*sample.processes] if is_program else _counted(sample, mains, at_s, 2 * pace_s)
    beside_counts = _beside(track.beside_counts, sample, before, counted)
    beside = track.beside.observed(beside_counts, at_s, window_s, _BESIDE)
    has_sign = track.last.signs != sample.signs or any(
        process.written > earlier.written or process.output_ns > earlier.output_ns
        for process in counted
        if (earlier := before.get(process.key)) is not None
    )
    has_run = sample.processes[0].counts != track.last.processes[0].counts  # as between cpulimit's SIGSTOPs
    begins = track.stopped_at_s is None or has_run
    stopped_at_s = None if sample.state != "T" else at_s if begins else track.stopped_at_s
    return replace(
        track,
        last=sample,
        main_threads=mains,
        beside=beside,
        beside_counts=beside_counts,
        # It stays known of a program that has ended since.
        quiet_at_s=max(track.quiet_at_s, beside.work_at_s, *(mains[process.key].work_at_s for process in counted)),
        stopped_at_s=stopped_at_s,
        sign_at_s=at_s if has_sign else track.sign_at_s,
    )


def _counted(sample: Sample, mains: Mapping[tuple[int, int], Work], at_s: float, near_s: float) -> list[Activity]:
    """The worker's own process and the programs that it waits for: their main threads count.

    A main thread waits for a child in wait(), or began it and did nothing since. A child that is there for longer,
    such as a data loader or a service for metrics, or that begins later, is none that it waits for.
    """
    counted, others = [sample.processes[0]], sample.processes[1:]
    for parent in counted:  # which grows
        work_at_s = mains[parent.key].work_at_s
        counted += [
            process
            for process in others
            if process.parent == parent.pid
            and (parent.waits_for_child or abs(at_s - process.age_s - work_at_s) <= near_s)
        ]
    return counted


def _beside(
    counts: tuple[float, float],
    sample: Sample,
    before: Mapping[tuple[int, int], Activity],
    counted: Sequence[Activity],
) -> tuple[float, float]:
    """CPU seconds and bytes so far of other threads, and of processes that do not count."""
    (cpu_s, read_written), main_counts = counts, {process.pid for process in counted}
    for now in sample.processes:
        then = before.get(now.key, Activity(pid=now.pid))
        cpu_s += now.beside_cpu_s - then.beside_cpu_s
        read_written += now.beside_bytes - then.beside_bytes
        if now.pid not in main_counts:
            cpu_s += now.cpu_s - then.cpu_s
            read_written += now.read + now.written - then.read - then.written
    return cpu_s, read_written


def _stopped(node: WatchedNode, limit: float) -> Hang | None:
    since_s = {w: t.stopped_at_s for w, t in node.tracks.items() if t.stopped_at_s is not None}
    workers = tuple(worker for worker, at_s in since_s.items() if node.at_s - at_s >= limit)
    if not workers:
        return None
    for_s = node.at_s - min(since_s[worker] for worker in workers)
    text = f"{_have(workers)} stopped (SIGSTOP) for {for_s:.0f} s"
    return Hang(kind=HangKind.STOPPED, workers=workers, for_s=for_s, limit_s=limit, text=text)


def _idle(node: WatchedNode, rules: Rules, limit: float, *, is_explained: bool) -> Hang | None:
    tracks = node.tracks
    if any(track.stopped_at_s is not None for track in tracks.values()):
        return None  # who is stopped was idle a moment before that was seen, and the others wait for it
    is_learned = rules.timeout_s is None and len(node.pauses_s) >= LEARN
    has_joined = any(track.last.has_joined for track in tracks.values())
    signs_for_s = (node.sign_at_s or 0.0) - (node.first_sign_at_s or 0.0)
    age_s = node.at_s - min(track.born_at_s for track in tracks.values())
    start_s = limit if rules.timeout_s is None else PATIENCE * limit
    if not (has_joined or is_learned or signs_for_s >= limit or age_s >= start_s):
        return None
    is_unlearned = rules.timeout_s is None and not is_learned
    after_s = AUTO_FLOOR_S if is_explained and has_joined and is_unlearned else limit
    idle_s = {worker: node.at_s - track.idle_at_s for worker, track in tracks.items()}
    workers = tuple(worker for worker, for_s in idle_s.items() if for_s >= after_s)
    for_s = max(idle_s.values())
    if not is_explained:
        for_s = min([*idle_s.values(), node.at_s - (node.sign_at_s or 0.0)])
    if for_s < after_s:
        return None
    stuck = tuple(worker for worker in workers if tracks[worker].last.state == "D")
    kernel = f"; {_have(stuck)} stuck in the kernel (state D)" if stuck else ""
    text = f"{_have(workers)} idle: no output, no progress and almost no CPU time for {for_s:.0f} s{kernel}"
    return Hang(
        kind=HangKind.IDLE,
        workers=stuck or workers,
        for_s=for_s,
        limit_s=after_s,
        text=text,
        is_partial=len(workers) < len(tracks),
        is_early=for_s < limit,
    )


def _busy(node: WatchedNode, rules: Rules, limit: float) -> Hang | None:
    first_s, last_s = node.first_sign_at_s, node.sign_at_s
    if first_s is None or last_s is None or last_s - first_s < limit or len(node.pauses_s) < LEARN:
        return None
    longest_s = max(node.pauses_s)
    for_s = node.at_s - last_s
    if for_s < max(PATIENCE * limit, USUAL * longest_s):
        return None
    awake = tuple(worker for worker, track in node.tracks.items() if node.at_s - track.quiet_at_s < limit)
    workers = awake if rules.weak_signs and awake else tuple(node.tracks)
    doing = "busy without progress" if rules.weak_signs else "silent"
    text = f"{_have(workers)} {doing} for {for_s:.0f} s, {for_s / longest_s:.0f} times the longest earlier pause"
    return Hang(kind=HangKind.BUSY, workers=workers, for_s=for_s, limit_s=limit, text=text)


def _have(workers: Sequence[WatchedWorker]) -> str:
    return f"{label(workers)} {'has' if len(workers) == 1 else 'have'} been"


def label(workers: Sequence[WatchedWorker]) -> str:
    """`rank 3`, `ranks 0-2,5`, or names of their own."""
    ranks = [worker.rank for worker in workers if worker.rank is not None]
    if len(ranks) < len(workers):
        return ", ".join(worker.name for worker in workers)
    return named_ranks(ranks)
