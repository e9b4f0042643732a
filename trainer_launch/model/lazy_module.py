"""A module that a package imports at once and uses seldom is loaded when something of it is used.

`importlib.util.LazyLoader` does not serve: the next `import` of such a module loads it.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


@contextlib.contextmanager
def loaded(name: str) -> Iterator[None]:
    """What imports this module meanwhile gets one that loads it at the first use; others get the module itself."""
    if name in sys.modules:
        yield
        return
    module = sys.modules[name] = _Later(name)
    try:
        yield
    finally:
        module.make_way()


class _Later(ModuleType):
    """Stands for a module that is not loaded yet."""

    def make_way(self) -> None:
        """Let the next import find the module itself."""
        if sys.modules.get(self.__name__) is self:
            del sys.modules[self.__name__]

    def __getattr__(self, name: str) -> Any:
        self.make_way()
        return getattr(importlib.import_module(self.__name__), name)
