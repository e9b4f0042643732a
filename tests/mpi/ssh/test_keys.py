"""The job's key: any mode, any form, and one sentence for each that is none."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tests.mpi.ssh.secrets import P521, secret
from trainer_launch.model import Job
from trainer_launch.model.errors import UsageError
from trainer_launch.mpi import ssh_client

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("openssh")]
FORMS = {
    "P-521 in PEM, as the operators write it": P521,
    "RSA": ("-t", "rsa", "-b", "2048", "-m", "PEM"),
    "ed25519 in OpenSSH's own form": ("-t", "ed25519"),
}


def job_of(folder: Path) -> Job:
    return Job(contract="mpijob-v2beta1", ssh_dir=str(folder))


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_key_is_taken(tmp_path, form) -> None:
    folder = secret(tmp_path / "a mount", form)
    public = ssh_client.take_key(job_of(folder), str(tmp_path / "copy"))
    assert (folder / "id_rsa.pub").read_text().startswith(public + " ")


@pytest.mark.parametrize("mode", [0o400, 0o440, 0o600, 0o640, 0o644, 0o777])
def test_a_key_of_any_mode_becomes_private(tmp_path, mode) -> None:
    folder = secret(tmp_path / "mount")
    (folder / "id_rsa").chmod(mode)
    ssh_client.take_key(job_of(folder), str(tmp_path / "copy"))
    found = (tmp_path / "copy").stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_uid == os.geteuid()


def test_a_key_without_its_last_newline_or_with_windows_lines_is_mended(tmp_path) -> None:
    folder = secret(tmp_path / "mount", FORMS["ed25519 in OpenSSH's own form"])
    text = (folder / "id_rsa").read_text()
    (folder / "id_rsa").write_bytes(text.strip().replace("\n", "\r\n").encode())
    ssh_client.take_key(job_of(folder), str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_text() == text


def refused(folder: Path, tmp_path: Path) -> str:
    with pytest.raises(UsageError) as caught:
        ssh_client.take_key(job_of(folder), str(tmp_path / "copy"))
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "holds no private key"),
        (b"\0\xff\xfe garbage" * 100, "holds no private key"),
        (b"ssh-rsa AAAA the public half", "holds no private key"),
        (b"-----BEGIN OPENSSH PRIVATE KEY-----\n\n-----END OPENSSH PRIVATE KEY-----\n", "is not a private key"),
        (b"-----BEGIN EC PRIVATE KEY-----\n" + b"A" * 70_000, "holds no private key"),
    ],
    ids=["empty", "bytes", "public", "garbled", "huge"],
)
def test_garbage_is_one_sentence(tmp_path, content, says) -> None:
    folder = secret(tmp_path / "mount")
    (folder / "id_rsa").chmod(0o600)
    (folder / "id_rsa").write_bytes(content)
    assert says in refused(folder, tmp_path)


def test_a_key_with_a_passphrase_is_refused(tmp_path) -> None:
    assert "passphrase" in refused(secret(tmp_path / "mount", passphrase="open sesame"), tmp_path)


def test_a_fifo_does_not_hold_us_up(tmp_path) -> None:
    (tmp_path / "mount").mkdir()
    os.mkfifo(tmp_path / "mount" / "id_rsa")
    assert "cannot be read" in refused(tmp_path / "mount", tmp_path)


def test_nothing_mounted_is_one_sentence(tmp_path) -> None:
    assert "cannot be read" in refused(tmp_path / "nowhere", tmp_path)
    (tmp_path / "mount").mkdir()
    assert "has none of id_rsa" in refused(tmp_path / "mount", tmp_path)
    with pytest.raises(UsageError, match="set --ssh-dir"):
        ssh_client.take_key(Job(contract="unknown"), str(tmp_path / "copy"))


def test_a_client_is_all_in_one_private_folder(tmp_path) -> None:
    made = ssh_client.prepared(job_of(secret(tmp_path / "mount")), str(tmp_path / "private one"), port=4022)
    for path in (made.files.key, made.files.known_hosts, made.files.client):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "private one").stat().st_mode) == 0o700
    assert made.argv("node-0", "true") == (*made.ssh, "-F", made.files.client, "--", "node-0", "true")
