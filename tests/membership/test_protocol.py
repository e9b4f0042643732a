"""Lines become messages, or a MessageError; never anything else."""

from __future__ import annotations

import json

import pytest

from trainer_launch.membership import protocol as msg
from trainer_launch.model.codec import MAX_LINE_BYTES, MessageError

ONE_OF_EACH: list[msg.Message] = [
    msg.Hello(1, "job", None, "pod-1", "i1"),
    msg.Hello(1, "job", 7, "pod-1", "i1", 3, 2, "ab"),
    msg.Hello(1, "job", 7, "pod-1", "i1", workers=1024, role="träger"),
    msg.Join("i1", 4),
    msg.Renew(),
    msg.Store(3, "10.0.0.1", 4000),
    msg.Failed(3, 1, None, 9, "killed\nhere \ud800"),
    msg.Failed(3, 1, 1, None, "ImportError: x", "ImportError"),
    msg.Failed(3, 1, 1, None, "gloo", "RuntimeError", True, (0, 2)),
    msg.Join("i1", 4, (1, 3), True),
    msg.Leave("preempted"),
    msg.Done(3),
    msg.Challenge(""),
    msg.Welcome(3.0),
    msg.Refused("no", False),
    msg.Quarantined("no", False),
    msg.Waiting(1, 3, ("node 1 (" + "x" * 253 + ")",)),
    msg.Formed(3, 1, 2, 1, False),
    msg.Formed(3, 1, 2, 1, False, None, 8, 12, 0, 4),
    msg.Go(3, "::1", 4000),
    msg.Restart(3, "why"),
    msg.GiveUp("why"),
    msg.GiveUp("why", "node 1", 5, None, 9, "text"),
    msg.GiveUp("why", "node 1", 5, 1, None, "text", "ProgramError"),
    msg.Finished(),
    msg.StatusQuery(1, "job", "ab"),
    msg.JobStatus("running", 3, 1, 3, 2, 4, 9, ((0, "a", "running", None), (None, "b", "lost", 7.5)), None),
    msg.Note(3, "weather", {"rain": [1, 2.5, None, "\ud800"]}),
    msg.Join("i1", 4, notes={"weather": []}),
]


@pytest.mark.parametrize("message", ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_message_survives_its_line(message):
    line = msg.render(message)
    assert line.count(b"\n") == 1
    assert msg.parse(line) == message


def hello(**changes):
    values = json.loads(msg.render(ONE_OF_EACH[1]))
    return json.dumps({**values, **changes}).encode()


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"\n",
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00",
        b"[]",
        b"1",
        b"null",
        b"{}",
        b'{"kind":"renew","more":1}',
        b'{"kind":["renew"]}',
        b'{"kind":"hello"}',
        b'{"kind":"renew"} {"kind":"renew"}',
        b"[" * 60000,
        b'{"a":' * 10000,
        b"9" * 60000,
        b'{"kind":"welcome","lease_s":NaN}',
        b'{"kind":"welcome","lease_s":-1}',
        b'{"kind":"done","generation":true}',
        b'{"kind":"done","generation":1.0}',
        b'{"kind":"done","generation":-1}',
        b'{"kind":"done","generation":1e400}',
        hello(node_rank=-1),
        hello(node_rank="0"),
        hello(host=""),
        hello(host="a\nb"),
        hello(host="x" * 300),
        hello(host="ü"),
        hello(generation=2**31),
        hello(proof=5),
        hello(job=None),
        hello(workers=-1),
        hello(workers=1025),
        hello(workers=True),
        hello(role=None),
        hello(role="x" * 254),
        b" " * (MAX_LINE_BYTES + 1),
    ],
)
def test_nonsense_is_refused(line):
    with pytest.raises(MessageError):
        msg.parse(line)


def test_long_texts_are_cut_and_what_cannot_fit_is_an_error():
    assert msg.parse(msg.render(msg.Leave("x" * 100_000))) == msg.Leave("x" * 2000)
    assert len(msg.render(msg.Failed(1, 0, 1, None, "\U0001f525" * 100_000))) < MAX_LINE_BYTES
    with pytest.raises(MessageError):
        msg.render(msg.Waiting(1, 9999, ("x" * 200,) * 9999))


def test_a_refusal_has_only_the_fields_that_launchers_of_all_versions_read():
    refused = json.loads(msg.render(msg.Refused("the coordinator speaks version 9, not 5", retry=False)))
    assert sorted(refused) == ["kind", "reason", "retry"]
