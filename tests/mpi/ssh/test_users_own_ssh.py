"""What users and images have set up for their own ssh and shells does not come between the job's hosts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mpi.ssh.secrets import worker
from tests.planning.requests import given

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("openssh")]


def test_a_start_up_file_that_ends_each_shell_ends_no_rank(tmp_path: Path, mount: Path) -> None:
    for name in (".bashrc", ".profile", ".bash_profile"):
        (tmp_path / name).write_text("exit 0\n")
    with worker(tmp_path, mount, env={"HOME": str(tmp_path)}) as it:
        assert it.output("echo a rank") == "a rank"


def test_an_agent_with_more_keys_than_a_server_lets_anyone_try_is_not_asked(
    tmp_path: Path, mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = tmp_path / "a"
    monkeypatch.setenv("SSH_AUTH_SOCK", str(agent))
    with subprocess.Popen(("ssh-agent", "-D", "-a", str(agent)), stdout=subprocess.PIPE) as process:
        try:
            given(process.stdout).readline()  # it listens
            for number in range(8):
                key = tmp_path / f"key-{number}"
                subprocess.run(("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key), check=True, timeout=60)
                subprocess.run(("ssh-add", "-q", key), check=True, timeout=60)
            with worker(tmp_path, mount) as it:
                assert it.output("echo a rank") == "a rank"
        finally:
            process.terminate()


def test_a_proxy_of_the_users_own_configuration_is_not_used(
    tmp_path: Path, mount: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir(mode=0o700)
    (tmp_path / ".ssh" / "config").write_text("Host *\n  ProxyCommand false\n  Port 1\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with worker(tmp_path, mount) as it:
        assert it.output("echo a rank") == "a rank"
