"""One import of torch for agent and fork-server: the agent imports it before all else, and forks the server.

At that moment the agent is nothing else yet: it has one thread, no signal handlers, no files of its own. Where a
fork would differ from a fresh server, because the import has left something running or would have found other
modules in the program's folder, multiprocessing starts a new interpreter as it always does.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.metadata
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.machinery import PathFinder
from multiprocessing import resource_tracker, util
from typing import Any

from trainer_launch.child import fitness
from trainer_launch.pytorch import kernel

# The second and third are torch's own way of starting a worker, which would otherwise be imported by each of them.
NEEDED = ("torch", "torch.multiprocessing.spawn", "torch.distributed.elastic.multiprocessing.api")
_PLUGINS = "torch.backends"  # entry points that torch loads when it is imported
_KEPT: list[object] = []  # what has to live as long as the process


@dataclass(frozen=True, slots=True, kw_only=True)
class Stem:
    """A process that has imported what is needed."""

    reason: str | None  # why a server must not be forked from it
    held: frozenset[int]  # descriptors that loaded libraries hold open


def grow(directory: str) -> Stem:
    """Import what is needed; `directory` is the one that the program's modules come from.

    Raises:
        ImportError: torch cannot be imported.
    """
    before = descriptors()
    with _unfound() as unfound, _without_collector():
        for name in NEEDED:
            importlib.import_module(name)
    names = {name.partition(".")[0] for name in (*sys.modules, *unfound)}
    reason = _shadow(directory, names) or fitness.unfit()
    gc.freeze()  # agent and server would otherwise copy what the collector marks
    return Stem(reason=reason, held=frozenset(descriptors() - before))


def descriptors() -> set[int]:
    """Those that are open."""
    return {int(word) for word in os.listdir("/proc/self/fd")}


@contextlib.contextmanager
def forking(stem: Stem) -> Iterator[None]:
    """What multiprocessing would start in a new interpreter meanwhile is a fork of this process."""
    names: Any = util
    genuine = names.spawnv_passfds

    def fork(_path: object, argv: list[str], passed: list[int]) -> int:
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            names.spawnv_passfds = genuine
            _run(argv, {0, 1, 2, *passed, *stem.held})
        return pid

    names.spawnv_passfds = fork
    try:
        yield
    finally:
        names.spawnv_passfds = genuine


def _run(argv: list[str], keep: set[int]) -> None:
    """In the new process: become `python -c CODE`, and end with it."""
    code = 1
    try:
        for number in descriptors() - keep:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(number)
        getattr(resource_tracker, "_resource_tracker").__init__()  # noqa: B009  the agent's, not ours
        tempfile.tempdir = None
        sys.argv[:] = ["-c"]
        for name in [name for name in sys.modules if name.partition(".")[0] == "trainer_launch"]:
            del sys.modules[name]  # they begin anew as well
        words, variables = [os.fsencode(word) for word in argv], [b"=".join(pair) for pair in os.environb.items()]
        _KEPT.append(kernel.show_as(words, variables))
        exec(argv[-1], {"__name__": "__main__"})
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:  # noqa: BLE001  nobody above would see it
        traceback.print_exc()
    finally:
        os._exit(code)


# -- what the program's folder would change -----------------------------------------------------


@contextlib.contextmanager
def _unfound() -> Iterator[set[str]]:
    """The modules that were looked for meanwhile, and are nowhere."""
    names: set[str] = set()

    class Witness:
        """Comes after all finders."""

        @staticmethod
        def find_spec(name: str, _path: object = None, _target: object = None) -> None:
            names.add(name)

    finders: list[Any] = sys.meta_path
    finders.append(Witness)
    try:
        yield names
    finally:
        finders.remove(Witness)


def _shadow(directory: str, names: set[str]) -> str | None:
    """What torch, imported with this directory first, would have found in it."""
    if getattr(sys.flags, "safe_path", False):
        return None
    with contextlib.suppress(OSError):
        for name in sorted(names & {entry.partition(".")[0] for entry in os.listdir(directory)}):
            spec = PathFinder.find_spec(name, [directory])
            if spec and spec.loader and spec.origin != getattr(sys.modules.get(name), "__file__", None):
                return f"torch imports {name}, and {spec.origin} hides it"
    for distribution in importlib.metadata.distributions(path=[directory]):
        if any(entry.group == _PLUGINS for entry in distribution.entry_points):
            return f"{directory} contains a plug-in for torch"
    return None


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Imports make nothing but what stays: looking for garbage meanwhile is a tenth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
