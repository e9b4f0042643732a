"""The fork server proves that it can be forked, serves, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import create_autospec

import psutil
import pytest

from tests.ports import free_port
from tests.pytorch.forks import PYTHON, Forks, are_gone
from tests.waiting import eventually
from trainer_launch.model import Workers, exit_codes
from trainer_launch.model.errors import NodeError
from trainer_launch.pytorch import fork_server_process
from trainer_launch.pytorch.fork_server import Starter
from trainer_launch.supervisor.system import System

pytestmark = [pytest.mark.torch, pytest.mark.process]

Make = Callable[..., Forks]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Forks] = []

    def make_one(**settings: Any) -> Forks:
        made.append(Forks(tmp_path, **settings))
        return made[-1]

    try:
        yield make_one
    finally:
        for forks in made:
            forks.close()


def script(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


# -- the proof --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import threading, time\nthreading.Thread(target=time.sleep, args=(9,), daemon=True).start()",
         "an import started threads, which a fork does not copy"),
        ("import torch\ntorch.cuda.is_initialized = lambda: True",
         "an import initialised CUDA, which does not survive a fork"),
        ("import no_such_thing",
         "importing mine failed (ModuleNotFoundError: No module named 'no_such_thing')"),
        ("raise SystemExit(3)", "importing mine failed (SystemExit: 3)"),
        ("import numpy\nnumpy.dot(numpy.ones((500, 500)), numpy.ones((500, 500)))", None),
    ],
)  # fmt: skip
def test_the_server_tells_why_workers_cannot_be_forked_from_it(
    make: Make, tmp_path: Path, text: str, reason: str | None
) -> None:
    (tmp_path / "mine.py").write_text(text)
    forks = make(preload=["mine"])
    assert forks.reason == reason
    if reason:
        assert forks.ask("store", ports=None)["parent"] == forks.pid, "it still opens stores"


def test_a_server_that_ends_in_its_imports_is_an_error(make: Make, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import os\nos._exit(0)")
    assert make(preload=["mine"]).reason == "the fork server exited"


def test_modules_of_the_users_working_directory_are_not_taken_for_pythons_own(make: Make, tmp_path: Path) -> None:
    """The server is started there; the script, which lies elsewhere, would not find them either."""
    for name in ("socket", "ctypes", "json", "trainer_launch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('taken from the working directory')")
    (tmp_path / "job").mkdir()
    forks = make(script="job/train.py")
    assert forks.reason is None
    assert forks.run(tmp_path, script(tmp_path / "job", "print('ran')")).out == "ran\n"


def test_a_file_beside_the_script_that_has_the_name_of_an_imported_module_is_the_reason(
    make: Make, tmp_path: Path
) -> None:
    """The program would import this file: it needs an interpreter of its own."""
    (tmp_path / "json.py").write_text("print('imported')")
    forks = make()
    assert forks.reason == f"{tmp_path}/json.py has the name of a module that the fork server has imported"
    assert forks.ask("store", ports=None)["parent"] == forks.pid, "it still opens stores"


@pytest.mark.parametrize(
    ("name", "is_shadow"),
    [
        *((name, True) for name in ("json.py", "logging/__init__.py", "_json.cpython-311-x86_64-linux-gnu.so")),
        # Nothing here imports `mine`, a folder without `__init__.py` comes last, and `sys` is built in.
        *((name, False) for name in ("mine.py", "json.txt", "logging/main.py", "sys.py")),
    ],
)
def test_only_a_file_that_takes_the_place_of_an_imported_module_is_one(
    name: str, is_shadow: bool, tmp_path: Path
) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).touch()
    assert (fork_server_process.shadowed(str(tmp_path)) is not None) == is_shadow


def test_what_is_preloaded_stays_imported(make: Make, tmp_path: Path) -> None:
    path = script(tmp_path, "import sys\nprint('multiprocessing.pool' in sys.modules, 'torch' in sys.modules)")
    assert make(preload=["multiprocessing.pool"]).run(tmp_path, path).out == "True False\n"


# -- workers ----------------------------------------------------------------------------------


def test_workers_are_children_of_the_launcher(make: Make, tmp_path: Path) -> None:
    forks = make()
    path = script(tmp_path, "import os\nprint(os.getppid(), os.environ['RANK'])\nos._exit(int(os.environ['RANK']))")
    workers = [
        {"environment": {"RANK": str(rank)}, "out": f"{tmp_path}/out.{rank}", "err": f"{tmp_path}/err.{rank}"}
        for rank in range(32)
    ]
    answer = forks.ask("fork", argv=[*PYTHON, path], workers=workers, cwd=str(tmp_path))
    assert set(answer["parents"]) == {forks.pid}
    assert forks.hear()["codes"] == list(range(32))
    said = [(tmp_path / f"out.{rank}").read_text() for rank in range(32)]
    assert said == [f"{forks.pid} {rank}\n" for rank in range(32)]
    assert not psutil.Process(forks.server).children(), "no process between is left"


def test_a_worker_names_the_working_directory_that_is_gone(make: Make, tmp_path: Path) -> None:
    forks = make()
    worker = {"err": f"{tmp_path}/err"}
    assert "error" not in forks.ask("fork", argv=[*PYTHON, "x.py"], workers=[worker], cwd=f"{tmp_path}/gone")
    assert forks.hear()["codes"] == [exit_codes.NOT_FOUND]
    assert f"No such file or directory: '{tmp_path}/gone'" in (tmp_path / "err").read_text()


def test_a_signal_right_after_the_fork_is_not_lost(make: Make, tmp_path: Path) -> None:
    forks = make()
    path = script(tmp_path, "import time\ntime.sleep(60)")
    for _ in range(10):
        pids = forks.start(tmp_path, path, count=2)
        for pid in pids:
            os.kill(pid, signal.SIGTERM)
        assert forks.ask("reap", pids=pids)["codes"] == [-signal.SIGTERM] * 2


def test_a_worker_shows_its_stacks_on_a_signal(make: Make, tmp_path: Path) -> None:
    forks = make()
    path = script(tmp_path, "import time\ndef waits():\n    print('up'); time.sleep(60)\nwaits()")
    worker = {"stacks": f"{tmp_path}/stacks", "out": f"{tmp_path}/out"}
    pids = forks.ask("fork", argv=[*PYTHON, path], workers=[worker], cwd=str(tmp_path), wait=False)["pids"]
    eventually((tmp_path / "out").read_text, "the worker runs")
    os.kill(pids[0], signal.SIGRTMAX - 1)
    line = f'File "{path}", line 3 in waits'
    eventually(lambda: line in (tmp_path / "stacks").read_text(), "stacks are written")
    os.kill(pids[0], signal.SIGKILL)
    assert forks.ask("reap", pids=pids)["codes"] == [-signal.SIGKILL]


ENDS = """
import faulthandler, os, signal
faulthandler.unregister(signal.SIGRTMAX - 1)  # as the interpreter does
os.kill(os.getpid(), signal.SIGRTMAX - 1)
"""


def test_a_request_for_stacks_while_the_interpreter_ends_kills_no_worker(make: Make, tmp_path: Path) -> None:
    forks, path = make(), script(tmp_path, ENDS)
    forks.ask("fork", argv=[*PYTHON, path], workers=[{"stacks": f"{tmp_path}/stacks"}], cwd=str(tmp_path))
    assert forks.hear()["codes"] == [0]


REFUSES = """
import os
calls, fork = 0, os.fork

