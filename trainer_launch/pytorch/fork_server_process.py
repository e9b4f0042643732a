"""The fork server's process: imports torch, proves that it can be forked, then forks workers and stores on request.

Started by `fork_server.py`. Before torch it imports little, so that torch's import begins early.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import signal
import socket
import sys
import time

from trainer_launch.host import process_attributes

# torch.distributed is what every worker of a job imports besides torch.
_NEEDED = ("torch", "torch.distributed")
# They are for the launcher and the workers; this process ends when its connection does.
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SETTLING_S = 0.2  # for the kernel to take the last thread off the list after its end
_STORE_S = 8.0  # for a store to open; the launcher waits a little longer
_TRIES = 5  # another program may take a port between our look and our use, or the last store just end
_TAKEN_S = 0.2  # between two of them

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any, NoReturn

    from trainer_launch.pytorch.forked_process import BeforeImports, Worker
    from trainer_launch.pytorch.messages import ForkWorkers, Message, OpenStore


def main(place: str) -> None:
    """Import, tell, serve until the launcher closes the connection; `place` in sys.path is where our package is."""
    fd, launcher, folder, *preload = sys.argv[1:]
    if getattr(sys.flags, "safe_path", False):
        folder = ""  # the program does not look there
    process_attributes.die_with_parent(signal.SIGKILL)
    if os.getppid() != int(launcher):
        return
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in signal.valid_signals()}
    mask = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    descriptors, environment = _descriptors(), dict(os.environ)
    for number in _IGNORED:
        signal.signal(number, signal.SIG_IGN)
    gc.disable()  # imports make nothing but what stays: looking for garbage meanwhile is a tenth of their time
    reason = _import(_NEEDED) or shadowed(folder) or _import(preload, folder) or unfit()

    from trainer_launch.pytorch import first_import, forked_process, messages

    before_imports = forked_process.BeforeImports(
        launcher=int(launcher),
        handlers=handlers,
        mask=mask,
        descriptors=frozenset(_descriptors() - descriptors),
        path=tuple(entry for entry in sys.path if entry != place),
        imported=first_import.FirstImport(environment, os.environ),
    )
    connection = socket.socket(fileno=int(fd))
    messages.send(connection, messages.Ready(reason))
    gc.freeze()  # workers would otherwise copy what the collector marks
    serve(connection, before_imports)()


def _import(names: Sequence[str], folder: str = "") -> str | None:
    """Import these as a script in this folder would ("": in none); why that failed."""
    if folder:
        sys.path.insert(0, folder)
    try:
        for name in names:
            try:
                __import__(name)
            except BaseException as problem:  # noqa: BLE001, PERF203  a module may do anything when imported
                return f"importing {name} failed ({type(problem).__name__}: {problem})"
        return None
    finally:
        if folder:
            with contextlib.suppress(ValueError):
                sys.path.remove(folder)


def shadowed(folder: str) -> str | None:
    """Name the file of the script's folder that the program would import in place of a module of this process."""
    if not folder:
        return None
    with contextlib.suppress(OSError):  # a folder that cannot be listed has no modules for the script either
        for file in os.listdir(folder):
            name, _, kind = file.partition(".")
            spec = getattr(sys.modules.get(name), "__spec__", None)
            origin = getattr(spec, "origin", None) or "built-in"
            if origin in ("built-in", "frozen") or origin.startswith(os.path.join(folder, "")):
                continue
            if kind == "py" or kind.endswith("so") or os.path.isfile(os.path.join(folder, file, "__init__.py")):
                return f"{os.path.join(folder, file)} has the name of a module that the fork server has imported"
    return None


def _descriptors() -> set[int]:
    return {int(word) for word in os.listdir("/proc/self/fd")}


def unfit() -> str | None:
    """Return what a fork of this process would break, or lack."""
    torch = sys.modules["torch"]
    for name in ("cuda", "xpu"):
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            return f"an import initialised {name.upper()}, which does not survive a fork"
    return "an import started threads, which a fork does not copy" if _has_threads_after_fork() else None


def _has_threads_after_fork() -> bool:
    """Whether there are other threads; numpy's linear algebra stops its own when a process forks, so fork once."""
    if len(os.listdir("/proc/self/task")) == 1:
        return False
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    end_s = time.monotonic() + _SETTLING_S
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end_s:
        time.sleep(0.001)
    return len(os.listdir("/proc/self/task")) > 1


