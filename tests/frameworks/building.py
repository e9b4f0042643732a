"""Real Horovod for tests: built once by tests/setup/horovod.sh, which also says what it lacks."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import sys
import tempfile
from pathlib import Path

from tests.setting_up import made

BUILD_S = 900  # on a slow machine, or while another process builds it; a test that asks for it needs such a timeout
_RUN = "import sys; from horovod.runner.launch import run_commandline; sys.exit(run_commandline())"


def site() -> str:
    """The folder with Horovod, for PYTHONPATH; skips the test where it can neither be found nor built."""
    return made("horovod.sh", within_s=BUILD_S)


@functools.cache
def python() -> str:
    """Our Python by a path without a blank: Horovod puts it into command lines as it is."""
    if " " not in sys.executable:
        return sys.executable
    folder = tempfile.mkdtemp(prefix="python-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    link = Path(folder, "prefix")
    link.symlink_to(sys.prefix)
    return str(link / Path(sys.executable).relative_to(sys.prefix))


def env() -> dict[str, str]:
    """What a program needs to import Horovod; psutil and the others come with our own environment."""
    return {"PYTHONPATH": os.pathsep.join([site(), *filter(None, [os.environ.get("PYTHONPATH")])])}


def command(folder: Path) -> Path:
    """`horovodrun` as pip would install it, in `folder`."""
    site()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "horovodrun"
    # A shebang bears no blank in a path.
    path.write_text(f"#!/bin/sh\nexec '{python()}' -c '{_RUN}' \"$@\"\n")
    path.chmod(0o755)
    return path
