"""What each import brings: noted in the fork server, so that forked workers see it when their program imports it.

This module imports only what every interpreter has when it starts, because all that it imports goes unnoted.
"""

from __future__ import annotations

import _warnings
import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from collections.abc import Iterable, Mapping
    from typing import Any

# What is never handed over: ours, the main module, and what each interpreter runs when it starts.
_APART = ("trainer_launch", "__main__", "__mp_main__", "site", "sitecustomize", "usercustomize")


class Imports:
    """What has been imported; each dict is in the order in which things appeared."""

    modules: dict[str, Any]
    needs: dict[str, set[str]]  # what importing a module imports itself
    filters: list[tuple[Any, str]]  # of the warnings module, with the module that added each
    fresh_filters: list[Any]
    loggers: dict[str, tuple[logging.Logger, str]]
    environment: dict[str, str]
    path: list[str]
    stderr: object
    detached: list[tuple[Any, str, Any]]  # attributes that packages have for submodules which they do not import
    known: dict[str, tuple[str, ...]]  # `brought` by these, found before the fork
    _order: dict[str, int]

    def __init__(self, modules: dict[str, Any], needs: dict[str, set[str]]) -> None:
        """Modules in the order in which they appeared."""
        self.modules, self.needs = modules, needs
        self.known = {}
        self._order = {name: at for at, name in enumerate(modules)}

    def learn(self, names: Iterable[str]) -> None:
        """Find out now what importing these will bring: it takes longer than all the rest of handing them over."""
        self.known = {name: self.brought(name) for name in names}

    def brought(self, name: str) -> tuple[str, ...]:
        """All modules that importing this one brings, with itself, in the order in which they appeared."""
        return self.known.get(name) or tuple(sorted(self.closure(name), key=self._order.__getitem__))

    def closure(self, name: str) -> set[str]:
        """All modules that importing this one brings, with itself."""
        found: set[str] = set()
        ahead = [name]
        while ahead:
            name = ahead.pop()
            if name in self.modules and name not in found:
                found.add(name)
                ahead += self.needs.get(name, set()) - found
                ahead.append(name.rpartition(".")[0])
        return found

    def unneeded(self) -> list[str]:
        """The modules that importing their package does not bring; those of Python's library we use ourselves."""
        found, brought = [], dict[str, set[str]]()
        for name in self.modules:
            parent, top = name.rpartition(".")[0], name.partition(".")[0]
            if parent in self.modules and top not in sys.stdlib_module_names:
                if top not in brought:
                    brought[top] = self.closure(top)
                if name not in brought[top] and parent not in brought:
                    brought[parent] = self.closure(parent)
                if name not in brought[top] and name not in brought[parent]:
                    found.append(name)
        return found


class Recorder:
    """Notes imports from now on; `fresh` are the modules that an interpreter has when it starts."""

    def __init__(self, fresh: Iterable[str]) -> None:
        self._fresh = frozenset(fresh)
        self._filters = list(_warnings.filters)
        self._owners: dict[int, tuple[Any, str]] = {}
        self._seen: tuple[Any, int, Any] = (None, 0, None)  # the list of filters, its length and its first entry
        self._importing = [""]
        self._loggers: dict[str, str] = {}
        self._imports: list[tuple[str, str, tuple[str, ...], list[str]]] = []
        self._genuine: Any = builtins.__import__
        names: Any = builtins
        names.__import__ = self._import

    def _import(
        self,
        name: str,
        globals: Mapping[str, Any] | None = None,  # noqa: A002
        locals: Mapping[str, Any] | None = None,  # noqa: A002
        fromlist: tuple[str, ...] | None = (),
        level: int = 0,
    ) -> Any:
        importer = (globals or {}).get("__name__") or ""
        is_loaded = not getattr((globals or {}).get("__spec__"), "_initializing", True)
        if locals is not globals or is_loaded or importer.startswith("importlib."):
            # What a function imports, or an extension module, belongs to the import during which that happens. C
            # code imports in the name of the module that has called it, which typing does from Python 3.14 on.
            importer = self._importing[-1]
        full = _absolute(name, globals or {}, level) if level else name
        self._note(importer)
        known = len(sys.modules)
        self._importing.append(full)
        try:
            return self._genuine(name, globals, locals, fromlist or (), level)
        finally:
            self._importing.pop()
            new = list(sys.modules)[known:] if len(sys.modules) > known else []
            if not importer.startswith(_APART[0]):
                self._imports.append((importer, full, tuple(fromlist or ()), new))
            self._note(full)

    def _note(self, owner: str) -> None:
        """Whatever has appeared since the last look is this module's."""
        filters: Any = getattr(sys.modules.get("warnings"), "filters", ())
        was, length, first = self._seen
        # Called tens of thousands of times: a filter is put in front, or is the list's last.
        if filters and (filters is not was or len(filters) != length or filters[0] is not first):
            self._seen = (filters, len(filters), filters[0])
            for entry in filters:
                self._owners.setdefault(id(entry), (entry, owner))
        root: Any = getattr(sys.modules.get("logging"), "root", None)
        if root is not None and len(root.manager.loggerDict) > len(self._loggers):
            loggers = root.manager.loggerDict
            self._loggers.update({name: owner for name in loggers if name not in self._loggers})

    def stop(self, path: list[str]) -> Imports:
        """Stop, and tell; `path` is the one that modules have come from."""
        builtins.__import__ = self._genuine
        modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in self._fresh and name.partition(".")[0] not in _APART
        }
        needs: dict[str, set[str]] = {}
        for importer, full, attributes, new in self._imports:
            needed = needs.setdefault(importer, set())
            needed.add(full)
            for name in attributes:
                needed.add(f"{full}.{name}")
            if new:
                needs.setdefault(full, set()).update(new)
        made = Imports(modules, needs)
        filters = sys.modules["warnings"].filters if "warnings" in sys.modules else []
        made.fresh_filters = self._filters
        made.filters = [self._owners[id(entry)] for entry in filters if entry not in self._filters]
        manager = sys.modules["logging"].root.manager if "logging" in sys.modules else None
        made.loggers = {
            name: (manager.loggerDict[name], owner)
            for name, owner in self._loggers.items()
            if manager and hasattr(manager.loggerDict.get(name), "handlers")
        }
        made.environment = dict(sys.modules["os"].environ)
        made.path = path
        made.stderr = sys.stderr
        made.detached = []
        for name in made.unneeded():
            package, child = made.modules[name.rpartition(".")[0]], name.rpartition(".")[2]
            if vars(package).get(child) is made.modules[name]:
                made.detached.append((package, child, made.modules[name]))
        return made


