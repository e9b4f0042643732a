"""A forked worker, from its fork to its exit: it becomes `python -u train.py`.

Nothing of ours shows: not in the interpreter's state, not in the process's, not in a traceback, not at its end. The
only frame below the program's own is `_BASE`, which looks like the program's; see `run_without_frames`. When the
program has ended there is none, and the interpreter ends as always.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import faulthandler
import fcntl
import functools
import gc
import importlib
import io
import json
import mmap
import operator
import os
import resource
import runpy
import signal
import sys
import time
import traceback
import types
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any, NoReturn

from msgspec import Struct, field

from trainer_launch.host import files, process_attributes
from trainer_launch.model import exit_codes
from trainer_launch.pytorch import flight_recorder, messages, process_reset
from trainer_launch.pytorch.hidden_imports import Finder
from trainer_launch.pytorch.messages import ForkedWorker, ForkWorkers
from trainer_launch.pytorch.recorded_imports import Imports, Site

_STACKS_SIGNAL = signal.SIGRTMAX - 1  # asks for the stacks of all threads; torch and we use SIGRTMAX otherwise
_HIGH_FD = 1000  # beyond what a program may expect to get for its own files
_FILES = (io.TextIOWrapper, io.BufferedReader, io.BufferedWriter, io.BufferedRandom, io.FileIO)
_BASES: list[types.CodeType] = []  # what tracebacks leave out
_KEPT: list[object] = []  # what has to live as long as the process


def _on_one_line(source: str) -> types.CodeType:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler):
            node.lineno = node.end_lineno = 1
            node.col_offset = node.end_col_offset = 0
    return compile(tree, "", "exec")


# Its globals are the program's, its locals are ours. It is on the line that every program runs: what counts the
# program's lines, such as coverage, counts those of this, too.
_BASE = _on_one_line("""
try:
    run()
except BaseException as problem:
    keep(problem)
""")


class Origin(Struct, frozen=True, kw_only=True):
    """What the server was before it imported anything, which forked processes get back."""

    launcher: int
    handlers: Mapping[int, Any]
    mask: frozenset[Any]
    descriptors: frozenset[int] = frozenset()  # those that loaded libraries hold open
    main_process: type = object  # multiprocessing's class of a process that it has not started
    has_preloaded: bool = False  # modules of the user's
    site: Site
    imports: Imports
    finder: Finder
    replaced: mmap.mmap = field(default_factory=lambda: mmap.mmap(-1, mmap.PAGESIZE))  # shared: why a worker was
    fork_workers: Callable[[Origin, ForkWorkers, Sequence[int], Signs], NoReturn] | None = None  # None: ours

    def why_replaced(self) -> str | None:
        """Why a worker has replaced itself by a new interpreter, if one has."""
        return self.replaced[:].rstrip(b"\0").decode(errors="replace") or None


class Signs(Struct, frozen=True, kw_only=True):
    """How processes that are being forked and the server tell each other how far they are."""

    report: int  # where pids, the store's port, or a failure are written, one line each
    go: int  # a byte for each process once the launcher knows it; its end means: exit

    def tell(self, word: str, value: object) -> None:
        """Write a line of the report."""
        text = " ".join(str(value).split())
        os.write(self.report, f"{word} {text}\n".encode(errors="replace"))


# -- forking ----------------------------------------------------------------------------------


def fork_workers(origin: Origin, request: ForkWorkers, fds: Sequence[int], signs: Signs) -> Worker:
    """In a process between server and workers, with all signals blocked: fork all, and exit; workers return."""
    code = 1
    try:
        given = iter(fds)
        for worker in request.workers:
            streams = dict(zip(worker.streams, given, strict=False))
            recorder = next(given) if worker.recorder else None
            if fork_one(signs):
                return Worker(origin, request, worker, streams, signs, recorder)
        code = 0
    except OSError as problem:
        signs.tell("failed", f"a worker could not be forked ({problem})")
    os._exit(code)


def fork_one(signs: Signs) -> bool:
    """Fork this process; whether this is the new one.

    Raises:
        OSError: the kernel does not let us.
    """
    pid = os.fork()
    if pid:
        signs.tell("pid", pid)
    return pid == 0


def wait_for_go(origin: Origin, signs: Signs) -> None:
    """Wait until this process is the launcher's child, and see that it dies with it; exit where that cannot be."""
    if not os.read(signs.go, 1):
        os._exit(exit_codes.INFRASTRUCTURE)  # not all workers could be forked, or nobody knows of this one
    os.close(signs.go)
    process_attributes.die_with_parent(signal.SIGKILL)
    if os.getppid() != origin.launcher:
        os._exit(exit_codes.INFRASTRUCTURE)


