"""A node's side of the control plane: a daemon thread that stays in touch whatever happens to the coordinator."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeAlias

from trainer_launch.host.network import tune
from trainer_launch.host.runtime_directory import tell
from trainer_launch.membership import protocol as msg
from trainer_launch.membership import timeouts
from trainer_launch.membership.client_connection import Lines, LostError, ReconnectingClient, abort_when_lost, proof
from trainer_launch.membership.election import remember
from trainer_launch.membership.protocol import Claim
from trainer_launch.model import Endpoint, Seats
from trainer_launch.model.frozen import dataclass

_MAX_SEATS = 64  # that are asked for a coordinator


@dataclass(frozen=True, slots=True)
class Connected:
    """The coordinator has welcomed this node, for the first time or again."""


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The coordinator is out of reach; the client goes on trying."""

    reason: str


News: TypeAlias = msg.FromServer | Connected | Disconnected


class Client(ReconnectingClient[msg.Message, msg.FromNode, News]):
    """Talks to the coordinator for one node. `hello` says who it is; its proof is filled in here.

    What it hears and says of the job is told in the runtime directory, if there is one.
    """

    def __init__(  # noqa: PLR0913
        self,
        endpoint: Endpoint,
        hello: msg.Hello,
        secret: bytes | None = None,
        say: Callable[[str], None] = lambda text: None,
        seats: Seats | None = None,
        wake: Callable[[], None] = lambda: None,
        run_dir: str = "",
    ) -> None:
        super().__init__("the coordinator", msg.render, timeouts.FIRST_PAUSE_S, wake)
        self._home = self._endpoint = endpoint
        self._seats = seats
        self._away_s = time.monotonic()  # since when there has been no coordinator
        self._own_address: str | None = None
        self._hello = hello
        self._secret = secret
        self._say = say
        self._said = ""
        self._run_dir = run_dir
        self._wish: msg.Join | None = None  # said again on a new connection until it is granted
        self._joined_after = -1  # the generation of the last Join
        self._lease_s = timeouts.LEASE_S
        self._thread.start()

    def send(self, message: msg.FromNode) -> None:
        """Send a message now, or when the coordinator is in reach again.

        Raises:
            MessageError: it is not one that the coordinator would take.
        """
        msg.parse(msg.render(message))
        if isinstance(message, msg.Failed):
            tell(
                self._run_dir,
                "worker_failed",
                generation=message.generation,
                rank=message.rank,
                exit_code=message.exit_code,
                signal=message.signal,
                message=message.message or None,
            )
        if isinstance(message, msg.Join):
            with self._lock:
                self._wish = message
                self._joined_after = message.generation
        super().send(message)

    def receive(self, timeout_s: float | None = None) -> News | None:
        """The next news, None when there is none in time; it is told on."""
        news = super().receive(timeout_s)
        match news:
            case msg.Formed(generation=number, group_rank=rank, size=size, restarts=restarts):
                where = {"node_index": rank, "nodes": size}
                tell(self._run_dir, "generation_formed", generation=number, restarts=restarts, **where)
            case msg.Restart(generation=number, reason=reason):
                tell(self._run_dir, "generation_ended", generation=number, reason=reason)
            case msg.GiveUp(reason=reason):
                tell(self._run_dir, "given_up", reason=reason)
            case Disconnected(reason=reason):
                tell(self._run_dir, "coordinator_away", reason=reason)
        return news

    def where(self) -> tuple[Endpoint, str | None]:
        """The coordinator that was there last, and the address that this node had towards it."""
        return self._endpoint, self._own_address

    def own_address(self, given: str | None, name: str) -> str:
        """How other nodes reach this one: as given, else by its address towards node 0; node 0 itself by its name.

        `name` is this node's own.
        """
        if given:
            return given
        coordinator, own = self.where()
        try:
            found = socket.getaddrinfo(coordinator.host, coordinator.port, type=socket.SOCK_STREAM)
        except OSError:  # a resolver that fails for a moment; the name was found when we connected
            found = []
        if own is not None and all(own != address[0] for *_, address in found):
            return own
        return name if coordinator.is_loopback else coordinator.host

    # -- the thread ---------------------------------------------------------------------------

    def _connect_once(self) -> bool:
        is_good = any(self._try_once(endpoint) for endpoint in self._candidates())
        if is_good:
            self._away_s = time.monotonic()
        return is_good

    def _next_pause_s(self, before_s: float) -> float:
        is_soon = time.monotonic() - self._away_s < timeouts.SOON_S
        return min(2 * before_s, timeouts.SOON_PAUSE_S if is_soon else timeouts.LONGEST_PAUSE_S)

    def _candidates(self) -> Iterator[Endpoint]:
        """Node 0's first, always; the other candidates once it has been away for longer than a restart."""
        last = self._endpoint
        yield self._home
        if self._seats is None:
            return
        if time.monotonic() - self._away_s <= timeouts.TAKEOVER_S:
            if last != self._home:
                yield last
            return
        for rank in range(1, min(self._seats.count, _MAX_SEATS)):
            if not self._closing.is_set() and not self._is_over:
                yield self._seats.endpoint(rank)

    def _try_once(self, endpoint: Endpoint) -> bool:
        """Use one connection to its end; whether it was any good."""
        welcomed = False
        try:
            with self._connect(endpoint) as sock, abort_when_lost(sock):
                self._greet(sock, lines := Lines(sock, msg.parse, self._server), endpoint)
                welcomed = True
                self._endpoint, self._own_address = endpoint, str(sock.getsockname()[0])
                self._change("connected" if endpoint == self._home else f"connected to {endpoint}")
                self._tell(Connected())
                every_s = max(timeouts.LEAST_RENEWAL_S, self._lease_s / timeouts.RENEWALS)
                self._talk(sock, lines, msg.Renew(), every_s)
        except (LostError, OSError) as problem:  # it has ended after its first word, or we have no descriptor
            reason = str(problem) if isinstance(problem, LostError) else f"no connection: {problem.strerror}"
            if not self._is_over:
                if endpoint == self._home or welcomed:
                    self._change(reason)
                if welcomed:
                    self._tell(Disconnected(reason))
        return welcomed

    def _connect(self, endpoint: Endpoint) -> socket.socket:
        """Ask for the address each time: a pod that comes back has a new one."""
        try:
            found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise LostError(f"no address for {endpoint.host} yet: {why}") from None
        why = "no address"
        for family, _, _, _, address in found:
            sock = socket.socket(family, socket.SOCK_STREAM)
            try:
                sock.settimeout(timeouts.CONNECT_S if self._seats is None else timeouts.CONNECT_TO_CANDIDATE_S)
                sock.connect(address)
                tune(sock, self._lease_s)
                return sock
            except OSError as problem:
                sock.close()
                why = problem.strerror or "no answer in time"
        raise LostError(f"cannot connect to the coordinator at {endpoint}: {why}")

    def _greet(self, sock: socket.socket, lines: Lines[msg.Message], endpoint: Endpoint) -> None:
        until_s = time.monotonic() + timeouts.GREETING_S
        hello = self._hello
        other = f"what listens at {endpoint} is not a coordinator"
        known = proof(lines.next(until_s), self._secret, hello.job, hello.incarnation, other)
        self._write(sock, replace(hello, proof=known))
        answer = lines.next(until_s)
        if isinstance(answer, msg.Refused):
            if not answer.retry:
                self._is_over = True
                self._change(f"refused by the coordinator: {answer.reason}")
                self._tell(answer)
            raise LostError(f"refused by the coordinator for now: {answer.reason}")
        if not isinstance(answer, msg.Welcome):
            raise LostError(other)
        self._lease_s = answer.lease_s
        sock.settimeout(max(1.0, self._lease_s))
        tune(sock, self._lease_s)
        with self._lock:
            if self._wish is not None and self._wish not in self._unsent:
                self._unsent.appendleft(self._wish)

    def _take(self, message: msg.Message) -> None:
        """Remember what a next Hello must say, and drop what a later Join has answered already."""
        with self._lock:
            if isinstance(message, msg.Formed):
                self._hello = replace(self._hello, generation=message.generation, restarts=message.restarts)
                self._wish = None
                self._remember(message.claim)
            elif isinstance(message, msg.Go) and self._hello.claims[-1:]:
                last = self._hello.claims[-1]
                if last.generation == message.generation:
                    self._remember(last._replace(sure=True))
            if isinstance(message, msg.Restart) and message.generation <= self._joined_after:
                return
        if isinstance(message, msg.Formed):
            self._nudge()
        self._is_over = isinstance(message, msg.Finished | msg.GiveUp) or (
            isinstance(message, msg.Refused) and not message.retry
        )
        if isinstance(message, msg.FromServer):
            self._tell(message)

    def _remember(self, claim: Claim | None) -> None:
        """What this node says from now on wherever it goes; only then it says that it has taken it."""
        if claim is None:
            return
        self._hello = replace(self._hello, claims=remember(self._hello.claims, claim))
        if not claim.sure:
            self._unsent.append(msg.Took(claim.generation))

    def _change(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._say(text)
