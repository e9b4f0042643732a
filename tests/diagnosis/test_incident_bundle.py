"""Bounds of an incident's folder, and facts of the machine: what cannot be had is listed; nothing waits for it."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from trainer_launch.diagnosis import flight_recorder, incident_bundle, incident_collection
from trainer_launch.diagnosis.collectives import Doing, Explanation, RankState
from trainer_launch.diagnosis.hang_detection import WatchedWorker
from trainer_launch.diagnosis.incident_bundle import FAILURE, HANG, MAX_BYTES, REQUEST, Incident, Stored
from trainer_launch.diagnosis.incident_collection import About, Collector
from trainer_launch.diagnosis.worker_samples import Recorders
from trainer_launch.host import incident_facts
from trainer_launch.model import Failure
from trainer_launch.model.errors import UsageError

MIB = 1 << 20


class NoWorkers:
    """Nothing of the job is alive."""

    def present(self) -> dict[Any, str]:
        return {}

    def children(self, workers: object) -> dict[Any, tuple[Any, ...]]:
        return {}


class Held(NoWorkers):
    """A rank that a debugger holds: it answers nothing."""

    def present(self) -> dict[Any, str]:
        return {WatchedWorker("rank 1", 1 << 22, 1, rank=1): "t"}

    def children(self, workers: object) -> dict[Any, tuple[Any, ...]]:
        return dict.fromkeys(self.present(), ())

    def doing(self, *_: object, **__: object) -> Doing:
        return Doing.UNKNOWN


def collector(
    place: Path, lines: Callable[[], tuple[str, ...]] = tuple, of: type[NoWorkers] = NoWorkers
) -> Collector:
    workers: Any = of()
    about = About(place=str(place), env={}, job="job", node_rank=0)
    return Collector(about, workers, lambda name: lines())


def test_a_value_with_a_line_break_forges_no_other_variable() -> None:
    assert incident_facts.environment({"A": "x\nB=y", "C": "z"}) == "A=x\\nB=y\nC=z\n"
    values = {"ESCAPE": "\x1b[31m é", "NEXT\n": "a\rb\x85c\u2028d\udcff"}
    shown = "ESCAPE=\\x1b[31m é\nNEXT\\n=a\\rb\\x85c\\u2028d\\udcff\n"
    assert incident_facts.environment(values) == shown


def test_a_rank_that_a_debugger_holds_is_in_a_debugger(tmp_path: Path) -> None:
    (state,) = collector(tmp_path, of=Held).collect(HANG, "another node sees no progress").incident.states
    assert state.doing is Doing.DEBUGGER
    assert state.is_active(1.0), "nobody is ended for it"


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


class OfGenerations:
    """A group whose ranks keep their state, in which no recorder answers."""

    def __init__(self) -> None:
        self.generation, self.recorders, self.keeps_state = 1, Recorders(), True

    def ended(self) -> list[RankState]:
        return []


def test_the_incident_of_a_generation_says_that_ranks_kept_their_state_after_it(tmp_path: Path) -> None:
    workers, group = cast(Any, NoWorkers()), OfGenerations()
    made = Collector(About(place=str(tmp_path), env={}), workers, lambda _: (), cast(Any, group))
    made.recovered("nothing has failed yet")
    made.collect(FAILURE, "rank 3 ended with signal SIGKILL")
    made.recovered("of the present generation nobody knows it yet")
    for group.generation in (2, 3):  # the third began because a node joined
        made.recovered("3 ranks kept their state")
    made.close()
    (stored,) = incident_bundle.stored(str(tmp_path))
    assert stored.incident.sentence == "rank 3 ended with signal SIGKILL; 3 ranks kept their state"


# -- bounds ------------------------------------------------------------------------------------


def test_a_folder_keeps_its_size_and_says_what_it_lost(tmp_path: Path) -> None:
    folder = incident_bundle.new_folder(str(tmp_path), "job", 0.0)
    for rank, size in enumerate((20, 15, 3)):
        Path(folder, "flight_recorder", f"nccl_trace_rank_{rank}").write_bytes(bytes(size * MIB))
    Path(folder, "host", "a.txt").write_bytes(bytes(9 * MIB))
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
    made.collect(FAILURE, f"ValueError: {token}", names=("rank 0",))
    made.concluded(Failure(reason="Failed", message=f"it failed: {token}", exit_code=1))
    made.close()
    (one,) = incident_bundle.stored(str(tmp_path))
    texts = {name: (Path(one.folder) / name).read_text() for name in one.files}
    assert {"incident.json", "sentence.txt", "output/rank-0.txt"} <= set(texts)
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


def test_what_is_in_an_incident_is_not_only_ours_to_write(tmp_path: Path) -> None:
    """Whatever is in a folder on a shared volume, the rest can be listed."""
    for number, text in enumerate((b"", b"{", b"[" * 10_000, b'{"sentence":1}', b"\xff" * 100)):
        folder = incident_bundle.new_folder(str(tmp_path), "job", float(number))
        Path(folder, "incident.json").write_bytes(text)
    good = incident_bundle.new_folder(str(tmp_path), "job", 9.0)
    incident_bundle.finish(good, Incident(sentence="it failed", kind=FAILURE, time_s=9.0))
    assert [one.folder for one in incident_bundle.stored(str(tmp_path))] == [good]


def test_a_copied_directory_with_links_and_fifos_shows_only_what_is_in_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("a secret")
    place = tmp_path / "copied"
    folder = Path(incident_bundle.new_folder(str(place), "job", 0.0))
    incident_bundle.finish(str(folder), Incident(sentence="it failed", kind=FAILURE, time_s=0.0))
    (folder / "output/rank-0.txt").symlink_to(secret)
    os.mkfifo(folder / "output/rank-1.txt")
    (folder / "stacks").rmdir()
    (folder / "stacks").symlink_to(tmp_path)
    (place / "20200101T000000Z-elsewhere-0").symlink_to(folder)
    (one,) = incident_bundle.stored(str(place))
    assert one.files == ("incident.json", "sentence.txt")
    for name in ("output/rank-0.txt", "output/rank-1.txt"):
        assert incident_bundle.text_of(one, name) == "cannot be read\n"
    (folder / "sentence.txt").write_bytes(b"a\tb\x1b[31m\r\nc\x1b]0;title\x07\xff\n")
    assert incident_bundle.text_of(one, "sentence.txt") == "a       b?[31m\nc?]0;title?\ufffd\n"


@pytest.mark.parametrize("umask", [0o000, 0o077])
def test_nobody_else_may_read_an_incident(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        made = collector(tmp_path / "all")
        folder = Path(made.collect(HANG, "nothing moves").folder)
        flight_recorder._save(f"{folder}/flight_recorder/nccl_trace_rank_0", b"x", time.monotonic() + 60)
        made.close()
    finally:
        os.umask(before)
    paths = [tmp_path / "all", folder, *folder.rglob("*")]
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_dir()} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in paths if path.is_file()} == {0o600}


# -- one hang, one incident --------------------------------------------------------------------


def told(made: Collector, sentence: str) -> str:
    """A hang that all nodes were asked about; its folder."""
    one = made.collect(HANG, "rank 0 has been idle")
    made.explained(one, Explanation(text=sentence, ranks=(1,)))
    return one.folder


def test_workers_that_still_hang_where_they_did_are_the_same_incident(tmp_path: Path) -> None:
    made = collector(tmp_path)
    folder = told(made, "rank 1 never entered all_reduce #6; rank 0 has waited in it for 60 s")
    again = made.collect(HANG, "rank 0 has been idle", is_same=True)
    assert (again.folder, again.incident.sentence[:20]) == (folder, "rank 1 never entered")
    made.tell(again)
    made.complete(made.collect(REQUEST, "collected on request"), (), "collected on request: nothing moves")
    ended = made.collect(FAILURE, "generation 1 is over: rank 1 failed", is_same=True)
    assert (ended.folder, ended.incident.kind, ended.incident.sentence[:20]) == (
        folder,
        HANG,
        "rank 1 never entered",
    )
    other = told(made, "rank 1 never entered all_reduce #9; rank 0 has waited in it for 60 s")
    made.close()
    kinds = {entry.folder: entry.incident.kind for entry in incident_bundle.stored(str(tmp_path))}
    assert [each for each, kind in kinds.items() if kind != REQUEST] == [folder, other]
    assert len(kinds) == 3


def test_the_end_for_a_hang_is_told_by_its_incident(tmp_path: Path) -> None:
    made = collector(tmp_path)
    told(made, "rank 1 never entered all_reduce #6")
    message = "rank 1 never entered all_reduce #6; collected in /tmp/incidents"
    assert made.announced_hang(message) is not None
    assert made.announced_hang("rank 1 was killed") is None
    made.concluded(Failure(reason="Hung", message=message, exit_code=138, rank=1))
    made.close()
    (one,) = incident_bundle.stored(str(tmp_path))
    shown = one.incident
    assert (shown.kind, shown.sentence) == (HANG, "rank 1 never entered all_reduce #6")
    assert (shown.reason, shown.ranks, shown.restart_helps) == ("Hung", (1,), True)


def test_what_is_told_again_is_no_second_event(tmp_path: Path) -> None:
    about = About(place=str(tmp_path / "all"), env={}, job="job", node_rank=0, run_dir=str(tmp_path))
    workers: Any = NoWorkers()
    made = Collector(about, workers, lambda name: ())
    one = made.collect(HANG, "rank 0 has been idle")
    for _ in range(2):
        made.explained(one, Explanation(text="rank 1 never entered all_reduce #6", ranks=(1,)))
        made.tell(one)
    made.close()
    news = [json.loads(line) for line in (tmp_path / "news.jsonl").read_text().splitlines()]
    assert [(each["event"], each["kind"]) for each in news] == [("incident", "hang")]


def test_an_incident_has_the_ranks_of_all_nodes_and_its_own_as_it_knows_them(tmp_path: Path) -> None:
    made = collector(tmp_path)
    one = made.collect(HANG, "rank 0 has been idle")
    own = RankState(rank=0, node=0, place="waits in all_reduce")
    one = replace(one, incident=replace(one.incident, states=(own,)))
    others = (RankState(rank=0, node=0), RankState(rank=1, node=1, stack="data.py:22 (read_batch)"))
    made.complete(one, others, "")
    made.close()
    (stored,) = incident_bundle.stored(str(tmp_path))
    assert stored.incident.states == (own, others[1])


def test_what_a_person_asks_for_is_kept_whatever_comes_of_it(tmp_path: Path) -> None:
    made = collector(tmp_path)
    one = made.collect(REQUEST, "collected on request")
    made.drop(one)
    made.complete(one, (), "collected on request: 3 of 3 ranks made progress in the last 10 s")
    made.drop(one)
    made.close()
    (stored,) = incident_bundle.stored(str(tmp_path))
    assert (stored.incident.kind, stored.incident.sentence[-29:]) == (
        "request",
        "made progress in the last 10 s"[1:],
    )


def node(
    number: int, sentence: str, at_s: float, kind: str = HANG, generation: int = 1, job: str = "job"
) -> Stored:
    """What one node has of an incident."""
    told = Incident(
        sentence=sentence, kind=kind, time_s=at_s, job=job, node_rank=number, generation=generation, ranks=(1,)
    )
    return Stored(id=f"{at_s:g}-{kind}-{number}", folder="", incident=told, files=(), size_bytes=0)


def counted(entries: list[Stored]) -> list[int]:
    return [len(group) for group in incident_bundle.moments(entries)]


NEVER = "rank 1 never entered all_reduce #{}; rank 0 has waited in it for {} s"


def test_three_hangs_of_three_nodes_are_three_incidents() -> None:
    entries = [
        node(number, NEVER.format(step, 60 + number), 100.0 * step + number)
        for step in range(3)
        for number in range(3)
    ]
    assert counted(entries) == [3, 3, 3]


@pytest.mark.parametrize(
    "other",
    [
        node(0, "rank 1 ended with exit code 1", 131.0, FAILURE),
        node(1, NEVER.format(6, 60), 101.0, generation=2),
        node(1, NEVER.format(6, 60), 101.0, job="other"),
        node(1, "collected on request", 101.0, REQUEST),
        node(1, "all ranks wait for each other outside recorded collectives", 200.0),
        replace(node(1, "x", 101.0), incident=Incident(sentence="x", kind=HANG, time_s=101.0)),
    ],
    ids=["long after", "generation", "job", "on request", "no number", "a program"],
)
def test_what_has_another_cause_is_another_incident(other: Stored) -> None:
    hang = other.incident.sentence if other.incident.sentence.startswith("all") else NEVER.format(6, 60)
    assert counted([node(0, hang, 100.0), other]) == [1, 1]


def test_a_failure_and_the_hang_that_led_to_it_are_one() -> None:
    hang, failure = node(0, NEVER.format(6, 60), 100.0), node(1, "rank 1 was killed", 110.0, FAILURE)
    assert counted([hang, failure]) == [2]


def test_the_beginning_of_an_id_that_fits_two_incidents_asks_which() -> None:
    groups = incident_bundle.moments([node(0, NEVER.format(step, 5), 100.0 + step) for step in (1, 2)])
    assert incident_bundle.chosen(groups, None)[0].id == "102-hang-0"
    assert incident_bundle.chosen(groups, "101")[0].id == "101-hang-0"
    with pytest.raises(UsageError, match=r"'10' fits 2 incidents; which one: 101-hang-0, 102-hang-0\?"):
        incident_bundle.chosen(groups, "10")
    with pytest.raises(UsageError, match="no incident '77'"):
        incident_bundle.chosen(groups, "77")


def test_the_node_whose_rank_is_named_tells_it() -> None:
    """The others have lost a peer."""
    states = (RankState(rank=0, node=0), RankState(rank=1, node=1))
    entries = [node(number, NEVER.format(1, 5), 100.0) for number in (0, 1)]
    entries = [replace(entry, incident=replace(entry.incident, states=states)) for entry in entries]
    chosen = incident_bundle.chosen(incident_bundle.moments(entries), None)
    assert [entry.incident.node_rank for entry in chosen] == [1, 0]


# -- bounds of time ----------------------------------------------------------------------------


def test_a_fact_that_hangs_is_told_and_holds_nothing_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, released, answers = threading.Event(), threading.Event(), list[bool]()

    def hangs() -> str:
        asked.set()
        answers.append(released.wait(60))
        return "an answer"

    monkeypatch.setitem(incident_facts.ALL, "gpus.txt", hangs)  # the last one
    made = collector(tmp_path)
    made.collect(HANG, "nothing moves")
    assert asked.wait(60)
    monkeypatch.setattr(incident_collection, "_FACTS_S", 0.1)
    made.close()
    assert answers == [], "facts are collected beside"
    (one,) = incident_bundle.stored(str(tmp_path))
    assert "host/: no answer yet" in one.incident.missing
    assert "host/network.txt" in one.files
    released.set()
    monkeypatch.setattr(incident_collection, "_FACTS_S", 60.0)
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
    """One GPU that answers some questions; one has fallen off the bus."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, works: bool = True) -> None:
        super().__init__("pynvml")
        self.works = works
        self.nvmlDeviceGetCount = lambda: 2
        self.nvmlDeviceGetTemperature = lambda device, sensor: 88
        self.nvmlDeviceGetMemoryInfo = lambda device: SimpleNamespace(used=3 << 30)
        self.nvmlDeviceGetClockInfo = lambda device, kind: {1: 1200}[kind]
        self.nvmlDeviceGetCurrentClocksThrottleReasons = lambda device: 0
        self.nvmlShutdown = lambda: None

    def nvmlInit(self) -> None:
        if not self.works:
            raise self.NVMLError("Driver Not Loaded")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == 1:
            raise self.NVMLError("GPU is lost")
        return index

    def nvmlDeviceGetRemappedRows(self, device: int) -> tuple[int, int, bool, bool]:
        raise self.NVMLError("Not Supported")


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
