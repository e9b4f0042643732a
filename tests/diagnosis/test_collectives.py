"""Which rank a job waits for, from what each rank's flight recorder knows; and who only looks like the cause."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import (
    Collective,
    Doing,
    Explanation,
    Group,
    Life,
    Message,
    RankState,
    Stage,
    at_timeout,
    explain,
    never_entered,
    unexplained,
)
from trainer_launch.model.units import numbers_in, spans

SECOND = 1_000_000_000
NOW = 100 * SECOND
SIZES = "[[4]] Float"


def group(entered: int, done: int, operation: str = "all_reduce", sizes: str = SIZES, ranks: str = "0-3") -> Group:
    """One of ours; its last collective is this operation, the others are all_reduce; it was entered 40 s ago."""
    last = [Collective(n, "all_reduce", SIZES, NOW - 50 * SECOND) for n in range(max(1, entered - 3), entered)]
    if entered:
        last.append(Collective(entered, operation, sizes, NOW - 40 * SECOND))
    return Group(title="default_pg", ranks=ranks, entered=entered, done=done, last=tuple(last))


def rank(number: int, entered: int = 7, done: int = 6, **known: object) -> RankState:
    """A rank of four; by default it waits in all_reduce #7."""
    groups = known.pop("groups", {"0": group(entered, done)})
    return RankState(rank=number, groups=groups, **known)  # type: ignore[arg-type]


def explained(states: Iterable[RankState], limit_s: float = 0.0) -> Explanation:
    """What is told of a job in which somebody waits."""
    found = explain(tuple(states), NOW, limit_s)
    assert found is not None
    return found


def text_of(*states: RankState) -> str:
    return explained(states).text


WAITING = (rank(0), rank(1), rank(2))
ENTERED = "never entered all_reduce #7 of default_pg, [[4]] Float; ranks 0-2 have waited in it for 40 s; "


# -- a collective that timed out ----------------------------------------------------------------


def missing(*states: RankState) -> Explanation:
    """What is told of the collective in which rank 0 timed out."""
    found = never_entered(states, 0)
    assert found is not None
    return found


def timed_out(number: int, **known: object) -> RankState:
    """A rank that raised because all_reduce #7 did not complete in time: torch then counts it as ended."""
    return rank(number, 7, 7, life=Life.DEAD, how="exit code 1", **known)


def test_who_had_not_entered_the_collective_that_timed_out_is_named_with_where_it_was() -> None:
    slow = rank(1, 6, 6, place="in train.py:31 (evaluate)", node=1)
    found = missing(timed_out(0), slow, rank(2), rank(3))
    assert found.ranks == (1,)
    assert found.text == (
        "rank 1 (node 1) had not entered all_reduce #7 of default_pg, [[4]] Float; ranks 0,2-3 waited in it; "
        "rank 1 was in train.py:31 (evaluate)"
    )


@pytest.mark.parametrize(
    "third",
    [
        None,
        rank(3, why="it did not answer in time", groups={}),
        rank(3, groups={}),
    ],
    ids=["nothing is known of it", "it did not answer", "it has left its group"],
)
def test_of_a_collective_that_timed_out_nobody_is_named_while_one_rank_may_be_missing_as_well(
    third: RankState | None,
) -> None:
    states = (timed_out(0), rank(1, 6, 6, place="in train.py:31 (evaluate)"), rank(2))
    assert never_entered((*states, *([third] if third else [])), 0) is None


def test_of_a_collective_that_all_had_entered_when_it_timed_out_nobody_is_named() -> None:
    assert never_entered((timed_out(0), timed_out(1), rank(2), rank(3)), 0) is None
    assert never_entered((), 0) is None


def test_who_was_missing_because_it_waited_in_another_group_is_a_victim_of_the_collective_that_timed_out() -> None:
    pair = [Group(title="pair", ranks="2-3", entered=n, done=0, last=group(1, 0).last * n) for n in (1, 0)]
    states = (
        timed_out(0),
        timed_out(1),
        rank(2, groups={"0": group(6, 6), "1": pair[0]}, place="waits in all_reduce", doing=Doing.COLLECTIVE),
        rank(3, groups={"0": group(6, 6), "1": pair[1]}, place="in data.py:22 (read_batch)"),
    )
    found = missing(*states)
    assert found.ranks == (3,)
    assert found.text.endswith("rank 3 was in data.py:22 (read_batch)")


def test_who_waited_for_a_message_while_a_collective_timed_out_is_not_said_to_be_the_cause() -> None:
    waits = {"doing": Doing.COLLECTIVE, "place": "waits in recv, called from a.py:9 (stage)"}
    found = missing(timed_out(0), rank(1, 6, 6, **waits), rank(2), rank(3))
    assert found.ranks == ()
    assert found.text.endswith("rank 1 waited in recv, called from a.py:9 (stage)")
    found = missing(timed_out(0), rank(1, 6, 6, **waits), rank(2, 6, 6, place="in x"), rank(3))
    assert found.ranks == (2,)


def after(rank: RankState, seconds: float) -> RankState:
    """The rank, which has entered its last collective so much later."""
    own = rank.groups["0"]
    last = own.last[-1]._replace(at_ns=own.last[-1].at_ns + int(seconds * SECOND))
    return replace(rank, groups={"0": replace(own, last=(*own.last[:-1], last))})


