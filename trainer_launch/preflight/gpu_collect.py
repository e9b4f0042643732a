"""Collects the facts of this node's GPUs: children ask and load them, since either may hang in a driver.

A fact that the driver does not give is unknown, and no fault of a card.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from trainer_launch.host import deadline_subprocess
from trainer_launch.host.deadline_subprocess import Ended
from trainer_launch.model import codec
from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.findings import Measure
from trainer_launch.model.units import in_ranges

IMPORT = "import torch"  # the stage of a test before it touches the device
PEERS = "peers"  # the stage of a test in which GPUs need each other
NCCL_STAGES = (PEERS, "nccl")  # or a GPU needs only NCCL
LATE = "not all GPUs got that far"  # the reason in the test of a GPU that met no others
HUNG, DIED = "its test hung", "its test died"
NO_NCCL = "this torch is built without NCCL"
LOAD = "load "  # how the facts begin that were seen under load
FABRIC_DONE = 3  # the state of a GPU that has joined its NVLink fabric, as nvml.h has it
_CHILD = Path(__file__).parent / "children"
FACTS = (sys.executable, str(_CHILD / "gpu_facts.py"))
WATCH = (*FACTS, "watch")
BENCH = str(_CHILD / "gpu_bench.py")

STUCK = "the driver hangs"
LEAST_S = 30.0  # that a driver is waited for, whatever the deadline
FACTS_S = 60.0  # where the driver has to be loaded first, each GPU takes some seconds; and for ever where it hangs
SETTLE_S = 20.0  # what others' memory may take to be given back: the driver does it after a process has ended
LOADED, LOAD_S = "standard", 60.0  # the level with a load
WATCH_S = 3.0  # to print the facts
MOST_HELD_BYTES = 1 << 30
_FIRST_PAUSE_S = 0.5
_LONG_IMPORT_S = 30.0
# Memory, threads and files that the container lacks, in words, and by the signal that a child died of.
_OF_CONTAINER = (
    *("out of memory", "allocate memory", "Too many open files", "Resource temporarily unavailable"),
    "can't start new thread",
)
_SIGNALS: Mapping[int, str] = {
    signal.SIGKILL: "the kernel kills so where a container's memory runs out",
    signal.SIGBUS: "so dies who finds no room in /dev/shm",
}
# Of the job's own workers: a test is no rank of theirs.
_NOT_OURS = frozenset(("NCCL_DEBUG_FILE", "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"))
_TALK = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET"}
_STREAMS = deadline_subprocess.Streams(stdin=subprocess.PIPE, stderr=subprocess.DEVNULL)
_Env = Mapping[str, str]


class Gpu(Struct, frozen=True, kw_only=True):
    """A GPU as NVIDIA's library sees it. A fact that a card does not have is neither in `facts` nor `unknown`."""

    index: int
    lost: str = ""  # what the driver says of a GPU that is gone, or must be reset
    facts: Mapping[str, Any] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)  # why a fact is not known

    @property
    def uuid(self) -> str:
        """The identity of the card, wherever it is put; empty where the library gives none."""
        return str(self.facts.get("uuid", ""))

    @property
    def model(self) -> str:
        """As in NVIDIA H200; empty where the library gives none."""
        return str(self.facts.get("name", ""))

    @property
    def power(self) -> str:
        """The power limit that was set below the card's own, as in ` at 500 W`; empty where none was."""
        limit, usual = self.facts.get("power_limit", (0, 0))
        return f" at {limit // 1000} W" if limit < usual else ""

    @property
    def domain(self) -> tuple[str, str] | None:
        """The GPUs that its NVLinks lead to, by fabric and clique; None: it has no fabric, or did not join."""
        fabric = self.facts.get("fabric")
        is_in = fabric is not None and fabric["state"] == FABRIC_DONE
        return (fabric["cluster"][:8], str(fabric["clique"])) if is_in and fabric is not None else None

    @property
    def is_watched(self) -> bool:
        """Whether facts were taken under load."""
        return any(name.startswith(LOAD) for name in (*self.facts, *self.unknown))


class LoadEnding(Enum):
    """How the test of a GPU ended."""

    DONE = "done"
    NO_TORCH = "import"  # its Python has no torch
    FAILED = "failed"  # a test failed
    DIED = "died"  # by itself, or when its time was up, and said nothing of it
    STUCK = "stuck"  # not even SIGKILL ended it: it is inside the driver
    NOT_RUN = "not run"  # or not so far that it touched the device


class Peers(Struct, frozen=True):
    """The test of all GPUs of a node together, as a single GPU saw it."""

    good: bool  # all sums were right
    rate: float  # of an all-reduce of 1 GiB, as bus bandwidth in GB/s
    why: str  # it did not come to that


