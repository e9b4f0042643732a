"""How far training processes are, by what each reports with `trainer_launch.report()`, else by what it prints.

Printed steps are lines such as `step 40`, else tqdm's bars, found in output as it passes by.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from trainer_launch.host import files
from trainer_launch.host.runtime_directory import PRINTED, PROGRESS, PROGRESS_END
from trainer_launch.host.slow_files import within
from trainer_launch.model import codec
from trainer_launch.model.codec import Count, Seconds
from trainer_launch.model.value_parsers import MAX_LINE
from trainer_launch.observability.goodput import Signs
from trainer_launch.observability.report import MAX_METRICS, MAX_NAME
from trainer_launch.supervisor.output import LINE_BYTES

_MAX_BYTES = 262_144
_MAX_FILES = 1024
_KEPT_EVERY_S = 2.0  # the printed step, for `status`
_TAKES_OVER = 20
_MANY = 4  # steps at each end of one block; of a flood what lies between is not looked at
MAX_TEXT = 2_000  # characters of a line that are handed on
_WORD = b"step"
# In small letters, and the word first: IGNORECASE or a \b before it would make the search three times slower.
_STEP = re.compile(rb"step(?<![0-9a-z_]step)[ =:]+([0-9]{1,12})(?![0-9])")
# tqdm's bar, also as Lightning has it: `Epoch 2:  40%|████      | 20/50 [00:02<00:03, 9.98it/s]`.
_BAR = re.compile(
    rb"^(?:\x1b\[[0-9;]*[A-Za-z])*(?P<tag>\[[^\]]{1,80}\] )?(?P<name>[^|%]{0,60}?)\s*[0-9]{1,3}%\|[^|]{0,400}\|"
    rb" *(?P<step>[0-9]{1,12})/(?P<total>[0-9]{1,12}) \["
)
_EPOCH = re.compile(rb"epoch *(?P<number>[0-9]{1,6})(?P<of>/[0-9]+)?:?", re.IGNORECASE)
_TRAINS = re.compile(rb"|.*\b(train|training|steps?|iterations?|iters?)\b.*", re.IGNORECASE)  # names of bars
_TAG = re.compile(rb"\[[^\]\n]{1,80}\] ")  # in front of a line: whose it is
_Metric: TypeAlias = Annotated[str, Meta(min_length=1, max_length=MAX_NAME)]


class Progress(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The latest report of a process."""

    rank: Count | None  # None: the process has no rank in a job
    local_rank: Count
    pid: Count
    at_s: Seconds  # this machine's monotonic clock
    time_s: Seconds  # since the epoch
    step: Count | None = None  # how many are done; older versions of `report()` say none
    progress: Annotated[float, Meta(ge=0, le=1)] | None  # 0.0 to 1.0
    eta_s: Seconds | None
    metrics: Annotated[Mapping[_Metric, float], Meta(max_length=MAX_METRICS)]
    not_finite: Mapping[_Metric, Literal["nan", "inf", "-inf"]] = field(
        default_factory=dict
    )  # JSON has no such numbers
    first_at_s: Seconds | None = None  # its first report, monotonic
    first_step: Count | None = None  # the first step that it told
    checkpoint_s: Seconds = 0.0  # in checkpoints so far
    checkpointing: bool = False  # now


def read(folder: str) -> tuple[Progress, ...]:
    """The latest reports of all processes of a run, lowest rank first; invalid files are skipped."""
    none: list[str] = []
    try:
        names = sorted(within(folder, none, os.listdir, folder))
    except OSError:
        return ()
    chosen = [name for name in names if name.startswith(PROGRESS) and name.endswith(PROGRESS_END)][:_MAX_FILES]
    reports = [parse(files.read(f"{folder}/{name}", _MAX_BYTES) or b"") for name in chosen]
    return tuple(sorted((report for report in reports if report is not None), key=_order))


def first(reports: Sequence[Progress]) -> Progress | None:
    """The report of the lowest rank, which represents the node."""
    return min(reports, key=_order, default=None)


def parse(text: bytes) -> Progress | None:
    """A report file's content; None when it is not one."""
    report = codec.decoded(Progress, text, _MAX_BYTES)
    if report is None:
        return None
    # Prometheus takes no lone surrogates.
    values = {**report.metrics, **{name: float(word) for name, word in report.not_finite.items()}}
    metrics = {name.encode(errors="replace").decode(): value for name, value in values.items()}
    return replace(report, metrics=metrics, not_finite={})


def _order(report: Progress) -> tuple[bool, int, int]:
    return report.rank is None, report.rank or 0, report.local_rank


class ScannedLine(Struct, frozen=True):
    """A line that tells a step, or that somebody waits for."""

    line: str
    step: int | None = None