@pytest.mark.parametrize("first", [0, 1], ids=["who waited", "who came late"])
def test_who_entered_a_collective_after_the_others_time_out_is_named_whoever_ended_first(first: int) -> None:
    late = after(timed_out(1, node=1), 11)
    found = never_entered(at_timeout((timed_out(0), late, rank(2), after(rank(3), 2)), first, 10), first)
    assert found is not None
    assert found.ranks == (1,)
    assert found.text == (
        "rank 1 (node 1) had not entered all_reduce #7 of default_pg, [[4]] Float; ranks 0,2-3 waited in it; "
        "rank 1 entered it too late"
    )


def test_who_entered_a_collective_late_but_in_time_is_not_named_when_it_times_out() -> None:
    states = (timed_out(0), after(rank(1), 9), rank(2), rank(3))
    assert never_entered(at_timeout(states, 0, 10), 0) is None


def test_who_came_late_because_it_had_waited_in_another_group_or_may_have_for_a_message_is_not_the_cause() -> None:
    early = Collective(1, "barrier", "", NOW - 45 * SECOND)
    pair = [
        Group(title="pair", ranks="1,3", entered=1, done=1, last=(early._replace(at_ns=early.at_ns + shift),))
        for shift in (0, 20 * SECOND)
    ]
    both = [after(rank(number, 7, 7), 30) for number in (1, 3)]
    one, three = (replace(both[n], groups={**both[n].groups, "1": pair[n]}) for n in (0, 1))
    found = never_entered(at_timeout((timed_out(0), one, rank(2), three), 0, 10), 0)
    assert found is not None
    assert found.ranks == (3,)
    late = after(rank(1), 11)
    late = replace(late, groups={"0": replace(late.groups["0"], begun=20)})
    found = never_entered(at_timeout((timed_out(0), late, rank(2), rank(3)), 0, 10), 0)
    assert found is not None
    assert found.ranks == ()


def test_a_rank_that_was_aborted_and_left_no_record_is_no_hindrance_where_others_waited_with_it() -> None:
    """As NCCL's watchdog does."""
    aborted = RankState(rank=0, life=Life.DEAD, how="SIGABRT")
    late = rank(1, 6, 6, place="in train.py:31 (evaluate)")
    found = missing(aborted, late, rank(2), rank(3))
    assert found.ranks == (1,)
    assert found.text.startswith(
        "rank 1 had not entered all_reduce #7 of default_pg, [[4]] Float; ranks 2-3 waited"
    )
    assert never_entered((aborted, late, rank(2, 6, 6), rank(3, 6, 6)), 0) is None, "what it waited in is not known"


def test_nobody_is_named_where_ranks_waited_for_each_other_in_a_circle() -> None:
    other = Group(title="pair", ranks="0-1", entered=1, done=0, last=(Collective(1, "barrier", "", NOW),))
    states = (
        rank(0, groups={"0": group(7, 7, ranks="0-1"), "1": Group(title="pair", ranks="0-1")}, life=Life.DEAD),
        rank(1, groups={"0": group(6, 6, ranks="0-1"), "1": other}),
    )
    assert never_entered(states, 0) is None


# -- who waits for whom ---------------------------------------------------------------------------


def test_nobody_is_named_where_nobody_waits() -> None:
    assert explain((), NOW) is None
    assert explain([rank(number, 7, 7) for number in range(4)], NOW) is None
    assert explain([RankState(rank=number, why="torch records nothing") for number in range(4)], NOW) is None


@pytest.mark.parametrize(
    ("known", "why", "helps"),
    [
        ({"place": "in data.py:22 (read_batch)", "node": 1}, "rank 3 is in data.py:22 (read_batch)", None),
        (
            {"place": "in a.py:1 (next)", "doing": Doing.DATA},
            "rank 3 is in the data loader: in a.py:1 (next)",
            None,
        ),
        ({"life": Life.STOPPED}, "rank 3 is stopped (SIGSTOP)", True),
        ({"life": Life.DEAD, "how": "SIGKILL"}, "rank 3 died (SIGKILL)", True),
        ({}, "where rank 3 is, is unknown", None),
    ],
)
def test_the_rank_that_never_entered_is_named_with_what_it_does(
    known: dict[str, object], why: str, helps: bool | None
) -> None:
    found = explained((*WAITING, rank(3, 6, 6, **known)))
    who = "rank 3 (node 1)" if "node" in known else "rank 3"
    assert found.text == f"{who} {ENTERED}{why}"
    assert (found.ranks, found.reason, found.helps, found.accuses) == ((3,), "", helps, True)


@pytest.mark.parametrize("doing", [Doing.CHECKPOINT, Doing.COMPILING, Doing.DEBUGGER])
def test_what_may_take_long_is_told_and_accuses_nobody(doing: Doing) -> None:
    found = explained((*WAITING, rank(3, 6, 6, doing=doing, place="in torch.py:9 (save)")))
    assert found.text.endswith(f"rank 3 is in {doing.value}: in torch.py:9 (save)")
    assert (found.accuses, found.helps) == (False, None)


