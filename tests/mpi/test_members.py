"""Who belongs to a job: the list, the script, and both together."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_launch.model import Member
from trainer_launch.model.errors import LaunchError, NodeError
from trainer_launch.mpi import agent_hosts
from trainer_launch.planning.mpi import Spec

A, B, C = Member("a", 2), Member("b", 2), Member("c", 2)


def spec(**given: object) -> Spec:
    return Spec(contract="c", hostname="l", scratch="/run", **given)  # type: ignore[arg-type]


def script(folder: Path, text: str) -> str:
    path = folder / "discover_hosts.sh"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_a_typed_file_may_have_the_other_mpis_form(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:2\nb:2\n")
    assert agent_hosts.listed_members(spec(hostfile=str(path))) == (A, B)
    path.write_text("a slots=2\n")
    assert agent_hosts.listed_members(spec(hostfile=str(path), is_hydra_file=True)) == (A,)


def test_a_line_of_neither_form_is_refused_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a:2\nb;c\n")
    with pytest.raises(LaunchError, match="line 1 is 'a:2'; expected HOST, or HOST slots=N"):
        agent_hosts.listed_members(spec(hostfile=str(path)))


def test_a_file_that_is_not_there_is_told() -> None:
    with pytest.raises(LaunchError, match="cannot be read; is its volume mounted"):
        agent_hosts.listed_members(spec(hostfile="/nowhere"))


def test_slots_of_the_platform_fill_gaps_and_those_of_the_user_replace_all() -> None:
    hosts = (Member("a"), Member("b", 4))
    assert agent_hosts.with_slots(hosts, spec(slots=2)) == (A, Member("b", 4))
    assert agent_hosts.with_slots(hosts, spec(slots=2, slots_are_given=True)) == (A, B)


def test_who_is_discovered_stands_behind_the_list_and_keeps_its_place() -> None:
    found = (Member("d"), Member("a"), Member("c"))
    merged = agent_hosts.merged((A, B), found, (A, B, C))
    assert merged == (A, B, C, Member("d", 2))


def test_who_is_discovered_no_more_leaves() -> None:
    assert agent_hosts.merged((A,), (Member("b"),), (A, B, C)) == (A, B)


@pytest.mark.parametrize(("text", "said"), [("exit 3", "failed"), ("echo 'a b c'", "expected")])
def test_a_script_that_fails_or_makes_no_sense_is_told(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(LaunchError, match=said):
        agent_hosts.discovered(spec(discovery=script(tmp_path, text)))


def test_a_script_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent_hosts, "_SCRIPT_S", 0.3)
    with pytest.raises(NodeError, match="did not end"):
        agent_hosts.discovered(spec(discovery=script(tmp_path, "exec sleep 60")))


def test_a_list_that_stops_making_sense_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("a slots=2\n")
    watch = agent_hosts.Watch(spec(hostfile=str(path)))
    path.write_text("\x00")
    assert watch.look() == (A,)
    assert "line 1" in watch.trouble