def few():
    global calls
    calls += 1
    if calls > 4:  # the proof, the process between, two workers
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()

os.fork = few
"""


def test_a_fork_that_fails_half_way_starts_no_worker(make: Make, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REFUSES)
    forks = make(preload=["mine"])
    path = script(tmp_path, "open('ran', 'w')")
    answer = forks.ask("fork", argv=[*PYTHON, path], workers=[{}] * 4, cwd=str(tmp_path))
    assert answer["error"] == "a process could not be forked ([Errno 11] Resource temporarily unavailable)"
    running = {forks.server}
    eventually(
        lambda: {p.pid for p in psutil.Process(forks.pid).children() if p.status() != "zombie"} == running,
        "the two that were forked have exited",
    )
    assert not (tmp_path / "ran").exists()


DIES = """
import os, signal
waitpid, proof = os.waitpid, []

def die(*words):
    result = waitpid(*words)
    if proof:
        os.kill(os.getpid(), signal.SIGKILL)
    proof.append(True)
    return result

os.waitpid = die
"""


def test_a_server_that_dies_between_fork_and_answer_starts_no_worker(make: Make, tmp_path: Path) -> None:
    """The launcher does not know these processes: they must not run the program beside the next ones."""
    (tmp_path / "mine.py").write_text(DIES)
    forks = make(preload=["mine"])
    path = script(tmp_path, "open('ran', 'w')")
    answer = forks.ask("fork", argv=[*PYTHON, path], workers=[{}] * 3, cwd=str(tmp_path))
    assert answer["error"] == "the fork server exited"
    eventually(lambda: all(p.status() == "zombie" for p in psutil.Process(forks.pid).children()), "they exit")
    assert not (tmp_path / "ran").exists()


# -- stores -----------------------------------------------------------------------------------


def is_reachable(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_store_is_a_process_of_its_own_that_outlives_the_server(make: Make, tmp_path: Path) -> None:
    from torch.distributed import TCPStore

    forks = make(script=None)
    store = forks.ask("store", ports=None)
    assert store["parent"] == forks.pid
    assert forks.ask("close")["code"] == -signal.SIGKILL
    os.kill(store["pid"], signal.SIGTERM)  # for the workers: the launcher ends it after them
    client = TCPStore("127.0.0.1", store["port"], is_master=False)
    client.set("a", "b")
    assert client.get("a") == b"b"
    os.kill(store["pid"], signal.SIGKILL)
    assert forks.ask("reap", pids=[store["pid"]])["codes"] == [-signal.SIGKILL]


# What a TCPStore's client says first, VALIDATE, and a question that every torch's store answers: ADD 0 to "k".
_GREETING = struct.pack("=BIBQsq", 0, 0x3C85F7CE, 4, 1, b"k", 0)


def test_a_store_takes_all_ranks_at_once_without_asking_who_they_are(make: Make, tmp_path: Path) -> None:
    """Where no name server answers, torch's own store takes 0.1 s and more for each rank, one after the other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))  # fewer than ranks
    try:
        forks = make(script=None)
        port = forks.ask("store", ports=None)["port"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with contextlib.ExitStack() as ranks:
        socks = [ranks.enter_context(socket.create_connection(("127.0.0.1", port), 10)) for _ in range(500)]
        for sock in socks:
            sock.sendall(_GREETING)
        began_s = time.monotonic()
        assert all(sock.recv(8) == _GREETING[-8:] for sock in socks)
        assert time.monotonic() - began_s < 30  # 500 ranks of 0.1 s would take 50


def test_a_store_keeps_to_the_port_range(make: Make, tmp_path: Path) -> None:
    forks = make(script=None)
    with socket.create_server(("", 0)) as taken:
        low = taken.getsockname()[1]
        assert forks.ask("store", ports=[low, low])["error"].endswith(f"port {low} is taken on this node)")
    port = free_port()
    assert forks.ask("store", ports=[port, port])["port"] == port
    assert is_reachable(port)


# -- its end, and the launcher's --------------------------------------------------------------


def test_a_server_that_is_killed_is_noticed_and_another_one_serves(make: Make, tmp_path: Path) -> None:
    forks = make()
    path = script(tmp_path, "import time\ntime.sleep(60)")
    pids = forks.start(tmp_path, path)
    forks.ask("kill", pid=forks.server)
    assert forks.ask("answer")["error"] == "the fork server exited"
    assert "fork server" in forks.ask("fork", argv=[*PYTHON, path], workers=[{}], cwd=str(tmp_path))["error"]
    assert not are_gone(pids), "workers go on"
    forks.server = forks.ask("renew")["pid"]
    assert forks.run(tmp_path, script(tmp_path, "import os\nos._exit(5)")).code == 5
    os.kill(pids[0], signal.SIGKILL)


def test_signals_for_the_workers_do_not_end_the_server(make: Make) -> None:
    forks = make(script=None)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1):
        os.kill(forks.server, number)
    assert os.getsid(forks.server) == forks.server, "a terminal's Ctrl-C does not reach it"
    assert is_reachable(forks.ask("store", ports=None)["port"])


