"""Files replaced whole or not at all, and the job's secret."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from trainer_launch.contracts.snapshot import pod_from_snapshot
from trainer_launch.host.files import JOB_SECRET, MAX_SECRET_BYTES, read_secret, replace
from trainer_launch.model.errors import UsageError
from trainer_launch.model.redaction import redact_file
from trainer_launch.model.settings import load
from trainer_launch.planning.reading import read


@pytest.mark.parametrize("mode", [0o600, 0o644, 0o755])
def test_the_permissions_are_those_asked_for_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o077)
    try:
        replace(str(tmp_path / "file"), b"", mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode


def test_when_it_cannot_be_put_there_the_old_one_stays(tmp_path: Path) -> None:
    place = tmp_path / "taken"
    (place / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match=r"directory|not empty"):
        replace(str(place), b"new")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]
    assert (place / "inside").is_dir()


def test_a_secret_is_what_stands_between_the_blanks(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_bytes(b"\n  hunter2 \n")
    assert read_secret(str(path)) == b"hunter2"


def test_a_secret_that_is_none_is_one_sentence_that_names_the_file(tmp_path: Path) -> None:
    for content, word in ((b"", "empty"), (b" \n", "empty"), (b"x" * (MAX_SECRET_BYTES + 1), "larger than")):
        path = tmp_path / "secret"
        path.write_bytes(content)
        with pytest.raises(UsageError, match=word) as refused:
            read_secret(str(path))
        assert str(path) in str(refused.value)
    os.mkfifo(tmp_path / "fifo")
    for name in ("absent", "fifo"):
        with pytest.raises(UsageError, match="cannot be read"):
            read_secret(str(tmp_path / name))


def test_the_secret_of_an_ssh_key_is_a_hash_that_every_pod_finds(tmp_path: Path) -> None:
    key, same = tmp_path / "id_rsa", tmp_path / "copy"
    key.write_bytes(b"-----BEGIN OPENSSH PRIVATE KEY-----\nabc\n-----END OPENSSH PRIVATE KEY-----\n")
    same.write_bytes(key.read_bytes() + b"\n")
    assert read_secret(str(key)) == read_secret(str(same))
    assert len(read_secret(str(key))) == 32


@pytest.mark.parametrize(
    ("files", "given", "found"),
    [
        ({}, None, None),
        ({JOB_SECRET: "x"}, None, JOB_SECRET),
        ({JOB_SECRET: "x"}, "/other", "/other"),
        ({JOB_SECRET: "x", "/root/.ssh/id_rsa": "k", "/root/.ssh/authorized_keys": "k"}, None, JOB_SECRET),
        ({"/root/.ssh/id_rsa": "k", "/root/.ssh/authorized_keys": "k"}, None, "/root/.ssh/id_rsa"),
    ],
    ids=["nothing", "mounted", "given", "mounted beside a key", "key"],
)
def test_the_secret_is_found_where_it_is_mounted_and_explain_says_where(
    files: dict[str, str], given: str | None, found: str | None
) -> None:
    env = {"K_MPI_JOB_ROLE": "worker"} if "/root/.ssh/id_rsa" in files else {}
    pod = pod_from_snapshot({"env": env, "files": files, "hostname": "train-worker-0", "command": ["train.py"]})
    job = read(pod, load({} if given is None else {"secret_file": given}, {})).job
    assert job.secret_file == found
    assert [fact.name for fact in job.facts if fact.field == "secret_file"] == ([found] if found else [])
    assert redact_file(JOB_SECRET, "x") != "x"


def test_an_empty_path_of_the_secret_is_an_error_and_not_a_job_without_a_secret() -> None:
    pod = pod_from_snapshot({"env": {}, "files": {}, "hostname": "a", "command": ["train.py"]})
    with pytest.raises(UsageError, match="invalid value '' for --secret-file: expected the path of a file"):
        read(pod, load({"secret_file": ""}, {}))
