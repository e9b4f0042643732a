"""What must hold of pods that are looked at again and again. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tests.soak.growth import fit
from tests.soak.looking import LAUNCHER, Look, Process

ROLES = {LAUNCHER: 1, "server": 1, "worker": 1, "sleep": 1}  # the first node has a store, a fork of the server, too
SEGMENTS = 1  # the worker's
LAUNCHER_KB_PER_HOUR = 2048.0
OTHERS_KB_PER_HOUR = 16_384.0  # torch's own libraries live there
MORE_FDS, MORE_THREADS = 3, 1  # than at a process's first look, without being a leak: a connection that ends later
TMP_BYTES, TMP_FILES = 400_000, 16
CLOSE_WAIT = 0
INCIDENTS = 11  # ten are kept; one that nobody was told of stays until the next


def strange(look: Look) -> list[str]:
    """What no well pod shows, a sentence each."""
    found = []
    right = ROLES | ({"server": 2} if look.node == 0 else {})
    if dict(look.roles) != right:
        found.append(f"pod {look.node} has the processes {look.roles}, where {right} are right")
    for what, count, bound in (
        ("segments of shared memory", look.segments, SEGMENTS),
        ("files in TMPDIR", look.tmp_files, TMP_FILES),
        ("incidents", look.incidents, INCIDENTS),
        ("bytes in TMPDIR", look.tmp_bytes, TMP_BYTES),
        ("sockets whose peer has gone", look.close_wait, CLOSE_WAIT),
    ):
        if count > bound:
            found.append(f"pod {look.node} has {count} {what}, where {bound} are right")
    return found


def grown(first: Process, now: Process) -> list[str]:
    """What a process has more than at its first look."""
    found = []
    for what, before, after, more in (
        ("descriptors", first.fds, now.fds, MORE_FDS),
        ("threads", first.threads, now.threads, MORE_THREADS),
    ):
        if after > before + more:
            found.append(f"{now.role} {now.pid} has {after} {what}, and had {before} at its first look")
    return found


Key = tuple[int, str, int]  # node, role, pid


def histories(looks: Sequence[Look]) -> dict[Key, list[tuple[float, Process]]]:
    """What each long-lived process was seen to be, with the time of each look."""
    found: dict[Key, list[tuple[float, Process]]] = {}
    for look in looks:
        for process in look.long_lived:
            found.setdefault((look.node, process.role, process.pid), []).append((look.at_s, process))
    return found


def growing(seen: Mapping[Key, Sequence[tuple[float, Process]]]) -> list[str]:
    """Whose memory is not flat."""
    found = []
    for (node, role, pid), history in seen.items():
        line = fit([(at_s, process.memory_kb) for at_s, process in history])
        bound = LAUNCHER_KB_PER_HOUR if role == LAUNCHER else OTHERS_KB_PER_HOUR
        if line is not None and line.per_hour > bound:
            found.append(
                f"the memory of {role} {pid} of pod {node} grows by {line.per_hour:.0f} KiB per hour, over "
                f"{line.samples} looks in {line.seconds:.0f} s, where {bound:.0f} is the bound"
            )
    return found
