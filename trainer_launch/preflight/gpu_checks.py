"""The checks of GPUs: tables of rules, each about one fact of a card; and what tests of the cards found. Pure.

One finding tells of all GPUs of a node, with the bad ones named. What a card does not tell is unknown, in one
place: `_ruled`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model.findings import Fault, Finding, Scope, Value
from trainer_launch.model.units import counted, grouped, in_units
from trainer_launch.preflight.check import LIMIT_S, Check, Subject, Where, check
from trainer_launch.preflight.gpu_collect import (
    LOAD,
    MOST_HELD_BYTES,
    PEERS,
    STUCK,
    Gpu,
    GpuFacts,
    GpuTest,
    LoadEnding,
    numbered,
)

DRAIN = "drain this node, and have the card reset, tested or replaced"
_RESET = "have the GPU reset before it is used: a bad row of its memory is still in use"
# In models' names: cards that have links for bridges, and not all of them need lead anywhere.
_BRIDGED = ("pcie", "nvl", "a30", "a40", "rtx", "quadro", "titan", "geforce")
_IN_PARTS = "is in MIG mode, in which {value} workers of one job cannot work together"
_LASTS = 0.1, 3  # slower clocks, in this share of the looks and in so many: a single look is no fault
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
# Bits of nvmlClocksEventReasons. Others are normal: idle, clocks that were set, the power limit, those of others.
_SLOWED_BY = {
    0x08: "the hardware (power or heat)",
    0x20: "heat, by the driver",
    0x40: "heat, by the hardware",
    0x80: "the power supply (power brake)",
}
_CLOCKS = f"{LOAD}clock_reasons"
# As NVIDIA's catalogue has them; those that no fault of the card need have caused only warn.
_XID_WORDS = {
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
_NOT_BUILT = ("no kernel image", "not compatible with the current PyTorch", "sees no GPU", "driver on your system")
_SEE_LINKS = (
    "see NCCL_DEBUG=INFO, /dev/shm, the NVLinks (nvidia-smi nvlink -s) and the fabric manager of that machine"
)
_NO_ROOM = ("/dev/shm", "shared memory segment", "No space left on device")
_ENLARGE = "mount a larger emptyDir with medium: Memory at /dev/shm, and remove what fills it"
_SEE_LIBRARY = "see NCCL_DEBUG=INFO: the image may lack the adapter's library or plug-in, the container IPC_LOCK"


class GpuRule(Struct, frozen=True, kw_only=True):
    """What is wrong with a GPU of which a fact is known and bad.

    Without `bad`, a fact is bad that is above `expected`, that is below it in a pair, or that is true. Text and
    action are formatted with the fact's `value`, as `words` has it, and the `gpu`.
    """

    fact: str
    text: str  # what the GPU has, does or needs
    bad: Callable[[Any], object] | None = None
    is_pair: bool = False  # the fact is a number and what is expected of it
    expected: Value = None
    words: Callable[[Any], Any] = lambda value: value
    measured: Callable[[Any], Value] = lambda value: value
    unit: str = ""
    fault: Fault | None = Fault.NODE  # None: a warning
    is_mild: Callable[[Any], object] = lambda value: False  # values that only warn
    action: str = DRAIN

    def finding(self, check: Check[Subject], gpu: Gpu) -> Finding | None:
        """What is wrong with this GPU; None: nothing, or it is not known."""
        if self.fact not in gpu.facts or not self._is_bad(gpu.facts[self.fact]):
            return None
        value = gpu.facts[self.fact]
        text, action = (form.format(value=self.words(value), gpu=gpu) for form in (self.text, self.action))
        measured, expected = value[:2] if self.is_pair else (self.measured(value), self.expected)
        more = {"measured": measured, "expected": expected, "unit": self.unit, "action": action}
        return of_gpu(check, None if self.is_mild(value) else self.fault, gpu.index, text, **more)

    def _is_bad(self, value: Any) -> object:
        if self.bad is not None:
            return self.bad(value)
        if self.is_pair:
            return value[0] < value[1]
        return value if self.expected is None else value > self.expected


def limit_s(subject: Subject) -> float:
    """What a check may take that waits until GPUs were asked and loaded."""
    return LIMIT_S if subject.cards is None else subject.cards.limit_s


def _ruled(
    name: str,
    title: str,
    facts: Sequence[str],
    good: str,
    *rules: GpuRule,
    needs_load: bool = False,
) -> Check[Subject]:
    """A check of these rules, of which the first that fits a GPU speaks; a lost GPU has no other fault.

    Of each GPU the first of `facts` that this kind of card has must be known. `good` is said of GPUs without fault.
    """

    def run(subject: Subject) -> Iterator[Finding]:
        gpus = [gpu for gpu in _with_derived(subject) if not gpu.lost or "lost" in facts]
        bad = [next(filter(None, (rule.finding(made, gpu) for rule in rules)), None) for gpu in gpus]
        yield from alike(filter(None, bad))
        asked = [gpu for gpu in gpus if gpu.is_watched or not facts[0].startswith(LOAD)]
        unknown = {gpu.index: gpu.unknown[name] for gpu in asked if (name := gpu.first(facts)) in gpu.unknown}
        answered = [gpu.index for gpu in asked if gpu.first(facts) in gpu.facts]
        if unknown:
            text = f"not known of {numbered([*unknown])}: {next(iter(unknown.values()))}"
            yield made.unknown(text, scope=Scope.GPU)
        elif asked and not answered:
            text = f"{numbered([gpu.index for gpu in asked])}: this kind of card has no such thing"
            yield made.skipped(text, scope=Scope.GPU)
        if answered and not any(bad):
            yield made.passed(f"{numbered(answered)}: {good}", scope=Scope.GPU)

    made = Check(id=name, title=title, run=run, where=Where.GPU, needs_load=needs_load, limit_s=limit_s)
    return made


def of_gpu(check: Check[Subject], fault: Fault | None, gpu: int, text: str, **more: Any) -> Finding:
    """What is wrong with one GPU."""
    return check.bad(fault, f"GPU {gpu} {text}", scope=Scope.GPU, subject=f"GPU {gpu}", **{"action": DRAIN, **more})


def alike(bad: Iterable[Finding]) -> Iterator[Finding]:
    """A finding for all GPUs with faults of a kind, failures first."""
    kinds = grouped((finding.fault, finding) for finding in bad)
    for fault in sorted(kinds, key=lambda fault: fault is None):
        its = kinds[fault]
        subject, text = ", ".join(finding.subject for finding in its), "; ".join(finding.text for finding in its)
        yield replace(its[0], subject=subject, text=text)


def _with_derived(subject: Subject) -> list[Gpu]:
    """This node's GPUs, with facts that are made of others."""
    if subject.cards is None:
        return []
    report = subject.cards.facts()
    links = _links([gpu for gpu in report.gpus if "nvlinks" in gpu.facts and not gpu.lost])
    made = []
    for gpu in report.gpus:
        place = str(gpu.facts.get("pci", "?"))
        derived: dict[str, Any] = {**links.get(gpu.index, {}), **_mig(subject, gpu)}
        derived["logged xids"] = {xid: ago_s for at, xid, ago_s in report.log if place.startswith(at)}
        derived |= {"lost": gpu.lost} if gpu.lost else {}
        made.append(replace(gpu, facts={**gpu.facts, **derived}))
    return made


