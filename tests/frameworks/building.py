"""Real Horovod for tests: built once by tests/setup/horovod.sh, which also says what it lacks."""

from __future__ import annotations

import atexit
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.conftest import require

BUILD = Path(__file__).parents[1] / "setup" / "horovod.sh"
BUILD_S = 900  # on a slow machine, or while another process builds it; a test that asks for it needs such a timeout
_NOTHING_TO_BUILD_WITH = 3
_RUN = "import sys; from horovod.runner.launch import run_commandline; sys.exit(run_commandline())"


@functools.cache
def site() -> str:
    """The folder with Horovod, for PYTHONPATH; skips the test where it can neither be found nor built."""
    env = dict(os.environ, PYTHON=sys.executable)
    built = subprocess.run([BUILD], env=env, capture_output=True, text=True)
    if built.returncode != 0:
        if built.returncode != _NOTHING_TO_BUILD_WITH:
            pytest.fail(f"Horovod could not be built:\n{built.stderr}")
        require(False, built.stderr.strip().splitlines()[-1])
    return built.stdout.strip()


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
