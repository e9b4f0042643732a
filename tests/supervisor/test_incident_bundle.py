"""Bounds of an incident bundle, and facts of the machine: what cannot be had is told, and nothing is waited for."""

from __future__ import annotations

import ctypes.util
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainer_launch.host import incident_facts
from trainer_launch.model import Failure
from trainer_launch.supervisor import incident_bundle, incident_collection
from trainer_launch.supervisor.incident_bundle import FAILURE, HANG, MAX_BYTES, Incident
from trainer_launch.supervisor.incident_collection import About, Collector, Sources

MIB = 1 << 20


class NoWorkers:
    """Nothing of the job is alive."""

    def look(self) -> dict[Any, Any]:
        return {}

    def ask_at_once(self, workers: object, until_s: float) -> dict[int, str]:
        return {}

    def children(self, worker: object) -> tuple[()]:
        return ()


def collector(place: Path, lines: Callable[[], tuple[str, ...]] = tuple) -> Collector:
    workers: Any = NoWorkers()
    about = About(place=str(place), env={"NCCL_RAS_ADDR": "127.0.0.1:1"}, job="job", node_rank=0)
    return Collector(about, Sources(workers=workers, last_lines=lambda name: lines()))


def test_where_no_thread_is_allowed_an_incident_is_kept_and_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)
    collected = collector(tmp_path).collect(FAILURE, "it failed")
    (one,) = incident_bundle.stored(str(tmp_path))
    assert one.incident.sentence == collected.incident.sentence == "it failed"
    assert "host/: no thread could be started for it" in one.incident.missing


# -- bounds ------------------------------------------------------------------------------------


def test_a_bundle_keeps_its_size_and_says_what_it_lost(tmp_path: Path) -> None:
    folder = incident_bundle.new_folder(str(tmp_path), "job", 0.0)
    for rank, size in enumerate((20, 15, 3)):
        Path(folder, "flight_recorder", f"nccl_trace_rank_{rank}").write_bytes(bytes(size * MIB))
    assert incident_bundle.add(folder, "host", "a.txt", "x" * 9 * MIB) == "host/a.txt: the bundle has its 32 MiB"
    told = incident_bundle.finish(folder, Incident(sentence="it failed", kind=FAILURE, time_s=0.0))
    assert told.missing == ("flight_recorder/nccl_trace_rank_0: removed, there was no room",)
    (one,) = incident_bundle.stored(str(tmp_path))
    assert one.incident == told
    assert incident_bundle.size_of(folder) <= MAX_BYTES
    assert one.files_in("flight_recorder") == [f"flight_recorder/nccl_trace_rank_{n}" for n in (1, 2)]
    assert incident_bundle.add(folder, "host", "b.txt", "x" * 9 * MIB) is None
    assert Path(folder, "host", "b.txt").stat().st_size == 4 * MIB, "no text has more"


def test_no_text_of_a_bundle_has_a_secret(tmp_path: Path) -> None:
    token = "hf_" + "a1b2c3d4e5f6g7h8"
    lines = (f"logging in with {token}", f'    login(token="{token}", retry=True)')
    made = collector(tmp_path, lambda: lines)
    made.collect(FAILURE, f"ValueError: {token}", names=("rank 0",), report=f"{token} in a report")
    made.concluded(Failure(reason="Failed", message=f"it failed: {token}", exit_code=1))
    made.close()
    (one,) = incident_bundle.stored(str(tmp_path))
    texts = {name: (Path(one.folder) / name).read_text() for name in one.files}
    assert {"incident.json", "sentence.txt", "report.txt", "output/rank-0.txt"} <= set(texts)
    assert [name for name, text in texts.items() if token in text] == []
    assert texts["output/rank-0.txt"] == "logging in with [redacted]\n    login(token=[redacted], retry=True)\n"
    assert texts["sentence.txt"] == "it failed: [redacted]\n"


@pytest.mark.parametrize("how", ["writable", "link", "ours"])
def test_the_default_directory_has_to_be_ours_alone(tmp_path: Path, how: str) -> None:
    place = tmp_path / "incidents"
    if how == "link":
        place.symlink_to(tmp_path)
    elif how == "writable":
        place.mkdir()
        place.chmod(0o770)
    else:
        incident_bundle.new_folder(str(place), "job", 0.0, must_be_ours=True)
        assert place.stat().st_mode & 0o777 == 0o700
        return
    with pytest.raises(PermissionError, match="it is a symbolic link, or other users may write there"):
        incident_bundle.new_folder(str(place), "job", 0.0, must_be_ours=True)
    incident_bundle.new_folder(str(place), "job", 0.0)


