"""`trainer-launch sshd` with a real sshd and real ssh: who comes in, with which environment, and who does not."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.launching import launch, launched
from tests.mpi.ssh.secrets import (
    Worker,
    client_of,
    refused,
    secret,
    secret_lines,
    ssh,
    worker,
)
from tests.planning.requests import given
from tests.ports import free_port
from tests.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("openssh")]


def test_a_rank_has_the_containers_environment(tmp_path, mount) -> None:
    (tmp_path / ".bashrc").write_text("export PATH=/elsewhere:$PATH NCCL_DEBUG=TRACE\n")
    env = {
        "HOME": str(tmp_path),
        "LD_LIBRARY_PATH": "/opt/hpcx/lib:/usr/local/cuda/lib64",
        "NCCL_DEBUG": "INFO",
        "AWKWARD": 'it\'s "quoted" \\ $HOME `x` #1  = ü',
        "EMPTY": "",
        "HF_TOKEN": "hf_" + "x" * 30,
        "WANDB_API_KEY": "named",
        "FUNCTION": "() {\n}",
    }
    with worker(tmp_path, mount, "--forward-env", "WANDB_API_KEY,TOKEN", env=env) as it:
        told = it.output("env -0; true").split("\0")
        found = dict(entry.split("=", 1) for entry in told if "=" in entry)
        for name in ("LD_LIBRARY_PATH", "NCCL_DEBUG", "AWKWARD", "EMPTY", "WANDB_API_KEY"):
            assert found[name] == env[name]
        assert found["PATH"] == os.environ["PATH"]
        assert "HF_TOKEN" not in found
        assert "FUNCTION" not in found
        assert "because they look like secrets: HF_TOKEN" in it.log()
        assert "because sshd cannot pass them on: FUNCTION" in it.log()
        assert env["HF_TOKEN"] not in it.log()


def test_only_the_jobs_key_comes_in(tmp_path, mount) -> None:
    with worker(tmp_path, mount) as it:
        assert it.output("echo welcome") == "welcome"
        stranger = secret(tmp_path / "of another job")
        options = ("-i", str(stranger / "id_rsa"), "-o", "IdentityFile=none")
        other = client_of(tmp_path, stranger, it.port, check_host_keys=False)
        done = ssh(other, "echo robbed")
        assert (done.returncode, done.stdout) == (255, "")
        assert "Permission denied (publickey)" in done.stderr
        for method in ("password", "keyboard-interactive", "none"):
            done = it.ssh("echo robbed", options=(*options, "-o", f"PreferredAuthentications={method}"))
            assert (done.returncode, done.stdout) == (255, "")
            assert "Permission denied (publickey)" in done.stderr
        assert it.ssh("echo robbed", options=("-l", "somebody")).returncode == 255


def test_nothing_is_forwarded_and_there_is_no_terminal(tmp_path, mount) -> None:
    with worker(tmp_path, mount) as it, socket.create_server(("127.0.0.1", 0)) as inside:
        target = f"127.0.0.1:{inside.getsockname()[1]}"
        done = it.ssh(options=("-o", "ClearAllForwardings=no", "-W", target))
        assert done.returncode == 255
        assert "forwarding failed" in done.stderr
        remote = ("-o", "ClearAllForwardings=no", "-o", "ExitOnForwardFailure=yes", "-R", f"0:{target}")
        assert it.ssh("echo forwarded", options=remote).stdout == ""
        assert it.ssh("echo agent=$SSH_AUTH_SOCK", options=("-A",)).stdout == "agent=\n"
        assert it.ssh("echo x=$DISPLAY", options=("-X",)).stdout == "x=\n"
        assert "PTY allocation request failed" in it.ssh("tty", options=("-tt",)).stderr


def test_a_man_in_the_middle_is_refused_unless_host_keys_are_not_checked(tmp_path, mount) -> None:
    """He has not the job's key; he lets in whoever comes, and is there where a worker should be."""
    port, theirs = free_port(), secret(tmp_path / "his own key")
    (tmp_path / "config").write_text(
        f'Port {port}\nListenAddress 127.0.0.1\nHostKey "{theirs}/id_rsa"\nUsePAM no\nStrictModes no\n'
        f'PidFile none\nAuthorizedKeysFile "{mount}/authorized_keys"\n'
    )
    if os.geteuid() == 0:
        os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    he = subprocess.Popen([str(program), "-D", "-e", "-f", tmp_path / "config"], stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: listens(port), "he listens")
        strict = ssh(client_of(tmp_path, mount, port), "echo robbed")
        assert (strict.returncode, strict.stdout) == (255, "")
        assert "Host key verification failed" in strict.stderr
        # What the mpi-operator's base image has in its ssh_config, and what --insecure-host-keys says so loudly.
        careless = (
            "ssh",
            "-F",
            "/dev/null",
            "-o",
            "StrictHostKeyChecking=no",
            "-o",
            "UserKnownHostsFile=/dev/null",
        )
        copy = client_of(tmp_path, mount, port).files.key
        argv = (*careless, "-o", "BatchMode=yes", "-i", copy, "-p", str(port), "127.0.0.1", "echo robbed")
        assert subprocess.run(argv, capture_output=True, text=True, timeout=30).stdout == "robbed\n"
        assert ssh(client_of(tmp_path, mount, port, check_host_keys=False), "echo robbed").stdout == "robbed\n"
    finally:
        he.kill()
        he.wait()


