"""horovodrun's command line, taken apart and put together."""

from __future__ import annotations

import shlex

import pytest

from trainer_launch.model.errors import UsageError
from trainer_launch.planning.mpi_options import render, split_command


@pytest.mark.parametrize(
    ("line", "typed", "program"),
    [
        ("-np 2 train", {"num_proc": "2"}, "train"),
        ("--num-proc=2 train", {"num_proc": "2"}, "train"),
        ("-np 2 -H a:1,b:1 python t.py -np 9", {"num_proc": "2", "hosts": "a:1,b:1"}, "python t.py -np 9"),
        ("-Ha:1 -p2222 -i/k x", {"hosts": "a:1", "ssh_port": "2222", "ssh_identity_file": "/k"}, "x"),
        ("--min-np 1 --max-np 3 x", {"min_num_proc": "1", "max_num_proc": "3"}, "x"),
        ("--host-disc ./d.sh x", {"host_discovery_script": "./d.sh"}, "x"),
        ("--gloo -np 2 -- x --gloo", {"num_proc": "2"}, "x --gloo"),
        ("-np 1 -np 2 x", {"num_proc": "2"}, "x"),
    ],
)
def test_options_are_read_as_horovods_parser_reads_them(line: str, typed: dict[str, str], program: str) -> None:
    command = split_command(shlex.split(line))
    assert {name: command.value(name) for name in typed} == typed
    assert command.program == tuple(program.split())


def test_options_stay_as_they_were_typed_but_for_those_that_are_ours() -> None:
    command = split_command(shlex.split("-np 2 --blacklist-cooldown-range 5 9 --gloo -p 22 --new=1 x"))
    assert render(command, without=("ssh_port",)) == (
        "--num-proc=2",
        "--blacklist-cooldown-range",
        "5",
        "9",
        "--gloo",
        "--new=1",
    )


@pytest.mark.parametrize(
    ("line", "elastic"),
    [
        ("-np 2 x", False),
        ("-np 2 --min-np 1 x", True),
        ("--max-np 2 x", False),
        ("--host-discovery-script d x", True),
    ],
)
def test_it_is_elastic_by_horovods_own_rule(line: str, elastic: bool) -> None:
    assert split_command(shlex.split(line)).is_elastic is elastic


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("-np 2", "names no program"),
        ("-np", "needs a value"),
        ("--blacklist-cooldown-range 1", "needs a value"),
        ("--gloo=1 x", "takes no values"),
        ("--nope x", "unknown option of horovodrun"),
        ("-x 1 y", "unknown option of horovodrun"),
        ("--log x y", "write it in full"),
    ],
)
def test_what_horovod_would_refuse_is_refused_in_a_sentence(line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        split_command(shlex.split(line))


@pytest.mark.parametrize("text", ["two", "0", "-1", "1.5", "9" * 20])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--min-num-proc"):
        split_command(["--min-np", text, "x"]).number("min_num_proc")


def test_a_question_needs_no_program() -> None:
    assert split_command(["--check-build"]).only_asks
    assert split_command(["-h"]).only_asks
