"""Whom the launcher finds to be there, and the commands that it runs on hosts, with a real system below it."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import require
from tests.planning.requests import request
from tests.process.world import DEADLINE_S
from tests.waiting import eventually
from trainer_launch.host import deadline_subprocess
from trainer_launch.host.deadline_subprocess import Ended
from trainer_launch.model import Job, Mpi
from trainer_launch.model.errors import UsageError
from trainer_launch.mpi import host_access
from trainer_launch.mpi.host_access import HostAccess, HostCommands, own_ssh
from trainer_launch.mpi.mpi_job import prepared
from trainer_launch.mpi.remote_hosts import HostList, Probes, RemoteHosts, Threads
from trainer_launch.planning import engines, mpi_options
from trainer_launch.planning.mpi import KUBEXEC, spec_of
from trainer_launch.supervisor.system import System

PATH = {"PATH": "/usr/bin:/bin"}


@pytest.fixture
def system() -> Iterator[System]:
    made = System()
    with contextlib.closing(made):
        yield made


def access_of(folder: Path, line: str, mpi: Mpi | None = None) -> tuple[HostAccess, HostList]:
    task = request(line, Job(contract="c", mpi=mpi), scratch=str(folder))
    process = engines.plan(task).processes[0]
    spec, typed = spec_of(task, process), mpi_options.parse(process.argv)
    hosts = HostList(spec, typed)
    return host_access.prepared(spec, typed, PATH, hosts.members), hosts


@pytest.mark.parametrize(
    ("line", "port"),
    [
        ("mpirun -H a.invalid:1 --mca plm_rsh_agent 'ssh -F none -p 2022' x", 2022),
        ("mpirun -H a.invalid:1 -launcher slurm x", None),
    ],
)
def test_hosts_are_looked_for_where_the_users_own_agent_would_go(
    tmp_path: Path, line: str, port: int | None
) -> None:
    require(shutil.which("ssh"), "needs openssh-client")
    assert access_of(tmp_path, line)[0].probed_port == port


def test_an_mpirun_that_a_limit_of_the_container_keeps_from_starting_is_not_to_be_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = request("mpirun -np 1 x", Job(contract="c"), scratch=str(tmp_path))
    problems = [OSError(errno.EMFILE, "Too many open files"), OSError(errno.EACCES, "No")]

    def start(*_: object) -> None:
        raise problems.pop(0)

    monkeypatch.setattr(deadline_subprocess, "RunningCommand", start)
    with pytest.raises(OSError, match="Too many open files"):
        prepared(task, engines.plan(task).processes[0])
    with pytest.raises(UsageError, match=r"'mpirun' cannot be run \(No\); install an MPI in this image"):
        prepared(task, engines.plan(task).processes[0])


KUBEXEC_SH = """\
#!/bin/sh
case "$1" in
    gone) echo 'Error from server (NotFound): pods "gone" not found' >&2; exit 1 ;;
    slow) sleep 2 ;;
