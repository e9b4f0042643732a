"""This node's GPUs, asked and loaded by children that may hang in a driver: each thing is found out once."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Generic, TypeVar

from msgspec import Struct, field

from trainer_launch.host import deadline_subprocess
from trainer_launch.model.findings import Checksum, Measure
from trainer_launch.preflight.gpu import facts as values
from trainer_launch.preflight.gpu.facts import Benched, Facts, Gpu, Watched

_CHILD = Path(__file__).parents[1] / "children"
FACTS = (sys.executable, str(_CHILD / "gpu_facts.py"))
WATCH = (*FACTS, "watch")
BENCH = str(_CHILD / "gpu_bench.py")

STUCK = "the driver hangs"
LEAST_S = 10.0  # that a driver is waited for, whatever the deadline
FACTS_S = 20.0  # where the driver has to be loaded first, each GPU takes a second; and for ever where it hangs
SETTLE_S = 20.0  # what others' memory may take to be given back: the driver does it after a process has ended
LOAD_S: Mapping[str, float] = MappingProxyType({"standard": 60.0, "deep": 150.0})
WATCH_S = 3.0  # to say what was seen
MOST_HELD_BYTES = 1 << 30
_FIRST_PAUSE_S = 0.5
# Of the job's own workers: a test is no rank of theirs.
_NOT_OURS = frozenset(("NCCL_DEBUG_FILE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
_TALK = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}

_STREAMS = deadline_subprocess.Streams(stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)

T = TypeVar("T")


class Load(Struct, frozen=True, kw_only=True):
    """What was seen while every GPU worked."""

    tested: tuple[Benched, ...] = ()
    watched: Mapping[int, Watched] = field(default_factory=lambda: MappingProxyType({}))
    trouble: str = ""  # why nothing was watched
    driver: str = ""

    @property
    def measures(self) -> tuple[Measure, ...]:
        """For the judgement over all nodes."""
        return values.measures(self.tested)

    @property
    def checksums(self) -> tuple[Checksum, ...]:
        """For the comparison of all GPUs of the job."""
        return values.checksums(self.tested, self.driver)


class Cards(Struct, frozen=True, kw_only=True):
    """Three questions, each answered once and then for ever; the later ones ask the earlier ones first."""

    facts: Callable[[], Facts]  # at once
    settled: Callable[[], Facts]  # when memory that others hold was given back, or had time enough for it
    load: Callable[[], Load | None]  # None: no load was asked for
    level: str = "standard"
    shown: str | None = None  # CUDA_VISIBLE_DEVICES

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Those that the job sees; none where nothing is known of them."""
        return values.visible(self.facts().gpus, self.shown)

    @property
    def has_load(self) -> bool:
        """Whether the GPUs are put under load at this level."""
        return self.level in LOAD_S

    @property
    def load_limit_s(self) -> float:
        """All that finding out about a load may take."""
        load_s = LOAD_S.get(self.level, 0.0) + WATCH_S + 2 * deadline_subprocess.REAP_S
        return 2 * (FACTS_S + deadline_subprocess.REAP_S) + SETTLE_S + load_s + 5.0


class _Once(Generic[T]):
    """Calls a function at its first call, and keeps the answer; others wait for it."""

    def __init__(self, make: Callable[[], T]) -> None:
        self._make, self._lock = make, threading.Lock()
        self._made: list[T] = []

    def __call__(self) -> T:
        with self._lock:
            if not self._made:
                self._made.append(self._make())
            return self._made[0]


def cards(
    env: Mapping[str, str],
    python: str,
    level: str,
    count: int,
    left_s: Callable[[float, float], float] = lambda least_s, most_s: most_s,
) -> Cards:
    """The GPUs that a container with this environment sees; `python` has the job's torch, `count` by /dev.

    `left_s` bounds the time for a driver that hangs by the deadline of all checks, between a least and a most.
    """
    shown = env.get("CUDA_VISIBLE_DEVICES")
    facts = _Once(lambda: ask(env, left_s(LEAST_S, FACTS_S)))
    settled = _Once(lambda: settle(facts(), env, shown, left_s(0.0, SETTLE_S)))

    def load() -> Load | None:
        if level not in LOAD_S:
            return None
        found = settled()
        return loaded(found, targets(found, shown, count), env, (python, BENCH, "--level", level), LOAD_S[level])

    return Cards(facts=facts, settled=settled, load=_Once(load), level=level, shown=shown)


def ask(env: Mapping[str, str], limit_s: float) -> Facts:
    """What NVIDIA's library says now."""
    ended = deadline_subprocess.run(FACTS, env, limit_s)
    if ended.problem is not None:
        return Facts(trouble=f"no child could be started: {ended.problem.strerror}")
    if ended.status is None:
        return Facts(trouble=f"{STUCK}: not even SIGKILL ends who asks it")
    if ended.timed_out:
        return Facts(trouble=f"{STUCK}: no answer within {limit_s:g} s")
    return values.facts_of(ended.stdout)


