"""Where no containers can be made, one sentence says so at once: in CI `make test-containers` ends there."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import require
from tests.setting_up import SETUP

NOBODY = 65534
SCRIPT = SETUP / "images.sh"


def asked(tmp_path: Path, *command: str | Path, **env: str) -> tuple[int, list[str]]:
    """The exit code of making the images, and its lines."""
    given = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), **env}
    ended = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
    return ended.returncode, (ended.stdout + ended.stderr).splitlines()


def test_ordinary_users_are_told_to_be_root(tmp_path: Path) -> None:
    become = []
    if os.getuid() == 0:
        require(shutil.which("setpriv"), "needs setpriv of util-linux")
        become = ["setpriv", "--reuid", str(NOBODY), "--clear-groups", "bash", "-s"]
    script = SCRIPT.read_text()  # the checkout may be root's alone
    ended = subprocess.run(
        become or ["bash", "-s"], input=script, capture_output=True, text=True, timeout=120, cwd="/"
    )
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr == "images: only root can make containers; run this as root (make test-containers)\n"


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_missing_program_is_named_with_what_to_install(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "dirname", "id", "cat"):
        (programs / name).symlink_to(str(shutil.which(name)))
    text = SCRIPT.read_text().replace("PATH=$PATH:/usr/sbin:/sbin", "")
    (tmp_path / "images.sh").write_text(text)
    code, lines = asked(tmp_path, str(shutil.which("bash")), tmp_path / "images.sh", PATH=str(programs))
    assert code == 3, lines
    assert lines == [f"images: there is no podman; {lines[0].partition('; ')[2]}"]
    assert "apt-get install podman" in lines[0]


@pytest.mark.skipif(os.getuid() != 0, reason="needs root")
def test_a_podman_that_does_not_work_ends_it_with_podmans_own_reason(tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("podman", "runc", "iptables", "debootstrap"):
        (programs / name).write_text(
            "#!/bin/sh\necho 'Error: mounting overlay: operation not permitted' >&2\nexit 125\n"
        )
        (programs / name).chmod(0o755)
    code, lines = asked(tmp_path, SCRIPT, PATH=f"{programs}:{os.environ['PATH']}")
    assert (code, lines) == (
        3,
        ["images: podman does not work here: Error: mounting overlay: operation not permitted"],
    )