class Worker:
    """The steps of a worker's life: each call returns what has to be called next, with no frame below it."""

    def __init__(
        self,
        origin: Origin,
        request: ForkWorkers,
        worker: ForkedWorker,
        streams: Mapping[int, int],
        signs: Signs,
        recorder: int | None = None,
    ) -> None:
        self._origin, self._request, self._worker, self._signs = origin, request, worker, signs
        self._streams = streams  # what is put in the place of 1 and 2
        self._recorder = recorder  # where PID 1 asks what torch's flight recorder knows
        self._pid = os.getpid()
        self._has_run = False
        self._problem: BaseException | None = None  # what the program did not catch
        self._umask = os.umask(0)
        os.umask(self._umask)

    def __call__(self) -> Callable[[], object]:
        """The program, then the interpreter's end."""
        if self._has_run:
            return self._end()
        self._has_run = True
        return self._start()

    def _start(self) -> Callable[[], object]:
        """Look like the program that is about to run; run it the ordinary way when that cannot be."""
        main, failed = None, ""
        try:
            os.setsid()
            process_reset.restore_signals(self._origin.handlers)
            files.take_streams(self._streams)
            kept = {*self._origin.descriptors, self._signs.go}
            if self._recorder is not None:
                self._recorder = _out_of_the_way(self._recorder)
                kept.add(self._recorder)
            files.close_descriptors(kept)
            if (bound := self._worker).cpus:
                process_attributes.binder(bound.local_rank, bound.cpus, bound.memory)()
            main = self._become()
        except Exception as problem:  # noqa: BLE001  whatever it is, the ordinary way is left
            failed = f"{type(problem).__name__}: {problem}"
        wait_for_go(self._origin, self._signs)
        if main is not None and self._recorder is not None:
            flight_recorder.answer_in_thread(self._recorder, int(os.environ["RANK"]))
        signal.pthread_sigmask(signal.SIG_SETMASK, self._origin.mask)
        if main is None:
            _exec(self._request, self._worker, failed)
        return self._running(main)

    def _become(self) -> types.ModuleType:
        request, worker, origin = self._request, self._worker, self._origin
        os.chdir(request.cwd)
        os.environ.clear()  # the same object, which others have imported, in the order that python would see
        os.environ.update({**request.environment, **worker.environment})
        process_reset.reset(origin.main_process, origin.imports.modules)
        process_reset.rebuild_streams()
        _look_like(request.argv)
        if worker.stacks is not None:
            arm(worker.stacks)
        gc.enable()
        main = _new_main()
        sys.modules["__main__"] = main
        return main

    def _running(self, main: types.ModuleType) -> Callable[[], object]:
        words = self._request.argv[2:]
        is_module = words[0] == "-m"
        path = "<frozen runpy>" if is_module else os.path.join(os.getcwd(), words[0])
        sys.argv[:] = ["-m", *words[2:]] if is_module else words
        self._origin.finder.begin(self._replace)
        try:
            self._origin.site.run()
        except BaseException as problem:  # noqa: BLE001  a new interpreter will tell it as it always does
            self._replace(f"importing site failed ({type(problem).__name__}: {problem})")
        try:
            run = _module_of(words) if is_module else _script_of(words[0], path, main.__dict__)
        except (SystemExit, SyntaxError, ValueError) as problem:
            self._problem = problem.with_traceback(None)
            return self._end()
        _BASES.append(_BASE.replace(co_filename=path))
        return functools.partial(exec, _BASES[0], main.__dict__, {"run": run, "keep": self._keep})

    def _replace(self, reason: str) -> NoReturn:
        """The program has found out that a fork is not what it needs: begin anew, as a new interpreter."""
        note = reason.encode(errors="replace")[: mmap.PAGESIZE]
        self._origin.replaced[: len(note)] = note
        signal.pthread_sigmask(signal.SIG_SETMASK, self._origin.mask)
        os.umask(self._umask)
        _exec(
            self._request,
            self._worker,
            reason if self._request.must_fork else f"{reason}; what the program did before that runs again",
        )

    def _keep(self, problem: BaseException) -> None:
        self._problem = problem

    def _end(self) -> Callable[[], object]:
        """Tell what the program did not catch, then let the interpreter end: no frame is left below."""
        problem, self._problem = self._problem, None
        code = 1
        try:
            code = finish(problem)
            if self._recorder is not None and os.getpid() == self._pid:  # the program may have forked
                environment = {**self._request.environment, **self._worker.environment}
                flight_recorder.tell_at_end(self._recorder, int(environment["RANK"]))
        except BaseException:  # noqa: BLE001  as a second Ctrl-C: nobody above would see it
            traceback.print_exc()
        if self._origin.has_preloaded or _has_finalisers():
            gc.unfreeze()  # the last collection looks at all objects, which takes half a second more
        return functools.partial(ctypes.pythonapi.Py_Exit, code)


