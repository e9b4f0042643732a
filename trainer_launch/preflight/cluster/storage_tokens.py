"""A node's tokens in the folders that may be shared: left, looked for and removed by children that may hang."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from trainer_launch.host.deadline_call import Tried
from trainer_launch.preflight.cluster.shared_storage import SEEK_S

_LEAVE_S = 8.0
_ABREAST = 8


class Tokens:
    """Those of one node."""

    def __init__(self, folders: Sequence[str], rank: int, try_out: Callable[[str, str, float], Tried]) -> None:
        self._folders, self._rank, self._try_out = folders, rank, try_out
        self._salt = ""

    def leave(self, salt: str) -> None:
        """Leave them under a name that only this cluster preflight has; where that fails, others do not find it."""
        self._salt = salt
        tried = self._in_each("leave", (self._name(str(self._rank)),), _LEAVE_S)
        self._folders = [folder for folder, its in tried.items() if not its.timed_out]  # one hang is enough

    def seek(self, others: Sequence[str]) -> dict[str, str]:
        """By folder, whose tokens are there; a folder that could not be looked into is left out."""
        tried = self._in_each("seek", [self._name(other) for other in others], SEEK_S)
        return {
            folder: ",".join(other for other in others if its.values.get(self._name(other)))
            for folder, its in tried.items()
            if its.is_good
        }

    def remove(self) -> None:
        """Once is enough."""
        if self._salt:
            self._in_each("remove", (self._name(str(self._rank)),), _LEAVE_S)
        self._salt = ""

    def _name(self, of: str) -> str:
        return f".trainer-launch-token-{self._salt}-{of}"

    def _in_each(self, what: str, names: Sequence[str], limit_s: float) -> Mapping[str, Tried]:
        if not self._folders:
            return {}
        words = [json.dumps({"folder": folder, "names": list(names)}) for folder in self._folders]
        with ThreadPoolExecutor(_ABREAST) as pool:
            tried = pool.map(lambda word: self._try_out(what, word, limit_s), words)
            return dict(zip(self._folders, tried, strict=True))
