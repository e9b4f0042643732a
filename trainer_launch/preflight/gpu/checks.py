"""The checks of GPUs: how many there are, what tests of them found; what each of them tells is in rules.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainer_launch.model.findings import Fault, Finding, Scope
from trainer_launch.model.units import counted, grouped
from trainer_launch.preflight.check import Needs, Subject, Where, check
from trainer_launch.preflight.gpu import rules
from trainer_launch.preflight.gpu.collect import STUCK
from trainer_launch.preflight.gpu.facts import PEERS, Ending, GpuFacts, GpuTest, numbered
from trainer_launch.preflight.gpu.rules import DRAIN, alike, limit_s, of_gpu

_NOT_BUILT = ("no kernel image", "not compatible with the current PyTorch", "sees no GPU", "driver on your system")
_SEE_LINKS = (
    "see NCCL_DEBUG=INFO, /dev/shm, the NVLinks (nvidia-smi nvlink -s) and the fabric manager of that machine"
)
_NO_ROOM = ("/dev/shm", "shared memory segment", "No space left on device")
_ENLARGE = "mount a larger emptyDir with medium: Memory at /dev/shm, and remove what fills it"
_SEE_LIBRARY = "see NCCL_DEBUG=INFO: the image may lack the adapter's library or plug-in, the container IPC_LOCK"


def _facts(subject: Subject) -> GpuFacts:
    return GpuFacts(trouble="") if subject.cards is None else subject.cards.facts()


@check("gpu-count", Where.GPU, limit_s=limit_s)
def gpu_count(subject: Subject) -> Finding:
    """All GPUs are there, the same number by /dev, by the driver and by what the workers need."""
    host, workers, facts = subject.host.gpus, subject.topology.local_world_size, _facts(subject)
    if host.count == 0 and not subject.may_use_gpus:  # this line stands for all checks of GPUs
        return gpu_count.skipped("no GPU here: GPU checks are skipped")
    if host.count == 0:
        text = "this container was given no GPU, though the job may have some: GPU checks are skipped"
        action = "request the GPUs for the init container as well (resources.limits); the pod is given them once"
        return gpu_count.skipped(text, action=action)
    if subject.cards is None:
        return gpu_count.skipped(f"{host.reason}: only NVIDIA's GPUs are checked")
    there = counted(host.count, "GPU")
    more: dict[str, Any] = {"measured": len(facts.gpus), "expected": host.count, "unit": "GPUs"}
    if facts.trouble.startswith(STUCK):
        return gpu_count.failed(Fault.NODE, f"{host.reason}; {facts.trouble}", action=DRAIN, **more)
    if facts.trouble:
        action = "pip install nvidia-ml-py in the image" if "nvidia-ml-py" in facts.trouble else ""
        text = f"{there} ({host.reason}), but their state is unknown: {facts.trouble}"
        return gpu_count.unknown(text, action=action)
    are_parts = "MIG-" in subject.env.get("CUDA_VISIBLE_DEVICES", "")  # of which one card may have several
    n_seen = more["measured"] = host.count if are_parts else len(facts.gpus)
    if n_seen < host.count:
        text = f"the driver shows {n_seen} of {there} ({host.reason})"
        action = "report this node: a card may have fallen off its bus"
        return gpu_count.failed(Fault.NODE, text, action=action, **more)
    if workers is not None and workers > n_seen and subject.is_torch:
        text = f"{counted(workers, 'worker')} on this node, and {counted(n_seen, 'GPU')} ({host.reason})"
        action = "request a GPU for each worker, or set nproc_per_node to them"
        return gpu_count.failed(Fault.JOB, text, action=action, **more | {"expected": workers})
    models = ", ".join(sorted({gpu.model for gpu in facts.gpus if gpu.model})) or "of unknown model"
    text = f"{counted(n_seen, 'GPU')}: {models}, driver {facts.driver or 'of unknown version'}"
    if workers is not None and workers < n_seen and subject.is_torch:
        text += f"; {n_seen - workers} of them will be idle, with {counted(workers, 'worker')}"
        return gpu_count.warned(text, measured=workers, expected=n_seen, unit="GPUs")
    return gpu_count.passed(text, measured=n_seen, unit="GPUs")


@check("gpu-load", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_load(subject: Subject) -> Iterator[Finding]:
    """Each GPU does real work: it answers, adds and multiplies right, keeps what it is given, and does not hang."""
    facts = _facts(subject)
    if facts.load_trouble and not facts.tests:
        yield gpu_load.skipped(facts.load_trouble, scope=Scope.GPU)
    elif facts.load_trouble and not facts.trouble:
        text = f"the GPUs were not watched under load: {facts.load_trouble}"
        yield gpu_load.unknown(text, scope=Scope.GPU)
    by_ending = grouped((test.ending, test) for test in facts.tests)
    if by_ending.pop(Ending.NO_TORCH, ()):
        yield gpu_load.skipped("not tested: the program's Python has no torch", scope=Scope.GPU)
    if not_run := by_ending.pop(Ending.NOT_RUN, ()):
        text = f"{numbered([test.gpu for test in not_run])} not tested: {not_run[0].why}"
        yield gpu_load.unknown(text, scope=Scope.GPU)
    tests = [test for its in by_ending.values() for test in its]
    bad = [_bad(test, _wrong(test)) for test in tests if _wrong(test)]
    yield from alike(bad)
    if tests and not bad:
        gpus = numbered([test.gpu for test in tests])
        text = f"{gpus}: {tests[0].repeats} products came out the same, bit by bit"
        patterns = min(test.tested_bytes for test in tests) >> 30
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
    if test.stage == PEERS and test.ending is not Ending.STUCK:
        return ""  # who waits for others may not be the faulty one: gpu-peers says what is to be said
    if test.ending is Ending.STUCK:
        return f"{test.why}: it is stuck inside the driver"
    return f"failed its test at {test.stage!r}: {test.why}" if test.ending is Ending.FAILED else test.why


@check("gpu-peers", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_peers(subject: Subject) -> Finding | tuple[()]:
    """All GPUs of this node together: NCCL finds the ways between them, and every number of a sum is right."""
    tests = _facts(subject).tests
    came = [test for test in tests if test.stage == PEERS or test.peers is not None]
    met = [test.peers for test in came if test.peers is not None and not test.peers.why]
    who = numbered([test.gpu for test in came])
    if not came:
        return ()
    if any(test.ending not in (Ending.DONE, Ending.NO_TORCH) and test.stage != PEERS for test in tests):
        return gpu_peers.skipped("not tested: not all GPUs came so far")
    if any(not peers.good for peers in met):
        action = "do not train on this node: have its NVLinks and cards tested"
        how = "add wrongly together" if len(came) > 1 else "adds wrongly in a collective of its own"
        return gpu_peers.failed(Fault.NODE, f"{who} {how}", action=action)
    if len(met) == len(came):
        rate = min(peers.rate for peers in met)
        text = f"{who} add right together, at {rate:.3g} GB/s (bus bandwidth, 1 GiB)"
        return gpu_peers.passed(text, measured=round(rate, 2), unit="GB/s") if len(tests) > 1 else ()
    came.sort(key=lambda test: test.ending is not Ending.FAILED)  # who failed knows more than who waited for it
    reasons = (test.why or (test.peers.why if test.peers else "") for test in came)
    why = next(filter(None, reasons), "")
    if any(words in why for words in _NO_ROOM):
        return gpu_peers.warned(f"{who} found no room in /dev/shm to work together: {why}", action=_ENLARGE)
    return gpu_peers.failed(Fault.NODE, f"{who} cannot work together: {why}", action=_SEE_LINKS)


@check("gpu-network", Where.GPU, needs=Needs.LOAD, limit_s=limit_s)
def gpu_network(subject: Subject) -> Finding | tuple[()]:
    """NCCL uses the fast network that this container has, and does not fall back to plain sockets silently."""
    chosen = ", ".join(sorted({test.network for test in _facts(subject).tests if test.network}))
    active = [port for port in subject.adapters if port.is_active] if subject.has_rdma else []
    is_wished = subject.env.get("NCCL_IB_DISABLE") == "1" or subject.env.get("NCCL_NET") == "Socket"
    if "Socket" in chosen and active and subject.has_peers and not is_wished:
        there = ", ".join(f"{port.device}:{port.port}" for port in active[:8])
        text = f"NCCL falls back to plain sockets (NET/Socket) although adapters are up: {there}"
        return gpu_network.failed(Fault.JOB, text, measured="Socket", action=_SEE_LIBRARY)
    return gpu_network.passed(f"NCCL uses {chosen}", measured=chosen) if chosen else ()


CHECKS = (
    gpu_count,
    rules.recovery,
    rules.ecc,
    rules.remap,
    rules.mig,
    rules.memory,
    gpu_load,
    gpu_peers,
    gpu_network,
    rules.clocks,
    rules.pcie,
    rules.nvlink,
    rules.xid,
)
