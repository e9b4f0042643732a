"""The job's Secret as a controller mounts it, and a real worker that has it."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
import shutil
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import psutil

from tests.cli.launching import clean_env, program
from tests.conftest import require
from tests.ports import free_port
from tests.process.world import DEADLINE_S, ROOT, end_all
from tests.waiting import eventually
from trainer_launch.host import runtime_directory
from trainer_launch.model import Job
from trainer_launch.mpi import ssh_client

P521 = ("-t", "ecdsa", "-b", "521", "-m", "PEM")  # as the operators make it, in a file called id_rsa


def require_openssh() -> None:
    require(shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin"), "needs openssh-server")
    require(shutil.which("ssh"), "needs openssh-client")


def secret(folder: Path, form: Sequence[str] = P521, passphrase: str = "") -> Path:
    """A new job's Secret, mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    argv = ("ssh-keygen", "-q", *form, "-N", passphrase, "-f", str(folder / "id_rsa"))
    subprocess.run(argv, check=True, timeout=120)
    shutil.copy(folder / "id_rsa.pub", folder / "authorized_keys")
    return folder


def secret_lines(folder: Path) -> list[str]:
    """What of the key may be seen nowhere; in PEM it ends with the public part."""
    lines, public = (folder / "id_rsa").read_text().splitlines(), (folder / "id_rsa.pub").read_text()
    found = [line for line in lines if not line.startswith("-----") and line not in public]
    assert found
    return found


def client_of(folder: Path, mount: Path, port: int, *, check_host_keys: bool = True) -> ssh_client.SshClient:
    """ssh as a launcher uses it, to a worker on loopback."""
    return ssh_client.prepared(
        Job(contract="trainer-v2-mpi", ssh_dir=str(mount)),
        str(folder / uuid.uuid4().hex),
        port=port,
        check_host_keys=check_host_keys,
    )


def agent_of(reach: ssh_client.SshClient) -> str:
    """A program that is `ssh` as a launcher uses it, for plm_rsh_agent and -launcher-exec."""
    ssh = shlex.join((*reach.ssh, "-F", reach.files.client))
    return str(program(Path(reach.files.folder, "agent"), f'exec {ssh} "$@"'))


def ssh(
    reach: ssh_client.SshClient, *command: str, options: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    """Run a command on the worker."""
    program, *rest = reach.argv("127.0.0.1", *command)
    return subprocess.run(
        (program, *options, *rest),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        stdin=subprocess.DEVNULL,
        check=False,
    )


class Worker:
    """`trainer-launch sshd`, as a Trainer v2 node has it: no variables of the job, only the mounted keys."""

    def __init__(
        self,
        folder: Path,
        mount: Path,
        *flags: str,
        env: Mapping[str, str] | None = None,
        wrap: Sequence[str] = (),
        port: int | None = None,
    ) -> None:
        self.mount, self.port = mount, port or free_port()
        self.token = uuid.uuid4().hex
        self.last_words_path = folder / f"last-words-{self.token}"
        self.last_words_path.touch()
        self.last_words_path.chmod(0o666)
        self._log = folder / f"log-{self.token}"
        argv = (*wrap, sys.executable, "-m", "trainer_launch", "sshd", "--ssh-dir", str(mount))
        argv += ("--ssh-port", str(self.port))
        argv += ("--termination-log", str(self.last_words_path), *flags)
        self._folder = folder
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                argv,
                env=clean_env({"JOB_COMPLETION_INDEX": "0", "TOKEN_OF_TEST": self.token, "PYTHONPATH": str(ROOT)})
                | {
                    runtime_directory.LISTEN_AT: "127.0.0.1",
                    "TOKEN": self.token,
                    "TRAINER_LAUNCH_FORWARD_ENV": "TOKEN",
                }
                | dict(env or {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @functools.cached_property
    def reach(self) -> ssh_client.SshClient:
        return client_of(self._folder, self.mount, self.port)

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def await_log(self, text: str) -> None:
        eventually(lambda: text in self.log(), lambda: f"{text!r} in {self.log()}")

    def await_port(self, address: str = "127.0.0.1") -> None:
        def answers() -> bool:
            assert self.process.poll() is None, self.log()
            with contextlib.suppress(OSError), socket.create_connection((address, self.port), 1) as opened:
                return opened.recv(4) == b"SSH-"
            return False

        eventually(answers, self.log)

    def ssh(self, *command: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        return ssh(self.reach, *command, options=options)

    def output(self, *command: str) -> str:
        done = self.ssh(*command)
        assert done.returncode == 0, (done.stderr, self.log())
        return done.stdout.strip()

    def start(self, command: str) -> subprocess.Popen[bytes]:
        """A session that goes on; its client."""
        return subprocess.Popen(
            self.reach.argv("127.0.0.1", command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def last_words(self) -> str:
        return self.last_words_path.read_text()

    def wait(self) -> int:
        return self.process.wait(3 * DEADLINE_S)

    def close(self) -> None:
        below: list[psutil.Process] = []  # sshd writes its title over its environment, and with it the token
        if self.process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(self.process.pid).children(recursive=True)
            self.process.terminate()  # it takes its folder with the key along
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(DEADLINE_S)
            self.process.kill()
        self.process.wait()
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        end_all(self.token)


@contextlib.contextmanager
def worker(folder: Path, mount: Path, *flags: str, **more) -> Iterator[Worker]:
    """A worker that is up; with the block it ends, and all that it started."""
    made = Worker(folder, mount, *flags, **more)
    try:
        made.await_port()
        yield made
    finally:
        made.close()


@contextlib.contextmanager
def refused(folder: Path, mount: Path, *flags: str, **more) -> Iterator[Worker]:
    """A worker that cannot be."""
    made = Worker(folder, mount, *flags, **more)
    try:
        made.wait()
        yield made
    finally:
        made.close()


def require_root() -> None:
    require(os.geteuid() == 0 and shutil.which("setpriv") and shutil.which("unshare"), "needs root and util-linux")
