"""--external-check: what a site's own command says of its machine; one that says nothing accuses nobody."""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.launching import LAUNCHER, clean_env, launch, program
from tests.preflight.world import subject
from tests.schemas.validator import violations
from tests.waiting import eventually
from trainer_launch.host.deadline_subprocess import Ended
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import Fault, Finding, Scope, Status
from trainer_launch.preflight import external_check
from trainer_launch.preflight.check import run
from trainer_launch.preflight.external_check import command_of, external

pytestmark = pytest.mark.process

SECRET = "hf_abcdefghijklmnopqrstuvwx"
DCGM = {
    "name": "dcgm",
    "status": "fail",
    "gpu": 3,
    "text": "memory test failed",
    "remedy": "RMA",
    "action": "replace the card",
    "measured": 2,
    "expected": 0,
    "unit": "errors",
    "evidence": ["dcgmi diag -r 3"],
}
GOOD = {"name": "nic-firmware", "status": "pass", "text": "28.43.2026 everywhere"}


def findings(program: str, deadline_s: float = 600.0) -> list[Finding]:
    """What a Python program's output comes to."""
    made = subject(
        external_check=shlex.join((sys.executable, "-c", program)),
        deadline_s=deadline_s,
        env={**os.environ, "HF_TOKEN": SECRET},
    )
    return list(run(made, [external]).findings)


def printed(*told: dict[str, Any], rest: str = "") -> str:
    return f"print({json.dumps({'findings': told})!r}){rest}"


def reported(*told: dict[str, Any]) -> bytes:
    return json.dumps({"findings": told}).encode()


def test_what_the_command_says_are_findings_of_this_machine() -> None:
    assert violations("external", {"findings": [DCGM, GOOD]}) == []
    summary, dcgm, firmware = findings(printed(DCGM, GOOD))
    assert (summary.check, summary.status) == ("external", Status.PASS)
    assert summary.text.startswith(f"{Path(sys.executable).name} reported 2 findings in ")
    assert (dcgm.check, dcgm.status, dcgm.fault) == ("external-dcgm", Status.FAIL, Fault.NODE)
    assert (dcgm.subject, dcgm.scope, dcgm.remedy, dcgm.measured) == ("GPU 3", Scope.GPU, "RMA", 2)
    assert (firmware.check, firmware.status, firmware.subject) == ("external-nic-firmware", Status.PASS, "")


def test_without_a_command_there_is_nothing_to_say() -> None:
    assert list(run(subject(), [external]).findings) == []


HANGS = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])"


@pytest.mark.parametrize(
    ("program", "why"),
    [
        (printed(DCGM, rest="; import os; os.abort()"), "it ended with signal 6"),
        ("import sys; sys.exit('no such device')", "it ended with exit code 1: no such device"),
        (printed(DCGM, rest="; print('done')"), "its output is not a report: not JSON"),
        ("print(' ' * (300 << 10))", "it printed more than 256 KiB"),
    ],
)
def test_a_command_that_crashes_or_prints_anything_else_is_unknown_and_no_accusation(
    program: str, why: str
) -> None:
    (finding,) = findings(program)
    assert (finding.check, finding.status, finding.fault) == ("external", Status.UNKNOWN, None)
    assert why in finding.text


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (b"[" * 100_000, "expected `object`, got `array`"),
        (bytes(range(256)), "not JSON"),
        (b'{"findings": [], "x": 1}', "object contains unknown field `x`"),
        (reported(DCGM | {"remedy": "SHOOT"}), "invalid enum value 'SHOOT'"),
        (reported(*[GOOD] * 101), "expected `array` of length <= 100"),
    ],
)
def test_output_that_is_no_report_is_a_sentence(output: bytes, why: str) -> None:
    read = external_check._report(Ended(status=0, stdout=output), 1.0)
    assert isinstance(read, str)
    assert read.startswith("its output is not a report: ")
    assert why in read


