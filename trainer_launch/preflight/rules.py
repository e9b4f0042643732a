"""Faults of a container, a GPU or a job's nodes by their facts: one table of rules, one way to judge by it.

A check gives its observations of this container, or of each of its GPUs. Of each, the first rule of the check that
fits makes the finding. A fact that could not be read is UNKNOWN, here and nowhere else. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.model.findings import OF_MACHINES, Fault, Finding, Scope, Status, Value
from trainer_launch.model.units import grouped, in_units
from trainer_launch.preflight.gpu_collect import LOAD, MOST_HELD_BYTES, numbered

# What a machine may do about a finding; "": a person has to look.
RESET, REBOOT, DRAIN, RMA, FIX_JOB, FIX_IMAGE = "RESET", "REBOOT", "DRAIN", "RMA", "FIX_JOB", "FIX_IMAGE"
CLOCKS, LANES = f"{LOAD}clock_reasons", f"{LOAD}pcie_lanes"
_NODE, _JOB, _WARN = Fault.NODE, Fault.JOB, None
_LASTS = 0.1, 3  # slower clocks, in this share of the looks and in so many: a single look is no fault
# fmt: off
# As nvmlGpuRecoveryAction has them.
_RECOVERY = {
    1: ("a reset of the GPU", RESET), 2: ("a reboot of the node", REBOOT),
    3: ("that peer-to-peer traffic be drained", DRAIN), 4: ("to be drained, then reset", RESET),
    5: ("that its IMEX domain be recovered", DRAIN), 6: ("a reset of its bus", RESET),
    7: ("a reboot of the system", REBOOT),
}
# Bits of nvmlClocksEventReasons. Others are normal: idle, clocks that were set, the power limit, those of others.
_BY_DRIVER = 0x20
_SLOWED_BY = {
    0x08: "the hardware (power or heat)", 0x20: "heat, by the driver", 0x40: "heat, by the hardware",
    0x80: "the power supply (power brake)",
}
# As NVIDIA's catalogue has them; those that no fault of the card need have caused only warn.
_XID_WORDS = {
    48: "uncorrected memory error", 62: "halt of its own controller", 63: "a row of memory was remapped",
    64: "remapping a row of memory failed", 74: "NVLink error", 79: "it has fallen off its bus",
    92: "many corrected memory errors", 94: "contained memory error", 95: "uncontained memory error",
    119: "its system processor does not answer", 120: "error of its system processor",
    140: "unrecovered memory error", 143: "start of its system processor failed",
    154: "its recovery action has changed",
}
# fmt: on
_MILD_XIDS = frozenset((13, 31, 43, 45, 63, 92, 94, 121, 126))
_REBOOT_XIDS = frozenset((79, 151, 168))
_RESET_XIDS = frozenset((48, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158))
# Pairs of bits of an NVLink fabric's health, as nvml.h has them: 1 is true.
_DEGRADED, _RECOVERING, _UNHEALTHY, _TIMED_OUT = 0, 2, 4, 6
_FABRIC_WAITS, _FABRIC_DONE = (1, 2), 3  # states


class Observed(Struct, frozen=True, kw_only=True):
    """Facts that a check has of this container or of a GPU; with the defaults, only rules make findings of it."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    unknown: str = ""  # why what the check asks for is not known
    skipped: str = ""  # why the check means nothing here
    good: str = ""  # what a pass says
    gpu: int | None = None  # its number; None: of the container
    more: Mapping[str, Any] = field(default_factory=dict)  # fields of its finding

    @property
    def answer(self) -> tuple[Status | None, str]:
        """Status and text where no rule fits."""
        if self.unknown:
            return Status.UNKNOWN, self.unknown
        return (Status.SKIPPED, self.skipped) if self.skipped else (Status.PASS if self.good else None, self.good)


