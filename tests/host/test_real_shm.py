"""A /dev/shm of one's own: made larger, filled up, leaked into by what training programs really use."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import LAUNCHER, clean_env
from tests.conftest import require

pytestmark = pytest.mark.process

MOUNT = 'mount -t tmpfs -o size={size},nosuid,nodev tmpfs /dev/shm && exec "$@"'
UNPRIVILEGED = ("setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin")


def inside(argv: Sequence[str], size: str = "64m") -> subprocess.CompletedProcess[str]:
    """Run with a /dev/shm of this size, in a mount namespace."""
    wrap = ["unshare", "-m", "sh", "-c", MOUNT.format(size=size), "sh"]
    require(subprocess.run([*wrap, "true"], capture_output=True).returncode == 0, "mounting needs root")
    return subprocess.run([*wrap, *argv], env=clean_env(), capture_output=True, text=True, timeout=120)


def python(code: str, size: str = "64m") -> Any:
    done = inside([sys.executable, "-c", textwrap.dedent(code)], size)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_it_is_made_larger_and_keeps_its_flags_and_files() -> None:
    told = python("""
        import json, os
        from trainer_launch.host import shm
        open("/dev/shm/data", "w").write("here")
        before = os.statvfs("/dev/shm").f_flag
        room = shm.enlarge(200 << 20)
        shm.enlarge(100 << 20)  # never smaller
        flags = os.statvfs("/dev/shm").f_flag
        print(json.dumps([room.size_bytes >> 20, shm.space().size_bytes >> 20, flags == before, flags & 6,
                          open("/dev/shm/data").read(), shm.may_enlarge()]))
    """)
    assert told == [200, 200, True, 6, "here", True]


def test_run_makes_room_for_its_workers() -> None:
    done = inside([*LAUNCHER, "run", "--engine", "plain", "--nproc-per-node", "2", "--", "df", "-m", "/dev/shm"])
    assert done.returncode == 0
    assert "enlarged /dev/shm to 512 MiB" in done.stderr
    assert " 512 " in done.stdout


def test_where_it_may_not_run_says_what_would_help_and_goes_on() -> None:
    argv = [*UNPRIVILEGED, *LAUNCHER, "run", "--engine", "plain", "--nproc-per-node", "2", "--", "true"]
    done = inside(argv)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("emptyDir: {medium: Memory, sizeLimit: 1Gi}") == 1


def test_who_dies_of_a_full_one_is_told_what_fills_it(tmp_path: Path) -> None:
    fill = tmp_path / "fill.py"
    fill.write_text(
        textwrap.dedent("""
        import mmap, os
        file = os.open("/dev/shm/psm_0a", os.O_CREAT | os.O_RDWR)
        os.ftruncate(file, 8 << 20)
        memory = mmap.mmap(file, 8 << 20)
        for page in range(0, 8 << 20, 4096):
            memory[page] = 1
        """)
    )
    words = tmp_path / "words"
    argv = [*LAUNCHER, "run", "--termination-log", str(words), "--", sys.executable, str(fill)]
    assert inside(argv, size="1m").returncode == 135
    said = words.read_text()
    assert said.startswith("reason=SharedMemoryFull")
    assert "its largest files: psm_0a (1 MiB)" in said


PYTHON = """
from multiprocessing import resource_tracker, shared_memory
keep = shared_memory.SharedMemory(create=True, size=1 << 20)
keep.buf[:] = bytes(1 << 20)
helper = resource_tracker._resource_tracker._pid
"""
TORCH = """
import os, torch, torch.multiprocessing
torch.multiprocessing.set_sharing_strategy("file_system")
keep = torch.ones(1 << 18).share_memory_()
(helper,) = map(int, open(f"/proc/self/task/{os.getpid()}/children").read().split())
"""


@pytest.mark.parametrize("leak", [PYTHON, pytest.param(TORCH, marks=pytest.mark.torch)], ids=["Python", "torch"])
def test_what_a_killed_program_leaves_is_gone_at_the_end(leak: str) -> None:
    code = f"{leak}\nimport os; os.kill(helper, 9); os.kill(os.getpid(), 9)"
    script = '"$@" || echo "exit $?"; ls -A /dev/shm'
    argv = [*LAUNCHER, "run", "--engine", "plain", "--", sys.executable, "-c", code]
    done = inside(["sh", "-c", script, "sh", *argv])
    assert done.stdout == "exit 137\n"
    assert done.stderr.count("removed 1 shared memory segment (1 MiB) of dead workers") == 1