def test_a_rank_that_finished_shows_uneven_data_which_no_restart_mends() -> None:
    found = explained((*WAITING, rank(3, 6, 6, life=Life.FINISHED)))
    assert found.text == (
        "rank 3 finished with exit code 0, and ranks 0-2 have waited in all_reduce #7 of default_pg, [[4]] Float "
        "for 40 s: the ranks' data is uneven; a restart will not help"
    )
    assert (found.ranks, found.reason, found.helps) == ((3,), "ProgramError", False)
    assert explained((*WAITING, RankState(rank=3, life=Life.FINISHED))).reason == "ProgramError", "without a record"


@pytest.mark.parametrize(
    ("operation", "sizes", "told"),
    [
        ("barrier", "[]", "rank 3 entered barrier, ranks 0-2 entered all_reduce"),
        (
            "all_reduce",
            "[[8]] Float",
            "rank 3 entered all_reduce with [[8]] Float, ranks 0-2 entered all_reduce",
        ),
        ("all_reduce", "[[4]] Double", "rank 3 entered all_reduce with [[4]] Double"),
    ],
)
def test_ranks_that_entered_different_collectives_disagree(operation: str, sizes: str, told: str) -> None:
    found = explained((*WAITING, rank(3, groups={"0": group(7, 6, operation, sizes)})))
    assert found.text.startswith(f"the ranks disagree about collective #7 of default_pg: {told}")
    assert (found.ranks, found.reason, found.helps) == ((3,), "ProgramError", False)


def test_of_two_that_disagree_neither_is_the_cause() -> None:
    one, other = (group(7, 6, operation, ranks="0-1") for operation in ("all_reduce", "barrier"))
    found = explained((rank(0, groups={"0": one}), rank(1, groups={"0": other})))
    assert found.text.startswith("the ranks disagree about collective #7 of default_pg: rank 0 entered all_reduce")
    assert (found.ranks, found.reason) == ((), "ProgramError")


def test_gathers_may_have_other_sizes_on_each_rank() -> None:
    states = [rank(number, groups={"0": group(7, 6, "all_to_all", f"[[{number}]] Float")}) for number in range(4)]
    found = explained(states)
    assert "disagree" not in found.text


def test_a_collective_that_all_have_entered_is_the_networks_or_a_devices() -> None:
    found = explained([rank(number) for number in range(4)])
    assert found.text == (
        "all known ranks entered all_reduce #7 of default_pg, [[4]] Float, and ranks 0-3 have waited in it for "
        "40 s: the network or a device does not deliver it"
    )
    assert found.ranks == ()


def test_ranks_of_which_nothing_is_known_are_not_accused() -> None:
    found = explained(WAITING)
    assert found.text.endswith(" for 40 s; nothing is known of rank 3 here"), "it may have entered"
    assert found.helps is None


def test_a_rank_that_waits_in_another_group_is_not_to_blame_but_whom_it_waits_for() -> None:
    pair = Group(title="pair", ranks="2-3", entered=3, done=2, last=(Collective(3, "broadcast", "", NOW),))
    behind = Group(title="pair", ranks="2-3", entered=2, done=2)
    states = (
        rank(0),
        rank(1),
        rank(2, groups={"0": group(6, 6), "1": pair}),
        rank(3, groups={"0": group(6, 6), "1": behind}, place="in a.py:5 (slow)"),
    )
    found = explained(states)
    assert found.ranks == (3,)


def test_ranks_that_wait_for_each_other_in_two_groups_are_the_programs_fault() -> None:
    other = Group(title="pair", ranks="0-1", entered=1, done=0, last=(Collective(1, "all_reduce", SIZES, NOW),))
    both = group(7, 6, ranks="0-1"), group(6, 6, ranks="0-1")
    states = (rank(0, groups={"0": both[0]}), rank(1, groups={"0": both[1], "1": other}))
    found = explained(states)
    assert found.text.startswith("the ranks wait for each other in different collectives: rank 0 in all_reduce #7")
    assert (found.reason, found.helps) == ("ProgramError", False)
    assert found.ranks == (), "all are in it: none is more to blame than another"


def two_groups(**known: Any) -> tuple[RankState, RankState]:
    """Rank 0 has entered all_reduce #7, which rank 1 has not; rank 1 waits in another group for rank 0."""
    other = Group(title="pair", ranks="0-1", entered=1, done=0, last=(Collective(1, "barrier", "", NOW),))
    own = {"0": group(7, 6, ranks="0-1"), "1": Group(title="pair", ranks="0-1")}
    return replace(rank(0, groups=own), **known), rank(1, groups={"0": group(6, 6, ranks="0-1"), "1": other})


@pytest.mark.parametrize(
    ("doing", "place", "accuses"),
    [
        (Doing.DATA, "in a.py:1 (next)", True),
        (Doing.CHECKPOINT, "in torch.py:9 (save)", False),
        (Doing.UNKNOWN, "in train.py:31 (upload)", True),
    ],
)
def test_who_has_entered_an_async_collective_and_does_something_else_does_not_wait(
    doing: Doing, place: str, accuses: bool
) -> None:
    found = explained(two_groups(doing=doing, place=place))
    assert found.text.startswith("rank 0 never entered barrier #1 of pair; rank 1 has waited in it")
    assert found.text.endswith(place)
    assert (found.ranks, found.reason, found.helps, found.accuses) == ((0,), "", None, accuses)


