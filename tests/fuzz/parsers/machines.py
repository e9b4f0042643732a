"""What the kernel and the drivers say of this machine: files below a root."""

from __future__ import annotations

import os
from pathlib import Path

from tests.fuzz.oracle import FOLDER, text_of
from tests.fuzz.registry import target
from trainer_launch.diagnosis import worker_samples
from trainer_launch.host import machine, network, process_tree, shm
from trainer_launch.model import Gpus
from trainer_launch.mpi import rank_environment, ssh_client, ssh_server
from trainer_launch.rehearsal import pod_watch

_V2 = "sys/fs/cgroup/"
_FILES = (
    *(f"{_V2}{name}" for name in ("cpu.max", "memory.max", "memory.peak", "memory.current", "memory.stat")),
    *(f"{_V2}{name}" for name in ("pids.max", "pids.current", "memory.events")),
    *("proc/self/cgroup", "proc/self/status", "proc/self/mounts", "proc/7/stat", "proc/7/status", "proc/7/maps"),
    *("proc/7/io", "proc/7/task/7/stat", "proc/7/task/7/io"),
    "proc/driver/nvidia/gpus/0/information",
    *("sys/class/infiniband/mlx5_0/ports/1/state", "sys/class/infiniband/mlx5_0/ports/1/rate"),
)


@target()
def kernel_file(data: bytes) -> None:
    """The first byte chooses which file has this content; all others are as they were."""
    root = Path(FOLDER)
    if not (root / _V2 / "cgroup.controllers").exists():
        (root / _V2).mkdir(parents=True)
        (root / _V2 / "cgroup.controllers").touch()
    if data:
        path = root / _FILES[data[0] % len(_FILES)]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data[1:])
    groups = machine.own_groups(root)
    for read in (
        machine.memory_limit_bytes,
        machine.memory_peak_bytes,
        machine.memory_used_bytes,
        machine.oom_kills,
    ):
        amount = read(groups)
        assert amount is None or amount >= 0
    quota = machine.cpu_quota(groups)
    assert quota is None or quota >= 0
    machine.pids_left(groups)
    shm.may_enlarge(root)
    proc = str(root / "proc")
    process_tree.catches(7, 2, proc)
    _processes(proc)
    network.adapter_ports(root)


def _processes(proc: str) -> None:
    if os.path.exists(f"{proc}/7/stat") and (entry := process_tree.read(7, proc)) is not None:
        worker_samples.read(entry, proc)


@target()
def variables(data: bytes) -> None:
    """An environment, NUL between its entries: what of it reaches sshd's configuration as one line each."""
    entries = (entry.partition("=")[::2] for entry in text_of(data).split("\0"))
    env = {name: value for name, value in entries if name}
    handed = rank_environment.handed_on(env, ())
    files = ssh_client.SshFiles("/run/x")
    config = ssh_server.configuration(files, port=22, addresses=(), user="root", is_root=True, log_level="INFO")
    text, bare = config + ssh_server.set_env(handed.env), config + ssh_server.set_env({"A": "b"})
    assert text.count("\n") <= bare.count("\n")
    if handed.env:
        assert _arguments(text.split("\n")[-2]) == [f"{name}={value}" for name, value in handed.env.items()]
    root = Path(FOLDER, "gpus")
    (root / "dev").mkdir(parents=True, exist_ok=True)
    for number in range(3):
        (root / f"dev/nvidia{number}").touch()
    found = machine.count(env, root)
    assert isinstance(found, Gpus)
    assert 0 <= found.count <= 3


def _arguments(line: str) -> list[str]:
    """A line of sshd_config as sshd takes it apart does: quotes group, a backslash keeps a quote or itself."""
    found: list[str] = []
    word, quoted, at = None, False, 0
    while at < len(line):
        sign = line[at]
        if sign == "\\" and line[at + 1 : at + 2] in ('"', "'", "\\"):
            word, at = (word or "") + line[at + 1], at + 1
        elif sign == '"':
            word, quoted = word or "", not quoted
        elif sign in " \t" and not quoted:
            found += [] if word is None else [word]
            word = None
        else:
            word = (word or "") + sign
        at += 1
    assert not quoted
    return (found if word is None else [*found, word])[1:]


@target()
def proc_file(data: bytes) -> None:
    """The children of a process, and its environment."""
    text = data.decode("utf-8", "replace")
    folder = Path(FOLDER, "proc2/9/task/9")
    folder.mkdir(parents=True, exist_ok=True)
    proc = str(folder.parents[2])
    (folder / "children").write_bytes(data)
    (folder.parents[1] / "environ").write_bytes(data)
    found = process_tree.environment(9, proc)
    assert found is None or all("\0" not in name for name in found)
    assert all(pid > 0 for pid in process_tree.children(9, proc) or ())
    for name in ("RANK", "LOCAL_RANK"):
        rank = pod_watch.chosen({9: {name: text}, 10: dict(found or {})}, {10: 9}, 0)
        assert rank in (None, 9, 10)
