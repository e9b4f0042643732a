"""The meaning of workers' deaths, for the coordinator and for how the job ended here. Pure.

A worker is a victim if it only says that it waited for a peer in vain. The cause is the worker that failed first
for a reason of its own: before the launcher stopped anybody, or with an error that was written before.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Collection, Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.membership import protocol as say
from trainer_launch.membership import retry_policy
from trainer_launch.model import Death, Failure, exit_codes
from trainer_launch.model.codec import MAX_RANKS
from trainer_launch.supervisor.error_lines import error_name, final_error, in_chain, recognise

_OUR_SIGNALS = (signal.SIGTERM, signal.SIGKILL)  # by which workers are ended
_LOST, _TIMED_OUT = "PeerLost", "Hung"
_WHY_LEFT = (
    "see why these ranks left: an error or a signal that the program handles, or fewer steps than the others have"
)
SEE_NODE = "see the termination message of"  # begins the advice of a node whose own workers were well
# A store's end is told by itself: a rank that cannot connect to one has another address, or no way there.
_CONNECTS = re.compile(r"DistNetworkError: .*?(?:client socket has|Interrupted system call)")
_IN_STORE = re.compile(r"DistStoreError: .*?\b[Tt]imed out")  # others had not joined yet


class EarlyEnds(Struct, frozen=True):
    """How this node's workers of one generation ended before anybody stopped them."""

    finished: tuple[int, ...] = ()  # ranks that ended with exit code 0
    failed: bool = False  # whether one failed for a reason of its own
    may_be_asked: bool = False  # whether one that finished may have been told to, by a signal


UNKNOWN = EarlyEnds(failed=True)  # as long as nobody has looked, nothing is proved


def early_ends(deaths: Iterable[Death], stopped_at_s: float, unasked: Collection[str]) -> EarlyEnds:
    """Sum up deaths: what happens once the launcher has stopped workers tells nothing of what they would have done.

    `unasked` are processes which are known to have ended by themselves.
    """
    early = [death for death in deaths if death.at_s <= stopped_at_s]
    finished = [death for death in early if death.exit_code == 0]
    failed = any(death.exit_code != 0 and not is_victim(death) for death in early)
    ranks = tuple(death.rank for death in finished if death.rank is not None)
    return EarlyEnds(ranks[:MAX_RANKS], failed, any(death.process not in unasked for death in finished))


def waited_in_vain(death: Death) -> str | None:
    """The exit reason of a worker that only says that a peer is gone or late, also if we ended it after that."""
    message = death.message or ""
    is_abort = death.signal == signal.SIGABRT and error_name(message) is None  # else it crashed after its error
    symptom = recognise(message) if is_abort or death.signal in (None, *_OUR_SIGNALS) else None
    if symptom is None or _CONNECTS.search(message):
        return None
    reason = _TIMED_OUT if _IN_STORE.search(message) else symptom[0].reason
    return reason if reason in (_LOST, _TIMED_OUT) else None


def with_last_words(death: Death, lines: Sequence[str]) -> Death:
    """A death without an error file, as of workers that start with exec: its last output may show a victim."""
    last = "\n".join(final_error(lines))
    quoting = (replace(death, message=message) for message in (last, in_chain(last, lines)))
    is_silent = death.message is None and death.code
    return next((quote for quote in quoting if waited_in_vain(quote)), death) if is_silent else death


def is_victim(death: Death) -> bool:
    """Whether a worker only waited for a peer in vain; a hang, which the launcher ends, has a cause of its own."""
    return death.reason is None and waited_in_vain(death) is not None


def is_guiltier(death: Death, stopped_at_s: float) -> bool:
    """Whether a worker failed for a reason of its own, not for a peer or because we had asked it to end."""
    is_ours = death.signal in _OUR_SIGNALS and death.at_s > stopped_at_s
    return death.exit_code != 0 and not is_victim(death) and (death.message is not None or not is_ours)


def is_nearer(death: Death, victim: Death | None) -> bool:
    """Whether a victim waited until a time-out: its end is what another victim, here or elsewhere, lost."""
    return waited_in_vain(death) == _TIMED_OUT and (victim is None or waited_in_vain(victim) == _LOST)


