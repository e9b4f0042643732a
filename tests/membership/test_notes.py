"""Notes: membership carries what it does not know; what nobody can read is ignored, and harms nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from tests.membership.world import World, running
from trainer_launch.diagnosis.collectives import Explanation
from trainer_launch.diagnosis.stall import STALL, Ranks, StallJudge, ToNode
from trainer_launch.membership import notes
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.notes import Judge, Judgement, Members, MemberView, Tell
from trainer_launch.membership.state import deadline_s, status
from trainer_launch.model.codec import MAX_LINE_BYTES, MAX_RANKS, Count, MessageError

WEATHER = "weather"


class Weather(Judge, frozen=True, kw_only=True):
    """Adds up all numbers of a generation, and tells all members the sum after ten seconds."""

    topic: ClassVar[str] = WEATHER
    hears = Count
    carried = Count
    total: int = 0

    def begin(self, members: Sequence[MemberView], now_s: float) -> Judge:
        return Weather(due_s=now_s + 10.0 if members else None)

    def hear(self, number: int, body: int, members: Members, now_s: float) -> Judgement:
        return Weather(total=self.total + body, due_s=self.due_s), (f"node {number} says {body}",)

    def tick(self, members: Members, now_s: float) -> Judgement:
        numbers = [member.number for member in members() if member.answers]
        return Weather(total=self.total), (Tell(numbers, self.total),)

    def explain_end(self, bodies: Sequence[int]) -> str:
        return f"it rained {sum(bodies)} mm" if bodies else ""

    def status(self, now_s: float) -> object:
        return {"total": self.total}


@pytest.fixture(autouse=True)
def nothing_said_yet() -> None:
    notes.ignore.cache_clear()


def test_a_judge_hears_members_until_their_generation_is_over() -> None:
    world, (zero, one, two) = running(3, judges=[Weather()])
    world.note(zero, WEATHER, 3)
    world.note(one, WEATHER, 4)
    world.note(two, WEATHER, 5, generation=0)
    world.say(two, msg.Done(1))
    world.note(two, WEATHER, 6)
    assert [text for text in world.said if "says" in text] == ["node 0 says 3", "node 1 says 4"]
    assert status(world.state, world.now_s).notes == {WEATHER: {"total": 7}}
    world.pass_time(11.0)
    assert [world.heard(peer, int) for peer in (zero, one, two)] == [[7], [7], []]
    world.fail(one)
    assert status(world.state, world.now_s).notes == {WEATHER: {"total": 0}}
    world.note(zero, WEATHER, 8)
    assert status(world.state, world.now_s).notes == {WEATHER: {"total": 0}}


def test_when_a_judge_is_due_the_coordinator_is() -> None:
    world, _ = running(1, judges=[Weather()])
    assert (deadline_s(world.state) or 0.0) <= world.now_s + 10.0


def test_what_a_judge_reads_in_the_last_notes_is_told_of_a_killed_worker() -> None:
    world, (zero, one) = running(2, judges=[Weather()], max_restarts=0)
    world.say(zero, msg.Failed(1, 0, None, 9, notes={WEATHER: 3, "tides": [1]}))
    world.say(one, msg.Join(world.incarnations[one], 1, notes={WEATHER: 4}))
    world.join(zero)
    assert world.last(one, msg.GiveUp).seen == "it rained 7 mm"


@pytest.mark.parametrize("body", [None, -1, "3", [3], {"kind": "rain"}])
def test_a_note_with_a_body_of_another_kind_is_ignored_and_said_once(
    body: Any, caplog: pytest.LogCaptureFixture
) -> None:
    world, (peer, *_) = running(3, judges=[Weather()])
    for _ in range(3):
        world.note(peer, WEATHER, body)
        world.say(peer, msg.Join(world.incarnations[peer], 0, notes={WEATHER: body}))
    assert status(world.state, world.now_s).notes == {WEATHER: {"total": 0}}
    assert not world.is_over
    assert len(caplog.messages) == (body is not None), caplog.messages


def test_a_note_that_nobody_knows_is_ignored_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    world, (peer, *_) = running(3, judges=[Weather()])
    bodies: tuple[Any, ...] = (1, {"deep": [[[]]]})
    for body in bodies:
        world.note(peer, "tides", body)
    world.say(peer, msg.Join(world.incarnations[peer], 0, notes={"tides": 5}))
    assert [message.split(":")[0] for message in caplog.messages] == ["ignored a note about 'tides'"]


def test_a_note_from_the_coordinator_that_no_node_knows_is_ignored_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    for body in ({"kind": "ebb"}, 5, {"kind": "ebb"}):
        assert notes.opened(ToNode, body, STALL) is None
    assert len(caplog.messages) == 2
    assert notes.opened(ToNode, {"kind": "explanation", "text": "text"}, STALL) == Explanation(text="text")


def test_a_note_that_is_too_long_for_a_line_cannot_be_sent() -> None:
    with pytest.raises(MessageError, match="at most"):
        msg.render(msg.Note(1, WEATHER, [10**15] * (MAX_LINE_BYTES // 16)))


def test_more_states_than_a_node_may_have_ranks_are_not_heard(caplog: pytest.LogCaptureFixture) -> None:
    world = World(1, judges=[StallJudge()])
    (peer,) = world.come(0, workers=2)
    world.open_store()
    world.note(peer, STALL, {"kind": "ranks", "states": [{"rank": 1}] * (MAX_RANKS + 1), "at_ns": 1})
    assert world.count(peer, Explanation) == 0
    assert len(caplog.messages) == 1
    world.note(peer, STALL, Ranks((), 1))
    assert world.count(peer, Explanation) == 1
