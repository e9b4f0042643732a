"""Segments of dead workers go, everybody else's stay: on a memory file system, with real holders."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from trainer_launch.host import shm
from trainer_launch.host.shm import Baseline, Removed, sweep

DEAD = 4_194_304 + 1  # above the largest pid that Linux gives
HOLDER = """
import ctypes, os, sys
how, path = sys.argv[1:]
file = os.open(path, os.O_RDWR if how == "mapped" else os.O_RDONLY)
if how != "open":
    mapper = ctypes.CDLL(None).mmap  # Python's own keeps a descriptor
    mapper.restype = ctypes.c_void_p
    mapper.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    assert mapper(None, 4096, 3 if how == "mapped" else 1, 1, file, 0) > 0
    os.close(file)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder in memory that stands for /dev/shm."""
    made = Path(tempfile.mkdtemp(prefix="trainer-launch-test-", dir="/dev/shm"))
    yield made
    shutil.rmtree(made)


def made(folder: Path, name: str, size: int = 4096) -> Path:
    path = folder / name
    path.write_bytes(b"x" * size)
    return path


@pytest.mark.parametrize(
    "name",
    [
        f"torch_{DEAD}_1804289383_0",
        "psm_21467cd3",
        "sem.mp-a1b2c3d4",
        "sem.loky-1234-abc_d",
        "nccl-NzwJ7O",
        "nccl-shm-recv-1462445a6f01cbfc-1-2-3",
        "vader_segment.node-0.0.7f1d0001.3",
        "sm_segment.node-0.0.b7470000.0",
        "ucx_shm_posix_5f3a2",
    ],
)
def test_what_dead_workers_shared_is_removed(folder: Path, name: str) -> None:
    made(folder, name)
    assert sweep((), str(folder)) == Removed(1, 4096)
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    ["imagenet.bin", "psm_21467cd3.txt", "torch_12", "sem.mine", "my_psm_21467cd3", "nccl-topology.xml", ".hidden"],
)
def test_what_no_framework_named_stays(folder: Path, name: str) -> None:
    made(folder, name)
    assert sweep((), str(folder)) == Removed()
    assert (folder / name).exists()


def test_what_was_there_before_the_run_stays_and_a_later_one_of_its_name_does_not(folder: Path) -> None:
    path = made(folder, "psm_0a")
    before = [segment.key for segment in shm.segments(str(folder))]
    assert sweep(before, str(folder)) == Removed()
    newer = made(folder, "newer")  # while the old one lives, so that its inode number is not used anew
    newer.replace(path)
    assert sweep(before, str(folder)).count == 1


def test_links_folders_and_other_users_files_stay(folder: Path) -> None:
    target = made(folder, "data")
    (folder / "psm_0a").symlink_to(target)
    (folder / "psm_0b").mkdir()
    os.link(made(folder, "psm_0c"), folder / "second-name")
    assert sweep((), str(folder)) == Removed()
    assert len(list(folder.iterdir())) == 5


def test_a_segment_whose_name_has_a_live_process_stays(folder: Path) -> None:
    made(folder, f"torch_{os.getpid()}_1804289383_0")
    assert sweep((), str(folder)) == Removed()


def test_another_users_segment_stays(folder: Path) -> None:
    require(os.geteuid() == 0, "giving a file away needs root")
    os.chown(made(folder, "psm_0a"), 65534, 65534)
    assert sweep((), str(folder)) == Removed()


@pytest.mark.process
@pytest.mark.parametrize("how", ["open", "mapped", "mapped to read"])
@pytest.mark.parametrize("where", ["here", "in another pid namespace"])
def test_a_live_neighbours_segment_stays_until_it_dies(folder: Path, how: str, where: str) -> None:
    path = made(folder, "psm_0a")
    wrap = []
    if where != "here":
        wrap = ["unshare", "-pf", "--kill-child"]
        require(subprocess.run([*wrap, "true"], capture_output=True).returncode == 0, "namespaces need root")
    argv = [*wrap, sys.executable, "-c", HOLDER, how, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"ready\n"
        assert sweep((), str(folder)) == Removed()
    assert sweep((), str(folder)).count == 1


# -- over the restart of a container ----------------------------------------------------------

LIFE = """
import os, sys
from trainer_launch.host.shm import Baseline
folder, hostname, name = sys.argv[1:]
ground = Baseline(hostname, folder, is_pid1=True)
open(os.path.join(folder, name), "w").write("x")
os._exit(137)
"""


def a_killed_container(folder: Path, hostname: str, leaves: str) -> None:
    ended = subprocess.run([sys.executable, "-c", LIFE, str(folder), hostname, leaves], check=False)
    assert ended.returncode == 137


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.name[0] != "."}


@pytest.mark.process
def test_the_next_container_removes_what_a_killed_one_left_but_not_what_was_there_before_it(folder: Path) -> None:
    made(folder, "psm_0a")
    a_killed_container(folder, "pod", "psm_0b")
    a_killed_container(folder, "pod", "psm_0c")  # removes 0b, leaves 0c
    assert names(folder) == {"psm_0a", "psm_0c"}
    ground = Baseline("pod", str(folder), is_pid1=True)
    assert ground.removed.count == 1
    assert names(folder) == {"psm_0a"}
    made(folder, "psm_0d")
    assert ground.sweep().count == 1
    ground.close()
    assert [path.name for path in folder.iterdir()] == ["psm_0a"]


@pytest.mark.process
@pytest.mark.parametrize(("hostname", "is_pid1"), [("another", True), ("pod", False)])
def test_a_strangers_note_is_not_believed(folder: Path, hostname: str, is_pid1: bool) -> None:
    a_killed_container(folder, "pod", "psm_0b")
    ground = Baseline(hostname, str(folder), is_pid1=is_pid1)
    assert ground.removed == ground.sweep() == Removed()
    assert names(folder) == {"psm_0b"}
    ground.close()


def test_a_launcher_beside_us_keeps_its_note(folder: Path) -> None:
    first = Baseline("pod", str(folder), is_pid1=True)
    made(folder, "psm_0a")
    second = Baseline("pod", str(folder), is_pid1=True)
    assert second.removed == second.sweep() == Removed()
    second.close()
    assert first.sweep().count == 1
    first.close()
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "note", [b"", b"\xff", b"[]", b'{"hostname": "pod"}', b'{"hostname": "pod", "before": [[1]]}']
)
def test_a_broken_note_is_as_none(folder: Path, note: bytes) -> None:
    made(folder, "psm_0a")
    (folder / ".trainer-launch-before").write_bytes(note)
    ground = Baseline("pod", str(folder), is_pid1=True)
    assert ground.removed == Removed()
    assert ("psm_0a", (folder / "psm_0a").stat().st_ino) in ground.before
    ground.close()
