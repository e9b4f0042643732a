"""Faults of one rehearsal: what `--fault` and `--chaos` ask for, and what of it begins or ends now.

Who carries them out asks `due_s`, tells `passed`, `reached` and `said`, and does what these give back. The pods'
network, names and /dev/shm are disturbed by `networking`; everything else is the rehearsal's own to do.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer_launch.errors import UsageError
from trainer_launch.manifest.documents import MAX_BYTES
from trainer_launch.rehearsal import chaos as chances
from trainer_launch.rehearsal import files, grammar, targets, timeline
from trainer_launch.rehearsal.chaos import Chaos
from trainer_launch.rehearsal.fault import Fault


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `local` about faults."""
    parser.add_argument(
        "--fault",
        action="append",
        metavar="TEXT|FILE.yaml",
        help="let this go wrong, such as 'kill worker node=1 at=step:40'; may be repeated; see below",
    )
    parser.add_argument(
        "--chaos",
        metavar="TEXT",
        help="let things go wrong by chance, such as 'seed=7 rate=1/30s'; the same seed, the same faults",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to go wrong."""

    faults: tuple[Fault, ...] = ()
    chaos: Chaos | None = None

    @property
    def examples(self) -> tuple[Fault, ...]:
        """At least one fault of each kind that may come."""
        kinds = () if self.chaos is None else self.chaos.kinds
        return (*self.faults, *(Fault(kind=kind, when=grammar.KINDS[kind].first, text=kind) for kind in kinds))


NOTHING_ASKED = Asked()


def asked(flags: Mapping[str, Any]) -> Asked:
    """Read the flags, and the files that they name.

    Raises:
        UsageError: one does not fit.
    """
    faults: list[Fault] = []
    for text in flags["fault"] or ():
        faults += files.read(_text(text), text) if files.names_file(text) else [grammar.parse(text)]
    if len(faults) > files.MAX_FAULTS:
        raise UsageError(f"--fault asks for {len(faults)} faults; {files.MAX_FAULTS} are the most")
    text = flags["chaos"]
    return Asked(faults=tuple(faults), chaos=None if text is None else chances.parse(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A fault begins now, or is over."""

    fault: Fault
    pod: str | None  # None: of all
    is_over: bool = False


class Troubles:
    """What has yet to come, and what lasts. Times are monotonic seconds.

    `nodes` are the pods with an index in its order, `pods` all of the job.
    """

    def __init__(self, wanted: Asked, nodes: Sequence[str], pods: Sequence[str], began_s: float) -> None:
        self._nodes, self._pods, self._began_s = nodes, pods, began_s
        for fault in wanted.faults:  # an unknown pod is refused before anything starts
            targets.target(fault, nodes, pods)
        by_chance = None if wanted.chaos is None else wanted.chaos.over(range(len(nodes)))
        self._timeline = timeline.begin(wanted.faults, by_chance)
        self._lasting: list[tuple[float, Moment]] = []
        self._is_chaos = by_chance is not None
        self.came: list[Fault] = []  # as they would come again

    def due_s(self) -> float | None:
        """When `passed` has to be called at the latest."""
        times = [over_s for over_s, _ in self._lasting]
        due_s = timeline.due_s(self._timeline)
        return min([*times, *([] if due_s is None else [self._began_s + due_s])], default=None)

    def passed(self, now_s: float) -> list[Moment]:
        """Time has passed."""
        over = [moment for over_s, moment in self._lasting if over_s <= now_s]
        self._lasting = [(over_s, moment) for over_s, moment in self._lasting if over_s > now_s]
        return [*over, *self._step(timeline.Passed(now_s - self._began_s), now_s)]

    def reached(self, step: int, now_s: float) -> list[Moment]:
        """Some pod has reached a step."""
        return self._step(timeline.Reached(step), now_s)

    def said(self, line: str, now_s: float) -> list[Moment]:
        """Some pod has said a line."""
        return self._step(timeline.Said(line), now_s) if self._timeline.heeds_lines else []

    def rest(self) -> list[Moment]:
        """What lasts until the end is over now."""
        lasting, self._lasting = self._lasting, []
        return [moment for _, moment in lasting]

    def missed(self) -> tuple[Fault, ...]:
        """What was asked for and never came."""
        return timeline.missed(self._timeline)

    def replay(self) -> str:
        """After chaos: the flags that make the same faults come again; empty without it."""
        return chances.replay(self.came) if self._is_chaos else ""

    def _step(self, event: timeline.Event, now_s: float) -> list[Moment]:
        self._timeline, come = timeline.step(self._timeline, event)
        self.came += come
        return [self._begun(fault, now_s) for fault in come]

    def _begun(self, fault: Fault, now_s: float) -> Moment:
        moment = Moment(fault=fault, pod=targets.target(fault, self._nodes, self._pods))
        if fault.for_s is not None:
            self._lasting.append((now_s + fault.for_s, replace(moment, is_over=True)))
        return moment


def _text(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            return file.read(MAX_BYTES + 1).decode("utf-8-sig")
    except OSError as problem:
        raise UsageError(f"--fault {path} cannot be read: {problem.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"--fault {path} is no text in UTF-8") from None
