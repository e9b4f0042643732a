"""A forked worker, from its fork to its exit: a plain fork of a process that has imported torch runs the program.

What a program may reasonably notice is as in `python -u train.py`: its names, streams, signals, seeds, tracebacks
and exit codes. `first_import.py` guards the import of torch. `--start-method exec` is for everything else.
Private names of Python's library are used in `_reset` alone.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import gc
import importlib
import io
import itertools
import os
import resource
import runpy
import signal
import socket
import sys
import tempfile
import threading
import types
from collections.abc import Mapping, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from multiprocessing import context, forkserver, process, resource_tracker, util
from typing import Any, NoReturn
from urllib.parse import urlsplit

from msgspec import Struct

from trainer_launch.diagnosis import flight_recorder
from trainer_launch.host import files, process_attributes
from trainer_launch.model import Endpoint, exit_codes
from trainer_launch.pytorch import error_file, generations
from trainer_launch.pytorch.error_file import without_frames_of
from trainer_launch.pytorch.first_import import FirstImport
from trainer_launch.pytorch.messages import ForkedWorker, ForkWorkers

_HIGH_FD = 1000  # beyond what a program may expect to get for its own files
_KEPT: list[object] = []  # what has to live as long as the process


class BeforeImports(Struct, frozen=True, kw_only=True):
    """The state of the server before it imported anything, which forked processes get back."""

    launcher: int
    handlers: Mapping[int, Any]
    mask: frozenset[Any]
    descriptors: frozenset[int]  # those that loaded libraries hold open
    path: tuple[str, ...]  # sys.path without what the server itself needs
    imported: FirstImport  # torch and numpy


def wait_for_go(before_imports: BeforeImports, go: int) -> None:
    """Wait until this process is the launcher's child, and see that it dies with it; exit where that cannot be."""
    if not os.read(go, 1):
        os._exit(exit_codes.INFRASTRUCTURE)  # not all workers could be forked, or nobody knows of this one
    os.close(go)
    process_attributes.die_with_parent(signal.SIGKILL)
    if os.getppid() != before_imports.launcher:
        os._exit(exit_codes.INFRASTRUCTURE)


