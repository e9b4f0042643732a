"""Bounds of an incident's folder, and facts of the machine: what cannot be had is listed; nothing waits for it."""

from __future__ import annotations

import ctypes.util
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from trainer_launch.diagnosis import incident_bundle, incident_collection
from trainer_launch.diagnosis.incident_bundle import FAILURE, HANG, MAX_BYTES, Incident
from trainer_launch.diagnosis.incident_collection import About, Collector
from trainer_launch.host import incident_facts
from trainer_launch.model import Failure

MIB = 1 << 20


class NoWorkers:
    """Nothing of the job is alive."""

    def present(self) -> dict[Any, str]:
        return {}


def collector(place: Path, lines: Callable[[], tuple[str, ...]] = tuple) -> Collector:
    workers: Any = NoWorkers()
    about = About(place=str(place), env={}, job="job", node_rank=0)
    return Collector(about, workers, lambda name: lines())


def test_a_value_with_a_line_break_forges_no_other_variable() -> None:
    assert incident_facts.environment({"A": "x\nB=y", "C": "z"}) == "A=x\\nB=y\nC=z\n"


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


def test_a_folder_keeps_its_size_and_says_what_it_lost(tmp_path: Path) -> None:
    folder = incident_bundle.new_folder(str(tmp_path), "job", 0.0)
    for rank, size in enumerate((20, 15, 3)):
        Path(folder, "flight_recorder", f"nccl_trace_rank_{rank}").write_bytes(bytes(size * MIB))
    assert incident_bundle.add(folder, "host/a.txt", "x" * 9 * MIB) is None
    told = incident_bundle.finish(folder, Incident(sentence="it failed", kind=FAILURE, time_s=0.0))
    assert told.missing == ("flight_recorder/nccl_trace_rank_0: removed, there was no room",)
    (one,) = incident_bundle.stored(str(tmp_path))
    assert one.incident == told
    assert 27 * MIB <= one.size_bytes <= MAX_BYTES
    assert one.files_in("flight_recorder") == [f"flight_recorder/nccl_trace_rank_{n}" for n in (1, 2)]


def test_no_text_of_an_incident_has_a_secret(tmp_path: Path) -> None:
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


def test_the_last_ten_of_each_node_of_a_job_are_kept_and_other_jobs_are_left_alone(tmp_path: Path) -> None:
    names = [f"{'j' * 120}-node{number}" for number in range(2)]
    other = incident_bundle.new_folder(str(tmp_path), "other-job-node0", 0.0)
    folders = []
    for at_s in range(26):
        folders.append(incident_bundle.new_folder(str(tmp_path), names[at_s % 2], float(at_s)))
        incident_bundle.remove_old(folders[-1])
    assert sorted(os.listdir(tmp_path)) == sorted(os.path.basename(one) for one in [other, *folders[6:]])


def test_what_was_no_incident_leaves_nothing_and_takes_no_others_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setitem(incident_facts.ALL, "gpus.txt", lambda: str(released.wait(60)))
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
    monkeypatch.setitem(incident_facts.ALL, "gpus.txt", lambda: str(released.wait(60)))
    monkeypatch.setattr(incident_collection, "_FACTS_S", 0.5)
    made = collector(tmp_path)
    begun_s = time.monotonic()
    made.collect(HANG, "nothing moves")
    assert time.monotonic() - begun_s < 1.0, "facts are collected beside"
    made.close()
    (one,) = incident_bundle.stored(str(tmp_path))
    assert "host/: no answer yet" in one.incident.missing
    assert "host/network.txt" in one.files
    released.set()
    made.close()
    (one,) = incident_bundle.stored(str(tmp_path))
    assert "host/: no answer yet" not in one.incident.missing
    assert "host/gpus.txt" in one.files


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
    """One GPU that answers some questions and is slowed down for these reasons; one has fallen off the bus."""

    class NVMLError(Exception):
        pass

    def __init__(self, reasons: int = 0, *, works: bool = True) -> None:
        super().__init__("pynvml")
        self.reasons, self.works = reasons, works
        self.nvmlDeviceGetCount = lambda: 2
        self.nvmlDeviceGetTemperature = lambda device, sensor: 88
        self.nvmlDeviceGetMemoryInfo = lambda device: SimpleNamespace(used=3 << 30)
        self.nvmlDeviceGetClockInfo = lambda device, kind: {1: 1200}[kind]
        self.nvmlDeviceGetMaxClockInfo = lambda device, kind: {1: 1980}[kind]
        self.nvmlDeviceGetCurrentClocksThrottleReasons = lambda device: reasons
        self.nvmlShutdown = lambda: None

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:
        if uuid != "GPU-1a2b":
            raise self.NVMLError("Not Found")
        return 0

    def nvmlDeviceGetRemappedRows(self, device: int) -> tuple[int, int, bool, bool]:
        raise self.NVMLError("Not Supported")