def by_itself(death: Death) -> Death:
    """Return a death as it would have been: its error was written when our request to end came."""
    was_ended = death.signal in _OUR_SIGNALS and death.message is not None
    return replace(death, signal=None, code=exit_codes.FAILED) if was_ended else death


def failed_message(death: Death, failure: Failure, generation: int, early: EarlyEnds, now_s: float) -> say.Failed:
    """Make the message to the coordinator, which decides whether a restart can help; `failure` is the death's."""
    message = death.message or failure.message.partition(": ")[2]  # what its last lines say
    is_victims = is_victim(death) and not early.failed
    return say.Failed(
        generation,
        *(death.rank, death.code, death.signal, message, error_name(message)),
        lost_peer=is_victims,
        timed_out=is_victims and waited_in_vain(death) == _TIMED_OUT,
        finished=early.finished,
        may_be_asked=early.may_be_asked,
        cause=death.reason if death.reason in retry_policy.IN_VAIN else None,
        exit_reason=failure.reason,
        helps=failure.restart_helps,
        ago_s=max(0.0, now_s - death.at_s),
        is_cause=failure.rank == death.rank,  # ranks that differ name nobody, nor does one that quotes another
    )


def cause_of(given_up: say.GiveUp, own: Death | None) -> Death:
    """Why the coordinator has ended the job, as this node tells it.

    The faulty node has its worker's own code, the others have lost a peer; a cause of its own is everybody's.
    """
    if given_up.cause is not None:  # no code of ours may ask a controller for a restart
        return replace(
            own or Death(),
            signal=None,
            reason=given_up.cause,
            message=given_up.reason,
            code=given_up.exit_code or exit_codes.FAILED,
            why_not_again=given_up.message,
        )
    if own is None:
        words = given_up.message  # of the faulty worker, on another node; of a hang, its launcher's
        verb = "" if given_up.exit_reason == _TIMED_OUT else "it said: "
        text = f"{given_up.reason}; {verb}{words}" if words else given_up.reason
        return Death(reason=_LOST, message=text, code=exit_codes.INFRASTRUCTURE)
    return replace(own, why_not_again=given_up.reason)


def of_the_job(failure: Failure, given_up: say.GiveUp, node_rank: int) -> Failure:
    """A failure as every node tells it: the cause, its rank and its node, and whether a restart helps."""
    if failure.reason == _TIMED_OUT:
        failure = replace(failure, signal=None)  # the launcher's own
    if given_up.cause == _LOST:
        failure = replace(failure, hint=_WHY_LEFT)
    if given_up.helps is False:
        failure = replace(failure, again=False)
    is_elsewhere = given_up.node_rank not in (None, node_rank)
    is_told = not given_up.is_victim or given_up.exit_reason not in ("", _LOST)  # what it says, or who lost a peer
    if is_elsewhere and given_up.cause is None and is_told:
        hint = f"{SEE_NODE} {given_up.node}"
        reason = given_up.exit_reason or _LOST
        failure = replace(failure, reason=reason, again=given_up.helps, is_elsewhere=True, hint=hint)
    if given_up.rank is None or given_up.is_victim:
        return replace(failure, rank=None)
    failure = replace(failure, rank=given_up.rank)
    return replace(failure, node_rank=given_up.node_rank, host=given_up.host) if is_elsewhere else failure


def end_of(news: say.GiveUp | say.Finished | say.Refused) -> say.GiveUp | say.Finished:
    """How the job ends for this node; a job that refuses it may go on."""
    match news:
        case say.Quarantined(reason=reason):
            return say.GiveUp(reason, exit_code=exit_codes.INFRASTRUCTURE, cause="Quarantined")
        case say.RefusedHere(reason=reason):
            return say.GiveUp(f"the coordinator refuses this node: {reason}")
        case say.Refused(reason=reason):
            text = f"the coordinator refuses this node: {reason}"
            return say.GiveUp(text, exit_code=exit_codes.MISCONFIGURED, cause="Misconfigured")
    return news
