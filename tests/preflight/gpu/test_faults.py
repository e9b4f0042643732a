"""Facts and faults of GPUs below the children that look; more are in tests/preflight/fault_catalogue.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.preflight.gpu import machine
from tests.preflight.gpu.machine import Change, findings, loud, subject
from tests.preflight.world import HEALTHY
from trainer_launch.host import deadline_subprocess, process_tree
from trainer_launch.model import Cpus, Gpus
from trainer_launch.model.findings import Status
from trainer_launch.preflight import gpu_collect as collect
from trainer_launch.preflight.check import with_gpus

pytestmark = pytest.mark.process

NODE, JOB, WARN, UNKNOWN = "fail node", "fail job", "warn", "unknown"


@pytest.fixture(autouse=True)
def played(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "BENCH", machine.BENCH)
    monkeypatch.setattr(collect, "SETTLE_S", 3.0)


def card(number: int, **values: Any) -> Change:
    """Card `number` tells this at all times."""
    return lambda told: told["gpus"][number].update(values)


def under_load(number: int, **values: Any) -> Change:
    return lambda told: told["gpus"][number]["load"].update(values)


def benching(number: int, **values: Any) -> Change:
    return lambda told: told["gpus"][number]["bench"].update(values)


def everywhere(**values: Any) -> Change:
    return lambda told: [one.update(values) for one in told["gpus"]]


@pytest.mark.parametrize("level", ["quick", "standard"])
def test_healthy_cards_at_their_power_limit_give_no_warning(level: str, tmp_path: Path) -> None:
    found = findings(subject(machine.environment(tmp_path), level))
    assert loud(found) == []
    assert {one.check for one in found} >= {"gpu-count", "gpu-ecc", "gpu-nvlink", "gpu-memory"}
    assert ("gpu-load" in {one.check for one in found}) is (level != "quick")


UNTOLD = ("uncorrected", "remapped", "nvlinks", "mig", "fabric")


def test_what_a_card_or_a_driver_does_not_tell_is_no_fault(tmp_path: Path) -> None:
    """A consumer card: no ECC, no NVLink; a driver from before recovery actions and new names."""
    nothing: dict[str, Any] = {name: {"error": 3} for name in UNTOLD}

    def old(told: dict[str, Any]) -> None:
        everywhere(**nothing)(told)
        told["missing"] = ["recovery", "reasons"]
        for one in told["gpus"]:
            one["load"] |= {"old_reasons": 4}

    found = findings(subject(machine.environment(tmp_path, old)))
    assert loud(found) == [("gpu-recovery", UNKNOWN, "")]
    assert "the driver is too old for it" in next(one.text for one in found if one.check == "gpu-recovery")
    skipped = {one.check for one in found if one.status is Status.SKIPPED}
    assert skipped == {"gpu-ecc", "gpu-remap", "gpu-nvlink", "gpu-mig"}


def test_memory_that_is_given_back_in_a_moment_is_waited_for(tmp_path: Path) -> None:
    found = findings(subject(machine.environment(tmp_path, card(1, memory_used=[40 << 30, 40 << 30, 1 << 20]))))
    assert loud(found) == []


def test_errors_of_links_count_where_they_grow_under_load(tmp_path: Path) -> None:
    def grows(told: dict[str, Any]) -> None:
        told["gpus"][0]["nvlink_errors"] = 7  # from earlier
        told["gpus"][1]["load"]["nvlink_errors"] = [0, 5]

    assert loud(findings(subject(machine.environment(tmp_path, grows)))) == [("gpu-nvlink", WARN, "GPU 1")]


def test_who_holds_memory_is_not_loaded_and_the_others_are(tmp_path: Path) -> None:
    made = subject(machine.environment(tmp_path, card(1, memory_used=40 << 30)))
    assert made.cards is not None
    assert [test.gpu for test in made.cards.facts().tests] == [0, 2, 3]


def test_a_driver_that_hangs_is_a_fault_of_the_node_and_holds_nobody_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "FACTS_S", 4.0)
    found = findings(subject(machine.environment(tmp_path, lambda told: told.update(hangs="init"))))
    assert loud(found) == [("gpu-count", NODE, "")]
    assert "the driver hangs: no answer within 4 s" in found[0].text


def test_a_driver_is_not_blamed_for_a_python_that_starts_slowly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a slow disk, or without CPU."""
    monkeypatch.setattr(collect, "FACTS_S", 4.0)
    env = machine.environment(tmp_path) | {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "pynvml.py").write_text("import time\ntime.sleep(600)\n")
    found = findings(subject(env, "quick"))
    assert loud(found) == [("gpu-count", UNKNOWN, "")]
    assert "did not start: no answer within 4 s" in found[0].text


