"""How checks are run: at once, in time, whatever they do; by name, silenced and made fatal."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.preflight.world import HEALTHY
from trainer_launch.model import settings
from trainer_launch.model.errors import UsageError
from trainer_launch.model.findings import Fault, Finding, PreflightVerdict, Severity, Status
from trainer_launch.preflight import check, registry
from trainer_launch.preflight.check import Check, Subject, Where
from trainer_launch.preflight.node_preflight import Selection

WARNED = Finding(check="warns", status=Status.WARN, text="so so")


def module(name: str, run: Callable[[Subject], list[Finding]], **more: Any) -> Check[Subject]:
    return Check(id=name, title=name, run=run, **more)


def warns(subject: Subject) -> list[Finding]:
    return [WARNED]


def raises(subject: Subject) -> list[Finding]:
    raise KeyError("oops")


def test_a_check_that_raises_is_unknown_and_disturbs_no_other() -> None:
    report = check.run(HEALTHY, [module("raises", raises), module("warns", warns)])
    first, second = report.findings
    assert (first.check, first.status) == ("raises", Status.UNKNOWN)
    assert "internal error in this check: KeyError: 'oops'" in first.text
    assert second.text == "so so"
    assert report.verdict is PreflightVerdict.WARN


def test_a_check_that_hangs_is_given_up_at_its_own_limit() -> None:
    release = threading.Event()
    hangs = module("hangs", lambda subject: [WARNED] if release.wait(60) else [], limit_s=lambda subject: 0.2)
    began_s = time.monotonic()
    try:
        (finding,) = check.run(HEALTHY, [hangs]).findings
    finally:
        release.set()
    assert time.monotonic() - began_s < 30
    assert (finding.check, finding.status) == ("hangs", Status.UNKNOWN)
    assert finding.text == "it did not finish within 0.2 s"


def test_all_run_at_once_and_are_told_in_their_order() -> None:
    both = threading.Barrier(2)

    def met(subject: Subject) -> list[Finding]:
        both.wait(30)
        return [Finding(check="met", status=Status.PASS, text="met")]

    report = check.run(HEALTHY, [module("one", met), module("two", met), module("warns", warns)], limit_s=60)
    assert [finding.text for finding in report.findings] == ["met", "met", "so so"]


def test_where_no_more_threads_are_allowed_the_checks_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    alive = threading.active_count()
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if threading.active_count() > alive:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    report = check.run(HEALTHY, [module(name, warns) for name in ("one", "two", "three")], limit_s=60)
    assert [finding.text for finding in report.findings] == ["so so"] * 3
    monkeypatch.setattr(threading.Thread, "start", lambda thread: _refuse())
    (finding,) = check.run(HEALTHY, [module("none", warns)]).findings
    assert (finding.status, finding.text) == (Status.UNKNOWN, "no thread could be started for it")


def _refuse() -> None:
    raise RuntimeError("can't start new thread")


def test_a_check_that_is_off_does_not_run_and_one_that_is_fatal_fails() -> None:
    selection = Selection.of(settings.load({"policy": "dns=off,cpu=fatal"}, {}))
    assert {check.id for check in selection.at(*Where)} == set(registry.ids(*Where)) - {"dns"}
    assert selection.kept([Finding(check="dns", status=Status.WARN, text="late")]) == ()
    (finding,) = selection.kept([Finding(check="cpu", status=Status.WARN, text="few")])
    assert (finding.severity, finding.fault) == (Severity.FATAL, Fault.JOB)


@pytest.mark.parametrize(
    ("words", "level"),
    [
        ({"policy": "gpu-load=off"}, "quick"),
        ({"only": "gpu-ecc,gpu-count"}, "quick"),
        ({"only": "gpu-ecc,gemm"}, "standard"),
        ({}, "standard"),
    ],
)
def test_gpus_are_loaded_only_for_checks_that_need_it(words: dict[str, str], level: str) -> None:
    read = settings.load(words, {})
    assert Selection.of(read).level(read) == level


def test_names_are_taken_from_a_list_and_a_wrong_one_is_told() -> None:
    assert registry.named(" dns, shm,", "--only") == ("dns", "shm")
    assert registry.named(None, "--only") == ()
    with pytest.raises(UsageError, match=r"--only names 'dnss', which is not a check; did you mean dns\?"):
        registry.named("dns,dnss", "--only")


def test_a_check_that_is_gone_is_one_warning_and_ends_no_pod(caplog: pytest.LogCaptureFixture) -> None:
    assert Selection.of(settings.load({"policy": "mtu=off,dns=off"}, {})).policy.off == ("dns",)
    assert caplog.messages == ["check mtu no longer exists; remove it from --policy"]


def test_only_checks_that_are_gone_leave_nothing_to_run(caplog: pytest.LogCaptureFixture) -> None:
    assert Selection.of(settings.load({"only": "mpi-ring,dns"}, {})).chosen == ("dns",)
    with pytest.raises(UsageError, match="--only mtu,program leaves no check to run"):
        Selection.of(settings.load({"only": "mtu,program"}, {}))
    assert "check program no longer exists; remove it from --only" in caplog.messages


def test_no_name_of_a_check_is_ever_changed() -> None:
    """They are in people's pod templates; a new one is added here, one that goes moves to registry.REMOVED."""
    names = """
        memory cpu pids nofile memlock shm storage tmpdir own-name dns gloo-socket-ifname nccl-socket-ifname
        nccl-ib-hca gpu-count gpu-recovery gpu-ecc gpu-remap gpu-mig gpu-memory gpu-load
        gpu-peers gpu-network gpu-clocks gpu-pcie gpu-nvlink gpu-xid
    """
    assert set(registry.ids(*Where)) >= set(names.split())
