"""What `run` says about the container that it is in, beside what an init container's preflight has left."""

from __future__ import annotations

import json
import logging
from pathlib import Path

from msgspec.structs import replace

from trainer_launch.model.findings import Fault, Finding, Scope, Status
from trainer_launch.preflight import report_formats, thresholds
from trainer_launch.preflight.check import STATE_FILE
from trainer_launch.preflight.container.resource_limits import differences, fault_of

LARGE = Finding(check="shm", status=Status.PASS, text="all is well", measured=8192, unit="MiB")
SMALL = replace(LARGE, status=Status.FAIL, fault=Fault.JOB, text="too little", measured=64, action="mount more")
UNLIMITED = Finding(check="memory", status=Status.PASS, text="no limit", unit="MiB")
LIMITED = Finding(check="memory", status=Status.PASS, text="enough", measured=4096, unit="MiB")
UNKNOWN = Finding(check="shm", status=Status.UNKNOWN, text="?")


def told(before: Finding, now: Finding) -> list[tuple[int, str]]:
    return list(differences({before.check: before}, (now,)))


def test_what_is_worse_here_is_a_warning_with_what_to_do_and_what_only_differs_is_told() -> None:
    (worse,), (other,), (better,) = told(LARGE, SMALL), told(UNLIMITED, LIMITED), told(SMALL, LARGE)
    assert worse == (
        logging.WARNING,
        "shm: preflight's container had 8192 MiB, this one has 64 MiB: too little. What to do: mount more",
    )
    assert other == (logging.INFO, "memory: preflight's container had no limit, this one has 4096 MiB")
    assert better[0] == logging.INFO
    assert told(LARGE, LARGE) == told(SMALL, SMALL) == told(UNKNOWN, SMALL) == told(LARGE, UNKNOWN) == []
    assert list(differences({}, (SMALL,))) == []


def test_nothing_of_another_containers_file_breaks_a_line_of_the_log() -> None:
    nasty = Finding(check="shm", status=Status.PASS, text="", measured="1\n[trainer-launch] all is lost" + "x" * 99)
    ((_, sentence),) = told(nasty, LARGE)
    assert "\n" not in sentence
    assert len(sentence) < 150


def left(folder: Path, *found: Finding) -> str:
    """What `run` on pod-1 takes from the report of its preflight."""
    findings = [report_formats.finding_as_json(one) for one in found]
    said = {"format": thresholds.REPORT, "version": thresholds.REPORT_VERSION, "findings": findings}
    (folder / STATE_FILE).write_text(json.dumps(said))
    return fault_of(str(folder), "pod-1")


def test_only_what_preflight_found_faulty_on_this_very_node_is_its_fault(tmp_path: Path) -> None:
    assert fault_of(str(tmp_path), "pod-1") == ""
    ecc = Finding(check="gpu-ecc", status=Status.FAIL, fault=Fault.NODE, text="3 errors", subject="GPU 0")
    assert left(tmp_path, ecc, LARGE) == "gpu-ecc: 3 errors"
    assert left(tmp_path, replace(ecc, subject="node 1 (pod-1)")) == "gpu-ecc: 3 errors"
    innocent = (
        replace(ecc, subject="node 2 (pod-2)"),
        replace(ecc, fault=Fault.JOB),
        replace(ecc, scope=Scope.LINK, subject="node 1 (pod-1) - node 2 (pod-2)"),
        replace(ecc, status=Status.WARN, fault=None),
        SMALL,
    )
    assert left(tmp_path, *innocent) == ""
