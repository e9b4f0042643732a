"""The coordinator's part in goodput: a newcomer goes on with the ledger of the job. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from trainer_launch.membership.notes import Joined, Judge
from trainer_launch.observability.goodput import LONGEST_S, TRAINING, LedgerSummary, TrainingStatus
from trainer_launch.supervisor.run_observer import TimeKind


class TrainingJudge(Judge, frozen=True, kw_only=True):
    """Hands newcomers the ledger of a node that was in the job before."""

    topic: ClassVar[str] = TRAINING
    carried = LedgerSummary
    shown: Callable[[], TrainingStatus] = TrainingStatus

    def form(self, joined: Sequence[Joined], now_s: float) -> Mapping[int, LedgerSummary]:
        """The ledger of the first node that was in the job before, at its beginning the longest one."""
        reporting = [node for node in joined if node.body is not None and _sum_s(node.body) < LONGEST_S]
        lasted = {node.number: _sum_s(node.body) + now_s - node.heard_s for node in reporting}
        source = next((node for node in reporting if not node.is_new), None)
        source = source or max(reporting, key=lambda node: lasted[node.number], default=None)
        if source is None:
            return {}
        spent_s = source.body.spent_s
        waited_s = spent_s.get(TimeKind.WAITING, 0.0) + max(0.0, now_s - source.heard_s)
        steps = [node.body.step for node in reporting if node.body.step is not None]
        ledger = LedgerSummary({**spent_s, TimeKind.WAITING: waited_s}, max(steps, default=None))
        return {node.number: ledger for node in joined if node.is_new and node is not source}

    def status(self, now_s: float) -> TrainingStatus:
        """The training."""
        return self.shown()


def _sum_s(ledger: LedgerSummary) -> float:
    return sum(ledger.spent_s.values())
