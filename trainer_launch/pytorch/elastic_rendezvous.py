"""torch elastic's rendezvous over the coordinator: membership and ranks from node 0's launcher, not a store."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from msgspec import Struct
from torch.distributed import DistNetworkError, DistStoreError, PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from trainer_launch.host import network
from trainer_launch.membership import protocol as say
from trainer_launch.membership import timeouts
from trainer_launch.membership.client import Client, Connected, Disconnected
from trainer_launch.model import Endpoint, FailureRecord, PortRange
from trainer_launch.model.units import counted
from trainer_launch.pytorch.rendezvous_entry_point import BACKEND
from trainer_launch.pytorch.worker_group import UNKNOWN_ENDS, Ends, failed_message

_LOOK_S = 1.0  # how long one look into the queue may sleep: a signal wakes it at once
_log = logging.getLogger(__name__)


class Identity(Struct, frozen=True, kw_only=True):
    """What this node is called."""

    run_id: str  # the job
    incarnation: str  # this process
    host: str  # the node's own name
    address: str | None  # where the others reach it, None: find out
    ports: PortRange | None  # what its stores may use, None: any


class GaveUpError(Exception):
    """The job will not go on: the budget is spent, or a node did not come back."""

    def __init__(self, given_up: say.GiveUp, own: FailureRecord | None) -> None:
        super().__init__(given_up.reason)
        self.given_up = given_up
        # The failure that ended the job, when it is one of this node's workers.
        self.own = own if own is not None and own.rank == given_up.rank else None


class NotNeededError(Exception):
    """The job ended well without this spare node."""


class CoordinatedRendezvous(RendezvousHandler):
    """What torch elastic asks for its membership."""

    def __init__(
        self,
        client: Client,
        coordinator: Endpoint,
        *,
        me: Identity,
        first_death: Callable[[], FailureRecord | None],
        patience_s: float,
        ends: Callable[[], Ends] = lambda: UNKNOWN_ENDS,
    ) -> None:
        self._client = client
        self._coordinator = coordinator
        self._me = me
        self._first_death = first_death
        self._look_at_ends = ends
        self._ends = UNKNOWN_ENDS  # of the last generation
        self._patience_s = patience_s  # how long the coordinator may stay away
        self._formed: say.Formed | None = None
        self._seen = 0  # the last generation that this node was in
        self._going = False  # whether workers of the current generation were started
        self._store: TCPStore | None = None
        self._away_since_s: float | None = time.monotonic()  # None while the coordinator is there
        self._told: FailureRecord | None = None  # this node's failure that ended the last generation
        self._ended: say.GiveUp | say.Finished | None = None

    # -- what torch calls ---------------------------------------------------------------------

    @property
    def use_agent_store(self) -> bool:
        """Workers use the store of their own generation: it is as fresh as they are."""
        return True

    def get_backend(self) -> str:
        """The name that --rdzv-backend gives."""
        return BACKEND

    def get_run_id(self) -> str:
        """The job's name, as far as torch is concerned."""
        return self._me.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Join, wait for the other nodes, and meet them at a fresh store.

        Raises:
            GaveUpError: the job ends here.
            NotNeededError: the job ended well without this node.
            DistNetworkError: the node that opened the store was lost before we reached it.
        """
        self._tell_failure()
        self._going, self._formed, self._store = False, None, None
        self._join()
        while True:
            info = self._take(self._client.receive(_LOOK_S))
            if info is not None:
                return info

    def num_nodes_waiting(self) -> int:
        """More than 0 makes torch stop its workers and come to `next_rendezvous`; this costs no restart."""
        while self._going:
            message = self._client.receive(0)
            if message is None:
                break
            self._note(message)
        return int(not self._going or self._is_away(timeouts.BLIP_S))

    def is_over(self, wait_s: float) -> bool:
        """Whether the generation is over, or turns out to be in a moment: after an error of its store."""
        end_s = time.monotonic() + wait_s
        while not self.num_nodes_waiting() and time.monotonic() < end_s:
            self._note(self._client.receive(_LOOK_S))
        return self.num_nodes_waiting() > 0

    def is_closed(self) -> bool:
        """Only the coordinator ends a job, with a reason."""
        return False

    def set_closed(self) -> None:
        """Nothing: one node that ends must not close the job for the others."""

    def shutdown(self) -> bool:
        """Nothing is left to do when torch says so."""
        return True

    # -- the end ------------------------------------------------------------------------------

    def finish(self) -> bool:
        """Tell that the workers succeeded, and wait until all nodes' did; False: another node's failed, so go on.

        Node 0 waits too: its launcher hosts what the others still use. A coordinator that is gone for good has
        most likely said so to nobody; our own workers did succeed.

        Raises:
            GaveUpError: the job failed elsewhere.
        """
        self._say_done()
        while self._ended is None and self._going and not self._is_away(timeouts.GONE_S):
            message = self._client.receive(_LOOK_S)
            self._note(message)
            if isinstance(message, Connected):
                self._say_done()  # it may have been lost with the connection
        if isinstance(self._ended, say.GiveUp):
            raise GaveUpError(self._ended, self._told)
        return self._ended is not None or self._going

    # -- messages -----------------------------------------------------------------------------

    def _take(self, message: object) -> RendezvousInfo | None:
        """Act on a message while waiting for the next generation; its store is the answer."""
        self._note(message)
        if self._ended is not None:
            self._leave(self._ended)
        if self._is_away(self._patience_s):
            text = f"the coordinator at {self._coordinator} did not answer for {self._patience_s:g} s"
            raise GaveUpError(say.GiveUp(text), None)
        if isinstance(message, say.Restart):
            self._join()
        elif isinstance(message, say.Formed):
            self._form(message)
        elif isinstance(message, say.Go) and self._formed is not None:
            return self._meet(message)
        return None

    def _note(self, message: object) -> None:
        """Keep what outlasts a look: whether the coordinator is there, and whether the job goes on."""
        if isinstance(message, Disconnected):
            self._away_since_s = self._away_since_s or time.monotonic()
        elif isinstance(message, Connected):
            self._away_since_s = None
        elif isinstance(message, say.Restart):
            if self._going:
                self._ends = self._look_at_ends()  # before torch stops the workers
            self._going = False
        elif isinstance(message, (say.GiveUp, say.Finished)):
            self._ended, self._going = message, False
        elif isinstance(message, say.Refused) and not message.retry:
            self._ended, self._going = say.GiveUp(f"the coordinator refuses this node: {message.reason}"), False

    def _say_done(self) -> None:
        if self._formed is not None:
            self._client.send(say.Done(self._formed.generation))

    def _is_away(self, longer_than_s: float) -> bool:
        return self._away_since_s is not None and time.monotonic() - self._away_since_s > longer_than_s

    def _join(self) -> None:
        self._client.send(say.Join(self._me.incarnation, self._seen, self._ends.finished, self._ends.failed))

    def _leave(self, ended: say.GiveUp | say.Finished) -> None:
        if isinstance(ended, say.Finished):
            raise NotNeededError("the job ended without this node")
        raise GaveUpError(ended, self._told)

    def _form(self, formed: say.Formed) -> None:
        """Remember who is in; the store's host opens it on a port that nobody has used."""
        self._formed, self._seen, self._ends = formed, formed.generation, UNKNOWN_ENDS
        if formed.is_store_host:
            self._store = open_store(self._me.ports)
            self._client.send(
                say.Store(
                    formed.generation, self._client.own_address(self._me.address, self._me.host), self._store.port
                )
            )

    def _meet(self, go: say.Go) -> RendezvousInfo | None:
        formed = self._formed
        if formed is None or go.generation != formed.generation:
            return None  # of a generation that has ended meanwhile
        self._going, self._told = True, None  # from here on the end of the generation is seen
        if self._store is None:
            self._store = reach_store(go.host, go.port, self.num_nodes_waiting)
        _log.info(
            "generation %d: this is node %d of %d, store at %s:%d, %s so far",
            *(formed.generation, formed.group_rank, formed.size, go.host, go.port),
            counted(formed.restarts, "failure"),
        )
        store = GenerationStore(f"generation/{formed.generation}", self._store, is_over=self.num_nodes_waiting)
        meeting_point = RendezvousStoreInfo(go.host, go.port)
        return RendezvousInfo(store, formed.group_rank, formed.size, meeting_point)

    def _tell_failure(self) -> None:
        """torch comes here by itself only when a worker of ours has failed, or because we were out of touch."""
        death = self._first_death()
        if death is None and not self._is_away(timeouts.BLIP_S):
            death = FailureRecord()  # nobody saw which it was
        if self._going and self._formed is not None and death is not None:
            self._told, self._ends = death, self._look_at_ends()
            self._client.send(failed_message(death, self._formed.generation, self._ends))