class GpuTest(Struct, frozen=True, kw_only=True):
    """The result of a child that loads a GPU."""

    gpu: int = 0
    uuid: str = ""
    ending: LoadEnding = LoadEnding.NOT_RUN
    why: str = ""
    stage: str = ""  # the last one that was begun
    facts: Mapping[str, str] = field(default_factory=dict)  # torch, cuda, nccl, cublas, model ...
    figures: tuple[tuple[str, float, str], ...] = ()  # name, value, unit
    repeats: int = 0
    different: int = 0  # of the repeats: those that did not come out as the first
    network: str = ""  # what NCCL says that it uses between nodes, such as IB or Socket; "": it did not say
    gpudirect: str = ""  # of how many of its adapters NCCL says that they reach GPUs directly: all, some, none
    import_s: float = 0.0  # what `import torch` took
    peers: Peers | None = None  # how it did together with the node's other GPUs, or alone


class GpuFacts(Struct, frozen=True, kw_only=True):
    """All facts of this container's GPUs: one document, which the rules judge."""

    trouble: str  # why nothing is known of them
    driver: str = ""
    gpus: Annotated[tuple[Gpu, ...], Meta(max_length=64)] = ()
    n_others: int = 0  # GPUs that the library counts, and this container may not use
    n_unseen: int = 0  # GPUs in /dev that the library does not count
    absent: tuple[str, ...] = ()  # UUIDs in CUDA_VISIBLE_DEVICES that no GPU has
    tests: tuple[GpuTest, ...] = ()
    load_trouble: str = ""  # why they were not put under load, or not watched there

    @property
    def measures(self) -> tuple[Measure, ...]:
        """All figures, for the comparison with a reference and with others; products by power limit."""
        power = {(gpu.index, "gemm"): gpu.power for gpu in self.gpus}
        of_cards = [
            Measure(name + power.get((test.gpu, name[:4]), ""), value, unit, test.facts.get("model", ""), test.gpu)
            for test in self.tests
            for name, value, unit in test.figures
        ]
        together = [test.peers.rate for test in self.tests if test.peers is not None and test.peers.good]
        if len(together) < 2 or len(together) < len(self.tests) or not min(together):
            return tuple(of_cards)
        model = self.tests[0].facts.get("model", "")
        return (*of_cards, Measure(f"allreduce-{len(together)}", min(together), "GB/s", model, None))


def parse_facts(data: bytes) -> GpuFacts:
    """Read the output of preflight/children/gpu_facts.py, also after `watch`."""
    try:
        return codec.decoder(GpuFacts).decode(data)  # type: ignore[no-any-return]
    except MALFORMED:
        return GpuFacts(trouble="the facts of the GPUs cannot be read")


def parse_test(gpu: int, uuid: str, ended: Ended, limit_s: float) -> GpuTest:
    """The result of a test, by the last of its lines that can be read, and by how it ended within `limit_s`.

    What happens before it touches the device, as on a slow disk, says nothing of the GPU: it was not tested. Nor
    does it where the container lacks memory, threads, files or room in /dev/shm, or the GPU memory.
    """
    test = GpuTest()
    for line in reversed(ended.stdout.splitlines()):
        with contextlib.suppress(*MALFORMED):
            test = codec.decoder(GpuTest).decode(line)
            break
    test = replace(test, gpu=gpu, uuid=uuid or test.facts.get("uuid", ""))
    is_innocent = test.stage in ("", IMPORT) or any(word in test.why for word in _OF_CONTAINER)
    if test.ending is LoadEnding.NOT_RUN:
        at = f"at {test.stage!r}" if test.stage else "at its start"
        if ended.status is None:
            ending, why = LoadEnding.STUCK, f"its test hangs {at}, and not even SIGKILL ends it"
        elif ended.timed_out:
            ending, why = LoadEnding.DIED, f"{HUNG} {at}, and was killed after {limit_s:g} s"
            if test.import_s > _LONG_IMPORT_S:  # on a slow disk: the test itself had little time
                is_innocent, why = True, f"{why}, of which `import torch` took {test.import_s:.0f} s"
        else:
            how = f"signal {-ended.status}" if ended.status < 0 else f"exit code {ended.status}"
            ending, why = LoadEnding.DIED, f"{DIED} {at} ({how})"
            if -ended.status in _SIGNALS:
                is_innocent, why = True, f"{why}; {_SIGNALS[-ended.status]}"
        test = replace(test, ending=ending, why=why)
    is_innocent = is_innocent and test.ending is not LoadEnding.NO_TORCH
    return replace(test, ending=LoadEnding.NOT_RUN) if is_innocent else test


def numbered(indices: Sequence[int]) -> str:
    """`GPU 3`, or `GPUs 0-3, 7`."""
    return f"GPU{'s' if len(indices) > 1 else ''} {in_ranges(indices, ', ')}"


