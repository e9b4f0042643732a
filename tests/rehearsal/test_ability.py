"""What is not possible is said before any pod starts: which fault or command, why, and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.launching import launch
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal import faults, pod_isolation
from trainer_launch.rehearsal.faults import KINDS

BY_US = ("kill worker", "stop worker", "kill pod", "term pod")
OWN_NETWORK = ("partition", "delay dns 3s")


def test_what_needs_only_signals_can_be_done_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert faults.isolate([faults.parse(text) for text in BY_US]) is False


@pytest.mark.parametrize("text", OWN_NETWORK)
def test_a_missing_program_is_named_with_its_package(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError) as refused:
        faults.isolate([faults.parse(text)])
    sentence = str(refused.value)
    assert sentence.startswith(f"--fault '{text}' is not possible on this machine: unshare and nsenter and ip")
    assert "install util-linux and iproute2" in sentence


def test_the_reason_and_the_remedy_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in pod_isolation.PROGRAMS:
        (tmp_path / program).write_text("#!/bin/sh\necho unshare failed: Operation not permitted >&2; exit 1\n")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(UsageError, match=r"\(unshare failed: Operation not permitted\); run it as root"):
        faults.isolate([faults.parse("partition")])


def test_every_kind_of_fault_is_spoken_of_here() -> None:
    assert {faults.parse(text).kind for text in (*BY_US, *OWN_NETWORK)} == set(KINDS)


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ("--", "torchrun", "--rdzv-backend", "trainer-launch", "train.py"),
            "trainer-launch (--rdzv-backend) was rem",
        ),
        (("--", "torchrun", "--nnodes=2:1", "train.py"), "--nnodes is '2:1'"),
        (("--spares", "1", "--engine", "plain", "--", "train.py"), "--spares needs torch workers"),
        (("-f", "job.yaml"), "invalid value '9' for --redirects"),
    ],
)
def test_a_command_that_each_pod_would_refuse_is_refused_once(
    tmp_path: Path, words: tuple[str, ...], part: str
) -> None:
    (tmp_path / "train.py").write_text("print('began')")
    container = "{name: pytorch, image: i, args: [torchrun, --redirects, '9', train.py]}"
    worker = f"{{replicas: 2, template: {{spec: {{containers: [{container}]}}}}}}"
    (tmp_path / "job.yaml").write_text(
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: job}\n"
        f"spec: {{pytorchReplicaSpecs: {{Worker: {worker}}}}}\n"
    )
    ended = launch("rehearse", *(("--nodes", "2") if words[0] == "--" else ()), *words, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("trainer-launch: error: ")
    assert part in line
