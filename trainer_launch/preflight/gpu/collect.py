"""Collects what is known of this node's GPUs: children ask and load them, since either may hang in a driver."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import MappingProxyType

from msgspec.structs import replace

from trainer_launch.host import deadline_subprocess
from trainer_launch.host.incident_facts import kernel_log
from trainer_launch.preflight.gpu.facts import Gpu, GpuFacts, GpuTest, parse_facts, parse_test

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
_XID = re.compile(r"(\S+ \S+) NVRM: Xid \(PCI:([0-9A-Fa-f:]+)[^)]*\): (\d+).*")
_RECENT = timedelta(hours=2)
_Env = Mapping[str, str]


class Cards:
    """This node's GPUs. Whoever asks first has the facts collected; the others wait for them."""

    def __init__(self, collect: Callable[[], GpuFacts], level: str = "standard") -> None:
        self._collect, self._level, self._lock = collect, level, threading.Lock()
        self._facts: GpuFacts | None = None

    def facts(self) -> GpuFacts:
        """All that is known of those that the job sees."""
        with self._lock:
            if self._facts is None:
                self._facts = self._collect()
            return self._facts

    @property
    def has_load(self) -> bool:
        """Whether the GPUs are put under load at this level."""
        return self._level in LOAD_S

    @property
    def limit_s(self) -> float:
        """All that collecting may take: until the last child was killed."""
        load_s = LOAD_S.get(self._level, 0.0) + WATCH_S + 2 * deadline_subprocess.REAP_S
        return 2 * (FACTS_S + deadline_subprocess.REAP_S) + SETTLE_S + load_s + 5.0


def collect(
    env: _Env,
    python: str,
    level: str,
    count: int,
    left_s: Callable[[float, float], float] = lambda least_s, most_s: most_s,
) -> GpuFacts:
    """What is known of the GPUs that a container with this environment sees; `python` has the job's torch.

    `count` is by /dev. `left_s` bounds the time for a driver that hangs by the deadline of all checks, between a
    least and a most.
    """
    shown = env.get("CUDA_VISIBLE_DEVICES")
    facts = settled(asked(env, left_s(LEAST_S, FACTS_S), shown), env, shown, left_s(0.0, SETTLE_S))
    facts = replace(facts, log=earlier_xids())
    if level not in LOAD_S:
        return facts
    return loaded(facts, targets(facts, shown, count), env, (python, BENCH, "--level", level), LOAD_S[level])


def asked(env: _Env, limit_s: float, shown: str | None) -> GpuFacts:
    """What NVIDIA's library says now of the GPUs that CUDA_VISIBLE_DEVICES, `shown`, leaves."""
    ended = deadline_subprocess.run(FACTS, env, limit_s)
    if ended.problem is not None:
        return GpuFacts(trouble=f"no child could be started: {ended.problem.strerror}")
    if ended.status is None:
        return GpuFacts(trouble=f"{STUCK}: not even SIGKILL ends who asks it")
    if ended.timed_out:
        return GpuFacts(trouble=f"{STUCK}: no answer within {limit_s:g} s")
    facts = parse_facts(ended.stdout)
    return replace(facts, gpus=visible(facts.gpus, shown))


def earlier_xids(path: str = "/dev/kmsg") -> tuple[tuple[str, int, int], ...]:
    """Errors of the last hours by the kernel's log, where a container may read it: place, number, seconds ago."""
    try:
        matches = [match for line in kernel_log(path).splitlines() if (match := _XID.fullmatch(line))]
    except OSError:
        return ()
    now = datetime.now(timezone.utc)
    ago = [now - datetime.strptime(f"{match[1]}+0000", "%Y-%m-%d %H:%M:%S%z") for match in matches]
    return tuple(
        (match[2].lower(), int(match[3]), round(since.total_seconds()))
        for match, since in zip(matches, ago, strict=True)
        if since < _RECENT
    )


def visible(gpus: Sequence[Gpu], shown: str | None) -> tuple[Gpu, ...]:
    """Those that CUDA_VISIBLE_DEVICES shows: by number, by the beginning of a UUID, or all."""
    if shown is None or "MIG-" in shown:
        return tuple(gpus)
    words = [word.strip() for word in shown.split(",")]
    return tuple(gpu for gpu in gpus if any(w == str(gpu.index) or (w and gpu.uuid.startswith(w)) for w in words))