def test_a_driver_that_hangs_is_given_up_at_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "LEAST_S", 4.0)
    made = machine.environment(tmp_path, lambda told: told.update(hangs="init"))
    near = replace(subject(made), ends_at_s=time.monotonic())
    facts = collect.collect(made, "python3", "quick", 4, near.left_s)
    assert facts.trouble == "the driver hangs: no answer within 4 s"


def test_a_card_that_hangs_under_load_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "LOAD_S", 6.0)
    found = findings(subject(machine.environment(tmp_path, benching(2, hangs="gemm"))))
    assert loud(found) == [("gpu-load", NODE, "GPU 2")]
    text = next(one.text for one in found if one.check == "gpu-load")
    assert text == "GPU 2 its test hung at 'gemm', and was killed after 6 s"


@pytest.mark.parametrize(
    ("late", "told"), [((1, 2), [("gpu-load", UNKNOWN, "")]), ((2,), [("gpu-load", NODE, "GPU 2")])]
)
def test_cards_that_share_one_cpu_are_called_hung_only_where_all_others_are_done(
    late: tuple[int, ...], told: list[tuple[str, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "LOAD_S", 3.0)
    made = subject(
        machine.environment(tmp_path, lambda told: [benching(card, hangs="gemm")(told) for card in late])
    )
    few = replace(made, host=replace(made.host, cpus=Cpus(affinity=16, quota=1.0)), command=None)
    assert loud(findings(with_gpus(few, "standard"))) == told


@pytest.mark.parametrize("change", [{"hangs": "import torch"}, {"dies": "import torch"}])
def test_a_card_is_not_blamed_for_what_happens_before_it_is_touched(
    change: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a slow disk, or with a broken torch."""
    monkeypatch.setattr(collect, "LOAD_S", 4.0)
    found = findings(subject(machine.environment(tmp_path, benching(2, **change))))
    assert loud(found) == [("gpu-load", UNKNOWN, "")]
    assert "GPU 2: not tested: its test " in next(one.text for one in found if one.status is Status.UNKNOWN)


@pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning")  # so it is meant
def test_a_child_that_not_even_sigkill_ends_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated: the signal is not sent."""
    monkeypatch.setattr(collect, "LOAD_S", 6.0)
    monkeypatch.setattr(deadline_subprocess, "REAP_S", 0.2)
    spared: list[int] = []
    kill = process_tree.kill
    monkeypatch.setattr(process_tree, "kill", spared.append)
    try:
        found = findings(subject(machine.environment(tmp_path, benching(2, hangs="pcie"))))
    finally:
        for pid in spared:
            kill(pid)
    assert loud(found) == [("gpu-load", NODE, "GPU 2")]
    assert "not even SIGKILL ends it: it is stuck inside the driver" in str(found)


def test_more_workers_than_gpus_and_fewer(tmp_path: Path) -> None:
    env = machine.environment(tmp_path)
    assert loud(findings(subject(env, "quick", workers=6))) == [("gpu-count", JOB, "")]
    assert loud(findings(subject(env, "quick", workers=2))) == [("gpu-count", WARN, "")]


def test_only_the_cards_that_the_job_sees_count(tmp_path: Path) -> None:
    env = machine.environment(tmp_path, card(0, uncorrected=1)) | {"CUDA_VISIBLE_DEVICES": "1,GPU-0003"}
    found = findings(subject(env, gpus=2))
    assert loud(found) == []
    assert "GPUs 1, 3: whole" in str(found)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda told: None, [("gpu-count", JOB, "")]),
        (card(1, handle={"error": 15}), [("gpu-recovery", NODE, "GPU 1")]),  # it tells no UUID any more
    ],
)
def test_a_gpu_that_no_machine_of_this_job_has_is_the_jobs_fault_unless_one_was_lost(
    change: Change, told: list[tuple[str, str, str]], tmp_path: Path
) -> None:
    env = machine.environment(tmp_path, change) | {"CUDA_VISIBLE_DEVICES": "GPU-0000,GPU-of-another-machine"}
    assert loud(findings(subject(env, "quick", gpus=2))) == told


