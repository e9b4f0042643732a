"""What this machine can do for faults, found out by trying; and `local` itself, in namespaces of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace

from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.controllers.flags import RUN
from trainer_launch.rehearsal.faults import capabilities, network_commands
from trainer_launch.rehearsal.faults.capabilities import Machine
from trainer_launch.rehearsal.faults.fault import Fault
from trainer_launch.rehearsal.kubelet import memory_cgroups

_INSIDE = "TRAINER_LAUNCH_INSIDE"  # our own number: whoever inherits it has another
_TRY_S = 20.0


def is_inside() -> bool:
    """Whether this process has namespaces of its own already."""
    return os.environ.get(_INSIDE) == str(os.getpid())


def check(faults: Sequence[Fault]) -> Machine:
    """Refuse what cannot be done here, before anything has started.

    Raises:
        UsageError: a fault cannot be carried out on this machine.
    """
    machine = look(network=capabilities.wants_own_network(faults), memory=capabilities.wants_memory_groups(faults))
    sentences = capabilities.cannot(faults, machine)
    if sentences:
        raise UsageError("; ".join(sentences))
    return machine


def enter(machine: Machine) -> None:
    """Become the same command in namespaces of its own; does not return. Signals and terminal stay as they are."""
    flags = (*(network_commands.AS_USER if machine.as_user else ()), "--net", "--mount")
    argv = ("unshare", *flags, "--", sys.executable, "-c", RUN, *sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os.execvpe(argv[0], argv, {**os.environ, _INSIDE: str(os.getpid())})


def look(*, network: bool, memory: bool) -> Machine:
    """Find out; what is not asked for is not tried."""
    missing = frozenset(one for one in (*capabilities.PROGRAMS, "nft") if network and shutil.which(one) is None)
    why = memory_cgroups.why_not() if memory else ""
    machine = Machine(missing=missing, memory=memory and not why, why_no_memory=why)
    if not network or missing - {"nft"}:
        return machine
    works, why = _try(())
    as_user = not works and os.geteuid() != 0
    if as_user:
        works, why = _try(network_commands.AS_USER)
    return replace(machine, namespaces=bool(works), as_user=as_user, works=works, why=why)


def _try(flags: Sequence[str]) -> tuple[frozenset[str], str]:
    """The words of what works in new namespaces; none, and why, when they cannot be made."""
    argv = (
        "unshare",
        *flags,
        *network_commands.UNSHARE,
        "--",
        "sh",
        "-c",
        f"echo made; {network_commands.TRY_OUT}",
    )
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TRY_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return frozenset(), " ".join(str(problem).split())[:120]
    lines = done.stderr.strip().splitlines()
    return frozenset(done.stdout.split()), lines[0][:120] if lines and not done.stdout else ""