def test_a_command_that_is_not_there_is_unknown() -> None:
    (finding,) = run(subject(external_check="/no/such/dcgmi diag"), [external]).findings
    assert (finding.status, finding.text) == (
        Status.UNKNOWN,
        "dcgmi could not be started: No such file or directory",
    )


def test_a_command_that_hangs_is_killed_with_all_that_it_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_check, "_limit_s", lambda subject: 1.0)
    (finding,) = findings(f"print(flush=True); {HANGS}; time.sleep(600)")
    assert finding.status is Status.UNKNOWN
    assert "it did not finish within 1 s, and was killed" in finding.text
    assert external_check._running[-1].end().status == -signal.SIGKILL


def test_a_command_that_leaves_a_daemon_with_its_output_has_reported_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(external_check, "_limit_s", lambda subject: 5.0)
    assert findings(f"{HANGS}; {printed(DCGM)}")[1].check == "external-dcgm"


def test_what_a_command_prints_because_its_program_was_killed_is_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_check, "_limit_s", lambda subject: 1.0)
    waits = "import subprocess\nsubprocess.run(['sleep', '60'])\n"
    (finding,) = findings(f"{waits}{printed(DCGM)}")
    assert finding.status is Status.UNKNOWN
    assert "did not finish" in finding.text


def test_what_floods_its_output_is_bounded_in_time_and_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(external_check, "_limit_s", lambda subject: 1.0)
    (finding,) = findings("import sys\nwhile True: sys.stdout.write('x' * 65536)")
    assert finding.status is Status.UNKNOWN


def test_no_secret_and_no_second_line_gets_into_the_report() -> None:
    (_, told) = findings(printed(GOOD | {"text": f"token={SECRET}\nFATAL all", "evidence": [SECRET]}))
    assert SECRET not in repr(told)
    assert "\n" not in told.text
    (crashed,) = findings("import os, sys; sys.exit('cannot log in with ' + os.environ['HF_TOKEN'])")
    assert crashed.text.endswith("exit code 1: cannot log in with [redacted]")


@pytest.mark.parametrize(("text", "why"), [("'dcgmi", "No closing quotation"), ("", "invalid value ''")])
def test_what_is_no_command_line_is_refused(text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        command_of(text)


def test_a_policy_grades_it_and_the_report_is_as_its_schema_says(tmp_path: Path) -> None:
    script = program(tmp_path / "site-check", printed(DCGM), sys.executable)
    codes = {}
    for policy in ("external-dcgm=fatal", "external=off"):
        words = ("--json", "--only", "external", "--external-check", str(script), "--policy", policy)
        done = launch("preflight", *words)
        report = json.loads(done.stdout)
        assert violations("preflight", report) == []
        codes[policy] = done.returncode, sorted(one["check"] for one in report["findings"])
    both = ["external", "external-dcgm"]
    assert codes == {
        "external-dcgm=fatal": (30, both),
        "external=off": (0, []),
    }


@pytest.mark.parametrize("heard_by", ["the main thread", "another thread"])
def test_it_ends_with_a_preflight_that_is_asked_to_stop(tmp_path: Path, heard_by: str) -> None:
    """The kernel may give a signal to any thread, or a moment before the main one begins to wait."""
    pid = tmp_path / "pid"
    script = program(tmp_path / "hang.sh", f"echo $$ >{pid}.new && mv {pid}.new {pid}\nexec sleep 600")
    argv = [*LAUNCHER, "preflight", "--only", "external", "--external-check", str(script)]
    started = subprocess.Popen(argv, env=clean_env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    eventually(pid.exists, "the command to run")
    began_s = time.monotonic()
    threads = sorted(int(name) for name in os.listdir(f"/proc/{started.pid}/task"))
    thread = started.pid if heard_by == "the main thread" else threads[-1]
    assert ctypes.CDLL(None).tgkill(started.pid, thread, signal.SIGTERM) == 0
    _, told = started.communicate(timeout=60)
    assert (started.returncode, time.monotonic() - began_s < 30) == (143, True)
    assert "while running checks: external" in told
    eventually(lambda: not Path(f"/proc/{pid.read_text().strip()}").exists(), "the command to end")