def test_all_that_have_entered_async_collectives_and_read_data_wait_for_nobody() -> None:
    states = [rank(number, 7, 6, doing=Doing.DATA, place="in a.py:1 (next)") for number in range(3)]
    assert explain([*states, rank(3, 6, 6, doing=Doing.DATA, place="in a.py:1 (next)")], NOW) is None


@pytest.mark.parametrize(
    ("place", "quiet_s", "proven", "accuses"),
    [
        ("waits in all_reduce, called from a.py:9 (step)", 50.0, True, True),
        ("", None, True, True),
        ("in train.py:31 (upload)", 50.0, False, True),
        ("in train.py:31 (upload)", 1.0, False, False),
    ],
)
def test_a_finished_rank_proves_an_error_only_where_another_waits_for_it(
    place: str, quiet_s: float | None, proven: bool, accuses: bool
) -> None:
    doing = Doing.COLLECTIVE if place.startswith("waits") else Doing.UNKNOWN
    states = rank(0, place=place, quiet_s=quiet_s, doing=doing), rank(3, 6, 6, life=Life.FINISHED)
    found = explained(states, 30.0)
    assert found.text.startswith("rank 3 finished with exit code 0, and rank 0 has waited in all_reduce #7")
    assert (found.reason == "ProgramError", found.helps is False, found.accuses) == (proven, proven, accuses)


def test_groups_of_other_members_with_the_same_name_are_other_groups() -> None:
    first, second = (group(7, 6, ranks="0-1"), group(7, 7, ranks="0-1")), (group(3, 3, "barrier", "", ranks="2-3"),)
    states = (
        rank(0, groups={"0": first[0]}),
        rank(1, groups={"0": group(6, 6, ranks="0-1")}, place="in a.py:5 (slow)"),
        rank(2, groups={"0": second[0]}),
        rank(3, groups={"0": replace(second[0], entered=7, last=(Collective(7, "barrier", "", NOW),))}),
    )
    found = explained(states[:3])
    assert found.ranks == (1,)
    found = explained((states[0], rank(1, groups={"0": first[0]}), states[3]))
    assert "disagree" not in found.text


# -- progress ---------------------------------------------------------------------------------

EVALUATES = {"place": "in eval.py:12 (evaluate)", "node": 0}
LIMIT_S = 30.0


def evaluates(**known: object) -> RankState:
    return rank(3, 6, 6, **{**EVALUATES, **known})


@pytest.mark.parametrize(("quiet_s", "active"), [(2.0, True), (29.9, True), (30.0, False), (None, False)])
def test_who_has_shown_progress_within_the_limit_is_no_suspect(quiet_s: float | None, active: bool) -> None:
    found = explained((*WAITING, evaluates(quiet_s=quiet_s)), LIMIT_S)
    what = "rank 3 is in eval.py:12 (evaluate)" + ", still making progress" * active
    assert found.text == f"rank 3 (node 0) {ENTERED}{what}"
    assert (found.ranks, found.accuses, found.active) == ((3,), not active, active)


@pytest.mark.parametrize("doing", [Doing.INPUT, Doing.DEBUGGER])
def test_a_rank_that_waits_for_a_person_does_not_hang_however_long_that_takes(doing: Doing) -> None:
    found = explained((*WAITING, rank(3, 6, 6, doing=doing, place="in train.py:9 (main)", quiet_s=9e5)), LIMIT_S)
    assert (found.ranks, found.accuses, found.active) == ((3,), False, True)
    assert found.text.endswith(f"rank 3 is in {doing.value}: in train.py:9 (main)")


@pytest.mark.parametrize("life", [Life.STOPPED, Life.DEAD])
def test_who_cannot_go_on_is_named_whatever_it_has_shown(life: Life) -> None:
    found = explained((*WAITING, evaluates(quiet_s=1.0, life=life)), LIMIT_S)
    assert (found.accuses, found.active) == (True, False)


@pytest.mark.parametrize(
    ("other", "is_accused", "active"),
    [
        ({"quiet_s": 1.0}, False, True),
        ({"quiet_s": 50.0, "doing": Doing.TRANSFER}, False, False),
        ({"quiet_s": 50.0}, True, False),
    ],
)
def test_of_two_that_are_missing_an_idle_one_may_wait_for_the_one_that_is_at_work(
    other: dict[str, Any], is_accused: bool, active: bool
) -> None:
    """Such as for its lock on a file, or for what it downloads; it is named first."""
    states = (*WAITING[:2], rank(2, 6, 6, place="in data.py:22 (read)", quiet_s=50.0), evaluates(**other))
    found = explained(states, LIMIT_S)
    assert (found.ranks, found.accuses, found.active) == ((2, 3), is_accused, active)
    assert "rank 2 is in data.py:22 (read); rank 3 is in " in found.text
    stopped = explained((*states[:2], rank(2, 6, 6, life=Life.STOPPED), evaluates(**other)), LIMIT_S)
    assert stopped.accuses


