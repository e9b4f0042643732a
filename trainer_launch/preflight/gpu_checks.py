"""Faults of GPUs: by the facts of NVIDIA's library and the results under load, and whether they are fast enough.

A GPU is slow beside a reference and beside its peers. Pure.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model.findings import Basis, Fault, Finding, Measure, Scope, Status
from trainer_launch.model.units import all_of, counted, grouped, in_units, listed
from trainer_launch.preflight.check import LIMIT_S, Check, Subject, Where, check
from trainer_launch.preflight.cluster.present_nodes import Cluster
from trainer_launch.preflight.container_checks import used_adapters
from trainer_launch.preflight.gpu_collect import (
    DIED,
    LATE,
    LOAD,
    NCCL_STAGES,
    NO_NCCL,
    STUCK,
    Gpu,
    GpuFacts,
    GpuTest,
    LoadEnding,
    numbered,
)
from trainer_launch.preflight.rules import CLOCKS, DRAIN, LANES, Observed
from trainer_launch.preflight.thresholds import KINDS, Reference, SpeedKind, Table, kind_of

# In models' names: cards on a board that connects each with all others. Cards with bridges need not have all links.
_ON_BOARDS = ("sxm", "hbm3", "h200", "h20", "h800", "b200", "b300")
_WITH_BRIDGES = ("nvl", "pcie", "gh200")
_COHERENT = ("gh200", "gb200", "gb300")  # whose memory the kernel may use for files
_FAR = 0.25  # of what is usual: a CPU of the other socket costs half
_NOT_BUILT = (
    *("no kernel image", "not compatible with the current PyTorch", "built without CUDA", "driver on your system"),
    *("driver version is insufficient", "forward compatibility", "stub library", "named symbol not found"),
    *("No module named", "ImportError", "cannot open shared object", "undefined symbol", "not implemented for"),
)
_NO_DRIVER = ("Found no NVIDIA driver", "libcuda.so")  # which the container runtime mounts, whatever the image has
_NO_ROOM = ("/dev/shm", "shared memory segment", "No space left on device")
_OF_SETTINGS = ("no socket interface found", "invalid usage", "ncclInvalidUsage")  # as NCCL has them
# For a reason that CUDA has, and what others' use of a card and a container's limits come to, too.
_UNSEEN = ("sees no GPU", "busy or unavailable", "MPS client", "MPS server", "OS call failed")
_OF_SYSTEM = ("unhandled system error", "ncclSystemError", "Read-only file system", "Permission denied", DIED)
_NOT_READY = ("system not yet initialized",)  # its fabric manager does not run
_MINOR = "this model of card does not have it"
# Check, what a pass means, the facts of which each card's first must be known, and what is said of good cards.
# fmt: off
_OF_FACTS: tuple[tuple[str, str, tuple[str, ...], str], ...] = (
    ("gpu-recovery", "The driver has lost no GPU and asks for no reset.", ("lost", "recovery"),
     "the driver asks for no recovery"),
    ("gpu-ecc", "GPU memory has had no uncorrectable error since the driver was loaded.",
     ("ecc_uncorrected",), "no uncorrected memory error since the driver was loaded"),
    # Cards have remapped rows from A100 on, older ones retired pages.
    ("gpu-remap",
     "No bad row of GPU memory waits for a reset to be remapped, and spare rows are left.",
     ("remapped", "retired_pending"), "no bad row or page of memory waits for a reset"),
    ("gpu-mig",
     "No GPU is partitioned (MIG): a part serves one process, and not together with other GPUs.",
     ("mig",), "whole"),
    # Asked before any context of ours; a container does not see others' processes, but their memory.
    ("gpu-memory", "GPU memory is free: a process that has just ended may hold it for a moment.",
     ("memory_used",), "no more memory in use than the driver itself needs"),
    ("gpu-clocks", "Under load, neither heat nor the power supply slows a GPU down; its own power limit may.",
     (CLOCKS,), "not slowed down under load"),
    ("gpu-pcie", "Under load, the PCIe link of each GPU is as wide and as fast as card and slot allow.",
     (LANES,), "PCIe as wide and as fast as it can be"),
    ("gpu-nvlink", "The NVLinks between this node's GPUs are up, the same number on each GPU.", ("nvlinks",),
     "all NVLinks up"),
    ("gpu-xid",
     "The driver reported no GPU error (XID) during the test.",
     (f"{LOAD}xids",), "no XID error during our tests"),
)
# fmt: on
_UNDER_LOAD = ("gpu-clocks", "gpu-pcie", "gpu-nvlink", "gpu-xid")
_MAD_TO_SIGMA = 1.4826
SIGMAS = 4.0  # a spread that the job has anyway accuses nobody
_SHOWN = 6
_MANY = 64
_JOB_ACTION = (
    "the same everywhere: see power limits and clock policy; where this is what your machines give, save it with "
    "--report FILE.json and pass that as --reference"
)


def limit_s(subject: Subject) -> float:
    """The time limit of a check that waits until GPUs were asked and loaded."""
    return LIMIT_S if subject.cards is None else subject.cards.limit_s


def _of_facts(name: str, title: str, facts: Sequence[str], good: str) -> Check[Subject]:
    """A check of facts of each card; a lost card has no other fault."""

    def collect(subject: Subject) -> Iterator[Observed]:
        for gpu in _with_derived(subject):
            if gpu.lost and "lost" not in facts:
                continue
            about = Observed(facts=gpu.facts, gpu=gpu.index)
            asked = next((fact for fact in facts if fact in gpu.facts or fact in gpu.unknown), "")
            if facts[0].startswith(LOAD) and not gpu.is_watched:
                yield about
            elif asked in gpu.unknown:
                yield replace(about, unknown=f"not known: {gpu.unknown[asked]}")
            else:
                yield replace(about, good=good) if asked else replace(about, skipped=_MINOR)

    collect.__doc__ = title
    return check(name, Where.GPU, needs_load=name in _UNDER_LOAD, limit_s=limit_s)(collect)


def _with_derived(subject: Subject) -> list[Gpu]:
    """The GPUs of this node, with facts that are made of others."""
    facts = _facts(subject)
    linked = [gpu for gpu in facts.gpus if "nvlinks" in gpu.facts and not gpu.lost]
    most = max((sum(gpu.facts["nvlinks"]) for gpu in linked), default=0)
    domains = [gpu.domain for gpu in facts.gpus if gpu.domain]
    is_in_parts = all(gpu.facts.get("mig") for gpu in facts.gpus if not gpu.lost)
    # By time slicing, pods are given one GPU each.
    is_shared = 1 in (subject.ranks, len(facts.gpus)) or "CUDA_MPS_PIPE_DIRECTORY" in subject.env
    made = []
    for gpu in facts.gpus:
        links, memory = enumerate(gpu.facts.get("nvlinks", ())), in_units(gpu.facts.get("memory_total", 0))
        derived: dict[str, Any] = {"uuid": gpu.uuid, "memory": memory}
        derived["down_links"] = ", ".join(str(number) for number, is_up in links if not is_up)
        derived |= {"lost": gpu.lost} if gpu.lost else {}
        derived |= _links(gpu, most, len(linked)) if gpu in linked else {}
        if LANES in gpu.facts and _is_on_board(gpu):  # beside the others that could have as many; slots differ
            there, able = gpu.facts[LANES]
            others = (other.facts[LANES] for other in facts.gpus if LANES in other.facts)
            derived["fewer lanes"] = (there, max(lanes for lanes, most_lanes in others if most_lanes == able))
        may_be_others = is_shared or any(word in gpu.model.casefold() for word in _COHERENT)
        if "memory_used" in gpu.facts:
            derived["memory shared" if may_be_others else "memory held"] = gpu.facts["memory_used"]
        if CLOCKS in gpu.facts:
            derived[CLOCKS] = {**gpu.facts[CLOCKS], "is_burned": subject.burn_s > 0}
        if gpu.domain:
            derived["clique"] = tuple(map(" ".join, (gpu.domain, max(domains, key=domains.count))))
        if gpu.facts.get("mig"):  # the job's wish where it was given parts by name; else somebody left it on
            names = ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES")
            is_wished = any("MIG-" in subject.env.get(name, "") for name in names)
            is_wished |= is_in_parts and gpu.facts.get("mig_parts") != 0  # CDI names them nowhere
            derived["mig asked for" if is_wished else "mig left on"] = subject.workers
        made.append(replace(gpu, facts={**gpu.facts, **derived}))
    return made


def _is_on_board(gpu: Gpu) -> bool:
    """Whether it is surely connected as the other cards of its node are."""
    name = gpu.model.casefold()
    return any(word in name for word in _ON_BOARDS) and not any(word in name for word in _WITH_BRIDGES)


def _links(gpu: Gpu, most: int, n_linked: int) -> dict[str, Any]:
    """Its links beside those of the card that has most."""
    links, is_on_board = gpu.facts["nvlinks"], _is_on_board(gpu)
    if not most:
        return {"no links": is_on_board and n_linked > 1}
    return {
        "links": (sum(links), most if is_on_board else 0),
        "some links": (sum(links), len(links) if is_on_board else most),
    }


def _facts(subject: Subject) -> GpuFacts:
    return GpuFacts(trouble="") if subject.cards is None else subject.cards.facts()


@check("gpu-count", Where.GPU, limit_s=limit_s)
def gpu_count(subject: Subject) -> Observed:
    """All GPUs are present: /dev, the driver and the number of workers agree."""
    host, workers, facts = subject.host.gpus, subject.topology.local_world_size, _facts(subject)
    if host.count == 0 and not subject.may_use_gpus:  # this line stands for all checks of GPUs
        return Observed(skipped="no GPU here: GPU checks are skipped")
    if host.count == 0:
        text = f"this container sees no GPU ({host.reason}), though the job may have some: GPU checks are skipped"
        action = "request the GPUs for the init container as well (resources.limits); the pod is given them once"
        return Observed(skipped=text, more={"action": action})
    if subject.cards is None:
        return Observed(skipped=f"{host.reason}: only NVIDIA's GPUs are checked")
    there = counted(host.count, "GPU")
    if facts.trouble.startswith(STUCK):
        return Observed(facts={"hangs": f"{host.reason}; {facts.trouble}"})
    if facts.trouble:
        action = "pip install nvidia-ml-py in the image" if "nvidia-ml-py" in facts.trouble else ""
        text = f"{there} ({host.reason}), but their state is unknown: {facts.trouble}"
        return Observed(unknown=text, more={"action": action})
    are_parts = "MIG-" in subject.env.get("CUDA_VISIBLE_DEVICES", "")  # of which one card may have several
    n_visible = host.count if are_parts else len(facts.gpus)
    models = ", ".join(sorted({gpu.model for gpu in facts.gpus if gpu.model})) or "of unknown model"
    about = f"{counted(n_visible, 'GPU')}: {models}, driver {facts.driver or 'of unknown version'}"
    # Others' are in /dev only where that is the whole machine's.
    expected = host.count - (facts.n_others if host.count >= n_visible + facts.n_others else 0)
    details: dict[str, Any] = {
        "shown": (n_visible, expected),
        "there": there,
        "reason": host.reason,
        "about": about,
    }
    if facts.absent and n_visible < expected:
        names = listed(facts.absent, _SHOWN)
        if facts.n_unseen > 0:  # of those in /dev: this machine has lost one
            details["reason"] += f"; missing: {names}"
        else:
            details["elsewhere"] = f"CUDA_VISIBLE_DEVICES names {names}, which no GPU of this machine has"
    if workers is not None and subject.is_torch:
        details |= {"for workers": (n_visible, workers), "used": (workers, n_visible), "idle": n_visible - workers}
        details |= {"workers": counted(workers, "worker"), "n_visible": counted(n_visible, "GPU")}
    return Observed(facts=details, good=about)


@check("gpu-load", Where.GPU, needs_load=True, limit_s=limit_s)
def gpu_load(subject: Subject) -> Iterator[Observed]:
    """Each GPU computes correctly under load, and does not hang."""
    facts = _facts(subject)
    if facts.load_trouble and not facts.tests:
        yield Observed(skipped=facts.load_trouble)
    elif facts.load_trouble and not facts.trouble:
        yield Observed(unknown=f"the GPUs were not watched under load: {facts.load_trouble}")
    for test in facts.tests:
        good = f"{test.repeats} products came out the same, bit by bit"
        details, is_unknown = _of_test(test), test.ending is LoadEnding.NOT_RUN
        if not subject.is_torch and {"not built", "unseen", "crashed"} & {*details}:  # it does without torch
            details, is_unknown = {}, True
        unknown = f"not tested: {test.why}" if is_unknown else ""
        skipped = "not tested: the program's Python has no torch" if test.ending is LoadEnding.NO_TORCH else ""
        yield Observed(gpu=test.gpu, facts=details, unknown=unknown, skipped=skipped, good=good)


def _of_test(test: GpuTest) -> dict[str, str]:
    """The fault that a test shows. A GPU that waits for others may be innocent: of that, gpu-peers speaks."""
    if test.different:
        share = f"{test.different} of {test.repeats} repeats of a product differ from the first"
        return {"wrong": f"computes wrong results: {share}"}
    if test.ending is LoadEnding.STUCK:
        return {"stuck": test.why}
    if test.stage in NCCL_STAGES or test.ending not in (LoadEnding.FAILED, LoadEnding.DIED):
        return {}
    if test.why.startswith(DIED):
        return {"crashed": test.why}
    text = f"failed its test at {test.stage!r}: {test.why}" if test.ending is LoadEnding.FAILED else test.why
    causes = (("not ready", _NOT_READY), ("unseen", _NO_DRIVER), ("not built", _NOT_BUILT), ("unseen", _UNSEEN))
    return {_cause(test.why, causes, "wrong"): text}


def _cause(why: str, causes: Sequence[tuple[str, Sequence[str]]], otherwise: str) -> str:
    """The first cause of whose words one is there."""
    return next((cause for cause, words in causes if any(word in why for word in words)), otherwise)


@check("gpu-peers", Where.GPU, needs_load=True, limit_s=limit_s)
def gpu_peers(subject: Subject) -> Sequence[Observed]:
    """NCCL connects all GPUs of this node, and every number of an all-reduce is correct."""
    tests = _facts(subject).tests
    came = [test for test in tests if test.stage in NCCL_STAGES or test.peers is not None]
    met = [test.peers for test in came if test.peers is not None and not test.peers.why]
    who = numbered([test.gpu for test in came])
    if not came:
        return ()
    ended = (LoadEnding.DONE, LoadEnding.NO_TORCH)
    if any(test.ending not in ended and test.stage not in NCCL_STAGES for test in tests):
        return (Observed(skipped=f"not tested: {LATE}"),)
    untested = [test.why for test in came if test.ending is LoadEnding.NOT_RUN]  # and the others waited for it
    # Who came later met nobody.
    untested += [test.peers.why for test in came if test.peers is not None and test.peers.why in (LATE, NO_NCCL)]
    if untested:
        return (Observed(unknown=f"not tested: {untested[0]}"),)
    if any(not peers.good for peers in met):
        how = "add wrongly together" if len(came) > 1 else "gets a wrong sum in its own collective"
        return (Observed(facts={"wrong sums": f"{who} {how}"}),)
    if len(met) == len(came):
        rate = min(peers.rate for peers in met)
        text = f"{who} add correctly together, at {rate:.3g} GB/s (bus bandwidth, 1 GiB)"
        more = {"measured": round(rate, 2), "unit": "GB/s"}
        return (Observed(good=text, more=more),) if len(tests) > 1 else ()
    came.sort(key=lambda test: test.ending is not LoadEnding.FAILED)  # who failed knows more than who waited for it
    reasons = (test.why or (test.peers.why if test.peers else "") for test in came)
    why = next(filter(None, reasons), "")
    causes = (
        ("no room", _NO_ROOM),
        ("misled", _OF_SETTINGS),
        ("held apart", _NO_DRIVER),
        ("not built", _NOT_BUILT),
    )
    cause = _cause(why, (*causes, ("held apart", (*_OF_SYSTEM, *_UNSEEN))), "apart")
    is_without_torch = cause == "not built" and not subject.is_torch
    if len(tests) == subject.ranks == 1 or is_without_torch:  # it needs no NCCL, or none of this torch
        return (Observed(unknown=f"NCCL does not work here: {why}"),)
    return (Observed(facts={cause: why, "who": who}),)


@check("gpu-network", Where.GPU, needs_load=True, limit_s=limit_s)
def gpu_network(subject: Subject) -> Sequence[Observed]:
    """NCCL uses the fast network that this container has, and does not fall back to plain sockets silently."""
    tests = [test for test in _facts(subject).tests if test.network]
    chosen = ", ".join(sorted({test.network for test in tests}))
    active = [port for port in used_adapters(subject) if port.is_active]
    is_staging_wished = any(
        name.startswith("NCCL_NET_GDR_") or name == "NCCL_DMABUF_ENABLE" for name in subject.env
    )
    details = {}
    if "Socket" in chosen and active and subject.has_peers:
        # Each network card of a privileged pod may be one; who wants RoCE says how.
        is_meant = any(name.startswith("NCCL_IB_") and value for name, value in subject.env.items())
        is_certain = is_meant or not all(port.is_ethernet for port in active)
        ports = ", ".join(f"{port.device}:{port.port}" for port in active[:8])
        details["fallback" if is_certain else "maybe fallback"] = ports
    if (
        tests
        and active
        and subject.has_peers
        and not is_staging_wished
        and {test.gpudirect for test in tests} == {"none"}
    ):
        details["staged"] = chosen
    more = {"measured": chosen}
    return [Observed(facts=details, good=f"NCCL uses {chosen}", more=more)] if chosen else []


_RULED = tuple(_of_facts(*row) for row in _OF_FACTS)
CHECKS = (gpu_count, *_RULED[:5], gpu_load, gpu_peers, gpu_network, *_RULED[5:])


class _Card(Struct, frozen=True):
    """The measure of a card, or of all cards of a node together."""

    node: int
    measure: Measure
    of_reference: float | None  # its share; None: nobody knows what it should be
    of_peers: float | None  # None: it has none
    is_short: bool  # below what the reference allows
    is_behind: bool  # its peers
    is_hard: bool  # by both, so far that it is faulty


def _slow_gpus(cluster: Cluster) -> list[Finding]:
    measures = [node.report.measures for node in cluster.nodes]
    return slow_gpus(cluster.names, measures, cluster.settings.table)


SPEED = tuple(
    Check(id=kind.name, title=kind.title, run=_slow_gpus, where=Where.CLUSTER, needs_load=True) for kind in KINDS
)


def slow_gpus(names: Sequence[str], measures: Sequence[Sequence[Measure]], table: Table) -> list[Finding]:
    """The findings about all nodes' measures; `names` say whose they are."""
    pairs = ((node, measure) for node, its in enumerate(measures) for measure in its)
    groups = grouped(((measure.name, measure.model, measure.unit), (node, measure)) for node, measure in pairs)
    results: list[Finding] = []
    for (name, model, _), members in groups.items():
        kind, reference = kind_of(name), table.of(members[0][1])
        if kind is not None:
            cards = _cards(kind, members, reference)
            results += _judged(kind, cards, reference, names, has_references=table.has(model))
    return results


