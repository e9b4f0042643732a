"""Checks of GPUs at work: each alone, all of a node together, the network that NCCL takes, and the NVLinks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trainer_launch.model.findings import Fault, Finding, Scope, Status
from trainer_launch.preflight.check import Needs, Subject, Where, check
from trainer_launch.preflight.gpu.fact_checks import gpus, load, load_limit_s, watched
from trainer_launch.preflight.gpu.facts import (
    PEERS,
    Benched,
    Ending,
    Fact,
    Gpu,
    State,
    Trouble,
    Watched,
    numbered,
    summed,
)

_NOT_BUILT = ("no kernel image", "not compatible with the current PyTorch", "sees no GPU", "driver on your system")


@check("gpu-load", Where.GPU, needs=Needs.LOAD, limit_s=load_limit_s)
def gpu_load(subject: Subject) -> Iterator[Finding]:
    """Each GPU does real work: it answers, adds and multiplies right, keeps what it is given, and does not hang."""
    found = load(subject)
    if found is None:
        return
    if not found.tested:
        yield gpu_load.skipped(found.trouble, scope=Scope.GPU)
    elif found.trouble and subject.cards is not None and not subject.cards.facts().trouble:
        text = f"the GPUs were not watched under load: {found.trouble}"
        yield gpu_load.unknown(text, scope=Scope.GPU)
    without = [one for one in found.tested if one.ending is Ending.NO_TORCH]
    unknown = [one for one in found.tested if one.ending is Ending.NOT_RUN]
    if without:
        text = "not tested: the program's Python has no torch"
        yield gpu_load.skipped(text, scope=Scope.GPU)
    if unknown:
        text = f"{numbered([one.gpu for one in unknown])} not tested: {unknown[0].why}"
        yield gpu_load.unknown(text, scope=Scope.GPU)
    tested = [one for one in found.tested if one not in (*without, *unknown)]
    yield from _judged(tested)


def _judged(tested: Sequence[Benched]) -> Iterator[Finding]:
    unfit = [one for one in tested if any(word in one.why for word in _NOT_BUILT)]
    bad = [Trouble(gpu=one.gpu, text=_wrong(one), measured=one.stage) for one in tested if _wrong(one)]
    node = [one for one in bad if one.gpu not in {other.gpu for other in unfit}]
    yield from summed(gpu_load.id, (), node, "")
    image = "use a torch that is built for this card and its driver"
    job = [Trouble(gpu=one.gpu, text=_wrong(one), measured=one.stage, action=image) for one in unfit]
    yield from summed(gpu_load.id, (), job, "", Fault.JOB)
    if tested and not bad:
        repeats, patterns = tested[0].repeats, min(one.tested_bytes for one in tested)
        text = f"{numbered([one.gpu for one in tested])}: {repeats} products came out the same, bit by bit"
        text += f"; {patterns >> 30} GiB of memory kept three patterns" if patterns else ""
        yield gpu_load.passed(text, scope=Scope.GPU)


def _wrong(one: Benched) -> str:
    if one.different:
        return (
            f"computes wrong results: {one.different} of {one.repeats} repeats of a product differ from the first"
        )
    if one.wrong_words:
        return f"forgets: {one.wrong_words} words of {one.tested_bytes >> 30} GiB came back changed"
    if not one.sums_right:
        return "adds wrongly in a collective of its own"
    if one.stage == PEERS and one.ending is not Ending.STUCK:
        return ""  # who waits for others may not be the faulty one: gpu-peers says what is to be said
    if one.ending is Ending.FAILED:
        return f"failed its test at {one.stage!r}: {one.why}"
    return one.why


_SEE_LINKS = (
    "see NCCL_DEBUG=INFO, /dev/shm, the NVLinks (nvidia-smi nvlink -s) and the fabric manager of that machine"
)


@check("gpu-peers", Where.GPU, needs=Needs.LOAD, limit_s=load_limit_s)
def gpu_peers(subject: Subject) -> Iterator[Finding]:
    """All GPUs of this node together: NCCL finds the ways between them, and every number of a sum is right."""
    found = load(subject)
    if found is None or len(found.tested) < 2:
        return
    came = [one for one in found.tested if one.stage == PEERS or one.peers is not None]
    met = [one.peers for one in came if one.peers is not None and not one.peers.why]
    if any(one.ending not in (Ending.DONE, Ending.NO_TORCH) and one.stage != PEERS for one in found.tested):
        if came:
            text = "not tested: not all GPUs came so far"
            yield gpu_peers.skipped(text)
    elif any(not peers.good for peers in met):
        yield _failed(came, "add wrongly together", "do not train on this node: have its NVLinks and cards tested")
    elif len(met) < len(came):
        came.sort(key=lambda one: one.ending is not Ending.FAILED)  # who failed knows more than who waited for it
        why = next(
            one.why or (one.peers.why if one.peers else "") for one in came if one.peers is None or one.peers.why
        )
        yield _failed(came, f"cannot work together: {why}", _SEE_LINKS)
    elif met:
        rate = min(peers.rate for peers in met)
        text = (
            f"{numbered([one.gpu for one in came])} add right together, at {rate:.3g} GB/s (bus bandwidth, 1 GiB)"
        )
        yield gpu_peers.passed(text, measured=round(rate, 2), unit="GB/s")


def _failed(came: list[Benched], text: str, action: str) -> Finding:
    return gpu_peers.failed(Fault.NODE, f"{numbered([one.gpu for one in came])} {text}", action=action)


@check("gpu-network", Where.GPU, needs=Needs.LOAD, limit_s=load_limit_s)
def gpu_network(subject: Subject) -> Iterator[Finding]:
    """NCCL uses the fast network that this container has, and does not fall back to plain sockets silently."""
    found = load(subject)
    chosen = {one.network for one in found.tested if one.network} if found is not None else set()
    if not chosen:
        return
    used = ", ".join(sorted(chosen))
    active = [port for port in subject.adapters if port.is_active] if subject.has_rdma else []
    wished = subject.env.get("NCCL_IB_DISABLE") == "1" or subject.env.get("NCCL_NET") == "Socket"
    if "Socket" not in chosen or not active or wished or not subject.has_peers:
        yield gpu_network.passed(f"NCCL uses {used}", measured=used)
        return
    there = ", ".join(f"{port.device}:{port.port}" for port in active[:8])
    yield gpu_network.failed(
        Fault.JOB,
        f"NCCL falls back to plain sockets (NET/Socket) although adapters are up: {there}",
        measured="Socket",
        action="see NCCL_DEBUG=INFO: the image may lack the adapter's library or plug-in, the container IPC_LOCK",
    )


_CARDS_WITH_BRIDGES = ("PCIe", "NVL")  # in models' names: they have links, and not all of them need lead anywhere
_FABRIC_DONE = 3


@check("gpu-nvlink", Where.GPU, needs=Needs.LOAD, limit_s=load_limit_s)
def gpu_nvlink(subject: Subject) -> Iterator[Finding]:
    """The links between this node's GPUs are up, on each as many as on the others."""
    found = gpus(subject)
    knowing = [gpu for gpu in found if gpu.fact("nvlinks").is_known]
    most = max((sum(gpu.value("nvlinks")) for gpu in knowing), default=0)
    fastest = max((gpu.value("nvlink_mbps", 0) for gpu in knowing), default=0)
    errors = {one.index: one.growth("nvlink_errors") or 0 for one in watched(subject)}
    good = f"{most} NVLinks up on each" + (f", at {fastest / 1000:g} GB/s" if fastest else "")
    judged = [_link_trouble(gpu, most, fastest, errors.get(gpu.index, 0)) for gpu in knowing]
    if knowing and not most and not any(map(_has_bridges, knowing)):
        judged = _all_down(knowing)
    asked = [(gpu.index, gpu.fact("nvlinks")) for gpu in found]
    yield from summed(gpu_nvlink.id, asked, judged, good)


