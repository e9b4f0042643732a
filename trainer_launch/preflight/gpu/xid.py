"""The driver told no error (XID) of a GPU while it was tested."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Finding, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.facts import Watched
from trainer_launch.preflight.gpu.findings_of_gpus import Trouble

NAME = "gpu-xid"
NEEDS_LOAD = True
# As NVIDIA's catalogue has them; those that no fault of the card need have caused only warn.
_WORDS = {
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


def limit_s(subject: Subject) -> float:
    """As gpu-load's."""
    return findings_of_gpus.load_limit_s(subject)


def check(subject: Subject) -> Iterator[Finding]:
    """What came while we watched; and of the last two hours, where the container may read the kernel's log."""
    found = findings_of_gpus.watched(subject)
    asked = [(one.index, one.xids) for one in found]
    judged = [*map(_trouble, found), *_logged(subject)]
    yield from findings_of_gpus.summed(NAME, asked, judged, "no XID error during our tests")


def _logged(subject: Subject) -> Iterator[Trouble]:
    """Only warns: the card may have been reset since. What programs cause themselves is not told."""
    told = subject.cards.facts().log.value if subject.cards is not None else None
    for gpu in findings_of_gpus.gpus(subject):
        place = str(gpu.value("pci", "?"))
        xids = {xid: ago_s for at, xid, ago_s in told or () if place.startswith(at) and xid not in _MILD}
        if xids:
            words = ", ".join(f"{_worded(xid)} {ago_s / 60:.0f} min ago" for xid, ago_s in xids.items())
            text = f"had XID {words}, by the kernel's log"
            yield Trouble(gpu=gpu.index, text=text, status=Status.WARN, measured=min(xids), unit="XID")


def _worded(xid: int) -> str:
    return f"{xid} ({_WORDS[xid]})" if xid in _WORDS else str(xid)


def _trouble(one: Watched) -> Trouble | None:
    xids = one.xids.value if one.xids.is_known else ()
    if not xids:
        return None
    told = ", ".join(map(_worded, sorted(set(xids))))
    return Trouble(
        gpu=one.index,
        text=f"had XID {told} during our tests",
        status=Status.WARN if _MILD.issuperset(xids) else Status.FAIL,
        measured=min(set(xids) - _MILD or set(xids)),
        unit="XID",
    )