def test_while_one_shows_progress_the_network_is_no_suspect_and_no_circle_is_proven() -> None:
    found = explained([rank(number, quiet_s=1.0 if number == 2 else 50.0) for number in range(4)], LIMIT_S)
    assert (found.accuses, found.active) == (False, True)
    found = explained(two_groups(quiet_s=1.0), LIMIT_S)
    assert (found.reason, found.accuses, found.active) == ("", False, True)


def test_a_dead_or_finished_rank_waits_for_nobody() -> None:
    assert explain((rank(0, life=Life.DEAD), rank(1, 6, 6)), NOW) is None


def test_an_async_collective_far_ahead_counts_from_the_first_that_has_not_ended() -> None:
    ahead = Group(
        title="default_pg",
        ranks="0-1",
        entered=9,
        done=4,
        last=tuple(Collective(n, "all_reduce", SIZES, NOW - SECOND) for n in range(5, 10)),
    )
    behind = Group(title="default_pg", ranks="0-1", entered=4, done=4)
    text = text_of(RankState(rank=0, groups={"0": ahead}), RankState(rank=1, groups={"0": behind}, place="in x"))
    assert text.startswith("rank 1 never entered all_reduce #5 of default_pg")


def test_a_rank_before_its_first_collective_may_still_load_its_data() -> None:
    waiting = [rank(number, 1, 0) for number in range(3)]
    found = explained((*waiting, rank(3, 0, 0, place="in a.py:1 (download)")))
    assert found.text.endswith("rank 3 is still before its first collective: in a.py:1 (download)")
    assert (found.accuses, found.ranks) == (False, (3,))
    later = explained((*waiting, rank(3, 0, 0, groups={"0": group(0, 0), "1": group(2, 2)}, place="in x")))
    assert later.accuses, "it was further"
    assert explained((*WAITING, RankState(rank=3, why="it did not answer in time"))).accuses, "nothing is known"


def test_who_waits_in_recv_for_the_cause_is_not_the_cause() -> None:
    waits = {"doing": Doing.COLLECTIVE, "place": "waits in recv, called from a.py:9 (stage)"}
    loads = {"doing": Doing.DATA, "place": "in a.py:1 (next)"}
    found = explained((*WAITING[:2], rank(2, 6, 6, **waits), rank(3, 6, 6, **loads)))
    assert found.ranks == (3,)
    assert found.text == (
        "rank 3 never entered all_reduce #7 of default_pg, [[4]] Float; ranks 0-1 have waited in it for 40 s; "
        "rank 3 is in the data loader: in a.py:1 (next); rank 2 waits in recv, called from a.py:9 (stage)"
    )
    alone = explained((*WAITING, rank(3, 6, 6, **waits)))
    assert alone.ranks == (3,)
    both = explained((*WAITING[:2], rank(2, 6, 6, **waits), rank(3, 6, 6, **waits)))
    assert (both.accuses, both.ranks) == (True, ()), "either may have the wrong peer, tag or order"


def mesh(*waiting: int) -> dict[int, dict[str, Group]]:
    """Two by two ranks: each has a tensor-parallel and a data-parallel pair; rank 3 is stuck before its step 10."""
    pairs = {"1": ("mesh_tp", "0-1"), "2": ("mesh_tp", "2-3"), "3": ("mesh_dp", "0,2"), "4": ("mesh_dp", "1,3")}
    at = {"1": 21, "2": 21, "3": 10, "4": 10}
    groups: dict[int, dict[str, Group]] = {rank: {} for rank in range(4)}
    for name, (title, ranks) in pairs.items():
        for member in numbers_in(ranks):
            is_in = {"1": False, "2": member == 2, "3": member == 0, "4": member == 1}[name] and member in waiting
            entered = at[name] + is_in
            since = {2: 40, 0: 39, 1: 38}.get(member, 50)
            last = (Collective(entered, "all_reduce", SIZES, NOW - since * SECOND),)
            groups[member][name] = Group(title=title, ranks=ranks, entered=entered, done=at[name], last=last)
    return groups


