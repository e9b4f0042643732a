"""What faults explain, what they do not, and what the lines of training steps and of memory tell."""

from __future__ import annotations

import dataclasses

import pytest

from tests.soak import judging, steps
from tests.soak.faults import (
    KILLED,
    NODES,
    STOPPED,
    TORCH,
    Fault,
    Seen,
    expected,
    wrong,
)
from tests.soak.growth import fit
from tests.soak.looking import Look, Process

NOBODY: tuple[tuple[int, ...], ...] = ((),) * NODES
QUIET = Seen(codes=NOBODY, last_words=((),) * NODES, charges=0, starts=0, longest_s=1.0)
ROLES = judging.ROLES
STOPPED_WORDS = "reason=Stopped node=2 host=job-node-0-2 exit=143 attempt=1 retryable=true seconds=26.4"


def seen(**fields):
    return dataclasses.replace(QUIET, **fields)


def at_node_2(value):
    return ((), (), (value,)) + ((),) * (NODES - 3)


# -- drawing --------------------------------------------------------------------------------------


# -- what faults explain --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TORCH)
def test_each_kind_explains_what_it_costs_and_no_more(kind):
    nodes = tuple(range(1, 1 + (TORCH[kind].victims or NODES - 1)))
    cost, code = expected([Fault(kind, nodes, 1.0)], TORCH), TORCH[kind].code
    codes = tuple((code,) if code and node in nodes else () for node in range(NODES))
    words = tuple(tuple("" if one == KILLED else STOPPED_WORDS for one in ends) for ends in codes)
    right = seen(codes=codes, last_words=words, charges=cost.charges[0], starts=cost.starts[0])
    assert wrong(cost, right) == []
    assert len(wrong(cost, dataclasses.replace(right, charges=cost.charges[1] + 1))) == 1
    assert len(wrong(cost, dataclasses.replace(right, starts=cost.starts[1] + 1))) == 1
    assert len(wrong(cost, dataclasses.replace(right, longest_s=cost.bound_s + 0.1))) == 1
    well = ((138,), *codes[1:])
    assert "pod 0 ended with [138], where the faults explain []" in wrong(
        cost, dataclasses.replace(right, codes=well, last_words=(("reason=PeerLost exit=138 ",), *words[1:]))
    )


def test_only_failed_workers_and_a_lost_store_are_charged():
    assert {kind for kind, values in TORCH.items() if values.charges[1]} == {
        "kill worker",
        "kill all workers",
        "kill worker while starting",
        "hang worker",
        "kill store",
    }


def test_of_two_faults_at_a_time_one_may_hide_the_others_failure():
    cost = expected([Fault("kill worker", (1,), 0.0), Fault("kill pod", (2,), 2.0)], TORCH)
    assert cost.codes == at_node_2(KILLED)
    assert cost.charges == (0, 1)
    assert cost.starts[0] == 1


def test_a_termination_message_has_to_fit_the_end():
    cost = expected([Fault("term pod", (2,), 1.0)], TORCH)
    ended = {"codes": at_node_2(STOPPED), "starts": 1}
    assert wrong(cost, seen(last_words=at_node_2(STOPPED_WORDS), **ended)) == []
    for text in ("", "reason=Failed exit=143 attempt=1", STOPPED_WORDS + "x" * 4096):
        assert len(wrong(cost, seen(last_words=at_node_2(text), **ended))) == 1


# -- steps ----------------------------------------------------------------------------------------


def lines(*runs, workers=NODES):
    """Steps of starts of the workers: (first, last) each."""
    numbers = [(name, number) for name, (a, b) in zip("abcdef", runs, strict=False) for number in range(a, b + 1)]
    return "".join(f"{at}.0 {number} {workers} {name}\n" for at, (name, number) in enumerate(numbers))


@pytest.mark.parametrize(
    "runs", [[(1, 7)], [(1, 7), (6, 12)], [(1, 5), (6, 9)], [(1, 4), (6, 9)], [(1, 4), (1, 3)]]
)
def test_a_job_that_goes_on_from_its_checkpoint_has_lost_nothing(runs):
    assert steps.broken(steps.parse(lines(*runs))) == []


@pytest.mark.parametrize("runs", [[(1, 7), (1, 3)], [(1, 7), (8, 9)], [(1, 12), (6, 7)], [(1, 7), (11, 12)]])
def test_a_job_that_goes_on_from_elsewhere_has(runs):
    assert len(steps.broken(steps.parse(lines(*runs)))) == 1


def test_two_starts_that_train_at_a_time_are_seen():
    text = lines((1, 5), (6, 7)) + "20.0 6 6 a\n"
    assert any("went on at step 6 although" in found for found in steps.broken(steps.parse(text)))


# -- growth ---------------------------------------------------------------------------------------


def test_what_is_loaded_once_is_no_growth_and_what_comes_again_is():
    once = fit([(60.0 * n, 1000.0 + 2400.0 * (n >= 26)) for n in range(41)])
    again = fit([(60.0 * n, 1000.0 + 2400.0 * (n // 6)) for n in range(41)])
    assert once is not None
    assert again is not None
    assert once.per_hour == 0.0
    assert again.per_hour == pytest.approx(24_000, rel=0.1)


def process(role="launcher", **fields):
    return Process(**{"role": role, "pid": 7, "started_s": 1.0, "memory_kb": 1, "threads": 5, "fds": 20, **fields})


def look(at_s=0.0, **fields):
    well = {
        "node": 1,
        "at_s": at_s,
        "roles": ROLES,
        "long_lived": (),
        "segments": 1,
        "tmp_files": 9,
    }
    rest = {"tmp_bytes": 1, "close_wait": 0, "listening": 2, "sockets": 9, "incidents": 0}
    return Look(**{**well, **rest, **fields})


def test_what_is_left_in_a_pod_is_strange():
    assert judging.strange(look()) == []
    for left in (
        {"roles": {**ROLES, "zombie": 1}},
        {"segments": 2},
        {"tmp_files": 99},
        {"close_wait": 1},
    ):
        assert len(judging.strange(look(**left))) == 1


def test_descriptors_and_threads_that_become_more_are_found():
    assert judging.grown(process(), process(fds=21)) == []
    assert len(judging.grown(process(), process(fds=24, threads=7))) == 2


def test_memory_that_grows_is_found_and_memory_that_is_flat_is_not():
    def history(per_look):
        return judging.histories(
            [look(60.0 * n, long_lived=(process(memory_kb=26_000 + per_look * n),)) for n in range(31)]
        )

    assert judging.growing(history(10)) == []
    assert len(judging.growing(history(100))) == 1
