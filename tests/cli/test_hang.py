"""--hang-timeout on real programs: what hangs is found, its stacks are saved, and only workers start again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.launching import launch, launched, script

pytestmark = pytest.mark.process


def saved(folder: Path) -> list[str]:
    """What was collected of each hang, oldest first: the sentence, and all stacks."""
    return [
        "".join(path.read_text() for path in [one / "sentence.txt", *sorted(one.glob("stacks/*"))])
        for one in sorted(folder.glob("*Z-*"))
        if '"kind":"hang"' in (one / "incident.json").read_text()
    ]


HEARTBEAT = """
import os, socket, threading, time
import torch, torch.distributed as dist
def beat():
    while True:
        time.sleep(0.5)
        print("still alive\\n", end="", flush=True)
def read_batch():
    reads, writes = os.pipe()
    os.read(reads, 1)
def download():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        threading.Timer(5, server.accept()[0].close).start()
        ours.recv(1)
rank, life = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if rank == 0:
    threading.Thread(target=beat, daemon=True).start()
elif life == 0:
    read_batch()
else:
    download()
dist.all_reduce(torch.ones(1))
print("rank %s is done\\n" % rank, end="", flush=True)
os._exit(0)
"""


@pytest.mark.torch
def test_a_heartbeat_of_one_rank_does_not_hide_another_and_a_download_that_stalls_is_no_hang(
    tmp_path: Path,
) -> None:
    place = tmp_path / "incidents"
    words = ("--hang-timeout", "2", "--nproc-per-node", "2", "--incident-dir", str(place), "--prefix")
    ended = launch("run", *words, "--", script(tmp_path, HEARTBEAT))
    said = ended.stderr
    assert ended.returncode == 0, ended.stdout + said
    assert all(ended.stdout.count(f"rank {rank} is done") == 1 for rank in range(2)), ended.stdout
    assert re.search(
        r"hang: rank 1 .*never entered all_reduce #2 .*; rank 1 is in train\.py:\d+ \(read_batch\)", said
    )
    assert "generation 2: 1 node, 1 restart so far" in said
    assert "generation 3" not in said
    assert len(saved(place)) == 1


METRICS = """
import os, subprocess, sys, threading, time
service = "import time\\nwhile True:\\n    open('metrics', 'a').write('x')\\n    time.sleep(0.2)"
subprocess.Popen([sys.executable, "-S", "-c", service])
def write_metrics():
    with open("metrics", "a", 1) as file:
        while True:
            file.write("cpu=1\\n")
            time.sleep(0.5)
threading.Thread(target=write_metrics, daemon=True).start()
for step in range(3):
    time.sleep(1)
    print("step", step)
"""
HANGS = """
def read_batch():
    threading.Event().wait()
read_batch()
"""
WAITS = """
def evaluate():
    end = time.monotonic() + 5
    while time.monotonic() < end:
        pass
def save():
    with open("checkpoint", "wb", 0) as file:
        for _ in range(10):
            file.write(b"weights")
            time.sleep(0.5)
helper = threading.Thread(target=evaluate)
helper.start()
helper.join()
print("evaluated")
subprocess.run([sys.executable, "-S", "-c", "import time\\nfor _ in range(100): time.sleep(0.05)"])
print("uploaded")
save()
print("done")
"""


@pytest.mark.torch
def test_who_writes_metrics_does_not_hide_that_the_main_thread_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    watched = ("--hang-timeout", "2", "--max-restarts", "0", "--incident-dir", str(tmp_path / "stacks"))
    ended = launched("run", *watched, "--nproc-per-node", "2", "--", script(tmp_path, METRICS + HANGS), code=138)
    assert "hang: ranks 0-1 have been idle" in ended.stderr
    assert re.search(r"hang: ranks 0-1: in wait, called from train\.py:\d+ \(read_batch\)", ended.stderr)


@pytest.mark.torch
def test_a_thread_a_program_and_a_slow_checkpoint_that_the_main_thread_waits_for_are_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    watched = ("--hang-timeout", "2", "--max-restarts", "0", "--incident-dir", str(tmp_path / "stacks"))
    ended = launched("run", *watched, "--nproc-per-node", "1", "--", "python", script(tmp_path, METRICS + WAITS))
    assert ended.stdout.endswith("evaluated\nuploaded\ndone\n")
    assert saved(tmp_path / "stacks") == []


BEAT = "import time\nfor n in range(16):\n    print('beat', n)\n    time.sleep(0.3)\n"


@pytest.mark.parametrize("options", [(), ("--prefix",)], ids=["plain", "prefix"])
@pytest.mark.parametrize(
    "workers",
    [
        pytest.param((), id="program"),
        pytest.param(("--nproc-per-node", "1"), id="worker", marks=pytest.mark.torch),
    ],
)
def test_who_prints_and_sleeps_does_not_hang(
    tmp_path: Path, options: tuple[str, ...], workers: tuple[str, ...]
) -> None:
    watched = ("--hang-timeout", "3", "--incident-dir", str(tmp_path / "stacks"), *options, *workers)
    ended = launched("run", *watched, "--", "python", script(tmp_path, BEAT))
    assert "attempt=1" in ended.stderr
    assert ended.stdout.count("beat 15") == 1
    assert saved(tmp_path / "stacks") == []


def test_a_program_that_sleeps_for_ever_ends_with_its_place_in_the_termination_message(tmp_path: Path) -> None:
    words = tmp_path / "words"
    options = ("--engine", "plain", "--hang-timeout", "1", "--incident-dir", str(tmp_path))
    launched("run", *options, "--termination-log", str(words), "--", "sleep", "60", code=138)
    first, *rest = words.read_text().splitlines()
    assert first.startswith("reason=Hung ")
    assert "program has been idle: no output, no progress and almost no CPU time for" in first
    (folder,) = tmp_path.glob("*Z-*")
    assert f"collected in {folder}" in rest
    assert any("nanosleep" in line for line in rest)
    assert "What to do: see where each of its processes was (trainer-launch incidents show)" in rest


@pytest.mark.long("tests/diagnosis/test_hang.py")
@pytest.mark.torch
def test_workers_of_torchrun_that_hang_are_found_though_torchrun_looks_after_them_all_the_time(
    tmp_path: Path,
) -> None:
    watched = ("--engine", "torchrun", "--hang-timeout", "2", "--incident-dir", str(tmp_path))
    ended = launched(
        "run", *watched, "--nproc-per-node", "2", "--", script(tmp_path, "import threading\n" + HANGS), code=138
    )
    assert "hang: torchrun has been idle" in ended.stderr


CONNECTS_IN_VAIN = """
import os
from datetime import timedelta
import torch.distributed as dist
rank = int(os.environ["RANK"])
nobody = {"init_method": "tcp://127.0.0.1:1"} if rank else {}
dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timedelta(seconds=8 if rank else 60), **nobody)
"""


@pytest.mark.long("tests/diagnosis/test_workers.py")
@pytest.mark.torch
def test_a_worker_that_is_asked_for_its_stacks_goes_on_connecting_for_as_long_as_it_wants_to(
    tmp_path: Path,
) -> None:
    words = ("--hang-report-after", "1", "--nproc-per-node", "2", "--max-restarts", "0")
    ended = launch("run", *words, "--", script(tmp_path, CONNECTS_IN_VAIN), env={"TMPDIR": str(tmp_path)})
    assert re.search(r"rank(s 0-)?1 waits? in init_process_group", ended.stderr), "it was asked"
    assert "because nothing answers at the address where it meets the other ranks" in ended.stderr
    assert "Interrupted system call" not in ended.stderr
