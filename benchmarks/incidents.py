"""The incident catalogue of tests/incidents, all of it, as a section of the page."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import re
import time
from collections.abc import Iterator, Mapping

from benchmarks.measuring import Case, Failed, Reading, Section, Setup, say
from benchmarks.peers import version_here
from tests.incidents.catalogue import SIDE_BY_SIDE, TO_LEAVE, TO_TELL, Situation, longest_first, tries
from tests.incidents.running import REPORT_S, TIMEOUT_S

LIMIT_S = 900.0
WHO = "trainer-launch"
TOLD, LEFT = "situations told exactly", "healthy jobs left alone"
AGAIN = "tried twice, as something was wrong the first time"


def once() -> Mapping[str, Reading | str]:
    """All of them, several side by side; what was told of each."""
    begun_s, every = time.monotonic(), longest_first()
    with concurrent.futures.ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        tried = dict(zip(every, threads.map(tries, every), strict=True))
    wrong = {one: found[-1] for one, found in tried.items()}
    say(f"incidents: {time.monotonic() - begun_s:.0f} s")
    rows: dict[str, Reading | str] = {AGAIN: Reading(sum(len(found) - 1 for found in tried.values()))}
    for name, some in ((TOLD, TO_TELL), (LEFT, TO_LEAVE)):
        good = [one for one in some if not wrong[one]]
        rows[name] = Reading(len(good), f"of {len(some)}")
        rows |= {one.text: "; ".join(wrong[one]) if wrong[one] else Reading(1, _note(one)) for one in some}
    if not any(isinstance(row, Reading) for row in rows.values()):
        raise Failed("no situation was told as it has to be")
    return rows


def _note(one: Situation) -> str:
    """For the table: seconds as N s, lines as N."""
    words = {
        "S": "N s",
        "L": "incident_job.py:N",
        "LOADER": "DataLoader worker …",
        "R": "0",
        "GLOO": "…",
        "ALIVE": "…",
    }
    sentence = re.sub(r"\{([A-Z]+)\}", lambda found: words[found[1]], one.sentence or "nobody is named")
    rank = "" if one.rank is None else f" rank {one.rank},"
    helps = {True: "may help", False: "will not help", None: "unknown"}[one.retryable]
    return f"{one.reason},{rank} exit code {one.exit_code}, restart: {helps}: {sentence}".replace("|", "/")


@contextlib.contextmanager
def opened() -> Iterator[Setup]:
    """One run has all situations."""
    rows = [TOLD, LEFT, AGAIN, *(one.text for one in (*TO_TELL, *TO_LEAVE))]
    yield Setup([Case(WHO, dict.fromkeys(rows, ""), functools.partial(once), LIMIT_S, 200.0)])


SECTION = Section(
    name="incidents",
    title="Incidents",
    about=(
        "Situations of real jobs with gloo, each with its exact sentence, rank, reason, retryability and "
        f"exit code; and healthy jobs that only look like a hang. `--hang-report-after {REPORT_S}`, "
        f"`--hang-timeout {TIMEOUT_S}`."
    ),
    shows=(TOLD, LEFT),
    open=opened,
    versions=lambda: {name: version_here(name) for name in ("trainer-launch", "torch")},
    whos=(WHO,),
    more_is_better=True,
    repeats=1,
)
