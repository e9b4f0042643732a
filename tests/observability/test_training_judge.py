"""What the coordinator does for the goodput ledger: a newcomer learns the job's; how long a node was silent."""

from __future__ import annotations

import pytest

from tests.membership.world import World
from trainer_launch.membership import protocol as msg
from trainer_launch.observability.goodput import TRAINING, LedgerSummary
from trainer_launch.observability.training_judge import TrainingJudge
from trainer_launch.supervisor.run_observer import TimeKind


def joins(
    world: World, peer: int, spent_s: float, step: int | None = None, kind: TimeKind = TimeKind.TRAINING
) -> None:
    told = LedgerSummary({kind: spent_s}, step)
    world.say(peer, msg.Join(world.incarnations[peer], world.number, notes={TRAINING: told}))


def formed(world: World, peer: int) -> LedgerSummary | None:
    """The ledger that a node got when the generation was formed."""
    ledger: LedgerSummary | None = world.last(peer, msg.Formed).notes.get(TRAINING)
    return ledger


def test_at_the_beginning_all_go_on_with_the_longest_ledger() -> None:
    world = World(3, judges=[TrainingJudge()])
    peers = [world.call(rank) for rank in range(3)]
    for peer, spent_s in zip(peers, (4.0, 30.0, 5.0), strict=True):
        joins(world, peer, spent_s, kind=TimeKind.STARTING)
        world.now_s += 1.0
    told = [formed(world, peer) for peer in peers]
    assert told[1] is None, "it is its own"
    assert told[0] == told[2] == LedgerSummary({TimeKind.STARTING: 30.0, TimeKind.WAITING: 1.0})


def test_a_ledger_of_thirty_years_is_not_believed() -> None:
    world = World(2, judges=[TrainingJudge()])
    peers = [world.call(rank) for rank in range(2)]
    for peer, spent_s in zip(peers, (4.0, 1e12), strict=True):
        joins(world, peer, spent_s, kind=TimeKind.STARTING)
    assert [formed(world, peer) for peer in peers] == [
        None,
        LedgerSummary({TimeKind.STARTING: 4.0, TimeKind.WAITING: 0.0}),
    ]


def test_a_pod_that_comes_back_goes_on_with_the_ledger_of_the_first_node_that_stayed() -> None:
    world = World(3, judges=[TrainingJudge()])
    first, second, third = world.come(0, 1, 2)
    world.open_store()
    world.gone(third)
    joins(world, second, 150.0, step=70)  # longer by the head start of its pod
    joins(world, first, 100.0, step=72)
    world.now_s += 4.0
    back = world.call(2, incarnation="another")
    joins(world, back, 2.0, kind=TimeKind.STARTING)
    assert formed(world, back) == LedgerSummary({TimeKind.TRAINING: 100.0, TimeKind.WAITING: 4.0}, 72)
    assert formed(world, first) is formed(world, second) is None, "theirs never lose a second"


def test_the_others_hear_for_how_long_a_node_was_silent() -> None:
    world = World(2, lease_s=10.0)
    first, second = world.come(0, 1)
    world.open_store()
    for _ in range(4):
        world.now_s += 3.0
        world.say(first, msg.Renew())
        world.tick()
    (restart,) = [one for one in world.told[first] if isinstance(one, msg.Restart)]
    assert "silent" in restart.reason
    assert restart.unnoticed_s == pytest.approx(12.0)
    assert not [one for one in world.told.get(second, ()) if isinstance(one, msg.Restart)]
