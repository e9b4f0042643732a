"""`stopping()`: whether this job was asked to stop, for a training script that polls, also without a launcher.

An eviction asks one pod to stop; its launcher tells the others, whose workers are asked to stop as well. Each rank
hears of it at another moment, so that ranks agree before they save one common checkpoint.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_before: Callable[[int, FrameType | None], Any] | int | None = None
_is_heard = False
_is_asked = False


def stopping() -> bool:
    """Whether any rank was asked to stop by SIGTERM: the same answer on all ranks of the default process group.

    Call it after each step, on all ranks or on none: with a process group it is an all-reduce of one number. The
    first call takes SIGTERM, which then ends nothing by itself; a handler that there is already is called as well.
    Where it is True, save and leave with 0: the job goes on from there once its pod is back.

    Raises:
        ValueError: the first call is not the main thread's.
    """
    global _is_heard, _before  # noqa: PLW0603
    if not _is_heard:
        if threading.current_thread() is not threading.main_thread():
            raise ValueError("the first call of stopping() is another thread's; call it in the main thread first")
        _before = signal.signal(signal.SIGTERM, _note)
        _is_heard = True
    torch = sys.modules.get("torch")
    distributed = getattr(torch, "distributed", None)
    if torch is None or distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return _is_asked
    answer = torch.tensor(int(_is_asked), dtype=torch.int32, device=_device(torch, distributed.get_backend()))
    distributed.all_reduce(answer, op=distributed.ReduceOp.MAX)
    return bool(answer.item())


def _device(torch: Any, backend: str) -> str:
    """Where the default group can reduce a number."""
    if "gloo" in backend or "mpi" in backend:
        return "cpu"
    return "xpu" if "xccl" in backend else "cuda" if torch.cuda.is_available() else "cpu"


def _note(number: int, frame: FrameType | None) -> None:
    global _is_asked  # noqa: PLW0603
    _is_asked = True
    if callable(_before):
        _before(number, frame)
