"""What is not possible on this machine is said beforehand: which fault, why, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.faults import grammar, requests
from trainer_launch.rehearsal.faults.kinds import KINDS

BY_US = ("kill worker", "stop worker", "kill pod", "term pod", "add node", "scale workers=2")
OWN_NETWORK = ("partition", "delay dns 3s")


def test_what_needs_only_signals_can_be_done_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert requests.isolate([grammar.parse(text) for text in BY_US]) is False


@pytest.mark.parametrize("text", OWN_NETWORK)
def test_a_missing_program_is_named_with_its_package(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError) as refused:
        requests.isolate([grammar.parse(text)])
    sentence = str(refused.value)
    assert sentence.startswith(f"--fault '{text}' is not possible on this machine: unshare and nsenter and ip")
    assert "install util-linux and iproute2" in sentence


def test_the_reason_and_the_remedy_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in requests.PROGRAMS:
        (tmp_path / program).write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2; exit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(UsageError, match=r"\(unshare failed: Operation not permitted\); run it as root"):
        requests.isolate([grammar.parse("partition")])


def test_every_kind_of_fault_is_spoken_of_here() -> None:
    assert {grammar.parse(text).kind for text in (*BY_US, *OWN_NETWORK)} == set(KINDS)
