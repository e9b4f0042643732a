"""`report()`: what a training script says of its progress; `stopping()`: whether its job was asked to stop.

Without a launcher `report()` does nothing, and `stopping()` does the same as with one. An eviction asks one pod to
stop; its launcher tells the others, whose workers are asked to stop as well. Each rank hears of it at another
moment, so that ranks agree before they save one common checkpoint.

Each process writes one small JSON file into its run's private folder, whole or not at all, at most once a second.
What is held back is written by a later call or at exit. A call that is held back reads the clock and nothing else.
Nothing heavy is imported here: this runs in any training script.
"""

from __future__ import annotations

import atexit
import json
import math
import numbers
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from trainer_launch.host import files, runtime_directory

EVERY_S = 1.0
MAX_METRICS = 256  # this and the next as in Kubeflow's TrainJob status
MAX_NAME = 64
MAX_STEP = 10**12
MAX_ETA_S = 1e9  # 31 years: what a first, slow step makes of the rest is written as this
_PERCENT = 2.0  # whoever counts from 0 to 100 is told at 2; a little over 1 is an estimate that was short
_LARGEST = 2**63
# torch elastic, Open MPI, PMIx, MPICH; the first that is a number counts.
_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_LOCAL_RANKS = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")


def report(
    *,
    step: int | None = None,
    progress: float | None = None,
    eta_s: float | None = None,
    metrics: Mapping[str, float] | None = None,
    checkpointing: bool | None = None,
) -> None:
    """Say how far this process is; call it as often as you like, on any rank, from any thread.

    What is not given stays as it was said before; `metrics` replaces all earlier ones. People and Kubeflow see
    rank 0's. Nothing that happens to the disk or the launcher ever raises here.

    Args:
        step: how many steps are done, a whole number from 0; it counts on after a resume.
        progress: the part that is done, from 0.0 to 1.0 (not percent).
        eta_s: seconds left, as estimated; below 0 counts as 0, more than 1e9 as 1e9.
        metrics: a mapping of names (1 to 64 characters) to numbers; at most 256 entries.
        checkpointing: True before a checkpoint is saved, False after it; what is between is no training time.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.
    """
    if step is not None:
        step = _whole(step)
    if progress is not None:
        progress = _number(progress, "progress")
        if not 0 <= progress < _PERCENT:
            raise ValueError(f"progress is {progress:g}; expected a fraction from 0.0 to 1.0")
        progress = min(progress, 1.0)
    if eta_s is not None:
        eta_s = _number(eta_s, "eta_s")
        eta_s = min(max(eta_s, 0.0), MAX_ETA_S) if math.isfinite(eta_s) else None
    if checkpointing is not None and not isinstance(checkpointing, bool):
        raise TypeError(f"checkpointing is a {type(checkpointing).__name__}; expected True or False")
    checked = None if metrics is None else _checked(metrics)
    _reporter.note({"step": step, "progress": progress, "eta_s": eta_s, "metrics": checked}, checkpointing)


def _checked(metrics: Mapping[str, float]) -> dict[str, float]:
    """A copy, so that the caller may change its own."""
    if not isinstance(metrics, Mapping):
        raise TypeError(
            f"metrics is a {type(metrics).__name__}; expected names mapped to numbers, such as {{'loss': 0.5}}"
        )
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"metrics has {len(metrics)} entries; expected at most {MAX_METRICS}")
    checked = {}
    for name, value in metrics.items():
        if type(name) is not str:
            raise TypeError(f"a metric's name is {name!r}; expected a string")
        if not 0 < len(name) <= MAX_NAME:
            raise ValueError(f"a metric's name is {name[:80]!r}; expected 1 to {MAX_NAME} characters")
        checked[name] = value if type(value) is float else _number(value, name)
    return checked


def _whole(value: object) -> int:
    if not isinstance(value, numbers.Integral) or isinstance(value, bool):
        raise TypeError(f"step is a {type(value).__name__}; expected a whole number{_advice(value)}")
    whole = int(value)
    if not 0 <= whole < MAX_STEP:
        text = whole if abs(whole) < _LARGEST else "far too large"
        raise ValueError(f"step is {text}; expected a whole number from 0 to {MAX_STEP - 1}")
    return whole