# -- a server that cannot be started ------------------------------------------------------------


Starting = Callable[..., Starter]


@pytest.fixture
def starting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Starting]:
    """Makes a starter whose server exits at once; the words tell which attempts to start one are refused."""
    started: list[subprocess.Popen[bytes]] = []

    def make_one(words: str, *, hosts_store: bool = False) -> Starter:
        left, popen = words.split(), subprocess.Popen

        def start(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
            if left.pop(0) == "refused":
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            started.append(popen(*args, **options))
            return started[-1]

        monkeypatch.setattr("trainer_launch.pytorch.fork_server.subprocess.Popen", start)
        workers = Workers(count=1, argv=(), env={}, forks=True, python="/bin/false")
        system = create_autospec(System, instance=True)
        system.now.return_value = 0.0
        group: Any = SimpleNamespace(workers=workers, system=system, hosts_store=hosts_store)
        return Starter(group)

    yield make_one
    for process in started:
        process.wait()


def hears(starter: Starter) -> None:
    """Until it raises."""

    def answer() -> bool:
        starter.answer()
        return False

    eventually(answer, "it is told")


def test_a_server_that_this_container_has_no_process_for_yet_is_tried_again_each_second(starting: Starting) -> None:
    starter = starting("refused refused runs")
    for _ in range(2):
        starter.prepare()
        assert starter.retry_at_s == 1.0
        starter.prepare()
        starter.retry(1.0)
    starter.prepare()
    assert (starter._server is not None, starter.retry_at_s) == (True, None)
    starter._end_server()


def test_who_waits_for_a_server_is_told_that_its_container_is_at_a_limit_after_a_minute(starting: Starting) -> None:
    starter = starting("runs" + " refused" * 61)
    starter.prepare()

    def is_gone() -> bool:
        starter.answer()
        return starter._server is None

    eventually(is_gone, "its end is seen")
    for _ in range(59):
        starter.retry(1.0)
        starter.prepare()
    starter.retry(1.0)
    with pytest.raises(NodeError, match=r"the fork server could not be started .*temporarily unavailable"):
        starter.prepare()


def test_a_server_that_never_gets_to_the_end_of_its_imports_opens_no_store(starting: Starting) -> None:
    starter = starting("runs runs", hosts_store=True)
    starter.prepare()
    with pytest.raises(NodeError, match="the store cannot be opened: the fork server exited"):
        hears(starter)


def test_a_server_that_could_not_be_started_while_nobody_waited_is_tried_again(starting: Starting) -> None:
    starter = starting("runs refused runs")
    starter.prepare()
    starter._has_imported = True
    starter.server_ended(-signal.SIGKILL)
    starter.prepare()
    assert not starter.is_ready, "it runs, and is not ready yet"
    starter._end_server()
