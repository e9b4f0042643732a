"""Ranks of a training job that enter collectives, without processes: what each one's flight recorder would have."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from trainer_launch.diagnosis.collectives import Entries
from trainer_launch.diagnosis.flight_recorder import entered
from trainer_launch.diagnosis.lateness import Lateness, Timeline, judge
from trainer_launch.model.codec import decode, encode

Op: TypeAlias = "tuple[Any, ...]"
START_S = 1.7e9
ALL = "all"


def work(seconds: float) -> Op:
    """Compute."""
    return ("work", seconds)


def enter(group: str = ALL, size: int = 4, *, waits: bool = True) -> Op:
    """Enter an all_reduce; without `waits` it ends in `end`."""
    return ("enter", group, size, waits)


END: Op = ("end",)  # wait for all that were entered


def send(peer: int) -> Op:
    """Point to point, buffered."""
    return ("send", peer)


def receive(peer: int, *, is_recorded: bool = False) -> Op:
    """Wait for the peer's next `send`."""
    return ("receive", peer, is_recorded)


class Job:
    """Plays each rank's operations; `step(rank, number)` gives those of one step."""

    def __init__(
        self,
        ranks: int,
        step: Callable[[int, int], list[Op]],
        steps: int = 40,
        groups: Mapping[str, tuple[int, ...]] | None = None,
    ) -> None:
        self.groups = {ALL: tuple(range(ranks)), **(groups or {})}
        self.recorded: list[list[dict[str, Any]]] = [[] for _ in range(ranks)]
        self.hidden: set[int] = set()  # ranks that receive what is not recorded
        self._now = [START_S] * ranks
        self._counts: list[defaultdict[str, int]] = [defaultdict(int) for _ in range(ranks)]
        self._inside: defaultdict[tuple[str, int], dict[int, float]] = defaultdict(dict)
        self._sent: defaultdict[tuple[int, int], list[float]] = defaultdict(list)
        running = {rank: self._play(rank, step, steps) for rank in range(ranks)}
        while running:
            for rank, one in list(running.items()):
                for is_ready in one:
                    if not is_ready:
                        break
                else:
                    del running[rank]

    def _play(self, rank: int, step: Callable[[int, int], list[Op]], steps: int) -> Iterator[bool]:
        entered: list[tuple[str, int]] = []
        for number in range(steps):
            for op in step(rank, number):
                match op:
                    case ("work", seconds):
                        self._now[rank] += max(0.0, seconds)
                    case ("enter", group, size, waits):
                        entered.append(self._enter(rank, group, size))
                        if waits:
                            yield from self._finish(rank, entered)
                    case ("end",):
                        yield from self._finish(rank, entered)
                    case ("send", peer):
                        self._sent[rank, peer].append(self._now[rank])
                    case ("receive", peer, is_recorded):
                        yield from self._receive(rank, peer, is_recorded=is_recorded)

    def _enter(self, rank: int, group: str, size: int) -> tuple[str, int]:
        self._counts[rank][group] += 1
        number = self._counts[rank][group]
        self._record(rank, group, number, size)
        self._inside[group, number][rank] = self._now[rank]
        return group, number

    def _record(self, rank: int, group: str, number: int, size: int, *, is_p2p: bool = False) -> None:
        self.recorded[rank].append(
            {
                "process_group": (group, ""),
                "collective_seq_id": number,
                "profiling_name": "nccl:send" if is_p2p else "gloo:all_reduce",
                "input_sizes": ((size,),),
                "is_p2p": is_p2p,
                "time_created_ns": int(self._now[rank] * 1e9),
            }
        )

    def _finish(self, rank: int, entered: list[tuple[str, int]]) -> Iterator[bool]:
        for key in entered:
            while len(self._inside[key]) < len(self.groups[key[0]]):
                yield False
            self._now[rank] = max(self._now[rank], *self._inside[key].values())
        entered.clear()
        yield True

    def _receive(self, rank: int, peer: int, *, is_recorded: bool) -> Iterator[bool]:
        if is_recorded:
            self._record(rank, ALL, self._counts[rank][ALL], 1, is_p2p=True)
        else:
            self.hidden.add(rank)
        while not self._sent[peer, rank]:
            yield False
        self._now[rank] = max(self._now[rank], self._sent[peer, rank].pop(0))

    # -- as the coordinator gets it -----------------------------------------------------------

    def entries(self, rank: int, most: int = 512) -> Entries:
        """What the rank's worker answers, in JSON and back."""
        members = {name: ("", ranks) for name, ranks in self.groups.items() if rank in ranks}
        told = Entries(rank=rank, hides_messages=rank in self.hidden)
        values = entered(self.recorded[rank], members, most)
        values["groups"] = [tuple(one) for one in values["groups"]]
        return decode(Entries, json.dumps({**json.loads(encode(told)), **values}))

    def timelines(self, nodes: Callable[[int], int] = lambda rank: 0, **options: Any) -> list[Timeline]:
        """Of all ranks, by a clock that they share."""
        return [Timeline(self.entries(rank, **options), nodes(rank)) for rank in range(len(self.recorded))]

    def late(self, nodes: Callable[[int], int] = lambda rank: 0, **options: Any) -> dict[int, Lateness]:
        """What one sample tells, by rank."""
        return {one.rank: one for one in judge(self.timelines(nodes, **options))}

    def stragglers(self, **options: Any) -> set[int]:
        """Against whom one sample speaks."""
        return {rank for rank, one in self.late(**options).items() if one.is_straggler}


def jitter(seed: int, part: float) -> Callable[[int, int, float], float]:
    """Seconds that vary by such a part, the same for the same rank and step."""

    def vary(rank: int, number: int, seconds: float) -> float:
        return seconds * random.Random(f"{seed} {rank} {number}").uniform(1 - part, 1 + part)

    return vary