def made_in_turn(place: Path, named: Iterable[tuple[str, float]]) -> list[str]:
    folders = []
    for name, at_s in named:
        folders.append(incident_bundle.new_folder(str(place), name, at_s))
        incident_bundle.remove_old(folders[-1])
    return folders


def test_the_last_ten_of_each_node_are_kept(tmp_path: Path) -> None:
    other = incident_bundle.new_folder(str(tmp_path), "job-node1", 0.0)
    folders = made_in_turn(tmp_path, (("job-node0", float(at_s)) for at_s in range(13)))
    assert sorted(os.listdir(tmp_path)) == sorted(os.path.basename(one) for one in [other, *folders[3:]])


def test_what_was_no_incident_leaves_nothing_and_takes_no_others_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr(incident_facts, "gpus", lambda: str(released.wait(60)))
    made = collector(tmp_path)
    failures = [made.collect(FAILURE, f"failure {number}").folder for number in range(10)]
    innocent = [made.collect(HANG, "nothing moves") for _ in range(3)]
    for one in innocent:
        made.drop(one)
    released.set()
    made.close()
    assert [one.folder for one in incident_bundle.stored(str(tmp_path))] == failures
    assert len(os.listdir(tmp_path)) == len(failures), "what was still being written is gone as well"


def test_an_incident_that_workers_were_ended_for_is_kept_though_nobody_is_accused_later(
    tmp_path: Path,
) -> None:
    made = collector(tmp_path)
    one = made.collect(HANG, "rank 1 has been busy without progress")
    made.tell(one)
    made.drop(one)
    made.close()
    assert [os.path.basename(one.folder)] == os.listdir(tmp_path)


def test_a_shared_directory_does_not_grow_with_each_new_job(tmp_path: Path) -> None:
    other = incident_bundle.new_folder(str(tmp_path), "job-0-node1", 0.0)
    jobs = made_in_turn(tmp_path, ((f"job-{n}-node0", 4000.0 * n) for n in range(60)))
    kept = [other, *jobs[-incident_bundle.KEPT_OF_ALL :]]
    assert sorted(os.listdir(tmp_path)) == sorted(os.path.basename(one) for one in kept)


def test_what_other_jobs_may_still_collect_is_not_removed(tmp_path: Path) -> None:
    jobs = made_in_turn(tmp_path, ((f"job-{n}-node0", 10.0 * n) for n in range(60)))
    assert len(os.listdir(tmp_path)) == len(jobs)


def test_nodes_of_a_job_with_a_long_name_are_kept_apart(tmp_path: Path) -> None:
    names = [f"{'j' * 120}-node{number}" for number in range(2)]
    folders = made_in_turn(tmp_path, ((names[n % 2], float(n)) for n in range(20)))
    assert len(os.listdir(tmp_path)) == len(folders)


def test_what_is_in_an_incident_is_not_only_ours_to_write(tmp_path: Path) -> None:
    """Whatever is in a folder on a shared volume, the rest can be listed."""
    for number, text in enumerate((b"", b"{", b"[" * 10_000, b'{"sentence":1}', b"\xff" * 100)):
        folder = incident_bundle.new_folder(str(tmp_path), "job", float(number))
        Path(folder, "incident.json").write_bytes(text)
    good = incident_bundle.new_folder(str(tmp_path), "job", 9.0)
    incident_bundle.finish(good, Incident(sentence="it failed", kind=FAILURE, time_s=9.0))
    assert [one.folder for one in incident_bundle.stored(str(tmp_path))] == [good]


def test_a_fact_that_hangs_is_told_and_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()
    monkeypatch.setattr(incident_facts, "gpus", lambda: str(released.wait(60)))
    monkeypatch.setattr(incident_collection, "_FACTS_S", 0.5)
    made = collector(tmp_path)
    begun_s = time.monotonic()
    made.collect(HANG, "nothing moves")
    assert time.monotonic() - begun_s < 1.0, "facts are collected beside"
    made.close()
    released.set()
    (one,) = incident_bundle.stored(str(tmp_path))
    assert "host/gpus.txt: no answer within 0 s" in one.incident.missing
    assert "host/network.txt" in one.files


