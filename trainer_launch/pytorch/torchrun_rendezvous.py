"""Our rendezvous in a torchrun: below a launcher, which hosts the coordinator, or without one in the pod.

torch's agent drives it and keeps its own count of restarts. Without a launcher one torchrun hosts the coordinator.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
import uuid
from collections.abc import Iterator

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousParameters

from trainer_launch.host import logs, process_tree, runtime_directory
from trainer_launch.host.secret import read_secret
from trainer_launch.membership import protocol as say
from trainer_launch.membership.server import Server
from trainer_launch.membership.state import Settings
from trainer_launch.model import Endpoint, NodeRange, exit_codes
from trainer_launch.model.errors import LaunchError, NodeError
from trainer_launch.pytorch import process_attributes, torchrun_rendezvous_options, torchrun_signals
from trainer_launch.pytorch.elastic_rendezvous import CoordinatedRendezvous, GaveUpError, Identity, NotNeededError
from trainer_launch.pytorch.job_events import TellingClient, tell
from trainer_launch.pytorch.torchrun_deaths import Deaths, FirstDeath
from trainer_launch.pytorch.torchrun_end import begin_again, end, end_given_up, forget_error
from trainer_launch.pytorch.torchrun_rendezvous_options import Conf
from trainer_launch.pytorch.worker_death import Ends, HowItDied, ends_of

_UNLIMITED = 1_000_000  # torch's own agents count
_HEARD_S = 2.0
_NEWS_S = 10.0  # in which the coordinator tells of a loss; a lease is shorter
_QUIT = "has no restarts left"
_LEAVE = "asked to stop"
_log = logging.getLogger(__name__)


def handler(params: RendezvousParameters) -> PlainTorchrun:
    """The handler for one torchrun; what does not fit ends it with one sentence and 2 or 138."""
    if not logging.getLogger(logs.NAME).handlers:
        logs.set_up(os.environ.get("TRAINER_LAUNCH_LOG_LEVEL") or "info", "torchrun")
    if runtime_directory.VARIABLE in os.environ:
        forget_error()
    try:
        nodes = NodeRange(params.min_nodes, params.max_nodes)
        conf = torchrun_rendezvous_options.read(params.endpoint, nodes, params.run_id, params.config, os.environ)
        secret = None if conf.secret_file is None else read_secret(conf.secret_file)
        server, endpoint = _host(conf, secret)
        return PlainTorchrun(conf, endpoint, server, secret, params.local_addr)
    except LaunchError as problem:
        end(str(problem), problem.exit_code)


class PlainTorchrun(CoordinatedRendezvous):
    """One node of a job that its own torchrun joins."""

    def __init__(
        self, conf: Conf, endpoint: Endpoint, server: Server | None, secret: bytes | None, address: str | None
    ) -> None:
        self._server = server
        self._over = self._asked = False
        deaths: dict[int, HowItDied] = {}
        self._deaths = Deaths(deaths)
        name, address = _names(conf, endpoint, address)
        me = Identity(
            run_id=conf.run_id, incarnation=uuid.uuid4().hex, host=name, address=address, ports=conf.ports
        )
        hello = say.Hello(say.VERSION, conf.run_id, conf.node_rank, name, me.incarnation)
        self._folder = os.environ.get(runtime_directory.VARIABLE, "")  # a launcher's
        self._link = TellingClient(self._folder, endpoint, hello, secret, _log.info, conf.seats)
        self._first = FirstDeath(deaths, "null", self._started)
        if self._folder:
            process_attributes.die_with_parent(signal.SIGTERM)
        # A launcher hands signals on.
        relayed = torchrun_signals.relayed(os.environ) if self._folder else frozenset()
        self._relay = torchrun_signals.Relay(relayed, self._first.living)
        torchrun_signals.StopRequest(torchrun_signals.stopping(os.environ), self._leave_when_asked)
        super().__init__(
            self._link,
            endpoint,
            me=me,
            first_death=self._first,
            patience_s=conf.patience_s,
            ends=self._how_all_ended,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Join and meet the others; the end of the job is the end of this torchrun."""
        with self._ending():
            met = super().next_rendezvous()
        self._first.begin({})
        self._relay.given = False
        return met

    def shutdown(self) -> bool:
        """torchrun ends: wait until all nodes are done, or end the job when this one has failed for good."""
        failure = sys.exc_info()[1]
        if self._over:
            return True
        if failure is None:
            with self._ending():
                is_done = self.finish()
            self._close(None)
            if not is_done:
                why = "workers of another node failed after this node's had finished"
                begin_again(why)
                end(f"{why}; start this torchrun again", exit_codes.INFRASTRUCTURE)
        elif isinstance(failure, ChildFailedError):
            self._tell_last_failure(failure)
            self._close(f"{self._me.host} {_QUIT}")
        else:
            was_lost = isinstance(failure, DistError) and not self._asked and self.is_over(_NEWS_S)
            self._close(None)
            if was_lost:
                begin_again("a node was lost while the nodes met")
        return True

    @contextlib.contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except NotNeededError:
            self._close(None)
            raise SystemExit(exit_codes.SUCCEEDED) from None
        except GaveUpError as ended:
            self._close(str(ended))
            end_given_up(ended)

    def _how_all_ended(self) -> Ends:
        """Who was sent a signal may end with 0 because of it."""
        return Ends() if self._asked or self._relay.given else ends_of(self._first.all())

    def _leave_when_asked(self) -> None:
        """torch's handler ends this process without a word to the others."""
        self._asked = True
        self._link.send(say.Leave(_LEAVE))

    def _started(self, pid: int) -> None:
        self._deaths.watch(pid)
        env = process_tree.environment(pid) or {}
        if env.get("LOCAL_RANK") == "0":
            first, count = env.get("RANK", ""), env.get("LOCAL_WORLD_SIZE", "")
            if first.isdigit() and count.isdigit():
                tell(self._folder, "workers_started", workers=int(count), first_rank=int(first))

    def _tell_last_failure(self, failure: ChildFailedError) -> None:
        if self._formed is not None:
            rank, first = failure.get_first_failure()
            code, number = (None, -first.exitcode) if first.exitcode < 0 else (first.exitcode, None)
            self._link.send(say.Failed(self._formed.generation, rank, code, number))
            self._link.send(say.Quit(_QUIT))
            end_s = time.monotonic() + _HEARD_S
            while self._ended is None and time.monotonic() < end_s:
                self._note(self._link.receive(_HEARD_S))  # so that it has been heard before the connection ends

    def _close(self, reason: str | None) -> None:
        """Hang up; the host's coordinator goes last, with a reason if the job has failed."""
        self._over = True
        self._first.close()
        self._link.close()
        if self._server is not None:
            self._server.stop(reason)
        self._deaths.close()


