"""The engines of mpirun and horovodrun: when they are picked, what their agents are told, horovodrun's options."""

from __future__ import annotations

import shlex
import signal

import pytest

from tests.planning.requests import request
from trainer_launch.model import Job, Member, Mpi, NodeRange, Plan, signal_policy
from trainer_launch.model.errors import UsageError
from trainer_launch.planning import engines
from trainer_launch.planning.mpi import Spec
from trainer_launch.planning.mpi_options import render, split_command

ALONE = Job(contract="unknown")


def spec_of(plan: Plan) -> Spec:
    """What the agent is told."""
    forked = plan.processes[0].forked
    assert forked is not None
    assert isinstance(forked.spec, Spec)
    return forked.spec


@pytest.mark.parametrize("line", ["mpirun -np 2 x", "horovodrun -np 2 x"])
def test_the_agent_knows_what_signals_are_for_and_is_asked_to_stop_by_one_that_says_so(line: str) -> None:
    text = "TERM=drain,USR1=checkpoint"
    plan = engines.plan(request(line, ALONE, signals=text))
    told = spec_of(plan).signals
    assert told == signal_policy.parse(text)
    assert plan.stop_signal == signal.SIGINT


def test_by_default_it_is_sigterm() -> None:
    plan = engines.plan(request("mpirun -np 2 x", ALONE))
    told = spec_of(plan).signals
    assert (plan.stop_signal, told) == (signal.SIGTERM, {})


def test_some_signal_has_to_be_left_to_stop_by() -> None:
    given = "TERM=drain,INT=drain,QUIT=drain,HUP=drain"
    with pytest.raises(UsageError, match="no signal that stops the job"):
        engines.plan(request("mpirun -np 2 x", ALONE, signals=given))


OPERATOR = Job(
    contract="mpijob-v2beta1",
    role="launcher",
    engine="mpirun",
    nodes=NodeRange(2, 2),
    members=(Member("w-0", 2), Member("w-1", 2)),
    ssh_dir="/root/.ssh",
    mpi=Mpi(hostfile_path="/etc/mpi/hostfile", launch_agent="ssh", slots_env=2),
)


def told(line: str, job: Job = OPERATOR) -> Spec:
    return spec_of(engines.plan(request(line, job)))


@pytest.mark.parametrize(
    ("line", "engine"),
    [
        ("horovodrun -np 4 python train.py", "horovodrun"),
        ("/opt/conda/bin/horovodrun -np 4 python train.py", "horovodrun"),
        ("horovodrun --check-build", "plain"),
        ("horovodrun --help", "plain"),
    ],
)
def test_it_is_picked_by_the_command(line: str, engine: str) -> None:
    assert engines.plan(request(line, OPERATOR)).engine == engine
    assert engines.plan(request(line, Job(contract="unknown"))).engine == engine


def test_the_agent_gets_the_command_as_typed_and_the_platforms_hosts() -> None:
    plan = engines.plan(request("horovodrun -np 4 --gloo python train.py --lr 1", OPERATOR))
    assert plan.processes[0].argv == ("horovodrun", "-np", "4", "--gloo", "python", "train.py", "--lr", "1")
    spec = told("horovodrun -np 4 python train.py")
    assert (spec.hostfile, spec.slots, spec.agent, spec.settings.min_hosts) == ("/etc/mpi/hostfile", 2, "ssh", None)
    assert any("static" in reason for reason in plan.reasons)


def test_typed_hosts_slots_and_scripts_go_before_the_platforms() -> None:
    assert told("horovodrun -np 4 --hostfile /mine x").hostfile == "/mine"
    assert told("horovodrun -np 4 -p 2022 x").ssh_port == 2022
    spec = told("horovodrun -np 4 --min-np 2 --host-discovery-script /mine.sh --slots-per-host 4 x")
    assert (spec.discovery, spec.slots, spec.slots_are_given, spec.settings.min_hosts) == ("/mine.sh", 4, True, 1)
    assert told("horovodrun -np 4 --min-np 2 -H a:2,b:2 x").discovery is None, "no others join a typed list"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("horovodrun python train.py", "needs the number of processes"),
        ("horovodrun -np none x", "expected a number"),
        ("horovodrun -np 2 -p 65536 x", "expected 1 to 65535"),
        ("horovodrun -np 2 --min-np 0 x", "expected a number"),
        ("horovodrun -np 2", "names no program"),
        ("horovodrun -np 2 --bogus x", "unknown option of horovodrun"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(line: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        engines.plan(request(line, OPERATOR))


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
