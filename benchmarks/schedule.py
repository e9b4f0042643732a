"""How long a job of three pods takes to a number of steps while faults happen on a fixed schedule."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks import contestants, trees
from benchmarks.contestants import Contestant
from benchmarks.measuring import Case, Failed, Reading, Section, Setup, wait_for
from benchmarks.peers import versions_here, versions_of_peers
from tests.pods import Job, missing, pods_of
from tests.survival import jobs

STEPS = 500
PODS = 3
CHECKPOINT_STEPS = 10
RESTARTS = 20  # the budget is not what is measured
FAULTS: Mapping[int, tuple[str, jobs.Fault]] = {
    100: ("worker of node 1 killed", jobs.kill_worker(1)),
    200: ("pod of node 2 killed", jobs.kill_pod(2)),
    300: ("pod of node 1 gets SIGTERM", jobs.stop_pod(1)),
    400: ("pod of node 0 killed", jobs.kill_pod(0)),
}
CALM_S, LIMIT_S = 120.0, 300.0  # without faults, and with them
CALM, FAULTY, RATIO, AGAIN = "without faults", "with the faults", "ratio", "steps done again"
ROWS = {CALM: "s", FAULTY: "s", RATIO: "x", AGAIN: ""}


def once(who: Contestant, faults: Mapping[int, tuple[str, jobs.Fault]] = FAULTS) -> Mapping[str, Reading | str]:
    """The same job twice: undisturbed, then with the faults."""
    calm_s, _, _ = _until_done(who, {}, CALM_S)
    found: dict[str, Reading | str] = {CALM: Reading(calm_s)}
    try:
        took_s, again, starts = _until_done(who, faults, LIMIT_S)
    except Failed as why:
        return {**dict.fromkeys(ROWS, f"never: {why}"), **found}
    return {**found, FAULTY: Reading(took_s, starts), RATIO: Reading(took_s / calm_s), AGAIN: Reading(again)}


def _until_done(
    who: Contestant, faults: Mapping[int, tuple[str, jobs.Fault]], limit_s: float
) -> tuple[float, int, str]:
    """Seconds from the first pod's start to the last step, steps that were done twice, starts of each pod.

    Raises:
        Failed: the last step was not done in time.
    """
    with trees.folder() as folder:
        script = jobs.training(Path(folder))
        argv = (*trees.private(), *who.argv(script, is_hang=False))

        def env(node: int) -> dict[str, str]:
            return {**who.env(node, RESTARTS), "CHECKPOINT_STEPS": str(CHECKPOINT_STEPS)}

        began_s = time.monotonic()
        names = (*who.contract.names, *who.helpers)
        with pods_of(names, argv, env, Path(folder), at_first=PODS) as job, who.beside(job):
            for number, (text, fault) in faults.items():
                _wait(job, number, f"step {number}, for: {text}", began_s + limit_s, is_whole=True)
                fault(job)
            _wait(job, STEPS, f"step {STEPS}", began_s + limit_s)
            done = jobs.steps(job.folder)
            last_s = next(step.at_s for step in done if step.number >= STEPS)
            again = len(done) - len({step.number for step in done})
            return last_s - began_s, again, "/".join(str(pod.starts) for pod in job.pods)


def _wait(job: Job, number: int, what: str, until_s: float, *, is_whole: bool = False) -> None:
    """Until a step is done, and where it `is_whole` all pods train: no fault hits a pod that is away."""

    def is_there() -> bool:
        done = jobs.steps(job.folder)
        return bool(done) and done[-1].number >= number and (not is_whole or jobs.is_steady(job.folder, PODS))

    wait_for(is_there, what, max(round(until_s - time.monotonic()), 0), 0.05)


def opened() -> Setup:
    """All that can be had here."""
    found, absent = contestants.scheduled()
    limit_s = CALM_S + LIMIT_S + 60.0
    return Setup([Case(one.name, ROWS, functools.partial(once, one), limit_s, 90.0) for one in found], absent)


def versions() -> dict[str, str]:
    """Of whoever takes part."""
    found = versions_here("trainer-launch", "torch", "Python")
    packages = {"nvrx": "nvidia-resiliency-ext", "dlrover": "dlrover"}
    return found | versions_of_peers(packages)


SECTION = Section(
    name="schedule",
    title="Goodput under faults",
    about=(
        f"Three pods as above, {STEPS} steps, a checkpoint every {CHECKPOINT_STEPS}. "
        f"{'; '.join(f'Step {number}: {text}' for number, (text, _) in FAULTS.items())}. Behind the time: how "
        "often each pod was started."
    ),
    pictured=("without faults", "with the faults"),
    beside=(
        "trainer-launch, elastic",
        "torchrun, expert",
        "ft_launcher, elastic",
        "dlrover-run, elastic",
    ),
    open=opened,
    versions=versions,
    whos=contestants.SCHEDULED,
    missing=missing,
    is_by_default=False,
)