class Rule(Struct, frozen=True):
    """A fault that a fact can show. The texts are formatted with all facts, and with the `value` of its own."""

    check: str
    fact: str  # where it is not known, the rule is silent
    bad: Callable[[Any], object]
    fault: Fault | None  # None: a warning
    remedy: str
    text: str
    action: str = "{action}"
    words: Callable[[Any], Any] = lambda value: value  # how people read the fact's value
    unit: str = ""

    def finding(self, observed: Observed) -> Finding | None:
        """The fault as a finding; None: there is none, or the fact could not be read."""
        if self.fact not in observed.facts or not self.bad(observed.facts[self.fact]):
            return None
        value, status = observed.facts[self.fact], Status.WARN if self.fault is None else Status.FAIL
        facts = {**observed.facts, "value": self.words(value)}
        text, action, remedy = (form.format_map(facts) for form in (self.text, self.action, self.remedy))
        is_pair = isinstance(value, tuple | list) and len(value) == 2  # what there is, and what there should be
        measured, expected = map(_plain, value if is_pair else (value, None))
        about: dict[str, Any] = {"measured": measured, "expected": expected, "unit": self.unit, **observed.more}
        if observed.gpu is not None:
            about |= {"scope": Scope.GPU, "subject": f"GPU {observed.gpu}"}
            text = f"GPU {observed.gpu} {text}"
        more = {"fault": self.fault, "action": action, "remedy": remedy, **about}
        return Finding(check=self.check, status=status, text=text, **more)


def _plain(value: object) -> Value:
    return value if isinstance(value, bool | int | float) else None


def judged(name: str, observed: Sequence[Observed]) -> Iterator[Finding]:
    """The findings by the rules of a check; GPUs with the same fault share a finding."""
    rules = [rule for rule in RULES if rule.check == name]
    results = [(about, next(filter(None, (rule.finding(about) for rule in rules)), None)) for about in observed]
    bad = [finding for _, finding in results if finding is not None]
    keys = [(finding.fault, finding.remedy) if finding.scope is Scope.GPU else at for at, finding in enumerate(bad)]
    kinds = grouped(zip(keys, bad, strict=True))
    for its in sorted(kinds.values(), key=lambda its: its[0].fault is None):
        text = "; ".join(finding.text for finding in its)
        yield replace(its[0], subject=", ".join(finding.subject for finding in its), text=text)
    quiet = enumerate(about for about, finding in results if finding is None)
    alike = grouped(((about.answer, number if about.gpu is None else None), about) for number, about in quiet)
    for ((status, text), number), members in alike.items():
        is_minor = (status is Status.PASS and bad) or (status is Status.SKIPPED and len(members) < len(observed))
        if status is not None and number is not None:
            yield Finding(check=name, status=status, text=text, **members[0].more)
        elif status is not None and not is_minor:
            who = numbered([about.gpu for about in members if about.gpu is not None])
            yield Finding(check=name, status=status, text=f"{who}: {text}", scope=Scope.GPU)


def _above(most: float) -> Callable[[Any], bool]:
    return lambda value: bool(value > most)


def _is_short(pair: Sequence[float]) -> bool:
    return pair[0] < pair[1]


def _slowing(slowed: Mapping[str, Any]) -> list[int]:
    return [bit for bit in _SLOWED_BY if slowed["times"].get(str(bit))]


def _is_lasting(slowed: Mapping[str, Any]) -> bool:
    """Whether slower clocks are a fault: after minutes of full load, cards without fans are kept cool so."""
    share, least = _LASTS
    bits = [bit for bit in _slowing(slowed) if bit != _BY_DRIVER or not slowed["is_burned"]]
    return any(slowed["times"][str(bit)] >= max(least, share * slowed["looks"]) for bit in bits)


def _slowed(slowed: Mapping[str, Any]) -> tuple[str, int, int]:
    """By what, in how many looks, and of how many."""
    bits = _slowing(slowed)
    times = max(slowed["times"][str(bit)] for bit in bits)
    return " and ".join(_SLOWED_BY[bit] for bit in bits), times, slowed["looks"]


def _serious(xids: Iterable[int]) -> set[int]:
    return set(xids) - _MILD_XIDS


def _xids(xids: Iterable[int]) -> tuple[str, str, str]:
    """In words, and what helps against them, for programs and for people."""
    named = [f"{xid} ({_XID_WORDS[xid]})" if xid in _XID_WORDS else str(xid) for xid in sorted(set(xids))]
    helps = REBOOT if _REBOOT_XIDS & set(xids) else RESET if _RESET_XIDS & set(xids) else DRAIN
    return ", ".join(named), helps, _REBOOT if helps == REBOOT else _DRAIN


