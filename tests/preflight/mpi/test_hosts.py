"""The preflight of an MPI launcher with real hosts: each stage at which one can be stuck, and the exact finding."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import pytest

from tests.cli.launching import program
from tests.conftest import require
from tests.mpi.ssh.secrets import require_openssh, secret
from tests.pods import Host, hosts

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.long("tests/preflight/mpi/test_verdicts.py"),
]
PORT = 2222
LAUNCH = (sys.executable, "-m", "trainer_launch")
COME_S = 120  # for hosts to come, when all of them will
ILL_COME_S = 30  # when some never will; the others have to be there by then, on a busy machine
END_S = 280
Found: TypeAlias = "tuple[str, str, str]"  # check, status, text


def _version() -> str:
    """Of the real Open MPI."""
    found = shutil.which("mpirun.openmpi")
    said = subprocess.run((found, "--version"), capture_output=True, text=True).stdout if found else "0"
    return said.split("\n")[0].split()[-1]


VERSION = _version()

# The python3 of launcher and workers is the one that runs the tests.
PATH = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"


class Job:
    """A launcher and its workers, each on a host of its own, with the job's key."""

    def __init__(self, folder: Path, launcher: Host, workers: Sequence[Host]) -> None:
        self.folder, self.launcher = folder, launcher
        self.workers = {worker.name: worker for worker in workers}
        self.mount = secret(folder / "keys")
        self.hostfile = folder / "hostfile"
        self.lists(*self.workers)
        self._running: list[subprocess.Popen[str]] = []

    def lists(self, *names: str) -> None:
        self.hostfile.write_text("".join(f"{name} slots=1\n" for name in names))

    def starts(
        self,
        name: str,
        *,
        mount: Path | None = None,
        env: Mapping[str, str] | None = None,
        shell: Path | None = None,
    ) -> None:
        """A worker: `trainer-launch sshd`; `shell` is what its users log in to."""
        words = ("sshd", "--ssh-dir", str(mount or self.mount), "--ssh-port", str(PORT))
        other_users: tuple[str, ...] = ()
        if shell is not None:
            users = self.folder / f"passwd of {name}"
            users.write_text(f"root:x:0:0:root:/root:{shell}\nsshd:x:100:65534::/run/sshd:/usr/sbin/nologin\n")
            other_users = ("sh", "-c", 'mount --bind "$0" /etc/passwd && exec "$@"', str(users))
        self.runs(name, (*other_users, *LAUNCH, *words), env)

    def runs(self, name: str, argv: Sequence[str], env: Mapping[str, str] | None = None) -> None:
        own = tuple(f"{variable}={value}" for variable, value in ({"PATH": PATH} | dict(env or {})).items())
        self._running.append(self.workers[name].start(("env", *own, *argv), {}))

    def ends(self) -> None:
        for process in self._running:
            process.kill()
            process.communicate()

    def preflight(self, deadline_s: int = COME_S) -> tuple[list[Found], int]:
        """The launcher's findings about MPI, and its exit code."""
        env = {
            "K_MPI_JOB_ROLE": "launcher",
            "OMPI_MCA_orte_default_hostfile": str(self.hostfile),
            "OMPI_MCA_orte_set_default_slots": "1",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
            "PATH": PATH,
        }
        argv: tuple[str, ...] = (
            *LAUNCH,
            "preflight",
            "--json",
            "--policy",
            "dns=off",
            "--ssh-dir",
            str(self.mount),
        )
        argv += ("--ssh-port", str(PORT), "--wait-timeout", str(deadline_s), "--", "mpirun.openmpi", "true")
        started = self.launcher.start(argv, env)
        out, _ = started.communicate(timeout=END_S)
        assert "\n{" in f"\n{out}", out
        report = json.loads(out[out.index("{") :])
        found = [one for one in report["findings"] if one["check"].startswith("mpi-")]
        return [(one["check"], one["status"], one["text"]) for one in found], started.returncode


@contextmanager
def job(folder: Path, *workers: str) -> Iterator[Job]:
    require_openssh()
    require(shutil.which("mpirun.openmpi"), "needs Open MPI")
    with hosts("launcher", *workers) as (launcher, *others):
        made = Job(folder, launcher, others)
        try:
            yield made
        finally:
            made.ends()