# -- looks ------------------------------------------------------------------------------------


def _look_like(argv: Sequence[str]) -> None:
    sys.orig_argv[:] = argv
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainer_launch"]:
        del sys.modules[name]
    words, variables = [os.fsencode(word) for word in argv], [b"=".join(pair) for pair in os.environb.items()]
    _KEPT.append(process_attributes.show_as(words, variables))


def arm(path: str) -> None:
    """A signal makes Python write there where every thread stands."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    faulthandler.register(_STACKS_SIGNAL, file=_out_of_the_way(fd), all_threads=True, chain=False)


def _out_of_the_way(fd: int) -> int:
    high = min(_HIGH_FD, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 2)
    moved = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, high)
    os.close(fd)
    return moved


def _new_main() -> types.ModuleType:
    """A __main__ as the interpreter makes it."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __loader__=BuiltinImporter)
    return main


# -- running ----------------------------------------------------------------------------------


def _exec(request: ForkWorkers, worker: ForkedWorker, failed: str) -> NoReturn:
    """The ordinary way, in the same process; an error where the user wants a fork."""
    if request.must_fork:
        text = messages.cannot_fork(failed)
        _leave_error(text, f"{text}\n")
        os.write(2, f"[trainer-launch] {text}\n".encode(errors="replace"))
        os._exit(exit_codes.MISCONFIGURED)
    text = f"[trainer-launch] this worker starts without the fork server: {failed}\n"
    os.write(2, text.encode(errors="replace"))
    try:
        os.chdir(request.cwd)
        environment = {**request.environment, **worker.environment}
        os.execve(request.argv[0], request.argv, environment)
    except OSError as problem:
        os.write(
            2, f"trainer-launch: cannot run {request.argv[0]!r}: {problem.strerror}\n".encode(errors="replace")
        )
        os._exit(exit_codes.NOT_FOUND)


