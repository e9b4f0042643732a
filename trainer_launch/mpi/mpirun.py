"""mpirun as a child: started, heard, signalled, and collected."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from trainer_launch.host import process_tree
from trainer_launch.mpi.mpirun_messages import Said, heard
from trainer_launch.mpi.tapped_child import LINE_BYTES, STDERR, Listened

_LAST_LINES = 60
_LOOK_S = 1.0
_RULER = "----"  # around mpirun's own messages


class Mpirun:
    """One start, which is listened to."""

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        *,
        is_hydra: bool,
        lost: Callable[[str], None],
        ended: Callable[[int, Said, tuple[str, ...]], None],
    ) -> None:
        """Start; `lost` and `ended` are called from threads. Hydra says on stdout how ranks ended.

        Raises:
            NotRunnableError: there is no such program.
        """
        self._lost, self._ended = lost, ended
        self._lock = threading.Lock()
        self._said = Said()
        self._lines: deque[str] = deque(maxlen=_LAST_LINES)
        self._child = Listened(argv, env, hear=self._hear, over=self._over, hears_stdout=is_hydra)
        self.pid, self.signal = self._child.pid, self._child.signal

    def watch(self, hosts: Sequence[str], gone: Callable[[Sequence[str]], None]) -> None:
        """Tell, from a thread, when its ways to hosts are gone: Hydra has an ssh for each, and does not care."""
        threading.Thread(target=self._watch, args=(hosts, gone), daemon=True).start()

    # -- in threads ---------------------------------------------------------------------------

    def _hear(self, text: str, ours: int) -> None:
        with self._lock:
            before = self._said.lost
            self._said = heard(self._said, text)
            if text and ours == STDERR and not text.startswith(_RULER):
                self._lines.append(text)
            lost = self._said.lost
        if lost is not None and before is None:
            self._lost(lost)

    def _over(self, code: int) -> None:
        with self._lock:
            said, lines = self._said, tuple(self._lines)
        self._ended(code, said, lines)

    def _watch(self, hosts: Sequence[str], gone: Callable[[Sequence[str]], None]) -> None:
        before: set[str] = set()
        while not self._child.is_over.wait(_LOOK_S):
            now = self._reached() & set(hosts)
            if before - now:
                gone(sorted(before - now))
            before = now

    def _reached(self) -> set[str]:
        """The words of all command lines below mpirun; a host's name is one of them."""
        words: set[str] = set()
        for entry in process_tree.descendants(self.pid):
            with contextlib.suppress(OSError), open(f"/proc/{entry.pid}/cmdline", "rb") as file:
                words.update(file.read(LINE_BYTES).decode(errors="replace").split("\0"))
        return words
