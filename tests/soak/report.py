"""Sum up a soak's ledger, also while it runs: `python -m tests.soak.report FOLDER`; 1 when something was wrong."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.soak.growth import fit
from tests.soak.judging import histories
from tests.soak.looking import Look, Process

Line = Mapping[str, Any]


def read(folder: Path) -> list[Line]:
    """The ledger's whole lines."""
    text = (folder / "ledger.jsonl").read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def summary(lines: Sequence[Line]) -> str:
    """What a person wants to know first."""
    begun, last = lines[0], lines[-1]
    state = "has ended" if last["what"] == "ends" else "is running, or was ended from outside"
    wrong = [line for line in lines if line["what"] == "violation"]
    troubles = [line for line in lines if line["what"] == "recovered"]
    episodes = [line for line in lines if line["what"] == "episode begins"]
    jobs = [line["contract"] for line in episodes]
    told = [
        f"soak of seed {begun['seed']}, {begun['minutes']:g} min, process {begun['pid']}: {state} after "
        f"{last['seconds'] / 60:.1f} min",
        f"{len(episodes)} jobs ({', '.join(jobs)}), {len(troubles)} troubles, "
        f"{sum(line['charges'] for line in troubles)} failures charged, "
        f"{sum(len(codes) for line in troubles for codes in line['codes'])} pods started again, "
        f"{sum(line['starts'] for line in troubles)} starts of workers, {len(wrong)} violations",
    ]
    if troubles:
        waits = [line["stalled_s"] for line in troubles]
        told.append(
            f"a thread of the soak itself waited up to {max(waits):.1f} s for a processor, in the median trouble "
            f"{statistics.median(waits):.1f} s"
        )
    told += [f"  {line['utc']}  {line['text'][:300]}" for line in wrong]
    told += ["", *_costs(troubles), "", *_memory(lines)]
    if "cores" in last:
        told.append(f"\n{last['cores']} cores used on average")
    return "\n".join(told) + "\n"


def _costs(troubles: Sequence[Line]) -> list[str]:
    kinds = defaultdict(list)
    for line in troubles:
        names = " + ".join(fault[0] for fault in line["faults"])
        kinds[names if len(line["faults"]) == 1 else "two at a time"].append(line)
    table = [f"{'':28} {'times':>5} {'median s':>9} {'worst s':>8}   longest time without a new step"]
    for name, group in sorted(kinds.items()):
        longest = [line["longest_s"] for line in group]
        table.append(f"{name:28} {len(group):5} {statistics.median(longest):9.1f} {max(longest):8.1f}")
    return table


def _memory(lines: Sequence[Line]) -> list[str]:
    """Lines through the memory of the processes that lived long, a job's at a time: pids may come again."""
    table = [
        f"{'':28} {'looks':>5} {'min':>5} {'MiB at first':>12} {'KiB/h':>8}   memory of those that lived longest"
    ]
    number, looks = -1, defaultdict[int, list[Look]](list)
    for line in lines:
        if line["what"] == "episode begins":
            number = line["number"]
        elif line["what"] == "look":
            looks[number] += [_look(values) for values in line["pods"]]
    for number, some in looks.items():
        best: dict[str, tuple[float, str]] = {}
        for (node, role, _), history in histories(some).items():
            straight = fit([(at_s, process.memory_kb) for at_s, process in history])
            if straight is not None and straight.seconds > best.get(role, (0.0, ""))[0]:
                first, minutes = straight.first / 1024, straight.seconds / 60
                row = f"{straight.samples:5} {minutes:5.1f} {first:12.1f} {straight.per_hour:8.0f}"
                best[role] = straight.seconds, f"{f'job {number}, pod {node}, {role}':28} {row}"
        table += [row for _, row in best.values()]
    return table


def _look(values: Line) -> Look:
    return Look(**{**values, "long_lived": tuple(Process(**process) for process in values["long_lived"])})


def counts(lines: Sequence[Line]) -> Counter[str]:
    """How many lines there are of each kind."""
    return Counter(line["what"] for line in lines)


def main() -> int:
    """The command."""
    lines = read(Path(sys.argv[1]))
    sys.stdout.write(summary(lines))
    return min(1, counts(lines)["violation"])


if __name__ == "__main__":
    sys.exit(main())
