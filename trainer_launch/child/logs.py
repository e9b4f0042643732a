"""Workers' output into the launcher's pipes by torch's log specifications."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs


class PipedLogs(LogsSpecs):
    """Send each worker's stdout and stderr to given paths (None: inherited), by local rank; the rest is `inner`'s.

    Streams that the user redirects or tees with torchrun's own options keep going there.
    """

    def __init__(self, paths: list[list[str | None]], inner: LogsSpecs) -> None:
        super().__init__()
        self._paths = paths
        self._inner = inner
        self.instead: dict[int, list[str | None]] | None = None  # told in place of torch: it opens no pipes

    @property
    def root_log_dir(self) -> str:
        """Where torch keeps its error files."""
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The destinations of one start of the workers."""
        to = self._inner.reify(envs)
        if self.instead is not None:
            for rank, (out_path, err_path) in enumerate(self._paths):
                self.instead[rank] = [
                    None if to.stdouts.get(rank) else out_path,
                    None if to.stderrs.get(rank) else err_path,
                ]
            return to
        out = {rank: to.stdouts[rank] or self._paths[rank][0] or "" for rank in range(len(envs))}
        err = {rank: to.stderrs[rank] or self._paths[rank][1] or "" for rank in range(len(envs))}
        return replace(to, stdouts=out, stderrs=err)


class BeforeEachStart(LogsSpecs):
    """Call these functions before each start of the workers, with their environments by local rank.

    torch asks its log specification for the destinations of every start, and offers no other place to stand in.
    """

    def __init__(self, calls: Sequence[Callable[[dict[int, dict[str, str]]], None]], inner: LogsSpecs) -> None:
        super().__init__()
        self._calls = calls
        self._inner = inner

    @property
    def root_log_dir(self) -> str:
        """Where torch keeps its error files."""
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The inner one's destinations, after the calls."""
        for call in self._calls:
            call(envs)
        return self._inner.reify(envs)