# -- a generation's store ----------------------------------------------------------------------


STORE_TIMEOUT = timedelta(seconds=timeouts.STORE_S)  # all nodes are there when the store is opened
_REACH_S = 1.0  # for one attempt to connect
_SOON_S, _STORE_LOOK_S = 0.002, 0.1  # between two looks at the store, at first and at most
_ADVICE = "the store uses a port of --port-range, or any free port: allow traffic between the job's pods there"
_TRIES = 5  # another program may take a port between our look and our use


def open_store(ports: PortRange | None) -> TCPStore:
    """A store in this process, on a port that nobody has used.

    Raises:
        NodeError: all of `ports` are taken.
    """
    tries = _TRIES
    while True:
        tries -= 1
        port = 0 if ports is None else network.free_port(ports)
        try:
            return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=STORE_TIMEOUT)
        except RuntimeError:  # what torch raises for a port that is taken
            if not tries:
                raise


def reach_store(host: str, port: int, is_over: Callable[[], int]) -> TCPStore:
    """The store that another node has opened, and which goes with that node.

    Raises:
        DistNetworkError: it is not there, and the generation is over or `STORE_TIMEOUT`.
    """
    # torch's own attempts would last until the timeout, and print a stack of C++ each.
    began_s = time.monotonic()
    while (problem := _connect_error(host, port)) is not None:
        waited_s = time.monotonic() - began_s
        if is_over() or waited_s > STORE_TIMEOUT.total_seconds():
            text = f"the store at {host}:{port} could not be reached for {waited_s:.0f} s ({problem})"
            raise DistNetworkError(f"{text}; {_ADVICE}")
        time.sleep(_STORE_LOOK_S)
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=STORE_TIMEOUT)


