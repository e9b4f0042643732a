"""The job's secret: a small file that every pod of the job mounts, and nobody else."""

from __future__ import annotations

from trainer_launch.host.files import LiveFiles
from trainer_launch.model.errors import UsageError

MAX_SECRET_BYTES = 4096


def read_secret(path: str) -> bytes:
    """The secret without the blanks around it; the path may be told, the secret never.

    Raises:
        UsageError: there is no such file, or it is empty or too large.
    """
    found = LiveFiles(MAX_SECRET_BYTES + 1).read(path)
    if found is None:
        raise UsageError(f"--secret-file {path} cannot be read; mount the job's Secret there in every pod")
    if len(found) > MAX_SECRET_BYTES:
        raise UsageError(f"--secret-file {path} is larger than {MAX_SECRET_BYTES} bytes; that is no secret of ours")
    secret = found.strip()
    if not secret:
        raise UsageError(f"--secret-file {path} is empty; put the job's secret there, the same in every pod")
    return secret
