"""The guard around what horovodrun starts on other hosts, and how ssh's arguments are told apart."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.waiting import eventually
from trainer_launch.mpi import horovod_ssh
from trainer_launch.mpi.horovod_agent import Sessions

pytestmark = pytest.mark.process
SHIM = Path(horovod_ssh.__file__)
DEADLINE_S = 120
GRACE_S = 1
TELLS = "trap 'echo told; exit 3' TERM; echo ready $$; while :; do sleep 0.05; done"
WITH_LOADER = """
import signal, subprocess, sys, time
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
loader = subprocess.Popen(["sleep", "60"])
print("ready", loader.pid, flush=True)
while not asked:
    time.sleep(0.02)
print("loader", loader.poll(), flush=True)
loader.kill()
"""
DEAF = "trap '' TERM; echo ready $$; while :; do sleep 0.05; done"


@contextmanager
def guarded(command: str) -> Iterator[subprocess.Popen[str]]:
    """A guarded command as sshd starts it: by a shell, with a pipe for its standard input."""
    process = subprocess.Popen(
        ["sh", "-c", horovod_ssh.guarded(command, GRACE_S)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    )
    try:
        yield process
    finally:
        assert process.stdin
        assert process.stdout
        process.stdin.close()
        process.wait(DEADLINE_S)
        process.stdout.close()


def first_pid(process: subprocess.Popen[str]) -> int:
    assert process.stdout
    return int(process.stdout.readline().split()[1])


def wait_until_gone(pid: int) -> None:
    def gone() -> bool:
        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    eventually(gone, f"process {pid} is gone")


@pytest.mark.parametrize(
    ("command", "code"), [("exit 0", 0), ("exit 42", 42), ("kill -9 $$", 137), ("nothing-here", 127)]
)
def test_a_guarded_command_keeps_its_exit_code(command: str, code: int) -> None:
    with guarded(command) as process:
        assert process.wait(DEADLINE_S) == code


def test_a_guarded_command_keeps_its_words() -> None:
    with guarded("""printf '%s|' "a b" 'c'"'"'d' "$HOME_OF_NOBODY" """) as process:
        process.wait(DEADLINE_S)
        assert process.stdout
        assert process.stdout.read() == "a b|c'd||"


def test_a_signal_written_to_it_reaches_the_command() -> None:
    with guarded(TELLS) as process:
        first_pid(process)
        assert process.stdin
        process.stdin.write("TERM\n")
        assert process.wait(DEADLINE_S) == 3
        assert process.stdout
        assert process.stdout.read() == "told\n"


def test_a_signal_is_for_the_rank_below_its_shells_and_not_for_what_it_has_started() -> None:
    with guarded(f"true; {shlex.quote(sys.executable)} -c {shlex.quote(WITH_LOADER)}; exit $?") as process:
        first_pid(process)
        assert process.stdin
        process.stdin.write("TERM\n")
        process.wait(DEADLINE_S)
        assert process.stdout
        assert process.stdout.read() == "loader None\n"


@pytest.mark.parametrize("command", [TELLS, DEAF, f"sh -c {shlex.quote(DEAF)}; true"])
def test_what_it_runs_ends_with_the_connection(command: str) -> None:
    with guarded(command) as process:
        pid = first_pid(process)
        assert process.stdin
        process.stdin.close()
        wait_until_gone(pid)


def test_what_a_command_leaves_behind_ends_with_it(tmp_path: Path) -> None:
    told = shlex.quote(str(tmp_path / "told"))
    deaf = DEAF.replace("while", f"touch {told}; while")
    with guarded(f"sh -c {shlex.quote(deaf)} & until [ -e {told} ]; do sleep 0.02; done") as process:
        pid = first_pid(process)
        assert process.wait(DEADLINE_S) == 0
        wait_until_gone(pid)


def test_without_setsid_it_runs_as_it_would_without_a_guard(tmp_path: Path) -> None:
    (tmp_path / "sh").symlink_to("/bin/sh")
    ended = subprocess.run(
        ["/bin/sh", "-c", horovod_ssh.guarded("echo $((20 + 22))", GRACE_S)],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
    )
    assert (ended.returncode, ended.stdout) == (0, "42\n")


@pytest.mark.parametrize(
    ("line", "options", "host", "command"),
    [
        ("-o A=b -o C=d h -p 22 -i /k -o E=5 true", "-o A=b -o C=d -p 22 -i /k -o E=5", "h", "true"),
        ("-x h orted -mca a b", "-x", "h", "orted -mca a b"),
        ("-p22 -v h -tt cd / ; env A=1 x -y", "-p22 -v -tt", "h", "cd / ; env A=1 x -y"),
        ("-V", "-V", "", ""),
        ("-- h -x", "", "h", "-x"),
    ],
)
def test_sshs_arguments_are_told_apart_as_ssh_does(line: str, options: str, host: str, command: str) -> None:
    words = [word for word in line.split(" ") if word]
    assert horovod_ssh.split(words) == (options.split(), host, command.split())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A launcher's folder; `ssh` there shows its arguments and the first word it is sent."""
    told = tmp_path / "a folder"
    (told / "sessions").mkdir(parents=True)
    ssh = told / "fake-ssh"
    ssh.write_text('#!/bin/sh\nprintf "%s\\n" "$@" >"$0.args"; echo up; read -r name; echo "got $name"\n')
    ssh.chmod(0o755)
    (told / "ssh.json").write_text(f'{{"ssh": ["{ssh}", "-F", "cfg"], "grace_s": 7.4}}')
    return told