def _mig(subject: Subject, gpu: Gpu) -> dict[str, int]:
    """MIG is the job's own wish where it was given parts by name, and what somebody left behind elsewhere."""
    shown = (subject.env.get(name, "") for name in ("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"))
    if not gpu.facts.get("mig"):
        return {}
    if not any("MIG-" in words for words in shown):
        return {"mig left on": subject.workers}
    return {"mig asked for": subject.workers} if subject.workers > 1 else {}


def _links(gpus: Sequence[Gpu]) -> dict[int, dict[str, Any]]:
    """Each GPU's links beside what they should be: all it has, or as many as on the others."""
    most = max((sum(gpu.facts["nvlinks"]) for gpu in gpus), default=0)
    facts = {}
    for gpu in gpus:
        links = gpu.facts["nvlinks"]
        is_bridged = any(word in gpu.model.casefold() for word in _BRIDGED)
        wanted = most if is_bridged or not any(links) else len(links)
        facts[gpu.index] = {
            "no links": not most and not is_bridged,
            "links": (sum(links), wanted, is_bridged),
        }
    return facts


def _recovery(number: int) -> str:
    return _RECOVERY.get(number, f"recovery action {number}")


def _is_slower(pair: Sequence[int]) -> bool:
    return 0 < pair[0] < pair[1]