@pytest.mark.parametrize(
    ("library", "name", "words"),
    [
        (Nvml(0x1), "0", "GPU 0: 1200 of 1980 MHz, not throttled, 88 °C"),
        (Nvml(0x8 | 0x40), "0", "GPU 0: 1200 of 1980 MHz, throttled (hardware slowdown, hardware thermal), 88 °C"),
        (
            Nvml(0x4 | 0x20 | 0x80),
            "GPU-1a2b",
            "GPU GPU-1a2b: 1200 of 1980 MHz, throttled (power cap, thermal, power brake), 88 °C",
        ),
        (Nvml(0x4), "1", ""),
        (Nvml(0x4), "GPU-none", ""),
        (None, "0", ""),
        (Nvml(works=False), "0", ""),
    ],
    ids=["idle", "hardware", "by its UUID", "fallen off the bus", "unknown UUID", "no library", "no driver"],
)
def test_a_stragglers_gpu_is_told_in_a_phrase(
    monkeypatch: pytest.MonkeyPatch, library: Nvml | None, name: str, words: str
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", library)
    assert incident_facts.gpu(name) == words


@pytest.mark.skipif(ctypes.util.find_library("nvidia-ml") is not None, reason="NVIDIA's driver is here")
def test_where_no_driver_is_nobody_waits_for_its_bindings() -> None:
    look = "import sys; from trainer_launch.host import incident_facts as facts; facts.gpus(), facts.gpu('0')"
    done = subprocess.run((sys.executable, "-c", f"{look}; sys.exit('pynvml' in sys.modules)"), timeout=60)
    assert done.returncode == 0


def test_nvml_tells_of_each_gpu_what_it_can_or_why_nobody_can_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = f"{tmp_path}/nvidia*"
    assert incident_facts.gpus(devices) == "", "no GPU here"
    (tmp_path / "nvidia0").touch()
    for library, why in ((None, "nvidia-ml-py is not installed"), (Nvml(works=False), "NVML: Driver Not Loaded")):
        monkeypatch.setitem(sys.modules, "pynvml", library)
        with pytest.raises(OSError, match=why):
            incident_facts.gpus(devices)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    lines = incident_facts.gpus(devices).splitlines()
    assert {"== GPU 0", "temperature C: 88", "memory used: 3 GiB", "NVML: GPU is lost"} <= set(lines)
    assert "remapped rows (corrected, uncorrected, pending, failed): Not Supported" in lines


def test_the_network_has_interface_errors_and_what_infiniband_counts(tmp_path: Path) -> None:
    assert "lo:" in incident_facts.network()
    counters = tmp_path / "sys/class/infiniband/mlx5_0/ports/1/hw_counters"
    counters.mkdir(parents=True)
    (counters / "out_of_sequence").write_text("7\n")
    (counters / "rnr_nak_retry_err").write_text("0\n")
    assert incident_facts.network(tmp_path) == "== mlx5_0 port 1\nout_of_sequence: 7\n\n"
