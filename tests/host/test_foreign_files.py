"""Files that a worker, or whoever made a copy, may have put there: they hold nobody up and fill no memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from trainer_launch.diagnosis import incident_bundle, stacks
from trainer_launch.diagnosis.hang_detection import WatchedWorker
from trainer_launch.host import files, runtime_directory
from trainer_launch.model import Workers
from trainer_launch.model.errors import NodeError
from trainer_launch.observability import event_log, node_view, progress
from trainer_launch.pytorch import error_file, function_launch
from trainer_launch.pytorch.worker_processes import LogFolders
from trainer_launch.supervisor import error_lines

MAKE: dict[str, Callable[[Path], None]] = {
    "a FIFO": os.mkfifo,
    "a link to /dev/zero": lambda path: path.symlink_to("/dev/zero"),
    "a link to a file": lambda path: path.symlink_to(path.parent / "secret"),
    "a directory": Path.mkdir,
    "nothing": lambda path: None,
}
# What reads which file of the folder, and what comes of none.
READERS: dict[str, tuple[str, Callable[[str], object], object]] = {
    "files.read": ("any", lambda folder: files.read(f"{folder}/any", 100), None),
    "torch's error file": ("error.json", lambda folder: error_lines.read_error_file(f"{folder}/error.json"), {}),
    "stacks": ("stacks.0", lambda folder: stacks.answers({worker(folder): -1}, 0.0), {}),
    "reports": ("progress-0.json", progress.read, ()),
    "a launcher's view": ("launcher.json", node_view.read, None),
    "news": ("news.jsonl", event_log.standing, event_log.Standing()),
    "an incident": ("incident.json", incident_bundle.read, None),
}


def worker(folder: str) -> WatchedWorker:
    return WatchedWorker("rank 0", 2**22, 1, 0, 0, f"{folder}/stacks.0")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("kind", MAKE)
def test_what_is_no_regular_file_is_not_read(tmp_path: Path, kind: str, reader: str) -> None:
    (tmp_path / "secret").write_text(json.dumps({"message": "secret", "event": "incident", "time_s": 1.0}))
    name, read, nothing = READERS[reader]
    MAKE[kind](tmp_path / name)
    assert read(str(tmp_path)) == nothing


def test_a_huge_file_is_read_in_part(tmp_path: Path) -> None:
    path = tmp_path / "huge"
    path.write_bytes(b"first" + bytes(100) + b"last")
    os.truncate(path, 1 << 40)  # sparse
    assert files.read(str(path), 5) == b"first"
    assert files.read(str(path), 4, 105) == b"last"
    assert files.read(str(path), 7, -3) == bytes(3)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", MAKE)
def test_news_are_written_to_a_file_of_ours_or_not_at_all(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("x")
    MAKE[kind](tmp_path / runtime_directory.NEWS)
    runtime_directory.tell(str(tmp_path), "incident", text="rank 1 hangs")
    assert (tmp_path / "secret").read_text() == "x"
    assert event_log.standing(str(tmp_path)).incident == ("rank 1 hangs" if kind == "nothing" else None)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", MAKE)
def test_a_request_for_an_incident_is_heard_by_a_launcher_alone(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("x")
    MAKE[kind](tmp_path / runtime_directory.REQUESTS)
    assert not runtime_directory.request(str(tmp_path)), "nobody reads there"
    assert (tmp_path / "secret").read_text() == "x"


def test_a_launcher_hears_requests_and_not_that_somebody_only_looks(tmp_path: Path) -> None:
    heard = runtime_directory.hear_requests(str(tmp_path))
    try:
        assert runtime_directory.request(str(tmp_path), b"")
        with pytest.raises(BlockingIOError):
            os.read(heard, 100)
        assert runtime_directory.request(str(tmp_path))
        assert os.read(heard, 100) == b"\n"
    finally:
        os.close(heard)
    assert not runtime_directory.request(str(tmp_path)), "it has ended"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", MAKE)
def test_a_log_is_added_to_a_regular_file_or_not_at_all(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("x")
    MAKE[kind](tmp_path / "stdout.log")
    if kind == "nothing":
        for _ in range(2):
            os.close(files.appended(str(tmp_path / "stdout.log")))
    else:
        with pytest.raises(OSError, match=r"regular file|directory") as refused:
            files.appended(str(tmp_path / "stdout.log"))
        assert refused.value.filename == str(tmp_path / "stdout.log"), "an error names it"
    assert (tmp_path / "secret").read_text() == "x"


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", MAKE)
def test_what_is_in_the_place_of_a_directory_is_removed_in_its_stead(tmp_path: Path, kind: str) -> None:
    (tmp_path / "secret").write_text("x")
    MAKE[kind](tmp_path / "incident")
    incident_bundle.drop(str(tmp_path / "incident"))
    attempts = LogFolders(Workers(count=1, argv=(), env={}, errors=str(tmp_path / "errors")), "job")
    attempts.begin(0)
    first = Path(attempts.folder)
    files.remove_tree(str(first))
    MAKE[kind](first)
    attempts.begin(1)
    assert not os.path.lexists(first)
    assert sorted(os.listdir(tmp_path)) == ["errors", "secret"]


@pytest.mark.timeout(30)
def test_a_fifo_in_the_place_of_an_old_incident_is_removed_with_the_others(tmp_path: Path) -> None:
    folders = [tmp_path / f"20261129T112222Z-job-node0-{n}" for n in range(incident_bundle.KEPT + 2)]
    for folder in folders[1:]:
        folder.mkdir()
    os.mkfifo(folders[0])
    incident_bundle.remove_old(str(folders[-1]))
    assert sorted(tmp_path.iterdir()) == sorted(folders[2:])


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", MAKE)
def test_what_launch_reads_of_its_workers_holds_nobody_up(tmp_path: Path, kind: str) -> None:
    (tmp_path / "function.result.0").write_bytes(b"3\nthe third's")
    for name in ("function.result.1", "function.report.json"):
        MAKE[kind](tmp_path / name)
    assert function_launch.results(str(tmp_path)) == {3: b"the third's"}
    with pytest.raises(NodeError, match="was killed"):
        function_launch.raise_failure(str(tmp_path))


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", MAKE)
def test_a_worker_with_a_foreign_file_in_place_of_its_own_ends_as_ever(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "secret").write_text("x")
    MAKE[kind](tmp_path / "error.json")
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error_file.leave("ValueError: no luck", "")
    assert (tmp_path / "secret").read_text() == "x"
    said = error_lines.message_in(error_lines.read_error_file(str(tmp_path / "error.json")))
    assert said == ("ValueError: no luck" if kind == "nothing" else None)