def _slowing(slowed: Mapping[str, Any]) -> list[int]:
    return [bit for bit in _SLOWED_BY if slowed["times"].get(str(bit))]


def _is_lasting(slowed: Mapping[str, Any]) -> bool:
    share, least = _LASTS
    return any(slowed["times"][str(bit)] >= max(least, share * slowed["looks"]) for bit in _slowing(slowed))


def _slowed(slowed: Mapping[str, Any]) -> tuple[str, int, int]:
    """By what, in how many looks, and of how many."""
    bits = _slowing(slowed)
    times = max(slowed["times"][str(bit)] for bit in bits)
    return " and ".join(_SLOWED_BY[bit] for bit in bits), times, slowed["looks"]


def _serious(xids: Iterable[int]) -> set[int]:
    return set(xids) - _MILD


def _xids(xids: Iterable[int]) -> str:
    return ", ".join(f"{xid} ({_XID_WORDS[xid]})" if xid in _XID_WORDS else str(xid) for xid in sorted(set(xids)))


def _logged(log: Mapping[int, int]) -> str:
    return ", ".join(f"{_xids([xid])} {ago_s / 60:.0f} min ago" for xid, ago_s in log.items() if xid not in _MILD)


recovery = _ruled(
    "gpu-recovery",
    "The driver asks for no reset of a GPU, and none is gone.",
    ("lost", "recovery"),
    "the driver asks for no recovery",
    GpuRule(fact="lost", text="does not answer: {value}"),
    GpuRule(
        fact="recovery",
        expected=0,
        words=_recovery,
        text="needs {value}, says the driver ({gpu.uuid})",
        action="drain this node: it needs {value}",
    ),
)
ecc = _ruled(
    "gpu-ecc",
    "GPU memory had no error that could not be corrected since the driver was loaded.",
    ("ecc_uncorrected",),
    "no uncorrected memory error since the driver was loaded",
    GpuRule(
        fact="ecc_uncorrected",
        expected=0,
        text="had {value} uncorrected memory errors since the driver was loaded ({gpu.uuid})",
        unit="errors",
        action="have the GPU reset before it is used; if the errors come back, have the card replaced",
    ),
)
remap = _ruled(  # cards have remapped rows from A100 on, older ones retired pages
    "gpu-remap",
    "No bad row of GPU memory waits for a spare one, which takes a reset, and there are spare ones left.",
    ("remapped", "retired_pending"),
    "no bad row or page of memory waits for a reset",
    GpuRule(
        fact="remapped",
        bad=lambda rows: rows[3],
        text="has a bad row of memory and no spare one for it: remapping failed ({gpu.uuid})",
        measured=lambda rows: "failed",
        action="drain this node for good: replace the card",
    ),
    GpuRule(
        fact="remapped",
        bad=lambda rows: rows[2],
        text="has a bad row of memory whose remapping waits for a reset ({value[1]} so far, {gpu.uuid})",
        measured=lambda rows: "pending",
        action=_RESET,
    ),
    GpuRule(
        fact="retired_pending",
        text="has a bad page of memory whose retirement waits for a reset ({gpu.uuid})",
        measured=lambda pages: "pending",
        action=_RESET,
    ),
)
mig = _ruled(
    "gpu-mig",
    "No GPU is cut into parts (MIG), one of which serves one process, and none together with other GPUs.",
    ("mig",),
    "whole",
    GpuRule(
        fact="mig asked for",
        text=_IN_PARTS,
        measured=bool,
        expected=False,
        fault=Fault.JOB,
        action="request whole GPUs",
    ),
    GpuRule(
        fact="mig left on",
        text=_IN_PARTS,
        measured=bool,
        expected=False,
        action="turn MIG off on that machine (nvidia-smi -mig 0), or drain it",
    ),
)
memory = _ruled(  # asked before any context of ours; a container does not see others' processes, but their memory
    "gpu-memory",
    "GPU memory is free: somebody who died a moment ago may hold it for a while, others for ever.",
    ("memory_used",),
    "no more memory in use than the driver itself needs",
    GpuRule(
        fact="memory_used",
        expected=MOST_HELD_BYTES,
        words=in_units,
        text="has {value} of its {gpu.memory} in use before the job starts",
        unit="bytes",
        action="see on that machine who holds it (nvidia-smi): a process that was left behind, or another pod",
    ),
)
clocks = _ruled(
    "gpu-clocks",
    "Under load no GPU is slowed down by heat or by its power supply; its own power limit is nothing unusual.",
    (_CLOCKS,),
    "not slowed down under load",
    GpuRule(
        fact=_CLOCKS,
        bad=_slowing,
        is_mild=lambda slowed: not _is_lasting(slowed),
        words=_slowed,
        text="is slowed down under load by {value[0]}, in {value[1]} of {value[2]} looks",
        measured=lambda slowed: " ".join(f"{bit:#x}" for bit in _slowing(slowed)),
        action="see the cooling and the power supply of that machine, and drain it if this goes on",
    ),
    needs_load=True,
)
pcie = _ruled(
    "gpu-pcie",
    "The way from the processor to each GPU is as wide and as fast under load as card and slot allow.",
    (f"{LOAD}pcie_lanes",),
    "PCIe as wide and as fast as it can be",
    GpuRule(
        fact=f"{LOAD}pcie_lanes",
        is_pair=True,
        bad=_is_slower,
        text="has {value[0]} of {value[1]} PCIe lanes under load",
        unit="lanes",
        action="drain this node: have the card, its slot and its riser seen to",
    ),
    GpuRule(
        fact=f"{LOAD}pcie_generation",
        is_pair=True,
        bad=_is_slower,
        text="is at PCIe generation {value[0]} under load, and could be at {value[1]}",
        fault=None,
        action="see the BIOS of that machine, and the card's slot",
    ),
    needs_load=True,
)
nvlink = _ruled(
    "gpu-nvlink",
    "The links between this node's GPUs are up, on each as many as on the others.",
    ("nvlinks",),
    "all NVLinks up",
    GpuRule(
        fact="no links",
        text="has NVLinks, and none is up",
        measured=lambda is_so: 0,
        fault=None,
        action="see the fabric manager of that machine; without NVLink GPUs talk over PCIe, many times slower",
    ),
    GpuRule(
        fact="links",
        is_pair=True,
        is_mild=lambda links: links[2],
        text="has {value[0]} of {value[1]} NVLinks up (down: {gpu.down_links})",
        unit="links",
    ),
    GpuRule(fact="fabric_error", text="could not join its NVLink fabric (error {value})"),
    GpuRule(
        fact=f"{LOAD}nvlink_errors",
        expected=0,
        text="had {value} errors on its NVLinks during our tests",
        unit="errors",
        fault=None,
    ),
    needs_load=True,
)
xid = _ruled(
    "gpu-xid",
    "The driver told no error (XID) of a GPU while it was tested, nor lately where the kernel's log is known.",
    (f"{LOAD}xids",),
    "no XID error during our tests",
    GpuRule(
        fact=f"{LOAD}xids",
        is_mild=lambda xids: not _serious(xids),
        words=_xids,
        text="had XID {value} during our tests",
        measured=lambda xids: min(_serious(xids) or xids),
        unit="XID",
    ),
    GpuRule(  # the card may have been reset since
        fact="logged xids",
        bad=_serious,
        words=_logged,
        text="had XID {value}, by the kernel's log",
        measured=lambda log: min(_serious(log)),
        unit="XID",
        fault=None,
    ),
    needs_load=True,
)


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


