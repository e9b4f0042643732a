"""What strangers may say: the protocols of coordinator and cluster preflight, as lines and as conversations."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress

from msgspec.structs import replace

from tests.fuzz.oracle import Refused, assert_encodable, assert_sentence, assert_terminal, attempt
from tests.fuzz.registry import target
from trainer_launch.commands import status
from trainer_launch.diagnosis import stall, stragglers
from trainer_launch.diagnosis.stall import StallJudge
from trainer_launch.diagnosis.stragglers import StragglerJudge
from trainer_launch.membership import membership
from trainer_launch.membership import protocol as coordination
from trainer_launch.membership import state as states
from trainer_launch.membership.authentication import Channel
from trainer_launch.membership.client import Lines, LostError
from trainer_launch.membership.election import ranks_of, wanted_candidates
from trainer_launch.membership.notes import opened
from trainer_launch.model import Endpoint
from trainer_launch.model.codec import MAX_LINE_BYTES, MessageError, convert
from trainer_launch.mpi.remote_hosts import banner_fault
from trainer_launch.observability.goodput import LedgerSummary
from trainer_launch.observability.training_judge import TrainingJudge
from trainer_launch.preflight import report_formats
from trainer_launch.preflight.cluster import cluster_preflight as hall
from trainer_launch.preflight.cluster import preflight_messages as calling
from trainer_launch.preflight.cluster.present_nodes import ClusterSettings

_SETTINGS = (
    states.CoordinatorSettings(job="job", min_nodes=2, max_nodes=3, max_restarts=3),
    states.CoordinatorSettings(job="job", min_nodes=1, max_nodes=4, max_restarts=1, candidate=0),
    states.CoordinatorSettings(job="job", min_nodes=1, max_nodes=4, max_restarts=1, candidate=2),
)
_JUDGES = (StallJudge(), StragglerJudge(every_s=5.0), TrainingJudge())


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
        if isinstance(found, coordination.JobStatus):
            assert_terminal(status.shown_lines(status.job_lines("Job", status.job_table(found), None)))
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
    greeted: set[int] = set()
    job = _SETTINGS[data[0] % len(_SETTINGS)]
    state, now_s = membership.begin(job, _assert_readable, greeted.discard, _assert_printable, _JUDGES), 100.0
    for line in data[1:].split(b"\n")[:60]:
        if not line:
            continue
        peer, now_s = line[0] % 6, now_s + (line[0] // 6) % 8
        if line[1:] == b"-":
            greeted.discard(peer)
            membership.hang_up(state, peer, now_s)
        elif line[1:] == b"t":
            membership.tick(state, now_s)
        else:
            _say(state, peer, line[1:], greeted, now_s)
        wanted_candidates(state)
        states.deadline_s(state)
        coordination.render(states.status(state, now_s))


def _say(state: states.JobState, peer: int, line: bytes, greeted: set[int], now_s: float) -> None:
    message = attempt(coordination.parse, line, kinds=(MessageError,))
    if isinstance(message, coordination.StatusQuery):
        coordination.render(states.why_stranger(state.settings.job, message) or states.status(state, now_s))
    elif isinstance(message, coordination.Hello) or (peer in greeted and not isinstance(message, Refused)):
        greeted.add(peer)
        membership.hear(state, peer, message, now_s)


def _assert_readable(_peer: int, message: coordination.FromServer) -> None:
    assert _heard(message) == message


def _assert_printable(text: str, _level: int) -> None:
    assert_encodable(text)
    assert text.isprintable(), text


def _heard(message: coordination.FromServer) -> coordination.Message:
    """As the node reads it that it is sent to."""
    heard = coordination.parse(coordination.render(message))
    if isinstance(heard, coordination.Note):
        kinds = stall.ToNode if heard.topic == stall.STALL else stragglers.ToNode
        return replace(heard, body=opened(kinds, heard.body, heard.topic))
    if isinstance(heard, coordination.Formed):
        return replace(heard, notes={topic: convert(LedgerSummary, body) for topic, body in heard.notes.items()})
    return heard


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
    flags = data[0]
    settings = ClusterSettings(
        job="job",
        min_nodes=2,
        max_nodes=2 + flags % 2,
        deadline_s=20.0,
        places=tuple(Endpoint(f"n-{rank}", 1) for rank in range(3)),
        salt="salt",
    )
    room, now_s = hall.ClusterPreflight(settings, 0.0, _sent), 0.0
    for line in data[1:].split(b"\n")[:60]:
        if not line:
            continue
        peer, now_s = line[0] % 6, now_s + (line[0] // 6) % 8
        if line[1:] == b"-":
            room.lose(peer, now_s)
        elif line[1:] == b"t":
            room.tick(now_s)
        else:
            message = attempt(calling.parse, line[1:], kinds=(MessageError,))
            if not isinstance(message, Refused):
                room.hear(peer, "10.0.0.1", message, now_s)
    for _ in range(600):
        now_s += 1.0
        room.tick(now_s)
        room.measured()
    assert room.phase is hall.PreflightPhase.OVER, "it does not end"
    assert len(calling.fitted(room.findings)) <= len(room.findings)


def _sent(peer: int, message: calling.Message | None) -> None:
    if message is not None:
        assert calling.parse(calling.render(message)) == message


@target(8000)
def findings(data: bytes) -> None:
    """A report that another container has left."""
    attempt(report_formats.parse, data, kinds=(MessageError,))


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
    with near, far:
        far.setblocking(False)
        with suppress(BlockingIOError):
            far.send(data)
        far.shutdown(socket.SHUT_WR)
        assert_sentence(f"banner: {banner_fault(near)}")


def _all_of(sock: socket.socket, parse: Callable[[bytes], object]) -> None:
    lines = Lines(sock, parse, "node 0")
    while True:
        lines.next(time.monotonic() + 5.0)