def _has_bridges(gpu: Gpu) -> bool:
    return any(word in gpu.model for word in _CARDS_WITH_BRIDGES)


def _link_trouble(gpu: Gpu, most: int, fastest: int, errors: float) -> Trouble | None:
    links = gpu.value("nvlinks")
    up, speed = sum(links), gpu.value("nvlink_mbps", fastest)
    wanted = most if _has_bridges(gpu) else (len(links) if up else most)
    if up < wanted:
        down = ", ".join(str(number) for number, is_up in enumerate(links) if not is_up)
        return Trouble(
            gpu=gpu.index,
            text=f"has {up} of {wanted} NVLinks up (down: {down})",
            status=Status.WARN if _has_bridges(gpu) else Status.FAIL,
            measured=up,
            expected=wanted,
            unit="links",
        )
    if speed < fastest:
        text = f"has an NVLink at {speed / 1000:g} GB/s, others are at {fastest / 1000:g}"
        return Trouble(gpu=gpu.index, text=text, measured=speed, expected=fastest, unit="MB/s")
    state, error = gpu.value("fabric", (0, 0))
    if state == _FABRIC_DONE and error:
        return Trouble(gpu=gpu.index, text=f"could not join its NVLink fabric (error {error})", measured=error)
    if errors:
        text = f"had {errors:g} errors on its NVLinks during our tests"
        return Trouble(gpu=gpu.index, text=text, status=Status.WARN, measured=errors, expected=0, unit="errors")
    return None