esac
exit 0
"""


@pytest.fixture
def asked(tmp_path: Path, system: System) -> Callable[..., dict[str, str]]:
    """Ask such hosts once; who is missing, and why."""
    script = tmp_path / "kubexec.sh"
    script.write_text(KUBEXEC_SH)
    script.chmod(0o755)

    def ask(*names: str, limit_s: float = DEADLINE_S) -> dict[str, str]:
        (tmp_path / "hosts").touch()
        mpi = Mpi(hostfile_path=str(tmp_path / "hosts"), launch_agent=KUBEXEC, launch_agent_path=str(script))
        access, listed = access_of(tmp_path, f"mpirun -H {','.join(f'{name}:1' for name in names)} x", mpi)
        threads = Threads(4)
        probes = Probes(threads, access.probed_port, over_ssh=not access.is_kubexec)
        hosts = RemoteHosts(access, listed, threads, probes, system)
        hosts.ask(names)
        until_s = time.monotonic() + limit_s
        while hosts.is_pending(names) and time.monotonic() < until_s:
            hosts.tick(time.monotonic())
            for pid, status in system.wait(min(until_s, time.monotonic() + 0.1)).ended:
                hosts.reaped(pid, status)
        gone = hosts.gone(names)
        hosts.close()
        return gone

    return ask


@pytest.mark.process
def test_a_pod_that_kubectl_finds_no_more_is_missing(asked: Callable[..., dict[str, str]]) -> None:
    assert asked("well", "gone") == {"gone": 'key: Error from server (NotFound): pods "gone" not found'}


@pytest.mark.process
def test_a_pod_that_kubectl_needs_seconds_for_is_there(asked: Callable[..., dict[str, str]]) -> None:
    assert asked("well", "slow") == {}
    assert asked("well", "slow", limit_s=0.1) == {}, "nor is a pod lost that kubectl has not answered for in time"


def ended(system: System, commands: HostCommands, count: int, answers: list[Ended]) -> list[Ended]:
    until_s = time.monotonic() + DEADLINE_S
    while len(answers) < count:
        assert time.monotonic() < until_s
        commands.tick(system.now())
        for pid, status in system.wait(commands.due_s).ended:
            commands.reaped(pid, status)
    return answers


@pytest.mark.process
def test_commands_end_with_their_own_words_or_at_their_deadline_with_all_that_they_started(system: System) -> None:
    commands, answers = HostCommands(system, PATH), list[Ended]()
    commands.start(("sh", "-c", "echo out; echo why >&2; exit 3"), 60.0, answers.append)
    commands.start(("/no/such/program",), 60.0, answers.append)
    missing, told = ended(system, commands, 2, answers)
    assert (told.code, told.out, told.why()) == (3, "out\n", "why")
    assert (missing.code, "No such file" in missing.why()) == (127, True)
    marker = f"{os.getpid()}.25"
    commands.start(("sh", "-c", f"sleep {marker} & sleep {marker}"), 0.5, answers.append)
    assert (ended(system, commands, 3, answers)[2].code, answers[2].why()) == (None, "no answer in time")
    alive = lambda: [pid for pid in os.listdir("/proc") if pid.isdigit() and marker in words_of(pid)]  # noqa: E731
    eventually(lambda: not alive(), "what it has started is gone")


def words_of(pid: str) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@pytest.mark.process
def test_signals_to_everything_below_the_launcher_spare_commands_on_hosts(system: System) -> None:
    """Or a request to stop would end the very sessions by which ranks hear of it."""
    system.mark = "TRAINER_LAUNCH_MPI_RUN", "mark"
    commands, answers = HostCommands(system, PATH), list[Ended]()
    commands.start(("sh", "-c", "sleep 1; exit 5"), 60.0, answers.append)
    assert system.is_alone()
    for number in (15, 9):
        system.signal_all(number, again=True)
    assert ended(system, commands, 1, answers)[0].code == 5


@pytest.mark.parametrize(
    ("line", "env", "ssh"),
    [
        ("mpirun x", {}, "ssh"),
        ("mpirun -mca plm_rsh_agent ssh x", {}, "ssh"),
        ("mpirun --mca plm_rsh_agent 'ssh -p 2022 : rsh' x", {}, "ssh -p 2022"),
        ("mpirun x", {"PRTE_MCA_plm_ssh_agent": "/opt/bin/ssh -F f"}, "/opt/bin/ssh -F f"),
        ("mpirun -mca plm_rsh_args '-p 2022' x", {"OMPI_MCA_plm": "rsh"}, "ssh -p 2022"),
        ("mpirun x", {"OMPI_MCA_plm": "^slurm"}, "ssh"),
        ("mpirun -bootstrap ssh x", {}, "ssh"),
        ("mpirun -launcher-exec=/usr/bin/ssh x", {"HYDRA_LAUNCHER": "rsh"}, "/usr/bin/ssh"),
        ("mpirun x", {"I_MPI_HYDRA_BOOTSTRAP": "ssh"}, "ssh"),
    ],
)
def test_an_ssh_of_the_users_own_is_recognised_with_its_options(line: str, env: dict[str, str], ssh: str) -> None:
    assert own_ssh(mpi_options.parse(shlex.split(line)), env) == tuple(ssh.split())


@pytest.mark.parametrize(
    ("line", "env"),
    [
        ("mpirun --mca plm_rsh_agent rsh x", {}),
        ("mpirun --mca plm slurm x", {}),
        ("mpirun x", {"OMPI_MCA_plm_rsh_agent": "/etc/own/agent.sh"}),
        ("mpirun -launcher slurm x", {}),
        ("mpirun x", {"I_MPI_HYDRA_BOOTSTRAP": "rsh"}),
        ("mpirun x", {"HYDRA_LAUNCHER_EXEC": "/etc/own/agent.sh"}),
    ],
)
def test_what_is_no_ssh_is_not_taken_for_one(line: str, env: dict[str, str]) -> None:
    assert own_ssh(mpi_options.parse(shlex.split(line)), env) is None
