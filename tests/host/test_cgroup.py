"""CPU quota, memory limit and OOM kills, read from captured cgroup trees of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_launch.host import machine


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2_CONTAINER = {
    "proc/self/cgroup": "0::/\n",
    "sys/fs/cgroup/cgroup.controllers": "cpuset cpu io memory pids\n",
    "sys/fs/cgroup/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/memory.max": "1073741824\n",
    "sys/fs/cgroup/memory.events": "low 0\nhigh 0\nmax 12\noom 3\noom_kill 2\n",
}
V1_CONTAINER = {
    "proc/self/cgroup": "4:cpu,cpuacct:/kubepods/pod1\n3:memory:/kubepods/pod1\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "536870912\n",
    "sys/fs/cgroup/memory/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 7\n",
}


def test_a_v2_container_tells_quota_limit_and_oom_kills(tmp_path: Path) -> None:
    groups = machine.own_groups(tree(tmp_path, V2_CONTAINER))
    assert machine.cpu_quota(groups) == 2.5
    assert machine.memory_limit_bytes(groups) == 2**30
    assert machine.oom_kills(groups) == 2


def test_a_v1_container_tells_quota_limit_and_oom_kills(tmp_path: Path) -> None:
    groups = machine.own_groups(tree(tmp_path, V1_CONTAINER))
    assert machine.cpu_quota(groups) == 1.5
    assert machine.memory_limit_bytes(groups) == 2**29
    assert machine.oom_kills(groups) == 7


def test_the_smallest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    files = V2_CONTAINER | {
        "proc/self/cgroup": "0::/pod/container\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/pod/cpu.max": "200000 100000\n",
        "sys/fs/cgroup/pod/memory.max": "4096\n",
        "sys/fs/cgroup/pod/container/cpu.max": "max 100000\n",
        "sys/fs/cgroup/pod/container/memory.max": "8192\n",
    }
    groups = machine.own_groups(tree(tmp_path, files))
    assert machine.cpu_quota(groups) == 2.0
    assert machine.memory_limit_bytes(groups) == 4096


def test_the_most_memory_that_the_group_had(tmp_path: Path) -> None:
    v2 = V2_CONTAINER | {"sys/fs/cgroup/memory.peak": "123\n"}
    v1 = V1_CONTAINER | {"sys/fs/cgroup/memory/memory.max_usage_in_bytes": "456\n"}
    assert machine.memory_peak_bytes(machine.own_groups(tree(tmp_path / "v2", v2))) == 123
    assert machine.memory_peak_bytes(machine.own_groups(tree(tmp_path / "v1", v1))) == 456
    assert machine.memory_peak_bytes(machine.own_groups(tree(tmp_path / "none", {}))) is None


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"sys/fs/cgroup/cgroup.controllers": "cpu\n", "sys/fs/cgroup/cpu.max": "max 100000\n"},
        {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n"},
        {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": "10\n", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "0\n"},
        {"sys/fs/cgroup/cgroup.controllers": "cpu\n", "sys/fs/cgroup/cpu.max": "garbage\n"},
        {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"},
    ],
    ids=["no cgroups", "v2 max", "v1 -1", "zero period", "garbage", "v1 largest number"],
)
def test_no_limit_is_none(tmp_path: Path, files: dict[str, str]) -> None:
    groups = machine.own_groups(tree(tmp_path, files))
    assert machine.cpu_quota(groups) is None
    assert machine.memory_limit_bytes(groups) is None
    assert machine.oom_kills(groups) is None


def test_a_path_of_the_host_that_is_not_mounted_here_means_the_mounts_root(tmp_path: Path) -> None:
    files = V2_CONTAINER | {"proc/self/cgroup": "0::/../../kubepods.slice/pod9\n"}
    assert machine.cpu_quota(machine.own_groups(tree(tmp_path, files))) == 2.5