def _all_down(gpus: Sequence[Gpu]) -> list[Trouble | None]:
    action = "see the fabric manager of that machine; without NVLink GPUs talk over PCIe, many times slower"
    text = "has NVLinks, and none is up"
    return [Trouble(gpu=gpu.index, text=text, status=Status.WARN, measured=0, action=action) for gpu in gpus]


# Bits of nvmlClocksEventReasons. Others are normal: idle, clocks that were set, the power limit, those of others.
_SLOWED_BY = {
    0x08: "the hardware (power or heat)",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "the power supply (power brake)",
}
_POWER_CAP = 0x04


@check("gpu-clocks", Where.GPU, needs=Needs.LOAD, limit_s=load_limit_s)
def gpu_clocks(subject: Subject) -> Iterator[Finding]:
    """Under load no GPU is slowed down by heat or by its power supply; its own power limit is nothing unusual."""
    found = watched(subject)
    asked = [(one.index, _clocks_known(one)) for one in found]
    capped = sum(1 for one in found if one.reasons.get(_POWER_CAP))
    good = f"not slowed down under load{f'; {capped} at their power limit, as is usual' if capped else ''}"
    yield from summed(gpu_clocks.id, asked, map(_slowed, found), good)


def _clocks_known(one: Watched) -> Fact:
    found = one.fact("clock_reasons")
    return found if one.busy or not found.is_known else Fact(State.UNKNOWN, why="it was idle whenever we looked")


def _slowed(one: Watched) -> Trouble | None:
    bad = [bit for bit in _SLOWED_BY if one.reasons.get(bit)]
    if not bad:
        return None
    times, causes = max(one.reasons[bit] for bit in bad), " and ".join(_SLOWED_BY[bit] for bit in bad)
    return Trouble(
        gpu=one.index,
        text=f"is slowed down under load by {causes}, in {times} of {one.busy} looks",
        measured=" ".join(f"{bit:#x}" for bit in bad),
        action="drain this node: see the cooling and the power supply of that machine",
    )


# As NVIDIA's catalogue has them; those that no fault of the card need have caused only warn.
XID_WORDS = {
    48: "uncorrected memory error",
    62: "halt of its own controller",
    63: "a row of memory was remapped",
    64: "remapping a row of memory failed",
    74: "NVLink error",
    79: "it has fallen off its bus",
    92: "many corrected memory errors",
    94: "contained memory error",
    95: "uncontained memory error",
    119: "its system processor does not answer",
    120: "error of its system processor",
    140: "unrecovered memory error",
    143: "start of its system processor failed",
    154: "its recovery action has changed",
}
_MILD = frozenset((13, 31, 43, 45, 63, 92, 94, 121, 126))


@check("gpu-xid", Where.GPU, needs=Needs.LOAD, limit_s=load_limit_s)
def gpu_xid(subject: Subject) -> Iterator[Finding]:
    """The driver told no error (XID) of a GPU while it was tested, nor lately where the kernel's log is known."""
    found = watched(subject)
    asked = [(one.index, one.xids) for one in found]
    yield from summed(gpu_xid.id, asked, [*map(_xids, found), *_logged(subject)], "no XID error during our tests")


def _logged(subject: Subject) -> Iterator[Trouble]:
    """Only warns: the card may have been reset since. What programs cause themselves is not told."""
    told = subject.cards.facts().log.value if subject.cards is not None else None
    for gpu in gpus(subject):
        place = str(gpu.value("pci", "?"))
        xids = {xid: ago_s for at, xid, ago_s in told or () if place.startswith(at) and xid not in _MILD}
        if xids:
            words = ", ".join(f"{_worded(xid)} {ago_s / 60:.0f} min ago" for xid, ago_s in xids.items())
            text = f"had XID {words}, by the kernel's log"
            yield Trouble(gpu=gpu.index, text=text, status=Status.WARN, measured=min(xids), unit="XID")


def _worded(xid: int) -> str:
    return f"{xid} ({XID_WORDS[xid]})" if xid in XID_WORDS else str(xid)


def _xids(one: Watched) -> Trouble | None:
    xids = one.xids.value if one.xids.is_known else ()
    if not xids:
        return None
    return Trouble(
        gpu=one.index,
        text=f"had XID {', '.join(map(_worded, sorted(set(xids))))} during our tests",
        status=Status.WARN if _MILD.issuperset(xids) else Status.FAIL,
        measured=min(set(xids) - _MILD or set(xids)),
        unit="XID",
    )
