"""Our rendezvous in a torchrun: below a launcher, which hosts the coordinator, or without one in the pod.

torch's agent drives it and keeps its own count of restarts. Without a launcher one torchrun hosts the coordinator.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousParameters

from trainer_launch.host import logs, network, process_attributes, process_tree, runtime_directory
from trainer_launch.host.files import read_secret
from trainer_launch.membership import protocol as say
from trainer_launch.membership import timeouts
from trainer_launch.membership.client import Client
from trainer_launch.membership.server import Server
from trainer_launch.membership.state import Settings
from trainer_launch.model import Endpoint, FailureRecord, NodeRange, exit_codes
from trainer_launch.model.errors import LaunchError, NodeError
from trainer_launch.model.signal_policy import RELAYED, STOP_SIGNALS
from trainer_launch.pytorch import torchrun_rendezvous_options
from trainer_launch.pytorch.elastic_rendezvous import CoordinatedRendezvous, GaveUpError, Identity, NotNeededError
from trainer_launch.pytorch.torchrun_rendezvous_options import Conf
from trainer_launch.pytorch.worker_group import Ends, ends_of
from trainer_launch.supervisor import error_lines
from trainer_launch.supervisor.failure import code_of, death_of

_COLLECTED = "torch.distributed.elastic.multiprocessing.api"  # this logger tells how torch found a worker ended
_UNLIMITED = 1_000_000  # torch's own agents count
_HEARD_S = 2.0
_QUIT = "has no restarts left"
_LEAVE = "asked to stop"
_log = logging.getLogger(__name__)
HowItDied = tuple[int | None, int | None] | None  # (code, None) or (None, signal); None: torch was faster than we


def handler(params: RendezvousParameters) -> PlainTorchrun:
    """The handler for one torchrun; what does not fit ends it with one sentence and 2 or 138."""
    if not logging.getLogger(logs.NAME).handlers:
        logs.set_up(os.environ.get("TRAINER_LAUNCH_LOG_LEVEL") or "info", "torchrun")
    if runtime_directory.VARIABLE in os.environ:
        with contextlib.suppress(OSError):  # the error file of the torchrun before this one says nothing about it
            os.unlink(os.environ.get(_ERROR_FILE, ""))
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
        name, address = _names(conf, endpoint, address)
        me = Identity(
            run_id=conf.run_id, incarnation=uuid.uuid4().hex, host=name, address=address, ports=conf.ports
        )
        hello = say.Hello(say.VERSION, conf.run_id, conf.node_rank, name, me.incarnation)
        self._folder = os.environ.get(runtime_directory.VARIABLE, "")  # a launcher's
        self._link = Client(endpoint, hello, secret, _log.info, conf.seats, run_dir=self._folder)
        self._deaths = Deaths(self._started)
        if self._folder:
            process_attributes.die_with_parent(signal.SIGTERM)
        # A launcher hands signals on that torchrun does not handle.
        relayed = frozenset(map(int, RELAYED)) - stopping(os.environ) if self._folder else frozenset()
        self._relay = Relay(relayed, self._deaths.living)
        StopRequest(stopping(os.environ), self._leave_when_asked)
        super().__init__(
            self._link,
            endpoint,
            me=me,
            first_death=self._deaths.first,
            patience_s=conf.patience_s,
            ends=self._how_all_ended,
        )

    def next_rendezvous(self) -> RendezvousInfo:
        """Join and meet the others; the end of the job is the end of this torchrun."""
        with self._ending():
            met = super().next_rendezvous()
        self._deaths.forget()
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
            was_lost = isinstance(failure, DistError) and not self._asked and self.is_over(timeouts.NEWS_S)
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
        return Ends() if self._asked or self._relay.given else ends_of(self._deaths.all())

    def _leave_when_asked(self) -> None:
        """torch's handler ends this process without a word to the others."""
        self._asked = True
        self._link.send(say.Leave(_LEAVE))

    def _started(self, env: Mapping[str, str]) -> None:
        if env.get("LOCAL_RANK") == "0":
            first, count = env.get("RANK", ""), env.get("LOCAL_WORLD_SIZE", "")
            if first.isdigit() and count.isdigit():
                runtime_directory.tell(self._folder, "workers_started", workers=int(count), first_rank=int(first))

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
        self._link.close()
        if self._server is not None:
            self._server.stop(reason)
        self._deaths.stop()


