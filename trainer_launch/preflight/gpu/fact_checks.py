"""Checks that compare what is known of each GPU with a bound; and how many there are.

One finding tells of all GPUs of a node, with the bad ones named; what a card does not tell is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from trainer_launch.host.deadline_subprocess import REAP_S
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.model.units import counted, in_units
from trainer_launch.preflight.check import Needs, Subject, Where, check
from trainer_launch.preflight.gpu.devices import FACTS_S, MOST_HELD_BYTES, SETTLE_S, STUCK, Load
from trainer_launch.preflight.gpu.facts import DRAIN, Fact, Facts, Gpu, State, Trouble, Watched, summed, visible

_FACTS_LIMIT_S = FACTS_S + REAP_S + 2.0  # the library may hang, and its child is killed then
_NEAR_C = 5
_MANY_REPLAYS = 80


def facts_limit_s(subject: Subject) -> float:
    """What a check may take that asks NVIDIA's library."""
    return _FACTS_LIMIT_S


def load_limit_s(subject: Subject) -> float:
    """What a check may take that needs the load: until the last child was killed."""
    return _FACTS_LIMIT_S if subject.cards is None else subject.cards.load_limit_s


def gpus(subject: Subject) -> tuple[Gpu, ...]:
    """Those that the job sees and that answer; none where nothing is known, which gpu-count says."""
    cards = subject.cards
    return () if cards is None else tuple(gpu for gpu in cards.gpus if not gpu.lost)


def load(subject: Subject) -> Load | None:
    """What was seen under load; None where there is none."""
    return None if subject.cards is None else subject.cards.load()


def watched(subject: Subject) -> tuple[Watched, ...]:
    """Those that the job sees, as they were under load."""
    found = load(subject)
    if found is None or subject.cards is None:
        return ()
    return tuple(found.watched[gpu.index] for gpu in subject.cards.gpus if gpu.index in found.watched)


# -- what each GPU tells at rest --------------------------------------------------------------


# As nvmlGpuRecoveryAction has them.
_RECOVERY = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "that peer-to-peer traffic be drained",
    4: "to be drained, then reset",
    5: "that its IMEX domain be recovered",
    6: "a reset of its bus",
    7: "a reboot of the system",
}
_RESET = "have the GPU reset before it is used: a bad row of its memory is still in use"


def _at_rest(
    name: str, found: Sequence[Gpu], fact: str, judge: Callable[[Gpu], Trouble | None], good: str
) -> Iterator[Finding]:
    """The findings of the check `name`; without `fact` nothing is known of a GPU."""
    return summed(name, [(gpu.index, gpu.fact(fact)) for gpu in found], map(judge, found), good)


@check("gpu-recovery", Where.GPU, limit_s=facts_limit_s)
def gpu_recovery(subject: Subject) -> Iterator[Finding]:
    """The driver asks for no reset of a GPU, and none is gone."""
    found = () if subject.cards is None else subject.cards.gpus
    asked = [(gpu.index, Fact(State.KNOWN) if gpu.lost else gpu.fact("recovery")) for gpu in found]
    yield from summed(gpu_recovery.id, asked, map(_recovery, found), "the driver asks for no recovery")


def _recovery(gpu: Gpu) -> Trouble | None:
    if gpu.lost:
        return Trouble(gpu=gpu.index, text=f"does not answer: {gpu.lost}", measured=gpu.lost)
    wanted = gpu.value("recovery", 0)
    if wanted <= 0:
        return None
    words = _RECOVERY.get(wanted, f"recovery action {wanted}")
    text = f"needs {words}, says the driver ({gpu.uuid})"
    return Trouble(
        gpu=gpu.index, text=text, measured=wanted, expected=0, action=f"drain this node: it needs {words}"
    )