def test_in_a_mesh_only_the_rank_that_waits_for_nobody_is_named_and_who_waits_behind_whom_is_told() -> None:
    groups = mesh(0, 1, 2)
    states = [rank(n, groups=groups[n], place="in a.py:5 (read)" if n == 3 else "", node=n // 2) for n in range(4)]
    found = explained(states)
    assert found.ranks == (3,)
    assert found.text == (
        "rank 3 (node 1) never entered all_reduce #22 of mesh_tp, [[4]] Float; rank 2 has waited in it for 40 s; "
        "rank 3 is in a.py:5 (read); ranks 0-1 wait behind ranks 2-3"
    )


def pair(members: str, entered: int, title: str = "pair") -> Group:
    """A pair's group on a rank that has entered its first all_reduce, or not."""
    last = (Collective(1, "all_reduce", SIZES, NOW - 40 * SECOND),) * entered
    return Group(title=title, ranks=members, entered=entered, done=0, last=last)


@pytest.mark.parametrize(
    ("title", "text"),
    [
        (
            "pair",
            "ranks 1,3 never entered all_reduce #1 of pair, [[4]] Float; ranks 0,2 have waited in it for 40 s; "
            "ranks 1,3 are in a.py:5 (read)",
        ),
        (
            "tail",
            "rank 1 never entered all_reduce #1 of pair, [[4]] Float; rank 0 has waited in it for 40 s; rank 1 is "
            "in a.py:5 (read); rank 3 never entered all_reduce #1 of tail, [[4]] Float; rank 2 has waited in it "
            "for 40 s; rank 3 is in a.py:5 (read)",
        ),
    ],
)
def test_two_pairs_that_hang_for_themselves_have_a_cause_each(title: str, text: str) -> None:
    done = group(6, 6)
    states = [
        rank(n, groups={"0": done, f"1-{members}": group_of}, place="in a.py:5 (read)" if n % 2 else "")
        for n, (members, group_of) in enumerate(
            (members, pair(members, entered, name))
            for members, name in (("0-1", "pair"), ("2-3", title))
            for entered in (1, 0)
        )
    ]
    found = explained(states)
    assert (found.ranks, found.text) == ((1, 3), text)
    states[3] = replace(states[3], doing=Doing.CHECKPOINT)
    found = explained(states)
    if title == "tail":
        assert found.ranks == (1,), "the other one may be healthy"


# -- messages -------------------------------------------------------------------------------------


def pipe(*messages: tuple[str, int], at: int = 40) -> dict[str, Group]:
    """The group of a rank that waits for these messages."""
    told = tuple(Message(operation, peer, NOW - at * SECOND) for operation, peer in messages)
    return {"0": replace(group(6, 6), title="pipe", messages=told)}


def test_whom_the_ranks_of_a_pipeline_wait_for_is_the_cause_and_who_waits_for_them_is_not() -> None:
    """Rank 1 is stuck before it sends; its message to rank 0 would come after that."""
    states = (
        rank(0, groups=pipe(("recv", 1), at=39)),
        rank(1, groups=pipe(), place="in a.py:5 (read)"),
        rank(2, groups=pipe(("recv", 1))),
        rank(3, groups=pipe(("recv", 2), at=38)),
    )
    found = explained(states)
    assert found.ranks == (1,)
    assert found.text == (
        "ranks 0,2 have waited in recv from rank 1 in pipe for 40 s; rank 1 is in a.py:5 (read); "
        "rank 3 waits behind rank 2"
    )


def test_a_message_that_both_sides_wait_for_comes_after_what_one_of_them_waits_in_before() -> None:
    states = (
        rank(0, groups=pipe(("recv", 1))),
        rank(1, groups=pipe(("recv", 2), ("send", 0))),
        rank(2, groups=pipe(), place="in a.py:5 (read)"),
    )
    found = explained(states)
    assert found.ranks == (2,)


def test_a_message_that_both_sides_wait_for_and_nothing_else_is_the_networks_or_a_devices() -> None:
    found = explained((rank(0, groups=pipe(("recv", 1))), rank(1, groups=pipe(("send", 0)))))
    assert found.text.endswith("the network or a device does not deliver it")
    assert found.ranks == ()


def test_two_ranks_that_both_receive_wait_in_a_circle() -> None:
    found = explained((rank(0, groups=pipe(("recv", 1))), rank(1, groups=pipe(("recv", 0)))))
    assert (found.reason, found.ranks) == ("ProgramError", ())
    assert found.text == (
        "the ranks wait for each other in different collectives: rank 0 in recv from rank 1 in pipe; rank 1 in "
        "recv from rank 0 in pipe; a restart will not help"
    )


# -- who waits for nobody, where it is not recorded whom the others wait for ----------------------

RECEIVES: dict[str, Any] = {"doing": Doing.COLLECTIVE, "place": "waits in recv, called from a.py:9 (stage)"}
IDLE: dict[str, Any] = {"place": "in a.py:5 (read)", "quiet_s": 31.0}


def alone(*states: RankState) -> Explanation:
    """What is told of a job of which all ranks are known."""
    found = explain(states, NOW, 30.0, len(states))
    assert found is not None
    return found


def receiving(*numbers: int, **known: Any) -> list[RankState]:
    return [rank(n, 6, 6, **{"quiet_s": 31.0, **RECEIVES, **known}) for n in numbers]


def test_the_only_idle_rank_that_waits_for_nobody_is_the_cause_where_all_others_wait() -> None:
    found = alone(*receiving(0, 2, 3), rank(1, 6, 6, **IDLE))
    assert (found.ranks, found.accuses) == ((1,), True)
    assert found.text == (
        "all other ranks wait for rank 1, or behind it: rank 1 is in a.py:5 (read); "
        "ranks 0,2-3 wait in recv, called from a.py:9 (stage)"
    )


@pytest.mark.parametrize(
    ("first", "other", "accused"),
    [
        (IDLE, {**IDLE, "quiet_s": 1.0}, ()),
        (IDLE, IDLE, (1, 3)),
        ({**IDLE, "life": Life.STOPPED}, {**IDLE, "quiet_s": 1.0}, (1,)),
    ],
    ids=["may wait for the one at work", "both are idle", "is stopped"],
)
def test_an_idle_rank_is_not_accused_while_one_that_others_wait_for_elsewhere_is_at_work(
    first: dict[str, Any], other: dict[str, Any], accused: tuple[int, ...]
) -> None:
    """Two pairs: rank 0 waits for rank 1, which may wait for what rank 3 builds; rank 2 waits for rank 3."""
    known, states = ({"quiet_s": 31.0}, first, {"quiet_s": 31.0}, other), list[RankState]()
    for number in range(4):
        name, members = ("a", "0-1") if number < 2 else ("b", "2-3")
        own = replace(pair(members, 1 - number % 2, name), begun=1)
        states.append(rank(number, groups={name: own}, **known[number]))
    found = alone(*states)
    assert found.accuses == bool(accused)
    assert found.active == (not accused)
    assert not accused or found.ranks == accused


@pytest.mark.parametrize(
    ("known", "active"),
    [
        ({**IDLE, "quiet_s": 3.0}, True),
        ({**IDLE, "quiet_s": None}, False),
        ({**IDLE, "place": ""}, False),
        ({**IDLE, "doing": Doing.CHECKPOINT}, False),
        ({**IDLE, "doing": Doing.TRANSFER}, False),
        ({**IDLE, "groups": {}, "stage": Stage.OUTSIDE}, False),
    ],
    ids=["works", "may work", "nobody knows where", "saves", "downloads", "starts"],
)
def test_who_waits_for_nobody_and_may_be_healthy_is_not_accused(known: dict[str, Any], active: bool) -> None:
    found = alone(*receiving(0, 2, 3), rank(1, 6, 6, **known))
    assert (found.ranks, found.accuses, found.active) == ((1,), False, active)


def test_while_a_rank_is_unknown_nobody_is_the_only_one_that_waits_for_nobody() -> None:
    assert explain((*receiving(0, 2), rank(1, 6, 6, **IDLE)), NOW, 30.0, 4) is None


def test_who_is_waited_for_by_a_collective_of_its_own_is_named_by_that() -> None:
    """Rank 0 has come to all_reduce, ranks 2 and 3 still wait for what rank 1 does not send."""
    found = alone(rank(0, quiet_s=31.0), *receiving(2, 3), rank(1, 6, 6, **IDLE))
    assert found.ranks == (1,)
    assert found.text == (
        "rank 1 never entered all_reduce #7 of default_pg, [[4]] Float; rank 0 has waited in it for 40 s; "
        "rank 1 is in a.py:5 (read); ranks 2-3 wait in recv, called from a.py:9 (stage)"
    )


def test_who_waits_for_a_message_is_a_victim_where_a_rank_of_no_collective_waits_for_nobody() -> None:
    """Rank 1 is missing in a pair's all_reduce because it receives from rank 2, which is in no such pair."""
    states = (
        rank(0, groups={"1": pair("0-1", 1)}, quiet_s=31.0),
        rank(1, groups={"1": pair("0-1", 0)}, quiet_s=31.0, **RECEIVES),
        rank(2, groups={}, **IDLE),
    )
    found = alone(*states)
    assert found.ranks == (2,)


def test_the_last_rank_waits_for_one_that_has_finished_wherever_it_does() -> None:
    finished = [rank(n, 6, 6, life=Life.FINISHED, quiet_s=40.0) for n in (0, 2)]
    found = alone(*finished, *receiving(1))
    assert found.text == (
        "ranks 0,2 finished with exit code 0, and rank 1 waits in recv, called from a.py:9 (stage): "
        "the ranks' data is uneven; a restart will not help"
    )
    assert found.reason == "ProgramError"
    assert explain((*finished, *receiving(1, 3)), NOW, 30.0, 4) is None, "they may wait for each other"


def test_who_has_not_joined_is_said_so() -> None:
    joins: dict[str, Any] = {
        "doing": Doing.COLLECTIVE,
        "place": "waits in init_process_group, called from a.py:3 (main)",
    }
    outside: dict[str, Any] = {"groups": {}, "stage": Stage.OUTSIDE}
    states = [rank(n, quiet_s=31.0, **joins, **outside) for n in (0, 2)]
    found = alone(*states, rank(1, **IDLE, **outside))
    assert found.text == (
        "all other ranks wait for rank 1, or behind it: rank 1 has not joined a process group yet: in "
        "a.py:5 (read); ranks 0,2 wait in init_process_group, called from a.py:3 (main)"
    )


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (Stage.LEFT, "rank 1 has left its process group: in a.py:5 (read)"),
        (Stage.ENDED, "rank 1 has ended its program, but not its process: in a.py:5 (read)"),
    ],
)
def test_who_has_left_its_group_is_never_before_its_first_collective(stage: Stage, words: str) -> None:
    finished = [rank(n, groups={}, life=Life.FINISHED, quiet_s=40.0) for n in (0, 2)]
    found = alone(*finished, rank(1, groups={}, stage=stage, **IDLE))
    assert found.text == f"all ranks but rank 1 have finished with exit code 0: {words}"
    assert (found.ranks, found.accuses, found.reason) == ((1,), True, "")
    both = alone(finished[0], *(rank(n, groups={}, stage=stage, **IDLE) for n in (1, 2)))
    assert words.replace("rank 1 has", "ranks 1-2 have").replace(" its ", " their ") in both.text
    busy = alone(*finished, rank(1, groups={}, stage=stage, **{**IDLE, "quiet_s": 1.0}))
    assert (busy.accuses, busy.active) == (False, True)
    found = explained((*WAITING, rank(3, 6, 6, groups={}, stage=stage, place="in a.py:5 (read)")))
    assert (found.accuses, found.ranks) == (True, (3,))
    assert ("never entered" in found.text) == (stage is Stage.ENDED), "who left a group may have entered it"