def _host(conf: Conf, secret: bytes | None) -> tuple[Server | None, Endpoint]:
    """The coordinator, if this is the node to host it, and where it is."""
    own = frozenset({"localhost", socket.gethostname(), socket.getfqdn()})
    if not torchrun_rendezvous_options.is_host(conf, own, lambda host: network.is_here(host, all)):
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


# -- the end -----------------------------------------------------------------------------------


_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # a launcher's, or the user's
_TORCHRUN = ("/torchrun", "/torch/distributed/run.py")


def end(sentence: str, code: int) -> NoReturn:
    """End torchrun: an exception would end it with a traceback, and always with 1."""
    logs.warn(sentence)
    raise SystemExit(code)


def end_given_up(ended: GaveUpError) -> NoReturn:
    """The coordinator has ended the job: a faulty worker's node has its code, the others have lost a peer."""
    given_up, own, text = ended.given_up, ended.own, str(ended)
    about: dict[str, Any] = {}
    lines: Sequence[str] = ()
    if own is not None:
        about, lines = {"rank": own.rank, "local_rank": own.local_rank, "hostname": socket.gethostname()}, own.lines
    if given_up.cause is not None:  # all nodes tell the same; no code of theirs may ask for a restart
        code = given_up.exit_code or exit_codes.FAILED
        _note(text, code, lines, about | {"reason": given_up.cause, "why_not_again": given_up.message})
    elif own is None:
        code = exit_codes.INFRASTRUCTURE
        said = f"{text}; it said: {given_up.message}" if given_up.message else text
        _note(said, code, lines, about | {"reason": "PeerLost"})
    else:
        code = code_of(own)
        number = code if own.signal is None else -own.signal
        _note(own.message, number, lines, about | {"reason": own.reason, "why_not_again": text})
    end(f"the job has failed: {text}", code)


def begin_again(why: str) -> None:
    """Start this torchrun anew in the same process, but no program of the user's that uses torch's agent."""
    if not sys.argv[0].endswith(_TORCHRUN):
        return
    _log.warning("%s; starting torchrun again", why)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _note(message: str | None, code: int, lines: Sequence[str], about: dict[str, Any]) -> None:
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(error_lines.render(message, code, lines, about))
    except OSError as problem:
        _log.warning("cannot write the error file %s: %s", path, problem.strerror)


# -- signals -----------------------------------------------------------------------------------


_NAMES = "TORCHELASTIC_SIGNALS_TO_HANDLE"  # set by torch from its option, where it has one


def stopping(env: Mapping[str, str]) -> frozenset[int]:
    """The signals on which torchrun stops its workers and ends."""
    names = [name.strip() for name in env.get(_NAMES, "").split(",")]
    numbers = {int(signal.Signals[name]) for name in names if name in signal.Signals.__members__}
    return frozenset(numbers) or frozenset(map(int, STOP_SIGNALS))


class StopRequest:
    """Calls a function, in a thread, when torchrun is asked to stop.

    The interpreter writes the number of each signal to a descriptor, whoever handles it, so that no handler of
    torch's is replaced.
    """

    def __init__(self, numbers: frozenset[int], asked: Callable[[], None]) -> None:
        self._numbers, self._asked = numbers, asked
        self._read, self._write = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._write, False)
        with contextlib.suppress(ValueError):  # not in the main thread: somebody else's program
            before = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            if before != -1:
                signal.set_wakeup_fd(before)
        threading.Thread(target=self._look, name="stop request", daemon=True).start()

    def _look(self) -> None:
        while self._numbers.isdisjoint(os.read(self._read, 64)):
            pass
        self._asked()


class Relay:
    """Hands signals on to the workers that torchrun itself would die of; `given` tells whether it has."""

    def __init__(self, numbers: frozenset[int], workers: Callable[[], list[int]]) -> None:
        self._workers = workers
        self.given = False
        for number in numbers:
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, self._hand_on)

    def _hand_on(self, number: int, _frame: object) -> None:
        self.given = True
        for pid in self._workers():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


# -- how workers died --------------------------------------------------------------------------


