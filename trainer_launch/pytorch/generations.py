"""`generations()`: a training script whose survivors keep their process and their state when a rank is lost.

A generation is the job with one set of ranks. When it ends, workers that are inside of `generations()` are not
stopped: each leaves its process groups, waits, and enters the next generation with the ranks that it is told.

What a worker says to PID 1:

`Inside`   it can be told to leave, by `LeaveGeneration`, in place of being stopped
`LostPeer` a collective has failed here: it leaves
`OutOfGroups`  it has no process group any more, and waits for `EnterGeneration`
`Outside`  it is stopped as any other worker, as is one that never was inside
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from trainer_launch.diagnosis import flight_recorder
from trainer_launch.host import runtime_directory
from trainer_launch.model import exit_codes
from trainer_launch.model.codec import Codec, Count, MessageError, Tagged, Text

if TYPE_CHECKING:
    from types import TracebackType

    from trainer_launch.supervisor.system import System

MAX_BYTES = 1 << 17
_TCP = tuple((socket.SOCK_STREAM, family) for family in (socket.AF_INET, socket.AF_INET6))
_AGAIN_S = 0.05  # between two looks for connections that were made meanwhile
_STUCK_S = 3.0  # in one call of torch without using the CPU, although all connections are shut
_WORDS = 1000  # of an error


class Inside(Tagged, frozen=True):
    """The worker can be told to leave from now on, in place of being stopped."""


class LostPeer(Tagged, frozen=True):
    """A collective has failed here, which proves that a peer is gone."""

    message: Text


class OutOfGroups(Tagged, frozen=True):
    """The worker is out of all process groups, and waits."""

    has_state: bool  # it has shared its state with all ranks, or got theirs, whole


class SharedState(Tagged, frozen=True):
    """All ranks have the newest state: that of this step."""

    step: Count
    kept: Count  # ranks that had a state


class Outside(Tagged, frozen=True):
    """The program has left the loop."""


class LeaveGeneration(Tagged, frozen=True):
    """The generation is over."""

    generation: Count


class EnterGeneration(Tagged, frozen=True):
    """The next generation: what has changed in the environment."""

    environment: Mapping[str, str]
    has_state: bool  # False: the state is not that of the last generation, which was formed without this worker


OfWorker: TypeAlias = Inside | LostPeer | OutOfGroups | SharedState | Outside
of_worker: Codec[OfWorker] = Codec(OfWorker, max_bytes=MAX_BYTES)
OfLauncher: TypeAlias = LeaveGeneration | EnterGeneration
of_launcher: Codec[OfLauncher] = Codec(OfLauncher, max_bytes=MAX_BYTES)

_channel: _Channel | None = None  # to PID 1, in a worker that it has forked


def connect(fd: int) -> None:
    """In a new worker: PID 1 tells of generations there."""
    global _channel  # noqa: PLW0603
    _channel = _Channel(fd)


def environment() -> Mapping[str, str]:
    """The variables of the present generation, as far as a later one than the first has set them."""
    return {} if _channel is None else _channel.environment


def generations() -> Iterator[Generation]:
    """The generations of this job in which this process takes part: one, and another each time a rank was lost.

    Use each as a context: `for generation in generations(): with generation: ...`. The loop ends with the first
    block that ends by itself. A block in which a collective fails because of a lost peer ends without an error,
    and the next generation begins once the lost ranks are replaced. Every other error is the program's, as ever.
    Where the pod is asked to stop, a process that waits for the next one ends with 143, after its signal handlers.
    Without a launcher, under torchrun, or with --start-method exec, there is one generation, and errors are raised.

    Raises:
        RuntimeError: a generation was not used as a context, or two loops run in one process.
    """
    channel = _channel if _channel is not None and _channel.pid == os.getpid() else None
    if channel is not None:
        channel.begin()
    generation = Generation(channel, is_new=True)
    while True:
        yield generation
        if generation.is_over:
            return
        if not generation.was_left or channel is None:
            raise RuntimeError("use each generation as a context: `with generation:` around the training loop")
        channel.enter_next()
        generation = Generation(channel, is_new=False)


class Generation:
    """The job with its present ranks; a context for all that needs them."""

    def __init__(self, channel: _Channel | None, *, is_new: bool) -> None:
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        self.number = int(os.environ.get(runtime_directory.GENERATION) or int(restarts) + 1)  # 1 is the first
        self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        self.is_new = is_new  # this process has not been in a generation before
        self.kept = int(os.environ.get(runtime_directory.KEPT, "0"))  # ranks that have their state of the last one
        self.is_over = self.was_left = False
        self._channel = channel

    def __repr__(self) -> str:
        return f"<generation {self.number}: rank {self.rank} of {self.world_size}, {self.kept} kept>"

    def share(self, state: Mapping[str, Any], *, step: str = "step") -> int:
        """Give the newest state to all ranks that lack it; collective, after `init_process_group`.

        `state` has modules, optimizers, tensors, numbers, and whatever has `state_dict` and `load_state_dict`, by
        names that are alike on all ranks; tensors and objects are changed in place, other values are replaced,
        so that it has to be a dict where there are any. `state[step]` is the number of steps that are done: count
        it up at once after the optimizer's step. Of the ranks that have kept their state the one with the highest
        step gives; without any, that of all ranks. Where nobody is behind nothing is sent. Tensors are equal to the
        last bit afterwards, and travel in pieces of 16 MiB. Where a rank is lost meanwhile, those that have the new
        state only in part end as well, and are replaced.

        Return the step.

        Raises:
            ValueError: there is no whole number `state[step]`, or ranks have other names or shapes.
        """
        from trainer_launch.pytorch import shared_state

        channel = self._channel
        newest = shared_state.share(
            state, step, has_state=channel is not None and channel.has_state, kept=self.kept
        )
        if channel is not None:
            channel.has_state = True
            channel.tell(SharedState(newest, self.kept))
        return newest

    def __enter__(self) -> Generation:  # noqa: PYI034
        if self._channel is not None:
            self._channel.enter(self.number)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        channel = self._channel
        if channel is None or error is None or not _is_of_a_lost_peer(error):
            self.is_over = True
            if channel is not None:
                channel.tell(Outside())
            return False
        channel.tell(LostPeer(f"{type(error).__name__}: {error}"[:_WORDS]))
        traceback.clear_frames(trace)  # what they hold keeps the old groups
        self.was_left = True
        channel.leave()
        return True


_SHUT = re.compile(r"gloo|NCCL|Socket|socket|[Cc]onnection|Broken pipe|[Aa]bort|[Pp]rocess group")


def _is_of_a_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that a peer, or the store, is gone; or that this worker's group has been left."""
    from trainer_launch.pytorch.shared_state import PartialStateError
    from trainer_launch.supervisor.error_lines import recognise

    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not isinstance(error, RuntimeError) or isinstance(error, PartialStateError):
        return False
    symptom = recognise(f"{type(error).__name__}: {error}")
    if symptom is not None and symptom[0].reason in ("PeerLost", "Hung"):
        return True
    is_asked = _channel is not None and _channel.is_leaving
    is_theirs = isinstance(error, distributed.DistError) or _SHUT.search(str(error)) is not None
    return is_asked and is_theirs


