"""What PID 1 owes its container, with real processes and real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.process.world import ROOT, Launcher, end_all, require_namespaces, survivors, worker
from tests.waiting import eventually
from trainer_launch.host import process_tree
from trainer_launch.model.signal_policy import RELAYED, STOP_SIGNALS

pytestmark = pytest.mark.process
MANY = Path(__file__).with_name("many.py")


@pytest.mark.long("tests/process/test_promises.py")
def test_no_survivor_in_100_trials():
    token = uuid.uuid4().hex
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TOKEN": token}
    try:
        done = subprocess.run([sys.executable, str(MANY), "100"], env=env, stdout=subprocess.PIPE, timeout=120)
    finally:
        end_all(token)
    assert json.loads(done.stdout) == [[0, 0]] * 100


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["sh", "-c", "exit 42"], 42),
        (["sh", "-c", "exit 255"], 255),
        (["/no/such"], 127),
        (["/etc/passwd"], 126),
        (["sh", "-c", "kill -9 $$"], 137),
        (["sh", "-c", "kill -64 $$"], 192),
    ],
)
def test_the_launcher_itself_ends_so(tmp_path, wrap, argv, code):
    with Launcher(tmp_path, argv, wrap=wrap) as launcher:
        assert launcher.wait() == code


def test_every_other_signal_is_relayed(tmp_path, wrap):
    with Launcher(tmp_path, worker("catch", "note:ready", "rest"), wrap=wrap) as launcher:
        launcher.await_note("ready")
        for number in sorted(RELAYED):
            launcher.send(number)
            launcher.await_note(f"got {int(number)}")
        assert launcher.notes() == ["ready", *[f"got {int(number)}" for number in sorted(RELAYED)]]


@pytest.mark.parametrize("number", sorted(STOP_SIGNALS))
def test_asked_to_stop_by(tmp_path, wrap, number):
    with Launcher(tmp_path, worker("save:0:0", "note:ready", "rest"), wrap=wrap) as launcher:
        launcher.await_note("ready")
        launcher.send(number)
        is_ctrl_c = number == signal.SIGINT
        assert launcher.wait() == (130 if is_ctrl_c else 143)
        assert launcher.notes() == ["ready", "int" if is_ctrl_c else "term", "saved"]


def test_an_orphan_is_reaped(tmp_path, wrap):
    words = ("fork:detach+note:orphan", "note:ready", "rest")
    with Launcher(tmp_path, worker(*words), wrap=wrap) as launcher:
        launcher.await_note("orphan")
        launcher.await_note("ready")
        # the worker's own zombie child is the worker's to reap; nothing else may be left
        eventually(lambda: len(survivors(launcher.token)) == (3 if wrap else 2), "only launcher and worker")
        eventually(lambda: zombies_of(launcher.pid) == [], "no zombie of the launcher")


def zombies_of(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [entry.pid for child in children if (entry := process_tree.read(int(child))) and entry.state == "Z"]


def test_the_leader_is_asked_first_and_its_loaders_live_until_it_has_saved(tmp_path, wrap):
    loader = "fork:save:0:0+note:loader+rest"
    with Launcher(tmp_path, worker(loader, "save:0.3:0", "note:ready", "rest"), wrap=wrap) as launcher:
        launcher.await_note("loader")
        launcher.await_note("ready")
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 143
        assert launcher.notes()[2:4] == ["term", "saved"]
        assert launcher.notes()[4:] == ["term", "saved"]  # the loader, afterwards


@pytest.mark.parametrize("signals", ["", "TERM=drain"], ids=["a request", "a drain"])
def test_a_suspended_worker_hears_a_request_and_a_drain(tmp_path, signals):
    with Launcher(tmp_path, worker("save:0:0", "note:ready", "die:19"), signals=signals) as launcher:
        launcher.await_note("ready")
        launcher.await_log("started")
        pid = int(launcher.log().rpartition(" ")[2])
        eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T", "suspended")
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 143
        assert "saved" in launcher.notes()


def test_children_inherit_what_is_ignored_and_blocked_but_no_blocked_request_to_stop(tmp_path, wrap):
    block = (
        "import signal, os, sys; signal.pthread_sigmask(0, [15, 10]);"
        "[signal.signal(number, signal.SIG_IGN) for number in (2, 12)];"
        "os.execvp(sys.argv[1], sys.argv[1:])"
    )
    blocked = (sys.executable, "-c", block)
    with Launcher(tmp_path, worker("inherited"), wrap=(*wrap, *blocked)) as launcher:
        assert launcher.wait() == 0
        # a Python child ignores SIGPIPE and SIGXFSZ by itself
        numbers = (signal.SIGINT, signal.SIGUSR2, signal.SIGPIPE, signal.SIGXFSZ)
        ignored = sum(1 << (number - 1) for number in numbers)
        assert launcher.notes() == [f"mask {1 << (signal.SIGUSR1 - 1)} ignored {ignored}", "session True"]


def test_a_termination_message_goes_into_a_bind_mount(tmp_path):
    require_namespaces()
    mounted, behind = tmp_path / "log", tmp_path / "behind"
    mounted.touch()
    behind.write_text("old " * 1000)
    mount = ("unshare", "-m", "sh", "-c", f'mount --bind {behind} {mounted} && exec "$@"', "sh")
    with Launcher(tmp_path, ["sh", "-c", "exit 3"], wrap=mount, last_words=str(mounted)) as launcher:
        assert launcher.wait() == 3
    assert behind.read_text().startswith("reason=Failed exit=3")
    assert "old" not in behind.read_text()


def test_a_checkpoint_signal_reaches_the_worker_and_ends_nothing(tmp_path):
    with Launcher(tmp_path, worker("catch", "note:ready", "rest"), signals="USR1=checkpoint,TERM=forward") as it:
        it.await_note("ready")
        it.send(signal.SIGUSR1)
        it.await_note(f"got {int(signal.SIGUSR1)}")
        it.await_log("SIGUSR1: the workers were told to save and continue")
        it.send(signal.SIGTERM)
        it.await_note(f"got {int(signal.SIGTERM)}")
        it.send(signal.SIGINT)  # still a request to stop
        it.await_note(f"got {int(signal.SIGTERM)}", count=2)


@pytest.mark.parametrize("code", [0, 7])
def test_a_drain_lets_the_worker_end_in_its_own_time_and_is_a_stop(tmp_path, wrap, code):
    with Launcher(
        tmp_path, worker(f"save:0.3:{code}", "note:ready", "rest"), wrap=wrap, signals="TERM=drain"
    ) as it:
        it.await_note("ready")
        it.send(signal.SIGTERM)
        assert it.wait() == 143
        assert it.notes() == ["ready", "term", "saved"]
        assert "no more restarts" in it.log()
        assert survivors(it.token) == []


def test_who_dies_of_a_signal_that_we_handed_on_is_told_so(tmp_path):
    words = tmp_path / "words"
    words.touch()
    with Launcher(tmp_path, worker("note:ready", "rest"), last_words=str(words)) as launcher:
        launcher.await_note("ready")
        launcher.send(signal.SIGUSR1)
        assert launcher.wait() == 128 + signal.SIGUSR1
    assert "the launcher received this signal and forwarded it" in words.read_text()


def test_a_stop_in_the_instant_of_the_start(tmp_path, wrap):
    with Launcher(tmp_path, worker("rest"), wrap=wrap) as launcher:
        launcher.await_log("started main")
        launcher.send(signal.SIGTERM)
        assert launcher.wait() == 143
        assert survivors(launcher.token) == []