class Worker:
    """A forked worker: called once in the main thread, with nothing of the server's left above it."""

    def __init__(
        self,
        before_imports: BeforeImports,
        request: ForkWorkers,
        worker: ForkedWorker,
        fds: Sequence[int],
        go: int,
    ) -> None:
        """`fds` came for this worker; `go` is the pipe of `wait_for_go`."""
        self._before, self._request, self._worker, self._go = before_imports, request, worker, go
        self._streams = dict(zip(worker.streams, fds, strict=False))  # what is put in the place of 1 and 2
        self._sockets = fds[len(worker.streams) :]
        self._recorder: int | None = None  # where PID 1 asks torch's flight recorder
        self._answers = False  # a thread answers there
        self._pid = os.getpid()  # the program may fork

    def __call__(self) -> NoReturn:
        """Run the program; the interpreter then ends with its exit code."""
        failure: OSError | None = None
        try:
            self._become()
        except OSError as error:  # such as a working directory that is gone
            failure = error
        wait_for_go(self._before, self._go)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before.mask)
        if failure is not None:
            self._cannot_run(failure)
        problem = self._run()
        finish(problem)
        self._tell_at_end()
        if isinstance(problem, KeyboardInterrupt):  # the interpreter dies of it when it has ended
            sys.excepthook = lambda *_: None  # that has been shown
            raise KeyboardInterrupt
        if isinstance(problem, SystemExit):
            raise SystemExit(problem.code)
        raise SystemExit(0 if problem is None else 1)

    def _become(self) -> None:
        """Put everything in its place before the program begins."""
        request, worker, before = self._request, self._worker, self._before
        os.setsid()
        for number, handler in before.handlers.items():  # all signals are still blocked
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        files.take_streams(self._streams)
        sockets = [_out_of_the_way(fd) for fd in self._sockets]
        files.close_descriptors({*before.descriptors, self._go, *sockets})
        self._recorder = sockets[0] if worker.recorder else None
        generations.connect(sockets[-1])
        os.chdir(request.cwd)
        os.environ.clear()  # the same object, which others have imported
        os.environ.update(self._worker.environment)
        _reset(before.imported.modules)
        sys.orig_argv[:] = request.argv
        words = [os.fsencode(word) for word in request.argv]
        _KEPT.append(process_attributes.show_as(words, [b"=".join(pair) for pair in os.environb.items()]))
        if worker.stacks is not None:
            arm(worker.stacks)
        if faulthandler.is_enabled():  # our own thread is no part of a crash
            faulthandler.enable(2, all_threads=False)
        gc.enable()
        sys.path[:] = before.path
        # The second name is multiprocessing's, which it gives the main module when it is imported.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = _new_main()

    def _run(self) -> BaseException | None:
        """Run the program; return the exception that it did not catch."""
        words = self._request.argv[2:]
        self._lead_to_store(self._before.imported.modules)
        self._answer_from_first_group(self._before.imported.modules)
        self._before.imported.begin(self._replace)
        try:
            if words[0] == "-m":
                _run_module(words)
            else:
                _run_script(words)
        except BaseException as problem:  # noqa: BLE001  it is shown as the interpreter does it
            return problem.with_traceback(without_frames_of(__file__, problem.__traceback__))
        return None

    def _replace(self, reason: str) -> NoReturn:
        """The program needs another import of torch than the fork server's: begin anew, as a new interpreter."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self._before.mask)
        if self._worker.local_rank == 0:  # the other workers do the same
            _write(f"workers start without the fork server: {reason}; what the program did before that runs again")
        request = self._request
        try:
            os.chdir(request.cwd)
            os.execve(request.argv[0], request.argv, self._worker.environment)
        except OSError as problem:
            self._cannot_run(problem)

    def _cannot_run(self, problem: OSError) -> NoReturn:
        program = self._request.argv[0]
        where = "" if problem.filename in (None, program) else f": {problem.filename!r}"
        _write(f"cannot run {program!r}: {problem.strerror}{where}")
        os._exit(exit_codes.NOT_FOUND)

    def _answer_from_first_group(self, modules: Mapping[str, Any]) -> None:
        """Let the first process group start the thread that answers PID 1: without one there is nothing to tell.

        It starts before the group's ranks meet. From then on stacks are written in it: a signal to the main thread
        would end torch's wait between two attempts to connect, and with it the worker. torch calls both functions
        by names of its own, where they stand again afterwards.
        """
        groups, fd = modules.get("torch.distributed.distributed_c10d"), self._recorder
        register, meet = (getattr(groups, name, None) for name in ("_register_process_group", "rendezvous"))
        if fd is None or register is None or meet is None:
            return

        has_thread = False

        def start() -> None:
            nonlocal has_thread
            setattr(groups, "rendezvous", meet)  # noqa: B010
            if os.getpid() == self._pid and not has_thread:
                has_thread = True
                flight_recorder.answer_in_thread(fd, self._rank)

        def meet_first(*where: Any, **options: Any) -> Any:
            start()
            return meet(*where, **options)

        def register_first(*group: Any) -> Any:
            start()
            setattr(groups, "_register_process_group", register)  # noqa: B010
            if os.getpid() == self._pid:
                self._answers = True
                flight_recorder.tell_of_first_group(fd)
            return register(*group)

        setattr(groups, "rendezvous", meet_first)  # noqa: B010
        setattr(groups, "_register_process_group", register_first)  # noqa: B010

    def _lead_to_store(self, modules: Mapping[str, Any]) -> None:
        """Let init_method="tcp://…" meet at the store where torchrun has it: there, our coordinator listens."""
        known = getattr(modules.get("torch.distributed.rendezvous"), "_rendezvous_handlers", {})
        place, meet = self._request.meet_at, known.get("tcp")
        if place is None or meet is None:
            return

        def meet_at_store(url: str, *args: Any, **options: Any) -> Any:
            asked = urlsplit(url)
            if asked.port == place.port and _is_same(asked.hostname or "", place.host):
                now = {**self._worker.environment, **generations.environment()}
                store = Endpoint(now["MASTER_ADDR"], int(now["MASTER_PORT"]))
                url = asked._replace(netloc=str(store)).geturl()
            return meet(url, *args, **options)

        known["tcp"] = meet_at_store

    def _rank(self) -> int:
        return int(generations.environment().get("RANK") or self._worker.environment["RANK"])

    def _tell_at_end(self) -> None:
        if self._recorder is not None and self._answers and os.getpid() == self._pid:
            with contextlib.suppress(Exception):
                flight_recorder.tell_at_end(self._recorder, self._rank())


def _is_same(host: str, other: str) -> bool:
    """Whether two names are one, or lead to one address."""
    if host.lower() == other.lower():
        return True
    with contextlib.suppress(OSError, UnicodeError):
        ours, theirs = ({entry[4][0] for entry in socket.getaddrinfo(name, None)} for name in (host, other))
        return not ours.isdisjoint(theirs)
    return False


def _write(text: str) -> None:
    os.write(2, f"[trainer-launch] {text}\n".encode(errors="replace"))


def arm(path: str) -> None:
    """A signal makes Python write there where every thread stands.

    As the interpreter ends, the former disposition comes back: a signal that is late then must not kill.
    """
    import ctypes  # torch has imported it; signal.signal would show it to the program

    ctypes.CDLL(None).signal(flight_recorder.STACKS_SIGNAL, ctypes.c_void_p(signal.SIG_IGN))
    with contextlib.suppress(OSError):  # a folder that a worker has put there: this one shows no stacks
        if os.path.lexists(path):
            os.unlink(path)
        fd = _out_of_the_way(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        faulthandler.register(flight_recorder.STACKS_SIGNAL, file=fd, all_threads=True, chain=False)


def _out_of_the_way(fd: int) -> int:
    high = min(_HIGH_FD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 2)
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high)
    os.close(fd)
    return moved


def _reset(modules: Mapping[str, Any]) -> None:
    """Reset what a forked worker would share with the fork server; `modules` are torch, numpy and theirs."""
    private: Any = process
    # With a key of its own: processes with one key trust each other.
    private._current_process = type(private._current_process)()
    private._parent_process = None  # a program that python starts has none
    private._process_counter = itertools.count(1)  # the first process that it starts is Process-1
    private._children = set()
    for module, name in ((forkserver, "_forkserver"), (resource_tracker, "_resource_tracker")):
        getattr(module, name).__init__()  # theirs would be the server's; in place, as others hold their methods
    setattr(getattr(context, "_default_context"), "_actual_context", None)  # noqa: B009, B010  the start method
    getattr(util, "_finalizer_registry").clear()  # noqa: B009  what ends the server's own processes
    main_thread: Any = threading.main_thread()
    main_thread._set_native_id()  # before Python 3.13 a fork leaves the parent's
    # Python seeds its own generator anew in a fork; torch's and numpy's would be alike in all workers.
    modules["torch"].default_generator.seed()
    if "numpy.random" in modules:
        modules["numpy.random"].seed()
    importlib.invalidate_caches()  # modules that were written since
    tempfile.tempdir = None  # by the server's TMPDIR


def _new_main() -> types.ModuleType:
    """A __main__ as the interpreter makes it."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __loader__=BuiltinImporter)
    return main


