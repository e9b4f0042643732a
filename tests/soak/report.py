"""Sum up a soak's ledger, also while it runs: `python -m tests.soak.report FOLDER`; 1 when something was wrong."""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    told += [f"  {line['utc']}  {line['text'][:300]}" for line in wrong]
    told += ["", *_costs(troubles)]
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
