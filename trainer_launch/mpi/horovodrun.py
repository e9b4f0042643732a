"""horovodrun as a child: started, heard, signalled, and collected."""

from __future__ import annotations

import re
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from trainer_launch.mpi import horovod
from trainer_launch.mpi.mpirun_messages import Said
from trainer_launch.mpi.tapped_child import Listened

_LAST_LINES = 400  # of all ranks together
_KEPT_LINES = 60
_OF_RANK = re.compile(r"^\[(\d{1,6})\]<(?:stdout|stderr)>:(.*)", re.DOTALL)


class Horovodrun:
    """One start, which is listened to."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        is_elastic: bool,
        ended: Callable[[int, Said, tuple[str, ...]], None],
    ) -> None:
        """Start; `ended` is called from a thread.

        Raises:
            NotRunnableError: there is no such program.
        """
        self._is_elastic, self._ended = is_elastic, ended
        self._lock = threading.Lock()
        self._said = Said()
        self._lines: deque[tuple[int | None, str]] = deque(maxlen=_LAST_LINES)  # rank, what it said
        self._child = Listened(argv, env, hear=self._hear, over=self._over, stdin=subprocess.DEVNULL)
        self.pid = self._child.pid

    def signal(self, number: int) -> None:
        """Signal horovodrun; a SIGKILL meets what it has started on this host as well, its ssh sessions first."""
        self._child.signal(number, below_first=True)

    # -- in threads ---------------------------------------------------------------------------

    def _hear(self, text: str, _: int) -> None:
        if not text:
            return
        of_rank = _OF_RANK.match(text)
        with self._lock:
            self._said = horovod.heard(self._said, text, is_elastic=self._is_elastic)
            self._lines.append((int(of_rank[1]), of_rank[2]) if of_rank else (None, text))

    def _over(self, code: int) -> None:
        with self._lock:
            said, lines = self._said, tuple(self._lines)
        whose = said.rank  # Horovod's own traceback says nothing of the cause where a rank has failed
        kept = tuple(text for rank, text in lines if rank == whose)[-_KEPT_LINES:]
        self._ended(code, said, kept)