def test_where_a_root_may_differ_the_network_is_not_the_only_suspect() -> None:
    found = explained([rank(number, groups={"0": group(7, 6, "broadcast")}) for number in range(4)])
    assert found.text.endswith("a device does not deliver it, or the ranks name different roots")
    assert found.helps is None


def test_ranks_that_all_wait_outside_recorded_collectives_hang_and_nobody_is_named() -> None:
    waits = {"doing": Doing.COLLECTIVE, "place": "waits in recv, called from a.py:9 (stage)"}
    both = [rank(0, 6, 6, **waits), rank(1, 6, 6, **waits)]
    found = unexplained(both, 2)
    assert found.text == (
        "all ranks wait for each other outside recorded collectives: "
        "ranks 0-1 wait in recv, called from a.py:9 (stage)"
    )
    assert (found.accuses, found.ranks) == (True, ())
    found = unexplained(both, 3)
    assert not found.accuses, "rank 2 may be starting"
    assert found.text.startswith("all known ranks wait for each other outside recorded collectives: ")
    found = unexplained([rank(0, 6, 6, **waits), rank(1, 6, 6, place="in a.py:1 (f)")], 2)
    assert not found.accuses, "rank 1 may be at work"
    assert found.text.endswith(": rank 0 waits in recv, called from a.py:9 (stage); rank 1 is in a.py:1 (f)")


