"""A job of pure nodes around the machine: time, connections and what each node was told."""

from __future__ import annotations

from trainer_launch.membership import protocol as msg
from trainer_launch.membership.membership import begin, close, hang_up, hear, tick
from trainer_launch.membership.state import CoordinatorSettings, JobPhase, deadline_s

JOB = "job"


class World:
    """Calls the coordinator; `told[peer]` is all that a peer was sent."""

    def __init__(self, low=3, high=None, judges=(), **fields):
        settings = {"job": JOB, "min_nodes": low, "max_nodes": high or low, "max_restarts": 3, **fields}
        self.state = begin(
            CoordinatorSettings(**settings),
            self._send,
            self._disconnect,
            lambda text, _: self.said.append(text),
            judges,
        )
        self.now_s = 100.0
        self.told: dict[int, list[msg.Message]] = {}
        self.said: list[str] = []
        self.cut: list[int] = []  # peers that the coordinator disconnected
        self.n_gone = 0  # of these have gone
        self.last_peer = 0
        self.incarnations: dict[int, str] = {}

    def _send(self, peer, message):
        self.told.setdefault(peer, []).append(message)

    def _disconnect(self, peer):
        self.cut.append(peer)

    def _do(self, call, *args, **kwargs):
        call(self.state, *args, **kwargs)
        while self.n_gone < len(self.cut):
            self.n_gone += 1
            hang_up(self.state, self.cut[self.n_gone - 1], self.now_s)

    def say(self, peer, message):
        self._do(hear, peer, message, self.now_s)

    def gone(self, peer, *, ended=True):
        """A connection is over."""
        self._do(hang_up, peer, self.now_s, ended=ended)

    def tick(self):
        self._do(tick, self.now_s)

    def close(self, reason):
        self._do(close, reason)

    def call(self, rank=None, host=None, incarnation=None, **fields):
        """A node connects and says Hello."""
        self.last_peer += 1
        peer = self.last_peer
        host = host or f"pod-{rank}"
        self.incarnations[peer] = incarnation or f"i{peer}"
        values = {"version": msg.VERSION, "job": JOB, "node_rank": rank, "host": host, **fields}
        self.say(peer, msg.Hello(incarnation=self.incarnations[peer], **values))
        return peer

    def note(self, peer, topic, body, generation=None):
        """A node sends a note, of the present generation unless it is said otherwise."""
        self.say(peer, msg.Note(self.number if generation is None else generation, topic, body))

    def join(self, *peers, after=None, **fields):
        for peer in peers:
            generation = self.number if after is None else after
            self.say(peer, msg.Join(self.incarnations[peer], generation, **fields))

    def come(self, *ranks, **fields):
        """Nodes call and join, in this order."""
        peers = [self.call(rank, **fields) for rank in ranks]
        self.join(*peers)
        return peers

    def open_store(self):
        host = self.state.nodes[next(iter(self.state.run.members))].peer
        self.say(host, msg.Store(self.number, "10.0.0.1", 4000))

    def fail(self, peer, rank=0, code=1):
        self.say(peer, msg.Failed(self.number, rank, code, None, "boom"))

    def pass_time(self, seconds, silent=()):
        """Tick at every deadline; all nodes but the silent ones renew in between."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            due_s = deadline_s(self.state)
            renew_s = self.now_s + self.state.settings.lease_s / 3
            self.now_s = min(end_s, renew_s, max(self.now_s, due_s) if due_s is not None else end_s)
            if due_s is not None and due_s <= self.now_s:
                self.tick()
            for peer in [peer for peer in self.state.peers if peer not in silent]:
                if self.state.peers[peer].heard_s <= self.now_s - self.state.settings.lease_s / 3:
                    self.say(peer, msg.Renew())

    @property
    def number(self):
        return self.state.run.number

    @property
    def phase(self):
        return self.state.phase

    @property
    def is_over(self):
        return self.state.phase is JobPhase.OVER

    def heard(self, peer, kind):
        """All messages of this kind, or the bodies of all such notes, that a node was sent."""
        bodies = (m.body if isinstance(m, msg.Note) else m for m in self.told.get(peer, []))
        return [body for body in bodies if isinstance(body, kind)]

    def last(self, peer, kind):
        return next(reversed(self.heard(peer, kind)), None)

    def count(self, peer, kind):
        return len(self.heard(peer, kind))


def running(low=3, high=None, *, ranks=None, judges=(), **fields):
    """A job whose workers run, and its nodes' peers; nodes beyond its size are spares."""
    world = World(low, high, judges, **fields)
    peers = world.come(*(range((high or low) + fields.get("spares", 0)) if ranks is None else ranks))
    world.pass_time(1.0)
    world.open_store()
    assert world.phase is JobPhase.RUNNING
    return world, peers
