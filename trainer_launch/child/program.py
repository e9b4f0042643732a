"""The program in a forked process, as if `python -u train.py` had been started: its whole life, from here to _exit.

Nothing of ours may show: not in the interpreter's state, not in the process's, not in a traceback, not at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
import types
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from typing import Any, NoReturn

from trainer_launch.child import disguise, stack
from trainer_launch.child.preload import State
from trainer_launch.pytorch import kernel

_KEPT: list[object] = []  # what has to live as long as the process


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Whom this process shall be."""

    argv: tuple[str, ...]  # python -u [-m] program and its arguments
    is_module: bool
    environment: dict[str, str]
    warn_options: list[str]
    outputs: list[str | None]  # paths for stdout and stderr, where they are not open already
    folder: str
    rank: int
    local_rank: int
    state: State  # of the server that we come from


def become(who: Identity) -> None:
    """Look like the program that is about to run; run it the ordinary way when that cannot be."""
    ready = False
    try:
        os.setsid()
        disguise.restore_signals(who.state)
        disguise.close_descriptors(who.state.descriptors)
        disguise.redirect(who.outputs)
        ready = who.state.reason is None and _disguise(who)
        disguise.note(who.folder, rank=who.rank, local_rank=who.local_rank, with_stacks=ready)
    except Exception as problem:  # noqa: BLE001  whatever it is, the ordinary way is left
        ready = False
        text = f"{type(problem).__name__}: {problem}"
        os.write(
            2, f"[trainer-launch] this worker starts without the fork server: {text}\n".encode(errors="replace")
        )
    signal.pthread_sigmask(signal.SIG_SETMASK, who.state.mask)
    if not ready:
        _exec(who)


def _disguise(who: Identity) -> bool:
    """Take on the program's looks."""
    disguise.set_environment(who.environment)
    disguise.reset_multiprocessing(who.state)
    disguise.reset_random()
    disguise.rebuild_streams()
    sys.warnoptions[:] = who.warn_options
    sys.orig_argv[:] = who.argv
    sys.path[:] = who.state.path
    for name in [name for name in sys.modules if name.partition(".")[0] == "trainer_launch"]:
        del sys.modules[name]
    words, variables = [os.fsencode(word) for word in who.argv], [b"=".join(pair) for pair in os.environb.items()]
    _KEPT.append(kernel.show_as(words, variables))
    return True


def _exec(who: Identity) -> NoReturn:
    """The ordinary way, in the same process."""
    try:
        os.execve(who.argv[0], who.argv, who.environment)
    except OSError as problem:
        print(f"trainer-launch: cannot run {who.argv[0]!r}: {problem.strerror}", file=sys.stderr)  # noqa: T201
        os._exit(127)


# -- running ----------------------------------------------------------------------------------


def script_of(who: Identity, main: dict[str, Any]) -> types.CodeType:
    """The script's code, everything being as it is when a script begins."""
    script = who.argv[2]
    sys.argv[:] = who.argv[2:]
    path = os.path.join(os.getcwd(), script)  # not folded, as Python has it: after a symlink `..` leads elsewhere
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
    return compile(source, path, "exec", dont_inherit=True)


def module_of(who: Identity, _main: dict[str, Any]) -> str:
    """The module's name, everything being as it is when a module begins."""
    sys.argv[:] = ["-m", *who.argv[4:]]
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, os.getcwd())
    return who.argv[3]


# -- ending -----------------------------------------------------------------------------------


def finish(main: dict[str, Any], problem: BaseException | None) -> NoReturn:
    """End as the program did: at its end, or by what it did not catch."""
    code = 0 if problem is None else _code_of(problem) if isinstance(problem, SystemExit) else _show(problem)
    _end(main, code, interrupted=isinstance(problem, KeyboardInterrupt))


def _code_of(problem: SystemExit) -> int:
    """What the interpreter makes of sys.exit's argument."""
    code = problem.code
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    with contextlib.suppress(Exception):
        text = str(code)
        _leave_last_words(text, text)
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
        _leave_last_words(_text_of(problem), "".join(lines))
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
    """From the program's first frame on."""
    while trace is not None and (
        trace.tb_frame.f_code.co_filename == __file__ or trace.tb_frame.f_code in stack.BASES
    ):
        trace = trace.tb_next
    return trace


def _text_of(problem: BaseException) -> str:
    try:
        return f"{type(problem).__name__}: {problem}"
    except Exception:  # noqa: BLE001  its own __str__ is at fault; the interpreter bears that, too
        return f"{type(problem).__name__}: <exception str() failed>"


def _leave_last_words(text: str, lines: str) -> None:
    """Where torch's @record leaves them, which the agent reads; unless the program uses that itself."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or (os.path.exists(path) and os.path.getsize(path)):
        return
    extra = {"py_callstack": lines, "timestamp": str(int(time.time()))}
    message = {"message": text, "extraInfo": extra}
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:
        json.dump({"message": message}, file)


def _end(main: dict[str, Any], code: int, *, interrupted: bool) -> NoReturn:
    """What the interpreter does at its end as far as a program can see it, but without tearing itself down.

    Libraries that are torn down may crash: gloo in torch 2.13 sometimes aborts then, and a worker that has done its
    work would count as failed.
    """
    for step in (threading._shutdown, atexit._run_exitfuncs, lambda: _drop(main), _flush, kernel.flush_c_streams):  # type: ignore[attr-defined]
        with contextlib.suppress(BaseException):
            step()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _drop(names: dict[str, Any]) -> None:
    """Let go of what the program holds, in the interpreter's order, so that its files close and destructors run."""
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name[:1] == "_" and name[1:2] != "_") == private:
                names[name] = None
    gc.collect()


def _flush() -> None:
    """Files that something still holds are written, too."""
    for thing in gc.get_objects():
        if issubclass(type(thing), io.TextIOWrapper | io.BufferedWriter | io.BufferedRandom):  # asks no proxy
            with contextlib.suppress(Exception):
                thing.flush()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
