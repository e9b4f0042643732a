"""`sitecustomize`, `usercustomize` and `import` lines of .pth files: run in each worker, not in the fork server.

The server is started with -S. It adds to `sys.path` what `site` would add, but executes nothing except the lines by
which editable installs are found. A forked worker goes back to where an interpreter is before it imports `site`.
"""

from __future__ import annotations

import builtins
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_BUILTINS = ("copyright", "credits", "exit", "help", "license", "quit")  # what site adds


class Site:
    """An interpreter before it imports `site`."""

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
        site.main()
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
        import site  # noqa: F401  it runs main()

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