class _Channel:
    """The worker's side: a thread hears PID 1, and ends what the main thread waits for when it has to leave."""

    def __init__(self, fd: int) -> None:
        self.pid = os.getpid()
        self._fd = fd  # of a socket with whole messages; no object, whose end would be a warning
        self._changed = threading.Condition()
        self._is_begun = self._is_closed = False
        self._next: EnterGeneration | None = None
        self._groups = _GroupSockets()
        self._number = self._main_thread = 0
        self.is_leaving = False
        self.has_state = False  # of the last generation, whole
        self.environment: Mapping[str, str] = {}

    def begin(self) -> None:
        """The program's loop begins."""
        if self._is_begun:
            raise RuntimeError("generations() is already used in this process; one loop has all of them")
        self._is_begun, self._main_thread = True, threading.get_ident()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        threading.Thread(target=self._hear, name="generations", daemon=True).start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def enter(self, number: int) -> None:
        """A block begins: from now on it can be left."""
        with self._changed:
            self._groups.begin()
            self._number, self.is_leaving = number, False
        self.tell(Inside())

    def leave(self) -> None:
        """The block has ended: leave all process groups, and say so."""
        self._groups.shut()
        with flight_recorder.asking:
            _forget_groups()
        reports: Any = sys.modules.get("trainer_launch.observability.report")  # of a program that reports its steps
        if reports is not None:
            reports.begin_again()
        self._groups.end()
        self.tell(OutOfGroups(self.has_state))

    def enter_next(self) -> None:
        """Wait for the next generation, and be who this process is in it."""
        with self._changed:
            while self._next is None and not self._is_closed:
                self._changed.wait()
            entered, self._next = self._next, None
        if entered is None:
            raise SystemExit(exit_codes.STOPPED)  # no generation follows, or the launcher is gone
        self.environment, self.has_state = {**self.environment, **entered.environment}, entered.has_state
        os.environ.update(self.environment)
        flight_recorder.begin_generation()

    def tell(self, message: OfWorker) -> None:
        """Tell PID 1, unless it is gone: then this process ends, too."""
        with contextlib.suppress(OSError):
            os.write(self._fd, of_worker.encode(message))

    def _hear(self) -> None:
        import trainer_launch.supervisor.error_lines  # noqa: F401  not only when a peer is lost: the job waits then

        while True:
            try:
                data = os.read(self._fd, MAX_BYTES)
                message = of_launcher.decode(data) if data else None
            except (OSError, MessageError):
                message = None
            with self._changed:
                self._is_closed = message is None
                self._next = message if isinstance(message, EnterGeneration) else self._next
                self._changed.notify_all()
            if message is None:
                return
            if isinstance(message, LeaveGeneration):
                self._end_waiting(message.generation)

    def _end_waiting(self, number: int) -> None:
        """Make the main thread's collective fail, and whatever else of torch it waits for, until it has left.

        It may be on its way into that generation. Where nothing helps, this process ends and is replaced: see
        `_GroupSockets`.
        """
        state, since_s = _state_of(self._main_thread), time.monotonic()
        while True:
            with self._changed:
                is_inside = number == self._number
                if number < self._number or (is_inside and not self._groups.are_open):
                    return
                if is_inside:
                    self.is_leaving = True
                    self._groups.shut()
                self._changed.wait(_AGAIN_S)
            if (now := _state_of(self._main_thread)) != state or now is None or not is_inside:
                state, since_s = now, time.monotonic()
            elif time.monotonic() > since_s + _STUCK_S:
                os.write(2, b"[trainer-launch] this worker cannot leave its collective; it is replaced\n")
                os.kill(os.getpid(), signal.SIGKILL)


