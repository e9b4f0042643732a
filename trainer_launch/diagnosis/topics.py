"""What nodes and the coordinator tell each other about hangs and stragglers: notes that membership carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from trainer_launch.diagnosis.collectives import MAX_ENTERED, Entries, Explanation, RankState
from trainer_launch.diagnosis.stragglers import Lateness
from trainer_launch.membership.notes import opened
from trainer_launch.membership.protocol import MAX_RANKS, Note
from trainer_launch.model.codec import Amount, Count, Name, Tagged, Text

STALL, STRAGGLERS = "stall", "stragglers"  # topics
MAX_SUSPECTS = 16  # that are told at once
MAX_STATES = 16384  # of all nodes, in an explanation

_Rank: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
_Ranks: TypeAlias = Annotated[tuple[_Rank, ...], Meta(max_length=MAX_RANKS)]
_Ns: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]  # since the epoch
_Latenesses: TypeAlias = Annotated[tuple[Lateness, ...], Meta(max_length=MAX_SUSPECTS)]
# By collective, the ranks that entered it last when a generation failed.
LastEntered: TypeAlias = Annotated[Mapping[Name, _Ranks], Meta(max_length=MAX_ENTERED)]


# -- of a job that does not go on -----------------------------------------------------------------


class Ranks(Tagged, frozen=True):
    """What a node's ranks show: it sees no progress, or was asked."""

    states: Annotated[tuple[RankState, ...], Meta(max_length=MAX_RANKS)]
    at_ns: _Ns
    limit_s: Amount = 0.0  # it has seen none for so long; 0: it was asked


class ShowRanks(Tagged, frozen=True):
    """Another node sees no progress: tell what your ranks show."""


class StallStatus(Struct, frozen=True):
    """Why the present generation did not go on, the last time that it did not."""

    stall: Text | None = None
    stall_age_s: Amount | None = None


# -- of stragglers --------------------------------------------------------------------------------


class ClockQuestion(Tagged, frozen=True):
    """What does this node's clock show? The answer is said at once."""

    number: Count


class ClockAnswer(Tagged, frozen=True):
    """What this node's clock shows."""

    number: Count
    at_ns: _Ns


class ShowEntries(Tagged, frozen=True):
    """Tell when your ranks have entered their last collectives."""

    most: Count  # of each rank
    suspects: Annotated[
        tuple[_Rank, ...], Meta(max_length=MAX_SUSPECTS)
    ] = ()  # have been late before; where are they?
    looks_us: Count = 0  # for so long


class Entered(Tagged, frozen=True):
    """When this node's ranks entered their last collectives, and what is known of the GPUs of the suspects."""

    ranks: Annotated[tuple[Entries, ...], Meta(max_length=MAX_RANKS)]
    devices: Annotated[tuple[tuple[_Rank, Text], ...], Meta(max_length=MAX_SUSPECTS)] = ()


class Stragglers(Tagged, frozen=True):
    """Which ranks of this node are stragglers now; those that are no longer told have recovered."""

    ranks: _Latenesses


class StragglerStatus(Struct, frozen=True):
    """Who is a straggler now, and how late the latest ranks were in the last sample."""

    stragglers: _Latenesses = ()
    lateness: _Latenesses = ()
    lateness_age_s: Amount | None = None


# -- at a node ------------------------------------------------------------------------------------

ToNode: TypeAlias = ShowRanks | Explanation | ClockQuestion | ShowEntries | Stragglers


def opened_by_node(note: Note, generation: int) -> ToNode | None:
    """A note of the coordinator; None: it is about another generation, or for nobody here."""
    body: ToNode | None = opened(ToNode, note.body, note.topic)
    return body if note.generation == generation else None