def test_beside_a_lost_card_the_others_are_watched(tmp_path: Path) -> None:
    def change(told: dict[str, Any]) -> None:
        card(1, handle={"error": 15})(told)
        card(2, xids=[62])(told)

    found = loud(findings(subject(machine.environment(tmp_path, change))))
    assert found == [("gpu-recovery", NODE, "GPU 1"), ("gpu-xid", NODE, "GPU 2")]


def test_mig_that_the_job_asked_for_is_the_jobs_fault_with_several_workers(tmp_path: Path) -> None:
    env = machine.environment(tmp_path, card(0, mig=1), gpus=1) | {"CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}
    assert loud(findings(subject(env, "quick", gpus=1, workers=1))) == []
    found = loud(findings(subject(env, "quick", gpus=2, workers=2)))
    assert found == [("gpu-mig", JOB, "GPU 0")]


def test_a_part_of_a_card_that_cdi_gives_is_no_fault_of_the_node(tmp_path: Path) -> None:
    """It is named in no variable, and other containers use the rest of the card's memory."""
    change = everywhere(mig=1, mig_parts=1, memory_used=40 * machine.GIB)
    env = machine.environment(tmp_path, change, gpus=1) | {"NVIDIA_VISIBLE_DEVICES": "void"}
    assert loud(findings(subject(env, gpus=1, workers=1))) == []


def test_cards_of_other_containers_that_the_library_counts_are_not_lost(tmp_path: Path) -> None:
    env = machine.environment(tmp_path, card(1, handle={"error": 4}))
    assert loud(findings(subject(env, gpus=3))) == []
    assert loud(findings(subject(env, "quick", gpus=4, workers=3))) == []  # /dev of the whole machine is mounted


def test_links_of_cards_that_were_never_busy_are_unknown(tmp_path: Path) -> None:
    """As where the program's Python has no torch: an idle card's link is slow."""

    def idle(told: dict[str, Any]) -> None:
        everywhere(load={"reasons": 1, "pcie_gen": 1, "pcie_width": 8})(told)

    assert loud(findings(subject(machine.environment(tmp_path, idle)))) == [
        ("gpu-clocks", UNKNOWN, ""),
        ("gpu-pcie", UNKNOWN, ""),
    ]


def test_without_gpus_one_line_is_said_and_no_child_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError("a child was started")

    monkeypatch.setattr(deadline_subprocess, "RunningCommand", refuse)
    none = replace(HEALTHY, host=replace(HEALTHY.host, gpus=Gpus(count=0, reason="none")), cards=None)
    assert with_gpus(none, "standard") is none
    (found,) = findings(none)
    assert (found.check, found.status) == ("gpu-count", Status.SKIPPED)
    amd = replace(HEALTHY.host, gpus=Gpus(count=8, reason="8 AMD devices", is_nvidia=False))
    (found,) = findings(with_gpus(replace(none, host=amd), "standard"))
    assert found.text == "8 AMD devices: only NVIDIA's GPUs are checked"


def test_a_python_without_torch_and_without_the_library_is_told_in_one_line_each(tmp_path: Path) -> None:
    env = machine.environment(tmp_path, lambda told: told["bench"].update(fails=["import torch", "No module"]))
    env = {name: value for name, value in env.items() if name != "PYTHONPATH"} | {"PYTHONPATH": str(tmp_path)}
    (tmp_path / "pynvml.py").write_text("raise ImportError")
    found = findings(subject(env))
    assert [(one.check, one.status) for one in found] == [
        ("gpu-count", Status.UNKNOWN),
        ("gpu-load", Status.SKIPPED),
    ]
    assert "nvidia-ml-py is not installed" in found[0].text