def _state_of(thread: int) -> tuple[int, int, int] | None:
    """Where a thread is in a call of torch, and its CPU time in 10 ms; None: it is elsewhere, or has ended."""
    frame = sys._current_frames().get(thread)
    file = "" if frame is None else frame.f_code.co_filename
    # No collective waits in torch.save, where a file server may be slow.
    if frame is None or f"{os.sep}torch{os.sep}" not in file or file.endswith("serialization.py"):
        return None
    spent_s = time.clock_gettime(time.pthread_getcpuclockid(thread))
    return id(frame), frame.f_lasti, int(spent_s * 100)


class _GroupSockets:
    """The TCP connections of this generation's process groups and its store, and no others of the program's.

    A group's are those that torch has made while it made the group. Gloo's `abort` leaves a collective blocked
    (torch 2.13); where it can receive nothing any more it fails at once. Its peers can send to it until the next
    generation: gloo forgets a message that meets a connection which has just ended, and waits for it until the
    group's timeout (`Pair::write` and `Pair::signalException`). A peer that is killed still does that to it.
    """

    def __init__(self) -> None:
        self.are_open = False
        self._before: set[str] | None = None  # the sockets when the group that is being made was begun
        self._earlier: set[str] = set()  # those when the generation was
        self._made: set[str] = set()
        self._store_port = 0
        self._open: dict[str, socket.socket] = {}  # what peers send to, although gloo has left it

    def begin(self) -> None:
        """A generation begins."""
        _watch_groups(self)
        while self._open:
            self._open.popitem()[1].close()
        self._earlier, self._made, self.are_open = {*_sockets().values()}, set(), True
        self._store_port = int(os.environ.get("MASTER_PORT") or 0)

    def end(self) -> None:
        """All groups have been left."""
        self.are_open = False

    @contextlib.contextmanager
    def making(self) -> Iterator[None]:
        """Torch makes a group."""
        self._before = {*_sockets().values()}
        try:
            yield
        finally:
            before, self._before = self._before, None
            self._made |= {*_sockets().values()} - before

    def shut(self) -> None:
        """Receive nothing any more, and end the collectives of groups that can be aborted."""
        begun = self._before
        for fd, inode in _sockets().items():
            is_made = inode in self._made or (begun is not None and inode not in begun)
            # Not by `dup()` of a socket, which would make gloo's own blocking.
            with contextlib.suppress(OSError), contextlib.ExitStack() as unneeded:
                connection = unneeded.enter_context(socket.socket(fileno=os.dup(fd)))
                if inode in self._open or (connection.type, connection.family) not in _TCP:
                    continue
                peer = connection.getpeername()
                if is_made or (peer[1] == self._store_port and inode not in self._earlier):
                    self._open[inode] = connection  # before gloo sees its end, and closes it
                    unneeded.pop_all()
                    connection.shutdown(socket.SHUT_RD)
        _abort_groups()


def _sockets() -> dict[int, str]:
    """The sockets of this process: by descriptor their names, which no other socket has meanwhile."""
    sockets = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            place = os.readlink(f"/proc/self/fd/{name}")
            if place.startswith("socket:"):
                sockets[int(name)] = place
    return sockets