def _absolute(name: str, names: Mapping[str, Any], level: int) -> str:
    package = names.get("__package__") or names.get("__name__", "")
    if not names.get("__package__") and "__path__" not in names:
        package = package.rpartition(".")[0]
    base = package.rsplit(".", level - 1)[0] if level > 1 else package
    return f"{base}.{name}" if name else base


# -- what `site` executes ----------------------------------------------------------------------

_BUILTINS = ("copyright", "credits", "exit", "help", "license", "quit")  # what site adds


class Site:
    """An interpreter before it imports `site`: `sitecustomize`, `usercustomize` and `import` lines of .pth files.

    They run in each worker, not in the fork server, which is started with -S. It adds to `sys.path` what `site`
    would add, but executes nothing except the lines by which editable installs are found.
    """

    def __init__(self, path: list[str], ours: str) -> None:
        """Prepare the fork server; `path` is sys.path as the interpreter made it, `ours` where our package is."""
        self._path = path
        self._prefixes = (sys.prefix, sys.exec_prefix)
        self._finders: list[Any] = list(sys.meta_path)
        self._hooks: list[Any] = list(sys.path_hooks)
        sys.path[:] = path
        import ctypes
        import site

        self._ctypes = ctypes

        names: Any = site
        names.exec = _execute  # found before the builtin one
        names.execsitecustomize = names.execusercustomize = _nothing
        before = frozenset(sys.modules)
        site.main()
        self._codecs = [name for name in sys.modules if name.startswith("encodings.") and name not in before]
        self._finders = [finder for finder in sys.meta_path if finder not in self._finders]
        self._hooks = [hook for hook in sys.path_hooks if hook not in self._hooks]
        del sys.modules["site"]
        self.path = list(sys.path)  # that the program will have, without its own directory
        sys.path.append(ours)

    def run(self) -> None:
        """In a forked worker: import `site` as a new interpreter does."""
        sys.path[:] = self._path
        sys.prefix, sys.exec_prefix = self._prefixes
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder not in self._finders]
        sys.path_hooks[:] = [hook for hook in sys.path_hooks if hook not in self._hooks]
        for name in _BUILTINS:
            vars(builtins).pop(name, None)
        self._clear_no_site()
        sys.modules.pop("site", None)  # libraries of CUDA, which torch imports, import it
        import site  # noqa: F401  it runs main()

        for name in self._codecs:  # of .pth files: the interpreter has them already, and imports them once only
            __import__(name)

    def _clear_no_site(self) -> None:
        """sys.flags says -S; what the program starts with the same flags would have no site-packages."""
        kind: Any = type(sys.flags)
        python = self._ctypes.pythonapi
        flags, zero = self._ctypes.py_object(sys.flags), self._ctypes.py_object(0)
        python.Py_IncRef(zero)  # the flags own it
        python.PyStructSequence_SetItem(flags, kind.__match_args__.index("no_site"), zero)


def _execute(line: str) -> None:
    """A line of a .pth file: only one that makes modules found, which forked workers repeat without harm."""
    if "editable" in line.partition(";")[0]:
        exec(line)


def _nothing() -> None:
    pass
