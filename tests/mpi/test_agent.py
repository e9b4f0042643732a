"""What the agent does with the machine's wishes when mpirun is not there, and whom it finds to be there."""

from __future__ import annotations

import json
import multiprocessing
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.conftest import require
from tests.planning.requests import request, spec_of
from tests.process.world import DEADLINE_S
from trainer_launch.model import Job, Member, Mpi, signal_policy
from trainer_launch.model.errors import LaunchError, NodeError, UsageError
from trainer_launch.mpi import agent as mpi_agent
from trainer_launch.mpi import job_state as st
from trainer_launch.mpi.agent_hosts import RemoteHosts
from trainer_launch.planning import engines
from trainer_launch.planning.mpi import KUBEXEC, Spec
from trainer_launch.planning.mpi_options import Typed

A, B = Member("a.invalid", 1), Member("b.invalid", 1)
NO_MPIRUN = Typed(mpirun="horovodrun", program=("x",))  # whose version nobody asks for
LINE = "horovodrun -np 1 -H {} x"


def spec_in(folder: Path, **changes: Any) -> Spec:
    """What the agent is told of a job whose hosts are typed."""
    return replace(spec_of(engines.plan(request("mpirun x", Job(contract="c"), scratch=str(folder)))), **changes)


class Agent(mpi_agent.Agent):
    """An agent of something that is never started, in the phase that a test wants."""

    def is_in(self, phase: st.Phase, **changes: object) -> None:
        state = st.State(settings=self._settings, phase=phase, stuck={}, members=(A, B), running=(A, B), starts=2)
        self._state = replace(state, **changes)

    def waits_to_start(self) -> None:
        self._hosts.sweeps = 1
        self._start, self._start_by_s = st.Start((A, B), 2), time.monotonic() + 5.0

    @property
    def phase(self) -> st.Phase:
        return self._state.phase


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """Made without taking over this process's signals."""
    monkeypatch.setattr(mpi_agent, "_hear", lambda *_: (-1, -1))
    made = Agent(spec_in(tmp_path), LINE.format("a.invalid:1,b.invalid:1").split(), {})
    yield made
    made._hosts.watch((), (), check_keys=False)
    made._selector.close()


@pytest.mark.parametrize("event", [st.Tick(9.0), st.Hosts((A,), 9.0)], ids=["others join", "one leaves the list"])
def test_a_start_that_waits_for_sweeps_and_is_interrupted_is_over_at_once(agent: Agent, event: st.Event) -> None:
    """Nobody else would say that it has ended, and the job would wait for that for ever."""
    agent.is_in(st.Phase.RUNNING, admit_at_s=9.0, settings=replace(agent._settings, min_hosts=1))
    agent.waits_to_start()
    agent._take(event)
    assert agent._start is None
    assert agent.phase is st.Phase.ASKING


@pytest.mark.parametrize(
    ("values", "port"),
    [({"plm_rsh_agent": "ssh -F none -p 2022"}, 2022), ({"launcher": "slurm"}, None)],
)
def test_hosts_are_looked_for_where_the_users_own_agent_would_go(
    tmp_path: Path, values: dict[str, str], port: int | None
) -> None:
    require(shutil.which("ssh"), "needs openssh-client")
    typed = replace(NO_MPIRUN, hosts="a.invalid:1", values=values)
    with selectors.DefaultSelector() as selector:
        assert RemoteHosts(spec_in(tmp_path), typed, {}, selector)._probes._port == port


# -- signals ----------------------------------------------------------------------------------


def test_a_start_that_waits_for_sweeps_is_given_up_by_a_drain(agent: Agent) -> None:
    agent.is_in(st.Phase.RUNNING)
    agent._purposes = signal_policy.parse("TERM=drain")
    agent.waits_to_start()
    agent._on_signal(signal.SIGTERM)
    assert agent.phase is st.Phase.DONE


# -- over kubectl -----------------------------------------------------------------------------

KUBEXEC_SH = """\
#!/bin/sh
case "$1" in
    gone) echo 'Error from server (NotFound): pods "gone" not found' >&2; exit 1 ;;
    slow) sleep 2 ;;
esac
exit 0
"""


@pytest.fixture
def asked(tmp_path: Path) -> Iterator[Callable[..., dict[str, str]]]:
    """Ask such hosts once; who is missing, and why."""
    script = tmp_path / "kubexec.sh"
    script.write_text(KUBEXEC_SH)
    script.chmod(0o755)
    selector = selectors.DefaultSelector()

    def ask(*names: str, limit_s: float | None = None) -> dict[str, str]:
        (tmp_path / "hosts").touch()
        mpi = Mpi(hostfile_path=str(tmp_path / "hosts"), launch_agent=KUBEXEC, launch_agent_path=str(script))
        task = request("mpirun x", Job(contract="c", mpi=mpi), scratch=str(tmp_path))
        typed = replace(NO_MPIRUN, hosts=",".join(f"{name}:1" for name in names))
        hosts = RemoteHosts(spec_of(engines.plan(task)), typed, {"PATH": "/usr/bin:/bin"}, selector)
        answers: list[dict[str, str]] = []
        hosts.ask(names, hosts.ask_s if limit_s is None else limit_s, lambda missing: answers.append(dict(missing)))
        until_s = time.monotonic() + DEADLINE_S
        while not answers:
            assert time.monotonic() < until_s, hosts.readiness
            for key, _ in selector.select(0.1):
                key.data()
            hosts.tick(time.monotonic())
        hosts.watch((), (), check_keys=False)
        return answers[0]

    yield ask
    selector.close()


def test_a_pod_that_kubectl_finds_no_more_is_missing(asked: Callable[..., dict[str, str]]) -> None:
    assert asked("well", "gone") == {"gone": 'key: Error from server (NotFound): pods "gone" not found'}


def test_a_pod_that_kubectl_needs_seconds_for_is_there(asked: Callable[..., dict[str, str]]) -> None:
    assert asked("well", "slow") == {}
    assert asked("well", "slow", limit_s=0.1) == {}, "nor is a pod lost that kubectl has not answered for in time"


@pytest.mark.parametrize(
    ("problem", "told"),
    [
        (NodeError("no room"), {"reason": "NotStarted", "message": "no room", "exit_code": 138}),
        (UsageError("no sense"), {"reason": "Misconfigured", "message": "no sense", "exit_code": 2}),
    ],
)
def test_a_failure_of_this_node_is_no_lost_peer(tmp_path: Path, problem: LaunchError, told: dict[str, Any]) -> None:
    class Broken(mpi_agent.Agent):
        def __init__(self, *_: object) -> None:
            raise problem

    spec = spec_in(tmp_path)
    main = partial(mpi_agent.main, spec, ["mpirun"], {}, Broken)
    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    process.join(30)
    assert process.exitcode == told["exit_code"]
    assert json.loads(Path(spec.failure_file).read_text()) == told
