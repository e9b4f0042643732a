"""What the agent does with the machine's wishes when mpirun is not there, and whom it finds to be there."""

from __future__ import annotations

import json
import multiprocessing
import os
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
from tests.process.world import DEADLINE_S
from trainer_launch.model import Member, signal_policy
from trainer_launch.model.errors import LaunchError, NodeError, UsageError
from trainer_launch.mpi import agent as mpi_agent
from trainer_launch.mpi import job_state as st
from trainer_launch.mpi.agent_hosts import Hosts
from trainer_launch.mpi.horovod_agent import HorovodAgent
from trainer_launch.planning.mpi import KUBEXEC, OWN, Spec
from trainer_launch.planning.mpi_options import Typed

A, B = Member("a.invalid", 1), Member("b.invalid", 1)
NO_MPIRUN = Typed(mpirun="horovodrun", program=("x",))  # whose version nobody asks for


class Agent(mpi_agent.Agent):
    """An agent of something that is never started, in the phase that a test wants."""

    def _parsed(self, command: object) -> Typed:
        return NO_MPIRUN

    def is_in(self, phase: st.Phase, **changes: object) -> None:
        state = st.State(settings=self._settings, phase=phase, stuck={}, members=(A, B), running=(A, B), starts=2)
        self._state = replace(state, **changes)

    def waits_to_start(self) -> None:
        self._hosts.sweeps = 1
        self._start, self._start_by_s = st.Start((A, B), 2), time.monotonic() + 5.0

    @property
    def phase(self) -> st.Phase:
        return self._state.phase

    @property
    def rests(self) -> bool:
        return self._hosts._probes._at_rest


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agent]:
    """Made without taking over this process's signals."""
    monkeypatch.setattr(mpi_agent, "_hear", lambda *_: (-1, -1))
    spec = Spec(contract="c", hostname="l", hosts="a.invalid:1,b.invalid:1", agent=OWN, scratch=str(tmp_path))
    made = Agent(spec, (), {})
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


def test_a_list_that_changes_while_the_job_runs_does_not_wake_the_probes(agent: Agent) -> None:
    agent.is_in(st.Phase.RUNNING)
    agent._take(st.Hosts((A, B, Member("c.invalid", 1)), 9.0))
    assert agent.rests


def test_hosts_that_are_waited_for_are_looked_at_often(agent: Agent) -> None:
    agent.is_in(st.Phase.WAITING, running=(), wait_until_s=99.0)
    agent._take(st.Hosts((A, B, Member("c.invalid", 1)), 9.0))
    assert not agent.rests


def test_horovods_agent_that_is_started_again_after_a_kill_has_sessions_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpi_agent, "_hear", lambda *_: (-1, -1))
    spec = Spec(contract="c", hostname="l", agent=OWN, scratch=str(tmp_path))
    for pid in (4242, 4243):
        monkeypatch.setattr(os, "getpid", lambda pid=pid: pid)
        HorovodAgent(spec, ("horovodrun", "-np", "1", "x"), {})._selector.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["horovod-4242", "horovod-4243"]


@pytest.mark.parametrize(
    ("values", "port"),
    [({"plm_rsh_agent": "ssh -F none -p 2022"}, 2022), ({"launcher": "slurm"}, None)],
)
def test_hosts_are_looked_for_where_the_users_own_agent_would_go(
    tmp_path: Path, values: dict[str, str], port: int | None
) -> None:
    require(shutil.which("ssh"), "needs openssh-client")
    spec = Spec(contract="c", hostname="l", hosts="a.invalid:1", agent=OWN, scratch=str(tmp_path))
    with selectors.DefaultSelector() as selector:
        assert Hosts(spec, replace(NO_MPIRUN, values=values), {}, selector)._probes._port == port


# -- signals ----------------------------------------------------------------------------------

TERM, INT, HUP, USR1 = (int(getattr(signal, f"SIG{name}")) for name in ("TERM", "INT", "HUP", "USR1"))


