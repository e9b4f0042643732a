"""Decide whether this node's workers hang: samples in, verdict out. Pure; `watch` takes the samples and acts.

Strong signs of life are output and reported progress. Ranks work in lockstep, so anybody's counts for the node, and
often only rank 0 has any. Weak signs are CPU time and wake-ups of a main thread. T is the timeout:

- stopped: a worker is suspended (SIGSTOP) for T. Nobody else is asked, and nobody is idle: the others wait for it.
- idle: no strong sign for T, and no worker did more than wait: next to no CPU time, next to no wake-ups.
  Before the first strong sign only a worker that is older than `PATIENCE` * T counts: starting takes its time.
- busy: somebody does use CPU, but the node has shown progress for at least T before, and then none for
  `PATIENCE` * T and for `USUAL` times the longest pause that it had. Without strong signs being busy is no hang.

A collective that never ends may sleep (gloo) or spin (NCCL): the first is idle, the second busy, whose fault it is.

A worker that a debugger holds pauses everything, and so does a gap in our own observation: we were suspended too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model.units import in_ranges

PATIENCE = 3  # times the timeout, where there may be a good reason: starting, busy, waiting for another node
USUAL = 10  # times the longest pause between strong signs is no longer usual
LEARN = 5  # pauses, before anything is known about them
REMEMBER = 100  # pauses
AUTO_FLOOR_S = 60.0  # no learned timeout is shorter
UNLEARNED_S = 1800.0  # before it is learned; it allows for the start as well
_IDLE_CPU = 0.02  # of one CPU: gloo's own thread, which wakes up 100 times a second, takes 0.002
_IDLE_CPU_FLOOR_S = 0.05  # a few of the kernel's ticks
_IDLE_SWITCHES_PER_S = 1.0  # a data loader's consumer looks after its workers every 5 s
_IDLE_SWITCHES_FLOOR = 4


class Rules(Struct, frozen=True, kw_only=True):
    """What the user asked for."""

    timeout_s: float | None  # None: learn it from the pauses between strong signs
    unlearned_s: float | None = None  # the timeout before anything is learned; None: there is none
    weak_signs: bool = True  # False: the work is done elsewhere, so being idle here says nothing

    @property
    def pace_s(self) -> float:
        """Between two looks."""
        return min(10.0, max(0.25, (self.timeout_s or AUTO_FLOOR_S) / 20))


class Worker(Struct, frozen=True):
    """One training process; the same number with another start is another worker."""

    name: str  # as people call it: `rank 3`
    pid: int
    started: int
    rank: int | None = None
    local_rank: int | None = None
    stacks: str | None = None  # where it writes its threads' stacks when it is asked


class Sample(Struct, frozen=True, kw_only=True):
    """One look at one worker."""

    state: str  # of its main thread, as /proc has it
    cpu_s: float  # so far, with everything below it
    switches: int  # how often a main thread went to sleep; of it and those below it, who did most
    signs: tuple[int, ...] = ()  # strong ones: whatever changes


class Track(Struct, frozen=True):
    """What is remembered of one worker."""

    born_at_s: float
    last: Sample
    quiet: Sample  # since this one it did next to nothing
    quiet_at_s: float
    stopped_at_s: float | None = None
    sign_at_s: float | None = None  # its own last strong sign


class Node(Struct, frozen=True):
    """What is remembered of all workers of this node."""

    tracks: Mapping[Worker, Track]
    at_s: float
    first_sign_at_s: float | None = None  # of these workers
    sign_at_s: float | None = None
    pauses_s: tuple[float, ...] = ()  # between strong signs, also of earlier workers


class Quiet(NamedTuple):
    """How long ago one worker has done something; None: not since it is watched."""

    sign_s: float | None  # a strong sign
    work_s: float | None  # more than wait, unless it is busy for too long


class Kind(Enum):
    """How workers hang."""

    STOPPED = "stopped"
    IDLE = "idle"
    BUSY = "busy"


class Hang(Struct, frozen=True, kw_only=True):
    """A verdict."""

    kind: Kind
    workers: tuple[Worker, ...]  # who is evidently to blame, or all
    for_s: float
    limit_s: float  # the timeout that was taken
    text: str


def begin(at_s: float) -> Node:
    """Nothing is known."""
    return Node({}, at_s)


def observe(node: Node, samples: Mapping[Worker, Sample], at_s: float, rules: Rules) -> Node:
    """Take in one look at all workers that are alive."""
    has_others = any(worker not in node.tracks for worker in samples)
    if has_others or at_s - node.at_s > max(5.0, 4 * rules.pace_s):
        fresh = {worker: Track(at_s, sample, sample, at_s) for worker, sample in samples.items()}
        return Node(fresh, at_s, pauses_s=node.pauses_s) if has_others else _resumed(node, fresh, at_s)
    tracks = {worker: _follow(node.tracks[worker], sample, at_s) for worker, sample in samples.items()}
    node_now = replace(node, tracks=tracks, at_s=at_s)
    if all(node.tracks[worker].last.signs == sample.signs for worker, sample in samples.items()):
        return node_now
    first_s = at_s if node.first_sign_at_s is None else node.first_sign_at_s
    pauses_s = node.pauses_s if node.sign_at_s is None else (*node.pauses_s, at_s - node.sign_at_s)[-REMEMBER:]
    return replace(node_now, first_sign_at_s=first_s, sign_at_s=at_s, pauses_s=pauses_s)


def _resumed(node: Node, fresh: Mapping[Worker, Track], at_s: float) -> Node:
    """After a gap everybody starts anew, but it stays known for how long there was progress before."""
    if node.first_sign_at_s is None or node.sign_at_s is None:
        return replace(node, tracks=fresh, at_s=at_s)
    first_s = at_s - (node.sign_at_s - node.first_sign_at_s)
    return replace(node, tracks=fresh, at_s=at_s, first_sign_at_s=first_s, sign_at_s=at_s)


def limit_s(node: Node, rules: Rules) -> float | None:
    """The timeout: as it was given, or as it was learned; None: not yet."""
    if rules.timeout_s is not None:
        return rules.timeout_s
    return max(AUTO_FLOOR_S, USUAL * max(node.pauses_s)) if len(node.pauses_s) >= LEARN else rules.unlearned_s


def judge(node: Node, rules: Rules) -> Hang | None:
    """Say who hangs, if anybody does."""
    limit = limit_s(node, rules)
    if limit is None or not node.tracks or any(track.last.state == "t" for track in node.tracks.values()):
        return None
    is_learned = rules.timeout_s is not None or len(node.pauses_s) >= LEARN
    idle = _idle(node, limit, PATIENCE * limit if is_learned else limit) if rules.weak_signs else None
    return _stopped(node, limit) or idle or _busy(node, rules, limit)


def quiet(node: Node, all_rules: Sequence[Rules]) -> dict[Worker, Quiet]:
    """What each worker has done last."""
    limits = [(rules, limit_s(node, rules)) for rules in all_rules]
    busy = {
        worker
        for rules, limit in limits
        if limit is not None and (hang := _busy(node, rules, limit)) is not None
        for worker in hang.workers
    }
    return {
        worker: Quiet(
            None if track.sign_at_s is None else node.at_s - track.sign_at_s,
            None if worker in busy else node.at_s - track.quiet_at_s,
        )
        for worker, track in node.tracks.items()
    }


def others_s(found: Hang) -> float:
    """How long workers that merely wait give another node's: until a busy one there would have been found out."""
    return PATIENCE * found.limit_s + min(10.0, max(2.0, found.limit_s / 4))


