"""What is wrong with a GPU: a table of rules, each about one fact of a card; and what they come to. Pure.

One finding tells of all GPUs of a node, with the bad ones named. What a card does not tell is unknown, by
`findings_of` alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model.findings import Fault, Finding, Scope, Value
from trainer_launch.model.units import grouped, in_units
from trainer_launch.preflight.check import Check, Subject
from trainer_launch.preflight.gpu.collect import MOST_HELD_BYTES
from trainer_launch.preflight.gpu.facts import LOAD, Fact, FactState, Gpu, numbered

DRAIN = "drain this node, and have the card reset, tested or replaced"
_RESET = "have the GPU reset before it is used: a bad row of its memory is still in use"
_CARDS_WITH_BRIDGES = ("PCIe", "NVL")  # in models' names: they have links, and not all of them need lead anywhere
_LINKS_DOWN = "has {value[0]} of {value[1]} NVLinks up (down: {gpu.down_links})"
_XIDS_SEEN = "had XID {value} during our tests"
_WITHOUT = {
    "lost": Fact(FactState.UNSUPPORTED),
    "margin": Fact(FactState.UNKNOWN, "neither margin nor threshold is told"),
}
_NEAR_C = 5
_MANY_REPLAYS = 80
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
POWER_CAP = 0x04
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


class Rule(Struct, frozen=True, kw_only=True):
    """What is wrong with a GPU of which a fact is known and bad.

    Without `bad`, a fact is bad that is above `expected`, that is below it in a pair, or that is true. Text and
    action are formatted with the fact's `value`, as `words` has it, and the `gpu`.
    """

    fact: str
    text: str  # what the GPU has, does or needs
    bad: Callable[[Any], object] | None = None
    is_pair: bool = False  # the fact is a number and what is expected of it
    expected: float | None = None
    words: Callable[[Any], Any] = lambda value: value
    measured: Callable[[Any], Value] = lambda value: value
    unit: str = ""
    fault: Fault | None = Fault.NODE  # None: a warning
    action: str = DRAIN

    def finding(self, check: Check[Subject], gpu: Gpu) -> Finding | None:
        """What is wrong with this GPU; None: nothing, or it is not known."""
        fact = gpu.fact(self.fact)
        if not fact.is_known or not self._is_bad(fact.value):
            return None
        text, action = (form.format(value=self.words(fact.value), gpu=gpu) for form in (self.text, self.action))
        measured, expected = fact.value if self.is_pair else (self.measured(fact.value), self.expected)
        more = {"measured": measured, "expected": expected, "unit": self.unit, "action": action}
        return of_gpu(check, self.fault, gpu.index, text, **more)

    def _is_bad(self, value: Any) -> object:
        if self.bad is not None:
            return self.bad(value)
        if self.is_pair:
            return value[0] < value[1]
        return value if self.expected is None else value > self.expected


def _recovery(number: int) -> str:
    return _RECOVERY.get(number, f"recovery action {number}")


def _is_slower(pair: Sequence[int]) -> bool:
    return 0 < pair[0] < pair[1]


def _slowing(slowed: Mapping[str, Any]) -> list[int]:
    return [bit for bit in _SLOWED_BY if slowed["times"].get(str(bit))]


def _slowed(slowed: Mapping[str, Any]) -> tuple[str, int, int]:
    """By what, in how many looks, and of how many."""
    bits = _slowing(slowed)
    times = max(slowed["times"][str(bit)] for bit in bits)
    return " and ".join(_SLOWED_BY[bit] for bit in bits), times, slowed["looks"]


def _serious(xids: Iterable[int]) -> set[int]:
    return set(xids) - _MILD


def _xids(xids: Iterable[int]) -> str:
    return ", ".join(f"{xid} ({XID_WORDS[xid]})" if xid in XID_WORDS else str(xid) for xid in sorted(set(xids)))


def _logged(log: Mapping[int, int]) -> str:
    return ", ".join(f"{_xids([xid])} {ago_s / 60:.0f} min ago" for xid, ago_s in log.items())


# The first rule of a check that fits speaks.
RULES: Mapping[str, Sequence[Rule]] = {
    "gpu-recovery": (
        Rule(fact="lost", text="does not answer: {value}"),
        Rule(
            fact="recovery",
            expected=0,
            words=_recovery,
            text="needs {value}, says the driver ({gpu.uuid})",
            action="drain this node: it needs {value}",
        ),
    ),
    "gpu-ecc": (
        Rule(
            fact="ecc_uncorrected",
            expected=0,
            text="had {value} uncorrected memory errors since the driver was loaded ({gpu.uuid})",
            unit="errors",
            action="have the GPU reset before it is used; if the errors come back, have the card replaced",
        ),
    ),
    "gpu-remap": (
        Rule(
            fact="remapped",
            bad=lambda rows: rows[3],
            text="has a bad row of memory and no spare one for it: remapping failed ({gpu.uuid})",
            measured=lambda rows: "failed",
            action="drain this node for good: replace the card",
        ),
        Rule(
            fact="remapped",
            bad=lambda rows: rows[2],
            text="has a bad row of memory whose remapping waits for a reset ({value[1]} so far, {gpu.uuid})",
            measured=lambda rows: "pending",
            action=_RESET,
        ),
        Rule(
            fact="retired_pending",
            text="has a bad page of memory whose retirement waits for a reset ({gpu.uuid})",
            measured=lambda pages: "pending",
            action=_RESET,
        ),
    ),
    "gpu-memory": (
        Rule(
            fact="memory_used",
            expected=MOST_HELD_BYTES,
            words=in_units,
            text="has {value} of its {gpu.memory} in use before the job starts",
            unit="bytes",
            action="see on that machine who holds it (nvidia-smi): a process that was left behind, or another pod",
        ),
    ),
    "gpu-clocks": (
        Rule(
            fact=f"{LOAD}clock_reasons",
            bad=_slowing,
            words=_slowed,
            text="is slowed down under load by {value[0]}, in {value[1]} of {value[2]} looks",
            measured=lambda slowed: " ".join(f"{bit:#x}" for bit in _slowing(slowed)),
            action="drain this node: see the cooling and the power supply of that machine",
        ),
    ),
    "gpu-temperature": (
        Rule(
            fact="margin",
            bad=lambda margin: margin < _NEAR_C,
            text="is {value:g} \u00b0C {gpu.when} from the temperature at which it slows down",
            expected=_NEAR_C,
            unit="\u00b0C",
            fault=None,
            action="see the cooling of that machine",
        ),
    ),
    "gpu-pcie": (
        Rule(
            fact=f"{LOAD}pcie_lanes",
            is_pair=True,
            bad=_is_slower,
            text="has {value[0]} of {value[1]} PCIe lanes under load",
            unit="lanes",
            action="drain this node: have the card, its slot and its riser seen to",
        ),
        Rule(
            fact=f"{LOAD}pcie_generation",
            is_pair=True,
            bad=_is_slower,
            text="is at PCIe generation {value[0]} under load, and could be at {value[1]}",
            fault=None,
            action="see the BIOS of that machine, and the card's slot",
        ),
        Rule(
            fact=f"{LOAD}pcie_replays",
            expected=_MANY_REPLAYS,
            text="had to send {value} PCIe packets again during our tests",
            unit="replays",
            fault=None,
        ),
    ),
    "gpu-nvlink": (
        Rule(
            fact="no links",
            text="has NVLinks, and none is up",
            measured=lambda is_so: 0,
            fault=None,
            action="see the fabric manager of that machine; without NVLink GPUs talk over PCIe, many times slower",
        ),
        Rule(fact="links", is_pair=True, text=_LINKS_DOWN, unit="links"),
        Rule(fact="bridges", is_pair=True, text=_LINKS_DOWN, unit="links", fault=None),
        Rule(
            fact="link speed",
            is_pair=True,
            words=lambda pair: [mbps / 1000 for mbps in pair],
            text="has an NVLink at {value[0]:g} GB/s, others are at {value[1]:g}",
            unit="MB/s",
        ),
        Rule(fact="fabric_error", text="could not join its NVLink fabric (error {value})"),
        Rule(
            fact=f"{LOAD}nvlink_errors",
            expected=0,
            text="had {value} errors on its NVLinks during our tests",
            unit="errors",
            fault=None,
        ),
    ),
    "gpu-xid": (
        Rule(
            fact=f"{LOAD}xids",
            bad=_serious,
            words=_xids,
            text=_XIDS_SEEN,
            measured=lambda xids: min(_serious(xids)),
            unit="XID",
        ),
        Rule(fact=f"{LOAD}xids", words=_xids, text=_XIDS_SEEN, measured=min, unit="XID", fault=None),
        Rule(  # the card may have been reset since
            fact="logged xids",
            words=_logged,
            text="had XID {value}, by the kernel's log",
            measured=min,
            unit="XID",
            fault=None,
        ),
    ),
}


def judged(
    check: Check[Subject], subject: Subject, facts: Sequence[str], good: Callable[[Sequence[Gpu]], str]
) -> Iterator[Finding]:
    """What the rules of a check find of this node's GPUs; a lost GPU has no other fault.

    Of each GPU the first of `facts` that this kind of card has must be known.
    """
    gpus = [gpu for gpu in with_derived(subject) if not gpu.lost or "lost" in facts]
    asked = {gpu.index: _first(gpu, facts) for gpu in gpus if gpu.is_watched or not facts[0].startswith(LOAD)}
    findings = ((rule.finding(check, gpu) for rule in RULES[check.id]) for gpu in gpus)
    bad = [finding for its in findings if (finding := next(filter(None, its), None)) is not None]
    yield from findings_of(check, asked, bad, good(gpus) if gpus else "")


def _first(gpu: Gpu, names: Sequence[str]) -> Fact:
    facts = [gpu.fact(name) for name in names]
    return next((fact for fact in facts if fact.state is not FactState.UNSUPPORTED), facts[-1])


def of_gpu(check: Check[Subject], fault: Fault | None, gpu: int, text: str, **more: Any) -> Finding:
    """What is wrong with one GPU."""
    return check.bad(fault, f"GPU {gpu} {text}", scope=Scope.GPU, subject=f"GPU {gpu}", **{"action": DRAIN, **more})


def findings_of(
    check: Check[Subject], asked: Mapping[int, Fact], bad: Iterable[Finding], good: str
) -> Iterator[Finding]:
    """A finding for the GPUs with faults of each kind, one for those that are unknown, or one for all.

    `asked` has the fact of each GPU that decides whether anything is known of it.
    """
    kinds = grouped((finding.fault, finding) for finding in bad)
    for fault in sorted(kinds, key=lambda fault: fault is None):
        its = kinds[fault]
        subject, text = ", ".join(finding.subject for finding in its), "; ".join(finding.text for finding in its)
        yield replace(its[0], subject=subject, text=text)
    unknown = [index for index, fact in asked.items() if fact.state is FactState.UNKNOWN]
    answered = [index for index, fact in asked.items() if fact.is_known]
    if unknown:
        yield check.unknown(f"not known of {numbered(unknown)}: {asked[unknown[0]].value}", scope=Scope.GPU)
    elif asked and not answered:
        yield check.skipped(f"{numbered([*asked])}: this kind of card has no such thing", scope=Scope.GPU)
    if answered and not kinds:
        yield check.passed(f"{numbered(answered)}: {good}", scope=Scope.GPU)


def with_derived(subject: Subject) -> list[Gpu]:
    """This node's GPUs, with facts that are made of others."""
    if subject.cards is None:
        return []
    report = subject.cards.facts()
    log = report.log.value if report.log.is_known else ()
    links = _links([gpu for gpu in report.gpus if gpu.fact("nvlinks").is_known and not gpu.lost])
    made = []
    for gpu in report.gpus:
        place = str(gpu.value("pci", "?"))
        logged = {xid: ago_s for at, xid, ago_s in log if place.startswith(at) and xid not in _MILD}
        values = {**links.get(gpu.index, {}), "lost": gpu.lost or None, "margin": gpu.margin, "logged xids": logged}
        facts = {name: Fact(FactState.KNOWN, value) for name, value in values.items() if value is not None}
        made.append(replace(gpu, facts={**_WITHOUT, **gpu.facts, **facts}))
    return made


def _links(gpus: Sequence[Gpu]) -> dict[int, dict[str, Any]]:
    """Each GPU's links beside what they should be: all it has, or as many as on the others; as fast as theirs."""
    most = max((sum(gpu.value("nvlinks")) for gpu in gpus), default=0)
    fastest = max((gpu.value("nvlink_mbps", 0) for gpu in gpus), default=0)
    bridged = {gpu.index for gpu in gpus if any(word in gpu.model for word in _CARDS_WITH_BRIDGES)}
    facts = {}
    for gpu in gpus:
        links = gpu.value("nvlinks")
        wanted = most if gpu.index in bridged or not any(links) else len(links)
        facts[gpu.index] = {
            "no links": not most and not bridged,
            "bridges" if gpu.index in bridged else "links": (sum(links), wanted),
            "link speed": (gpu.value("nvlink_mbps", fastest), fastest),
        }
    return facts
