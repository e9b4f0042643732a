"""What a picture of the pair tests shows, as values for preflight/children/heatmap.py. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer_launch.model import Json
from trainer_launch.model.units import counted
from trainer_launch.preflight.cluster.comparison import listed
from trainer_launch.preflight.cluster.pair_results import MBYTE, Tested
from trainer_launch.preflight.fault_isolation import Guilty, Pair


@dataclass(frozen=True, slots=True)
class Seen:
    """All pair tests of a cluster preflight, and who they found faulty; nodes by their place in `names`."""

    names: tuple[str, ...] = ()
    tests: tuple[Tested, ...] = ()
    guilty: Guilty = field(default_factory=Guilty)


def drawing(seen: Seen) -> dict[str, Json]:
    """Each pair once, with the slowest of its tests in MB/s, or null where one failed."""
    worst: dict[Pair, float | None] = {}
    for test in seen.tests:
        rate = test.rate / MBYTE if test.is_whole else None
        before = worst.get(test.ends, rate)
        worst[test.ends] = None if rate is None or before is None else min(rate, before)
    links = [link.ends for link in seen.guilty.links]
    return {
        "title": _title(seen),
        "names": list(seen.names),
        "tests": [[one, other, rate] for (one, other), rate in worst.items()],
        "faulty": [*seen.guilty.nodes, *(node for node, _ in seen.guilty.rails)],
        "links": [list(ends) for ends in (*links, *seen.guilty.unresolved)],
    }


def _title(seen: Seen) -> str:
    names = seen.names
    blamed = [names[node] for node in seen.guilty.nodes]
    blamed += [f"{names[node]}, rail {', '.join(map(str, rails))}" for node, rails in seen.guilty.rails]
    blamed += [f"{names[link.ends[0]]} - {names[link.ends[1]]}" for link in seen.guilty.links]
    blamed += [f"{names[one]} - {names[other]} (unresolved)" for one, other in seen.guilty.unresolved]
    what = f"faulty: {listed(blamed)}" if blamed else "no fault found"
    return f"Bandwidth between {len(names)} nodes, {counted(len(seen.tests), 'test')}: {what}"
