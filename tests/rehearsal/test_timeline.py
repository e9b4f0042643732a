"""Every fault comes once, at its time, its step or its line; by chance the same ones come for the same seed."""

from __future__ import annotations

import math
import shlex

import hypothesis
import pytest
from hypothesis import strategies as st

from tests.rehearsal.refusals import refusal
from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import MAX_LINE
from trainer_launch.rehearsal.faults import grammar
from trainer_launch.rehearsal.faults.grammar import Chaos, Fault
from trainer_launch.rehearsal.faults.injection import Timeline
from trainer_launch.supervisor.step_lines import OutputScanner


def begin(*texts: str, by_chance: Chaos | None = None) -> Timeline:
    return Timeline(map(grammar.parse, texts), by_chance)


def texts(faults: list[Fault]) -> list[str]:
    return [fault.text for fault in faults]


def test_a_fault_comes_at_its_time_once() -> None:
    timeline = begin("kill pod at=2s", "oom at=1s")
    assert timeline.due_s() == 1.0
    come = timeline.come(at_s=0.9)
    assert come == []
    come = timeline.come(at_s=1.0)
    assert texts(come) == ["oom at=1s"]
    assert timeline.due_s() == 2.0
    come = timeline.come(at_s=60.0)
    assert texts(come) == ["kill pod at=2s"]
    assert timeline.due_s() is None
    assert timeline.come(at_s=90.0) == []


def test_a_step_that_was_jumped_over_counts_as_reached() -> None:
    timeline = begin("kill worker at=step:40", "kill pod at=step:60")
    come = timeline.come(step=39)
    assert come == []
    come = timeline.come(step=50)
    assert texts(come) == ["kill worker at=step:40"]
    come = timeline.come(step=40)  # after a restart
    assert come == []
    assert texts(timeline.waiting) == ["kill pod at=step:60"]


def test_a_line_is_looked_through_for_the_pattern_up_to_a_length() -> None:
    timeline = begin(r"kill pod at=line:loss\s+nan", "oom at=1h")
    assert any(timeline.patterns)
    come = timeline.come(line="x" * MAX_LINE + "loss nan")
    assert come == []
    come = timeline.come(line="12:00 loss   nan!")
    assert len(come) == 1
    assert not any(timeline.patterns)
    assert timeline.come(line="loss nan") == []


def test_a_pattern_that_fits_an_empty_line_waits_for_a_line() -> None:
    timeline = begin("kill pod at=line:x*")
    assert timeline.come(at_s=5.0) == timeline.come(step=5) == []
    assert len(timeline.come(line="")) == 1


def test_several_faults_of_one_moment_come_in_their_order() -> None:
    timeline = begin("oom at=1s", "kill pod at=0.5s", "fill shm at=1s", "kill worker")
    come = timeline.come(at_s=2.0)
    assert texts(come) == ["oom at=1s", "kill pod at=0.5s", "fill shm at=1s"]


@pytest.mark.parametrize(
    ("line", "step"),
    [
        ("step 40 loss 1.2", 40),
        ("Step=41", 41),
        ("[0:1] epoch 1 step: 7/100", 7),
        ("STEP   9", 9),
        ("global_step=5", None),
        ("steps 40", None),
        ("footstep 4", None),
        ("step", None),
        ("step 1 of attempt, now step 2", 2),
        ("step 1" + "0" * 30, None),
        ("x" * 5000 + "step 3", None),
    ],
)
def test_a_line_may_tell_a_step(line: str, step: int | None) -> None:
    heard = OutputScanner().scan(line.encode() + b"\n")
    assert (heard[-1].step if heard else None) == step


events = st.lists(
    st.one_of(
        st.floats(0, 1e6).map(lambda at_s: {"at_s": at_s}),
        st.integers(0, 100).map(lambda step: {"step": step}),
        st.text(max_size=30).map(lambda line: {"line": line}),
        st.sampled_from(["go", "loss nan"]).map(lambda line: {"line": line}),
    ),
    max_size=30,
)
given_faults = st.lists(
    st.sampled_from(["oom at=3s", "kill pod at=line:go", "kill worker at=step:7", "fill shm", "partition at=1h"]),
    max_size=6,
)


@hypothesis.settings(deadline=None)
@hypothesis.given(given_faults, events, st.booleans())
def test_no_fault_comes_twice_and_none_is_lost(given: list[str], happens: list, with_chaos: bool) -> None:
    by_chance = Chaos(seed=1, gap_s=100.0, nodes=(0, 1)) if with_chaos else None
    timeline = begin(*given, by_chance=by_chance)
    asked = sorted(texts(timeline.waiting))
    came: list[str] = []
    for event in happens:
        come = timeline.come(**event)
        came += [text for text in texts(come) if not with_chaos or text in asked]
    assert sorted([*came, *texts(timeline.waiting)]) == asked


# -- by chance --------------------------------------------------------------------------------


