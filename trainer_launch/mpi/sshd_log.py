"""What sshd logs of connections that end before an SSH banner: each readiness probe causes two lines."""

from __future__ import annotations

import logging
import re

_FIRST = re.compile(
    rb"kex_exchange_identification: (?:read: )?Connection (?:closed by remote host|reset by peer)\s*"
)
# With "[preauth]" or a user's name the client has gone further: those lines stay.
_SECOND = re.compile(rb"Connection (?:closed|reset) by (\S+) port \d+\s*")
_ADDRESSES = 8  # that are named
_LINE_BYTES = 4096
_log = logging.getLogger(__name__)


class Unheard:
    """Takes these pairs of lines out of sshd's log, counts them, and names each address once."""

    def __init__(self) -> None:
        self.count = 0
        self._open = 0  # first lines whose second has not come
        self._rest = b""  # the beginning of a line
        self._addresses: set[bytes] = set()

    def __call__(self, data: bytes) -> bytes:
        """Return the lines to show of what sshd has written; an unfinished line waits for its end."""
        *lines, rest = (self._rest + data).split(b"\n")
        if not data or len(rest) > _LINE_BYTES:  # no end will come, or it is no line of sshd's
            lines, rest = [*lines, rest], b""
            return b"\n".join(line for line in lines if not self._is_hidden(line))
        self._rest = rest
        return b"".join(line + b"\n" for line in lines if not self._is_hidden(line))

    def _is_hidden(self, line: bytes) -> bool:
        if _FIRST.fullmatch(line):
            self._open += 1
            return True
        found = _SECOND.fullmatch(line) if self._open else None
        if found is None:
            return False
        self._open -= 1
        self.count += 1
        self._name(found[1])
        return True

    def _name(self, address: bytes) -> None:
        if address in self._addresses or len(self._addresses) == _ADDRESSES:
            return
        self._addresses.add(address)
        _log.info(
            "%s connects and leaves before an SSH banner, as readiness probes do: not logged again "
            "(--log-level debug shows all)",
            address.decode(errors="replace"),
        )
