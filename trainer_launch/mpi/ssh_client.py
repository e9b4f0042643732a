"""ssh to the other pods of the job: everything it needs, in one private folder."""

from __future__ import annotations

import logging
import os
import pwd
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer_launch.host import deadline_subprocess
from trainer_launch.model import Job
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.value_parsers import parse_number
from trainer_launch.mpi import ssh_config, ssh_keys

_PLAIN_PORT = 22
_PORT_OF_IMAGES = 2222  # mpi-operator's and Trainer's; who is not root may not listen at 22
_SECONDS = 20.0  # for `ssh -G`, which takes milliseconds
_log = logging.getLogger(__name__)
INSECURE = (
    "--insecure-host-keys: the hosts' keys are NOT checked; whoever answers in the place of a pod of this job is "
    "believed, is sent the command and its variables, and can run the ranks"
)
_PASSWD = "/etc/passwd"
_UNFIT = '%"\\$\n'  # ssh expands or ends its words at these


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """How to reach the pods of this job; `agent` is for mpirun's plm_rsh_agent and Hydra's -launcher-exec."""

    program: str  # ssh
    files: ssh_config.Files
    port: int
    public: str  # the job's key, as TYPE BASE64
    checks_host_keys: bool

    @property
    def config(self) -> str:
        """The configuration of ssh."""
        return self.files.client

    @property
    def agent(self) -> str:
        """A program that is ssh with this configuration."""
        return self.files.agent

    @property
    def bin(self) -> str:
        """The folder to put into PATH, so that the agent is found by its name, `config.AGENT`."""
        return os.path.dirname(self.files.agent)

    def argv(self, host: str, *command: str) -> tuple[str, ...]:
        """The command line that runs `command`, which the shell of the other side reads, on `host`."""
        return (self.program, "-F", self.files.client, "--", host, *command)


def prepared(
    job: Job,
    folder: str,
    *,
    port: int | None = None,
    aliases: Sequence[ssh_config.Alias] = (),
    check_host_keys: bool = True,
    path: str | None = None,
) -> Client:
    """Write key, known_hosts, configuration and agent into the new private folder `folder`.

    `port` is the one that the pods' sshd listens at, None: by `port_of`; `path` is the container's PATH.

    Raises:
        UsageError: there is no ssh, or no key that fits.
        NodeError: nothing may be written there.
    """
    check_user()
    program = find("ssh", path)
    files = made(folder)
    key = ssh_keys.take(ssh_keys.key_folder(job), files.key, find("ssh-keygen", path))
    used = port_of(program) if port is None else port
    write(files.known_hosts, ssh_config.known_hosts(key.public))
    write(files.client, ssh_config.client(files, used, aliases, check_host_keys=check_host_keys))
    write(files.agent, ssh_config.agent(program, files), mode=0o700)
    return Client(program=program, files=files, port=used, public=key.public, checks_host_keys=check_host_keys)


def find(name: str, path: str | None) -> str:
    """A program of OpenSSH by its full path; sshd is not in the PATH of ordinary users.

    Raises:
        UsageError: it is not there.
    """
    found = shutil.which(name, path=f"{path or os.defpath}:/usr/sbin:/sbin:/usr/local/sbin:/usr/bin")
    if found is None:
        package = "openssh-server" if name == "sshd" else "openssh-client"
        raise UsageError(f"{name} is not in this image; install OpenSSH ({package})")
    return os.path.abspath(found)


def user() -> pwd.struct_passwd | None:
    """Who we are by /etc/passwd, None: it does not know us."""
    try:
        return pwd.getpwuid(os.geteuid())
    except KeyError:
        return None


def check_user() -> pwd.struct_passwd:
    """Who we are. A uid that OpenShift made up is entered in /etc/passwd where the image lets group 0 write to it.

    Raises:
        UsageError: OpenSSH refuses to work for a uid without a name.
    """
    found = user()
    if found is None and _enter_user():
        found = user()
    if found is None:
        uid = os.geteuid()
        raise UsageError(
            f"uid {uid} has no entry in {_PASSWD}, and neither OpenSSH nor mpirun works without one: add a user to "
            f"the image (useradd -u {uid} …), let its group 0 write to {_PASSWD}, so that one is added here (chmod "
            f"g+w, as OpenShift's images have it), or let runAsUser be one that it has, such as mpiuser's 1000"
        )
    return found


def _enter_user() -> bool:
    """Add this uid to the container's users, as such images' own entrypoints do."""
    line = f"trainer-launch:x:{os.geteuid()}:{os.getegid()}::/:/bin/sh\n"
    try:
        descriptor = os.open(_PASSWD, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        return False
    with os.fdopen(descriptor, "rb+") as file:
        text = file.read()
        file.write((b"" if text.endswith(b"\n") or not text else b"\n") + line.encode())
    _log.info("uid %d had no entry in %s and was added", os.geteuid(), _PASSWD)
    return True


def port_of(program: str) -> int:
    """Where the pods' sshd listens when nobody said: as the image's ssh is configured, else by who we are."""
    told = configured_port((program,), "trainer-launch.invalid")
    if told is not None and told != _PLAIN_PORT:
        return told
    return _PLAIN_PORT if os.geteuid() == 0 else _PORT_OF_IMAGES


def configured_port(ssh: Sequence[str], host: str) -> int | None:
    """Where this ssh, with its options, would go for a host; None: it does not say."""
    return port_in(deadline_subprocess.run((*ssh, "-G", host), None, _SECONDS).out)


def port_in(said: str) -> int | None:
    """The port in what `ssh -G` prints: its configuration, a line for each word."""
    words = next((line.split() for line in said.splitlines() if line.startswith("port ")), [])
    return parse_number(words[1], 1, 65535) if len(words) == 2 else None


def made(folder: str) -> ssh_config.Files:
    """The private folder, made if it is not there, with room for the agent.

    Raises:
        NodeError: it cannot be made.
        UsageError: its name has characters that ssh would take for something else.
    """
    if any(c in folder for c in _UNFIT):
        raise UsageError(f'the temporary folder {folder!r} has one of % " \\ $ in its name; set TMPDIR to another')
    files = ssh_config.Files(folder=folder)
    try:
        os.makedirs(folder, mode=0o700, exist_ok=True)
        os.chmod(folder, 0o700)
        os.makedirs(os.path.dirname(files.agent), mode=0o700, exist_ok=True)
    except OSError as problem:
        raise NodeError(f"the private folder {folder} cannot be made: {problem.strerror}") from None
    return files


def write(path: str, text: str, *, mode: int = 0o600) -> None:
    """Write a new file that is ours alone.

    Raises:
        NodeError: it cannot be written.
    """
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, mode), "wb") as file:
            file.write(os.fsencode(text))
    except OSError as problem:
        raise NodeError(f"{Path(path).name} cannot be written in the private folder: {problem.strerror}") from None