def settle(facts: Facts, env: Mapping[str, str], shown: str | None, limit_s: float) -> Facts:
    """Ask again, at growing intervals, while somebody holds memory that may soon be free."""
    until_s, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while held(values.visible(facts.gpus, shown)) and (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))  # the last question comes when the time is up
        pause_s *= 2
        again = ask(env, FACTS_S)
        if again.trouble:
            return facts
        facts = again
    return facts


def held(gpus: Sequence[Gpu]) -> list[Gpu]:
    """Those with more memory in use than a driver needs for itself."""
    return [gpu for gpu in gpus if gpu.value("memory_used", 0) > MOST_HELD_BYTES]


def targets(facts: Facts, shown: str | None, count: int) -> tuple[tuple[int, str], ...]:
    """The GPUs that can be loaded: their numbers, and what shows a child one of them and no other."""
    if facts.trouble:
        if facts.trouble.startswith(STUCK):
            return ()
        words = [w.strip() for w in shown.split(",")] if shown else [str(number) for number in range(count)]
        return tuple((number, word) for number, word in enumerate(words[:count]))
    seen = values.visible(facts.gpus, shown)
    busy = {gpu.index for gpu in held(seen)}
    usable = [gpu for gpu in seen if not gpu.lost and gpu.index not in busy and not gpu.value("mig", 0)]
    return tuple((gpu.index, gpu.uuid or str(gpu.index)) for gpu in usable)


def loaded(
    facts: Facts,
    gpus: Sequence[tuple[int, str]],
    env: Mapping[str, str],
    argv: Sequence[str],
    limit_s: float,
    watch: Sequence[str] = WATCH,
) -> Load:
    """Load all GPUs at once, each by a child of its own, while another one watches."""
    if not gpus:
        return Load(driver=facts.driver, trouble="no GPU can be put under load: see the other checks of GPUs")
    watching = None if facts.trouble else _started(watch, env)
    until_s = time.monotonic() + limit_s
    with _folder() as folder:
        more = [*argv, "--limit", str(limit_s)]
        size = len(gpus) if folder else 1
        running = [
            _begun(gpus, rank, env, (*more, "--peers", f"{rank}:{size}:{folder}")) for rank in range(len(gpus))
        ]
        children = [one.child for one in running if one.child is not None]
        deadline_subprocess.stop_all(children, until_s - time.monotonic())
        until_s = time.monotonic() + deadline_subprocess.REAP_S  # for all of them together
        tested = tuple(one.ended(until_s, limit_s) for one in running)
    trouble, seen = _seen(watching) if watching is not None else (facts.trouble or "no child could be started", {})
    return Load(tested=tested, watched=MappingProxyType(seen), trouble=trouble, driver=facts.driver)


def _folder() -> contextlib.AbstractContextManager[str]:
    """Where the tests of GPUs meet; empty where nothing can be written."""
    try:
        return tempfile.TemporaryDirectory(prefix="trainer-launch-", ignore_cleanup_errors=True)
    except OSError:
        return contextlib.nullcontext("")


class _Running(Struct, frozen=True):
    gpu: int
    uuid: str
    child: deadline_subprocess.Child | None

    def ended(self, until_s: float, limit_s: float) -> Benched:
        if self.child is None:
            return Benched(gpu=self.gpu, uuid=self.uuid, why="no child could be started")
        return values.benched(self.gpu, self.uuid, self.child.end(until_s - time.monotonic()), limit_s)


def _begun(gpus: Sequence[tuple[int, str]], rank: int, env: Mapping[str, str], argv: Sequence[str]) -> _Running:
    """A child that has one GPU as its first; NCCL must see the others to find the ways to them."""
    number, shown = gpus[rank]
    all_shown = ",".join((shown, *(other for at, (_, other) in enumerate(gpus) if at != rank)))
    own = {name: value for name, value in env.items() if name not in _NOT_OURS}
    child = _started(argv, {**own, **_TALK, "CUDA_VISIBLE_DEVICES": all_shown})
    return _Running(number, shown if shown.startswith("GPU-") else "", child)


def _started(argv: Sequence[str], env: Mapping[str, str]) -> deadline_subprocess.Child | None:
    try:
        return deadline_subprocess.Child(argv, env, _STREAMS)
    except OSError:
        return None


def _seen(watching: deadline_subprocess.Child) -> tuple[str, dict[int, Watched]]:
    watching.close_input()
    watching.stop(WATCH_S)
    ended = watching.end()
    if ended.timed_out:
        return f"{STUCK}: who watched the GPUs was killed", {}
    trouble, seen = values.watched_of(ended.stdout)
    return trouble, dict(seen)
