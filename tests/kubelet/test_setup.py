"""Where Kubernetes cannot be built, one sentence says so at once."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from tests.setting_up import SETUP


def test_a_missing_program_is_named_with_what_to_install(tmp_path: Path) -> None:
    for name in ("bash", "cut", "flock", "mkdir", "sha256sum"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    given = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PATH": str(tmp_path)}
    bash = str(shutil.which("bash"))
    ended = subprocess.run([bash, SETUP / "kubernetes.sh"], env=given, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 3, ended.stderr
    assert ended.stderr.startswith("kubernetes: there is no go; apt-get install golang-go ")
    assert ended.stderr.count("\n") == 1