def test_who_had_not_joined_when_a_rank_timed_out_that_waited_for_it_is_named() -> None:
    victim = rank(0, groups={}, life=Life.DEAD, how="exit code 1")
    outside: dict[str, Any] = {"groups": {}, "stage": Stage.OUTSIDE}
    late = rank(1, place="in a.py:12 (load)", **outside)
    waits = rank(2, place="waits in init_process_group", doing=Doing.COLLECTIVE, **outside)
    found = missing(victim, late, waits)
    assert found.text == "rank 1 had not joined a process group yet: in a.py:12 (load); rank 0 waited for it"
    assert found.ranks == (1,)
    assert never_entered((victim, waits), 0) is None, "rank 2 waits, too"
    assert never_entered((victim, replace(late, stage=Stage.LEFT)), 0) is None
    assert never_entered((victim, replace(late, place="")), 0) is None, "nobody knows where it was"


def test_who_finished_before_it_joined_leaves_all_others_waiting_for_ever() -> None:
    joins: dict[str, Any] = {
        "groups": {},
        "stage": Stage.OUTSIDE,
        "doing": Doing.COLLECTIVE,
        "quiet_s": 2 * LIMIT_S,
    }
    joins["place"] = "waits in init_process_group, called from a.py:9 (main)"
    others = (rank(0, **joins), rank(1, **joins))
    done = rank(2, groups={}, life=Life.FINISHED, quiet_s=2 * LIMIT_S)
    found = unexplained((*others, done), 3, LIMIT_S)
    assert found.text == (
        "rank 2 finished with exit code 0 before it joined a process group; ranks 0-1 wait in init_process_group, "
        "called from a.py:9 (main); a restart will not help"
    )
    assert (found.ranks, found.reason, found.helps) == ((2,), "ProgramError", False)
    for why, states in {
        "they may not have noticed yet": (*others, replace(done, quiet_s=0.0)),
        "it has left a group of its own": (others[0], replace(others[1], stage=Stage.JOINED), done),
        "rank 1 comes later": (others[0], replace(others[1], doing=Doing.DATA), done),
        "the launcher ends them for its death": (*others, replace(done, life=Life.DEAD)),
        "nothing is known of rank 2": others,
    }.items():
        assert unexplained(states, 3, LIMIT_S).reason == "", why


@pytest.mark.parametrize("step", [2, 8])
def test_a_rank_of_a_regular_group_of_4096_ranks_is_missed_by_its_number(step: int) -> None:
    members = [*range(0, 4096, step)]
    waiting = group(7, 6, ranks=spans(members))
    found = explained([rank(n, groups={"0": waiting}) for n in members if n != 5 * step])
    assert found.ranks == (5 * step,)
    assert found.text.startswith(
        f"ranks 0-{4 * step}:{step},{6 * step}-{4096 - step}:{step} have waited in all_reduce"
    )


def test_where_the_members_of_a_group_are_not_known_nobody_else_is_thought_to_be_complete() -> None:
    states = [rank(n, groups={"0": group(7, 6, ranks="")}) for n in range(2)]
    found = explained(states)
    assert found.text == (
        "ranks 0-1 have waited in all_reduce #7 of default_pg, [[4]] Float for 40 s; "
        "the other ranks of its group are unknown"
    )
    assert (found.accuses, found.ranks, found.helps) == (False, (), None)
    found = explained([*states, rank(2, groups={"0": group(6, 6, ranks="")})])
    assert found.ranks == (2,)
