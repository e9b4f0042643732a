"""Whether an idle worker waits for a file, a server or a person: by the system calls that it sleeps in.

Idle in a call of files, or of a connection that is none of the job's, is a transfer: of the main thread; of a
thread while the main thread waits for a lock; of a program that the main thread waits for. The job's own
connections are those to its store; those to other ranks are below torch's calls, for which the caller looks first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from trainer_launch.diagnosis.collectives import Doing
from trainer_launch.host import process_tree, system_calls
from trainer_launch.host.system_calls import CallKind, SystemCall

_NO_FILES = ("/dev/", "/proc/", "/sys/")
_POLLS = (CallKind.POLL, CallKind.SELECT, CallKind.EPOLL)


def doing(
    pid: int,
    below: Iterable[process_tree.ProcessEntry],
    own_ports: Collection[int] = (),
    *,
    has_joined: bool = False,
) -> Doing:
    """The wait of the worker `pid` for something outside the job: TRANSFER, INPUT, or UNKNOWN.

    `below` are its descendants, `own_ports` those of the job's store. A worker that `has_joined` a collective which
    has not ended may wait for that, so its other threads prove nothing.
    """
    call = system_calls.of_thread(pid, pid)
    if call is None:
        return Doing.UNKNOWN
    if 0 in call.fds and call.kind is not CallKind.EPOLL:
        return Doing.INPUT
    remote = system_calls.connections(pid, own_ports)
    by_parent: dict[int, list[int]] = {}
    for entry in below:
        by_parent.setdefault(entry.parent, []).append(entry.pid)
    calls = [call]
    if call.kind in (CallKind.LOCK, *_POLLS) and not has_joined:
        # It may wait for its other threads. Those of gloo and NCCL poll other ranks all the time.
        others = system_calls.of_other_threads(pid)
        calls += [other for other in others if other.kind not in _POLLS and other.kind is not CallKind.LOCK]
    programs = {child for each in calls for child in _awaited(each, pid, by_parent)}
    moves = any(_moves(each, remote) for each in calls)
    is_transfer = moves or any(_program_moves(child, by_parent, remote) for child in programs)
    return Doing.TRANSFER if is_transfer else Doing.UNKNOWN


def _moves(call: SystemCall, remote: Collection[str]) -> bool:
    """Whether a thread waits for a file, or for a connection that is none of the job's."""
    if call.kind is CallKind.PATH or (call.is_uninterruptible and call.kind is not CallKind.NO_FILE):
        return True
    return any(link in remote or (link[:1] == "/" and not link.startswith(_NO_FILES)) for link in call.files)


def _awaited(call: SystemCall, pid: int, by_parent: Mapping[int, list[int]]) -> list[int]:
    """The children whose ends, or whose output, a thread of `pid` waits for."""
    if call.kind is CallKind.CHILD:
        return [call.child] if call.child else by_parent.get(pid, [])
    pipes = {link for link in call.files if link.startswith("pipe:")}
    return [child for child in by_parent.get(pid, []) if pipes and pipes & system_calls.open_files(child)]


def _program_moves(pid: int, by_parent: Mapping[int, list[int]], remote: Collection[str]) -> bool:
    """Whether a thread of a program, or of one that it has started, waits for a file or a connection."""
    calls = [system_calls.of_thread(pid, pid), *system_calls.of_other_threads(pid)]
    if any(call is not None and _moves(call, remote) for call in calls):
        return True
    return any(_program_moves(child, by_parent, remote) for child in by_parent.get(pid, []))
