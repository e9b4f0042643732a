"""What ends a rehearsal's pods when the rehearsal itself is killed by SIGKILL, and can do nothing."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

_WAITS = Path(__file__).with_name("watchdog_process.py")
_START_S = 20.0
_log = logging.getLogger(__name__)


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """While it is held, a process watches this one; `folder` stands in the environment of each pod's processes."""
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        argv = (sys.executable, "-I", "-S", str(_WAITS), str(folder))
        null = subprocess.DEVNULL
        try:
            subprocess.run(
                argv, stdin=read, stdout=null, stderr=null, start_new_session=True, timeout=_START_S, check=True
            )
        except (OSError, subprocess.SubprocessError) as problem:
            _log.warning("if this rehearsal is killed by SIGKILL, its pods keep running: %s", problem)
        finally:
            os.close(read)
        yield
        with contextlib.suppress(OSError):
            os.write(write, b".")
    finally:
        os.close(write)
