"""The frames below a program's own: none but one, which looks like the program's.

Whoever prints a stack, or looks for the main script at its bottom, would else find the fork-server there. So the
fork is done in a new thread, whose stack is empty and which becomes the main thread of the new process.
"""

from __future__ import annotations

import _thread
import os
import runpy
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable
from importlib.machinery import BuiltinImporter
from typing import Any

BASES: list[types.CodeType] = []  # what tracebacks leave out
# Its globals are the program's, its locals are ours: `begin` returns True in the new process alone.
_BASE = """
if begin():
    problem = None
    try:
        {run}
    except BaseException as caught:
        problem = caught
    finish(main, problem)
done()
"""


def run_above(
    begin: Callable[[], bool],
    prepare: Callable[[dict[str, Any]], Any],
    finish: Callable[[dict[str, Any], BaseException | None], None],
    script: str | None,
) -> None:
    """Call `begin`, and in the process where it returns True run what `prepare` returns; return in the other one.

    That is a script's code or, when there is no script, a module's name; `finish` is the end of that process.
    """
    ended = _thread.allocate_lock()
    ended.acquire()
    main = _new_main()
    known = {
        "begin": lambda: _safely(begin),
        "prepare": prepare,
        "finish": finish,
        "done": ended.release,
        "main": main.__dict__,
        # The second name is what multiprocessing calls it in children, and finds in what they send back.
        "install": lambda: sys.modules.update(__main__=main, __mp_main__=main),
        "run_module": getattr(runpy, "_run_module_as_main"),  # noqa: B009  what `python -m` itself calls
    }
    run = "install(); " + ("run_module(prepare(main))" if script is None else "exec(prepare(main), main)")
    path = "<frozen runpy>" if script is None else os.path.join(os.getcwd(), script)
    BASES.append(compile(_BASE.format(run=run), path, "exec"))
    threading.stack_size(_main_stack_bytes())
    _thread.start_new_thread(exec, (BASES[-1], main.__dict__, known))
    ended.acquire()


def _safely(begin: Callable[[], bool]) -> bool:
    """Python warns of a fork beside other threads: ours only waits, and has to be told when that is over."""
    me = os.getpid()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            forked = begin()
    except BaseException:  # noqa: BLE001  nobody above would see it
        traceback.print_exc()
        if os.getpid() != me:
            os._exit(1)
        return False
    if forked:
        threading.stack_size(0)
    return forked


def _new_main() -> types.ModuleType:
    """A __main__ as the interpreter makes it."""
    main = types.ModuleType("__main__")
    main.__dict__.update(__annotations__={}, __builtins__=sys.modules["builtins"], __loader__=BuiltinImporter)
    return main


def _main_stack_bytes() -> int:
    """As much as a main thread may use; the kernel gives it page by page."""
    import resource

    soft = resource.getrlimit(resource.RLIMIT_STACK)[0]
    return 0 if 0 < soft <= 1 << 30 else 1 << 26
