"""The plan of `--engine torchrun`: the image's torchrun, and what lets it meet at the launchers' coordinator."""

from __future__ import annotations

import shlex
import signal
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from tests.planning.requests import request
from tests.planning.test_torchrun import ALONE, ELASTIC, ETCD, FIXED, LOGS
from trainer_launch.model import Job, NodeRange, Plan, PortRange, Seats
from trainer_launch.model.errors import NotRunnableError, UsageError
from trainer_launch.model.signal_policy import SignalAction, parse
from trainer_launch.planning import engines, programs
from trainer_launch.planning.engines import torchrun
from trainer_launch.pytorch import torchrun_rendezvous_options

START = "/venv/bin/python -m torch.distributed.run "


def plan(line: str, job: Job, env: dict[str, str] | None = None, **changes: Any) -> Plan:
    return engines.plan(request(line, job, env, engine=torchrun.NAME, our_rendezvous=True, **changes))


def words(made: Plan) -> str:
    (torchrun,) = made.processes
    return shlex.join(word for word in torchrun.argv if word != LOGS)


def conf_of(made: Plan, nodes: NodeRange) -> torchrun_rendezvous_options.Conf:
    """What the plug-in makes of the plan's options."""
    told = dict(
        word.removeprefix("--").split("=", 1) for word in made.processes[0].argv if word.startswith("--rdzv")
    )
    conf = dict(pair.split("=", 1) for pair in told["rdzv-conf"].split(","))
    return torchrun_rendezvous_options.read(told["rdzv-endpoint"], nodes, told["rdzv-id"], conf, {})


def test_it_is_the_images_torchrun_with_our_rendezvous() -> None:
    made = plan("train.py --lr 1", FIXED)
    assert words(made) == START + (
        "--nnodes=2 --nproc-per-node=4 --rdzv-backend=trainer-launch --rdzv-endpoint=job-node-0-0.job:29500 "
        "--rdzv-id=job-node-0-0.job-29500 "
        "--rdzv-conf=node_rank=1,host=here,is_host=false,patience=600,max_restarts=3 "
        "--max-restarts=1000000 --node-rank=0 -- train.py --lr 1"
    )
    assert made.wait_for == ("job-node-0-0.job",)


def test_the_launcher_hosts_the_coordinator_and_torchrun_joins_it() -> None:
    made = plan("train.py", ALONE)
    conf = conf_of(made, NodeRange(1, 1))
    assert made.hosting is not None
    assert (conf.is_host, conf.endpoint.port, conf.endpoint.host) == (False, made.hosting.port, made.hosting.host)
    assert (conf.run_id, conf.host) == (made.hosting.job, "here")


def test_the_plug_in_is_told_what_an_elastic_job_needs_to_lose_node_0() -> None:
    first = request("train.py", ELASTIC).host
    made = plan("train.py", ELASTIC, host=type(first)(**{**_fields(first), "hostname": "job-worker-0"}))
    assert made.hosting is not None
    seats = conf_of(made, NodeRange(1, 3)).seats
    assert isinstance(seats, Seats)
    assert seats == made.hosting.seats


def _fields(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in value.__struct_fields__}


def test_the_plug_in_is_told_the_secret_and_the_ports() -> None:
    made = plan("train.py", ALONE, secret_file="/run/secret", port_range=PortRange(7000, 7009))
    conf = conf_of(made, NodeRange(1, 1))
    assert (conf.secret_file, str(conf.ports)) == ("/run/secret", "7000-7009")


def test_the_first_failure_is_read_from_torchs_error_file() -> None:
    made = plan("train.py", ALONE)
    assert made.processes[0].env["TORCHELASTIC_ERROR_FILE"] == made.failure_file


def test_a_platform_gets_the_error_file_where_it_wants_it_unless_nobody_clears_an_older_one() -> None:
    wanted = {"TORCHELASTIC_ERROR_FILE": "/dev/termination-log"}
    assert plan("train.py", ALONE, wanted).failure_file == "/dev/termination-log"
    assert plan("train.py", ETCD, wanted).failure_file != "/dev/termination-log"


@pytest.mark.parametrize(("given", "seconds"), [({}, "60"), ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}, "90")])
def test_workers_have_the_whole_grace_to_save_unless_the_user_has_set_torchs_own(given, seconds: str) -> None:
    made = plan("train.py", ALONE, given, grace_s=59.5)
    assert made.processes[0].env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == seconds


def test_a_backend_of_torchs_own_stays() -> None:
    made = plan("train.py", ETCD)
    assert "--rdzv-backend=etcd-v2 --rdzv-endpoint=etcd:2379" in words(made)
    assert (made.hosting, made.meeting) == (None, None)


def test_with_exec_nothing_of_the_launcher_is_in_it() -> None:
    made = plan("train.py", ALONE, replace_launcher=True, prefix=True)
    (torchrun,) = made.processes
    assert LOGS not in torchrun.argv
    assert torchrun.env.keys().isdisjoint(("TRAINER_LAUNCH_RUN_DIR", "TORCHELASTIC_ERROR_FILE"))


@pytest.mark.parametrize("given", ["TERM=checkpoint", "USR1=drain", "USR1=terminate", "HUP=forward"])
def test_what_torchrun_cannot_do_on_a_signal_is_refused(given: str) -> None:
    with pytest.raises(UsageError, match="is not possible with torchrun"):
        plan("train.py", ALONE, signals=parse(given))


@pytest.mark.parametrize("given", ["USR1=checkpoint", "USR2=forward", "TERM=terminate"])
def test_what_torchrun_does_on_a_signal_is_accepted(given: str) -> None:
    assert plan("train.py", ALONE, signals=parse(given)).signals


def test_a_signal_on_which_torchrun_ends_the_job_is_no_failure_of_it() -> None:
    made = plan("torchrun --signals-to-handle=SIGTERM,SIGUSR1 train.py", ALONE)
    assert made.signals == {signal.SIGUSR1: SignalAction.DRAIN}


def test_a_launcher_without_entry_points_says_so_before_torchrun_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    programs.check_plug_in(plan("train.py", ETCD))  # its nodes meet without our plug-in
    with pytest.raises(NotRunnableError, match="torchrun cannot load the rendezvous backend trainer-launch"):
        programs.check_plug_in(plan("train.py", ALONE))


def test_a_torchrun_that_loads_no_plug_ins_is_refused_in_one_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As that of torch 2.4, which would end with a KeyError."""
    registry = tmp_path / "torch" / "distributed" / "elastic" / "rendezvous" / "registry.py"
    registry.parent.mkdir(parents=True)
    registry.write_text("")
    (tmp_path / "torch" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ("trainer-launch",))
    monkeypatch.setattr(metadata, "version", lambda _: "2.4.1")
    with pytest.raises(NotRunnableError, match=r"torchrun of torch 2\.4\.1 loads no rendezvous backends"):
        programs.check_plug_in(plan("train.py", ALONE))
    registry.write_text('entry_points(group="torchrun.handlers")')
    programs.check_plug_in(plan("train.py", ALONE))