def test_well_hosts_pass_every_check(tmp_path: Path) -> None:
    with job(tmp_path, "w-0", "w-1", "w-2") as made:
        for name in made.workers:
            made.starts(name)
        found, code = made.preflight()
    assert found == [
        ("mpi-hosts", "pass", "name, port and sshd answer on all 3 hosts"),
        ("mpi-ssh", "pass", "all 3 hosts accept the job's key, and present it as their host key"),
        ("mpi-programs", "pass", f"mpirun is {VERSION} on the launcher and all 3 hosts"),
    ]
    assert code == 0


ILL = ("w-other-job", "w-refuses", "w-loud", "w-no-shell", "w-version", "w-no-sshd", "w-closed")
NO_SSHD = """
import socket
listener = socket.create_server(("", 2222))
while True:
    listener.accept()[0].sendall(b"HTTP/1.1 400 Bad Request\\r\\n" * 2)
"""
NO_SHELL = "its login shell or the test command ends with code 3; not here"


@pytest.fixture(scope="module")
def ill(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Found], int]:
    """What is found of hosts of which each has another illness."""
    folder = tmp_path_factory.mktemp("ill")
    with job(folder, *ILL) as made:
        made.lists(*ILL, "w-nowhere")
        other = secret(folder / "of another job")
        made.starts("w-other-job", mount=other)
        made.runs("w-refuses", sshd_of(folder, made.mount / "id_rsa", other / "authorized_keys"))
        loud = program(folder / "loud", 'echo Welcome to the cluster; exec /bin/sh "$@"')  # which harms nobody
        made.starts("w-loud", shell=loud)
        made.starts("w-no-shell", shell=program(folder / "exits", "echo not here >&2; exit 3"))
        program(folder / "fake" / "mpirun.openmpi", "echo 'mpirun (Open MPI) 5.0.1'")
        made.starts("w-version", env={"PATH": f"{folder}/fake:{os.environ['PATH']}"})
        made.runs("w-no-sshd", (sys.executable, "-c", NO_SSHD))
        return made.preflight(deadline_s=ILL_COME_S)


def sshd_of(folder: Path, host_key: Path, authorized: Path) -> tuple[str, ...]:
    """An sshd that was set up by hand."""
    os.makedirs("/run/sshd", mode=0o755, exist_ok=True)
    config = folder / "sshd_config"
    config.write_text(
        f'Port {PORT}\nHostKey "{host_key}"\nUsePAM no\nStrictModes no\nPidFile none\n'
        f'AuthorizedKeysFile "{authorized}"\n'
    )
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    return (str(sshd), "-D", "-e", "-f", str(config))


@pytest.mark.parametrize(
    ("check", "status", "text"),
    [
        ("mpi-hosts", "fail", "no address found for w-nowhere: "),
        ("mpi-hosts", "fail", "cannot connect to sshd of w-closed: Connection refused"),
        ("mpi-hosts", "fail", "no sshd answers on w-no-sshd: what listens there is not sshd"),
        ("mpi-ssh", "fail", "another host key than the job's is shown by w-other-job: "),
        ("mpi-ssh", "fail", "the job's key is refused by w-refuses: "),
        ("mpi-ssh", "fail", f"no command runs on w-no-shell: {NO_SHELL}"),
        ("mpi-programs", "fail", f"mpirun is 5.0.1 on w-version, and {VERSION} on the launcher"),
    ],
)  # fmt: skip
def test_each_illness_is_named_with_its_host(
    ill: tuple[list[Found], int], check: str, status: str, text: str
) -> None:
    found, code = ill
    assert [told for told in found if told[0] == check and told[1] == status and told[2].startswith(text)], found
    assert code == 30


def test_nothing_else_is_found_of_ill_hosts(ill: tuple[list[Found], int]) -> None:
    found, _ = ill
    assert [(check, status) for check, status, _ in found] == [
        *(("mpi-hosts", "fail"),) * 3,
        *(("mpi-ssh", "fail"),) * 3,
        ("mpi-programs", "fail"),
    ]
