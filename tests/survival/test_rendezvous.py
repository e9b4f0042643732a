"""What torch's rendezvous makes of what the coordinator says, without one."""

from __future__ import annotations

import socket
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest

from trainer_launch.membership import protocol as say
from trainer_launch.membership.client import Client, Connected
from trainer_launch.model import Endpoint, FailureRecord

if TYPE_CHECKING:
    from trainer_launch.pytorch.elastic_rendezvous import CoordinatedRendezvous

pytestmark = pytest.mark.torch
WHERE = Endpoint("job-0.job", 29500)


class Talk:
    """A client whose coordinator says what is in `news`."""

    def __init__(self) -> None:
        self.news: deque[object] = deque([Connected()])
        self.sent: list[object] = []

    def send(self, message: object) -> None:
        self.sent.append(message)

    def receive(self, _timeout_s: float | None) -> object:
        return self.news.popleft() if self.news else None

    def where(self) -> tuple[Endpoint, str]:
        return WHERE, "10.0.0.7"

    def meets(self, generation: int, group_rank: int) -> None:
        formed = say.Formed(generation, group_rank, 2, generation - 1, is_store_host=False)
        self.news += [formed, say.Go(generation, "10.0.0.1", 40000)]


def rendezvous_of(talk: Any, *deaths: FailureRecord | None) -> CoordinatedRendezvous:
    """This node's, whose workers die so from start to start."""
    from trainer_launch.pytorch.elastic_rendezvous import CoordinatedRendezvous, Identity

    me = Identity(run_id="j", incarnation="i", host="b", address=None, ports=None)
    left = deque(deaths)
    return CoordinatedRendezvous(talk, WHERE, me=me, first_death=left.popleft, patience_s=9.0)


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch) -> Talk:
    """A coordinator for nodes that reach any store."""
    from torch.distributed import HashStore

    from trainer_launch.pytorch import elastic_rendezvous

    monkeypatch.setattr(elastic_rendezvous, "reach_store", lambda *_: HashStore())
    return Talk()


def test_a_failure_that_the_job_has_recovered_from_is_not_the_one_that_ends_it_when_ranks_have_moved(
    talk: Talk,
) -> None:
    from trainer_launch.pytorch.elastic_rendezvous import GaveUpError

    made = rendezvous_of(talk, None, FailureRecord(rank=1, exit_code=7), None)
    talk.meets(1, group_rank=1)
    made.next_rendezvous()
    talk.meets(2, group_rank=0)  # the other node came back later than this one
    made.next_rendezvous()
    talk.news.append(say.GiveUp("the budget is spent", node="a", rank=1, exit_code=9))
    assert made.num_nodes_waiting() == 1
    with pytest.raises(GaveUpError) as ended:
        made.next_rendezvous()
    assert ended.value.own is None, "rank 1 is another node's by now"
    assert [type(message) for message in talk.sent].count(say.Failed) == 1, "a death is told once"


def test_the_failure_that_ends_the_job_is_this_nodes_own(talk: Talk) -> None:
    from trainer_launch.pytorch.elastic_rendezvous import GaveUpError

    death = FailureRecord(rank=1, exit_code=7)
    made = rendezvous_of(talk, None, death)
    talk.meets(1, group_rank=1)
    made.next_rendezvous()
    talk.news.append(say.GiveUp("the budget is spent", node="b", rank=1, exit_code=7))
    with pytest.raises(GaveUpError) as ended:
        made.next_rendezvous()
    assert ended.value.own == death


def test_a_resolver_that_fails_for_a_moment_costs_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", fail)
    talk: Any = Talk()
    assert Client.own_address(talk, None, "b") == "10.0.0.7"