@check("gpu-load", Where.GPU, needs_load=True, limit_s=limit_s)
def gpu_load(subject: Subject) -> Iterator[Finding]:
    """Each GPU does real work: it answers, adds and multiplies right, keeps what it is given, and does not hang."""
    facts = _facts(subject)
    if facts.load_trouble and not facts.tests:
        yield gpu_load.skipped(facts.load_trouble, scope=Scope.GPU)
    elif facts.load_trouble and not facts.trouble:
        text = f"the GPUs were not watched under load: {facts.load_trouble}"
        yield gpu_load.unknown(text, scope=Scope.GPU)
    by_ending = grouped((test.ending, test) for test in facts.tests)
    if by_ending.pop(LoadEnding.NO_TORCH, ()):
        yield gpu_load.skipped("not tested: the program's Python has no torch", scope=Scope.GPU)
    if not_run := by_ending.pop(LoadEnding.NOT_RUN, ()):
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
    if test.stage == PEERS and test.ending is not LoadEnding.STUCK:
        return ""  # who waits for others may not be the faulty one: gpu-peers says what is to be said
    if test.ending is LoadEnding.STUCK:
        return f"{test.why}: it is stuck inside the driver"
    return f"failed its test at {test.stage!r}: {test.why}" if test.ending is LoadEnding.FAILED else test.why


