"""References and thresholds of GPUs and of pairs of nodes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct, field

from trainer_launch.host import files
from trainer_launch.model import codec
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import Measure
from trainer_launch.model.units import grouped

FORMAT, VERSION = "trainer-launch-references", 1  # the package's own table
REPORT, REPORT_VERSION = "trainer-launch-preflight", 2  # that of a job; the version rises with each new key
_FAILED = ("retryable", "fatal")  # verdicts
BUILT_IN = Path(__file__).parent / "references.json"
MAX_BYTES = 1 << 20
_MAX_COMPLAINT = 200
MBYTE = 1_000_000
FLOOR = 10 * MBYTE  # bytes per second, for anything: a tenth of the slowest network that is still sold


_Text = Annotated[str, Meta(min_length=1, max_length=500)]


class Reference(Struct, frozen=True, forbid_unknown_fields=True):
    """The value that a measure should have on a model of GPU, and the source."""

    model: _Text
    measure: _Text
    value: Annotated[float, Meta(gt=0)]
    unit: _Text
    source: _Text


class _ReferenceFile(Struct, frozen=True):
    format: str
    version: int
    verdict: str = ""
    references: tuple[Reference, ...] = ()  # of a table
    measured: tuple[Reference, ...] = ()  # of a report


class Table(Struct, frozen=True):
    """All references of a file."""

    rows: Mapping[tuple[str, str], Reference] = field(default_factory=dict)

    def of(self, measure: Measure) -> Reference | None:
        """The reference of this measure; None where there is none, or in another unit."""
        row = self.rows.get((measure.model.lower(), measure.name.removesuffix("-burn")))  # products' are sustained
        return row if row is not None and row.unit == measure.unit else None

    def has(self, model: str) -> bool:
        """Whether there is any reference of a model."""
        return any(row.model.lower() == model.lower() for row in self.rows.values())


def table(rows: Iterable[Reference]) -> Table:
    """Rows as a table; the last of those that speak of the same counts."""
    return Table({(row.model.lower(), row.measure): row for row in rows})


def load_table(path: str | None) -> Table:
    """The table in a file; without one, the package's own.

    Raises:
        UsageError: it cannot be read, or is no such table.
    """
    if path is None:
        return parse_table(BUILT_IN.read_bytes(), str(BUILT_IN))
    return parse_table(files.named(path, f"--reference {path}", MAX_BYTES), f"--reference {path}")


def parse_table(data: bytes, name: str) -> Table:
    """A table from the JSON of a report or of a table; `name` says where it comes from.

    Raises:
        UsageError: it is none; the sentence says where.
    """
    advice = "write one with --report FILE.json in a healthy job"
    try:
        document = codec.decoder(_ReferenceFile).decode(data)
    except (ValueError, RecursionError) as problem:
        what = f"{name} is neither a report of preflight nor a table of references"
        raise UsageError(f"{what} ({ascii(str(problem)[:_MAX_COMPLAINT])[1:-1]}); {advice}") from None
    rows = {(FORMAT, VERSION): document.references, (REPORT, REPORT_VERSION): document.measured}.get(
        (document.format, document.version)
    )
    if rows is None:
        raise UsageError(f"{name} is neither a report of preflight nor a table of references; {advice}")
    if document.verdict in _FAILED:
        raise UsageError(f"{name} is the report of a job whose preflight failed; {advice}")
    if not rows:
        raise UsageError(f"{name} has no measurements of GPUs; {advice}, with GPUs, on node 0")
    return table(rows)


def measured(measures: Sequence[Measure], day: str) -> tuple[Reference, ...]:
    """The measures of a job as references: medians by model and measure; `day` is its date."""
    of_models = (measure for measure in measures if measure.model and measure.value > 0)
    groups = grouped(((measure.model, measure.name, measure.unit), measure.value) for measure in of_models)
    source = "median of {} by trainer-launch preflight, {}"
    return tuple(
        Reference(model, name, float(f"{statistics.median(its):.5g}"), unit, source.format(len(its), day))
        for (model, name, unit), its in sorted(groups.items())
    )


class SpeedKind(Struct, frozen=True):
    """Measures that are judged alike, and by what name."""

    name: str  # the check's
    title: str
    measures: tuple[str, ...]  # what their names begin with
    share: float  # of the reference
    peers: float  # of the peers' median
    action: str


# fmt: off
KINDS = (
    SpeedKind("gemm", "No GPU multiplies matrices slowly.", ("gemm",), 0.85, 0.93,
              "see that card's clocks, power limit and temperature (nvidia-smi -q), or drain it"),
    SpeedKind("hbm", "No GPU copies slowly within its own memory.", ("hbm",), 0.90, 0.93,
              "see that card's memory: ECC errors and remapped rows (nvidia-smi -q -d ECC), or drain it"),
    SpeedKind("pcie", "No GPU copies slowly from and to the host.", ("h2d", "d2h"), 0.85, 0.90,
              "see that card's PCIe link under load, and whether the pod's CPUs are near to it, or drain it"),
    SpeedKind("allreduce", "An all-reduce of each node's GPUs is as fast as their links allow.", ("allreduce",),
              0.75, 0.90, "see that node's NVLinks and fabric manager (nvidia-smi nvlink -s), or drain it"),
)
# fmt: on


def kind_of(name: str) -> SpeedKind | None:
    """How a measure of this name is judged; None: it is not."""
    return next((kind for kind in KINDS if name.startswith(kind.measures)), None)