def first(by_chance: Chaos, count: int) -> list[Fault]:
    timeline = Timeline((), by_chance)
    come: list[Fault] = []
    while len(come) < count and (at_s := timeline.due_s()) is not None:
        come += timeline.come(at_s=at_s)
    return come


def test_a_seed_means_the_same_faults_on_every_machine_and_python() -> None:
    made = first(grammar.parse_chaos("seed=7 rate=1/30s").over(range(3)), 4)
    assert [fault.text for fault in made] == SEED_7


SEED_7 = [
    "kill pod node=0 at=36.719s",
    "kill worker node=0 at=38.419s",
    "stop worker node=1 for=9.5s at=71.041s",
    "stop worker node=1 for=7.4s at=72.366s",
]


@hypothesis.settings(deadline=None)
@hypothesis.given(st.integers(0, 10**12 - 1), st.integers(1, 8), st.sampled_from([0.5, 30.0]))
def test_a_seed_replays(seed: int, nodes: int, gap_s: float) -> None:
    by_chance = Chaos(seed=seed, gap_s=gap_s).over(range(nodes))
    made = first(by_chance, 10)
    assert made == first(by_chance, 10)
    lines = shlex.split(grammar.replay(made))
    assert [grammar.parse(text) for text in lines[1::2]] == made
    assert set(lines[::2]) == {"--fault"}
    assert [fault.when.at_s for fault in made] == sorted(fault.when.at_s or 0 for fault in made)
    timeline = Timeline(made)
    come: list[Fault] = []
    for fault in made:
        come += timeline.come(at_s=fault.when.at_s or 0)
    assert come == made


def test_gaps_have_the_mean_that_was_asked_for_and_nobody_is_spared() -> None:
    made = first(grammar.parse_chaos("seed=3 rate=1/30s").over(range(4)), 2000)
    last_s = made[-1].when.at_s or 0
    assert math.isclose(last_s / 2000, 30.0, rel_tol=0.1)
    assert {fault.node for fault in made} == {0, 1, 2, 3}
    assert {fault.kind for fault in made} == set(grammar.DEFAULT_KINDS)


def test_two_seeds_differ() -> None:
    assert first(Chaos(seed=1, gap_s=1.0, nodes=(0,)), 5) != first(Chaos(seed=2, gap_s=1.0, nodes=(0,)), 5)


def test_what_was_asked_for_is_kept_to() -> None:
    asked = grammar.parse_chaos("seed=5 rate=2/m kinds=partition,kill-worker for=10m nodes=1-2,5").over(range(6))
    made = first(asked, 1000)
    assert 5 < len(made) < 60
    assert all((fault.when.at_s or 0) <= 600 for fault in made)
    assert {fault.node for fault in made} == {1, 2, 5}
    assert {fault.kind for fault in made} == {"partition", "kill worker"}
    assert all((fault.for_s is not None) == (fault.kind == "partition") for fault in made)


def test_nothing_of_chaos_counts_as_missed() -> None:
    assert begin(by_chance=Chaos(seed=1, gap_s=1.0, nodes=(0,))).waiting == []


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["no seed", "seed=7"]),
        ("seed=7", ["no rate", "rate=1/30s"]),
        ("seed=x rate=1/30s", ["invalid value 'x' for seed", "whole number"]),
        ("seed=7 rate=30s", ["invalid value '30s' for rate", "1/30s"]),
        ("seed=7 rate=1000/s", ["invalid value '1000/s' for rate", "20/s at most"]),
        ("seed=7 seed=8 rate=1/s", ["seed is given twice"]),
        ("seed=7 rate=1/s kind=oom", ["'kind=oom'", "did you mean kinds=?"]),
        ("seed=7 rate=1/s kinds", ["'kinds'", "seed, rate"]),
        ("seed=7 rate=1/s kinds=delay-dns", ["invalid value 'delay-dns' for kinds", "kill-worker"]),
        ("seed=7 rate=1/s kinds=explode", ["invalid value 'explode' for kinds"]),
        ("seed=7 rate=1/s for=0", ["invalid value '0' for for"]),
        ("seed=7 rate=1/s nodes=3-1", ["invalid value '3-1' for nodes", "0,2"]),
        ("seed=7 rate=1/s nodes=0-99999999", ["for nodes="]),
        ("seed=7 rate='1/s", ["unclosed"]),
    ],
)
def test_chaos_that_does_not_fit_is_said_in_one_sentence(text: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        grammar.parse_chaos(text)
    for part in parts:
        assert part in str(refused.value)


def test_nodes_that_the_job_has_not_are_refused() -> None:
    with pytest.raises(UsageError, match="nodes has 3; the job has nodes 0 to 1"):
        grammar.parse_chaos("seed=1 rate=1/s nodes=0,3").over(range(2))


@hypothesis.given(st.text(max_size=200))
def test_any_text_is_chaos_or_one_sentence(text: str) -> None:
    assert "\n" not in refusal(lambda: grammar.parse_chaos(text))
    assert "\n" not in refusal(lambda: grammar.parse_chaos(f"seed=1 rate=1/s {text}"))