@check("gpu-ecc", Where.GPU, limit_s=facts_limit_s)
def gpu_ecc(subject: Subject) -> Iterator[Finding]:
    """GPU memory had no error that could not be corrected since the driver was loaded."""
    found = gpus(subject)
    ever = sum(gpu.value("ecc_uncorrected_ever", 0) for gpu in found)
    good = f"no uncorrected memory error since the driver was loaded ({ever} in their lives)"
    yield from _at_rest(gpu_ecc.id, found, "ecc_uncorrected", _ecc, good)


def _ecc(gpu: Gpu) -> Trouble | None:
    errors = gpu.value("ecc_uncorrected", 0)
    if errors <= 0:
        return None
    text = f"had {errors} uncorrected memory errors since the driver was loaded ({gpu.uuid})"
    action = "have the GPU reset before it is used; if the errors come back, have the card replaced"
    return Trouble(gpu=gpu.index, text=text, measured=errors, expected=0, unit="errors", action=action)


@check("gpu-remap", Where.GPU, limit_s=facts_limit_s)
def gpu_remap(subject: Subject) -> Iterator[Finding]:
    """No bad row of GPU memory waits for a spare one, which takes a reset, and there are spare ones left.

    Cards have remapped rows from A100 on, older ones retired pages.
    """
    found = gpus(subject)
    old = [gpu for gpu in found if gpu.fact("remapped").state is State.UNSUPPORTED]
    new = [gpu for gpu in found if gpu not in old]
    replaced = sum(gpu.value("remapped", _NO_ROWS)[1] for gpu in new)
    good = f"no row of memory waits for a spare one ({replaced} were replaced for errors)"
    yield from _at_rest(gpu_remap.id, new, "remapped", _rows, good)
    yield from _at_rest(gpu_remap.id, old, "retired_pending", _pages, "no page of memory waits for its retirement")


_NO_ROWS = (0, 0, 0, 0)  # corrected, replaced, whether some are pending, whether it failed


def _rows(gpu: Gpu) -> Trouble | None:
    _, replaced, pending, failed = gpu.value("remapped", _NO_ROWS)
    if failed:
        text = f"has a bad row of memory and no spare one for it: remapping failed ({gpu.uuid})"
        return Trouble(
            gpu=gpu.index, text=text, measured="failed", action="drain this node for good: replace the card"
        )
    text = f"has a bad row of memory whose remapping waits for a reset ({replaced} so far, {gpu.uuid})"
    return Trouble(gpu=gpu.index, text=text, measured="pending", action=_RESET) if pending else None


def _pages(gpu: Gpu) -> Trouble | None:
    text = f"has a bad page of memory whose retirement waits for a reset ({gpu.uuid})"
    is_bad = gpu.value("retired_pending", 0)
    return Trouble(gpu=gpu.index, text=text, measured="pending", action=_RESET) if is_bad else None


@check("gpu-memory", Where.GPU, limit_s=lambda subject: _FACTS_LIMIT_S + SETTLE_S + FACTS_S)
def gpu_memory(subject: Subject) -> Iterator[Finding]:
    """GPU memory is free: somebody who died a moment ago may hold it for a while, others for ever.

    It is asked before any context of ours; a container does not see others' processes, but their memory.
    """
    cards = subject.cards
    shown = () if cards is None else visible(cards.settled().gpus, cards.shown)
    found = [gpu for gpu in shown if not gpu.lost]
    most = max((gpu.value("memory_used", 0) for gpu in found), default=0)
    yield from _at_rest(gpu_memory.id, found, "memory_used", _memory, f"at most {in_units(most)} in use")


def _memory(gpu: Gpu) -> Trouble | None:
    used = gpu.value("memory_used", 0)
    if used <= MOST_HELD_BYTES:
        return None
    return Trouble(
        gpu=gpu.index,
        text=f"has {in_units(used)} of its {in_units(gpu.value('memory_total', 0))} in use before the job starts",
        measured=used,
        expected=MOST_HELD_BYTES,
        unit="bytes",
        action="see on that machine who holds it (nvidia-smi): a process that was left behind, or another pod",
    )