def _script_of(script: str, path: str, main: dict[str, Any]) -> Callable[[], object]:
    """What runs the script, everything being as it is when a script begins.

    `path` is not folded, as Python has it: after a symlink `..` leads elsewhere.
    """
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    main.update(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as problem:
        text = f"{sys.executable}: can't open file {path!r}: [Errno {problem.errno}] {problem.strerror}"
        print(text, file=sys.stderr)  # noqa: T201
        raise SystemExit(2) from None
    return functools.partial(exec, compile(source, path, "exec", dont_inherit=True), main)


def _module_of(words: Sequence[str]) -> Callable[[], object]:
    """What runs the module, everything being as it is when a module begins."""
    importlib.import_module("runpy")  # python shows it
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    return functools.partial(getattr(runpy, "_run_module_as_main"), words[1])  # noqa: B009  what python -m calls


# -- ending -----------------------------------------------------------------------------------


def finish(problem: BaseException | None) -> int:
    """Tell what the program did not catch; the exit code."""
    if problem is None:
        return 0
    if isinstance(problem, SystemExit):
        return _code_of(problem)
    code = _show(problem)
    if isinstance(problem, KeyboardInterrupt):
        # As python does it: it dies of SIGINT when the interpreter has ended, and before C's own atexit handlers.
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # who started us may ignore it
        libc = ctypes.CDLL(None)
        libc.on_exit(getattr(libc, "raise"), None)
        return signal.SIGINT
    return code


def _has_finalisers() -> bool:
    """Whether the program has left objects that could see that the last collection passes over the server's."""
    ours = {id(thing) for stream in (sys.stdin, sys.stdout, sys.stderr) for thing in _parts_of(stream)}
    kinds = {type(thing) for thing in gc.get_objects() if id(thing) not in ours and not _is_closed_file(thing)}
    generators = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
    return any(hasattr(kind, "__del__") or kind in generators for kind in kinds)


def _is_closed_file(thing: object) -> bool:
    """As `with open(...) as file` leaves them: it has nothing more to do, and runs no code of the program."""
    with contextlib.suppress(Exception):  # without a buffer, or with one that the program has made
        return isinstance(thing, io.IOBase) and type(thing) in _FILES and thing.closed
    return False


def _parts_of(stream: Any) -> list[object]:
    buffer = getattr(stream, "buffer", None)
    return [stream, buffer, getattr(buffer, "raw", None)]


def _code_of(problem: SystemExit) -> int:
    """What the interpreter makes of sys.exit's argument."""
    code = problem.code
    if code is None or isinstance(code, int):
        code = (code or 0) & 0xFF
        if code:  # its connections close before it has ended, and who fails of that may be seen first
            _leave_error("<NONE>", "", code)  # torch's word
        return code
    with contextlib.suppress(Exception):
        text = str(code)
        _leave_error(text, text)
        print(text, file=sys.stderr)  # noqa: T201
    return 1


def _show(problem: BaseException) -> int:
    """Let the program's excepthook show what it did not catch; the exit code."""
    trace = problem.__traceback__ = _without_ours(problem.__traceback__)
    sys.last_type, sys.last_value, sys.last_traceback = type(problem), problem, trace
    if sys.version_info >= (3, 12):
        sys.last_exc = problem
    if not isinstance(problem, KeyboardInterrupt):
        lines = traceback.format_exception(type(problem), problem, trace)
        _leave_error(_text_of(problem), "".join(lines))
    try:
        sys.excepthook(type(problem), problem, trace)
    except SystemExit as end:
        return _code_of(end)
    except BaseException as second:  # noqa: BLE001  as the interpreter does it
        print("Error in sys.excepthook:", file=sys.stderr)  # noqa: T201
        second.__traceback__ = _without_ours(second.__traceback__)
        sys.__excepthook__(type(second), second, second.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)  # noqa: T201
        sys.__excepthook__(type(problem), problem, trace)
    return 1


def _without_ours(trace: types.TracebackType | None) -> types.TracebackType | None:
    while trace is not None and (trace.tb_frame.f_code.co_filename == __file__ or trace.tb_frame.f_code in _BASES):
        trace = trace.tb_next
    return trace


def _text_of(problem: BaseException) -> str:
    try:
        return f"{type(problem).__name__}: {problem}"
    except Exception:  # noqa: BLE001  its own __str__ is at fault; the interpreter bears that, too
        return f"{type(problem).__name__}: <exception str() failed>"


def _leave_error(text: str, lines: str, code: int = 1) -> None:
    """Where torch's @record leaves them, which PID 1 reads; unless the program uses that itself."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and os.path.getsize(path)):
        return
    extra = {"py_callstack": lines, "timestamp": str(int(time.time()))}
    message = {"message": text, "errorCode": code, "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


# -- no frame below --------------------------------------------------------------------------

Step = Callable[[], object]


def run_without_frames(first: Callable[[], Callable[[], Step]]) -> NoReturn:
    """Leave all frames, then call `first`; then again and again what it has returned, and what that returns.

    Whoever prints a stack, or looks for the main script at its bottom, would else find the fork server there. And
    what a frame holds is not finalised when the interpreter ends. A new thread would have an empty stack, too, but
    a process that Python 3.13 has forked from a thread crashes at its end.

    The interpreter prints the value of `SystemExit` when the last frame has gone. It asks for its `str()`, which
    here is `deque(map(call, steps))`: each step is called, and then what it has returned.

    `first` or one of the steps has to end the process.
    """
    chain: Callable[[], object] = functools.partial(
        deque, map(operator.methodcaller("__call__"), iter(_Steps(first), None)), 0
    )
    raise SystemExit(type("Steps", (), {"__str__": staticmethod(chain)})())


class _Steps:
    def __init__(self, first: Callable[[], Callable[[], Step]]) -> None:
        self._first = first
        self._next: Callable[[], Step] | None = None

    def __call__(self) -> Step:
        try:
            if self._next is None:
                self._next = self._first()
            return self._next()
        except BaseException:  # noqa: BLE001  nobody above would tell it
            traceback.print_exc()
            os._exit(1)