def _follow(track: Track, sample: Sample, at_s: float) -> Track:
    since_s = at_s - track.quiet_at_s
    cpu_s = sample.cpu_s - track.quiet.cpu_s
    switches = sample.switches - track.quiet.switches
    # Less than before: one of those below it has ended, which is progress, too.
    is_quiet = (
        0 <= cpu_s <= _IDLE_CPU_FLOOR_S + _IDLE_CPU * since_s
        and 0 <= switches <= _IDLE_SWITCHES_FLOOR + _IDLE_SWITCHES_PER_S * since_s
    )
    stopped_at_s = None if sample.state != "T" else at_s if track.stopped_at_s is None else track.stopped_at_s
    sign_at_s = track.sign_at_s if track.last.signs == sample.signs else at_s
    now = replace(track, last=sample, stopped_at_s=stopped_at_s, sign_at_s=sign_at_s)
    return now if is_quiet else replace(now, quiet=sample, quiet_at_s=at_s)


def _stopped(node: Node, limit: float) -> Hang | None:
    since_s = {w: t.stopped_at_s for w, t in node.tracks.items() if t.stopped_at_s is not None}
    workers = tuple(worker for worker, at_s in since_s.items() if node.at_s - at_s >= limit)
    if not workers:
        return None
    for_s = node.at_s - min(since_s[worker] for worker in workers)
    text = f"{_have(workers)} stopped (SIGSTOP) for {for_s:.0f} s"
    return Hang(kind=Kind.STOPPED, workers=workers, for_s=for_s, limit_s=limit, text=text)


def _idle(node: Node, limit: float, start_s: float) -> Hang | None:
    if any(track.stopped_at_s is not None for track in node.tracks.values()):
        return None  # who is stopped was idle a moment before that was seen, and the others wait for it
    for_s = node.at_s - max(track.quiet_at_s for track in node.tracks.values())
    if node.sign_at_s is not None:
        for_s = min(for_s, node.at_s - node.sign_at_s)
    elif node.at_s - min(track.born_at_s for track in node.tracks.values()) < start_s:
        return None
    if for_s < limit:
        return None
    workers = tuple(node.tracks)
    stuck = tuple(worker for worker, track in node.tracks.items() if track.last.state == "D")
    kernel = f"; {_have(stuck)} stuck in the kernel (state D)" if stuck else ""
    text = f"{_have(workers)} idle: no output, no progress and almost no CPU time for {for_s:.0f} s{kernel}"
    return Hang(kind=Kind.IDLE, workers=stuck or workers, for_s=for_s, limit_s=limit, text=text)


def _busy(node: Node, rules: Rules, limit: float) -> Hang | None:
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
    return Hang(kind=Kind.BUSY, workers=workers, for_s=for_s, limit_s=limit, text=text)


def _have(workers: Sequence[Worker]) -> str:
    return f"{label(workers)} {'has' if len(workers) == 1 else 'have'} been"


def label(workers: Sequence[Worker]) -> str:
    """`rank 3`, `ranks 0-2,5`, or names of their own."""
    ranks = [worker.rank for worker in workers if worker.rank is not None]
    if len(ranks) < len(workers):
        return ", ".join(worker.name for worker in workers)
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {in_ranges(ranks)}"
