"""What strangers may say: the protocols of coordinator and cluster preflight, as lines and as conversations."""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec import to_builtins

from tests.fuzz.oracle import Refused, assert_encodable, assert_sentence, assert_terminal, attempt
from tests.fuzz.registry import target
from trainer_launch.commands import status
from trainer_launch.membership import membership
from trainer_launch.membership import protocol as coordination
from trainer_launch.membership import state as states
from trainer_launch.membership.authentication import Channel
from trainer_launch.membership.client import Lines, LostError
from trainer_launch.membership.election import ranks_of, wanted_candidates
from trainer_launch.model import Endpoint
from trainer_launch.model.codec import MAX_LINE_BYTES, MessageError
from trainer_launch.mpi.host_readiness import Probes, _Target
from trainer_launch.preflight import report_formats
from trainer_launch.preflight.cluster import cluster_preflight as hall
from trainer_launch.preflight.cluster import nodes
from trainer_launch.preflight.cluster import preflight_messages as calling
from trainer_launch.preflight.cluster.nodes import Names

_SETTINGS = (
    states.Settings(job="job", min_nodes=2, max_nodes=3, max_restarts=3),
    states.Settings(job="job", min_nodes=1, max_nodes=4, max_restarts=1, candidate=0),
    states.Settings(job="job", min_nodes=1, max_nodes=4, max_restarts=1, candidate=2),
)


@target()
def coordinator_lines(data: bytes) -> None:
    """A line is a message, or a MessageError says why not; a message is read as it was written."""
    for line in data.split(b"\n"):
        found = attempt(coordination.parse, line, kinds=(MessageError,))
        if isinstance(found, Refused):
            continue
        written = coordination.render(found)
        assert len(written) <= MAX_LINE_BYTES
        assert coordination.parse(written) == found
        if isinstance(found, coordination.Status):
            assert_terminal(status.shown_lines(status.job_lines("Job", to_builtins(found), None)))
        if isinstance(found, coordination.Hello):
            assert all(len(ranks_of(claim)) <= 65536 for claim in found.claims)
            assert not Channel(b"secret").admits(found)


@target()
def coordinator_talk(data: bytes) -> None:
    """Whatever any nodes say in any order, the coordinator goes on, and all that it says can be written.

    The first byte chooses the job; each line begins with a byte that tells who says it, and when.
    """
    if not data:
        return
    state, now_s = membership.begin(_SETTINGS[data[0] % len(_SETTINGS)]), 100.0
    greeted: set[int] = set()
    for line in data[1:].split(b"\n")[:60]:
        if not line:
            continue
        peer, now_s = line[0] % 6, now_s + (line[0] // 6) % 8
        event = _event(peer, line[1:], greeted)
        if event is None:
            continue
        if isinstance(event, states.Said) and isinstance(event.message, coordination.StatusQuery):
            coordination.render(states.answer(event.message, state, now_s, None))
            continue
        state, replies = membership.step(state, event, now_s)
        for reply in replies:
            if isinstance(reply, states.Send):
                assert coordination.parse(coordination.render(reply.message)) == reply.message
            elif isinstance(reply, states.Say):
                assert_encodable(reply.text)
                assert reply.text.isprintable(), reply.text
            elif isinstance(reply, states.Disconnect):
                greeted.discard(reply.peer)
        wanted_candidates(state)
        states.deadline_s(state)
        coordination.render(states.status(state, now_s))


def _event(peer: int, line: bytes, greeted: set[int]) -> states.Event | None:
    if line == b"-":
        greeted.discard(peer)
        return states.Gone(peer)
    if line == b"t":
        return states.Tick()
    message = attempt(coordination.parse, line, kinds=(MessageError,))
    if isinstance(message, Refused):
        return None
    if peer not in greeted:
        if isinstance(message, coordination.Hello):
            greeted.add(peer)
        elif not isinstance(message, coordination.StatusQuery):
            return None
    return states.Said(peer, message)


@target()
def cluster_preflight_lines(data: bytes) -> None:
    """As the coordinator's."""
    for line in data.split(b"\n"):
        found = attempt(calling.parse, line, kinds=(MessageError,))
        if isinstance(found, Refused):
            continue
        written = calling.render(found)
        assert isinstance(found, coordination.Hello) or calling.parse(written) == found


@target()
def cluster_preflight_talk(data: bytes) -> None:
    """Whatever any nodes say in any order, the cluster preflight comes to its end."""
    if not data:
        return
    names = Names(home=Endpoint("n-0", 1), pattern="n-#")
    flags = data[0]
    settings = nodes.Settings(
        job="job",
        min_nodes=2,
        max_nodes=2 + flags % 2,
        deadline_s=20.0,
        names=names,
        salt="salt",
        is_deep=bool(flags & 4),
        storage={"/ckpt": True} if flags & 8 else {},
    )
    room, now_s = hall.ClusterPreflight(settings, 0.0), 0.0
    for line in data[1:].split(b"\n")[:60]:
        if not line:
            continue
        peer, now_s = line[0] % 6, now_s + (line[0] // 6) % 8
        event: nodes.Event | None = nodes.Tick()
        if line[1:] == b"-":
            event = nodes.Gone(peer)
        elif line[1:] != b"t":
            message = attempt(calling.parse, line[1:], kinds=(MessageError,))
            event = None if isinstance(message, Refused) else nodes.Said(peer, "10.0.0.1", message)
        if event is not None:
            _said(room, event, now_s)
    for _ in range(40):
        due_s = room.due_s()
        if due_s is None:
            break
        now_s = max(now_s, due_s)
        _said(room, nodes.Tick(), now_s)
        room.measured()
    assert room.phase is hall.Phase.OVER, "it does not end"
    calling.dump_findings(room.findings)


def _said(room: hall.ClusterPreflight, event: nodes.Event, now_s: float) -> None:
    for reply in room.step(event, now_s):
        if isinstance(reply, nodes.Send):
            assert calling.parse(calling.render(reply.message)) == reply.message
        elif isinstance(reply, nodes.Look):
            _said(room, nodes.Looked(()), now_s)


@target(8000)
def findings(data: bytes) -> None:
    """Findings of other nodes, and a report that another container has left."""
    found = attempt(calling.load_findings, data.decode("utf-8", "replace"), kinds=(ValueError,))
    if not isinstance(found, Refused):
        assert len(calling.load_findings(calling.dump_findings(found))) <= len(found)
    attempt(report_formats.parse, data, kinds=(ValueError,))


@target(20_000)
def other_end(data: bytes) -> None:
    """Whatever answers in a coordinator's place, in node 0's, or in a host's sshd's: it is over, at once."""
    for parse in (coordination.parse, calling.parse):
        near, far = socket.socketpair()
        with near, far:
            far.setblocking(False)
            with suppress(BlockingIOError):
                far.send(data)
            far.shutdown(socket.SHUT_WR)
            attempt(_all_of, near, parse, kinds=(LostError,), names="node 0")
    near, far = socket.socketpair()
    with selectors.DefaultSelector() as selector, near, far:
        probes = Probes(selector, None, 22, lambda host: None)  # type: ignore[arg-type]
        host = _Target("host")
        probes._targets["host"], host.socket = host, near
        far.setblocking(False)
        with suppress(BlockingIOError):
            far.send(data)
        far.shutdown(socket.SHUT_WR)
        while host.socket is not None:
            probes._readable(host)
        assert_sentence(str(host.reached))


def _all_of(sock: socket.socket, parse: Callable[[bytes], object]) -> None:
    lines = Lines(sock, parse, "node 0")
    while True:
        lines.next(time.monotonic() + 5.0)