def settled(facts: GpuFacts, env: _Env, shown: str | None, limit_s: float) -> GpuFacts:
    """Ask again, at growing intervals, while somebody holds memory that may soon be free."""
    until_s, pause_s = time.monotonic() + limit_s, _FIRST_PAUSE_S
    while any(map(is_held, facts.gpus)) and (left_s := until_s - time.monotonic()) > 0:
        time.sleep(min(pause_s, left_s))  # the last question comes when the time is up
        pause_s *= 2
        again = asked(env, FACTS_S, shown)
        if again.trouble:
            return facts
        facts = again
    return facts


def is_held(gpu: Gpu) -> bool:
    """Whether more of its memory is in use than a driver needs for itself."""
    return bool(gpu.facts.get("memory_used", 0) > MOST_HELD_BYTES)


def targets(facts: GpuFacts, shown: str | None, count: int) -> tuple[tuple[int, str], ...]:
    """The GPUs that can be loaded: their numbers, and what shows a child one of them and no other."""
    if facts.trouble.startswith(STUCK):
        return ()
    if facts.trouble:
        words = [w.strip() for w in shown.split(",")] if shown else [str(number) for number in range(count)]
        return tuple(enumerate(words[:count]))
    usable = [gpu for gpu in facts.gpus if not (gpu.lost or is_held(gpu) or gpu.facts.get("mig"))]
    return tuple((gpu.index, gpu.uuid or str(gpu.index)) for gpu in usable)


def loaded(
    facts: GpuFacts, gpus: Sequence[tuple[int, str]], env: _Env, argv: Sequence[str], limit_s: float
) -> GpuFacts:
    """Load all GPUs at once, each by its own child, while another child watches; add what they found to `facts`."""
    if not gpus:
        return replace(facts, load_trouble="no GPU can be put under load: see the other checks of GPUs")
    watch = None if facts.trouble else _started(WATCH, env)
    own = {name: value for name, value in env.items() if name not in _NOT_OURS}
    until_s = time.monotonic() + limit_s
    with _folder() as folder:
        children = []
        for rank, (number, shown) in enumerate(gpus):
            peers = f"{rank}:{len(gpus) if folder else 1}:{folder}"
            # The first is its own; NCCL must see the others to find the ways to them.
            others = [other for at, (_, other) in enumerate(gpus) if at != rank]
            more = {**_TALK, "CUDA_VISIBLE_DEVICES": ",".join((shown, *others))}
            child = _started((*argv, "--limit", str(limit_s), "--peers", peers), {**own, **more})
            children.append((number, shown if shown.startswith("GPU-") else "", child))
        deadline_subprocess.stop_all([child for _, _, child in children if child], until_s - time.monotonic())
        until_s = time.monotonic() + deadline_subprocess.REAP_S  # for all of them together
        tests = [
            GpuTest(gpu=number, uuid=uuid, why="no child could be started")
            if child is None
            else parse_test(number, uuid, child.end(until_s - time.monotonic()), limit_s)
            for number, uuid, child in children
        ]
    facts = replace(facts, tests=tuple(tests))
    if watch is None:
        return replace(facts, load_trouble=facts.trouble or "no child could be started")
    watch.close_input()
    watch.stop(WATCH_S)
    ended = watch.end()
    if ended.timed_out:
        return replace(facts, load_trouble=f"{STUCK}: who watched the GPUs was killed")
    watched = parse_facts(ended.stdout)
    by_index = {gpu.index: gpu for gpu in watched.gpus}
    both = (gpu.with_more(by_index[gpu.index]) if gpu.index in by_index else gpu for gpu in facts.gpus)
    return replace(facts, gpus=tuple(both), load_trouble=watched.trouble)


def _folder() -> contextlib.AbstractContextManager[str]:
    """Where the tests of GPUs meet; empty where nothing can be written."""
    try:
        return tempfile.TemporaryDirectory(prefix="trainer-launch-", ignore_cleanup_errors=True)
    except OSError:
        return contextlib.nullcontext("")


def _started(argv: Sequence[str], env: _Env) -> deadline_subprocess.RunningCommand | None:
    try:
        return deadline_subprocess.RunningCommand(argv, env, _STREAMS)
    except OSError:
        return None
