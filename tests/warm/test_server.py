"""The fork-server proves that it can be forked from, is renewed when files change, and is never in the way."""

from __future__ import annotations

import importlib.util
import os
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.cli.launching import launch, script, start
from tests.conftest import require
from tests.warm.forks import Forks
from trainer_launch.child.server import Server, ServerError

pytestmark = [pytest.mark.torch, pytest.mark.process]


@pytest.fixture(autouse=True)
def need_torch() -> None:
    require(importlib.util.find_spec("torch") is not None, "torch is not installed")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(9,), name='busy', daemon=True).start()",
         "an import started threads, which a fork does not copy (busy)"),
        ("import torch\ntorch.cuda.is_initialized = lambda: True",
         "an import initialised CUDA, which does not survive a fork"),
        ("import no_such_thing",
         "importing mine failed (ModuleNotFoundError: No module named 'no_such_thing')"),
        ("raise SystemExit(3)", "importing mine failed (SystemExit: 3)"),
        ("import numpy\nnumpy.dot(numpy.ones((500, 500)), numpy.ones((500, 500)))", None),
    ],
)  # fmt: skip
def test_the_server_tells_why_it_cannot_be_forked_from(tmp_path: Path, text: str, reason: str | None) -> None:
    (tmp_path / "mine.py").write_text(text)
    forks = Forks(tmp_path, preload=["mine"])
    try:
        assert forks.reason == reason
        assert not list(tmp_path.rglob("warm.*")), "what it has told is read, and stays nowhere"
        if reason:
            assert forks.run(tmp_path, script(tmp_path, "print('ran anyway')")).out == "ran anyway\n"
    finally:
        forks.close()


def run(folder: Path, text: str, *options: str) -> tuple[int, str, str]:
    ended = launch("run", "--nproc-per-node", "2", *options, "--", script(folder, text), cwd=folder)
    return ended.returncode, ended.stdout, ended.stderr


TRAINED = "print('trained\\n', end='')"  # at once: the other worker writes as well


def test_workers_start_the_ordinary_way_when_the_server_cannot_serve(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import no_such_thing")
    code, out, err = run(tmp_path, TRAINED, "--preload", "mine")
    assert (code, out) == (0, "trained\n" * 2), err
    assert err.count("workers start without the fork server: importing mine failed") == 1
    code, _, err = run(tmp_path, TRAINED, "--preload", "mine", "--start-method", "forkserver")
    assert code == 2
    assert "--start-method is forkserver, but importing mine failed" in err


RENEWED = """
import os, subprocess, sys, time
import mine
first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
if first and os.environ["RANK"] == "1":
    # Twice forked, in a session of its own: nobody's child but the subreaper's.
    subprocess.run([sys.executable, "-c", '''
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open("left", "w").write(str(os.getpid()))
        time.sleep(99)
'''])
    while not os.path.exists("left") or not open("left").read():
        time.sleep(0.01)
    open("mine.py", "w").write("value = 'second edition'\\n")
    sys.exit(9)
if first:
    time.sleep(60)
what = "left" if os.path.exists(f"/proc/{open('left').read()}") else "gone"
print(f"{mine.value} {what}\\n", end="")  # at once: the other worker writes as well
"""


def test_a_restart_finds_edited_modules_and_nothing_of_the_attempt_before(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("value = 'first'\n")
    code, out, err = run(tmp_path, RENEWED, "--preload", "mine")
    assert (code, out) == (0, "second edition gone\n" * 2), err
    assert "mine.py has changed" in err


def test_a_server_that_cannot_be_started_is_an_error_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where no folder may be written; the agent then starts workers the ordinary way."""

    def refuse() -> None:
        raise FileNotFoundError("No usable temporary directory")

    monkeypatch.setattr(forkserver, "ensure_running", refuse)
    server = Server({"script": "train.py", "preload": [], "required": False}, str(tmp_path))
    with pytest.raises(ServerError, match="No usable temporary directory"):
        server.start()
    assert server.reason is None
    assert "TRAINER_LAUNCH_FORKSERVER" not in os.environ


DIES = """
import os, time
line = f"ready {os.environ['TORCHELASTIC_RESTART_COUNT']} {os.getpid()}\\n"
print(line, end="", flush=True)  # at once: the other worker writes as well
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    time.sleep(60)
"""


def test_a_killed_server_costs_the_job_one_restart(tmp_path: Path) -> None:
    import psutil

    words = ("run", "--nproc-per-node", "2", "--", script(tmp_path, DIES))
    with start(*words, cwd=tmp_path) as launcher:
        pids = launcher.read_until(r"ready 0 (\d+)", times=2)
        below = psutil.Process(launcher.pid).children(recursive=True)
        before = [process for process in below if str(process.pid) in pids]
        servers = [process for process in below if process.pid == before[0].parent().parent().pid]  # type: ignore[union-attr]
        servers[0].kill()
        launcher.read_until("ready 1", times=2)
        code, output = launcher.end()
    assert code == 0, output
    assert "the fork server exited" in output
    assert not [process for process in before if process.is_running()]


def test_what_python_said_last_is_in_the_last_words_without_prefix(tmp_path: Path) -> None:
    words = tmp_path / "words"
    code, _, err = run(
        tmp_path, "raise ValueError('no luck')", "--max-restarts", "0", "--termination-log", str(words)
    )
    assert code == 1, err
    assert "ValueError: no luck" in words.read_text()
