"""Any history of one node comes to an end, and nothing starts once the pod was asked to stop or to drain."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.pytorch.nodes import PEER_LOST, Here
from tests.pytorch.test_node import CANNOT, DRAINS, USR2, Watch
from tests.supervisor.fakes import KILL, TERM, Program
from trainer_launch.membership import protocol as say
from trainer_launch.membership.client import Connected, Disconnected
from trainer_launch.model import Verdict
from trainer_launch.supervisor.processes import LAST_KILL_S
from trainer_launch.supervisor.system import Happened

LAST_S = 300.0  # when the pod is asked to stop at the latest
TIMES = st.floats(0, 60).map(lambda at_s: round(at_s, 1))
PROGRAMS = st.builds(
    Program,
    ends_s=st.none() | TIMES,
    code=st.sampled_from([0, 0, 1, 7]),
    number=st.none() | st.sampled_from([KILL, int(signal.SIGSEGV), int(signal.SIGABRT)]),
    error=st.sampled_from(["", "ValueError: no", PEER_LOST]),
    term_s=st.sampled_from([0.1, 3.0, None]),
    dies_of=st.sampled_from([(), (USR2,)]),
    is_stuck=st.sampled_from([False, False, False, True]),
)
LIVES = st.lists(PROGRAMS, max_size=4)
HAPPENS = st.sampled_from(
    ["term", "drain", "restart", "give up", "finished", "lost", "back", "store", "server", "cannot start"]
)
NEWS = {
    "restart": lambda here: say.Restart(here.coordinator.generation, "rank 9 failed"),
    "give up": lambda _: say.GiveUp("the job has failed"),
    "finished": lambda _: say.Finished(),
    "lost": lambda _: Disconnected("reset"),
    "back": lambda _: Connected(),
}


def plan_history(here: Here, what: str, at_s: float) -> None:
    """Let this happen then."""
    match what:
        case "term" | "drain":
            here.system.signalled(at_s, TERM if what == "term" else USR2)
        case "store" | "server":
            pid = here.starter.STORE if what == "store" else here.starter.SERVER
            here.system.at(at_s, lambda: Happened(ended=((pid, -KILL),)))
        case "cannot start":
            here.does(at_s, lambda: here.starter.problems.append(CANNOT))
            here.does(at_s, lambda: here.starter.refusals.append(CANNOT))
        case _:
            here.does(at_s, lambda: here.coordinator.tell(NEWS[what](here)))


@given(LIVES, LIVES, st.lists(st.tuples(HAPPENS, TIMES), max_size=6), st.none() | TIMES)
@settings(max_examples=200, deadline=None)
def test_any_history_ends_in_time_and_nothing_starts_after_a_request(zero, one, events, hangs_s) -> None:
    with tempfile.TemporaryDirectory() as folder:
        watch = None if hangs_s is None else Watch(hangs_s)
        here = Here(Path(folder), plan=DRAINS, watch=watch, rank_0=zero, rank_1=one)
        for what, at_s in events:
            plan_history(here, what, at_s)
        here.system.signalled(LAST_S, TERM)
        ended = here.run()
    asked_s = min([at_s for what, at_s in events if what in ("term", "drain")], default=LAST_S)
    starts = here.system.starts("rank 0")
    assert [at_s for at_s in starts if at_s > asked_s] == []
    assert ended.took_s <= LAST_S + DRAINS.grace_s + LAST_KILL_S
    assert (ended.verdict is Verdict.STOPPED) == (ended.stop_signal is not None)
    assert len(starts) == len(here.system.starts("rank 1"))
