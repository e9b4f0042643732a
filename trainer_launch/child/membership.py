"""This node as a member of the job: its client, the rendezvous that torch asks, its workers' first death."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig

from trainer_launch.child import handlers, hangs, news
from trainer_launch.child.deaths import FirstDeath
from trainer_launch.child.rendezvous import CoordinatedRendezvous, Identity
from trainer_launch.coordinator import protocol as say
from trainer_launch.coordinator.client import Client
from trainer_launch.errors import UsageError
from trainer_launch.grammar import parse_port_range
from trainer_launch.host.secret import read_secret
from trainer_launch.model import Endpoint, PortRange, Seats
from trainer_launch.pytorch.worker_death import Ends, HowItDied, ends_of

_NEWS_S = 10.0  # in which the coordinator tells of a loss; a lease is shorter
_log = logging.getLogger(__name__)


class Stop(Protocol):
    """What is known of requests to stop and of workers that died."""

    asked: bool
    deaths: dict[int, HowItDied]  # by pid, in their order
    tell: int | None  # a descriptor that gets a byte at the first request to stop
    handed_on: bool  # whether these workers were sent a signal


class Alone:
    """A node whose rendezvous is torch's own business."""

    def finish(self) -> bool:
        """Nobody has to be told, and nobody can ask for more."""
        return True

    def is_over(self) -> bool:
        """Nobody ends what runs here."""
        return False

    def prepare(self, environments: dict[int, dict[str, str]]) -> None:
        """Before each start of the workers, given their environments: torch has told them all there is to know."""


class Member(Alone):
    """A node of a job that meets at the coordinator."""

    def __init__(self, rendezvous: CoordinatedRendezvous, first_death: FirstDeath, budget: int | None) -> None:
        self._rendezvous = rendezvous
        self._first_death = first_death
        self._budget = budget

    def finish(self) -> bool:
        """Tell that this node's workers succeeded, and wait for the others; False: all have to start again."""
        return self._rendezvous.finish()

    def is_over(self) -> bool:
        """Whether an error of the store is explained by the end of its generation."""
        return self._rendezvous.is_over(_NEWS_S)

    def prepare(self, environments: dict[int, dict[str, str]]) -> None:
        """Tell the workers the job's budget and failures: those of torch's own agent are without meaning here."""
        self._first_death.begin(environments)
        for environment in environments.values():
            environment["TORCHELASTIC_RESTART_COUNT"] = str(self._rendezvous.failures)
            if self._budget is not None:
                environment["TORCHELASTIC_MAX_RESTARTS"] = str(self._budget)


@contextlib.contextmanager
def member(
    config: LaunchConfig,
    stop: Stop,
    watch: Callable[[int], None] = lambda pid: None,
    look: Callable[[], None] = lambda: None,
) -> Iterator[Alone]:
    """Make this node a member of its job while torch runs, if its backend is ours.

    `watch` is told pids; `look` brings `stop.deaths` up to date.
    """
    if config.rdzv_backend != handlers.BACKEND:
        yield Alone()
        return
    conf = config.rdzv_configs
    endpoint = Endpoint(*parse_rendezvous_endpoint(config.rdzv_endpoint, 29400))
    incarnation = uuid.uuid4().hex
    node_rank = int(conf["node_rank"]) if "node_rank" in conf else None
    host = str(conf.get("host", os.uname().nodename))
    hello = say.Hello(say.VERSION, config.run_id, node_rank, host, incarnation)
    client = news.TellingClient(endpoint, hello, _secret(), _log.info, _seats(conf, endpoint))
    first_death = FirstDeath(stop.deaths, config.event_log_handler, watch, look)
    rendezvous = CoordinatedRendezvous(
        client,
        endpoint,
        me=Identity(
            run_id=config.run_id, incarnation=incarnation, host=host, address=config.local_addr, ports=_ports(conf)
        ),
        first_death=lambda: hangs.named(first_death()),
        ends=lambda: Ends() if stop.asked or stop.handed_on else ends_of(first_death.all()),
        patience_s=float(conf.get("patience", 600)),
    )
    handlers.use(rendezvous)
    _leave_when_asked(client, stop)
    try:
        yield Member(rendezvous, first_death, int(conf["max_restarts"]) if "max_restarts" in conf else None)
    finally:
        handlers.use(None)
        first_death.close()
        client.close("asked to stop" if stop.asked else None)
        tell, stop.tell = stop.tell, None
        if tell is not None:
            os.close(tell)


def _secret() -> bytes | None:
    path = os.environ.get("TRAINER_LAUNCH_SECRET_FILE")
    return read_secret(path) if path else None


def _seats(conf: Mapping[str, Any], home: Endpoint) -> Seats | None:
    text = str(conf.get("seats", ""))
    if not text:
        return None
    pattern, offset, count = text.split("/")
    return Seats(home, pattern, int(offset), int(count))


def _ports(conf: Mapping[str, Any]) -> PortRange | None:
    text = str(conf.get("ports", ""))
    ports = parse_port_range(text)
    if text and ports is None:
        raise UsageError(f"ports in --rdzv-conf is {text[:60]!r}; expected LOW-HIGH, two ports from 1 to 65535")
    return ports


def _leave_when_asked(client: Client, stop: Stop) -> None:
    """Let a thread tell the others that we go: a signal handler may not touch locks."""
    read_end, stop.tell = os.pipe()

    def wait_and_tell() -> None:
        if os.read(read_end, 1):
            client.send(say.Leave("asked to stop"))
        os.close(read_end)

    threading.Thread(target=wait_and_tell, name="leave", daemon=True).start()