def serve(connection: socket.socket, before_imports: BeforeImports) -> Worker:
    """Carry out one request after the other, and exit; in a forked worker, return."""
    from trainer_launch.model.codec import MessageError
    from trainer_launch.pytorch import messages

    is_small = False
    while (received := messages.receive(connection)) is not None:
        request, fds = received
        if not isinstance(request, messages.ForkWorkers | messages.OpenStore):
            raise MessageError(f"{type(request).__name__} is not a request")
        answer: Message | Worker
        if len(fds) != request.fds:
            answer = messages.RequestFailed(f"{len(fds)} descriptors came with a request for {request.fds}")
        else:
            answer = _carry_out(request, fds, before_imports, connection)
            if callable(answer):
                return answer
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):  # the launcher is gone: the next look ends this process
            messages.send(connection, answer)
        if isinstance(request, messages.ForkWorkers) and not is_small:  # now that nobody waits for us
            is_small = True
            process_attributes.drop_mapped_files()
    os._exit(0)


def _carry_out(
    request: ForkWorkers | OpenStore, fds: Sequence[int], before_imports: BeforeImports, connection: socket.socket
) -> Message | Worker:
    """Fork by a process between, which exits: the others are the launcher's children when this returns."""
    from trainer_launch.model.codec import MessageError
    from trainer_launch.pytorch import messages

    answer: Message
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    ours, report = socket.socketpair()
    with ours, report:
        try:
            pid = os.fork()
            if pid == 0:
                connection.close()
                return _be_between(request, fds, before_imports, report)
            report.close()
            reply = messages.receive(ours, _STORE_S if isinstance(request, messages.OpenStore) else None)
            os.waitpid(pid, 0)
            answer = messages.RequestFailed("processes ended while they were forked") if reply is None else reply[0]
        except TimeoutError:
            answer = messages.RequestFailed(f"the store did not open within {_STORE_S:g} s")
        except (OSError, MessageError) as problem:
            answer = messages.RequestFailed(f"the fork server cannot fork ({problem})")
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return answer


def _be_between(
    request: ForkWorkers | OpenStore, fds: Sequence[int], before_imports: BeforeImports, report: socket.socket
) -> Worker:
    """Fork all, tell their pids, and exit; in a forked worker, return."""
    from trainer_launch.pytorch import forked_process, messages

    given, go, pids = iter(fds), fds[-1], []
    try:
        process_attributes.die_with_parent(signal.SIGKILL)
        if isinstance(request, messages.OpenStore):
            if os.fork() == 0:
                _be_store(request, before_imports, go, report)
            os._exit(0)
        for worker in request.workers:
            theirs = tuple(itertools.islice(given, worker.fds))
            pid = os.fork()
            if pid == 0:
                for fd in {*fds} - {*theirs, go}:
                    os.close(fd)
                return forked_process.Worker(before_imports, request, worker, theirs, go)
            pids.append(pid)
        messages.send(report, messages.Started(tuple(pids)))
    except BaseException as problem:  # noqa: BLE001  nobody above would see it
        messages.send(report, messages.RequestFailed(f"a process could not be forked ({problem})"))
    os._exit(0)


def _be_store(request: OpenStore, before_imports: BeforeImports, go: int, report: socket.socket) -> NoReturn:
    """In a process of its own: open a store, tell its port, and serve until the launcher ends this process."""
    from trainer_launch.pytorch import forked_process, messages

    try:
        os.setsid()
        process_attributes.allow_many_files()  # each rank takes one
        # torch asks for the name of each rank that connects, one after the other
        process_attributes.ask_no_name_server()
        store = _open(request)
        messages.send(report, messages.Started((os.getpid(),), store.port))
        report.close()
        forked_process.wait_for_go(before_imports, go)
        signal.pthread_sigmask(signal.SIG_SETMASK, before_imports.mask)
        while True:
            time.sleep(1e6)
    except BaseException as problem:  # noqa: BLE001  nobody above would see it
        text = f"a store could not be opened ({type(problem).__name__}: {problem})"
        messages.send(report, messages.RequestFailed(text))
    finally:
        os._exit(1)


def _open(request: OpenStore) -> Any:
    from datetime import timedelta

    from torch.distributed import TCPStore

    from trainer_launch.host import network
    from trainer_launch.model.errors import NodeError

    tries = _TRIES
    while True:
        tries -= 1
        try:
            port = 0 if request.ports is None else network.free_port(request.ports)
            wait_s = timedelta(seconds=60)
            return TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=wait_s)
        except (NodeError, OSError, RuntimeError):  # the last is what torch raises for a port that is taken
            if not tries:
                raise
            time.sleep(_TAKEN_S)