def test_a_session_takes_signals_from_a_pipe_named_for_its_rank(folder: Path) -> None:
    line = "cd / ; env HOROVOD_RANK=5 HOROVOD_LOCAL_RANK=1 python t.py"
    shim = subprocess.Popen(
        [sys.executable, "-I", "-S", SHIM, folder, "-o", "X=y", "w-0", "-p", "22", line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert shim.stdout
    assert shim.stdout.readline() == "up\n"
    [pipe] = (folder / "sessions").iterdir()
    assert pipe.name == f"w-0.1.{shim.pid}"
    descriptor = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    os.write(descriptor, b"USR1\n")
    os.close(descriptor)
    assert shim.communicate(timeout=DEADLINE_S)[0] == "got USR1\n"
    args = (folder / "fake-ssh.args").read_text()
    assert args.startswith("-F\ncfg\n-o\nX=y\n-p\n22\n--\nw-0\nexec sh -c ")
    assert "left=7\n" in args


def test_nothing_is_started_any_more_once_the_job_is_asked_to_stop(folder: Path) -> None:
    (folder / "stopping").touch()
    ended = subprocess.run([sys.executable, "-I", "-S", SHIM, folder, "h", "true"], timeout=DEADLINE_S)
    assert ended.returncode == 128 + signal.SIGTERM
    assert not (folder / "fake-ssh.args").exists()


# -- the launcher's side ----------------------------------------------------------------------


@contextmanager
def session(made: Sessions, host: str, local_rank: int) -> Iterator[subprocess.Popen[str]]:
    """A rank on another host, by an `ssh` that is a shell here."""
    line = f"HOROVOD_LOCAL_RANK={local_rank}; {TELLS}"
    process = subprocess.Popen(
        ["ssh", "-o", "A=b", host, line],
        env={**os.environ, "PATH": f"{made.bin}:{os.environ['PATH']}"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait(DEADLINE_S)
        assert process.stdout
        process.stdout.close()


@pytest.fixture
def made(tmp_path: Path) -> Sessions:
    """A folder of sessions; the real ssh is one that runs the last of its arguments here."""
    ssh = tmp_path / "real-ssh"
    ssh.write_text('#!/bin/sh\nfor last; do :; done; exec sh -c "$last"\n')
    ssh.chmod(0o755)
    return Sessions(str(tmp_path / "a folder"), (str(ssh),), sys.executable, GRACE_S)


def test_a_signal_reaches_every_session(made: Sessions) -> None:
    with session(made, "w-0", 0) as one, session(made, "w-1", 0) as other:
        first_pid(one), first_pid(other)
        assert made.tell("TERM", below=os.getpid()) == 2
        assert (one.wait(DEADLINE_S), other.wait(DEADLINE_S)) == (3, 3)


def test_a_host_whose_session_has_ended_is_told_once(made: Sessions) -> None:
    with session(made, "w-0", 0) as one, session(made, "w-1", 1) as other:
        pids = (first_pid(one), first_pid(other))
        assert made.lost() == ()
        other.kill()
        other.wait(DEADLINE_S)
        assert made.lost() == ("w-1",)
        assert made.lost() == ()
        for pid in pids:  # killing this ssh cuts no connection
            os.kill(pid, signal.SIGKILL)


def test_ranks_on_the_launchers_own_host_hear_signals_too(made: Sessions) -> None:
    rank = subprocess.Popen(
        ["sh", "-c", f"HOROVOD_RANK=0 sh -c {shlex.quote(TELLS)}; exit $?"], stdout=subprocess.PIPE, text=True
    )
    try:
        first_pid(rank)
        assert made.tell("TERM", below=os.getpid()) == 1
        assert rank.wait(DEADLINE_S) == 3
    finally:
        rank.kill()
        rank.wait(DEADLINE_S)
        assert rank.stdout
        rank.stdout.close()
