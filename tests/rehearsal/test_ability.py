"""What is not possible on this machine is said beforehand: which fault, why, and what to do."""

from __future__ import annotations

import pytest

from trainer_launch.rehearsal.faults import grammar, requests
from trainer_launch.rehearsal.faults.requests import NETWORK_PARTS, Machine

ABLE = Machine(namespaces=True, works=frozenset({*NETWORK_PARTS, "limit"}), memory=True)
BY_US = ("kill worker", "stop worker", "kill pod", "term pod", "add node", "scale workers=2")
WITH_GROUND = ("partition", "slow link rate=1MB/s", "delay dns 3s", "fill shm")


def refused(machine: Machine, *texts: str) -> tuple[str, ...]:
    return requests.cannot(map(grammar.parse, texts), machine)


def without(*words: str) -> Machine:
    return Machine(namespaces=True, works=ABLE.works - set(words), memory=True)


def test_an_able_machine_refuses_nothing() -> None:
    assert refused(ABLE, *BY_US, *WITH_GROUND, "oom") == ()


def test_what_needs_only_signals_can_be_done_everywhere() -> None:
    assert refused(Machine(missing=frozenset({*requests.PROGRAMS, "nft"})), *BY_US) == ()


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


def test_only_a_slow_link_needs_nft() -> None:
    machine = Machine(namespaces=True, works=frozenset(NETWORK_PARTS), missing=frozenset({"nft"}))
    (sentence,) = refused(machine, *WITH_GROUND)
    assert "slow link" in sentence
    assert "install nftables" in sentence
    (sentence,) = refused(without("limit"), *WITH_GROUND)
    assert "use partition instead" in sentence


def test_oom_says_why_no_group_can_be_made() -> None:
    assert refused(Machine(why_no_memory="because of this"), "oom")[0].endswith(
        "is not possible on this machine: because of this"
    )


def test_of_one_kind_there_is_one_sentence() -> None:
    assert len(refused(Machine(), "partition node=0", "partition node=1", "fill shm")) == 2


def test_faults_tell_what_ground_they_want() -> None:
    wants = {text: requests.wants_own_network([grammar.parse(text)]) for text in (*BY_US, *WITH_GROUND, "oom")}
    assert {text for text, own in wants.items() if own} == set(WITH_GROUND)
    assert requests.wants_memory_groups([grammar.parse("oom")])
    assert not requests.wants_memory_groups([grammar.parse("fill shm")])


def test_every_kind_of_fault_is_spoken_of_here() -> None:
    assert {grammar.parse(text).kind for text in (*BY_US, *WITH_GROUND, "oom")} == set(grammar.KINDS)
