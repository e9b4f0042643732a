"""What fuzzing has found in files that processes leave for each other, and in what kernels and hosts tell."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from trainer_launch.host import network, process_tree, runtime_directory
from trainer_launch.model import hostfile
from trainer_launch.model.errors import LaunchError
from trainer_launch.mpi import agent_hosts, ssh_client
from trainer_launch.observability import node_view, tables


def test_a_table_of_sockets_that_a_sandbox_cuts_short_tells_nothing() -> None:
    row = "0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 41 1"
    assert network.listening(f"sl\n{row}\n1: x 0 0A\n\n2: 0:zz 0 0A 0 0 0 0 0 5\n", 29500) == ["41"]


@pytest.mark.parametrize("text", ["8 x", "0", "8 -1"])
def test_children_that_are_no_processes_are_not_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "7/task/7").mkdir(parents=True)
    (tmp_path / "7/task/7/children").write_text(text)
    assert process_tree.children(7, str(tmp_path)) is None


def test_what_another_host_says_cannot_command_a_terminal() -> None:
    script = "printf 'a\\n\\033]0;title\\007 no entry\\r\\n\\n' >&2; exit 3"
    assert agent_hosts.run(("sh", "-c", script), {"PATH": "/usr/bin:/bin"}, 60.0) == "?]0;title? no entry"


@pytest.mark.parametrize("said", ["port 99999", "port x", "port", "port 22 22", ""])
def test_a_port_that_is_none_is_not_taken_from_sshs_configuration(said: str) -> None:
    assert ssh_client.port_in(f"user root\n{said}\n") is None
    assert ssh_client.port_in(f"user root\nport 2222\n{said}\n") == 2222


@pytest.mark.parametrize("text", ["ash3, \t[65535", "node[1-3", "node[1", "a[1]b[2", "[ 1 ] x"])
def test_a_short_list_of_hosts_with_an_open_bracket_is_no_list(text: str) -> None:
    with pytest.raises(LaunchError, match="the list"):
        hostfile.expand_hostlist(text, "the list")


def test_why_a_job_ended_cannot_command_the_terminal_of_who_asks() -> None:
    told = {"phase": "over", "generation": 1, "restarts": 0, "max_restarts": 3, "min_nodes": 1, "max_nodes": 1}
    table = {**told, "n_nodes": 0, "nodes": (), "progress": None, "end": "node 1 quit: \x1b[2Jbye"}
    assert "ended: node 1 quit: ?[2Jbye\n" in tables.job(table, None)


def test_neither_can_the_name_of_a_nodes_host() -> None:
    told = {"phase": "running", "generation": 1, "restarts": 0, "max_restarts": 3, "min_nodes": 1, "max_nodes": 1}
    table = {**told, "n_nodes": 1, "nodes": ((0, "\x1b[2J", "up", 1.0),), "progress": None, "end": None}
    assert "\n  0     ?[2J  up for 1 s\n" in tables.job(table, None)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("since_s", "x"), ("since_s", float("nan")), ("host", "\x1b[2J"), ("pid", True), ("attempt", 10**30)),
        ("exits", [["a", "b"]]),
    ],
)  # fmt: skip
def test_a_launchers_view_that_none_of_ours_wrote_is_not_shown(field: str, value: object, tmp_path: Path) -> None:
    me = process_tree.read(os.getpid())
    assert me is not None
    view = node_view.View(
        version="0", pid=me.pid, started_ticks=me.started, run_dir=str(tmp_path), host="h", node_rank=0,
        contract="c", engine="e", phase="running", since_s=1.0, started_s=1.0,
    )  # fmt: skip
    node_view.write(view)
    assert node_view.read(str(tmp_path)) == view
    told = {**json.loads((tmp_path / runtime_directory.LAUNCHER).read_text()), field: value}
    (tmp_path / runtime_directory.LAUNCHER).write_text(json.dumps(told))
    assert node_view.read(str(tmp_path)) is None
