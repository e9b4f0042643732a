"""Examples of docker/examples under `trainer-launch rehearse -f`, with the Python of their framework."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil

from tests.cli.launching import Started
from tests.frameworks import frameworks

RUN_S = 280  # for a job that takes some 30 s by itself
# By the line, as steps are reported once a second, in which a quick machine does hundreds.
AT_100 = r"at=line:step\s100/"


class Rehearsal(Started):
    """A job that runs: `main` finds a pod's first process."""

    def __init__(self, framework: str, manifest: str | Path, *words: str) -> None:
        super().__init__(
            ("rehearse", "-f", str(manifest), *words),
            frameworks.env(),
            frameworks.EXAMPLES,
            launcher=frameworks.launcher(framework),
        )

    def main(self, pod: str) -> psutil.Process:
        """The first process of a pod's container."""
        children = psutil.Process(self.pid).children()
        return next(child for child in children if child.environ().get("HOSTNAME") == pod)


def got_over(framework: str, manifest: str | Path, lost: str, *, after: str, number: int = signal.SIGKILL) -> str:
    """All output of a job that ends well although one pod's first process got a signal once it had written a line.

    `lost` is the pod's name, `after` a pattern of the line.
    """
    with Rehearsal(framework, manifest) as job:
        job.read_until(after)
        job.main(lost).send_signal(number)
        return job.ends_with(0, RUN_S)


def succeeded(framework: str, manifest: str | Path, *faults: str) -> str:
    """All output of a job that ends well whatever these faults do to it."""
    with Rehearsal(framework, manifest, *(word for text in faults for word in ("--fault", text))) as job:
        return job.ends_with(0, RUN_S)


def assert_learnt(output: str) -> None:
    """A model of bytes that knows nothing has a loss of 5.55."""
    told = losses(output)
    assert told[0] > 5 > 3 > told[-1], told


def assert_all_left_after_one_step(output: str) -> None:
    """What was asked to stop has agreed on a step: rank 0 saved it, and the others came no further."""
    resumed = int(re.findall(r"resumed at step (\d+)", output)[0])
    assert f"step {resumed}/" in output.partition("resumed")[0]


def lives(output: str, pod: str) -> tuple[int, int]:
    """How often a pod was started, and how often its container was restarted in place."""
    found = re.search(rf"^{pod} +\w+ +(\d+) +(\d+) ", output, re.MULTILINE)
    assert found, output
    return int(found[1]), int(found[2])


def losses(output: str) -> list[float]:
    """The loss of each step that was told."""
    return [float(loss) for loss in re.findall(r"step \d+/\d+  loss ([\d.]+)", output)]


def changed(manifest: str, folder: Path, change: Callable[[str], str]) -> Path:
    """A copy of an example's manifest with something else in it."""
    text = (frameworks.EXAMPLES / manifest).read_text()
    assert change(text) != text
    path = folder / manifest
    path.write_text(change(text))
    return path
