"""Whether a generation ended because ranks finished while others still waited for them. Pure.

A rank whose connection to a peer was closed says that a peer is gone, not which one or why. It is the program's
fault only if every node has told how its workers ended, some had finished with exit code 0, and none had failed for
a reason of its own.
"""

from __future__ import annotations

from trainer_launch.membership import protocol as msg
from trainer_launch.membership.state import Key, State, Suspicion
from trainer_launch.model.frozen_replace import replace

CAUSE = "ProgramError"
_MOST_NAMED = 8


def suspicion(failed: msg.Failed, reason: str, key: Key, now_s: float) -> Suspicion:
    """What a failure makes the coordinator suspect, with what its node saw of its other workers."""
    waited = failed.rank if failed.lost_peer else None
    return Suspicion(key=key, reason=reason, at_s=now_s, waited=waited, finished=frozenset(failed.finished))


def reported(state: State, key: Key, join: msg.Join) -> State:
    """Take in what a member of the last generation says of its workers when it joins again."""
    before, run = state.suspicion, state.run
    if before is None or run is None or key == before.key or key not in run.members:
        return state
    waited = None if join.failed else before.waited
    finished = before.finished | frozenset(join.finished)
    return replace(
        state, suspicion=replace(before, waited=waited, finished=finished, reported=before.reported | {key})
    )


def why(state: State) -> str | None:
    """The sentence that says it; None: there is another cause, or none is proved."""
    found, run = state.suspicion, state.run
    if found is None or run is None or found.waited is None or not found.finished:
        return None
    if not {*run.members} <= {found.key, *found.reported}:
        return None
    who, it = _names(sorted(found.finished)), "it" if len(found.finished) == 1 else "them"
    return f"{who} finished with exit code 0 while rank {found.waited} still waited for {it}"


def _names(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    more = len(ranks) - _MOST_NAMED
    return f"ranks {', '.join(map(str, ranks[:_MOST_NAMED]))}" + (f" and {more} more" if more > 0 else "")
