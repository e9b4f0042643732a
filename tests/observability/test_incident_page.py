"""The page of an incident: its ranks, and how a real browser shows it."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.rehearsal.browser import browser_in
from trainer_launch.diagnosis import incident_bundle
from trainer_launch.diagnosis.collectives import Collective, Group, Life, RankState
from trainer_launch.diagnosis.incident_bundle import FAILURE, HANG, Incident, Stored
from trainer_launch.observability.incident_page import line_of, page

NOW_S = 1_795_504_000.0
SENTENCE = "rank 5 (node 0) never entered all_reduce #41 of default_pg; rank 5 is in data.py:22 (read_batch)"
NASTY = "<script>alert(1)</script> \x1b[31m password=hunter2 " + "y" * 5000


def collective(number: int, rank: int) -> Collective:
    """One a second, of which rank N enters N ms late; the last one 62 s ago."""
    at_s = NOW_S - 62 - (41 - number) + rank / 1000
    return Collective(number, "all_reduce", "[[4]] Float", int(at_s * 1e9))


def state(rank: int, node: int, *, last: int = 41, life: Life = Life.ALIVE, place: str = "") -> RankState:
    entries = tuple(collective(number, rank) for number in range(36, last + 1))
    group = Group(title="default_pg", ranks="0-7", entered=last, done=40, last=entries)
    place = place or "waits in all_reduce, called from train.py:31 (step)"
    return RankState(rank=rank, node=node, life=life, place=place, groups={"0": group})


def bundle(place: Path, node: int, states: Sequence[RankState], text: str = "Current thread") -> None:
    folder = incident_bundle.new_folder(str(place), f"job-node{node}", NOW_S + node / 10)
    for one in states:
        incident_bundle.add(folder, f"stacks/rank-{one.rank}.txt", f"{text} of rank {one.rank}\n")
        incident_bundle.add(folder, f"output/rank-{one.rank}.txt", f"step {one.rank}\n")
    incident_bundle.add(folder, "host/kernel.txt", "NVRM: Xid (PCI:0000:3b:00): 79\n")
    told = Incident(
        sentence=SENTENCE,
        kind=HANG,
        job="job",
        generation=3,
        ranks=(5,),
        time_s=NOW_S + node / 10,
        host=f"host-{node}",
        node_rank=node,
        states=tuple(states),
    )
    incident_bundle.finish(folder, told)


def joined(place: Path) -> list[Stored]:
    return incident_bundle.chosen(incident_bundle.moments(incident_bundle.stored(str(place))), None)


def small(place: Path) -> list[Stored]:
    in_data = state(5, 1, last=40, place="in data.py:22 (read_batch)")
    bundle(place, 0, [state(rank, 0) for rank in range(4)])
    bundle(place, 1, [state(4, 1), in_data, state(6, 1), state(7, 1)])
    return joined(place)


def large(place: Path) -> list[Stored]:
    for node in range(64):
        ranks = range(8 * node, 8 * node + 8)
        lates = {5: "in data.py:22 (read_batch)", 77: "in data.py:22 (read_batch)"}
        bundle(place, node, [state(r, node, last=41 - (r in lates), place=lates.get(r, "")) for r in ranks])
    return joined(place)


def nasty(place: Path) -> list[Stored]:
    group = Group(title="<b>&", ranks="0-1", entered=1, done=0, last=(Collective(1, "<i>", NASTY[:2000], 1),))
    other = RankState(rank=1, node=0, place=NASTY, groups={"0": Group(title="<b>&")})
    bundle(place, 0, [RankState(rank=0, node=0, how=NASTY[:2000], groups={"0": group}), other], NASTY)
    return joined(place)


def cells(text: str, title: str) -> list[list[str]]:
    part = text.partition(f"<h2>{title}</h2>")[2].partition("</table>")[0]
    return [re.findall(r">([^<]*)</td>", row) for row in part.split("<tr>")[2:]]


def test_the_sentence_comes_first_and_each_rank_of_all_nodes_has_a_row(tmp_path: Path) -> None:
    text = page(small(tmp_path))
    assert f"<h1>{SENTENCE}</h1>" in text
    assert "2 nodes (host-0, host-1)" in text
    rows = cells(text, "Ranks")
    assert [row[0] for row in rows] == [f"rank {rank} (node {int(rank > 3)})" for rank in range(8)]
    assert rows[4][2:] == ["default_pg #40/41", "waits in all_reduce, called from train.py:31 (step)"]
    assert rows[5][2:] == ["default_pg #40/40", "in data.py:22 (read_batch)"]


def test_stacks_output_and_facts_are_there_and_the_named_rank_is_open(tmp_path: Path) -> None:
    text = page(small(tmp_path))
    assert text.count("<details open>") == 1
    assert "Current thread of rank 5" in text.partition("<details open>")[2].partition("</details>")[0]
    assert all(f"Current thread of rank {rank}" in text for rank in range(8))
    assert text.count("NVRM: Xid (PCI:0000:3b:00): 79") == 2


def test_of_many_ranks_the_alike_share_a_row(tmp_path: Path) -> None:
    text = page(large(tmp_path))
    rows = cells(text, "Ranks")
    assert [row[0] for row in rows] == ["rank 5 (node 0)", "rank 77 (node 9)", "ranks 0-4,6-76,78-511"]
    assert text.count("NVRM: Xid (PCI:0000:3b:00): 79") == 64
    assert len(text) < 100_000


def test_a_moment_has_one_incident_of_each_node_and_none_of_other_generations(tmp_path: Path) -> None:
    small(tmp_path)
    folder = incident_bundle.new_folder(str(tmp_path), "job-node2", NOW_S + 1)
    later = Incident(sentence="x", kind=HANG, time_s=NOW_S + 1, job="job", generation=4, node_rank=2)
    incident_bundle.finish(folder, later)
    groups = incident_bundle.moments(incident_bundle.stored(str(tmp_path)))
    assert [[entry.incident.node_rank for entry in group] for group in groups] == [[0, 1], [2]]


def test_a_node_that_was_told_of_a_failure_is_shown_behind_the_hang_that_led_to_it(tmp_path: Path) -> None:
    bundle(tmp_path, 1, [state(5, 1, last=40)])
    folder = incident_bundle.new_folder(str(tmp_path), "job-node0", NOW_S + 2)
    told = "rank 5 failed on node 1 (host-1) by signal 9"
    failure = Incident(sentence=told, kind="failure", time_s=NOW_S + 2, job="job", generation=3, node_rank=0)
    incident_bundle.finish(folder, failure)
    assert [one.incident.sentence for one in joined(tmp_path)] == [SENTENCE, told]


def test_what_others_wrote_is_escaped_cleaned_of_secrets_and_nothing_runs(tmp_path: Path) -> None:
    text = page(nasty(tmp_path))
    assert "hunter2" not in text
    assert "<script" not in text
    assert "<b>&<" not in text
    assert "default-src 'none'" in text
    assert not re.search(r"<(link|iframe|object|embed|img)|@import|url\(|\bon\w+=\"|(src|href)=\"", text)


def test_without_collectives_there_are_still_output_and_facts(tmp_path: Path) -> None:
    folder = incident_bundle.new_folder(str(tmp_path), "run", NOW_S)
    incident_bundle.add(folder, "output/program.txt", "no luck\n")
    incident_bundle.finish(folder, Incident(sentence="program ended", kind="failure", time_s=NOW_S))
    text = page(joined(tmp_path))
    assert "<b>program</b>" in text
    assert "no luck" in text


@pytest.mark.process
@pytest.mark.parametrize("made", [large, nasty], ids=["large", "nasty"])
def test_a_browser_shows_it_without_overlap_on_wide_and_narrow_screens(
    tmp_path: Path, made: Callable[[Path], list[Stored]]
) -> None:
    file = tmp_path / "page.html"
    file.write_text(page(made(tmp_path / "incidents")), encoding="utf-8")
    found = browser_in(tmp_path).measure(file, (1280, 390))
    assert set(found) == {1280, 390}
    for width, seen in found.items():
        assert (seen["page"], seen["outside"]) == (width, [])
        assert set(seen["overlaps"].values()) == {0}, seen["overlaps"]
        assert seen["smallest"] >= 11
        assert seen["faintest"] >= 4.5


# -- the line of code --------------------------------------------------------------------------

TRACEBACK = """{0}Traceback (most recent call last):
{0}  File "/app/train.py", line 31, in main
{0}    step()
{0}  File "/app/data.py", line 22, in read_batch
{0}    open(name)
{0}  File "/usr/lib/python3.11/pathlib.py", line 9, in open
{0}FileNotFoundError: shard-7
"""


@pytest.mark.parametrize("prefix", ["", "[rank1]: "], ids=["Python's", "torch's"])
def test_an_exception_is_listed_with_the_line_of_the_users_that_raised_it(tmp_path: Path, prefix: str) -> None:
    folder = incident_bundle.new_folder(str(tmp_path), "job-node0", NOW_S)
    incident_bundle.add(folder, "output/rank-0.txt", TRACEBACK.format("").replace("data", "victim"))
    incident_bundle.add(folder, "output/rank-1.txt", TRACEBACK.format(prefix))
    about = Incident(sentence="rank 1 ended with exit code 1", kind=FAILURE, time_s=NOW_S, job="job", node_rank=0)
    incident_bundle.finish(folder, about)
    assert line_of(joined(tmp_path)) == "data.py:22 (read_batch)"


def test_a_hang_is_listed_with_the_line_of_the_rank_that_is_named(tmp_path: Path) -> None:
    assert line_of(small(tmp_path)) == "data.py:22 (read_batch)"


def test_where_no_line_is_known_none_is_listed(tmp_path: Path) -> None:
    folder = incident_bundle.new_folder(str(tmp_path), "run", NOW_S)
    incident_bundle.finish(folder, Incident(sentence="program was killed", kind=FAILURE, time_s=NOW_S))
    assert line_of(joined(tmp_path)) == "-"


def test_the_page_shows_the_stack_that_only_another_node_has_in_its_files(tmp_path: Path) -> None:
    stuck = replace(state(5, 1, last=40), stack="/app/data.py:22 (read_batch)\n/app/train.py:29 (main)")
    bundle(tmp_path, 0, [state(4, 0)])
    (entry,) = joined(tmp_path)
    entry = replace(entry, incident=replace(entry.incident, states=(*entry.incident.states, stuck)))
    assert "<pre>/app/data.py:22 (read_batch)\n/app/train.py:29 (main)</pre>" in page([entry])