@check("gpu-peers", Where.GPU, needs_load=True, limit_s=limit_s)
def gpu_peers(subject: Subject) -> Finding | tuple[()]:
    """All GPUs of this node together: NCCL finds the ways between them, and every number of a sum is right."""
    tests = _facts(subject).tests
    came = [test for test in tests if test.stage == PEERS or test.peers is not None]
    met = [test.peers for test in came if test.peers is not None and not test.peers.why]
    who = numbered([test.gpu for test in came])
    if not came:
        return ()
    if any(test.ending not in (LoadEnding.DONE, LoadEnding.NO_TORCH) and test.stage != PEERS for test in tests):
        return gpu_peers.skipped("not tested: not all GPUs came so far")
    if any(not peers.good for peers in met):
        action = "do not train on this node: have its NVLinks and cards tested"
        how = "add wrongly together" if len(came) > 1 else "adds wrongly in a collective of its own"
        return gpu_peers.failed(Fault.NODE, f"{who} {how}", action=action)
    if len(met) == len(came):
        rate = min(peers.rate for peers in met)
        text = f"{who} add right together, at {rate:.3g} GB/s (bus bandwidth, 1 GiB)"
        return gpu_peers.passed(text, measured=round(rate, 2), unit="GB/s") if len(tests) > 1 else ()
    came.sort(key=lambda test: test.ending is not LoadEnding.FAILED)  # who failed knows more than who waited for it
    reasons = (test.why or (test.peers.why if test.peers else "") for test in came)
    why = next(filter(None, reasons), "")
    if any(words in why for words in _NO_ROOM):
        return gpu_peers.warned(f"{who} found no room in /dev/shm to work together: {why}", action=_ENLARGE)
    return gpu_peers.failed(Fault.NODE, f"{who} cannot work together: {why}", action=_SEE_LINKS)


@check("gpu-network", Where.GPU, needs_load=True, limit_s=limit_s)
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
    recovery,
    ecc,
    remap,
    mig,
    memory,
    gpu_load,
    gpu_peers,
    gpu_network,
    clocks,
    pcie,
    nvlink,
    xid,
)