def _run_script(words: Sequence[str]) -> None:
    """Run a script as `python train.py` does.

    Its path is not folded, as Python has it: after a symlink `..` leads elsewhere.
    """
    path = os.path.join(os.getcwd(), words[0])
    sys.argv[:] = words
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(words[0])))
    main = sys.modules["__main__"].__dict__
    main.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as problem:
        text = f"{sys.executable}: can't open file {path!r}: [Errno {problem.errno}] {problem.strerror}"
        print(text, file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None
    exec(compile(source, path, "exec", dont_inherit=True), main)


def _run_module(words: Sequence[str]) -> None:
    """Run a module as `python -m` does."""
    sys.argv[:] = ["-m", *words[2:]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    getattr(runpy, "_run_module_as_main")(words[1])  # noqa: B009  what python -m calls


def finish(problem: BaseException | None) -> None:
    """Show what the program did not catch by its excepthook, and leave it where torch's @record would."""
    if problem is None:
        return
    if isinstance(problem, SystemExit):
        _note_exit(problem.code)
        return
    if not isinstance(problem, KeyboardInterrupt):
        error_file.leave_exception(problem)
    try:
        sys.excepthook(type(problem), problem, problem.__traceback__)
    except SystemExit as end:
        _note_exit(end.code)
        raise


def _note_exit(code: object) -> None:
    """A program's connections close before it has ended, and who fails of that may be seen first."""
    if isinstance(code, int) and code & 0xFF:
        error_file.leave("<NONE>", "", code & 0xFF)  # torch's word
    elif code is not None and not isinstance(code, int):
        with contextlib.suppress(Exception):
            error_file.leave(str(code), str(code))