def _is_mending(fabric: Mapping[str, Any]) -> bool:
    return _is_health(_RECOVERING)(fabric) or _is_health(_TIMED_OUT)(fabric)


def _is_health(at: int) -> Callable[[Mapping[str, Any]], bool]:
    return lambda fabric: fabric["state"] == _FABRIC_DONE and fabric["health"] >> at & 3 == 1


_FEWER = "or start fewer workers"
_DRAIN = "drain this node, and have the card reset, tested or replaced"
_REBOOT = "drain this node and reboot it; if that does not help, have the card tested or replaced"
_RESET = "have the GPU reset before it is used: a bad row of its memory is still in use"
_IN_PARTS = "is in MIG mode, in which {value} workers of one job cannot work together"
_IN_USE = "has {value} of its {memory} in use before the job starts"
_LANES_LEFT = "has {value[0]} of {value[1]} PCIe lanes under load"
_BUILT = "use a torch that is whole, and built for this card and its driver"
_APART = "{who} cannot work together: {value}"
_COOLING = "check the cooling and the power supply of that machine, and drain it if this continues"
_SLOWED = "is slowed down under load by {value[0]}, in {value[1]} of {value[2]} samples"
_UP = "has {value[0]} of {value[1]} NVLinks up (down: {down_links})"
_FABRIC = "check the fabric manager of that machine (nvidia-smi -q, Fabric), and the switches of its NVLinks"
_LINKS = (
    "drain this node, and check its NVLinks (nvidia-smi nvlink -s) and fabric manager; NCCL_DEBUG=INFO tells more"
)
_FALLBACK = "NCCL falls back to plain sockets (NET/Socket) although adapters are up: {value}"
_LIBRARY = "set NCCL_DEBUG=INFO: the image may lack the adapter's library or plug-in, the container IPC_LOCK"
_IPC_LOCK = (
    "add IPC_LOCK to securityContext.capabilities.add (as root; without, raise LimitMEMLOCK of the container "
    "runtime)"
)
_MORE_PIDS = f"raise the kubelet's podPidsLimit (or --pids-limit), {_FEWER}"
_FILES = "a process may open {soft} files; a worker of {ranks} may need {need}"
_ALL_DOWN = "no port of an RDMA adapter is active: {value}"
_CABLE = "check that port's cable, its optics and the switch (ibstat, mlxlink)"

_MISSING = "see the pod of node 0 and its log, its headless Service, and network policies for its port"
_MEMBERS = "give all pods the same job name, number of nodes, secret, and version of this program"
_SECRET = "mount the same Secret in all pods; check mode and owner of authorized_keys"
_TIME = "drain that machine, or mend its time service (chrony, ntpd): tokens will be refused"
_IMAGE = "start all nodes from the same image, by digest"
_IMPOSTOR = "run trainer-launch sshd there, which shows the job's key; a host without it may be an impostor"