def _cards(kind: SpeedKind, members: Sequence[tuple[int, Measure]], reference: Reference | None) -> list[_Card]:
    """Each card beside the reference, and beside its peers: the others that are no shorter than it allows."""
    floor = 0.0 if reference is None else kind.share * reference.value
    values = [measure.value for _, measure in members]
    good = [value for value in values if value >= floor] or values
    of_all = _middle(good)
    # Where nobody reaches it, as with a lower power limit, only a card as far from the best is faulty itself.
    hard = floor if max(values) >= floor else kind.share * max(values)

    @functools.cache
    def of_others(value: float) -> tuple[float | None, float]:
        """Their median, and how far they lie from it; one among many moves neither."""
        if len(good) > _MANY or value not in good:
            return of_all
        at = good.index(value)
        return _middle([*good[:at], *good[at + 1 :]])

    cards = []
    for node, measure in members:
        middle, spread = of_others(measure.value)
        enough = 0.0 if middle is None else min(kind.peers * middle, middle - SIGMAS * spread)
        of_reference = None if reference is None else measure.value / reference.value
        of_peers = measure.value / middle if middle else None
        below = (measure.value < limit for limit in (floor, enough, hard))
        cards.append(_Card(node, measure, of_reference, of_peers, *below))
    return cards


def _middle(values: Sequence[float]) -> tuple[float | None, float]:
    middle = statistics.median(values) if values else None
    return middle, 0.0 if middle is None else deviation(values, middle)


