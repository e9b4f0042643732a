"""What each fault costs a job of three pods: seconds until it trains again, and how often each pod was started.

    python benchmarks/survival.py                                  all rows, ours and torchrun's; about 40 minutes
    python benchmarks/survival.py --who ours --repeats 20 --rows worker-1,pod-1 --contracts fixed

Each pod has its own network, host name and process namespace, one worker, gloo; a checkpoint each step; a kubelet
starts a failed pod again after 3 s. Both are the pod's process 1. Needs root, iproute2 and util-linux.

Measured is the time from the fault to the first step of the workers' next start in which all take part that should
(for a node lost for good: the others). An elastic job may go on with fewer before that: that time stands behind it.
`+2.1` is what is left of it after a pod's own absence, which ends when its container is started again.
"""

from __future__ import annotations

import argparse
import functools
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # the survival tests have the pods, the kubelet and the faults

from benchmarks.startup import machine  # noqa: E402
from tests.cli.launching import LAUNCHER  # noqa: E402
from tests.hosts import network  # noqa: E402
from tests.survival import jobs  # noqa: E402
from tests.survival.kubelet import Job, pods_of  # noqa: E402

HANG_TIMEOUT_S = "5"
CONTRACTS = {"fixed": jobs.FIXED, "elastic": jobs.ELASTIC}
WHO = {
    "ours": "this project",
    "torchrun": "torchrun, its defaults",
    "expert": "torchrun, as an expert sets it",
}
EXPERT = {
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "PET_RDZV_CONF": "last_call_timeout=1,keep_alive_interval=1",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A fault, and what is asked of this project."""

    text: str
    fault: jobs.Fault
    starts: str
    limit_s: float | None  # beyond the absence of the pod `away`; None: however long it takes
    away: int | None = None
    before: int = 3  # workers that train before the fault, and after it
    after: int = 3
    is_elastic: bool = False

    @property
    def target(self) -> str:
        beyond = "" if self.away is None else "absence + "
        return "recovers" if self.limit_s is None else f"≤ {beyond}{self.limit_s:g} s, {self.starts}"


def _away(node: int, text: str, fault: jobs.Fault) -> Row:
    return Row(text=text, fault=fault, starts=("2/1/1", "1/2/1")[node], limit_s=2.0, away=node)


ROWS = {
    "worker-1": Row(text="worker of node 1 SIGKILLed", fault=jobs.kill_worker(1), starts="1/1/1", limit_s=1.5),
    "worker-0": Row(text="worker of node 0 SIGKILLed", fault=jobs.kill_worker(0), starts="1/1/1", limit_s=1.5),
    "pod-1": _away(1, "pod of node 1 killed", jobs.kill_pod(1)),
    "pod-0": _away(0, "pod of node 0 killed", jobs.kill_pod(0)),
    "term-1": _away(1, "pod of node 1 gets SIGTERM", jobs.stop_pod(1)),
    "term-0": _away(0, "pod of node 0 gets SIGTERM", jobs.stop_pod(0)),
    "new-ip-1": _away(1, "node 1 comes back with a new IP", jobs.move_pod(1)),
    "new-ip-0": _away(0, "node 0 comes back with a new IP", jobs.move_pod(0)),
    "lost-1": Row(
        text="node 1 lost for good", fault=jobs.lose_pod(1), starts="1/1/1", limit_s=4.0, after=2, is_elastic=True
    ),
    "lost-0": Row(
        text="node 0 lost for good", fault=jobs.lose_pod(0), starts="1/1/1", limit_s=10.0, after=2, is_elastic=True
    ),
    "late": Row(
        text="one pod joins late", fault=jobs.start_late, starts="1/1/1", limit_s=3.0, before=2, is_elastic=True
    ),
    "hang": Row(text="a worker hangs (SIGSTOP)", fault=jobs.hang_worker(1), starts="1/1/1", limit_s=None),
}


@dataclass(frozen=True, kw_only=True)
class Result:
    """What one fault did to one job."""

    starts: str
    whole_s: float | None = None  # None: never, within the time it was watched
    first_s: float | None = None  # with fewer
    absent_s: float | None = None
    note: str = ""

    def beyond_s(self) -> float:
        return (self.whole_s or 0.0) - (self.absent_s or 0.0)

    def is_in_target(self, row: Row) -> bool:
        in_time = self.whole_s is not None and (row.limit_s is None or self.beyond_s() <= row.limit_s)
        return in_time and self.starts == row.starts

    def __str__(self) -> str:
        if self.whole_s is None:
            less = "" if self.first_s is None else f" (with fewer {self.first_s:.1f} s)"
            return f"never{less}, {self.starts}{self.note}"
        beyond = "" if self.absent_s is None else f" (+{self.beyond_s():.1f})"
        less = (
            f", with fewer {self.first_s:.1f} s" if self.first_s is not None and self.first_s < self.whole_s else ""
        )
        return f"{self.whole_s:.1f} s{beyond}{less}, {self.starts}"


def argv_of(who: str, row: Row, script: str) -> tuple[str, ...]:
    """What a pod runs. torchrun needs no init before it here: it handles SIGTERM once it has workers."""
    if who == "ours":
        hang = ("--hang-timeout", HANG_TIMEOUT_S) if row.limit_s is None and knows("--hang-timeout") else ()
        return (*LAUNCHER, "run", "--grace", "5", *hang, "--", script)
    return (sys.executable, "-m", "torch.distributed.run", script)


@functools.cache
def knows(option: str) -> bool:
    """Whether `run` has this option yet."""
    return option in subprocess.run((*LAUNCHER, "run", "--help"), capture_output=True, text=True, check=True).stdout


def env_of(who: str, contract: jobs.Contract, node: int) -> dict[str, str]:
    """The variables of a pod; torchrun survives nothing without a budget, which Trainer v2 does not give."""
    return {**contract.env_of(node), "PET_MAX_RESTARTS": "3"} | (EXPERT if who == "expert" else {})


def measure(who: str, contract: jobs.Contract, row: Row, watch_s: float) -> Result:
    """Start a job, let the fault happen, watch."""
    with tempfile.TemporaryDirectory(prefix="survival-") as folder:
        argv = argv_of(who, row, jobs.training(Path(folder)))
        env = functools.partial(env_of, who, contract)
        with pods_of(contract.names, argv, env, Path(folder), at_first=row.before) as job:
            try:
                jobs.begun(job, row.before)
            except AssertionError:
                return Result(starts=_starts(job), note=" (did not begin)")
            return _watch(job, row, watch_s)


def _watch(job: Job, row: Row, watch_s: float) -> Result:
    before = {step.start for step in jobs.steps(job.folder)}
    had = len(job.pods[row.away].started_s) if row.away is not None else 0
    at_s = time.monotonic()
    row.fault(job)
    is_back = False
    while not is_back and time.monotonic() < at_s + watch_s:
        time.sleep(0.05)
        is_back = jobs.is_steady(job.folder, row.after, tuple(before))
    new = [step for step in jobs.steps(job.folder) if step.start not in before and step.at_s > at_s]
    returned = job.pods[row.away].started_s[had:] if row.away is not None else []
    return Result(
        starts=_starts(job),
        whole_s=next(step.at_s for step in new if step.start == new[-1].start) - at_s if is_back else None,
        first_s=new[0].at_s - at_s if new else None,
        absent_s=returned[0] - at_s if returned else None,
    )


def _starts(job: Job) -> str:
    return "/".join(str(pod.starts) for pod in job.pods)


# -- the table ------------------------------------------------------------------------------------

Cell = tuple[str, str, str]  # row, contract, who
Results = dict[Cell, list[Result]]


def cells(rows: Iterable[str], contracts: Sequence[str], who: Sequence[str]) -> list[Cell]:
    """All that can be measured: only elastic jobs shrink and grow, and only c10d has what an expert sets."""
    return [
        (row, contract, one)
        for row in rows
        for contract in contracts
        for one in who
        if contract == "elastic" or not (ROWS[row].is_elastic or one == "expert")
    ]


def text_of(row: Row, who: str, results: Sequence[Result]) -> str:
    """A cell; `missed` stands only behind what this project promises."""
    if len(results) == 1:
        return str(results[0]) + ("" if who != "ours" or results[0].is_in_target(row) else " — missed")
    back = [result for result in results if result.whole_s is not None]
    text = f"{len(back)} of {len(results)}"
    if back:
        text += f": {_spread([result.whole_s or 0.0 for result in back])} s"
        if row.away is not None:
            text += f" (+{_spread([result.beyond_s() for result in back])})"
    text += ", " + ", ".join(sorted({result.starts for result in results}))
    return text + (f"; {sum(result.is_in_target(row) for result in results)} in target" if who == "ours" else "")


def _spread(values: Sequence[float]) -> str:
    return f"{min(values):.1f} {statistics.median(values):.1f} {max(values):.1f}"


def table(results: Results, *, markdown: bool) -> str:
    """Faults down, contestants across."""
    columns = list(dict.fromkeys((contract, who) for _, contract, who in results))
    lines = [["fault", "this project must", *(f"{WHO[who]}; {contract}" for contract, who in columns)]]
    for name in dict.fromkeys(row for row, _, _ in results):
        row = ROWS[name]
        found = [results.get((name, contract, who), []) for contract, who in columns]
        texts = [text_of(row, who, cell) if cell else "-" for cell, (_, who) in zip(found, columns, strict=True)]
        lines.append([row.text, row.target, *texts])
    if markdown:
        lines.insert(1, ["---"] * len(lines[0]))
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def options() -> argparse.Namespace:
    def one_of(known: Iterable[str]):
        def parse(text: str) -> list[str]:
            names = text.split(",")
            if unknown := [name for name in names if name not in known]:
                raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
            return names

        return parse

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=one_of(ROWS), default=list(ROWS), help="of " + ",".join(ROWS))
    parser.add_argument("--contracts", type=one_of(CONTRACTS), default=list(CONTRACTS), help="fixed,elastic")
    parser.add_argument("--who", type=one_of(WHO), default=list(WHO), help=",".join(WHO))
    parser.add_argument("--repeats", type=int, default=1, metavar="N", help="min, median and max of N")
    parser.add_argument("--watch", type=float, default=75.0, metavar="SECONDS", help="then it counts as never")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page")
    return parser.parse_args()


def main() -> None:
    args = options()
    if (lack := network.missing()) is not None:
        raise SystemExit(f"survival: {lack}")
    signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )  # whoever ends this gets what there is, and no leftovers
    results: Results = {}
    try:
        for turn in range(args.repeats):
            for name, contract, who in cells(args.rows, args.contracts, args.who):
                result = measure(who, CONTRACTS[contract], ROWS[name], args.watch)
                results.setdefault((name, contract, who), []).append(result)
                print(f"{turn + 1}: {who}, {contract}, {name}: {result}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        print("survival: stopped; the rest was not measured", file=sys.stderr)
    print(machine())
    print(table(results, markdown=args.markdown))


if __name__ == "__main__":
    main()