class Program(mpi_agent.Program):
    """What was started, and what it was told."""

    pid = 0

    def __init__(self) -> None:
        self.told: list[int] = []

    def signal(self, number: int) -> None:
        self.told.append(number)

    def _hear(self, text: str, stream: int) -> None: ...

    def _last_lines(self) -> tuple[str, ...]:
        return ()


@pytest.fixture
def ranks(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[str, ...], str]]:
    """What the ranks of a job that runs are told, on which hosts."""
    told: list[tuple[tuple[str, ...], str]] = []
    monkeypatch.setattr(agent._hosts, "tell_ranks", lambda hosts, name: told.append((tuple(hosts), name)))
    agent.is_in(st.Phase.RUNNING)
    agent._mpirun = Program()
    agent._purposes = signal_policy.parse("TERM=drain,HUP=checkpoint,USR1=terminate,USR2=drain")
    return told


def test_a_signal_that_is_no_request_to_stop_reaches_the_ranks_and_ends_nothing(
    agent: Agent, ranks: list[tuple[tuple[str, ...], str]]
) -> None:
    agent._on_signal(HUP)
    assert ranks == [(("a.invalid", "b.invalid"), "HUP")], "mpirun itself would end the job"
    assert agent.phase is st.Phase.RUNNING
    assert not agent._state.draining


def test_ranks_drain_by_the_signal_that_says_so(agent: Agent, ranks: list[tuple[tuple[str, ...], str]]) -> None:
    agent._on_signal(TERM)
    assert ranks == [(("a.invalid", "b.invalid"), "TERM")]
    assert (agent.phase, agent._state.draining) == (st.Phase.RUNNING, True)


def test_mpirun_hands_on_what_it_does_not_take_for_itself(
    agent: Agent, ranks: list[tuple[tuple[str, ...], str]]
) -> None:
    agent._on_signal(signal.SIGUSR2)
    assert isinstance(agent._mpirun, Program)
    assert (agent._mpirun.told, ranks) == ([signal.SIGUSR2], [])
    assert agent._state.draining


@pytest.mark.parametrize("number", [INT, USR1])
def test_a_request_to_stop_is_one_by_default_or_by_what_was_said(
    agent: Agent, ranks: list[tuple[tuple[str, ...], str]], number: int
) -> None:
    agent._on_signal(number)
    assert agent.phase is st.Phase.LEAVING
    assert ranks == [(("a.invalid", "b.invalid"), "TERM")]


def test_process_1s_second_request_hurries_whatever_sigterm_is_for(
    agent: Agent, ranks: list[tuple[tuple[str, ...], str]]
) -> None:
    agent._on_signal(INT)
    agent._on_signal(TERM)
    assert len(ranks) == 1
    assert agent._state.deadline_s is not None
    assert agent._state.deadline_s <= time.monotonic()


def test_a_start_that_waits_for_sweeps_is_given_up_by_a_drain(agent: Agent) -> None:
    agent.is_in(st.Phase.RUNNING)
    agent._purposes = signal_policy.parse("TERM=drain")
    agent.waits_to_start()
    agent._on_signal(TERM)
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
        spec = Spec(
            contract="c",
            hostname="l",
            hosts=",".join(f"{name}:1" for name in names),
            agent=KUBEXEC,
            agent_path=str(script),
            scratch=str(tmp_path),
        )
        hosts = Hosts(spec, NO_MPIRUN, {"PATH": "/usr/bin:/bin"}, selector)
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

    path = tmp_path / "failure"
    spec = Spec(contract="c", hostname="l", scratch=str(tmp_path), failure_file=str(path))
    main = partial(mpi_agent.main, spec, ["mpirun"], {}, Broken)
    process = multiprocessing.get_context("fork").Process(target=main)
    process.start()
    process.join(30)
    assert process.exitcode == told["exit_code"]
    assert json.loads(path.read_text()) == told
