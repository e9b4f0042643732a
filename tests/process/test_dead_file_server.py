"""A file server that is gone: whatever lies on it, a request to stop is heard."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import require
from tests.process.world import ROOT
from tests.waiting import eventually
from trainer_launch.host import process_tree

pytestmark = pytest.mark.process
SERVER = Path(__file__).with_name("folder_server.py")
JOB = """
import time
for step in range(600):
    print("step", step, flush=True)
    time.sleep(0.05)
"""
GRACE_S = 3.0
HEARD_S = GRACE_S + 7.0  # a file that does not answer is waited for, but not for long
# What lies on the dead server, by options, variables and streams; {} is its folder.
PLACES = {
    "its stderr": {"stderr": "err"},
    "TMPDIR behind a symbolic link": {"env": {"TMPDIR": "{}.link"}},
    "copies of the workers' output": {"env": {"PET_LOG_DIR": "{}/logs", "PET_TEE": "3"}},
    "the event log": {"words": ["--events", "{}/events"]},
    "its stdout": {"stdout": "out"},
    "the incidents": {"words": ["--incident-dir", "{}/incidents"]},
    "the termination message": {"words": ["--termination-log", "{}/message"]},
    "the state of preflight": {"words": ["--report", "{}/report.json"]},
}


@pytest.fixture
def server(tmp_path):
    """A file server's process and its mount point."""
    mount = tmp_path / "mount"
    for folder in (mount, tmp_path / "served"):
        folder.mkdir()
    require(os.path.exists("/dev/fuse") and os.geteuid() == 0, "a FUSE server needs root and /dev/fuse")
    with subprocess.Popen([sys.executable, str(SERVER), str(tmp_path / "served"), str(mount)]) as process:
        try:
            eventually(lambda: os.path.ismount(mount), "the folder is mounted")
            Path(f"{mount}.link").symlink_to(mount)
            control = Path(f"{mount}.control")
            control.mkdir()
            subprocess.run(["mount", "-t", "fusectl", "none", str(control)], check=True)
            # A close that nobody answers holds even a killed process: this server asks to hear of none.
            (mount / "first").touch()
            yield process, mount
        finally:
            process.send_signal(signal.SIGCONT)
            subprocess.run(["fusermount3", "-uz", str(mount)], check=False)
            subprocess.run(["umount", "-l", f"{mount}.control"], check=False)
            process.terminate()


def stop(process, mount):
    """Stop the server while it answers nobody: who waits for an answer that was begun cannot even be killed."""
    waiting = Path(f"{mount}.control/{os.stat(mount).st_dev}/waiting")

    def is_stopped():
        process.send_signal(signal.SIGSTOP)
        if int(waiting.read_text()) == 0:
            return True
        process.send_signal(signal.SIGCONT)
        return False

    eventually(is_stopped, "the server is stopped between two answers")
    return waiting


@contextlib.contextmanager
def started(mount, job, words=(), env=(), stdout=None, stderr=None):
    """A launcher with two workers, as a process group; its command is the job, or in `words` after --."""
    argv = [sys.executable, "-m", "trainer_launch", "run", "--nproc-per-node", "2", "--grace", f"{GRACE_S:g}"]
    argv += [*(word.format(mount) for word in words), *(() if "--" in words else ("--", str(job)))]
    more = {name: value.format(mount) for name, value in dict(env).items()}
    with contextlib.ExitStack() as open_files:
        streams = [
            open_files.enter_context(open(job.with_name("own") if name is None else mount / name, "ab"))
            for name in (stdout, stderr)
        ]
        launcher = subprocess.Popen(
            argv,
            env={**os.environ, "PYTHONPATH": str(ROOT), **more},
            stdout=streams[0],
            stderr=streams[1],
            start_new_session=True,
        )
    try:
        yield launcher
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)  # the server goes on when the test has ended


def end(launcher, process):
    """Ask it to end while the file server is stopped, and look at its exit code once the server goes on."""
    begun_s = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    eventually(lambda: has_ended(launcher), "the launcher ends")
    assert time.monotonic() - begun_s < HEARD_S
    process.send_signal(signal.SIGCONT)
    assert launcher.wait(60.0) == 128 + signal.SIGTERM