# -- what each GPU tells under load -----------------------------------------------------------


@check("gpu-temperature", Where.GPU, needs=Needs.LOAD, limit_s=load_limit_s)
def gpu_temperature(subject: Subject) -> Iterator[Finding]:
    """Under load each GPU stays clear of the temperature at which it slows itself down."""
    seen = {one.index: one for one in watched(subject)}
    when = "under load" if seen else "at rest"
    margins = {gpu.index: _margin(gpu, seen.get(gpu.index)) for gpu in gpus(subject)}
    unknown = Fact(State.UNKNOWN, why="neither margin nor threshold is told")
    asked = [(gpu, unknown if margin is None else Fact(State.KNOWN)) for gpu, margin in margins.items()]
    known = {gpu: margin for gpu, margin in margins.items() if margin is not None}
    judged = [
        Trouble(
            gpu=gpu,
            text=f"is {margin:g} \u00b0C {when} from the temperature at which it slows down",
            status=Status.WARN,
            measured=margin,
            expected=_NEAR_C,
            unit="\u00b0C",
            action="see the cooling of that machine",
        )
        for gpu, margin in known.items()
        if margin < _NEAR_C
    ]
    good = f"at least {min(known.values(), default=0):g} \u00b0C to go {when} until they slow down"
    yield from summed(gpu_temperature.id, asked, judged, good)


def _margin(gpu: Gpu, seen: Watched | None) -> float | None:
    """A card's own margin where it tells that, else what is left to its slowdown threshold."""
    margin = seen.least("margin_c") if seen is not None else gpu.value("margin_c")
    if margin is not None:
        return float(margin)
    hottest = seen.most("temperature_c") if seen is not None else gpu.value("temperature_c")
    threshold = gpu.value("slowdown_c")
    return None if hottest is None or threshold is None else float(threshold - hottest)


@check("gpu-pcie", Where.GPU, needs=Needs.LOAD, limit_s=load_limit_s)
def gpu_pcie(subject: Subject) -> Iterator[Finding]:
    """The way from the processor to each GPU is as wide and as fast under load as card and slot allow."""
    found = watched(subject)
    asked = [(one.index, one.fact("pcie_width")) for one in found]
    yield from summed(gpu_pcie.id, asked, map(_pcie, found), "PCIe as wide and as fast as it can be")


def _pcie(one: Watched) -> Trouble | None:
    """By the greatest values that were seen, of which 0 is none, and by how much counters grew."""
    lanes, most_lanes, generation, latest = (
        one.most(name) or 0 for name in ("pcie_width", "pcie_width_max", "pcie_gen", "pcie_gen_max")
    )
    replays = one.growth("pcie_replays") or 0
    if 0 < lanes < most_lanes:
        return Trouble(
            gpu=one.index,
            text=f"has {lanes:g} of {most_lanes:g} PCIe lanes under load",
            measured=lanes,
            expected=most_lanes,
            unit="lanes",
            action="drain this node: have the card, its slot and its riser seen to",
        )
    if 0 < generation < latest:
        return Trouble(
            gpu=one.index,
            text=f"is at PCIe generation {generation:g} under load, and could be at {latest:g}",
            status=Status.WARN,
            measured=generation,
            expected=latest,
            action="see the BIOS of that machine, and the card's slot",
        )
    text = f"had to send {replays:g} PCIe packets again during our tests"
    bad = Trouble(
        gpu=one.index, text=text, status=Status.WARN, measured=replays, expected=_MANY_REPLAYS, unit="replays"
    )
    return bad if replays > _MANY_REPLAYS else None


# -- how many there are, and whether they are whole ---------------------------------------------


