"""What the deaths of a node's workers mean, for the coordinator and for how the job ended here. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.membership import protocol as say
from trainer_launch.model import Death, exit_codes
from trainer_launch.supervisor.error_lines import error_name, recognise

_OUR_SIGNALS = (signal.SIGTERM, signal.SIGKILL)  # by which workers are ended


class Ends(Struct, frozen=True):
    """How this node's workers of one generation ended before anybody stopped them."""

    finished: tuple[int, ...] = ()  # ranks that ended with exit code 0
    failed: bool = False  # whether one failed for a reason of its own


UNKNOWN_ENDS = Ends(failed=True)  # as long as nobody has looked, nothing is proved


def ends_of(deaths: Iterable[Death]) -> Ends:
    """Sum up deaths in their order.

    Who leaves with 0 after the first failure may have been asked to. Who was killed after it tells nothing, unless
    an error was written first.
    """
    finished: list[int] = []
    own = lost = False
    for death in deaths:
        if death.exit_code == 0:
            if death.rank is not None and not (lost or own):
                finished.append(death.rank)
        elif lost_peer(death):
            lost = True
        else:
            ended_by_us = (lost or own) and death.signal in _OUR_SIGNALS
            own = own or death.message is not None or not ended_by_us
    return Ends(tuple(finished[: say.MAX_RANKS]), own)


def lost_peer(death: Death) -> bool:
    """Whether a worker says itself that its connection to a peer was closed, also if we ended it after that."""
    message = death.message if death.signal in (None, *_OUR_SIGNALS) else None
    symptom = recognise(message or "")
    return symptom is not None and symptom[0].reason == "PeerLost"


def is_guiltier(death: Death) -> bool:
    """Whether it failed for a reason of its own, not for a lost peer or because we had asked it to end."""
    return not lost_peer(death) and (death.message is not None or death.signal not in _OUR_SIGNALS)


def by_itself(death: Death) -> Death:
    """As it would have ended: its error was written when our request to end came."""
    was_ended = death.signal in _OUR_SIGNALS and death.message is not None
    return replace(death, signal=None, code=exit_codes.FAILED) if was_ended else death


def failed_message(death: Death, generation: int, ends: Ends) -> say.Failed:
    """What the coordinator is told, which decides whether a restart can help."""
    message, is_peers = death.message or "", lost_peer(death) and not ends.failed
    ended = (death.rank, death.code, death.signal, message, error_name(message))
    cause = None if death.reason != "ProgramError" else death.reason  # what a restart cannot mend
    return say.Failed(generation, *ended, lost_peer=is_peers, finished=ends.finished, cause=cause)


def given_up_for(given_up: say.GiveUp, own: Death | None) -> Death:
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
        message = given_up.message  # of the faulty worker, on another node
        text = f"{given_up.reason}; it said: {message}" if message else given_up.reason
        return Death(reason="PeerLost", message=text, code=exit_codes.INFRASTRUCTURE)
    return replace(own, why_not_again=given_up.reason)


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
