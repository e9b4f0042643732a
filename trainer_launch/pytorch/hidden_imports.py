"""What the fork server has imported does not show in a forked worker until its program imports it.

The modules are taken out of `sys.modules`, and a finder hands them over: with everything that importing them brings
in a new interpreter, the filters for warnings that they add, and their loggers. What would be different in a new
interpreter is noticed here, and the worker is then replaced by one.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from trainer_launch.pytorch import load_time_variables
from trainer_launch.pytorch.recorded_imports import Imports

Replace = Callable[[str], NoReturn]  # this process by a new interpreter, for this reason
_INDIFFERENT = ("_distutils_hack",)  # finders that look at distutils alone: setuptools', in most environments
_MAIN_AGAIN = "__mp_main__"  # the name that multiprocessing gives to the main module, too
_NATIVE = ("torch", "numpy")  # whose libraries read variables when they are loaded


def hide(imports: Imports) -> Finder:
    """Hide what has been imported, once, in the fork server: its workers find it hidden."""
    finder = Finder(imports)
    finder.take_away()
    _set_filters(imports.fresh_filters)
    if imports.loggers:
        logging.root.manager.loggerDict.clear()
    sys.path_importer_cache.clear()
    finders: list[Any] = sys.meta_path
    finders.insert(0, finder)
    return finder


class Finder:
    """Finds what is hidden, as the very modules that have been imported."""

    def __init__(self, imports: Imports) -> None:
        self._imports = imports
        self.replace: Replace | None = None  # set in a worker: called where what is hidden is not what is needed
        self._filters = list(imports.filters)
        self._loggers: dict[str, list[tuple[str, logging.Logger]]] = {}  # by the module that made them
        for name, (logger, owner) in imports.loggers.items():
            self._loggers.setdefault(owner, []).append((name, logger))
        self._detached = {id(module): (package, child) for package, child, module in imports.detached}
        self._handed: set[str] = set()
        self._walked: set[str] = set()

    def begin(self, replace: Replace) -> None:
        """The program begins: what has been imported to get this far is hidden again."""
        self.take_away()
        self.replace = replace

    def take_away(self) -> None:
        """Hide everything."""
        for name in (*self._imports.modules, _MAIN_AGAIN):
            sys.modules.pop(name, None)
        for package, child, _ in self._imports.detached:
            vars(package).pop(child, None)

    def find_spec(self, name: str, _path: object = None, target: object = None) -> ModuleSpec | None:
        """A module that is hidden still; like the genuine specification but for its loader."""
        module = self._imports.modules.get(name)
        if module is None or target is not None or (name in self._handed and name not in sys.modules):
            return None  # not ours, or the program reloads it
        parent = name.rpartition(".")[0]
        if parent and sys.modules.get(parent) is not self._imports.modules.get(parent, sys.modules.get(parent)):
            return None  # of a package that the program has loaded anew
        genuine = vars(module).get("__spec__")
        loader: Any = _Loader(self, name, module, genuine)
        if not isinstance(genuine, ModuleSpec) or genuine.name != name:
            return ModuleSpec(name, loader, is_package="__path__" in vars(module))
        made = object.__new__(type(genuine))
        vars(made).update(vars(genuine), loader=loader)
        return made

    def hand_over(self, root: str) -> None:
        """Show a module, and all that importing it brings."""
        if root in self._walked:
            return  # as a part of another
        found = [name for name in self._imports.brought(root) if name not in self._handed]
        if self.replace is None:
            self._show(found)
            return
        names = set(found)
        self._check(root, names)
        hooks = sys.meta_path[: sys.meta_path.index(self)]
        if all(type(hook).__module__ in _INDIFFERENT for hook in hooks) or len(found) == 1:
            self._show(found)
        else:
            self._walk(found)
        self._handed |= names  # only now: another thread would else import what is not there yet
        self._tell(names)

    def _show(self, names: Iterable[str]) -> None:
        for name in names:
            module = self._imports.modules[name]
            sys.modules.setdefault(name, module)
            if id(module) in self._detached:
                setattr(*self._detached[id(module)], module)

    def _walk(self, names: Sequence[str]) -> None:
        """Import each by its name: the program has import hooks of its own, which want to see that."""
        self._walked.update(names)
        modules = self._imports.modules
        # Those under another name, as collections.abc, are put into sys.modules by the module that has them.
        self._show(name for name in names if getattr(vars(modules[name]).get("__spec__"), "name", None) != name)
        for name in names:
            parent, _, child = name.rpartition(".")
            package = vars(modules[parent]) if parent in modules else {}
            present = package.get(child)
            importlib.import_module(name)
            if sys.modules.get(name) is not modules[name]:
                self._give_up(f"an import hook of the program changes {name}")
            if present is not None:
                package[child] = present  # a function that the package calls like its module
        self._show(names)

    def _check(self, root: str, names: set[str]) -> None:
        """In a new interpreter, the program would get the same."""
        for name in names - {root}:
            if name in sys.modules and sys.modules[name] is not self._imports.modules[name]:
                self._give_up(f"the program has another {name} in sys.modules before it imports {root}")
        if names.intersection(_NATIVE):
            changed = load_time_variables.changed(self._imports.environment, os.environ)
            if changed:
                self._give_up(f"the program changes {', '.join(changed)} before it imports {root}")
        if sys.path[: len(self._imports.path)] != self._imports.path:
            self._check_places(root, names)

    def _check_places(self, root: str, names: set[str]) -> None:
        """Nothing is imported from elsewhere now that the program has changed sys.path."""
        for name in sorted(names):
            genuine = vars(self._imports.modules[name]).get("__spec__")
            if "." in name or getattr(genuine, "origin", None) is None:
                continue
            for finder in sys.meta_path[sys.meta_path.index(self) + 1 :]:
                spec = finder.find_spec(name, None)
                if spec is not None and spec.origin != genuine.origin:
                    self._give_up(f"the program changes sys.path before it imports {root}: {name} is {spec.origin}")
                if spec is not None:
                    break

    def _give_up(self, reason: str) -> None:
        if self.replace is not None:
            self.replace(reason)

    def _tell(self, names: set[str]) -> None:
        """What the imports of these have changed elsewhere."""
        if "multiprocessing" in names:
            sys.modules[_MAIN_AGAIN] = sys.modules["__main__"]
        shown = [entry for entry, owner in self._filters if owner in names]
        if shown:
            self._filters = [pair for pair in self._filters if pair[1] not in names]
            _set_filters([*shown, *warnings.filters])
        for owner in [owner for owner in self._loggers if owner in names]:
            for name, logger in self._loggers.pop(owner, []):
                _show_logger(name, logger, self._imports.stderr)


class _Loader:
    """Hands over a module that has been executed; else it is the genuine loader."""

    def __init__(self, finder: Finder, name: str, module: ModuleType, genuine: ModuleSpec | None) -> None:
        self._finder = finder
        self._name = name
        self._module = module
        self._spec = genuine
        self._genuine = genuine.loader if genuine is not None else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._genuine, name)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """For isinstance()."""
        return _Loader if self._genuine is None or isinstance(self._genuine, type) else type(self._genuine)

    def create_module(self, _spec: ModuleSpec) -> ModuleType:
        """The one that there is."""
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """It has its genuine specification back when it is handed over."""
        vars(module)["__spec__"] = self._spec  # some do not let themselves be assigned to
        self._finder.hand_over(self._name)


def _set_filters(entries: Sequence[Any]) -> None:
    warnings.resetwarnings()  # the one public way to make the C code look at the list anew
    warnings.filters[:] = entries  # type: ignore[index]


def _show_logger(name: str, logger: logging.Logger, stderr: object) -> None:
    """Let it be known by its name, with what its module has set; it is the program's own, if that has made one."""
    was, logger.__dict__ = vars(logger), {}
    known = isinstance(logging.root.manager.loggerDict.get(name), logging.Logger)
    made = logging.getLogger(name)
    logger.__class__, logger.__dict__ = type(made), vars(made)
    if not known:
        logging.root.manager.loggerDict[name] = logger  # as pickling wants it
    if was["level"]:
        made.setLevel(was["level"])
    for handler in was["handlers"]:
        if vars(handler).get("stream") is stderr:  # not a property, such as that of logging.lastResort
            handler.stream = sys.stderr
        made.addHandler(handler)
    made.propagate = made.propagate and was["propagate"]
    made.disabled = made.disabled or was["disabled"]
