"""The job's key: found where the Secret is mounted, copied to where ssh accepts it, and never shown.

ssh refuses a key of one's own that others may read, and a mounted Secret has whatever mode and owner the controller
gave it: the copy is ours alone.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from trainer_launch.host import deadline_subprocess
from trainer_launch.host.files import LiveFiles
from trainer_launch.model import Job
from trainer_launch.model.errors import NodeError, UsageError

_NAMES = ("id_rsa", "id_ecdsa", "id_ed25519", "ssh-privatekey")  # the last: the Secret mounted as it is
_AUTHORIZED = "authorized_keys"
_MAX_BYTES = 65_536
_SECONDS = 20.0  # for ssh-keygen, which takes milliseconds
_PUBLIC = re.compile(r"((?:ssh|ecdsa|sk)-[a-z0-9@.-]{1,60}) ([A-Za-z0-9+/]{16,8192}={0,3})(?:\s.*)?")


@dataclass(frozen=True, slots=True)
class Key:
    """The job's key: a private file, and its public part as `TYPE BASE64`."""

    path: str
    public: str


def key_folder(job: Job) -> str:
    """Where the job's key is mounted.

    Raises:
        UsageError: nobody told, and it is at none of the usual places.
    """
    folder = job.details.get("ssh_dir")
    if isinstance(folder, str):
        return folder
    raise UsageError(
        "the job's ssh key is not mounted; looked for id_rsa and authorized_keys in $HOME/.ssh, /root/.ssh and "
        "/home/mpiuser/.ssh; set --ssh-dir to the job's sshAuthMountPath"
    )


def make(folder: str, keygen: str = "ssh-keygen") -> None:
    """Make a job's Secret in the new folder `folder`, as the operators do: ECDSA P-521, in a file called id_rsa.

    Raises:
        NodeError: it cannot be made.
    """
    path = f"{folder}/id_rsa"
    argv = (keygen, "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "trainer-launch", "-f", path)
    try:
        os.mkdir(folder, 0o700)
        done = deadline_subprocess.run(argv, None, _SECONDS)
        if done.code != 0:
            raise OSError(done.failure or f"{keygen} failed: {' '.join(done.err.split())[:200]}")
        shutil.copy(f"{path}.pub", f"{folder}/{_AUTHORIZED}")
    except OSError as problem:
        raise NodeError(f"cannot create an ssh key for the job: {problem}") from None


def take(folder: str, copy: str, keygen: str = "ssh-keygen") -> Key:
    """Copy the key that is mounted in `folder` to the new private file `copy`, and derive its public part.

    Raises:
        UsageError: there is no key, it cannot be read, it is none, or authorized_keys names another.
    """
    source = _find(folder)
    _write(copy, _read(source))
    public = _public(source, copy, keygen)
    _check_authorized(Path(folder, _AUTHORIZED), source, public)
    return Key(copy, public)


def _find(folder: str) -> Path:
    try:
        names = sorted(os.listdir(folder))
    except OSError as problem:
        raise UsageError(
            f"the folder of the job's ssh key, {folder}, cannot be read ({problem.strerror}); mount the job's "
            f"Secret there, or set --ssh-dir to where it is"
        ) from None
    for name in _NAMES:
        if name in names:
            return Path(folder, name)
    found = f"it holds {', '.join(names[:5])}" if names else "it is empty"
    raise UsageError(
        f"{folder} has none of {', '.join(_NAMES)}; {found}; mount the Secret with the job's ssh key there"
    )


def _read(path: Path) -> bytes:
    data = LiveFiles(_MAX_BYTES + 1).read(str(path))
    if data is None:
        raise UsageError(
            f"the job's ssh key {path} cannot be read by uid {os.geteuid()} ({_looks(path)}); "
            f"let the pod's securityContext have fsGroup and the Secret defaultMode 0440"
        )
    if len(data) > _MAX_BYTES:
        raise UsageError(f"{path} is larger than {_MAX_BYTES} bytes; this is not an ssh key")
    text = data.replace(b"\r\n", b"\n").strip()
    if not text.startswith(b"-----BEGIN ") or b"PRIVATE KEY-----" not in text:
        raise UsageError(
            f"{path} holds no private key: expected a file that begins with -----BEGIN … PRIVATE KEY-----, "
            f"found {len(data)} bytes of something else; mount the job's Secret there"
        )
    return text + b"\n"  # without it newer forms of keys are refused


def _looks(path: Path) -> str:
    """Mode and owner, for a message."""
    try:
        found = path.stat()
    except OSError as problem:
        return problem.strerror or "no such file"
    kind = "" if stat.S_ISREG(found.st_mode) else "no regular file, "
    return f"{kind}mode {stat.S_IMODE(found.st_mode):04o}, owner {found.st_uid}:{found.st_gid}"


def _write(path: str, data: bytes) -> None:
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
    except OSError as problem:
        raise NodeError(f"the copy of the job's ssh key cannot be written: {problem.strerror}") from None


def _public(source: Path, copy: str, keygen: str) -> str:
    done = deadline_subprocess.run((keygen, "-y", "-P", "", "-f", copy), None, _SECONDS)
    if isinstance(done.problem, FileNotFoundError):
        raise UsageError(f"{keygen} is not in this image; install OpenSSH (openssh-client)")
    if done.failure:
        raise NodeError(f"{keygen} did not derive the public key: {done.failure}")
    found = _PUBLIC.fullmatch(done.out.strip())
    if done.code == 0 and found:
        return f"{found[1]} {found[2]}"
    if "passphrase" in done.err:
        raise UsageError(
            f"the job's ssh key {source} has a passphrase, which cannot be typed in a pod; create one without"
        )
    raise UsageError(
        f"{source} is no private key that {keygen} understands; it may be cut short: recreate the Secret"
    )


def _check_authorized(path: Path, source: Path, public: str) -> None:
    """A pod whose authorized_keys does not name the key could not be entered; better said here than there."""
    data = LiveFiles(_MAX_BYTES).read(str(path))
    if data is None:
        return
    text = data.decode(errors="replace")
    if public.partition(" ")[2] not in text.split():
        raise UsageError(
            f"{path} does not name the key of {source}; they belong to different jobs: recreate the Secret"
        )