def _host(conf: Conf, secret: bytes | None) -> tuple[Server | None, Endpoint]:
    """The coordinator, if this is the node to host it, and where it is."""
    own = frozenset({"localhost", socket.gethostname(), socket.getfqdn()})
    if not torchrun_rendezvous_options.is_host(conf, own, _is_here):
        return None, conf.endpoint
    settings = Settings(
        job=conf.run_id,
        min_nodes=conf.nodes.min,
        max_nodes=conf.nodes.max,
        rejoin_timeout_s=conf.patience_s,
        max_restarts=_UNLIMITED if conf.max_restarts is None else conf.max_restarts,
    )
    alone = conf.nodes.max == 1
    server = Server(settings, conf.endpoint if alone else Endpoint("", conf.endpoint.port), secret, log=_log.info)
    try:
        port = server.start()
    except NodeError:
        if conf.is_host is None and conf.node_rank is None:
            _log.info(
                "port %d is in use: another torchrun on this machine hosts the coordinator", conf.endpoint.port
            )
            return None, conf.endpoint
        raise
    return server, Endpoint(conf.endpoint.host, port)


def _names(conf: Conf, endpoint: Endpoint, address: str | None) -> tuple[str, str | None]:
    """What this node is called, and its address where that need not be found out."""
    if conf.host is not None:
        return conf.host, address
    if not endpoint.is_loopback:
        return os.uname().nodename, address
    # All nodes are on this machine, and must differ.
    name = os.uname().nodename
    return name if conf.node_rank is not None else f"{name}-{os.getpid()}", endpoint.host


def _is_here(host: str) -> bool:
    """Whether all addresses of a name are this machine's own: only those can be bound."""
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return bool(found) and all(_can_bind(family, address) for family, _, _, _, address in found)


def _can_bind(family: int, address: tuple[object, ...]) -> bool:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(address)
        return True
    return False
