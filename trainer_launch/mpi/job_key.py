"""The job's ssh key: found in the mounted Secret, copied to a private file, checked."""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Sequence
from pathlib import Path

from trainer_launch.host import deadline_subprocess
from trainer_launch.host.files import LiveFiles
from trainer_launch.model import Job
from trainer_launch.model.errors import NodeError, UsageError

_SECONDS = 20.0  # for ssh-keygen, which takes milliseconds
_FILES = ("id_rsa", "id_ecdsa", "id_ed25519", "ssh-privatekey")  # the last: the Secret mounted as it is
_AUTHORIZED = "authorized_keys"
_MAX_BYTES = 65_536
PUBLIC = re.compile(r"((?:ssh|ecdsa|sk)-[a-z0-9@.-]{1,60}) ([A-Za-z0-9+/]{16,8192}={0,3})(?:\s.*)?")


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


def take(job: Job, copy: str, keygen: Sequence[str] = ("ssh-keygen",)) -> str:
    """Copy the key that is mounted to the new private file `copy`; its public part, as `TYPE BASE64`.

    Raises:
        UsageError: there is no key, it cannot be read, or it is none.
    """
    if job.ssh_dir is None:
        raise UsageError(
            "the job's ssh key is not mounted; looked for id_rsa and authorized_keys in $HOME/.ssh, /root/.ssh and "
            "/home/mpiuser/.ssh; set --ssh-dir to the job's sshAuthMountPath"
        )
    source = _find(job.ssh_dir)
    write(copy, _read(source), what="the copy of the job's ssh key cannot be written")
    return _public(source, copy, keygen)


def write(path: str, text: str | bytes, *, what: str = "") -> None:
    """Write a new file that is ours alone; `what` begins the error. Raises NodeError: it cannot be written."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(text if isinstance(text, bytes) else os.fsencode(text))
    except OSError as problem:
        what = what or f"{Path(path).name} cannot be written in the private folder"
        raise NodeError(f"{what}: {problem.strerror}") from None


def _find(folder: str) -> Path:
    try:
        names = sorted(os.listdir(folder))
    except OSError as problem:
        raise UsageError(
            f"the folder of the job's ssh key, {folder}, cannot be read ({problem.strerror}); mount the job's "
            f"Secret there, or set --ssh-dir to where it is"
        ) from None
    for name in _FILES:
        if name in names:
            return Path(folder, name)
    content = f"it holds {', '.join(names[:5])}" if names else "it is empty"
    raise UsageError(
        f"{folder} has none of {', '.join(_FILES)}; {content}; mount the Secret with the job's ssh key there"
    )


def _read(path: Path) -> bytes:
    data = LiveFiles(_MAX_BYTES + 1).read(str(path))
    if data is None:
        raise UsageError(
            f"the job's ssh key {path} cannot be read by uid {os.geteuid()} ({_looks(path)}); "
            f"let the pod's securityContext have fsGroup and the Secret defaultMode 0440"
        )
    text = data.replace(b"\r\n", b"\n").strip()
    if len(data) > _MAX_BYTES or not text.startswith(b"-----BEGIN ") or b"PRIVATE KEY-----" not in text:
        raise UsageError(
            f"{path} holds no private key: expected a file that begins with -----BEGIN … PRIVATE KEY-----, "
            f"found {len(data)} bytes of something else; mount the job's Secret there"
        )
    return text + b"\n"  # without it newer forms of keys are refused


def _looks(path: Path) -> str:
    """Mode and owner, for a message."""
    try:
        status = path.stat()
    except OSError as problem:
        return problem.strerror or "no such file"
    kind = "" if stat.S_ISREG(status.st_mode) else "no regular file, "
    return f"{kind}mode {stat.S_IMODE(status.st_mode):04o}, owner {status.st_uid}:{status.st_gid}"


def _public(source: Path, copy: str, keygen: Sequence[str]) -> str:
    done = deadline_subprocess.run((*keygen, "-y", "-P", "", "-f", copy), None, _SECONDS)
    if done.failure:
        raise NodeError(f"{keygen[-1]} did not derive the public key: {done.failure}")
    match = PUBLIC.fullmatch(done.out.strip())
    if done.code == 0 and match:
        return f"{match[1]} {match[2]}"
    if "passphrase" in done.err:
        raise UsageError(
            f"the job's ssh key {source} has a passphrase, which cannot be typed in a pod; create one without"
        )
    raise UsageError(
        f"{source} is no private key that {keygen[-1]} understands; it may be cut short: recreate the Secret"
    )