@check("gpu-count", Where.GPU, limit_s=facts_limit_s)
def gpu_count(subject: Subject) -> Iterator[Finding]:
    """All GPUs are there, the same number by /dev, by the driver and by what the workers need."""
    if subject.host.gpus.count == 0:
        yield _none(subject)
    elif subject.cards is None:
        yield gpu_count.skipped(f"{subject.host.gpus.reason}: only NVIDIA's GPUs are checked")
    else:
        are_parts = "MIG-" in (subject.cards.shown or "")  # of which one card may have several
        seen = subject.host.gpus.count if are_parts else len(subject.cards.gpus)
        yield _counted(subject, subject.cards.facts(), seen)


def _none(subject: Subject) -> Finding:
    """This line stands for all checks of GPUs."""
    if not subject.may_use_gpus:
        return gpu_count.skipped("no GPU here: GPU checks are skipped")
    return gpu_count.skipped(
        "this container was given no GPU, though the job may have some: GPU checks are skipped",
        action="request the GPUs for the init container as well (resources.limits); the pod is given them once",
    )


def _counted(subject: Subject, facts: Facts, seen: int) -> Finding:
    host, workers = subject.host.gpus, subject.topology.local_world_size
    there = counted(host.count, "GPU")

    def failed(fault: Fault, text: str, measured: int, expected: int, action: str) -> Finding:
        more = {"measured": measured, "expected": expected, "unit": "GPUs", "action": action}
        return gpu_count.failed(fault, text, **more)

    if facts.trouble.startswith(STUCK):
        return failed(Fault.NODE, f"{host.reason}; {facts.trouble}", 0, host.count, DRAIN)
    if facts.trouble:
        action = "pip install nvidia-ml-py in the image" if "nvidia-ml-py" in facts.trouble else ""
        text = f"{there} ({host.reason}), but their state is unknown: {facts.trouble}"
        return gpu_count.unknown(text, action=action)
    if seen < host.count:
        text = f"the driver shows {seen} of {there} ({host.reason})"
        action = "report this node: a card may have fallen off its bus"
        return failed(Fault.NODE, text, seen, host.count, action)
    if workers is not None and workers > seen and subject.is_torch:
        text = f"{counted(workers, 'worker')} on this node, and {counted(seen, 'GPU')} ({host.reason})"
        action = "request a GPU for each worker, or set nproc_per_node to them"
        return failed(Fault.JOB, text, seen, workers, action)
    models = ", ".join(sorted({gpu.model for gpu in facts.gpus if gpu.model}))
    text = f"{counted(seen, 'GPU')}: {models or 'of unknown model'}, driver {facts.driver or 'of unknown version'}"
    if workers is not None and workers < seen and subject.is_torch:
        text += f"; {seen - workers} of them will be idle, with {counted(workers, 'worker')}"
        return gpu_count.warned(text, measured=workers, expected=seen, unit="GPUs")
    return gpu_count.passed(text, measured=seen, unit="GPUs")


@check("gpu-mig", Where.GPU, limit_s=facts_limit_s)
def gpu_mig(subject: Subject) -> Iterator[Finding]:
    """No GPU is cut into parts (MIG), one of which serves one process, and none together with other GPUs.

    MIG is the job's own wish where it was given parts by name, and what somebody left behind elsewhere.
    """
    found, workers = gpus(subject), subject.workers
    shown = " ".join(subject.env.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))
    wished = "MIG-" in shown
    text = f"is in MIG mode, in which {workers} workers of one job cannot work together"
    action = "request whole GPUs" if wished else "turn MIG off on that machine (nvidia-smi -mig 0), or drain it"
    bad = [
        Trouble(gpu=gpu.index, text=text, measured=True, expected=False, action=action)
        for gpu in found
        if gpu.value("mig") and not (wished and workers == 1)
    ]
    asked = [(gpu.index, gpu.fact("mig")) for gpu in found]
    yield from summed(gpu_mig.id, asked, bad, "whole", Fault.JOB if wished else Fault.NODE)
