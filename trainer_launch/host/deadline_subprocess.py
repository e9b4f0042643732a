"""One command with an end: it and all that it has started end at its limit."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_OUTPUT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Told:
    """How a program ended."""

    code: int | None  # as the shell has it; None: it was given up for its time
    out: str
    err: str
    took_s: float


def run(argv: Sequence[str], env: Mapping[str, str], limit_s: float) -> Told:
    """Run one command to its end, or to its limit in seconds. Blocks."""
    began_s = time.monotonic()
    try:
        child = subprocess.Popen(
            argv,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except OSError as problem:
        return Told(127, "", f"{argv[0]}: {problem.strerror}", 0.0)
    code: int | None
    try:
        out, err = child.communicate(timeout=limit_s)
        code = child.returncode if child.returncode >= 0 else 128 - child.returncode
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        code = None
    return Told(code, _text(out), _text(err), time.monotonic() - began_s)


def _text(data: bytes) -> str:
    return data[:_OUTPUT_BYTES].decode(errors="replace")