def deviation(values: Iterable[float], middle: float) -> float:
    """How far values lie from their median, as a standard deviation."""
    return _MAD_TO_SIGMA * statistics.median(abs(value - middle) for value in values)


def _judged(
    kind: SpeedKind,
    cards: Sequence[_Card],
    reference: Reference | None,
    names: Sequence[str],
    *,
    has_references: bool,
) -> Iterator[Finding]:
    """Cards that both the reference and their peers accuse, by node; then those of one accuser, which warn."""
    measure, n_cards, has_peers = cards[0].measure, len(cards), len(cards) > 1
    noun, model = "GPU" if measure.gpu is not None else "node", measure.model or "unknown model"
    expected = None if reference is None else round(reference.value, 2)

    def finding(status: Status, text: str, value: float, **more: Any) -> Finding:
        fault, remedy = (Fault.NODE, DRAIN) if status is Status.FAIL else (None, "")
        more |= {"measured": round(value, 2), "expected": expected, "unit": measure.unit, "remedy": remedy}
        return Finding(check=kind.name, status=status, fault=fault, text=text, **more)

    def evidence(some: Sequence[_Card]) -> tuple[str, ...]:
        return tuple(f"{_name(card, names)}: {card.measure.value:.4g} {measure.unit}" for card in some[:_SHOWN])

    behind = grouped(((not card.is_hard, card.node), card) for card in cards if card.is_behind)
    for (is_enough, node), its in sorted(behind.items()):
        worst = min(its, key=lambda card: card.measure.value)
        n_own = sum(card.node == node for card in cards)
        is_whole = measure.gpu is None or 1 < n_own == len(its)
        share = worst.of_peers if worst.of_reference is None else worst.of_reference
        # As where its CPUs are of the other socket: all of the pod, or those that its test was run on by chance.
        is_far = kind.name == "pcie" and (share is None or share >= _FAR)
        where = (
            names[node] if is_whole else f"{names[node]}, GPU {', '.join(str(card.measure.gpu) for card in its)}"
        )
        parts = [f"{worst.of_peers:.0%} of what the others of its model do"] if worst.of_peers is not None else []
        if worst.of_reference is not None and reference is not None:
            parts.insert(0, f"{worst.of_reference:.0%} of the reference {reference.value:g}")
        text = f"{where} delivers {worst.measure.value:.4g} {measure.unit} ({measure.name}, {model}): "
        about: dict[str, Any] = {"scope": Scope.NODE if is_whole else Scope.GPU, "subject": where}
        about |= {"evidence": evidence(its) if len(its) > 1 else (), "action": kind.action}
        status, basis = (Status.WARN, Basis.PEER) if is_enough or is_far else (Status.FAIL, Basis.BOTH)
        yield finding(status, text + " and ".join(parts), worst.measure.value, basis=basis, **about)
    short = [card for card in cards if card.is_short and not card.is_behind]
    if short and reference is not None:
        middle = statistics.median(card.measure.value for card in short)
        some = f"{len(short)} of {counted(n_cards, noun)}" if len(short) < n_cards else all_of(n_cards, noun)
        text = (
            f"{model}: less {measure.name} than expected on {some}, {middle:.4g} {reference.unit} in the median, "
        )
        text += (
            f"{middle / reference.value:.0%} of the reference {reference.value:g}, while they hardly differ from "
        )
        about = {"scope": Scope.JOB, "basis": Basis.ABSOLUTE, "action": _JOB_ACTION}
        about["evidence"] = evidence(short) if n_cards <= _SHOWN else ()
        yield finding(Status.WARN, f"{text}the others", middle, **about)
    if not behind and not short:
        least, most = (limit(card.measure.value for card in cards) for limit in (min, max))
        text = f"{counted(n_cards, noun)} ({model}): {least:.4g} to {most:.4g} {measure.unit} of {measure.name}"
        status, basis = Status.PASS, Basis.BOTH if has_peers else Basis.ABSOLUTE
        if reference is None:
            text += f"; no reference tells {'this of it' if has_references else 'of this model'}"
            text += ", so they were only compared with each other" if has_peers else ""
            # Of a node that is alone, gpu-peers tells the speed.
            lone = Status.SKIPPED if measure.gpu is None else Status.UNKNOWN
            status, basis = (status if has_references else Status.UNKNOWN) if has_peers else lone, Basis.PEER
        yield finding(status, text, least, scope=Scope.JOB, basis=basis)


def _name(card: _Card, names: Sequence[str]) -> str:
    return names[card.node] if card.measure.gpu is None else f"{names[card.node]}, GPU {card.measure.gpu}"
