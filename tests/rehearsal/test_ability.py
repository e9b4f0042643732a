"""What is not possible on this machine is said beforehand: which fault, why, and what to do."""

from __future__ import annotations

import pytest

from trainer_launch.rehearsal.faults import grammar, requests
from trainer_launch.rehearsal.faults.requests import NETWORK_PARTS, Machine

ABLE = Machine(namespaces=True, works=frozenset(NETWORK_PARTS))
BY_US = ("kill worker", "stop worker", "kill pod", "term pod", "add node", "scale workers=2")
WITH_GROUND = ("partition", "delay dns 3s")


def refused(machine: Machine, *texts: str) -> tuple[str, ...]:
    return requests.cannot(map(grammar.parse, texts), machine)


def without(*words: str) -> Machine:
    return Machine(namespaces=True, works=ABLE.works - set(words))


def test_an_able_machine_refuses_nothing() -> None:
    assert refused(ABLE, *BY_US, *WITH_GROUND) == ()


def test_what_needs_only_signals_can_be_done_everywhere() -> None:
    assert refused(Machine(missing=frozenset(requests.PROGRAMS)), *BY_US) == ()


@pytest.mark.parametrize("text", WITH_GROUND)
@pytest.mark.parametrize(
    ("machine", "parts"),
    [
        (Machine(missing=frozenset({"ip"})), ["ip not found in PATH", "install iproute2"]),
        (Machine(missing=frozenset({"ip", "nsenter"})), ["nsenter and ip", "util-linux and iproute2"]),
        (Machine(why="unshare failed: Operation not permitted"), ["(unshare failed", "run it as root"]),
        *((without(word), [why, "--privileged"]) for word, why in NETWORK_PARTS.items()),
    ],
)
def test_the_reason_and_the_remedy_are_said(text: str, machine: Machine, parts: list[str]) -> None:
    (sentence,) = refused(machine, text)
    assert sentence.startswith(f"--fault '{grammar.parse(text).text}' is not possible on this machine: ")
    for part in parts:
        assert part in sentence


def test_of_one_kind_there_is_one_sentence() -> None:
    assert len(refused(Machine(), "partition node=0", "partition node=1", "delay dns 3s")) == 2


def test_faults_tell_what_ground_they_want() -> None:
    wants = {text: requests.wants_own_network([grammar.parse(text)]) for text in (*BY_US, *WITH_GROUND)}
    assert {text for text, own in wants.items() if own} == set(WITH_GROUND)


def test_every_kind_of_fault_is_spoken_of_here() -> None:
    assert {grammar.parse(text).kind for text in (*BY_US, *WITH_GROUND)} == set(grammar.KINDS)