class Deaths(logging.Handler):
    """How the workers that torch starts die, in their order: a thread sleeps until one of them ends.

    torch's own events tell of each start; `started` gets its environment. torch collects a worker as soon as it
    looks, now and then before the thread does; then what torch logs about it tells how it ended.
    """

    def __init__(self, started: Callable[[Mapping[str, str]], None]) -> None:
        super().__init__()
        self._started = started
        self._ranks: dict[int, tuple[int, int]] = {}  # by pid: rank, local rank
        self._error_files: dict[int | None, str | None] = {}  # by local rank
        self._seen: dict[int, HowItDied] = {}  # by pid, in the order of their deaths
        self._collected: dict[int, HowItDied] = {}  # by pid, from torch's log
        self._told = 0  # of them
        self._first = 0  # of the present workers
        self._ends = select.epoll()
        self._pids: dict[int, int] = {}  # by descriptor
        self._wake, self._waker = os.pipe()
        self._ends.register(self._wake, select.EPOLLIN)
        self._thread = threading.Thread(target=self._look, name="deaths", daemon=True)
        self._thread.start()
        self._loggers = [logging.getLogger(name) for name in ("torchelastic-events-null", _COLLECTED)]
        for logger in self._loggers:
            logger.addHandler(self)

    def stop(self) -> None:
        """Look no more; logging itself calls `close`, and later."""
        for logger in self._loggers:
            logger.removeHandler(self)
        os.write(self._waker, b".")
        self._thread.join()
        for fd in (*self._pids, self._wake, self._waker):
            os.close(fd)
        self._ends.close()

    def emit(self, record: logging.LogRecord) -> None:
        """One event of torch's, or the line about the first failure that it found."""
        if record.name == _COLLECTED:
            self._note_collected(record)
        else:
            self._note_started(json.loads(record.getMessage()))

    def _note_collected(self, record: logging.LogRecord) -> None:
        match record.args:
            case (int(code), int(), int(pid), *_) if "exitcode" in record.msg:
                self._collected[pid] = (None, -code) if code < 0 else (code, None)

    def _note_started(self, event: dict[str, Any]) -> None:
        about = event.get("metadata", {})
        if not event.get("name", "").endswith(".START") or not str(about.get("worker_id", "")).isdigit():
            return
        pid, local_rank = int(about["worker_id"]), int(json.loads(about["metadata"])["local_rank"][0])
        environment = process_tree.environment(pid) or {}
        self._ranks[pid] = int(about["global_rank"]), local_rank
        self._error_files[local_rank] = environment.get(_ERROR_FILE)
        with contextlib.suppress(AttributeError, OSError):  # an old kernel or a sandbox; or it was collected
            fd = os.pidfd_open(pid)
            self._pids[fd] = pid
            self._ends.register(fd, select.EPOLLIN)
        self._started(environment)

    def _look(self) -> None:
        while self._wake not in (ended := [fd for fd, _ in self._ends.poll()]):
            for fd in ended:
                pid = self._pids.pop(fd)
                self._seen[pid] = how_it_died(pid)
                os.close(fd)

    def forget(self) -> None:
        """New workers are about to start; whoever died before is no failure of theirs."""
        self._error_files.clear()
        self._told = self._first = len(self._seen)

    def living(self) -> list[int]:
        """Workers that have not been seen to end."""
        return [pid for pid in self._ranks if pid not in self._seen]

    def first(self) -> FailureRecord | None:
        """The first failure that has not been told yet, None when there is none."""
        for pid in self._collected:  # the thread may not have come to it yet
            self._seen.setdefault(pid, None)
        deaths = {pid: how or self._collected.get(pid) for pid, how in list(self._seen.items())[self._told :]}
        self._told += len(deaths)
        failed = [pid for pid, how in deaths.items() if how is not None and how[0] != 0]
        unknown = [pid for pid, how in deaths.items() if how is None]  # also those that ended with 0
        return next((self._death(pid, deaths[pid]) for pid in failed + unknown), None)

    def all(self) -> list[FailureRecord]:
        """All deaths of the present workers."""
        return [self._death(pid, how) for pid, how in list(self._seen.items())[self._first :]]

    def _death(self, pid: int, how: HowItDied) -> FailureRecord:
        rank, local_rank = self._ranks.get(pid, (None, None))
        said = error_lines.read_error_file(self._error_files.get(local_rank))
        return death_of(rank, local_rank, *(how or self._collected.get(pid) or (None, None)), said)


def how_it_died(pid: int) -> HowItDied:
    """How a child died, left for torch to collect; it only calls `os`."""
    try:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    if ended is None:
        return None
    return (ended.si_status, None) if ended.si_code == os.CLD_EXITED else (None, ended.si_status)
