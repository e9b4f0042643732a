"""How a pod ends, and what it says of that, where the ordinary way is closed."""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.launching import LAUNCHER, clean_env, launch, launched, script, start
from tests.conftest import require
from tests.host.test_real_cgroup import IS_V2, limited
from tests.process.world import PID1, require_namespaces
from tests.waiting import eventually

pytestmark = pytest.mark.process
HAS_ENDED = "print('trained')"


def message(folder: Path) -> tuple[Path, dict[str, str]]:
    """A termination message's file, and the variable that names it."""
    place = folder / "termination-log"
    place.touch()
    return place, {"TRAINER_LAUNCH_TERMINATION_LOG": str(place)}


def refused(ended: subprocess.CompletedProcess[str], code: int, sentence: str, place: Path | None = None) -> None:
    """One clear error; in a pod it is in the termination message, too."""
    assert ended.returncode == code, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("trainer-launch: error: ")]
    assert len(errors) == 1, ended.stderr
    assert sentence in errors[0]
    assert "Traceback" not in ended.stderr
    if place is not None:
        assert sentence in place.read_text()


# A module that Python imports when it starts: the request comes while a module of ours is imported.
ASKS = """
import os, signal, sys

class Ask:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["ASKS_AT"] and os.getpid() == 1:
            os.kill(1, signal.SIGTERM)

sys.meta_path.insert(0, Ask())
"""


@pytest.mark.parametrize("shim", [False, True], ids=["the launcher", "a shim"])
def test_pid_1_takes_a_request_to_stop_that_comes_while_it_still_imports(tmp_path: Path, shim: bool) -> None:
    require_namespaces()
    (tmp_path / "sitecustomize.py").write_text(ASKS)
    env = {"PYTHONPATH": str(tmp_path), "ASKS_AT": "trainer_launch.supervisor"}
    words: tuple[str, ...] = (*LAUNCHER, "run", "--", "sleep", "600")
    if shim:
        assert launch("install-shims", str(tmp_path)).returncode == 0
        env["ASKS_AT"], words = "trainer_launch.commands.install_shims", (f"{tmp_path}/torchrun", "sleep.py")
    ended = subprocess.run((*PID1, *words), env=clean_env(env), timeout=120, capture_output=True, text=True)
    assert ended.returncode == 143, ended.stderr


def test_an_exit_handler_or_a_thread_of_a_library_does_not_hold_the_pod() -> None:
    program = """
import atexit, sys, threading
from trainer_launch.cli import main
atexit.register(threading.Event().wait)
threading.Thread(target=threading.Event().wait).start()
sys.argv = ["trainer-launch", "run", "--", "sh", "-c", "exit 7"]
main()
"""
    assert subprocess.run([sys.executable, "-c", program], env=clean_env(), timeout=120).returncode == 7


WAITS_FOR_MESSAGE = """
import os, signal, time
def leave(*_):
    while not os.path.getsize(os.environ["TRAINER_LAUNCH_TERMINATION_LOG"]):
        time.sleep(0.01)
    print("found it", flush=True)
    os._exit(0)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
while True: time.sleep(0.1)
"""


def test_a_request_to_stop_is_in_the_termination_message_before_anything_has_ended(tmp_path: Path) -> None:
    place, env = message(tmp_path)
    words = ("run", "--grace", "600", "--", sys.executable, script(tmp_path, WAITS_FOR_MESSAGE))
    with start(*words, env=env) as launcher:
        launcher.read_until("ready")
        launcher.signal(signal.SIGTERM)
        launcher.read_until("found it")
        launcher.ends_with(143)
    assert place.read_text().startswith("reason=Stopped ")
    assert "was killed" not in place.read_text()  # it ended in its own time, and has said so last


def test_a_launcher_that_is_killed_while_it_stops_has_said_what_to_change(tmp_path: Path) -> None:
    place, env = message(tmp_path)
    program = script(tmp_path, WAITS_FOR_MESSAGE.replace("os._exit(0)", "time.sleep(30), os._exit(1)"))
    with start("run", "--grace", "600", "--", sys.executable, program, env=env) as launcher:
        launcher.read_until("ready")
        launcher.signal(signal.SIGTERM)
        launcher.read_until("found it")
        launcher.signal(signal.SIGKILL)
        launcher.end()
    text = place.read_text()
    assert text.startswith("reason=Stopped ")
    assert "asked to stop by SIGTERM" in text
    assert "set terminationGracePeriodSeconds higher than --grace" in text


def test_a_log_that_nobody_reads_holds_neither_the_end_nor_the_message(tmp_path: Path) -> None:
    """The pipe is full, and the program ignores the request to stop: no line of the launcher can be written."""
    place, env = message(tmp_path)
    ready = tmp_path / "ready"
    program = (
        f"import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nopen({str(ready)!r}, 'w')\nsignal.pause()"
    )
    words = [*LAUNCHER, "run", "--grace", "1", "--", sys.executable, script(tmp_path, program)]
    read_end, write_end = os.pipe()
    running = subprocess.Popen(words, env=clean_env(env), stdout=write_end, stderr=write_end)
    ours = os.open(f"/proc/self/fd/{write_end}", os.O_WRONLY | os.O_NONBLOCK)
    try:
        eventually(ready.exists, "the program runs")
        while select.select([], [ours], [], 0)[1]:  # until it is full
            os.write(ours, b"y" * 4096)
        running.send_signal(signal.SIGTERM)
        assert running.wait(120) == 143
    finally:
        running.kill()
        for fd in (read_end, write_end, ours):
            os.close(fd)
    assert place.read_text().startswith("reason=Stopped ")