def test_py_spys_processes_end_together(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They have closed nothing when they are killed: what holds their pipes is not below them any more."""
    program = tmp_path / "py-spy"
    program.write_text("#!/bin/sh\nsetsid -f sleep 20\nexec sleep 20\n")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    begun_s = time.monotonic()
    found = incident_facts.native_stacks([*range(1, 17)], 0.5)
    assert time.monotonic() - begun_s < 16 * 0.5, "one after the other"
    assert len(found) == 16


def test_the_last_failure_gets_the_termination_messages_words_and_all_output(tmp_path: Path) -> None:
    lines = ["first"]
    made = collector(tmp_path, lambda: tuple(lines))
    made.collect(FAILURE, "rank 1 ended with SIGKILL", names=("rank 1",))
    lines.append("last")
    made.concluded(Failure(reason="OutOfMemory", message="rank 1 ended, for memory", exit_code=137, rank=1))
    made.close()
    (one,) = incident_bundle.stored(str(tmp_path))
    told = one.incident
    assert (told.sentence, told.reason, told.ranks) == ("rank 1 ended, for memory", "OutOfMemory", (1,))
    assert told.restart_helps is True
    assert incident_bundle.text_of(one, "sentence.txt") == "rank 1 ended, for memory\n"
    assert incident_bundle.text_of(one, "output/rank-1.txt") == "first\nlast\n"


def test_the_end_of_a_run_does_not_rename_a_hang(tmp_path: Path) -> None:
    made = collector(tmp_path)
    made.collect(HANG, "rank 1 waits")
    made.concluded(Failure(reason="Failed", message="it failed later", exit_code=1))
    made.close()
    (one,) = incident_bundle.stored(str(tmp_path))
    assert one.incident.sentence == "rank 1 waits"


# -- facts -------------------------------------------------------------------------------------


def test_the_kernels_log_yields_xids_with_their_time(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        "6,1,1000000,-;usb 1-1: new device\n"
        "3,2,2000000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid=412, GPU has fallen off the bus.\n"
        " SUBSYSTEM=pci\n"
        "6,3,3000000,-;oom-kill:constraint=CONSTRAINT_MEMCG\n"
    )
    xid, kill = incident_facts.kernel_log(str(log)).splitlines()
    assert xid.endswith(" NVRM: Xid (PCI:0000:3b:00): 79, pid=412, GPU has fallen off the bus.")
    assert xid[:4].isdecimal()
    assert kill.endswith(" oom-kill:constraint=CONSTRAINT_MEMCG")


class Nvml(ModuleType):
    """One GPU that answers some questions, and one that has fallen off the bus."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, works: bool = True) -> None:
        super().__init__("pynvml")
        self.works = works

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetTemperature(self, device: int, sensor: int) -> int:
        return 88

    def nvmlDeviceGetMemoryInfo(self, device: int) -> SimpleNamespace:
        return SimpleNamespace(used=3 << 30)

    def nvmlDeviceGetRemappedRows(self, device: int) -> tuple[int, int, bool, bool]:
        raise self.NVMLError("Not Supported")


def test_nvml_tells_of_each_gpu_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    lines = incident_facts.gpus().splitlines()
    assert {"== GPU 0", "temperature C: 88", "memory used: 3 GiB", "NVML: GPU is lost"} <= set(lines)
    assert "remapped rows (corrected, uncorrected, pending, failed): Not Supported" in lines


class Slowed(Nvml):
    """One GPU that is slowed down for these reasons."""

    def __init__(self, reasons: int, *, works: bool = True) -> None:
        super().__init__(works=works)
        self.reasons = reasons

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "GPU-1a2b":
            raise self.NVMLError("Not Found")
        return 0

    def nvmlDeviceGetClockInfo(self, device: int, kind: int) -> int:
        return {1: 1200}[kind]

    def nvmlDeviceGetMaxClockInfo(self, device: int, kind: int) -> int:
        return {1: 1980}[kind]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device: int) -> int:
        return self.reasons


