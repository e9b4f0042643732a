"""Commands with a deadline and trials in a child: what they tell, and what is killed with them."""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import require
from tests.host.test_cgroup import tree
from tests.waiting import eventually
from trainer_launch.host import deadline_subprocess, machine, network, process_tree
from trainer_launch.host.deadline_subprocess import Streams

pytestmark = pytest.mark.process

_FLOOD = "import os\nfor _ in range(64): os.write(1, b'x' * (1 << 20))\nos.write(2, b'done')"


def run(script: str, limit_s: float = 30.0, text: str | None = None) -> deadline_subprocess.Ended:
    return deadline_subprocess.run(("sh", "-c", script), None, limit_s, Streams(text=text))


def test_a_command_that_ends_tells_its_code_and_both_streams() -> None:
    ended = run("cat; echo told >&2; exit 3", text="given")
    assert (ended.code, ended.out, ended.err, ended.timed_out, ended.failure) == (3, "given", "told\n", False, "")


def test_a_command_that_cannot_be_started_raises_nothing() -> None:
    gone = deadline_subprocess.run(("/nonexistent/program",), None, 1.0)
    assert (gone.code, gone.err) == (127, "/nonexistent/program: No such file or directory")
    assert isinstance(gone.problem, FileNotFoundError)
    assert deadline_subprocess.run(("true", "a\0b"), None, 1.0).problem is not None


def test_at_its_limit_a_command_is_killed_with_all_that_it_has_started() -> None:
    """Also what ignores SIGTERM and has left its session."""
    ended = run("trap '' TERM; setsid sleep 600 & echo $!; sleep 600", limit_s=2.0)
    assert (ended.code, ended.timed_out, ended.is_stuck) == (None, True, False)
    assert ended.failure == "no end within 2 s"
    left = int(ended.out)
    eventually(lambda: (found := process_tree.read(left)) is None or found.state in "ZX", "the end of its child")


def test_output_beyond_the_bound_is_read_and_dropped() -> None:
    ended = deadline_subprocess.run((sys.executable, "-c", _FLOOD), None, 60.0)
    assert ended.code == 0
    assert len(ended.stdout) == deadline_subprocess.OUTPUT_BYTES
    assert ended.err == "done"


def test_a_daemon_that_keeps_the_output_open_holds_nobody_up_for_ever() -> None:
    """It has left the tree: an orphan in a session of its own."""
    code = (
        "import os, sys, time\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    parent = os.getpid()\n"
        "    if os.fork() > 0:\n"
        "        os._exit(0)\n"
        "    while os.getppid() == parent:\n"
        "        time.sleep(0.01)\n"
        "    print(parent, flush=True)\n"
        "    time.sleep(600)\n"
    )
    child = deadline_subprocess.RunningCommand((sys.executable, "-c", code))
    select.select([child.pipes], [], [])  # until it is one
    child.stop(0.5)
    ended = child.end(0.5)
    assert ended.timed_out
    assert not ended.is_stuck
    os.killpg(int(ended.out), 9)


def test_of_several_children_none_waits_for_a_reader_of_another() -> None:
    """Each says more than a pipe holds; the last one that is asked for ends first."""
    slow = deadline_subprocess.RunningCommand(("cat",), None, Streams(stdin=subprocess.PIPE))
    flood = "import os; os.write(1, b'x' * (1 << 20))"
    loud = [deadline_subprocess.RunningCommand((sys.executable, "-c", flood)) for _ in range(2)]
    deadline_subprocess.stop_all(loud, 60.0)
    assert [len(child.end().stdout) for child in loud] == [1 << 20] * 2
    slow.close_input()
    deadline_subprocess.stop_all((slow,), 60.0)
    assert slow.end().code == 0


