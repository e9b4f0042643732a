"""What ends when: sessions, daemons, ranks, sshd, the worker."""

from __future__ import annotations

import os
import time
from pathlib import Path

import psutil
import pytest

from tests.mpi.ssh.secrets import Worker, worker
from tests.process.world import survivors
from tests.waiting import eventually

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("openssh")]


def noted(path: Path) -> str:
    return str(eventually(lambda: path.exists() and path.read_text().strip(), f"{path.name} is written"))


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_session_that_loses_its_connection_is_ended_with_all_it_started(tmp_path, mount) -> None:
    with worker(tmp_path, mount) as it:
        client = it.start(f"sleep 1000 & echo $! >'{tmp_path}/child'; echo $$ >'{tmp_path}/pid'; wait")
        pids = int(noted(tmp_path / "pid")), int(noted(tmp_path / "child"))
        eventually(lambda: looked_at(it), "the worker has seen the session")
        client.kill()
        client.wait()
        eventually(lambda: all(map(gone, pids)), f"ended: {it.log()}")
        assert "lost its ssh connection; ending it" in it.log()
        assert it.output("echo still here") == "still here"


def looked_at(it: Worker) -> bool:
    """Two looks, a second apart: the second one knows."""
    began = getattr(it, "began", None) or time.monotonic()
    it.began = began  # type: ignore[attr-defined]
    return time.monotonic() - began > 2.5


def test_a_daemon_left_behind_on_purpose_stays(tmp_path, mount) -> None:
    with worker(tmp_path, mount) as it:
        it.output(f"(setsid sh -c 'echo $$ >{tmp_path}/pid; exec sleep 1000' </dev/null >/dev/null 2>&1 &)")
        daemon = int(noted(tmp_path / "pid"))
        eventually(lambda: looked_at(it), "the worker has looked twice")
        assert not gone(daemon)


def test_ranks_that_do_not_listen_are_killed_when_the_grace_is_over(tmp_path, mount) -> None:
    with worker(tmp_path, mount, "--grace", "1") as it:
        clients = [it.start(f"trap '' TERM; echo $$ >'{tmp_path}/pid'; while :; do sleep 1000; done")]
        clients.append(it.start(f"setsid sh -c 'trap \"\" TERM; echo $$ >{tmp_path}/far; sleep 1000; :' & wait"))
        pids = int(noted(tmp_path / "pid")), int(noted(tmp_path / "far"))
        it.process.terminate()
        assert it.wait() == 143
        assert all(map(gone, pids))
        assert survivors(it.token) == []
        assert it.last_words().startswith(f"reason=Stopped node=0 host={os.uname().nodename} exit=143 ")
        for client in clients:
            client.wait(20)


def test_nothing_is_left_in_the_temporary_folder(tmp_path, mount) -> None:
    private = tmp_path / "tmp"
    private.mkdir()
    with worker(tmp_path, mount, env={"TMPDIR": str(private)}) as it:
        it.output("true")
        assert list(private.iterdir())
        it.process.terminate()
        assert it.wait() == 143
        assert list(private.iterdir()) == []
