"""What the coordinator is told of workers' deaths: how the first failed, and which had finished before. Pure."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from trainer_launch.membership import protocol as say
from trainer_launch.model import FailureRecord, exit_codes
from trainer_launch.model.frozen import dataclass
from trainer_launch.supervisor.error_lines import error_name, recognise


@dataclass(frozen=True, slots=True)
class Ends:
    """How this node's workers of one generation ended before anybody stopped them."""

    finished: tuple[int, ...] = ()  # ranks that ended with exit code 0
    failed: bool = False  # whether one failed for a reason of its own


def code_of(death: FailureRecord) -> int:
    """The exit code that says it."""
    return exit_codes.of_signal(death.signal) if death.signal is not None else death.exit_code or exit_codes.FAILED


def lost_peer(death: FailureRecord) -> bool:
    """Whether a worker says itself that its connection to a peer was closed."""
    found = recognise(death.message or "") if death.signal is None else None
    return found is not None and found[0].reason == "PeerLost"


def failed_message(death: FailureRecord, generation: int, ends: Ends) -> say.Failed:
    """What the coordinator is told, which decides whether a restart can help."""
    said = death.message or ""
    return say.Failed(
        generation,
        death.rank,
        death.exit_code,
        death.signal,
        said,
        error_name(said),
        lost_peer(death) and not ends.failed,
        ends.finished,
    )


def ends_of(deaths: Iterable[FailureRecord]) -> Ends:
    """Sum up deaths in the order they were seen.

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
            ended_by_us = (lost or own) and death.signal in (signal.SIGTERM, signal.SIGKILL)
            own = own or death.message is not None or not ended_by_us
    return Ends(tuple(finished[: say.MAX_RANKS]), own)