def has_ended(launcher):
    """Whether its main thread has; the kernel keeps another that closes a file until the server answers."""
    with open(f"/proc/{launcher.pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.parametrize("place", PLACES.values(), ids=list(PLACES))
def test_a_request_to_stop_is_heard_where_the_server_is_gone_of(place, server, tmp_path):
    process, mount = server
    job = tmp_path / "job.py"
    job.write_text(JOB.replace("for step", f"open({str(tmp_path / 'begun')!r}, 'a').close()\nfor step"))
    with started(mount, job, **place) as launcher:
        eventually(lambda: (tmp_path / "begun").exists(), "the workers train")
        stop(process, mount)
        end(launcher, process)


@pytest.mark.parametrize("of", ["the incidents", "a preloaded module"])
def test_a_failed_worker_is_restarted_where_the_server_is_gone_of(of, server, tmp_path):
    process, mount = server
    job, starts = tmp_path / "job.py", tmp_path / "starts"
    begin = f"with open({str(starts)!r}, 'a') as file:\n    print(os.getpid(), file=file)\n"
    job.write_text(f"import os\n{begin}{JOB}")
    (mount / "mine.py").touch()
    (tmp_path / "mine.py").symlink_to(mount / "mine.py")
    words = ["--incident-dir", "{}/incidents"] if of == "the incidents" else ["--preload", "mine"]
    with started(mount, job, words) as launcher:
        eventually(lambda: starts.exists() and len(starts.read_text().split()) == 2, "the workers train")
        stop(process, mount)
        os.kill(int(starts.read_text().split()[0]), signal.SIGKILL)
        eventually(lambda: len(starts.read_text().split()) == 4, "the workers train again")
        end(launcher, process)


@pytest.mark.parametrize(
    "place",
    [{"words": ["--", "{}/job.py"]}, {"env": {"TMPDIR": "{}"}}, {"words": ["--events", "{}/events"]}],
    ids=["the script", "the folder for temporary files", "the event log"],
)
def test_a_launcher_that_starts_hears_a_request_to_stop_where_the_server_is_gone_of(place, server, tmp_path):
    process, mount = server
    job = tmp_path / "job.py"
    for path in (job, mount / "job.py"):
        path.write_text(JOB)
    waiting = stop(process, mount)
    with started(mount, job, **place) as launcher:
        eventually(lambda: int(waiting.read_text()) > 0, "it asks the server")
        end(launcher, process)


def test_a_request_to_stop_is_heard_where_a_fork_server_ends_and_the_scripts_server_is_gone(server, tmp_path):
    process, mount = server
    job = tmp_path / "job.py"
    (mount / "job.py").write_text(f"open({str(tmp_path / 'begun')!r}, 'a').close()\n{JOB}")
    with started(mount, job, ["--", "{}/job.py"], stderr=tmp_path / "log") as launcher:
        eventually(lambda: (tmp_path / "begun").exists(), "the workers train")
        stop(process, mount)
        below = sorted(process_tree.descendants(launcher.pid), key=lambda entry: entry.started)
        os.kill(below[0].pid, signal.SIGKILL)  # the fork server, from which all others come
        eventually(lambda: "it is started again" in (tmp_path / "log").read_text(), "its end is seen")
        end(launcher, process)


def test_a_worker_that_cannot_start_as_its_programs_server_is_gone_ends_the_pod_for_another_node(server, tmp_path):
    process, mount = server
    job, starts = tmp_path / "job.py", tmp_path / "starts"
    job.write_text(f"import os\nwith open({str(starts)!r}, 'a') as file:\n    print(os.getpid(), file=file)\n{JOB}")
    (tmp_path / "served" / "venv").symlink_to(sys.prefix)
    words = ["--start-method", "exec", "--", "{}/venv/bin/python", str(job)]
    with started(mount, job, words, stderr=tmp_path / "log") as launcher:
        eventually(lambda: starts.exists() and len(starts.read_text().split()) == 2, "the workers train")
        stop(process, mount)
        os.kill(int(starts.read_text().split()[0]), signal.SIGKILL)
        assert launcher.wait(60.0) == 138
    assert "its file server does not answer" in (tmp_path / "log").read_text()


LOCKED = """
import ctypes, mmap, os, select, socket, threading, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_void_p
name = {place!r} + os.environ["RANK"]
file = open(name, "w+b", 0)
file.write(bytes(4096))
pages = ctypes.c_void_p(libc.mmap(None, 4096, mmap.PROT_WRITE, mmap.MAP_SHARED, file.fileno(), 0))
ctypes.memset(pages, 1, 1)
def lock():
    while not os.path.exists({stopped!r}):
        time.sleep(0.01)
    libc.munmap(pages, 4096)  # holds the lock of the memory map until the server answers
def wait():  # has others wait for it, too
    while True:
        libc.mmap(None, 4096, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        time.sleep(0.01)
for act in lock, wait:
    threading.Thread(target=act, daemon=True).start()
waits = select.poll()
ours, other = socket.socketpair()
waits.register(ours, select.POLLIN)
open(name.replace("/mount/", "/begun."), "w").close()
waits.poll()
"""


def test_a_request_to_stop_is_heard_where_the_memory_maps_of_workers_that_hang_are_locked(server, tmp_path):
    process, mount = server
    job, stopped = tmp_path / "job.py", tmp_path / "stopped"
    job.write_text(LOCKED.format(place=f"{mount}/pages.", stopped=str(stopped)))
    words = ["--hang-timeout", "2"]
    with started(mount, job, words, stderr="../log") as launcher:
        eventually(lambda: len(list(tmp_path.glob("begun.*"))) == 2, "the workers train")
        stop(process, mount)
        stopped.touch()
        eventually(lambda: "hang:" in (tmp_path / "log").read_text(), "the hang is found")
        end(launcher, process)