IN_DELETED_FOLDER = ("sh", "-c", 'mkdir "$0" && cd "$0" && rmdir "$0" && exec "$@"')
RUNS = (("run",), ("run", "--nproc-per-node", "1"), ("preflight",), ("explain",), ("rehearse",))


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_a_deleted_working_directory_is_one_clear_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    place, env = message(tmp_path)
    within = (*IN_DELETED_FOLDER, str(tmp_path / "gone"))
    ended = launch(*words, "--", script(tmp_path, HAS_ENDED), env=env, within=within)
    in_pod = place if words[0] in ("run", "preflight") else None
    refused(ended, 2, "the working directory does not exist any more", in_pod)


@pytest.mark.parametrize("words", [("run", "--nproc-per-node", "1"), ("rehearse",)], ids=" ".join)
def test_a_container_without_proc_is_one_clear_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    require_namespaces()
    place, env = message(tmp_path)
    within = ("unshare", "--mount", "sh", "-c", 'umount -l /proc && exec "$0" "$@"')
    ended = launch(*words, "--", script(tmp_path, HAS_ENDED), env=env, within=within)
    refused(ended, 138, "/proc is not mounted", place if words[0] == "run" else None)


@pytest.mark.parametrize("files", [5, 6, 8, 10, 12])
def test_too_few_descriptors_are_one_clear_error_and_the_message_is_written(tmp_path: Path, files: int) -> None:
    place, env = message(tmp_path)
    within = ("sh", "-c", f'ulimit -n {files} && exec "$0" "$@"')
    ended = launch("run", "--", "true", env=env, within=within)
    refused(ended, 138, "Too many open files; raise the container's limit", place)


@pytest.mark.parametrize("words", [("run",), ("run", "--nproc-per-node", "1"), ("rehearse",)], ids=" ".join)
def test_a_thread_that_cannot_be_started_is_one_clear_error(tmp_path: Path, words: tuple[str, ...]) -> None:
    require(
        os.geteuid() == 0 and shutil.which("setpriv") is not None, "another user's limit needs root and setpriv"
    )
    place, env = message(tmp_path)
    place.chmod(0o666)
    keeps = ("--inh-caps", "+dac_override", "--ambient-caps", "+dac_override")
    within = ("prlimit", "--nproc=1", "setpriv", "--reuid", "54321", "--clear-groups", *keeps)
    ended = launch(*words, "--", "/bin/true", env={**env, "HOME": "/tmp"}, within=within)
    in_pod = place if words[0] == "run" else None
    refused(ended, 138, "can't start new thread; raise the container's limit (ulimit -n, pids, memory)", in_pod)


@pytest.mark.torch
def test_a_machine_without_a_loopback_address_is_told_how_to_get_one(tmp_path: Path) -> None:
    require_namespaces()
    place, env = message(tmp_path)
    ended = launch(
        "run", "--nproc-per-node", "1", "--", script(tmp_path, HAS_ENDED), env=env, within=("unshare", "-n")
    )
    refused(ended, 138, "ip addr add 127.0.0.1/8 dev lo; ip link set lo up", place)


@pytest.mark.torch
def test_a_fork_server_that_memory_has_killed_names_memory(tmp_path: Path) -> None:
    place, env = message(tmp_path)
    name = "memory.max" if IS_V2 else "memory.limit_in_bytes"
    with limited("memory", {name: str(80 << 20)}) as enter:
        words = ("run", "--nproc-per-node", "1", "--", script(tmp_path, HAS_ENDED))
        launched(*words, env=env, within=("sh", "-c", enter), code=138)
    told = place.read_text()
    assert "for memory, limit 80 MiB" in told
    assert "raise the container's memory limit" in told


@pytest.mark.torch
def test_a_torchrun_that_somebody_else_ends_may_be_started_again(tmp_path: Path) -> None:
    place, env = message(tmp_path)
    program = script(tmp_path, "import time\nprint('ready', flush=True)\ntime.sleep(600)")
    with start("run", "--engine", "torchrun", "--", "torchrun", program, env=env) as launcher:
        launcher.read_until("ready")
        (torchrun,) = psutil.Process(launcher.pid).children()
        torchrun.terminate()
        launcher.ends_with(143)
    assert "reason=Killed" in place.read_text()
    assert "retryable=true" in place.read_text()


@pytest.mark.parametrize("words", [("version",), ("help",), ("explain", "--", "true")], ids=" ".join)
def test_what_a_command_prints_is_written_to_its_end_and_a_full_disk_is_one_line(words: tuple[str, ...]) -> None:
    assert launch(*words).stdout.strip()
    with open("/dev/full", "w") as full:
        command = [*LAUNCHER, *words]
        ended = subprocess.run(
            command, env=clean_env(), stdout=full, stderr=subprocess.PIPE, text=True, timeout=120
        )
    refused(ended, 1, "No space left on device")


def test_a_reader_that_has_seen_enough_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run([*LAUNCHER, "help"], env=clean_env(), stdout=writer, stderr=subprocess.PIPE, timeout=120)
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, b"")


def test_a_preflight_that_cannot_print_its_report_has_told_the_verdict(tmp_path: Path) -> None:
    place, env = message(tmp_path)
    with open("/dev/full", "w") as full:
        subprocess.run([*LAUNCHER, "preflight", "--only", "cpu"], env=clean_env(env), stdout=full, timeout=120)
    assert place.read_text().startswith("reason=Preflight")
