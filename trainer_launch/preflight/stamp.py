"""--skip-if-passed-within: a stamp on the machine says that its GPUs have passed the tests under load already.

It spares this node its load tests and the external check, nothing else: what takes no load, and all that nodes do
together, is done in each preflight. So nodes with and without a stamp may be in one job, and agree on nothing.

A stamp is believed if nobody but root or this user can have written it, and if it is of this boot of this machine,
of the same GPUs, launcher, level and policy. Its age is measured by the machine's uptime, which no clock changes.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from trainer_launch import __version__
from trainer_launch.host import files, logs, machine
from trainer_launch.host.slow_files import within
from trainer_launch.model import codec
from trainer_launch.model.findings import Finding, Scope, Status
from trainer_launch.model.redaction import redact_command
from trainer_launch.model.settings import Settings
from trainer_launch.preflight import external_check
from trainer_launch.preflight.external_check import EXTERNAL
from trainer_launch.preflight.policy import Policy

FOLDER = "/var/lib/trainer-launch"
_MAX_BYTES = 4096
_BOOT_ID = "proc/sys/kernel/random/boot_id"
_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


class Stamp(Struct, frozen=True, forbid_unknown_fields=True):
    """A pass of this machine's GPUs under load, with the conditions and the time."""

    conditions: str  # a hash of boot, machine, launcher, level, policy and settings
    devices: tuple[str, ...]
    uptime_s: float = 0.0

    @property
    def file(self) -> str:
        """Its name: pods with different GPUs of a machine have stamps of their own."""
        return f"passed-{hashlib.sha256(json.dumps(self.devices).encode()).hexdigest()[:12]}.json"


def of_this_node(
    settings: Settings, policy: Policy, level: str, env: Mapping[str, str], root: Path = Path("/")
) -> Stamp | None:
    """The stamp that this preflight would leave now; None: the kernel does not tell the boot."""
    boot = files.text(root / _BOOT_ID).strip()
    words = redact_command(external_check.command_of(settings.external_check))
    name = machine.machine_name(env, "", root)
    deciding: list[object] = [boot, name, __version__, level, policy.fingerprint, words]
    deciding += [settings.only, settings.gpu_burn]
    reference = b"" if settings.reference is None else files.LiveFiles(1 << 20).read(settings.reference) or b""
    deciding.append(hashlib.sha256(reference).hexdigest())
    devices = sorted(path.name for path in (root / "dev").glob("nvidia[0-9]*"))
    stamp = Stamp(
        conditions=hashlib.sha256(json.dumps(deciding).encode()).hexdigest()[:16],
        devices=(*devices, f"CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES', '')}"),
        uptime_s=time.clock_gettime(time.CLOCK_BOOTTIME),
    )
    return stamp if boot else None


def why_not(now: Stamp, limit_s: float, folder: str) -> str:
    """Why the machine's stamp does not count, in words; "": it does."""
    late: bytes | str = "its file server does not answer"
    data = within(folder, late, _trusted, folder, now.file)
    if isinstance(data, str):
        return data
    try:
        stamp = codec.decode(Stamp, data, _MAX_BYTES)
    except codec.MessageError as problem:
        return f"the stamp cannot be read: {problem}"
    if (stamp.conditions, stamp.devices) != (now.conditions, now.devices):
        return "the stamp is of another boot, machine, version, level, policy or setting"
    age_s = now.uptime_s - stamp.uptime_s
    if age_s < 0:
        return "the stamp is of a future time"
    return f"the machine passed {age_s / 3600:.1f} h ago, which is too long" if age_s > limit_s else ""


def settle(
    stamp: Stamp,
    findings: Sequence[Finding],
    under_load: Iterable[str],
    name: str,
    *,
    folder: str,
    is_spared: bool = False,
) -> None:
    """Leave the stamp where this node passed what it spares, without a warning and with nothing unknown.

    Elsewhere take an older stamp back: a machine that fails has to pass again. `under_load` are the names of the
    checks that a stamp spares, `name` is the node's as findings have it; `is_spared`: they were spared now.
    """
    checks = set(under_load)
    own = [finding for finding in findings if finding.is_about(name)]
    spared = [finding for finding in own if finding.check in checks or finding.check.startswith(f"{EXTERNAL}-")]
    # What is unknown of the whole job, such as a reference of this model, is no matter of this machine.
    bad = (Status.WARN, Status.FAIL, Status.UNKNOWN)
    is_accused = any(finding.proves_a_fault for finding in own) or any(
        finding.status in bad[: 2 if finding.scope is Scope.JOB else 3] for finding in spared
    )
    has_passed = any(finding.status is Status.PASS for finding in spared) and not is_accused
    if is_accused or not is_spared:
        _replace(os.path.join(folder, stamp.file), stamp if has_passed else None)


def _replace(path: str, stamp: Stamp | None) -> None:
    try:
        if stamp is not None:
            files.replace(path, json.dumps(asdict(stamp)).encode() + b"\n", 0o644)
        else:
            os.unlink(path)
    except OSError as problem:
        if stamp is not None or problem.errno not in (errno.ENOENT, errno.ENOTDIR):
            logs.warn(f"the machine's stamp {path} was not changed: {problem.strerror}")


def _trusted(folder: str, name: str) -> bytes | str:
    """A stamp that only root or this user can have written; or why there is none."""
    users = (0, os.geteuid())
    try:
        place = os.lstat(folder)
        if not stat.S_ISDIR(place.st_mode) or place.st_uid not in users or place.st_mode & _OTHERS_MAY_WRITE:
            return f"others may write to {folder}"
        file = os.open(os.path.join(folder, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as problem:
        return f"{folder} has no stamp" if problem.filename != folder else f"{folder} is not mounted (a hostPath)"
    except OSError as problem:
        return f"the stamp cannot be read: {problem.strerror}"
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid not in users or status.st_mode & _OTHERS_MAY_WRITE:
            return "others may write the stamp"
        return os.read(file, _MAX_BYTES + 1)
    finally:
        os.close(file)
