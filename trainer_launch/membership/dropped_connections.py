"""What a server says of connections that it drops."""

from __future__ import annotations

from collections.abc import Callable

_MANY = 50


class Complaints:
    """Say each one once: a flood of strangers must not become a flood of lines."""

    def __init__(self, whose: str, log: Callable[[str], None]) -> None:
        self._whose = whose
        self._log = log
        self._said: set[str] = set()

    def __call__(self, why: str, address: str) -> None:
        """Say that a connection from this address was dropped, and why, unless the same was said before."""
        if why not in self._said and len(self._said) < _MANY:
            self._said.add(why)
            self._log(f"{self._whose}: dropped a connection from {address}: {why} (said once)")
