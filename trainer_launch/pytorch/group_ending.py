"""How a worker group ended, as the run's outcome."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from trainer_launch.membership import protocol as say
from trainer_launch.model import Exit, Failure, FailureRecord, GivenUp, Outcome, Verdict, exit_codes
from trainer_launch.pytorch.worker_death import code_of
from trainer_launch.pytorch.worker_group import Refusal, State
from trainer_launch.supervisor import failure
from trainer_launch.supervisor.death_clues import Evidence


class AnySystem(Protocol):
    """What is asked of the system at the end."""

    def now(self) -> float:
        """Monotonic seconds."""

    def descendants(self) -> tuple[str, ...]:
        """All that is below us, each in words for people."""

    def last_lines(self, name: str) -> tuple[str, ...]:
        """What a process has written last."""


def outcome(state: State, system: AnySystem, evidence: Evidence) -> Outcome:
    """How it ended, and why."""
    run = state.run
    return Outcome(
        verdict=verdict(state),
        failure=_failure(state, system, evidence),
        given_up=_given_up(state.end),
        stop_signal=state.stop_signal,
        exits=run.exits if run is not None else (),
        took_s=system.now() - state.started_at_s,
        attempt=max(1, state.starts),
        survivors=system.descendants() if run is not None and run.gave_up else (),
    )


def verdict(state: State) -> Verdict:
    """How the job ended for this node."""
    if state.stop_signal is not None:
        return Verdict.STOPPED
    return Verdict.SUCCEEDED if isinstance(state.end, say.Finished) else Verdict.FAILED


def _failure(state: State, system: AnySystem, evidence: Evidence) -> Failure | None:
    if state.stop_signal is not None:
        return _how_it_stopped(state, system, evidence)
    match state.end:
        case say.Finished():
            return None
        case None:  # node 0's name
            text = state.unresolved or f"the resolver has not answered for {', '.join(state.plan.wait_for)}"
            return failure.unresolved(text)
        case Refusal(text=text, code=code):
            reason = "Misconfigured" if code == exit_codes.MISCONFIGURED else "PeerLost"
            told = FailureRecord(reason=reason, message=text, exit_code=code)
            return _classified(told, "", system, evidence)
        case say.GiveUp() as given_up:
            own = state.own if state.own is not None and state.own.rank == given_up.rank else None
            name = "" if own is None or own.rank is None else f"rank {own.rank}"
            return _classified(given_up_for(given_up, own), name, system, evidence)


def _given_up(end: object) -> GivenUp | None:
    if not isinstance(end, say.GiveUp):
        return None
    return GivenUp(
        reason=end.reason, rank=end.rank, exit_code=end.exit_code, signal=end.signal, message=end.message or ""
    )


def given_up_for(given_up: say.GiveUp, own: FailureRecord | None) -> FailureRecord:
    """Why the coordinator has ended the job, as this node tells it.

    The faulty node has its worker's own code, the others have lost a peer; a cause of its own is everybody's.
    """
    if given_up.cause is not None:  # no code of ours may ask a controller for a restart
        told = FailureRecord(
            reason=given_up.cause,
            message=given_up.reason,
            exit_code=given_up.exit_code or exit_codes.FAILED,
            why_not_again=given_up.message,
        )
        return told if own is None else replace(told, rank=own.rank, local_rank=own.local_rank, lines=own.lines)
    if own is None:
        said = given_up.message  # of the faulty worker, on another node
        text = f"{given_up.reason}; it said: {said}" if said else given_up.reason
        return FailureRecord(reason="PeerLost", message=text, exit_code=exit_codes.INFRASTRUCTURE)
    return replace(own, why_not_again=given_up.reason, exit_code=code_of(own))


def _classified(told: FailureRecord, name: str, system: AnySystem, evidence: Evidence) -> Failure:
    end = Exit(process=name, code=told.exit_code, signal=None, at_s=0.0)
    lines = system.last_lines(name) if name else ()
    return failure.classify(end, replace(evidence, agent=told, last_lines=lines))


def _how_it_stopped(state: State, system: AnySystem, evidence: Evidence) -> Failure | None:
    """How the workers took the request is worth a word when one did not leave with 0."""
    ends = state.run.exits if state.run is not None else ()
    cause = next((end for end in ends if end.exit_code != 0), None)
    if cause is None:
        return None
    lines = system.last_lines(cause.process)
    return failure.classify(cause, replace(evidence, agent=None, last_lines=lines, stopped=True))
