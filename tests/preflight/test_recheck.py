"""What `run` takes from the report that an init container's preflight has left."""

from __future__ import annotations

import json
from pathlib import Path

from msgspec.structs import replace

from trainer_launch.model.findings import Fault, Finding, Scope, Status
from trainer_launch.preflight import report_formats, thresholds
from trainer_launch.preflight.report_formats import fault_of

LARGE = Finding(check="shm", status=Status.PASS, text="all is well", measured=8192, unit="MiB")
SMALL = replace(LARGE, status=Status.FAIL, fault=Fault.JOB, text="too little", measured=64, action="mount more")


def left(folder: Path, *found: Finding, host: str = "pod-1") -> str:
    """What `run` on pod-1 takes from the report of its preflight."""
    findings = [report_formats.finding_as_json(one) for one in found]
    said = {"format": thresholds.REPORT, "version": thresholds.REPORT_VERSION, "findings": findings}
    (folder / "report.json").write_text(json.dumps({**said, "node": {"host": host}}))
    return fault_of(str(folder / "report.json"), "pod-1")


def test_only_what_preflight_found_faulty_on_this_very_node_is_its_fault(tmp_path: Path) -> None:
    assert fault_of(str(tmp_path / "report.json"), "pod-1") == ""
    ecc = Finding(check="gpu-ecc", status=Status.FAIL, fault=Fault.NODE, text="3 errors", subject="GPU 0")
    assert left(tmp_path, ecc, LARGE) == "gpu-ecc: 3 errors"
    assert left(tmp_path, ecc, host="pod-2") == "", "another node has written over it"
    assert left(tmp_path, replace(ecc, subject="node 1 (pod-1)")) == "gpu-ecc: 3 errors"
    innocent = (
        replace(ecc, subject="node 2 (pod-2)"),
        replace(ecc, fault=Fault.JOB),
        replace(ecc, scope=Scope.LINK, subject="node 1 (pod-1) - node 2 (pod-2)"),
        replace(ecc, status=Status.WARN, fault=None),
        SMALL,
    )
    assert left(tmp_path, *innocent) == ""
