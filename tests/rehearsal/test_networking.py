"""Pods with a network, names and /dev/shm of their own, really made: by root, and by a user who may."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import pytest

from tests.conftest import require
from trainer_launch.rehearsal.faults import requests

PODS = Path(__file__).with_name("pods_apart.py")
ROOT = Path(__file__).parents[2]
NOBODY = 65534
MIB = 1 << 20
TRIED = (
    "import json; from trainer_launch.rehearsal.faults import requests;"
    "found = requests.look(network=True, memory=False); print(json.dumps([found.as_user, sorted(found.works)]))"
)
pytestmark = pytest.mark.process


def test_pods_are_apart_when_root_makes_them(tmp_path: Path) -> None:
    machine = requests.look(network=True, memory=False)
    require(os.geteuid() == 0, "needs root")
    require(machine.works >= set(requests.NETWORK_PARTS), f"no network of its own for each pod here: {machine}")
    looked_at((), (sys.executable,), tmp_path, machine.works)


def test_pods_are_apart_when_a_user_makes_them(tmp_path: Path) -> None:
    python = python_of_nobody()
    said = subprocess.run(
        (*python, "-c", TRIED), capture_output=True, text=True, check=True, cwd="/", env=env()
    ).stdout
    as_user, works = json.loads(said)
    if not set(works) >= set(requests.NETWORK_PARTS):
        pytest.skip(f"this kernel lets users make no network: only {works} work")
    assert as_user
    tmp_path.chmod(0o777)
    # pytest's own, which only root may enter; each of several processes of it has one more
    for folder in takewhile(lambda one: one.name.startswith(("pytest-", "popen-")), tmp_path.parents):
        folder.chmod(0o755)
    looked_at(requests.AS_USER, python, tmp_path, set(works))


def looked_at(flags: Sequence[str], python: Sequence[str], folder: Path, works: set[str] | frozenset[str]) -> None:
    scratch = folder / "with a blank"
    scratch.mkdir()
    scratch.chmod(0o777)
    inside = ("unshare", *flags, "--net", "--mount", "--", python[-1], str(PODS), str(scratch))
    limit = ("limit",) if "limit" in works else ()
    done = subprocess.run(
        (*python[:-1], *inside, *limit),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
        cwd="/",
        env=env(),
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["place"] == f"pod-1 {scratch}"
    assert seen["links"].split() == ["lo", "eth0"]
    assert seen["partition"] == ["yes", "silence", "yes"]
    assert seen["delay dns 3s"] == ["yes", "no such name", "yes"]
    assert seen["shm"] == [64 * MIB, 0, 64 * MIB, 64 * MIB, 64 * MIB]
    if limit:
        slow, fast = seen["slow link"]
        assert slow < 3e6  # 0.3 MB/s, but for what kernels hold in their buffers
        assert fast > 5 * slow


def python_of_nobody() -> tuple[str, ...]:
    """How a user without rights runs a Python that has our dependencies; the last word is the program."""
    require(
        os.geteuid() == 0 and shutil.which("setpriv"), "needs root and setpriv, to become a user without rights"
    )
    for program in (sys.executable, "/usr/bin/python3"):
        become = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups")
        argv = (*become, "sh", "-c", 'exec "$0" "$@"', program)  # setpriv itself keeps rights until its exec
        same = f"assert sys.version_info[:2] == {sys.version_info[:2]}"
        code = f"import trainer_launch, psutil, sys; {same}"
        done = subprocess.run((*argv, "-c", code), capture_output=True, check=False, cwd="/", env=env())
        if done.returncode == 0:
            return argv
    pytest.skip("a user without rights cannot run this Python")


def env() -> dict[str, str]:
    paths = [str(ROOT), *(path for path in sys.path if path.endswith("site-packages"))]
    return {"PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1"}


def test_nothing_is_left_of_the_pods_network() -> None:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        assert "trainer-launch-local" not in line


def test_a_machine_without_the_programs_is_found_out(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = requests.look(network=True, memory=False)
    assert machine.missing == {*requests.PROGRAMS, "nft"}
    assert not machine.namespaces
