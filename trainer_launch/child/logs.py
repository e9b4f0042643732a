"""Workers' output into the launcher's pipes: a log specification that torch elastic takes by its public API."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs


class PipedLogs(LogsSpecs):
    """Send each worker's stdout and stderr to given paths, by local rank; leave all else to `inner`.

    Streams that the user redirects or tees with torchrun's own options keep going there.
    """

    def __init__(self, paths: list[list[str]], inner: LogsSpecs) -> None:
        super().__init__()
        self._paths = paths
        self._inner = inner

    @property
    def root_log_dir(self) -> str:
        """Where torch keeps its error files."""
        return self._inner.root_log_dir

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """The destinations of one start of the workers."""
        to = self._inner.reify(envs)
        out = {rank: to.stdouts[rank] or self._paths[rank][0] for rank in range(len(envs))}
        err = {rank: to.stderrs[rank] or self._paths[rank][1] for rank in range(len(envs))}
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
