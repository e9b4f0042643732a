"""A crash that comes again at the same place is the program's: no node says that a restart may help."""

from __future__ import annotations

import signal

import pytest

from tests.membership.world import World, running
from trainer_launch.membership import protocol as msg

SEGV, KILL = int(signal.SIGSEGV), int(signal.SIGKILL)
HERE = 'Fatal Python error: Segmentation fault File "train.py", line 7 in step'
THERE = HERE.replace("7", "8")


def given_up(*crashes: str, reason: str = "Crashed", number: int = SEGV) -> msg.GiveUp:
    """How a job of one node ends whose worker dies with these words, one start after the other."""
    world, (zero,) = running(1, max_restarts=len(crashes) - 1)
    for words in crashes:
        failed = msg.Failed(world.number, 0, None, number, words, exit_reason=reason, helps=True)
        world.say(zero, failed)
        again(world, zero)
    end = world.last(zero, msg.GiveUp)
    assert isinstance(end, msg.GiveUp)
    return end


def again(world: World, peer: int) -> None:
    """The node has stopped its workers, and starts them again."""
    world.join(peer)
    world.pass_time(20)
    if not world.is_over:
        world.open_store()


def test_three_of_them_are_no_chance() -> None:
    end = given_up(HERE, HERE, HERE)
    assert end.helps is False
    assert "the same crash has ended 3 starts in a row" in end.reason


@pytest.mark.parametrize(
    "crashes", [(HERE, HERE), (HERE, THERE, HERE, THERE), (THERE, HERE, HERE), ("", "", "")], ids=len
)
def test_fewer_others_and_those_without_a_place_prove_nothing(crashes: tuple[str, ...]) -> None:
    assert given_up(*crashes).helps is True


def test_a_device_may_fail_in_the_same_words_and_be_replaced() -> None:
    assert given_up(
        "CUDA error: unspecified", "CUDA error: unspecified", "CUDA error: unspecified", reason="DeviceFailed"
    ).helps


def test_who_is_killed_from_outside_has_not_crashed() -> None:
    assert given_up("killed", "killed", "killed", reason="Killed", number=KILL).helps