class Cards:
    """GPUs of this node. The first caller has the facts collected; the others wait for them."""

    def __init__(self, collect: Callable[[], GpuFacts], level: str = "standard", burn_s: float = 0.0) -> None:
        self._collect, self._level, self._burn_s, self._lock = collect, level, burn_s, threading.Lock()
        self._facts: GpuFacts | None = None

    def facts(self) -> GpuFacts:
        """All facts of the GPUs that the job sees."""
        with self._lock:
            if self._facts is None:
                self._facts = self._collect()
            return self._facts

    @property
    def has_load(self) -> bool:
        """Whether the GPUs are put under load at this level."""
        return self._level == LOADED

    @property
    def limit_s(self) -> float:
        """All that collecting may take: until the last child was killed."""
        load_s = (LOAD_S if self.has_load else 0.0) + self._burn_s + WATCH_S + 2 * deadline_subprocess.REAP_S
        return 2 * (FACTS_S + deadline_subprocess.REAP_S) + SETTLE_S + load_s + 5.0


def collect(  # noqa: PLR0913
    env: _Env,
    python: str,
    level: str,
    count: int,
    left_s: Callable[[float, float], float] = lambda least_s, most_s: most_s,
    burn_s: float = 0.0,
    *,
    is_short_of_cpus: bool = False,
) -> GpuFacts:
    """Collect the facts of the GPUs that a container with this environment sees; `python` has the job's torch.

    `count` is by /dev, `burn_s` how long they are heated. `left_s` bounds the time for a driver that hangs by the
    deadline of all checks, between a least and a most. Where CPUs are short, loads get twice the time.
    """
    shown = env.get("CUDA_VISIBLE_DEVICES")
    facts = settled(asked(env, left_s(LEAST_S, FACTS_S), shown), env, shown, left_s(0.0, SETTLE_S))
    if level != LOADED:
        return facts
    argv = (python, BENCH, "--burn", str(burn_s))
    limit_s = LOAD_S * (1 + is_short_of_cpus) + burn_s
    facts = loaded(facts, targets(facts, shown, count), env, argv, limit_s)
    return replace(facts, tests=not_starved(facts.tests)) if is_short_of_cpus else facts


def not_starved(tests: Sequence[GpuTest]) -> tuple[GpuTest, ...]:
    """Tests that shared too few CPUs: a late one hung only where all others are done, and so leave it the CPUs."""
    late = [test for test in tests if test.ending is LoadEnding.DIED and HUNG in test.why]
    if len(late) == 1 < len(tests) and all(test.ending is LoadEnding.DONE for test in tests if test not in late):
        return tuple(tests)
    why = "; this container has less than one CPU for each GPU"
    return tuple(
        replace(test, ending=LoadEnding.NOT_RUN, why=test.why + why) if test in late else test for test in tests
    )


def asked(env: _Env, limit_s: float, shown: str | None) -> GpuFacts:
    """Ask NVIDIA's library for the present facts of the GPUs that CUDA_VISIBLE_DEVICES, `shown`, leaves."""
    ended = deadline_subprocess.run(FACTS, env, limit_s)
    if ended.problem is not None:
        return GpuFacts(trouble=f"no child could be started: {ended.problem.strerror}")
    if ended.status is None:
        return GpuFacts(trouble=f"{STUCK}: not even SIGKILL ends the process that asks it")
    if ended.timed_out:
        where = STUCK if ended.stdout else "a Python with NVIDIA's bindings did not start"  # its disk may be slow
        return GpuFacts(trouble=f"{where}: no answer within {limit_s:g} s")
    facts = parse_facts(ended.stdout)
    words = [word.strip() for word in (shown or "").split(",")]
    absent = [w for w in words if w.startswith("GPU-") and not any(gpu.uuid.startswith(w) for gpu in facts.gpus)]
    unnamed = [gpu for gpu in facts.gpus if absent and gpu.lost and not gpu.uuid]  # it may be the one that is meant
    return replace(facts, gpus=(*visible(facts.gpus, shown), *unnamed), absent=tuple(absent))


def visible(gpus: Sequence[Gpu], shown: str | None) -> tuple[Gpu, ...]:
    """The GPUs that CUDA_VISIBLE_DEVICES shows: by number, by the beginning of a UUID, or all."""
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
    """Load all GPUs at once, each by its own child, while another child watches; add their results to `facts`."""
    if not gpus:
        return replace(facts, load_trouble="no GPU can be put under load: see the other checks of GPUs")
    watch = None if facts.trouble else _started((*WATCH, str(limit_s + 60)), env)
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
        return replace(facts, load_trouble=f"{STUCK}: the process that watched the GPUs was killed")
    watched = parse_facts(ended.stdout)
    later = {gpu.index: gpu for gpu in watched.gpus}
    both = ((gpu, later.get(gpu.index, gpu)) for gpu in facts.gpus)
    merged = (replace(a, facts={**a.facts, **b.facts}, unknown={**a.unknown, **b.unknown}) for a, b in both)
    return replace(facts, gpus=tuple(merged), load_trouble=watched.trouble)


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