def _watch_groups(sockets: _GroupSockets) -> None:
    """See which connections torch makes with each group."""
    import torch.distributed.distributed_c10d as groups

    make = getattr(groups, "_new_process_group_helper")  # noqa: B009
    if getattr(make, "is_watched", False):
        return

    def make_watched(*values: Any, **options: Any) -> Any:
        with sockets.making():
            return make(*values, **options)

    setattr(make_watched, "is_watched", True)  # noqa: B010
    setattr(groups, "_new_process_group_helper", make_watched)  # noqa: B010


def _forget_groups() -> None:
    """Destroy all groups, also one that is made in part: the next ones are named as those of new processes."""
    groups: Any = sys.modules.get("torch.distributed.distributed_c10d")
    if groups is None:
        return
    with contextlib.suppress(Exception):  # nothing of it is used any more
        if groups.is_initialized():
            groups.destroy_process_group()
    with contextlib.suppress(Exception):  # torch has changed: the next group then has another name, and fails
        groups._update_default_pg(None)
        for name in ("map", "names", "group_ranks", "backend_config", "to_tag", "coalesce_state"):
            getattr(groups._world, f"pg_{name}").clear()
        groups._world.tags_to_pg.clear()
        groups._unregister_all_process_groups()
        groups._world.group_count = 0


def _abort_groups() -> None:
    """End the collectives of backends that can be aborted, as NCCL's; gloo's cannot."""
    torch = sys.modules.get("torch")
    world = getattr(getattr(getattr(torch, "distributed", None), "distributed_c10d", None), "_world", None)
    with flight_recorder.asking:
        for group in [*getattr(world, "pg_map", ())]:
            for device in getattr(group, "_device_types", ()):
                with contextlib.suppress(Exception):
                    backend = group._get_backend(device)
                    if "gloo" not in backend.name():
                        backend.abort()


class Survivors:
    """In PID 1: the connections to its workers, by the names of their processes."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._connections: dict[str, socket.socket] = {}
        self.able: set[str] = set()  # inside of their loops
        self.left: set[str] = set()  # out of their process groups: they wait for the next generation
        self.holders: set[str] = set()  # those that have the state of the last generation

    def open(self, name: str) -> int:
        """Make a connection to a worker; its end is the caller's.

        Raises:
            OSError: there are too few descriptors.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._connections[name] = ours
        self._system.listen(ours.fileno())
        return theirs.detach()

    def close(self, but: Mapping[str, str] | None = None) -> None:
        """Workers of these names go on, under others; all others have ended."""
        but = but or {}
        for name in self._connections.keys() - but.keys():
            self._close(name)
        self._connections = {but[name]: connection for name, connection in self._connections.items()}
        self.able = {but[name] for name in self.able}
        self.holders = {but[name] for name in self.holders & but.keys()}
        self.left = {but[name] for name in self.left & but.keys()}

    def _close(self, name: str) -> None:
        connection = self._connections.pop(name)
        self._system.listen(connection.fileno(), wanted=False)
        connection.close()
        self.able.discard(name)

    def leave(self, names: Collection[str], generation: int) -> None:
        """Tell them that the generation is over."""
        for name in names:
            self._tell(name, LeaveGeneration(generation))

    def dismiss(self) -> None:
        """End workers that wait in vain for a generation, also those that only note a request to stop."""
        for name in self._connections.keys() & self.left:
            self._close(name)

    def enter(self, name: str, environment: Mapping[str, str]) -> None:
        """Tell a worker who it is in the next one, and whether its state is that of the last one."""
        self._tell(name, EnterGeneration(environment, name in self.holders))
        self.holders.discard(name)
        self.left.discard(name)

    def _tell(self, name: str, message: OfLauncher) -> None:
        with contextlib.suppress(OSError, KeyError):  # it has ended, or does not read: its time will be over
            self._connections[name].send(of_launcher.encode(message))

    def hear(self) -> list[tuple[str, OfWorker]]:
        """The messages of workers since the last time, with their names."""
        messages: list[tuple[str, OfWorker]] = []
        for name in [*self._connections]:
            while (message := self._next_of(name)) is not None:
                match message:
                    case Inside():
                        self.able.add(name)
                    case Outside():
                        self.able.discard(name)
                    case OutOfGroups(has_state):
                        self.left.add(name)
                        self.holders |= {name} if has_state else set()
                messages.append((name, message))
        return messages

    def _next_of(self, name: str) -> OfWorker | None:
        connection = self._connections.get(name)
        try:
            data = b"" if connection is None else connection.recv(MAX_BYTES)
            if data:
                return of_worker.decode(data)
        except BlockingIOError:
            return None
        except (OSError, MessageError):
            pass  # whatever it is, it has no business here
        if connection is not None:
            self._close(name)
        return None
