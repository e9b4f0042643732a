"""A pod as one JSON object: written without its secrets, read in place of this container."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.contracts.pods import V2_TORCH, pod_of
from tests.refusals import refusal
from trainer_launch.contracts import read_job
from trainer_launch.contracts.snapshot import SnapshotFiles, pod_from_snapshot, snapshot_of
from trainer_launch.contracts.source import MAX_FILE_BYTES
from trainer_launch.model.redaction import REDACTED, redact, redact_file

PEM = "-----BEGIN EC PRIVATE KEY-----\nMHc\n-----END EC PRIVATE KEY-----\n"


def test_a_path_to_a_secret_is_no_secret() -> None:
    assert redact("KUBEFLOW_TRAINER_SERVER_TOKEN", "/var/run/secrets/x/token") == "/var/run/secrets/x/token"
    assert redact("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/secrets/aws/token") == "/var/run/secrets/aws/token"
    assert redact("API_KEY", "/looks/like/a/path") == REDACTED
    assert redact("TOKEN_FILE", "not a path") == REDACTED
    assert redact("EMPTY_TOKEN", "") == ""


@pytest.mark.parametrize(
    "path",
    ["/root/.ssh/id_rsa", "/var/run/secrets/kubernetes.io/serviceaccount/token", "/curve/curve.cert", "/x/tls.key"],
)
def test_secret_files_are_hidden_by_their_paths(path: str) -> None:
    assert redact_file(path, "x") == REDACTED


def test_other_files_are_shown_but_for_what_looks_secret() -> None:
    assert redact_file("/etc/mpi/hostfile", "a slots=1\n") == "a slots=1\n"
    assert redact_file("/root/.ssh/id_rsa.pub", "ssh-ed25519 AAAA") == "ssh-ed25519 AAAA"
    assert redact_file("/etc/x", PEM) == REDACTED


def test_a_snapshot_says_who_the_pod_is_without_its_secrets() -> None:
    env = {**V2_TORCH, "HF_TOKEN": "hunter2", "PROXY": "http://me:hunter2@p:1", "KEEP": "1"}
    files = {"/root/.ssh/id_rsa": f"{PEM}hunter2", "/etc/mpi/hostfile": "a slots=1\n", "/secret/other": "hunter2"}
    pod = pod_of(env, files, "job-node-0-1", ("train.py", "--token=hunter2"))
    snapshot = snapshot_of(pod, read_job(pod))
    text = json.dumps(snapshot)
    assert "hunter2" not in text
    assert "/secret/other" not in text  # only what tells a contract is taken along
    assert snapshot["hostname"] == "job-node-0-1"
    again = pod_from_snapshot(json.loads(text))
    assert read_job(again) == read_job(pod)
    assert again.files.exists("/root/.ssh/id_rsa")


def test_bytes_that_are_no_text_survive_a_snapshot() -> None:
    files = SnapshotFiles({"/f": "a\udcff"})
    assert files.read("/f") == b"a\xff"


def test_files_are_cut_where_readers_refuse_them() -> None:
    files = SnapshotFiles({"/a/b": "x" * (MAX_FILE_BYTES + 10)})
    assert len(files.read("/a/b") or b"") == MAX_FILE_BYTES + 1
    assert files.read("/a") is None
    assert files.exists("/a")
    assert files.exists("/a/b")
    assert files.exists("/a/")
    assert not files.exists("/b")


@pytest.mark.parametrize(
    "data",
    [
        None,
        [],
        "x",
        {},
        {"env": None},
        {"env": []},
        {"env": {"A": 1}},
        {"env": {"": "x"}},
        {"env": {"A=B": "x"}},
        {"env": {}, "files": []},
        {"env": {}, "files": {"/f": None}},
        {"env": {}, "files": {"relative": "x"}},
        {"env": {}, "files": {"/f": "\ud800"}},
        {"env": {}, "hostname": None},
        {"env": {}, "command": "train.py"},
        {"env": {}, "args": [1]},
        {"env": {}, "namespace": 3},
        {"env": {}, "environment": {}},
        {"env": {}, "x\n" * 10_000: 1},
    ],
)
def test_a_snapshot_of_another_shape_is_refused_in_one_line(data: Any) -> None:
    said = refusal(lambda: pod_from_snapshot(data))
    assert "expected" in said
    assert "\n" not in said
    assert len(said) <= 600


def test_command_and_args_are_one_command_line() -> None:
    pod = pod_from_snapshot({"env": {}, "command": ["mpirun"], "args": ["-n", "2"], "namespace": "ns"})
    assert pod.command == ("mpirun", "-n", "2")
    assert pod.namespace == "ns"
    assert pod.hostname == ""
