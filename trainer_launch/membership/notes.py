"""Notes: what nodes and the coordinator tell each other about topics of which membership knows nothing.

Each topic has one judge at the coordinator, which gets it when it is made. A judge is a value: each call gives the
judge as it is afterwards, and what there is to tell. A note that is of no known topic, or whose body is not of the
expected kind, is ignored, and said once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeAlias

from msgspec import Struct

from trainer_launch.model.codec import MessageError, convert

_log = logging.getLogger(__name__)


class MemberView(Struct, frozen=True, kw_only=True):
    """A member of the generation, as a judge sees it."""

    number: int  # its group rank
    name: str  # as messages name it
    ranks: range  # of its workers
    answers: bool  # it is connected, and not done
    done_s: float | None = None  # since when its workers have succeeded
    is_own: bool = False  # its launcher serves the coordinator


class Joined(Struct, frozen=True):
    """A member of a generation that forms, with the note of its Join."""

    number: int
    is_new: bool  # to the job
    body: Any  # None: there is no note
    heard_s: float


class Tell(Struct, frozen=True):
    """Send a note with this body to these members."""

    numbers: Sequence[int]
    body: object


Members: TypeAlias = Callable[[], Sequence[MemberView]]  # a list of all takes a while where there are thousands
Judgement: TypeAlias = "tuple[Judge, Sequence[Tell | str]]"  # a text is for people


class Judge(Struct, frozen=True, kw_only=True):
    """The coordinator's reading of one topic's notes. The base class ignores them; times are monotonic seconds."""

    topic: ClassVar[str] = ""
    hears: ClassVar[Any] = None  # the kind of a body from a node; None: it has no notes
    carried: ClassVar[Any] = None  # the kind of a body in a Join or a Failed; None: none
    due_s: float | None = None  # when `tick` is to be called; None: never

    def form(self, joined: Sequence[Joined], now_s: float) -> Mapping[int, object]:
        """A generation forms of these: the bodies for its members, by number."""
        return {}

    def begin(self, members: Sequence[MemberView], now_s: float) -> Judge:
        """The workers of these members are started; or, without members, the generation is over."""
        return self

    def hear(self, number: int, body: Any, members: Members, now_s: float) -> Judgement:
        """A member that is not done has sent a note."""
        return self, ()

    def tick(self, members: Members, now_s: float) -> Judgement:
        """`due_s` has passed."""
        return self, ()

    def explain_end(self, bodies: Sequence[Any]) -> str:
        """The notes of nodes whose workers have ended, in words for people; "": nothing."""
        return ""

    def explain_timeout(self, bodies: Sequence[Any], rank: int) -> tuple[str, Sequence[int]]:
        """The ranks that made a rank's collective time out, by the nodes' notes, and words; "", (): not proven."""
        return "", ()

    def status(self, now_s: float) -> object:
        """The body of what `status` shows."""
        return None


def opened(kind: Any, body: object, topic: str) -> Any:
    """A note's body as a value of the kind that is expected; None: there is none, or it is of another kind."""
    if body is None:
        return None
    try:
        return convert(kind, body)
    except MessageError as problem:
        ignore(topic, str(problem))
        return None


@functools.lru_cache(maxsize=64)
def ignore(topic: str, why: str) -> None:
    """Say that a note was ignored, once for each reason."""
    _log.warning("ignored a note about %r: %s", topic, why)