def listens(port: int) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex(("127.0.0.1", port)) == 0


def sentence(it: Worker, code: int) -> str:
    assert it.process.returncode == code, it.log()
    lines = [line for line in it.log().splitlines() if "error:" in line]
    assert len(lines) == 1, it.log()
    assert "Traceback" not in it.log()
    reason = "Misconfigured" if code == 2 else "NotStarted"
    assert it.last_words().startswith(f"reason={reason} host={os.uname().nodename} exit={code} ")
    return lines[0]


def test_a_folder_without_a_key_is_refused(tmp_path) -> None:
    with refused(tmp_path, tmp_path / "nowhere") as it:
        assert "cannot be read" in sentence(it, 2)


def test_a_port_in_use_is_infrastructure(tmp_path, mount) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with refused(tmp_path, mount, "--ssh-port", str(port)) as it:
            assert f"port {port} is in use" in sentence(it, 138)


def test_run_without_a_command_names_it(mount) -> None:
    done = launched("run", env={"JOB_COMPLETION_INDEX": "0", "TRAINER_LAUNCH_SSH_DIR": str(mount)}, code=2)
    assert "missing command; this pod is an MPI worker, whose command is: trainer-launch sshd" in done.stderr


def test_the_key_is_seen_nowhere(tmp_path, mount) -> None:
    with worker(tmp_path, mount, "--log-level", "debug") as it:
        it.output("true")
        told = it.log()
        it.process.terminate()
        assert it.wait() == 143
        told += it.log() + it.last_words()
    env = {"JOB_COMPLETION_INDEX": "0", "TRAINER_LAUNCH_SSH_DIR": str(mount)}
    snapshot = tmp_path / "pod.json"
    done = launch("explain", "--json", "--save-pod", str(snapshot), env=env)
    told += done.stdout + done.stderr + snapshot.read_text()
    assert str(mount) in told
    assert [line for line in secret_lines(mount) if line in told] == []


def test_explain_shows_what_a_worker_would_run(tmp_path, mount) -> None:
    env = {
        "JOB_COMPLETION_INDEX": "1",
        "TRAINER_LAUNCH_SSH_DIR": str(mount),
        "HF_TOKEN": "hf_abc",
        "NCCL_DEBUG": "INFO",
    }
    done = launched("explain", env=env)
    assert "sshd -D -e" in done.stdout
    assert "this is an MPI worker" in done.stdout
    assert "hf_abc" not in done.stdout


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
