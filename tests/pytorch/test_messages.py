"""Messages between PID 1 and the fork server arrive as they were sent; anything else is an error."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator

import pytest

from trainer_launch.model.codec import MessageError
from trainer_launch.pytorch import messages
from trainer_launch.pytorch.messages import (
    Forked,
    ForkedWorker,
    ForkWorkers,
    OpenStore,
    Ready,
    RequestFailed,
    StoreOpen,
    Unfit,
)

WORKER = ForkedWorker(local_rank=3, environment={"RANK": "7"}, streams=(1, 2), stacks="/run/stacks.3")
WORKERS = ForkWorkers(argv=("python", "-u", "t.py"), environment={"A": "\udcff"}, cwd="/", workers=(WORKER,))


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


@pytest.mark.parametrize(
    "message",
    [
        WORKERS,
        OpenStore(),
        OpenStore(20000, 20010),
        Ready({"/a.py": (1, 2)}),
        Unfit("threads"),
        Forked((1, 2)),
        StoreOpen(3, 4),
        RequestFailed("no"),
    ],
)
def test_a_message_is_read_as_it_was_sent(message: messages.Message) -> None:
    assert messages.parsed(messages.printed(message)) == message


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b"{}",
        b'{"v": 1}',
        b'{"v": 1, "kind": "Other"}',
        b'{"v": 1, "kind": []}',
        b'{"v": 2, "kind": "openstore", "low": null, "high": null}',
        b'{"v": 1, "kind": "openstore", "low": "1", "high": null}',
        b'{"v": 1, "kind": "forked", "pids": [true]}',
        b'{"v": 1, "kind": "ready", "files": {"a": [1]}}',
        b'{"v": 1, "kind": "failed", "reason": null}',
        b"[" * 100_000,
        json.dumps(json.loads(messages.printed(WORKERS)) | {"workers": [{}]}).encode(),
        messages.printed(WORKERS).replace(b"[1,2]", b"[0]"),
        messages.printed(WORKERS).replace(b"[1,2]", b"[1,1]"),
        b"\xff",
    ],
)
def test_what_is_no_message_is_an_error(data: bytes) -> None:
    with pytest.raises(MessageError):
        messages.parsed(data)


def test_many_descriptors_arrive_in_order_and_are_closed_at_an_exec(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    """More than the kernel passes at once."""
    sent = [os.memfd_create(str(number)) for number in range(300)]
    try:
        messages.send(ends[0], OpenStore(), sent)
        received = messages.receive(ends[1], 5)
        assert received is not None
        message, fds = received
        assert message == OpenStore()
        try:
            assert [os.fstat(fd).st_ino for fd in fds] == [os.fstat(fd).st_ino for fd in sent]
            assert not any(map(os.get_inheritable, fds))
        finally:
            for fd in fds:
                os.close(fd)
    finally:
        for fd in sent:
            os.close(fd)


def test_the_end_of_the_connection_is_told_from_a_part_of_a_message(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    ends[0].sendall(b"\0\0\0\7abc")
    ends[0].shutdown(socket.SHUT_WR)
    with pytest.raises(MessageError, match="only a part"):
        messages.receive(ends[1], 5)
    assert messages.receive(ends[1], 5) is None


def test_a_message_that_is_too_long_is_not_read(ends: tuple[socket.socket, socket.socket]) -> None:
    ends[0].sendall(b"\xff\xff\xff\xff")
    with pytest.raises(MessageError, match="expected at most"):
        messages.receive(ends[1], 5)


def test_waiting_for_a_message_has_an_end(ends: tuple[socket.socket, socket.socket]) -> None:
    with pytest.raises(TimeoutError):
        messages.receive(ends[1], 0.01)


def test_descriptors_of_what_is_no_message_are_closed(ends: tuple[socket.socket, socket.socket]) -> None:
    read, write = os.pipe()
    socket.send_fds(ends[0], [b"\0\0\0\2{}"], [write])
    os.close(write)
    with pytest.raises(MessageError):
        messages.receive(ends[1], 5)
    assert os.read(read, 1) == b""
    os.close(read)
