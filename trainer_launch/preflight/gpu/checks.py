"""The checks of GPUs: how many there are, what each tells at rest and under load, what tests of them found."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from trainer_launch.model.findings import Fault, Finding, Scope
from trainer_launch.model.units import counted, in_units
from trainer_launch.preflight.check import LIMIT_S, Needs, Subject, Where, check
from trainer_launch.preflight.gpu.collect import STUCK
from trainer_launch.preflight.gpu.facts import LOAD, PEERS, Ending, Gpu, GpuFacts, GpuTest, numbered
from trainer_launch.preflight.gpu.rules import DRAIN, POWER_CAP, findings_of, judged, of_gpu

_NOT_BUILT = ("no kernel image", "not compatible with the current PyTorch", "sees no GPU", "driver on your system")
_SEE_LINKS = (
    "see NCCL_DEBUG=INFO, /dev/shm, the NVLinks (nvidia-smi nvlink -s) and the fabric manager of that machine"
)
_SEE_LIBRARY = "see NCCL_DEBUG=INFO: the image may lack the adapter's library or plug-in, the container IPC_LOCK"


def limit_s(subject: Subject) -> float:
    """What a check may take that waits until GPUs were asked and loaded."""
    return LIMIT_S if subject.cards is None else subject.cards.limit_s


def _facts(subject: Subject) -> GpuFacts:
    return GpuFacts(trouble="") if subject.cards is None else subject.cards.facts()


@check("gpu-count", Where.GPU, limit_s=limit_s)
def gpu_count(subject: Subject) -> Iterator[Finding]:
    """All GPUs are there, the same number by /dev, by the driver and by what the workers need."""
    if subject.host.gpus.count == 0 and not subject.may_use_gpus:  # this line stands for all checks of GPUs
        yield gpu_count.skipped("no GPU here: GPU checks are skipped")
    elif subject.host.gpus.count == 0:
        yield gpu_count.skipped(
            "this container was given no GPU, though the job may have some: GPU checks are skipped",
            action="request the GPUs for the init container as well (resources.limits); the pod is given them once",
        )
    elif subject.cards is None:
        yield gpu_count.skipped(f"{subject.host.gpus.reason}: only NVIDIA's GPUs are checked")
    else:
        yield _counted(subject, subject.cards.facts())


def _counted(subject: Subject, facts: GpuFacts) -> Finding:
    host, workers = subject.host.gpus, subject.topology.local_world_size
    are_parts = "MIG-" in subject.env.get("CUDA_VISIBLE_DEVICES", "")  # of which one card may have several
    n_seen = host.count if are_parts else len(facts.gpus)
    there = counted(host.count, "GPU")
    if facts.trouble.startswith(STUCK):
        more: dict[str, Any] = {"measured": 0, "expected": host.count, "unit": "GPUs"}
        return gpu_count.failed(Fault.NODE, f"{host.reason}; {facts.trouble}", action=DRAIN, **more)
    if facts.trouble:
        action = "pip install nvidia-ml-py in the image" if "nvidia-ml-py" in facts.trouble else ""
        text = f"{there} ({host.reason}), but their state is unknown: {facts.trouble}"
        return gpu_count.unknown(text, action=action)
    more = {"measured": n_seen, "expected": host.count, "unit": "GPUs"}
    if n_seen < host.count:
        text = f"the driver shows {n_seen} of {there} ({host.reason})"
        action = "report this node: a card may have fallen off its bus"
        return gpu_count.failed(Fault.NODE, text, action=action, **more)
    if workers is not None and workers > n_seen and subject.is_torch:
        text = f"{counted(workers, 'worker')} on this node, and {counted(n_seen, 'GPU')} ({host.reason})"
        action = "request a GPU for each worker, or set nproc_per_node to them"
        return gpu_count.failed(Fault.JOB, text, action=action, **more | {"expected": workers})
    models = ", ".join(sorted({gpu.model for gpu in facts.gpus if gpu.model}))
    text = (
        f"{counted(n_seen, 'GPU')}: {models or 'of unknown model'}, driver {facts.driver or 'of unknown version'}"
    )
    if workers is not None and workers < n_seen and subject.is_torch:
        text += f"; {n_seen - workers} of them will be idle, with {counted(workers, 'worker')}"
        return gpu_count.warned(text, measured=workers, expected=n_seen, unit="GPUs")
    return gpu_count.passed(text, measured=n_seen, unit="GPUs")


@check("gpu-recovery", Where.GPU, limit_s=limit_s)
def gpu_recovery(subject: Subject) -> Iterator[Finding]:
    """The driver asks for no reset of a GPU, and none is gone."""
    good = "the driver asks for no recovery"
    return judged(gpu_recovery, subject, ("lost", "recovery"), lambda gpus: good)


@check("gpu-ecc", Where.GPU, limit_s=limit_s)
def gpu_ecc(subject: Subject) -> Iterator[Finding]:
    """GPU memory had no error that could not be corrected since the driver was loaded."""

    def good(gpus: Sequence[Gpu]) -> str:
        ever = sum(gpu.value("ecc_uncorrected_ever", 0) for gpu in gpus)
        return f"no uncorrected memory error since the driver was loaded ({ever} in their lives)"

    return judged(gpu_ecc, subject, ("ecc_uncorrected",), good)


@check("gpu-remap", Where.GPU, limit_s=limit_s)
def gpu_remap(subject: Subject) -> Iterator[Finding]:
    """No bad row of GPU memory waits for a spare one, which takes a reset, and there are spare ones left.

    Cards have remapped rows from A100 on, older ones retired pages.
    """

    def good(gpus: Sequence[Gpu]) -> str:
        replaced = [gpu.value("remapped")[1] for gpu in gpus if gpu.fact("remapped").is_known]
        if not replaced:
            return "no page of memory waits for its retirement"
        return f"no row of memory waits for a spare one ({sum(replaced)} were replaced for errors)"

    return judged(gpu_remap, subject, ("remapped", "retired_pending"), good)


@check("gpu-mig", Where.GPU, limit_s=limit_s)
def gpu_mig(subject: Subject) -> Iterator[Finding]:
    """No GPU is cut into parts (MIG), one of which serves one process, and none together with other GPUs.

    MIG is the job's own wish where it was given parts by name, and what somebody left behind elsewhere.
    """
    gpus, workers = [gpu for gpu in _facts(subject).gpus if not gpu.lost], subject.workers
    shown = " ".join(subject.env.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))
    is_wished = "MIG-" in shown
    fault = Fault.JOB if is_wished else Fault.NODE
    text = f"is in MIG mode, in which {workers} workers of one job cannot work together"
    action = "request whole GPUs" if is_wished else "turn MIG off on that machine (nvidia-smi -mig 0), or drain it"
    bad = [
        of_gpu(gpu_mig, fault, gpu.index, text, measured=True, expected=False, action=action)
        for gpu in gpus
        if gpu.value("mig") and not (is_wished and workers == 1)
    ]
    yield from findings_of(gpu_mig, {gpu.index: gpu.fact("mig") for gpu in gpus}, bad, "whole")


@check("gpu-memory", Where.GPU, limit_s=limit_s)
def gpu_memory(subject: Subject) -> Iterator[Finding]:
    """GPU memory is free: somebody who died a moment ago may hold it for a while, others for ever.

    It is asked before any context of ours; a container does not see others' processes, but their memory.
    """

    def good(gpus: Sequence[Gpu]) -> str:
        return f"at most {in_units(max(gpu.value('memory_used', 0) for gpu in gpus))} in use"

    return judged(gpu_memory, subject, ("memory_used",), good)


@check("gpu-load", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_load(subject: Subject) -> Iterator[Finding]:
    """Each GPU does real work: it answers, adds and multiplies right, keeps what it is given, and does not hang."""
    facts = _facts(subject)
    if facts.load_trouble and not facts.tests:
        yield gpu_load.skipped(facts.load_trouble, scope=Scope.GPU)
    elif facts.load_trouble and not facts.trouble:
        text = f"the GPUs were not watched under load: {facts.load_trouble}"
        yield gpu_load.unknown(text, scope=Scope.GPU)
    not_run = [test for test in facts.tests if test.ending is Ending.NOT_RUN]
    if any(test.ending is Ending.NO_TORCH for test in facts.tests):
        yield gpu_load.skipped("not tested: the program's Python has no torch", scope=Scope.GPU)
    if not_run:
        text = f"{numbered([test.gpu for test in not_run])} not tested: {not_run[0].why}"
        yield gpu_load.unknown(text, scope=Scope.GPU)
    tests = [test for test in facts.tests if test.ending not in (Ending.NO_TORCH, Ending.NOT_RUN)]
    bad = [_bad(test, _wrong(test)) for test in tests if _wrong(test)]
    yield from findings_of(gpu_load, {}, bad, "")
    if tests and not bad:
        patterns = min(test.tested_bytes for test in tests) >> 30
        text = (
            f"{numbered([test.gpu for test in tests])}: {tests[0].repeats} products came out the same, bit by bit"
        )
        text += f"; {patterns} GiB of memory kept three patterns" if patterns else ""
        yield gpu_load.passed(text, scope=Scope.GPU)


def _bad(test: GpuTest, text: str) -> Finding:
    if any(word in test.why for word in _NOT_BUILT):
        action = "use a torch that is built for this card and its driver"
        return of_gpu(gpu_load, Fault.JOB, test.gpu, text, measured=test.stage, action=action)
    return of_gpu(gpu_load, Fault.NODE, test.gpu, text, measured=test.stage)


def _wrong(test: GpuTest) -> str:
    if test.different:
        return (
            f"computes wrong results: {test.different} of {test.repeats} repeats of a product differ from the first"
        )
    if test.wrong_words:
        return f"forgets: {test.wrong_words} words of {test.tested_bytes >> 30} GiB came back changed"
    if not test.sums_right:
        return "adds wrongly in a collective of its own"
    if test.stage == PEERS and test.ending is not Ending.STUCK:
        return ""  # who waits for others may not be the faulty one: gpu-peers says what is to be said
    return f"failed its test at {test.stage!r}: {test.why}" if test.ending is Ending.FAILED else test.why


@check("gpu-peers", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_peers(subject: Subject) -> Iterator[Finding]:
    """All GPUs of this node together: NCCL finds the ways between them, and every number of a sum is right."""
    tests = _facts(subject).tests
    came = [test for test in tests if test.stage == PEERS or test.peers is not None]
    met = [test.peers for test in came if test.peers is not None and not test.peers.why]
    who = numbered([test.gpu for test in came])
    if len(tests) < 2 or not came:
        return
    if any(test.ending not in (Ending.DONE, Ending.NO_TORCH) and test.stage != PEERS for test in tests):
        yield gpu_peers.skipped("not tested: not all GPUs came so far")
    elif any(not peers.good for peers in met):
        action = "do not train on this node: have its NVLinks and cards tested"
        yield gpu_peers.failed(Fault.NODE, f"{who} add wrongly together", action=action)
    elif len(met) < len(came):
        came.sort(key=lambda test: test.ending is not Ending.FAILED)  # who failed knows more than who waited for it
        reasons = (test.why or (test.peers.why if test.peers else "") for test in came)
        why = next(filter(None, reasons), "")
        yield gpu_peers.failed(Fault.NODE, f"{who} cannot work together: {why}", action=_SEE_LINKS)
    else:
        rate = min(peers.rate for peers in met)
        text = f"{who} add right together, at {rate:.3g} GB/s (bus bandwidth, 1 GiB)"
        yield gpu_peers.passed(text, measured=round(rate, 2), unit="GB/s")


@check("gpu-network", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_network(subject: Subject) -> Iterator[Finding]:
    """NCCL uses the fast network that this container has, and does not fall back to plain sockets silently."""
    chosen = {test.network for test in _facts(subject).tests if test.network}
    used = ", ".join(sorted(chosen))
    active = [port for port in subject.adapters if port.is_active] if subject.has_rdma else []
    is_wished = subject.env.get("NCCL_IB_DISABLE") == "1" or subject.env.get("NCCL_NET") == "Socket"
    if "Socket" in chosen and active and subject.has_peers and not is_wished:
        there = ", ".join(f"{port.device}:{port.port}" for port in active[:8])
        yield gpu_network.failed(
            Fault.JOB,
            f"NCCL falls back to plain sockets (NET/Socket) although adapters are up: {there}",
            measured="Socket",
            action=_SEE_LIBRARY,
        )
    elif chosen:
        yield gpu_network.passed(f"NCCL uses {used}", measured=used)


@check("gpu-clocks", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_clocks(subject: Subject) -> Iterator[Finding]:
    """Under load no GPU is slowed down by heat or by its power supply; its own power limit is nothing unusual."""
    reasons = f"{LOAD}clock_reasons"

    def good(gpus: Sequence[Gpu]) -> str:
        capped = [gpu for gpu in gpus if str(POWER_CAP) in gpu.value(reasons, {"times": ()})["times"]]
        usual = f"; {len(capped)} at their power limit, as is usual" if capped else ""
        return f"not slowed down under load{usual}"

    return judged(gpu_clocks, subject, (reasons,), good)


@check("gpu-temperature", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_temperature(subject: Subject) -> Iterator[Finding]:
    """Under load each GPU stays clear of the temperature at which it slows itself down."""

    def good(gpus: Sequence[Gpu]) -> str:
        least = min((gpu.margin for gpu in gpus if gpu.margin is not None), default=0)
        return f"at least {least:g} \u00b0C to go {gpus[0].when} until they slow down"

    return judged(gpu_temperature, subject, ("margin",), good)


@check("gpu-pcie", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_pcie(subject: Subject) -> Iterator[Finding]:
    """The way from the processor to each GPU is as wide and as fast under load as card and slot allow."""
    return judged(gpu_pcie, subject, (f"{LOAD}pcie_lanes",), lambda gpus: "PCIe as wide and as fast as it can be")


@check("gpu-nvlink", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_nvlink(subject: Subject) -> Iterator[Finding]:
    """The links between this node's GPUs are up, on each as many as on the others."""

    def good(gpus: Sequence[Gpu]) -> str:
        most = max(sum(gpu.value("nvlinks", ())) for gpu in gpus)
        fastest = max(gpu.value("nvlink_mbps", 0) for gpu in gpus)
        return f"{most} NVLinks up on each" + (f", at {fastest / 1000:g} GB/s" if fastest else "")

    return judged(gpu_nvlink, subject, ("nvlinks",), good)


@check("gpu-xid", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_xid(subject: Subject) -> Iterator[Finding]:
    """The driver told no error (XID) of a GPU while it was tested, nor lately where the kernel's log is known."""
    return judged(gpu_xid, subject, (f"{LOAD}xids",), lambda gpus: "no XID error during our tests")


CHECKS = (
    gpu_count,
    gpu_recovery,
    gpu_ecc,
    gpu_remap,
    gpu_mig,
    gpu_memory,
    gpu_load,
    gpu_peers,
    gpu_network,
    gpu_clocks,
    gpu_temperature,
    gpu_pcie,
    gpu_nvlink,
    gpu_xid,
)
