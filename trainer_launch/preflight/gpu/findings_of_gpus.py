"""What the checks of GPUs share: one finding for all GPUs of a node, with the bad ones named."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trainer_launch.host.deadline_subprocess import REAP_S
from trainer_launch.model.findings import Fault, Finding, Scope, Status, Value
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu.devices import FACTS_S, Load
from trainer_launch.preflight.gpu.facts import Fact, Gpu, State, Watched, numbered

NOT_TOLD = Fact(State.UNKNOWN, why="it was not told")
FACTS_LIMIT_S = FACTS_S + REAP_S + 2.0
DRAIN = "drain this node, and have the card reset, tested or replaced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trouble:
    """What is wrong with one GPU."""

    gpu: int
    text: str
    status: Status = Status.FAIL
    measured: Value = None
    expected: Value = None
    unit: str = ""
    action: str = DRAIN


def gpus(subject: Subject) -> tuple[Gpu, ...]:
    """Those that the job sees and that answer; none where nothing is known, which gpu-count says."""
    cards = subject.cards
    return () if cards is None else tuple(gpu for gpu in cards.gpus if not gpu.lost)


def load_limit_s(subject: Subject) -> float:
    """What a check may take that needs the load."""
    return FACTS_LIMIT_S if subject.cards is None else subject.cards.load_limit_s


def load(subject: Subject) -> Load | None:
    """What was seen under load; None where there is none."""
    return None if subject.cards is None else subject.cards.load()


def told(
    name: str, found: Sequence[Gpu], asked: str, judge: Callable[[Gpu], Trouble | None], good: str
) -> Iterator[Finding]:
    """Judge each GPU that tells a fact; those that do not are unknown, unless their cards have no such thing."""
    yield from summed(
        name, [(gpu.index, gpu.fact(asked)) for gpu in found], map(judge, knowing(found, asked)), good
    )


def knowing(found: Iterable[Gpu], asked: str) -> list[Gpu]:
    """The GPUs that tell this fact."""
    return [gpu for gpu in found if gpu.fact(asked).is_known]


def summed(
    name: str,
    asked: Sequence[tuple[int, Fact]],
    judged: Iterable[Trouble | None],
    good: str,
    fault: Fault = Fault.NODE,
) -> Iterator[Finding]:
    """A finding for the GPUs with troubles of each status, one for those that are unknown, or one for all."""
    troubles = [one for one in judged if one is not None]
    for status in (Status.FAIL, Status.WARN):
        its = [one for one in troubles if one.status is status]
        if its:
            yield _joined(name, status, its, fault)
    unknown = [(index, fact.why) for index, fact in asked if fact.state is State.UNKNOWN]
    known = [index for index, fact in asked if fact.is_known]
    if unknown:
        text = f"not known of {numbered([index for index, _ in unknown])}: {unknown[0][1]}"
        yield Finding(check=name, status=Status.UNKNOWN, scope=Scope.GPU, text=text)
    elif asked and not known:
        text = f"{numbered([index for index, _ in asked])}: this kind of card has no such thing"
        yield Finding(check=name, status=Status.SKIPPED, scope=Scope.GPU, text=text)
    if known and not troubles:
        yield Finding(check=name, status=Status.PASS, scope=Scope.GPU, text=f"{numbered(known)}: {good}")


def _joined(name: str, status: Status, its: Sequence[Trouble], fault: Fault) -> Finding:
    return Finding(
        check=name,
        status=status,
        fault=fault if status is Status.FAIL else None,
        scope=Scope.GPU,
        subject=", ".join(dict.fromkeys(f"GPU {one.gpu}" for one in its)),
        text="; ".join(f"GPU {one.gpu} {one.text}" for one in its),
        measured=its[0].measured,
        expected=its[0].expected,
        unit=its[0].unit,
        action=its[0].action,
    )


def watched(subject: Subject) -> tuple[Watched, ...]:
    """Those that the job sees, as they were under load."""
    found = load(subject)
    if found is None or subject.cards is None:
        return ()
    return tuple(found.watched[gpu.index] for gpu in subject.cards.gpus if gpu.index in found.watched)
