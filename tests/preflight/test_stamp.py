"""--skip-if-passed-within: which stamps are believed, what they spare, and what they never do."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from trainer_launch.model import settings
from trainer_launch.model.findings import Fault, Finding, Scope, Status
from trainer_launch.preflight import stamp
from trainer_launch.preflight.policy import Policy
from trainer_launch.preflight.stamp import Stamp, settle, why_not

HOUR_S = 3600.0
NAME = "node 1 (pod-1)"
UNDER_LOAD = ("gpu-load", "gpu-clocks", "gemm", "external")
LOADED = Finding(check="gpu-load", status=Status.PASS, scope=Scope.GPU, text="right")
SLOW = Finding(check="gemm", status=Status.FAIL, fault=Fault.NODE, subject=f"{NAME}, GPU 1", text="slow")
ECC = Finding(check="gpu-ecc", status=Status.FAIL, fault=Fault.NODE, scope=Scope.GPU, subject="GPU 1", text="2")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The root of a machine's file system, with two GPUs."""
    root = tmp_path / "root"
    boot = root / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("b0071d\n")
    (root / "dev").mkdir()
    for device in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (root / "dev" / device).touch()
    return root


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The hostPath."""
    made = tmp_path / "stamps"
    made.mkdir(mode=0o755)
    return made


def of(
    root: Path,
    words: str = "",
    level: str = "standard",
    node: str = "gpu-17",
    policy: Policy | None = None,
    **env: str,
) -> Stamp:
    typed = dict(word.split("=", 1) for word in words.split())
    made = stamp.of_this_node(settings.load(typed, {}), policy or Policy(), level, {"NODE_NAME": node, **env}, root)
    assert made is not None
    return made


def left(root: Path, folder: Path, *findings: Finding, **more: Any) -> Stamp:
    """The stamp of a machine after these findings."""
    made = of(root, **more)
    settle(made, findings or (LOADED,), UNDER_LOAD, NAME, folder=str(folder))
    return made


def later(now: Stamp, seconds: float = 60.0) -> Stamp:
    return replace(now, uptime_s=now.uptime_s + seconds)


def test_a_machine_that_passed_is_believed_for_as_long_as_asked(machine: Path, folder: Path) -> None:
    made = left(machine, folder)
    assert why_not(later(made, 5 * HOUR_S), 6 * HOUR_S, str(folder)) == ""
    assert "passed 7.0 h ago, which is too long" in why_not(later(made, 7 * HOUR_S), 6 * HOUR_S, str(folder))


def test_a_stamp_of_a_future_time_is_not_believed_and_no_clock_is_asked(machine: Path, folder: Path) -> None:
    made = left(machine, folder)
    assert why_not(later(made, -5.0), 6 * HOUR_S, str(folder)) == "the stamp is of a future time"


@pytest.mark.parametrize(
    "more",
    [
        {"node": "gpu-18"},
        {"level": "quick"},
        {"words": "only=gpu-load"},
        {"words": "external_check=dcgmi"},
        {"policy": Policy(rules={"gpu-clocks": "warn"})},
        {"policy": Policy(observe=True)},
    ],
)
def test_a_preflight_that_asks_for_other_things_tests_again(
    more: dict[str, Any], machine: Path, folder: Path
) -> None:
    left(machine, folder)
    assert why_not(of(machine, **more), 6 * HOUR_S, str(folder)).startswith(
        "the stamp is of another boot, machine, "
    )


def test_a_machine_that_was_booted_again_or_a_pod_with_other_gpus_tests_again(machine: Path, folder: Path) -> None:
    """A pod with other GPUs has a stamp of its own, which is not there yet."""
    left(machine, folder)
    assert why_not(of(machine, CUDA_VISIBLE_DEVICES="0"), HOUR_S, str(folder)) == f"{folder} has no stamp"
    (machine / "dev/nvidia1").rename(machine / "dev/nvidia5")
    assert why_not(of(machine), HOUR_S, str(folder)) == f"{folder} has no stamp"
    (machine / "dev/nvidia5").rename(machine / "dev/nvidia1")
    (machine / "proc/sys/kernel/random/boot_id").write_text("other")
    assert why_not(of(machine), HOUR_S, str(folder)).startswith("the stamp is of another boot, ")


def test_another_reference_is_another_setting(machine: Path, folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "healthy.json"
    table.write_text("one")
    left(machine, folder, words=f"reference={table}")
    assert why_not(of(machine, words=f"reference={table}"), HOUR_S, str(folder)) == ""
    table.write_text("two")
    assert why_not(of(machine, words=f"reference={table}"), HOUR_S, str(folder))


def the_stamp(folder: Path) -> Path:
    (path,) = folder.iterdir()
    return path


def test_a_stamp_that_others_may_write_is_not_believed(machine: Path, folder: Path) -> None:
    made = left(machine, folder)
    for mode in (0o664, 0o646, 0o666):
        the_stamp(folder).chmod(mode)
        assert why_not(made, HOUR_S, str(folder)) == "others may write the stamp"
    the_stamp(folder).chmod(0o644)
    for mode in (0o777, 0o1777, 0o775):
        folder.chmod(mode)
        assert why_not(made, HOUR_S, str(folder)) == f"others may write to {folder}"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_a_stamp_of_another_user_is_not_believed(machine: Path, folder: Path) -> None:
    made = left(machine, folder)
    os.chown(the_stamp(folder), 1000, 1000)
    assert why_not(made, HOUR_S, str(folder)) == "others may write the stamp"
    os.chown(the_stamp(folder), 0, 0)
    os.chown(folder, 1000, 1000)
    assert why_not(made, HOUR_S, str(folder)) == f"others may write to {folder}"


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "garbage", "large", "nested"])
def test_what_is_no_stamp_is_not_believed_and_holds_nobody_up(kind: str, machine: Path, folder: Path) -> None:
    made = left(machine, folder)
    path = the_stamp(folder)
    copy = path.rename(path.parent.parent / "copy")
    if kind == "link":
        path.symlink_to(copy)
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.write_text({"garbage": "{}", "large": copy.read_text() + " " * 5000, "nested": "[" * 4000}[kind])
    assert why_not(made, HOUR_S, str(folder))


def test_without_the_mount_everything_is_tested_and_nothing_fails(
    machine: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone = tmp_path / "gone"
    made = left(machine, gone)
    assert why_not(made, HOUR_S, str(gone)) == f"{gone} is not mounted (a hostPath)"
    assert "was not changed: No such file or directory" in caplog.text
    assert not gone.exists()


def test_without_a_boot_id_there_are_no_stamps(machine: Path) -> None:
    (machine / "proc/sys/kernel/random/boot_id").unlink()
    assert stamp.of_this_node(settings.load({}, {}), Policy(), "standard", {}, machine) is None


def test_no_secret_is_in_the_stamp(machine: Path, folder: Path) -> None:
    made = left(machine, folder, words="external_check=check.sh", HF_TOKEN="hf_abcdefghijklmnopqrstuvwx")
    told = the_stamp(folder).read_text()
    assert "hf_" not in told
    assert "check.sh" not in told
    assert json.loads(told)["conditions"] == made.conditions


@pytest.mark.parametrize(
    "findings",
    [
        (LOADED, SLOW),
        (LOADED, replace(SLOW, status=Status.WARN, fault=None)),
        (LOADED, ECC),
        (LOADED, replace(LOADED, check="gpu-clocks", status=Status.UNKNOWN)),
        (replace(LOADED, status=Status.SKIPPED),),
        (LOADED, replace(LOADED, check="external", status=Status.UNKNOWN, scope=Scope.NODE)),
        (LOADED, replace(ECC, check="external-dcgm", status=Status.WARN, fault=None)),
        (LOADED, Policy(rules={"gpu-clocks": "warn"}).graded(replace(ECC, check="gpu-clocks"))),
        (replace(LOADED, check="cpu"),),
    ],
)
def test_a_machine_that_did_not_pass_what_the_stamp_spares_gets_none_and_loses_an_older_one(
    findings: tuple[Finding, ...], machine: Path, folder: Path
) -> None:
    made = left(machine, folder)
    assert why_not(made, HOUR_S, str(folder)) == ""
    left(machine, folder, *findings)
    assert why_not(made, HOUR_S, str(folder)) == f"{folder} has no stamp"


@pytest.mark.parametrize(
    "finding",
    [
        replace(SLOW, subject="node 2 (pod-2), GPU 1"),
        replace(ECC, check="cpu", status=Status.WARN, fault=None, subject=""),
        replace(ECC, check="facts", fault=Fault.JOB, subject=""),
        Finding(check="gemm", status=Status.UNKNOWN, scope=Scope.JOB, text="no reference tells of this model"),
        Finding(check="dns", status=Status.UNKNOWN, text="not in DNS yet"),
    ],
)
def test_what_another_machine_or_the_job_has_costs_this_one_nothing(
    finding: Finding, machine: Path, folder: Path
) -> None:
    made = left(machine, folder, LOADED, finding)
    assert why_not(made, HOUR_S, str(folder)) == ""


def test_a_spared_machine_keeps_the_age_of_its_stamp_and_loses_it_by_a_fault_that_needs_no_load(
    machine: Path, folder: Path
) -> None:
    made = left(machine, folder)
    now, rest = later(made, HOUR_S), replace(ECC, status=Status.PASS, fault=None)
    settle(now, (rest,), UNDER_LOAD, NAME, is_spared=True, folder=str(folder))
    assert json.loads(the_stamp(folder).read_text())["uptime_s"] == made.uptime_s
    settle(now, (ECC,), UNDER_LOAD, NAME, is_spared=True, folder=str(folder))
    assert list(folder.iterdir()) == []