@pytest.mark.parametrize(
    ("reasons", "name", "words"),
    [
        (0x1, "0", "GPU 0: 1200 of 1980 MHz, not throttled, 88 °C"),
        (0x8 | 0x40, "0", "GPU 0: 1200 of 1980 MHz, throttled (hardware slowdown, hardware thermal), 88 °C"),
        (
            0x4 | 0x20 | 0x80,
            "GPU-1a2b",
            "GPU GPU-1a2b: 1200 of 1980 MHz, throttled (power cap, thermal, power brake), 88 °C",
        ),
        (0x4, "1", ""),
        (0x4, "GPU-none", ""),
    ],
    ids=["idle", "hardware", "by its UUID", "fallen off the bus", "unknown UUID"],
)
def test_a_stragglers_gpu_is_told_in_a_phrase(
    monkeypatch: pytest.MonkeyPatch, reasons: int, name: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", Slowed(reasons))
    assert incident_facts.gpu(name) == words


@pytest.mark.parametrize("library", [None, Slowed(0, works=False), Nvml()], ids=["none", "no driver", "too old"])
def test_nothing_is_told_of_a_gpu_that_cannot_be_asked(
    monkeypatch: pytest.MonkeyPatch, library: Nvml | None
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert incident_facts.gpu("0") == ""


@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="NVIDIA's driver is here")
def test_where_no_driver_is_nobody_waits_for_its_bindings() -> None:
    look = "import sys; from trainer_launch.host import incident_facts as facts; facts.gpus(), facts.gpu('0')"
    done = subprocess.run((sys.executable, "-c", f"{look}; sys.exit('pynvml' in sys.modules)"), timeout=60)
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("library", "why"),
    [(None, "nvidia-ml-py is not installed"), (Nvml(works=False), "NVML: Driver Not Loaded")],
    ids=["no library", "no driver"],
)
def test_a_gpu_that_nobody_can_ask_about_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Nvml | None, why: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert incident_facts.gpus(f"{tmp_path}/nvidia*") == "", "no GPU here"
    (tmp_path / "nvidia0").touch()
    with pytest.raises(OSError, match=why):
        incident_facts.gpus(f"{tmp_path}/nvidia*")


def test_the_network_has_interface_errors_and_what_infiniband_counts(tmp_path: Path) -> None:
    assert "lo:" in incident_facts.network()
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/hw_counters"
    counters.mkdir(parents=True)
    (counters / "out_of_sequence").write_text("7\n")
    (counters / "rnr_nak_retry_err").write_text("0\n")
    assert incident_facts.network(tmp_path) == "== mlx5_0 port 1\nout_of_sequence: 7\n\n"


REPORT = """NCCL version 2.28.9 compiled with CUDA 13.0
CUDA runtime version 13000, driver version 13000

Job summary
===========
  Nodes  Processes         GPUs  Processes     GPUs
(total)   per node  per process    (total)  (total)
      2          1            1          2        2
"""


@contextmanager
def ras(answer: Callable[[socket.socket], None]) -> Iterator[dict[str, str]]:
    """A server where NCCL's RAS thread would listen; the variable that says where."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield {"NCCL_RAS_ADDR": f"127.0.0.1:{server.getsockname()[1]}"}
        thread.join(10)


def speak(connection: socket.socket) -> None:
    """As `rasClientEventLoop` of NCCL does: each line is a command; a status ends the connection."""
    with connection.makefile("rb") as lines:
        for line in lines:
            command = line.decode().strip().lower()
            if command.startswith("client protocol "):
                connection.sendall(b"SERVER PROTOCOL 2\n")
            elif command.startswith("timeout "):
                assert command.partition(" ")[2].isdecimal()
                connection.sendall(b"OK\n")
            elif command in ("status", "verbose status"):
                for part in REPORT.splitlines(keepends=True):
                    connection.sendall(part.encode())
                return
            else:
                connection.sendall(f"ERROR: Unknown command {command}\n".encode())


def test_nccls_ras_subsystem_gives_its_report() -> None:
    with ras(speak) as env:
        assert incident_facts.nccl_ras(env) == REPORT


def test_who_does_not_speak_nccls_protocol_is_no_report() -> None:
    def refuse(connection: socket.socket) -> None:
        connection.recv(4096)
        connection.sendall(b"HTTP/1.1 400 Bad Request\n")

    with ras(refuse) as env, pytest.raises(OSError, match="no answer of NCCL's RAS protocol"):
        incident_facts.nccl_ras(env)


def test_a_ras_report_that_comes_too_late_is_kept_as_far_as_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(incident_facts, "_RAS_S", 0.5)
    done = threading.Event()

    def slow(connection: socket.socket) -> None:
        connection.sendall(b"SERVER PROTOCOL 2\nOK\nNCCL version")
        done.wait(10)

    with ras(slow) as env:
        assert incident_facts.nccl_ras(env) == "NCCL version"
        done.set()
