"""What holds in every history, however mad."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.membership.world import World
from trainer_launch.membership import protocol as msg
from trainer_launch.membership.state import JobPhase, deadline_s

NODES = st.integers(0, 4)
EVENTS = st.one_of(
    st.tuples(st.just("call"), NODES),
    st.tuples(st.just("again"), NODES),
    st.tuples(st.just("join"), NODES),
    st.tuples(st.just("join"), NODES),
    st.tuples(st.just("join_unprepared"), NODES),
    st.tuples(st.just("join_all"), NODES),
    st.tuples(st.just("store"), NODES),
    st.tuples(st.just("store"), NODES),
    st.tuples(st.just("fail"), NODES),
    st.tuples(st.just("done"), NODES),
    st.tuples(st.just("leave"), NODES),
    st.tuples(st.sampled_from(["gone", "reset", "resume"]), NODES),
    st.tuples(st.just("old"), NODES),
    st.tuples(st.just("time"), st.sampled_from([0.1, 0.6, 4.0, 40.0])),
)


class Play:
    """Nodes that do what a script says, at any time."""

    def __init__(self, world, with_ranks):
        self.world, self.with_ranks = world, with_ranks
        self.peers: dict[int, int] = {}

    def do(self, what, who):
        peer = self.peers.get(who)
        if what == "time":
            self.world.pass_time(who)
        elif what in ("call", "again", "resume"):
            incarnation = None if what == "call" else f"n{who}"
            rank, generation = who if self.with_ranks else None, self.world.number if what == "resume" else 0
            self.peers[who] = self.world.call(
                rank, host=f"pod-{who}", incarnation=incarnation, generation=generation
            )
        elif what == "join_all":
            self.world.join(*self.peers.values())
        elif peer is not None:
            self.speak(what, peer)

    def speak(self, what, peer):
        number = self.world.number
        if what in ("join", "join_unprepared"):
            self.world.join(peer, prepared=what == "join")
        elif what in ("gone", "reset"):
            self.world.gone(peer, ended=what == "gone")
        else:
            messages = {
                "store": msg.Store(number, "h", 1),
                "fail": msg.Failed(number, 0, 1, None),
                "done": msg.Done(number),
                "leave": msg.Leave("x"),
                "old": msg.Failed(max(0, number - 1), 0, 1, None),
            }
            self.world.say(peer, messages[what])


@settings(max_examples=250, deadline=None)
@given(
    st.sampled_from([(1, 1), (3, 3), (1, 3), (2, 4)]),
    st.booleans(),
    st.lists(EVENTS, min_size=20, max_size=80),
)
def test_every_history_keeps_the_promises(nodes, with_ranks, script):
    world = World(*nodes, max_restarts=2, rejoin_timeout_s=30.0)
    play = Play(world, with_ranks)
    generation = 0
    for what, who in script:
        play.do(what, who)
        assert world.number >= generation
        generation = world.number
        due_s = deadline_s(world.state)
        assert due_s is None or due_s >= world.now_s - 1, "no deadline is left behind"
        assert world.state.n_joined == sum(node.joined for node in world.state.nodes.values())
        if world.phase in (JobPhase.FORMED, JobPhase.RUNNING):
            members = world.state.run.members
            assert nodes[0] <= len(members) <= nodes[1]
            assert all(is_there(world.state.nodes[k]) or k in world.state.run.done for k in members)
    check_what_was_told(world)
    assert world.state.restarts <= 2


def is_there(node):
    """Connected, or within its lease after its connection was reset."""
    return node.has_lease


def check_what_was_told(world):
    formed: dict[int, list[msg.Formed]] = {}
    for messages in world.told.values():
        numbers = [m.generation for m in messages if isinstance(m, msg.Formed)]
        assert numbers == sorted(set(numbers)), "generations only grow"
        for kind in (msg.Go, msg.Restart):
            told = [m.generation for m in messages if isinstance(m, kind)]
            assert len(told) == len(set(told)), "nobody is told twice"
        for message in messages:
            if isinstance(message, msg.Formed):
                formed.setdefault(message.generation, []).append(message)
        ends = [m for m in messages if isinstance(m, msg.GiveUp | msg.Finished)]
        assert len(set(ends)) <= 1
    for views in formed.values():
        assert len({(f.size, f.restarts) for f in views}) == 1, "members agree"
        assert sorted(f.group_rank for f in views) == list(range(views[0].size))
        assert [f.is_store_host for f in sorted(views, key=lambda f: f.group_rank)] == [
            rank == 0 for rank in range(views[0].size)
        ]