class OutputScanner:
    """Of one stream of one process."""

    def __init__(self) -> None:
        self.rest = b""  # of a line whose end has not come
        self.speaker: bytes | None = None  # whose steps count: of a pod's workers the first that said one
        self.last = 0  # what that one said last
        self.others = 0  # steps of others since then
        self.bar: tuple[bytes, bytes] = b"", b""  # where nobody says steps: tag and name of the bar that counts,
        self.bar_total = 0  # and how many steps it has

    def scan(self, data: bytes, patterns: tuple[re.Pattern[str], ...] = ()) -> list[ScannedLine]:
        """The lines among these bytes that are worth telling."""
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut:
            self.rest = (self.rest + data)[-LINE_BYTES:]
            return []
        text, self.rest = self.rest + data[:cut], data[cut:][-LINE_BYTES:]
        scanned = [*self._steps(text)]
        if patterns:
            lines = (shown(line) for line in re.split(rb"[\r\n]+", text) if line)
            scanned += [ScannedLine(line) for line in lines if _is_wanted(line, patterns)]
        return scanned

    def _steps(self, text: bytes) -> Iterator[ScannedLine]:
        """The first step, each one that goes back, and the last one."""
        last = b""
        is_first = True
        for line, step in self._counted(text):
            before, self.last, last = self.last, step, line
            if is_first or step < before:
                yield ScannedLine(shown(line), step)
                is_first, last = False, b""
        if last:
            yield ScannedLine(shown(last), self.last)

    def _counted(self, text: bytes) -> Iterator[tuple[bytes, int]]:
        """Steps that count, with their lines."""
        for line, step in _step_lines(text):
            if self._counts(line):
                yield line, step
        if self.speaker is None and b"%|" in text:
            for line in re.split(rb"[\r\n]+", text):
                if (shown_step := self._step_of_bar(line)) is not None:
                    yield line, shown_step

    def _step_of_bar(self, line: bytes) -> int | None:
        """The step that a training bar shows, counted over its epochs; of several bars the longest counts."""
        bar = _BAR.match(line)
        if bar is None:
            return None
        name = bar["name"].strip(b" :")
        epoch = _EPOCH.fullmatch(name)
        if epoch is None and _TRAINS.fullmatch(name) is None:
            return None
        bar_name, total = (bar["tag"] or b"", b"epoch" if epoch else name), int(bar["total"])
        if total > self.bar_total:
            self.bar, self.bar_total = bar_name, total
        if (bar_name, total) != (self.bar, self.bar_total):
            return None
        before = 0 if epoch is None else max(0, int(epoch["number"]) - bool(epoch["of"]))
        return before * total + int(bar["step"])

    def _counts(self, line: bytes) -> bool:
        """Whether the speaker says it, or somebody who seems to have taken over."""
        tag = _TAG.match(line)
        speaker = tag[0] if tag else b""
        if self.speaker is None or self.others >= _TAKES_OVER:
            self.speaker, self.last = speaker, 0
        if speaker != self.speaker:
            self.others += 1
            return False
        self.others = 0
        return True


def _step_lines(text: bytes) -> list[tuple[bytes, int]]:
    """Lines that name a step, with it; of a flood the first and the last ones: nobody begins anew in between.

    What lies between is not looked at: a block of 32 KiB must not hold up the output.
    """
    low = text.lower()
    match = _STEP.search(low)
    if match is None:
        return []
    low = low.replace(b"\r", b"\n")
    first: list[tuple[bytes, int]] = []
    begin = 0
    while match is not None and len(first) < _MANY:
        first.append((_line_at(text, low, match.start()), int(match[1])))
        begin = match.end()
        match = _STEP.search(low, begin)
    last: list[tuple[bytes, int]] = []
    end = len(low) if match is not None else begin
    while len(last) < _MANY and (end := low.rfind(_WORD, begin, end)) >= 0:
        if match := _STEP.match(low, end):
            last.append((_line_at(text, low, end), int(match[1])))
    return first + last[::-1]


def _line_at(text: bytes, low: bytes, at: int) -> bytes:
    start, end = low.rfind(b"\n", 0, at) + 1, low.find(b"\n", at)
    return text[start : end if end >= 0 else len(text)]


def _is_wanted(line: str, patterns: tuple[re.Pattern[str], ...]) -> bool:
    return any(pattern.search(line[:MAX_LINE]) for pattern in patterns)


def shown(line: bytes) -> str:
    """As text, without what is too long."""
    return line[: 4 * MAX_TEXT].decode(errors="replace")[:MAX_TEXT]


class PrintedStep(Struct, frozen=True, kw_only=True):
    """The step that a node's workers have printed last."""

    step: Count
    at_s: Seconds  # this machine's monotonic clock


def printed(folder: str) -> PrintedStep | None:
    """The printed step that the launcher of a run has kept for `status`; None: none."""
    return codec.decoded(PrintedStep, files.read(f"{folder}/{PRINTED}", _MAX_BYTES))


class PrintedSteps:
    """The steps that the present workers have printed; `heard` runs in the output's thread."""

    def __init__(self, folder: str) -> None:
        self._lock = threading.Lock()
        self._folder = folder
        self._kept_s = -_KEPT_EVERY_S
        self.begin()

    def begin(self) -> None:
        """New workers are about to be started."""
        with self._lock:
            self._scanners: dict[tuple[str, int], OutputScanner] = {}
            self._signs: Signs | None = None

    def heard(self, process: str, stream: int, data: bytes) -> None:
        """A block of a process's output."""
        with self._lock:
            scanner = self._scanners.setdefault((process, stream), OutputScanner())
            steps = [line.step for line in scanner.scan(data) if line.step is not None]
            if steps:
                self._note(steps[-1], time.monotonic())

    def signs(self) -> Signs | None:
        """The signs of these steps; None: no step yet."""
        with self._lock:
            self._keep(time.monotonic())  # the last step before a silence, too
            return self._signs

    def _note(self, step: int, now_s: float) -> None:
        first = self._signs
        first_s, first_step = (now_s, step) if first is None else (first.first_s, first.first_step)
        self._signs = Signs(first_s=first_s, last_s=now_s, first_step=first_step, step=step)
        self._keep(now_s)

    def _keep(self, now_s: float) -> None:
        if self._signs is None or self._signs.step is None or self._signs.last_s <= self._kept_s:
            return
        if now_s - self._kept_s >= _KEPT_EVERY_S:
            self._kept_s = now_s
            content = codec.encode(PrintedStep(step=self._signs.step, at_s=self._signs.last_s), _MAX_BYTES)
            with contextlib.suppress(OSError):
                within(self._folder, None, files.replace, f"{self._folder}/{PRINTED}", content)
