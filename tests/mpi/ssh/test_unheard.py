"""What sshd logs: probes of its port cost no lines, and what people need stays."""

from __future__ import annotations

import contextlib
import socket

import pytest

from tests.mpi.ssh.secrets import client_of, secret, ssh, worker
from trainer_launch.commands.sshd import ProbeFilter

NEWER = b"Connection closed by 10.0.0.1 port 4244\n"  # OpenSSH 9.8 and later have no other line
PROBE = (
    b"kex_exchange_identification: Connection closed by remote host\nConnection closed by 10.0.0.1 port 4242\n"
    b"kex_exchange_identification: read: Connection reset by peer\r\nConnection reset by 10.0.0.1 port 4243\r\n"
)
KEPT = (
    b"Connection closed by authenticating user root 10.0.0.1 port 36808 [preauth]\n",
    b"Connection closed by 10.0.0.9 port 36792 [preauth]\n",
    b"Invalid user somebody from 10.0.0.9 port 36834\n",
    b'kex_exchange_identification: client sent invalid protocol identifier "GET / HTTP/1.1"\n',
    b"banner exchange: Connection from 10.0.0.9 port 36782: invalid format\n",
    b"Accepted publickey for root from 10.0.0.2 port 36820 ssh2: ECDSA SHA256:20SVi\n",
    b"Server listening on 0.0.0.0 port 2222.\n",
)


@pytest.mark.parametrize("size", [1, 7, 4096])
def test_lines_of_probes_are_left_out_and_all_others_are_kept(size: int) -> None:
    first, second = PROBE.splitlines(keepends=True)[:2]
    probes, text = ProbeFilter(), b"".join(KEPT) + PROBE + NEWER + first * 3 + second * 3 + b"".join(KEPT)
    shown = b"".join(probes(text[at : at + size]) for at in range(0, len(text), size))
    assert shown == b"".join(KEPT) * 2


def test_an_unfinished_line_is_shown_at_the_end() -> None:
    probes = ProbeFilter()
    assert probes(b"fatal: no") == b""
    assert probes(b"") == b"fatal: no"


@pytest.mark.process
@pytest.mark.usefixtures("openssh")
def test_readiness_probes_cost_no_line_keep_no_launcher_out_and_a_stranger_is_logged(tmp_path, mount) -> None:
    with worker(tmp_path, mount) as it:
        probe(it.port, 60)
        with contextlib.closing(socket.create_connection(("127.0.0.1", it.port), 5)) as scan:
            scan.sendall(b"GET / HTTP/1.0\r\n\r\n")
            scan.recv(64)
        it.await_log("banner exchange: Connection from 127.0.0.1 port ")
        stranger = client_of(tmp_path, secret(tmp_path / "another job"), it.port, check_host_keys=False)
        assert ssh(stranger, "true").returncode == 255
        it.await_log("Connection closed by authenticating user")
        assert ssh(client_of(tmp_path, mount, it.port), "true").returncode == 0
        it.process.terminate()
        it.wait()
        log = it.log()
    assert "Connection closed by remote host" not in log
    assert "Connection reset by peer" not in log


def probe(port: int, times: int = 1) -> None:
    """As a kubelet does it."""
    for _ in range(times):
        socket.create_connection(("127.0.0.1", port), 5).close()