def _number(value: object, name: str) -> float:
    """A number of Python's or numpy's as a float."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{name} is a {type(value).__name__}; expected a number{_advice(value)}")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf  # type: ignore[operator]


def _advice(value: object) -> str:
    return "; for a tensor, pass .item()" if hasattr(value, "item") else ""


class _Reporter:
    """The latest report of this process, and when it may be written next."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may report while this thread does
        self._path: str | None = None
        self._is_set_up = False
        self._is_held_back = False
        self._is_writing = False
        self._due_s = 0.0
        self._at_s = 0.0
        self._values: dict[str, Any] = {"step": None, "progress": None, "eta_s": None, "metrics": {}}
        self._first_at_s: float | None = None
        self._first_step: int | None = None
        self._checkpoint_s = 0.0
        self._saves_since_s: float | None = None

    def note(self, values: Mapping[str, Any], checkpointing: bool | None) -> None:
        """Take in what the script reports; write it when it is time, and at once when all is done."""
        with self._lock:
            if not self._is_set_up:
                self._set_up()
            if self._path is None:
                return
            self._at_s = time.monotonic()
            if self._first_at_s is None:
                self._first_at_s = self._at_s
            ends = values["progress"] == 1.0 and self._values["progress"] != 1.0
            turns = checkpointing is not None and self._save(checkpointing)
            for name, value in values.items():
                if value is not None:
                    self._values[name] = value
            self._first_step = self._values["step"] if self._first_step is None else self._first_step
            self._is_held_back = True
            if self._at_s >= self._due_s or ends or turns:
                self._write()

    def flush(self) -> None:
        """Write what is held back."""
        with self._lock:
            if self._is_held_back:
                self._write()

    def begin_again(self) -> None:
        """Go on in another generation, where this process may have another rank."""
        with self._lock:
            if self._saves_since_s is not None:  # the loss has ended that checkpoint
                self._saves_since_s, self._is_held_back = None, True
            self.flush()
            self._is_set_up, self._first_at_s, self._first_step = False, None, None
            self._checkpoint_s = 0.0

    def _save(self, checkpointing: bool) -> bool:
        """A checkpoint begins or ends; whether that is new."""
        if checkpointing is (self._saves_since_s is not None):
            return False
        if self._saves_since_s is not None:
            self._checkpoint_s += self._at_s - self._saves_since_s
        self._saves_since_s = self._at_s if checkpointing else None
        return True

    def _set_up(self) -> None:
        """Learn once who this process is: after a fork it may be somebody else."""
        self._is_set_up = True
        folder = os.environ.get(runtime_directory.VARIABLE)
        if folder:
            self._rank, local_rank = _first(_RANKS), _first(_LOCAL_RANKS)
            self._local_rank = local_rank if local_rank is not None else 0
            self._path = runtime_directory.progress_file(folder, self._local_rank)

    def _write(self) -> None:
        if self._is_writing or self._path is None:
            return
        self._is_writing = True
        try:
            files.replace(self._path, json.dumps(self._content()).encode())
            self._is_held_back = False
        except OSError:
            pass  # the folder is gone or full; training is not concerned
        finally:
            self._due_s = self._at_s + EVERY_S
            self._is_writing = False

    def _content(self) -> dict[str, object]:
        metrics = self._values["metrics"]
        return {
            "rank": self._rank,
            "local_rank": self._local_rank,
            "pid": os.getpid(),
            "at_s": self._at_s,
            "time_s": time.time() - (time.monotonic() - self._at_s),
            **self._values,
            "metrics": {name: value for name, value in metrics.items() if math.isfinite(value)},
            "not_finite": {name: str(value) for name, value in metrics.items() if not math.isfinite(value)},
            "first_at_s": self._first_at_s,
            "first_step": self._first_step,
            "checkpoint_s": self._checkpoint_s,
            "checkpointing": self._saves_since_s is not None,
        }


def _first(names: tuple[str, ...]) -> int | None:
    for name in names:
        text = os.environ.get(name, "")
        if text.isascii() and text.isdigit() and len(text) < 10:
            return int(text)
    return None


def _start_anew() -> None:
    """A forked process has its own rank and its own lock, and nothing held back."""
    global _reporter  # noqa: PLW0603
    _reporter = _Reporter()


def begin_again() -> None:
    """For `generations()`: this process enters another generation."""
    _reporter.begin_again()


def stopping() -> bool:
    """Whether any rank was asked to stop by SIGTERM: the same answer on all ranks of the default process group.

    Call it after each step, on all ranks or on none: with a process group it is an all-reduce of one number. The
    first call takes SIGTERM, which then ends nothing by itself; a handler that there is already is called as well.
    Where it is True, save and leave with 0: the job goes on from there once its pod is back.

    Raises:
        ValueError: the first call is not the main thread's.
    """
    global _takes_sigterm, _handler_before  # noqa: PLW0603
    if not _takes_sigterm:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("the first call of stopping() is another thread's; call it in the main thread first")
        _handler_before = signal.signal(signal.SIGTERM, _note_request)
        _takes_sigterm = True
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if torch is None or distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return _is_stopping
    answer = torch.tensor(int(_is_stopping), dtype=torch.int32, device=_device(torch, distributed.get_backend()))
    distributed.all_reduce(answer, op=distributed.ReduceOp.MAX)
    return bool(answer.item())


def _device(torch: Any, backend: str) -> str:
    """Where the default group can reduce a number."""
    if "gloo" in backend or "mpi" in backend:
        return "cpu"
    return "xpu" if "xccl" in backend else "cuda" if torch.cuda.is_available() else "cpu"


def _note_request(number: int, frame: FrameType | None) -> None:
    global _is_stopping  # noqa: PLW0603
    _is_stopping = True
    if callable(_handler_before):
        _handler_before(number, frame)


_handler_before: Callable[[int, FrameType | None], Any] | int | None = None
_takes_sigterm = False
_is_stopping = False
_reporter = _Reporter()
atexit.register(lambda: _reporter.flush())
os.register_at_fork(after_in_child=_start_anew)
