"""Containers as Kubernetes makes them: made-up users, read-only roots, dropped capabilities. Needs root.

Everything happens in a mount namespace of its own, which ends with the program.
"""

from __future__ import annotations

import glob
import os
import shlex
import stat
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import require
from tests.process.world import ROOT

UID = 47_110
GROUP = 47_120  # the pod's fsGroup
ANOTHER_RUN = "mount -t tmpfs -o mode=755 tmpfs /run"  # as in an image that has no /run/sshd
READ_ONLY = "mount --bind /tmp /tmp; mount -o remount,ro,bind /"
_OUR_OWN = (sys.base_prefix, sys.prefix, str(ROOT))  # what the program needs of this machine


def wrapped(
    *lines: str, drop: Sequence[str] = (), user: int | None = None, group: int | None = None
) -> tuple[str, ...]:
    """What to put before a command line, so that it runs in such a container."""
    words = ["setpriv"]
    if drop:
        names = ",".join(f"-{name}" for name in drop)
        words += ["--bounding-set", names, "--inh-caps", names]
    if user is not None:
        words += ["--reuid", str(user), "--regid", str(user if group is None else group), "--groups", str(GROUP)]
    script = "\n".join(["set -e", *lines, f'exec {shlex.join(words)} "$@"' if words[1:] else 'exec "$@"'])
    return ("unshare", "--mount", "sh", "-c", script, "sh")


def passwd(folder: Path, *entries: str) -> str:
    """Another /etc/passwd: the image's own, and these."""
    path = folder / "passwd"
    path.write_text(Path("/etc/passwd").read_text() + "".join(f"{entry}\n" for entry in entries))
    path.chmod(0o644)
    return f"mount --bind {shlex.quote(str(path))} /etc/passwd"


def made_up_user(folder: Path) -> str:
    """A user of the image, without a home."""
    return passwd(folder, f"mpiuser:x:{UID}:{UID}::/nonexistent:/bin/sh")


# Whatever this machine has.
WITHOUT_NSS_WRAPPER = """for file in /usr/lib*/libnss_wrapper.so /usr/lib/*/libnss_wrapper.so; do
    [ ! -e "$file" ] || mount --bind /dev/null "$file"
done"""


def require_nss_wrapper() -> None:
    require(glob.glob("/usr/lib/*/libnss_wrapper.so"), "needs libnss-wrapper")


def opened(folder: Path) -> str:
    """Let other users reach the interpreter and us, where root's home holds them."""
    lines = []
    hidden = {path: top for path in _OUR_OWN if (top := _closed_above(Path(path)))}
    for number, path in enumerate(hidden):
        aside = shlex.quote(str(folder / f"aside-{number}"))
        lines.append(f"mkdir {aside}; mount --bind {shlex.quote(path)} {aside}")
    lines += [f"mount -t tmpfs -o mode=755 tmpfs {shlex.quote(str(top))}" for top in sorted(set(hidden.values()))]
    for number, path in enumerate(hidden):
        aside = shlex.quote(str(folder / f"aside-{number}"))
        lines.append(f"mkdir -p {shlex.quote(path)}; mount --bind {aside} {shlex.quote(path)}")
    return "\n".join(lines)


def _closed_above(path: Path) -> Path | None:
    """The highest folder above it that others may not enter."""
    for folder in reversed(path.parents):
        if not os.stat(folder).st_mode & stat.S_IXOTH:
            return folder
    return None