# Of each container, and of each GPU, the first rule of a check that fits speaks.
# fmt: off
RULES = (
    Rule("memory", "all", _is_short, _WARN, FIX_JOB, "{about}; {usual} MiB for each are usual",
         f"raise resources.limits.memory, {_FEWER}", unit="MiB"),
    Rule("cpu", "cpus", _is_short, _WARN, FIX_JOB, "{about}",
         "raise resources.limits.cpu to at least one for each worker, data loaders not counted", unit="CPUs"),
    Rule("pids", "one", _is_short, _JOB, FIX_JOB, "{about}; torch alone takes {least}", _MORE_PIDS, unit="pids"),
    Rule("pids", "all", _is_short, _WARN, FIX_JOB, "{about}; with data loaders {usual} in each are usual",
         _MORE_PIDS, unit="pids"),
    Rule("nofile", "certain", _is_short, _JOB, FIX_JOB, _FILES, unit="files"),
    Rule("nofile", "estimate", _is_short, _WARN, FIX_JOB, _FILES, unit="files"),
    Rule("memlock", "refused", bool, _JOB, FIX_JOB, "{value}", _IPC_LOCK),
    Rule("shm", "broken", bool, _JOB, FIX_JOB, "{value}"),
    # GPUs may need none of it, and `run` tells engines to use less.
    Rule("shm", "small", bool, _WARN, FIX_JOB, "{value}"),
    Rule("storage", "hangs", bool, _NODE, "", "{value}",
         "check the file server and this node's connection to it (mount, CSI driver)"),
    Rule("storage", "refused", bool, _JOB, FIX_JOB, "{value}"),
    Rule("storage", "fails", bool, _NODE, "", "{value}"),
    Rule("storage", "low", bool, _WARN, "", "{value}",
         "make room on the volume, see why it is slow, or write checkpoints that are not renamed into place"),
    Rule("tmpdir", "wrong", bool, _WARN, FIX_JOB, "{value}"),
    Rule("own-name", "wrong", bool, _JOB, FIX_JOB, "{value}"),
    Rule("own-name", "doubtful", bool, _WARN, FIX_JOB, "{value}"),
    Rule("dns", "slow", bool, _WARN, "", "{value}"),
    Rule("dns", "never there", bool, _JOB, FIX_JOB, "{value}"),
    Rule("dns", "absent", bool, _NODE, "", "{value}"),
    Rule("gloo-socket-ifname", "wrong", bool, _JOB, FIX_JOB, "{value}"),
    Rule("gloo-socket-ifname", "doubtful", bool, _WARN, FIX_JOB, "{value}"),
    Rule("nccl-socket-ifname", "wrong", bool, _JOB, FIX_JOB, "{value}"),
    Rule("nccl-socket-ifname", "doubtful", bool, _WARN, FIX_JOB, "{value}"),
    Rule("nccl-ib-hca", "not given", bool, _WARN, FIX_JOB, "{value}",
         "request the RDMA device in the pod's resources, or unset NCCL_IB_HCA"),
    Rule("nccl-ib-hca", "all down", bool, _NODE, DRAIN, _ALL_DOWN, f"drain this node: {_CABLE}"),
    Rule("nccl-ib-hca", "none up", bool, _WARN, "", _ALL_DOWN, _CABLE),  # maybe by design
    Rule("nccl-ib-hca", "left out", bool, _JOB, FIX_JOB, "{value}", "set NCCL_IB_HCA to what is here: {there}"),
    Rule("nccl-ib-hca", "shut out", bool, _WARN, "", "{value}: NCCL will use plain sockets",
         "set NCCL_IB_DISABLE=1 if that is meant; else set NCCL_IB_HCA to what is here: {there}"),
    Rule("nccl-ib-hca", "some down", bool, _WARN, "", "{value}: NCCL goes on without saying so", _CABLE),
    Rule("rdma-errors", "errors", bool, _WARN, "", "{value}, while pairs of nodes were tested", _CABLE),
    Rule("gpu-count", "hangs", bool, _NODE, REBOOT, "{value}", _REBOOT),
    Rule("gpu-count", "elsewhere", bool, _JOB, FIX_JOB, "{value}",
         "leave CUDA_VISIBLE_DEVICES to the device plugin, or number the GPUs from 0"),
    Rule("gpu-count", "shown", _is_short, _NODE, DRAIN, "the driver shows {value[0]} of {there} ({reason})",
         "drain this node: a card may have fallen off its bus", unit="GPUs"),
    Rule("gpu-count", "for workers", _is_short, _JOB, FIX_JOB, "{workers} on this node, and {n_visible} ({reason})",
         "request a GPU for each worker, or set nproc_per_node to them", unit="GPUs"),
    Rule("gpu-count", "used", _is_short, _WARN, "", "{about}; {idle} of them will be idle, with {workers}", "",
         unit="GPUs"),
    Rule("gpu-recovery", "lost", bool, _NODE, REBOOT, "does not answer: {value}", _REBOOT),
    Rule("gpu-recovery", "recovery", _above(0), _NODE, "{value[1]}", "needs {value[0]}, says the driver ({uuid})",
         "drain this node: it needs {value[0]}",
         lambda number: _RECOVERY.get(number, (f"recovery action {number}", DRAIN))),
    Rule("gpu-ecc", "sram_threshold", bool, _NODE, RMA,
         "has had more errors in its SRAM than NVIDIA lets a card have ({uuid})",
         "drain this node for good: replace the card"),
    Rule("gpu-ecc", "ecc_uncorrected", _above(0), _NODE, RESET,
         "had {value} uncorrected memory errors since the driver was loaded ({uuid})",
         "have the GPU reset before it is used; if the errors come back, have the card replaced", unit="errors"),
    Rule("gpu-remap", "remapped", lambda rows: rows[3], _NODE, RMA,
         "has a bad row of memory and no spare one for it: remapping failed ({uuid})",
         "drain this node for good: replace the card"),
    Rule("gpu-remap", "remapped", lambda rows: rows[2], _NODE, RESET,
         "has a bad row of memory whose remapping waits for a reset ({value[1]} so far, {uuid})", _RESET),
    Rule("gpu-remap", "retired_pending", bool, _NODE, RESET,
         "has a bad page of memory whose retirement waits for a reset ({uuid})", _RESET),
    Rule("gpu-remap", "spent_banks", _above(0), _WARN, RMA,
         "has {value} banks of memory without a spare row ({uuid})",
         "plan to replace the card: the next bad row there cannot be remapped", unit="banks"),
    Rule("gpu-mig", "mig asked for", _above(1), _JOB, FIX_JOB, _IN_PARTS, "request whole GPUs"),
    Rule("gpu-mig", "mig left on", bool, _NODE, DRAIN, _IN_PARTS,
         "turn MIG off on that machine (nvidia-smi -mig 0), or drain it"),
    Rule("gpu-memory", "memory shared", _above(MOST_HELD_BYTES), _WARN, "", _IN_USE,
         "see who holds it, if no other pod shares this card and it is not the kernel's own (nvidia-smi)", in_units,
         "bytes"),
    Rule("gpu-memory", "memory held", _above(MOST_HELD_BYTES), _NODE, "", _IN_USE,  # maybe by time slicing
         "see on that machine who holds it (nvidia-smi): a process that was left behind, or another pod", in_units,
         "bytes"),
    Rule("gpu-load", "not built", bool, _JOB, FIX_IMAGE, "{value}", _BUILT),
    Rule("gpu-load", "not ready", bool, _NODE, DRAIN, "{value}", f"drain this node: {_FABRIC}"),
    Rule("gpu-load", "unseen", bool, _NODE, "", "{value}",
         "see nvidia-smi on that machine, and whether this container was given /dev/nvidia-uvm and libcuda.so "
         "(runtimeClassName, NVIDIA_DRIVER_CAPABILITIES)"),
    Rule("gpu-load", "crashed", bool, _NODE, "", "{value}",
         "see dmesg and nvidia-smi on that machine; a library of the image may crash there as well"),
    Rule("gpu-load", "stuck", bool, _NODE, REBOOT, "{value}: it is stuck inside the driver", _REBOOT),
    Rule("gpu-load", "wrong", bool, _NODE, DRAIN, "{value}", _DRAIN),
    Rule("gpu-peers", "wrong sums", bool, _NODE, DRAIN, "{value}",
         "drain this node: have its NVLinks and cards tested"),
    Rule("gpu-peers", "no room", bool, _WARN, FIX_JOB, "{who} found no room in /dev/shm to work together: {value}",
         "mount a larger emptyDir with medium: Memory at /dev/shm, and remove what fills it"),
    Rule("gpu-peers", "misled", bool, _JOB, FIX_JOB, _APART,
         "see the job's NCCL variables"),
    Rule("gpu-peers", "not built", bool, _JOB, FIX_IMAGE, _APART, _BUILT),
    Rule("gpu-peers", "held apart", bool, _NODE, "", _APART,
         "set NCCL_DEBUG=INFO: a library, a limit of the container, a file or a socket may be in the way"),
    Rule("gpu-peers", "apart", bool, _NODE, DRAIN, _APART, _LINKS),
    Rule("gpu-network", "fallback", bool, _JOB, FIX_IMAGE, _FALLBACK, _LIBRARY),
    Rule("gpu-network", "maybe fallback", bool, _WARN, "", _FALLBACK,
         f"set NCCL_IB_DISABLE=1 if that is meant; else {_LIBRARY}"),
    Rule("gpu-network", "staged", bool, _WARN, "",
         "NCCL uses {value} without GPUDirect RDMA: all data goes through the host's memory",
         "load nvidia_peermem on that machine, or use a driver and a kernel with DMA-BUF; see NCCL_DEBUG=INFO"),
    Rule("gpu-clocks", CLOCKS, _is_lasting, _NODE, DRAIN, _SLOWED, _COOLING, _slowed),
    Rule("gpu-clocks", CLOCKS, _slowing, _WARN, "", _SLOWED, _COOLING, _slowed),
    Rule("gpu-pcie", "fewer lanes", lambda pair: 0 < pair[0] < pair[1], _NODE, DRAIN, _LANES_LEFT,
         "drain this node: have the card, its slot and its riser seen to", unit="lanes"),
    # All cards alike: so may the slots of this machine be made. If they are not, `pcie` finds them slow.
    Rule("gpu-pcie", LANES, lambda pair: 0 < pair[0] < pair[1], _WARN, "", _LANES_LEFT,
         "see the slots and risers of that machine", unit="lanes"),
    Rule("gpu-pcie", f"{LOAD}pcie_generation", lambda pair: 0 < pair[0] < pair[1], _WARN, "",
         "is at PCIe generation {value[0]} under load, and could be at {value[1]}",
         "see the BIOS of that machine, and the card's slot"),
    Rule("gpu-nvlink", "fabric", lambda fabric: fabric["state"] == _FABRIC_DONE and fabric["status"], _NODE, REBOOT,
         "could not join its NVLink fabric (error {value[status]})", f"reboot that machine, or {_FABRIC}"),
    Rule("gpu-nvlink", "fabric", _is_health(_DEGRADED), _NODE, DRAIN,
         "has less bandwidth than it should, says its NVLink fabric", f"drain this node: {_FABRIC}"),
    Rule("gpu-nvlink", "fabric", _is_health(_UNHEALTHY), _NODE, DRAIN, "has a bad route in its NVLink fabric",
         f"drain this node: {_FABRIC}"),
    Rule("gpu-nvlink", "links", _is_short, _NODE, DRAIN, _UP, _DRAIN, unit="links"),
    Rule("gpu-nvlink", "no links", bool, _WARN, "", "has NVLinks, and none is up",
         "check the fabric manager of that machine; without NVLink GPUs talk over PCIe, many times slower"),
    Rule("gpu-nvlink", "some links", _is_short, _WARN, "", _UP, _FABRIC, unit="links"),
    Rule("gpu-nvlink", "fabric", lambda fabric: fabric["state"] in _FABRIC_WAITS, _WARN, "",
         "has not joined its NVLink fabric (state {value[state]})", _FABRIC),
    Rule("gpu-nvlink", "fabric", _is_mending, _WARN, "", "has a route in its NVLink fabric that is being recovered",
         _FABRIC),
    Rule("gpu-nvlink", "clique", lambda pair: pair[0] != pair[1], _WARN, "",
         "is in clique {value[0]} of its NVLink fabric, and the others of this node in {value[1]}", _FABRIC),
    Rule("gpu-nvlink", f"{LOAD}nvlink_errors", _above(0), _WARN, "",
         "had {value} errors on its NVLinks during our tests", _DRAIN, unit="errors"),
    Rule("gpu-xid", f"{LOAD}xids", _serious, _NODE, "{value[1]}", "had XID {value[0]} during our tests",
         "{value[2]}", _xids),
    Rule("gpu-xid", f"{LOAD}xids", bool, _WARN, "", "had XID {value[0]} during our tests", _DRAIN, _xids),
    Rule("roll-call", "absent", bool, _NODE, "", "{value}",
         "see these pods (kubectl describe pod) and their logs, or wait longer with --wait-timeout"),
    Rule("roll-call", "lost", bool, _NODE, "", "{value}", "see the log and the events of its pod"),
    Rule("roll-call", "no node 0", bool, _NODE, "", "{value}", _MISSING),
    Rule("roll-call", "cut off", bool, _NODE, "", "{value}", "check DNS and the network of this node"),
    Rule("roll-call", "same rank", bool, _JOB, FIX_JOB, "{value}",
         "give each pod its own index (PET_NODE_RANK, --node-rank), in one replicatedJob"),
    Rule("roll-call", "refused", bool, _JOB, FIX_JOB, "node 0 refuses this node: {value}", _MEMBERS),
    Rule("facts", "torch", bool, _JOB, FIX_IMAGE, "torch differs: {value}", _IMAGE),
    Rule("facts", "cuda", bool, _JOB, FIX_IMAGE, "CUDA of torch differs: {value}", _IMAGE),
    Rule("facts", "nccl", bool, _JOB, FIX_IMAGE, "NCCL differs: {value}", _IMAGE),
    Rule("facts", "nccl loaded", bool, _JOB, FIX_IMAGE, "the NCCL that is really loaded differs: {value}",
         f"{_IMAGE}; see LD_LIBRARY_PATH and LD_PRELOAD"),
    Rule("facts", "arch", bool, _WARN, "", "the architecture differs: {value}",
         "put all nodes on machines of one architecture (nodeSelector)"),
    Rule("facts", "must agree", bool, _JOB, FIX_JOB, "{value}", "give it the same value in every pod of the job"),
    Rule("facts", "slower adapters", bool, _NODE, "", "the RDMA ports that are up differ: {value}",
         "check that machine's adapters and cables, or drain it"),
    Rule("facts", "adapters", bool, _WARN, "", "the RDMA ports that are up differ: {value}",
         "check that machine's adapters and cables (ibstat)"),
    Rule("facts", "code", bool, _WARN, "", "the program's code differs: {value}",
         "start all nodes from the same code: image, git-sync or volume"),
    Rule("facts", "command", bool, _WARN, "", "the command line differs: {value}",
         "give all nodes the same command, unless it is meant to differ"),
    Rule("facts", "gpus", bool, _WARN, "", "the GPUs differ: {value}",
         "give all nodes the same GPUs, unless they are meant to differ"),
    Rule("facts", "nproc_per_node", bool, _WARN, FIX_JOB, "the number of workers differs: {value}",
         "give all nodes the same nproc_per_node"),
    Rule("facts", "python", bool, _WARN, FIX_IMAGE, "Python differs: {value}", _IMAGE),
    Rule("facts", "driver", bool, _WARN, "", "the GPU driver differs: {value}",
         "bring the machines to one driver version"),
    Rule("facts", "pair tests", bool, _WARN, "", "what can test pairs differs: {value}",
         "start all nodes with the same GPUs and the same torch"),
    Rule("facts", "kernel", bool, _WARN, "", "the kernel differs: {value}", "bring the machines to one kernel"),
    Rule("facts", "other", bool, _WARN, "", "{value}", "is it meant to differ? It is set by hand or by an image"),
    Rule("clock", "far off", bool, _NODE, DRAIN, "{value}", _TIME),
    Rule("clock", "off", bool, _WARN, "", "{value}", "check the time service of that machine (chrony, ntpd)"),
    Rule("mpi-hosts", "DNS", bool, _NODE, "", "no address found for {value}",
         "check that the pod and the job's headless Service exist"),
    Rule("mpi-hosts", "port", bool, _NODE, "", "cannot connect to sshd of {value}",
         "check that its sshd runs, its port, and NetworkPolicies"),
    Rule("mpi-hosts", "banner", bool, _NODE, "", "no sshd answers on {value}",
         "read that pod's log; check that the port is sshd's"),
    Rule("mpi-hosts", "session", bool, _NODE, "", "no command ends in time on {value}",
         "check that host's load and home directory, and its login shell's start-up files"),
    Rule("mpi-ssh", "host key", bool, _JOB, FIX_JOB, "another host key than the job's is shown by {value}",
         _IMPOSTOR),
    Rule("mpi-ssh", "key", bool, _JOB, FIX_JOB, "the job's key is refused by {value}", _SECRET),
    Rule("mpi-ssh", "shell", bool, _JOB, FIX_JOB, "no command runs on {value}",
         "check the login shell and its start-up files (.bashrc, .profile)"),
)
# fmt: on


def with_remedy(finding: Finding) -> Finding:
    """The finding with a remedy only if its cause is certain: only one about a single machine drains it.

    Platforms drain and replace machines by these words: a missing node, a link or a slow machine has none.
    """
    is_of_machine = finding.scope in (Scope.NODE, Scope.GPU, Scope.RAIL)
    return finding if is_of_machine or finding.remedy not in OF_MACHINES else replace(finding, remedy="")
