"""Hours of random faults on 6 pods, as root: `python -m tests.soak.soak FOLDER [--minutes 120] [--seed 1]`.

What happens is written to FOLDER/ledger.jsonl as it happens; `python -m tests.soak.report FOLDER` sums it up at any
time. SIGINT and SIGTERM end the soak in order. Ends with 1 when an invariant did not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from tests.pods import wait_until
from tests.process.world import survivors
from tests.soak import faults, judging
from tests.soak.faults import NODES, Seen, Trouble
from tests.soak.looking import Events, Look, asked, look
from tests.soak.pods import CONTRACTS, Pods, pods
from tests.survival.jobs import Step, steps

BEGIN_S, RECOVER_S, END_S = 120.0, 120.0, 60.0
_STEADY = 5  # steps after which workers train, and do not just start
_PACE_S = 0.2
_ASK_EACH = 4  # looks, one pod is asked for its status and metrics


class Ledger:
    """What happened, a line of JSON each, on disk at once."""

    def __init__(self, folder: Path) -> None:
        self.violations = 0
        self._begun_s = time.monotonic()
        self._file = (folder / "ledger.jsonl").open("a", buffering=1)

    def close(self) -> None:
        """Write no more."""
        self._file.close()

    @property
    def seconds(self) -> float:
        """Since the soak began."""
        return time.monotonic() - self._begun_s

    def note(self, what: str, **values: object) -> None:
        """Add a line."""
        head = {"utc": time.strftime("%H:%M:%S", time.gmtime()), "seconds": round(self.seconds, 1), "what": what}
        self._file.write(json.dumps({**head, **values}) + "\n")

    def violations_of(self, texts: Sequence[str]) -> None:
        """Invariants that did not hold."""
        for text in texts:
            self.violations += 1
            self.note("violation", text=text)


class Episode:
    """One job from its start to its good end; what it shows is compared with what its faults explain."""

    def __init__(self, ledger: Ledger, job: Pods, *, keeps_state: bool) -> None:
        self._ledger, self._job, self._folder = ledger, job, job.job.folder
        self._keeps_state = keeps_state
        self._steps: list[Step] = []
        self._events = [Events(self._folder / f"events-{node}.jsonl") for node in range(NODES)]
        self._looks: list[Look] = []
        self._told: set[str] = set()  # what a look shows is told once
        self._asked = 0

    def begin(self) -> None:
        """Wait until all train."""
        self._wait(lambda: self._is_steady(0.0), "all workers to train", BEGIN_S)
        self._look()

    def suffer(self, trouble: Trouble) -> None:
        """Let a trouble come, wait until all is well again for some time, and judge."""
        names = [(fault.kind, fault.nodes, fault.seconds) for fault in trouble.faults]
        self._ledger.note("trouble", faults=names, delay_s=round(trouble.delay_s, 2))
        self._read()
        first, charges, begun_s = len(self._steps), self._charges(), time.monotonic()
        known = {step.start for step in self._steps}
        ended = [len(pod.codes) for pod in self._job.pods]
        self._job.inflict(trouble)
        cost, over_s = faults.expected(trouble.faults, faults.TORCH), time.monotonic()
        old = known if cost.starts[0] else set[str]()
        self._wait(lambda: self._is_steady(over_s, old), f"all to train after {names}", RECOVER_S)
        recovered_s = time.monotonic()
        time.sleep(trouble.quiet_s)
        self._wait(lambda: self._is_steady(time.monotonic() - 3.0), "all to train still", RECOVER_S)
        seen = Seen(
            codes=tuple(tuple(pod.codes[n:]) for pod, n in zip(self._job.pods, ended, strict=True)),
            last_words=tuple(tuple(pod.last_words[n:]) for pod, n in zip(self._job.pods, ended, strict=True)),
            charges=self._charges() - charges,
            starts=len({step.start for step in self._steps} - known),
            longest_s=round(judging.longest_s(self._steps, begun_s, self._steps[-1].at_s), 2),
        )
        told = asdict(seen) | {"recovered_s": round(recovered_s - begun_s, 2), "faults": names}
        self._ledger.note("recovered", **told, load=os.getloadavg()[0])
        found = [*faults.wrong(cost, seen), *judging.broken(self._steps[max(0, first - 1) :], self._keeps_state)]
        if self._keeps_state and faults.leave_state(trouble.faults):
            found += judging.done_again(self._steps[max(0, first - 1) :])
        self._judge(found, f"{names}, at a load of {os.getloadavg()[0]:.1f}")
        self._look()

    def end(self) -> None:
        """Let the job succeed; nothing of it may stay."""
        (self._folder / "enough").touch()
        self._wait(lambda: all(pod.succeeded for pod in self._job.pods), "the job to complete", END_S)
        self._read()
        found = []
        for node, pod in enumerate(self._job.pods):
            if not faults.are_right(0, pod.last_words[-1]):
                found.append(f"pod {node} succeeded with the termination message {pod.last_words[-1]!r}")
            found += [f"pod {node} ended and left {name} in /dev/shm" for name in self._job.shm(node)]
            found += [f"pod {node} ended and left {path.name} in TMPDIR" for path in self._job.tmp(node).iterdir()]
            orderly = [code for code in pod.codes if code != faults.KILLED]
            if self._events[node].ends != orderly:
                found.append(f"pod {node} ended with {orderly}, and told {self._events[node].ends} as events")
        found += [*judging.broken(self._steps, self._keeps_state), *judging.growing(judging.histories(self._looks))]
        self._judge(found, "the end")
        said = {"starts": [pod.starts for pod in self._job.pods], "charges": self._charges()}
        self._ledger.note("episode ends", steps=len(self._steps), **said, events=[e.count for e in self._events])

    def keep(self) -> None:
        """Write what the pods said, for whoever looks for a cause."""
        for node, pod in enumerate(self._job.pods):
            (self._folder / f"said-{node}.log").write_text("".join(pod.lines))

    def _look(self) -> None:
        looks = [look(self._job, node, self._ledger.seconds) for node in range(NODES)]
        self._looks += looks
        self._ledger.note("look", pods=[asdict(one) for one in looks])
        firsts = {key: seen[0][1] for key, seen in judging.histories(self._looks).items()}
        found = [text for one in looks for text in judging.strange(one)]
        self._asked += 1
        if self._asked % _ASK_EACH == 1:
            found += asked(self._job, self._asked // _ASK_EACH % NODES)
        for one in looks:
            for now in one.long_lived:
                found += judging.grown(firsts[one.node, now.role, now.pid], now)
        found += [text for events in self._events for text in events.wrong] + self._job.left
        self._judge([text for text in found if text not in self._told], "a look")
        self._told.update(found)

    def _judge(self, found: Sequence[str], after: str) -> None:
        if found:
            self._ledger.violations_of([f"{text} (after {after})" for text in found])
            self.keep()

    # -- what is known ------------------------------------------------------------------------

    def _read(self) -> None:
        self._steps = steps(self._folder)
        for events in self._events:
            events.read()

    def _charges(self) -> int:
        return max(events.charges for events in self._events)

    def _is_steady(self, since_s: float, but: set[str] = frozenset()) -> bool:  # type: ignore[assignment]
        """Whether all workers train together now and since then, in none of the starts in `but`."""
        self._read()
        last = self._steps[-_STEADY:]
        return len(last) == _STEADY and all(
            step.workers == NODES and step.start == last[0].start and step.start not in but and step.at_s > since_s
            for step in last
        )

    def _wait(self, condition, what: str, deadline_s: float) -> None:
        wait_until(condition, what, self._job.pods, deadline_s, pace_s=_PACE_S)


def soak(folder: Path, minutes: float, seed: int, episodes: int, most: int | None = None) -> int:
    """Run the kinds of jobs in turn, each with 1 to `most` troubles; return the number of violations."""
    with contextlib.closing(Ledger(folder)) as ledger:
        return _soak(ledger, folder, minutes, seed, episodes, most)


def _soak(ledger: Ledger, folder: Path, minutes: float, seed: int, episodes: int, most: int | None) -> int:
    ledger.note("begins", pid=os.getpid(), minutes=minutes, seed=seed, episodes=episodes)
    contracts = list(CONTRACTS)
    for number in range(episodes):
        contract = contracts[(seed + number) % len(contracts)]
        spared = (0, 1 + seed % (NODES - 1))[number // len(contracts) % 2]
        until_s = 60 * minutes * (number + 1) / episodes
        home = folder / f"episode-{number}"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir(parents=True)
        ledger.note("episode begins", number=number, contract=contract, spared=spared)
        token = uuid.uuid4().hex
        troubles = islice(faults.draw(seed + number, spared, faults.TORCH), most)
        _episode(ledger, contract, home, token, troubles, until_s)
        ledger.violations_of([f"process {pid} of the job is left" for pid in survivors(token)])
    used = resource.getrusage(resource.RUSAGE_CHILDREN), resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = sum(one.ru_utime + one.ru_stime for one in used)
    ledger.note("ends", violations=ledger.violations, cores=round(cpu_s / ledger.seconds, 3))
    return ledger.violations


def _episode(
    ledger: Ledger, contract: str, home: Path, token: str, troubles: Iterator[Trouble], until_s: float
) -> None:
    with pods(contract, home, token) as job:
        episode = Episode(ledger, job, keeps_state=contract.startswith("keeping"))
        try:
            episode.begin()
            for trouble in troubles:
                episode.suffer(trouble)
                if ledger.seconds > until_s:
                    break
            episode.end()
        except (AssertionError, subprocess.SubprocessError, OSError) as problem:
            ledger.violations_of([f"{type(problem).__name__}: {str(problem)[:4000]}"])
        finally:
            episode.keep()


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak.soak", description=__doc__)
    parser.add_argument("folder", type=Path, help="for the ledger and what the jobs write; made if it is not there")
    parser.add_argument("--minutes", type=float, default=120.0, help="how long (default 120)")
    parser.add_argument("--seed", type=int, default=1, help="chooses the faults (default 1)")
    parser.add_argument("--episodes", type=int, default=4, help="jobs, one after another (default 4)")
    parser.add_argument("--troubles", type=int, metavar="N", help="at most so many for each job")
    chosen = parser.parse_args()
    chosen.folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("asked to stop"))
    os.nice(10)
    return min(1, soak(chosen.folder.resolve(), chosen.minutes, chosen.seed, chosen.episodes, chosen.troubles))


if __name__ == "__main__":
    sys.exit(main())