def _connect_error(host: str, port: int) -> OSError | None:
    try:
        socket.create_connection((host, port), _REACH_S).close()
    except OSError as problem:
        return problem
    return None


class GenerationStore(PrefixStore):
    """The agents' view of a generation's store, which nobody waits at once the generation is over.

    torch's agents wait for each other's ranks at the start, and up to 300 s at the end, also for one that will
    never come. Its own waiting sees neither that nor a signal, and short pieces of it print a warning each.
    """

    def __init__(self, prefix: str, store: TCPStore, is_over: Callable[[], int]) -> None:
        super().__init__(prefix, store)
        self._is_over = is_over

    def wait(self, keys: list[str], timeout: timedelta = STORE_TIMEOUT) -> None:
        """Wait for keys, but no longer than the generation lives.

        Raises:
            DistStoreError: they do not come in that time.
        """
        self._came(keys, timeout)

    def get(self, key: str) -> bytes:
        """The value of a key that somebody sets.

        Raises:
            DistStoreError: the generation is over before, or `STORE_TIMEOUT`.
        """
        return self.multi_get([key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        """The values of keys that others set.

        Raises:
            DistStoreError: the generation is over before, or `STORE_TIMEOUT`.
        """
        if not self._came(keys, STORE_TIMEOUT):
            raise DistStoreError("the generation is over")
        return super().multi_get(keys)

    def _came(self, keys: list[str], timeout: timedelta) -> bool:
        began_s = time.monotonic()
        while not self.check(keys):
            waited_s = time.monotonic() - began_s
            if self._is_over():
                return False
            if waited_s > timeout.total_seconds():
                text = f"the other nodes' agents have not answered at the job's store for {waited_s:.0f} s"
                raise DistStoreError(f"{text}; {_ADVICE}")
            time.sleep(min(_STORE_LOOK_S, max(_SOON_S, waited_s / 4)))
        return True
