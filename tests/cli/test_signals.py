"""--signals in a torch job: to each worker, exactly once; and a request that comes too late."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.launching import clean_env, launch, script, start

TRAIN = """
import os, signal, sys, time
rank = os.environ["RANK"]
left = []
signal.signal(signal.SIGUSR1, lambda *_: print("saved", rank, flush=True))
signal.signal(signal.SIGTERM, lambda *_: (print("last", rank, flush=True), left.append(1)))
print("ready %s\\n" % rank, end="", flush=True)
while not left:
    time.sleep(0.05)
time.sleep(0.5)
print("leaves %s\\n" % rank, end="", flush=True)
sys.exit(int(rank))  # rank 1 does not even succeed
"""


@pytest.mark.torch
@pytest.mark.process
def test_a_checkpoint_and_then_a_drain_reach_each_worker_once(tmp_path: Path) -> None:
    options = ("--nproc-per-node", "2", "--prefix", "--signals", "USR1=checkpoint,TERM=drain", "--grace", "1")
    with start("run", *options, "--", script(tmp_path, TRAIN)) as launcher:
        launcher.read_until("ready", times=2)
        launcher.signal(signal.SIGUSR1)
        launcher.read_until("saved", times=2)
        launcher.signal(signal.SIGTERM)
        output = launcher.ends_with(143)
    for word in ("saved", "last", "leaves"):
        assert sorted(line.split("] ")[1] for line in output.splitlines() if f"] {word} " in line) == [
            f"{word} 0",
            f"{word} 1",
        ], output
    assert output.count("ready") == 2, "nothing was started again"


DEAF_ONCE = """
import os, signal, time
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
print("ready\\n", end="", flush=True)
while len(told) < 2:
    time.sleep(0.05)
print("saved\\n", end="", flush=True)
"""


@pytest.mark.torch
@pytest.mark.process
def test_who_leaves_only_when_it_is_asked_again_was_stopped_like_the_others(tmp_path: Path) -> None:
    """The second SIGTERM goes to all at once: their ends and the news that nobody is left come together."""
    with start("run", "--nproc-per-node", "2", "--grace", "2", "--", script(tmp_path, DEAF_ONCE)) as launcher:
        launcher.read_until("ready", times=2)
        launcher.signal(signal.SIGTERM)
        output = launcher.ends_with(143)
    assert output.count("saved") == 2, output
    assert "cannot take" not in output, output


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.parametrize(
    "options",
    [
        ("run", "--nproc-per-node", "2", "--prefix", "--start-method", "auto", "--grace", "1"),
        ("local", "--nodes", "2", "--nproc-per-node", "1"),
    ],
    ids=["forked", "of another node"],
)
def test_in_a_drain_no_worker_ends_because_another_has_died(tmp_path: Path, options: tuple[str, ...]) -> None:
    dying = TRAIN.replace(
        'print("ready', 'rank == "0" or signal.signal(signal.SIGTERM, signal.SIG_DFL)\nprint("ready'
    )
    train = script(tmp_path, dying.replace("sleep(0.5)", "sleep(3)"))
    with start(*options, "--signals", "TERM=drain", "--", train) as launcher:
        launcher.read_until("ready", times=2)
        launcher.signal(signal.SIGTERM)
        output = launcher.ends_with(143)
    assert "rank 1 ended with signal SIGTERM" in output
    assert ("last 0" in output, output.count("leaves 0")) == (True, 1), output


def test_explain_shows_what_each_signal_is_for() -> None:
    shown = launch("explain", "--signals", "USR1=checkpoint,TERM=drain", "--", "sleep", "1").stdout
    assert "HUP terminate, INT terminate, QUIT terminate, USR1 checkpoint, TERM drain, all others forward" in shown


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_the_interpreter_ends_does_not_change_the_exit_code(number: signal.Signals) -> None:
    program = f"""
import atexit, os, sys
from trainer_launch.cli import main
atexit.register(os.kill, os.getpid(), {int(number)})
sys.argv = ["trainer-launch", "explain", "--", "true"]
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], env=clean_env(), timeout=60, capture_output=True)
    assert ended.returncode == 0


@pytest.mark.parametrize("action", ["drain", "terminate"])
def test_a_signal_that_a_user_chose_stops_a_launcher_that_has_started_nothing_yet(action: str) -> None:
    program = f"""
import os, signal, sys
from trainer_launch.cli import main
from trainer_launch.commands import run
run._fork_server = lambda plan: os.kill(os.getpid(), signal.SIGUSR2)
sys.argv = ["trainer-launch", "run", "--signals", "USR2={action}", "--", "echo", "started"]
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], env=clean_env(), timeout=60, capture_output=True)
    assert (ended.returncode, ended.stdout) == (143, b"")


SHOWS = """
import re, signal
with open("/proc/self/status") as file:
    status = dict(re.findall(r"(Sig\\w+):\\s+(\\w+)", file.read()))
def names(word):
    bits = int(status[word], 16)
    numbers = signal.valid_signals() - {signal.SIGPIPE, signal.SIGXFSZ}
    return sorted(number.name for number in numbers if number in [*signal.Signals] and bits >> number - 1 & 1)
print("blocked", *names("SigBlk"), "ignored", *names("SigIgn"), flush=True)
"""
STARTS = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, *map(int, sys.argv[1].split(","))})
for number in (signal.SIGUSR2, signal.SIGWINCH, signal.SIGINT):
    signal.signal(number, signal.SIG_IGN)
os.execvp(sys.argv[2], sys.argv[2:])
"""
RUN = (sys.executable, "-m", "trainer_launch", "run", "--start-method")
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


def shown(folder: Path, *launcher: str, blocked: str = "12") -> str:
    """What a worker finds."""
    words = ("--nproc-per-node=1", script(folder, SHOWS))
    argv = (sys.executable, "-c", STARTS, blocked, *launcher, *words)
    ended = subprocess.run(argv, env=clean_env(), capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    found = re.findall(r"blocked.*", ended.stdout)
    assert len(found) == 1, ended.stdout
    return str(found[0])


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.parametrize("method", ["auto", "exec"])
def test_a_worker_finds_what_it_finds_under_torchrun(tmp_path: Path, method: str) -> None:
    theirs = shown(tmp_path, *TORCHRUN)
    assert theirs == "blocked SIGUSR1 SIGUSR2 ignored SIGUSR2 SIGWINCH"
    # A shell's `&` has SIGINT ignored, which torchrun undoes: Ctrl-C for another program would end its workers.
    ours = shown(tmp_path, *RUN, method, "--", "torchrun")
    assert ours.replace(" SIGINT", "") == theirs


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.parametrize("method", ["auto", "exec"])
def test_a_request_to_stop_reaches_a_worker_whatever_was_blocked(tmp_path: Path, method: str) -> None:
    ours = shown(tmp_path, *RUN, method, "--", "torchrun", blocked="15,2,17")
    assert ours == "blocked SIGUSR1 ignored SIGINT SIGUSR2 SIGWINCH"