def script(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    path = folder / "probe.py"
    path.write_text("import os, signal, sys, time\n" + text)
    monkeypatch.setattr(deadline_subprocess, "_TRIAL", path)


@pytest.mark.parametrize(
    ("make", "number"),
    [("nowhere", errno.ENOENT), ("file", errno.ENOTDIR)],
)
def test_a_folder_that_does_not(tmp_path: Path, make: str, number: int) -> None:
    (tmp_path / "file").touch()
    tried = deadline_subprocess.try_out("storage", str(tmp_path / make), 20.0)
    assert (tried.stage, tried.errno, tried.is_good) == ("create", number, False)


def test_a_file_system_without_room_tells_so_and_keeps_nothing() -> None:
    code = (
        "from trainer_launch.host.deadline_subprocess import try_out; import os; "
        "t = try_out('storage', '/mnt', 20.0); "
        "print(t.stage, t.errno, os.listdir('/mnt'))"
    )
    mount = 'mount -t tmpfs -o size=512k tmpfs /mnt && exec "$@"'
    require(subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0, "needs root")
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", mount, "sh", sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == f"write {errno.ENOSPC} []\n", done.stderr


def test_a_trial_that_hangs_is_killed_and_the_stage_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang = 'signal.signal(signal.SIGTERM, signal.SIG_IGN)\nos.write(1, b\'{"stage": "fsync"}\\n\')\ntime.sleep(600)'
    script(tmp_path, monkeypatch, hang)
    began_s = time.monotonic()
    tried = deadline_subprocess.try_out("storage", "/", 2.0)
    assert time.monotonic() - began_s < 30
    assert (tried.stage, tried.timed_out, tried.stuck, tried.is_good) == ("fsync", True, False, False)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # so it is meant
def test_a_child_that_sigkill_does_not_end_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As in an uninterruptible call of a dead file server: here the kill is only left out."""
    script(tmp_path, monkeypatch, 'os.write(1, b\'{"stage": "create"}\\n\')\ntime.sleep(600)')
    spared: list[int] = []
    kill = process_tree.kill
    monkeypatch.setattr(process_tree, "kill", spared.append)
    monkeypatch.setattr(deadline_subprocess, "_TRIAL_REAP_S", 0.1)
    try:
        tried = deadline_subprocess.try_out("storage", "/", 2.0)
    finally:
        for pid in spared:
            kill(pid)
    assert (tried.stage, tried.timed_out, tried.stuck) == ("create", True, True)


@pytest.mark.parametrize("text", ["sys.exit(3)", "os.kill(os.getpid(), 9)", "print('not json')"])
def test_a_child_that_fails_itself_tells_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    script(tmp_path, monkeypatch, text)
    tried = deadline_subprocess.try_out("storage", "/", 20.0)
    assert tried.problem
    assert not tried.is_good


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EPERM])
def test_a_bucket_that_can_neither_sync_nor_rename_nor_remove_files_is_written_and_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    lacks = f"""
import runpy
def refuse(*args): raise OSError({number}, "no")
def opened(path, flags, mode=0o777, *, open=os.open):
    return refuse() if flags & os.O_RDWR else open(path, flags, mode)  # as mountpoint-s3
os.fsync = os.rename = os.unlink = refuse
os.open = opened
os.statvfs = lambda path: os.statvfs_result([4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255])  # nothing is told
runpy.run_path({str(deadline_subprocess._TRIAL)!r}, run_name="__main__")
"""
    script(tmp_path, monkeypatch, lacks)
    tried = deadline_subprocess.try_out("storage", str(tmp_path), 20.0)
    assert tried.is_good, tried
    assert (tried.values["same"], tried.values["lacks"], tried.values["free_bytes"]) == (1, 3, -1)


def test_memory_is_locked_or_the_kernels_reason_is_told() -> None:
    tried = deadline_subprocess.try_out("memlock", str(1 << 20), 20.0)
    assert tried.is_good or tried.errno in (errno.ENOMEM, errno.EPERM, errno.EAGAIN)


# -- readers ----------------------------------------------------------------------------------


def test_the_nearest_limit_of_processes_counts_in_both_versions(tmp_path: Path) -> None:
    v2 = tree(
        tmp_path / "2",
        {
            "proc/self/cgroup": "0::/pod/main\n",
            "sys/fs/cgroup/cgroup.controllers": "pids\n",
            "sys/fs/cgroup/pod/main/pids.max": "max\n",
            "sys/fs/cgroup/pod/main/pids.current": "3\n",
            "sys/fs/cgroup/pod/pids.max": "100\n",
            "sys/fs/cgroup/pod/pids.current": "90\n",
        },
    )
    assert machine.pids_left(machine.own_groups(v2)) == (100, 10)
    v1 = tree(
        tmp_path / "1",
        {
            "proc/self/cgroup": "9:pids:/pod\n",
            "sys/fs/cgroup/pids/pod/pids.max": "1024\n",
            "sys/fs/cgroup/pids/pod/pids.current": "24\n",
        },
    )
    assert machine.pids_left(machine.own_groups(v1)) == (1024, 1000)
    assert machine.pids_left(machine.own_groups(tmp_path / "nothing")) is None


def test_adapters_are_listed_with_the_state_of_their_ports(tmp_path: Path) -> None:
    root = tree(
        tmp_path,
        {
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
            "dev/infiniband/uverbs0": "",
        },
    )
    assert [(port.device, port.port, port.is_active) for port in network.adapter_ports(root)] == [
        ("mlx5_0", 1, True),
        ("mlx5_1", 1, False),
    ]
    tree(tmp_path, {"sys/class/infiniband_verbs/uverbs0/ibdev": "mlx5_1\n"})
    (own,) = network.adapter_ports(root)
    assert (own.device, own.has_others) == ("mlx5_1", True)  # the other one is another pod's
    assert network.may_use_rdma(root)
    assert not network.may_use_rdma(tmp_path / "nothing")


def test_this_machines_loopback_is_listed_and_leads_to_itself() -> None:
    (loopback,) = [found for found in network.interfaces() if found.name == "lo"]
    assert loopback.is_loopback
    assert "127.0.0.1" in loopback.addresses
    assert network.source_to("127.0.0.1") == "127.0.0.1"
