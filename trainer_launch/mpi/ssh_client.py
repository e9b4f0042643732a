"""ssh to the other pods of the job: its key, and everything else that it needs, in one private folder.

One key is all: every pod has it from the job's Secret. It opens each pod, and each pod shows it as its host key, so
that both sides know each other, and nobody in between can pretend to be either.
"""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import pwd
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from trainer_launch.host import deadline_subprocess
from trainer_launch.host.files import LiveFiles
from trainer_launch.model import Job
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.value_parsers import parse_number

_PLAIN_PORT = 22
_PORT_OF_IMAGES = 2222  # mpi-operator's and Trainer's; who is not root may not listen at 22
_SECONDS = 20.0  # for `ssh -G` and ssh-keygen, which take milliseconds
_KEYS = ("id_rsa", "id_ecdsa", "id_ed25519", "ssh-privatekey")  # the last: the Secret mounted as it is
_KEY_BYTES = 65_536
PUBLIC_KEY = re.compile(r"((?:ssh|ecdsa|sk)-[a-z0-9@.-]{1,60}) ([A-Za-z0-9+/]{16,8192}={0,3})(?:\s.*)?")
_MAX_BYTES = 1 << 20  # of /etc/passwd
_log = logging.getLogger(__name__)
INSECURE = (
    "--insecure-host-keys: the hosts' keys are NOT checked; anyone who answers in place of a pod of this job is "
    "believed, is sent the command and its variables, and can run the ranks"
)
_PASSWD, _GROUP = "/etc/passwd", "/etc/group"
_NSS_WRAPPERS = ("/usr/lib64/libnss_wrapper.so", "/usr/lib/*/libnss_wrapper.so", "/usr/lib/libnss_wrapper.so")
_UNFIT = '%"\\$\n'  # ssh expands or ends its words at these
ALIVE_EVERY_S = 3  # between two questions whether the other side is still there
ALIVE_MISSED = 3  # unanswered ones after which it is lost
_CONNECT_S = 5  # for one attempt to connect


class SshFiles:
    """Where the files of one pod's ssh are, all in one private folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.key = f"{folder}/job_key"  # the job's private key, 0600
        self.authorized = f"{folder}/authorized_keys"  # the one key that opens this pod
        self.known_hosts = f"{folder}/known_hosts"  # the one key that every pod has to show
        self.client = f"{folder}/ssh_config"
        self.server = f"{folder}/sshd_config"


class Account(Struct, frozen=True):
    """The user that OpenSSH and mpirun take us for."""

    name: str
    env: Mapping[str, str] = field(default_factory=dict)  # by which they find it, where the image does not have it

    def argv(self, program: str) -> tuple[str, ...]:
        """A program that is started as this user."""
        words = tuple(f"{name}={value}" for name, value in self.env.items())
        return ("/usr/bin/env", *words, program) if words else (program,)

    def added_to(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment of mpirun; ranks on other hosts do not get what is added."""
        libraries = ":".join(filter(None, (self.env.get("LD_PRELOAD"), env.get("LD_PRELOAD"))))
        return {**env, **self.env, "LD_PRELOAD": libraries} if self.env else dict(env)


class SshClient(Struct, frozen=True, kw_only=True):
    """How to reach the pods of this job."""

    ssh: tuple[str, ...]
    account: Account
    files: SshFiles
    port: int
    public: str  # the job's key, as TYPE BASE64
    checks_host_keys: bool

    def argv(self, host: str, *command: str) -> tuple[str, ...]:
        """The command line that runs `command`, which the shell of the other side reads, on `host`."""
        return (*self.ssh, "-F", self.files.client, "--", host, *command)


def prepared(
    job: Job,
    folder: str,
    *,
    port: int | None = None,
    check_host_keys: bool = True,
    path: str | None = None,
) -> SshClient:
    """Write key, known_hosts and configuration into the new private folder `folder`.

    `port` is the one that the pods' sshd listens at, None: by `port_of`; `path` is the container's PATH.

    Raises:
        UsageError: there is no ssh, or no key that fits.
        NodeError: nothing may be written there.
    """
    if any(c in folder for c in _UNFIT):
        raise UsageError(f'the temporary folder {folder!r} has one of % " \\ $ in its name; set TMPDIR to another')
    files = SshFiles(folder)
    try:
        os.makedirs(folder, mode=0o700)
    except OSError as problem:
        raise NodeError(f"the private folder {folder} cannot be made: {problem.strerror}") from None
    user = account(folder)
    ssh = user.argv(find("ssh", path))
    public = take_key(job, files.key, user.argv(find("ssh-keygen", path)))
    used = port or port_of(ssh)
    write(files.known_hosts, known_hosts(public))
    write(files.client, configuration(files, used, check_host_keys=check_host_keys))
    return SshClient(ssh=ssh, account=user, files=files, port=used, public=public, checks_host_keys=check_host_keys)


def make_key(folder: str, keygen: str = "ssh-keygen") -> None:
    """Make a job's Secret in the new folder `folder`, as the operators do: ECDSA P-521, in a file called id_rsa.

    Raises:
        NodeError: it cannot be made.
    """
    path = f"{folder}/id_rsa"
    argv = (keygen, "-q", "-t", "ecdsa", "-b", "521", "-m", "PEM", "-N", "", "-C", "trainer-launch", "-f", path)
    try:
        os.mkdir(folder, 0o700)
        done = deadline_subprocess.run(argv, None, _SECONDS)
        if done.code != 0:
            raise OSError(done.failure or f"{keygen} failed: {' '.join(done.err.split())[:200]}")
        shutil.copy(f"{path}.pub", f"{folder}/authorized_keys")
    except OSError as problem:
        raise NodeError(f"cannot create an ssh key for the job: {problem}") from None


def take_key(job: Job, copy: str, keygen: Sequence[str] = ("ssh-keygen",)) -> str:
    """Copy the key that is mounted to the new private file `copy`; its public part, as `TYPE BASE64`.

    Raises:
        UsageError: there is no key, it cannot be read, or it is none.
    """
    if job.ssh_dir is None:
        raise UsageError(
            "the job's ssh key is not mounted; looked for id_rsa and authorized_keys in $HOME/.ssh, /root/.ssh and "
            "/home/mpiuser/.ssh; set --ssh-dir to the job's sshAuthMountPath"
        )
    source = _find_key(job.ssh_dir)
    write(copy, _read_key(source), what="the copy of the job's ssh key cannot be written")
    return _public(source, copy, keygen)


def write(path: str, text: str | bytes, *, what: str = "") -> None:
    """Write a new file that is ours alone; `what` begins the error. Raises NodeError: it cannot be written."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(path, flags, 0o600), "wb") as file:
            file.write(text if isinstance(text, bytes) else os.fsencode(text))
    except OSError as problem:
        what = what or f"{Path(path).name} cannot be written in the private folder"
        raise NodeError(f"{what}: {problem.strerror}") from None


def _find_key(folder: str) -> Path:
    try:
        names = sorted(os.listdir(folder))
    except OSError as problem:
        raise UsageError(
            f"the folder of the job's ssh key, {folder}, cannot be read ({problem.strerror}); mount the job's "
            f"Secret there, or set --ssh-dir to where it is"
        ) from None
    for name in _KEYS:
        if name in names:
            return Path(folder, name)
    raise UsageError(f"{folder} has none of {', '.join(_KEYS)}; mount the Secret with the job's ssh key there")


def _read_key(path: Path) -> bytes:
    data = LiveFiles(_KEY_BYTES + 1).read(str(path))
    if data is None:
        raise UsageError(
            f"the job's ssh key {path} cannot be read by uid {os.geteuid()}; "
            f"let the pod's securityContext have fsGroup and the Secret defaultMode 0440"
        )
    text = data.replace(b"\r\n", b"\n").strip()
    if len(data) > _KEY_BYTES or not text.startswith(b"-----BEGIN ") or b"PRIVATE KEY-----" not in text:
        raise UsageError(
            f"{path} holds no private key: expected a file that begins with -----BEGIN … PRIVATE KEY-----, "
            f"found {len(data)} bytes of something else; mount the job's Secret there"
        )
    return text + b"\n"  # without it newer forms of keys are refused


def _public(source: Path, copy: str, keygen: Sequence[str]) -> str:
    done = deadline_subprocess.run((*keygen, "-y", "-P", "", "-f", copy), None, _SECONDS)
    if done.failure:
        raise NodeError(f"{keygen[-1]} did not derive the public key: {done.failure}")
    match = PUBLIC_KEY.fullmatch(done.out.strip())
    if done.code == 0 and match:
        return f"{match[1]} {match[2]}"
    raise UsageError(
        f"{source} is not a private key that {keygen[-1]} understands; it may be cut short, or have a passphrase: "
        f"recreate the Secret"
    )


def find(name: str, path: str | None) -> str:
    """A program of OpenSSH by its full path; sshd is not in the PATH of ordinary users.

    Raises:
        UsageError: it is not there.
    """
    program = shutil.which(name, path=f"{path or os.defpath}:/usr/sbin:/sbin:/usr/local/sbin:/usr/bin")
    if program is None:
        package = "openssh-server" if name == "sshd" else "openssh-client"
        raise UsageError(f"{name} is not in this image; install OpenSSH ({package})")
    return os.path.abspath(program)


def account(folder: str) -> Account:
    """The user that we are. A uid made up by OpenShift gets an entry by nss_wrapper, from files in `folder`.

    Raises:
        UsageError: OpenSSH refuses to work for a uid without a name.
    """
    uid = os.geteuid()
    with contextlib.suppress(KeyError):
        entry = pwd.getpwuid(uid)
        return Account(entry.pw_name)
    line = f"trainer-launch:x:{uid}:{os.getegid()}::/:/bin/sh\n"
    library = next((path for name in _NSS_WRAPPERS for path in glob.glob(name) if os.path.isfile(path)), None)
    if library is None:
        raise UsageError(
            f"uid {uid} has no entry in {_PASSWD}, and neither OpenSSH nor mpirun works without one; install "
            f"nss_wrapper in the image (Debian: libnss-wrapper, Red Hat: nss_wrapper), or add the user to it "
            f"(useradd -u {uid} …)"
        )
    passwd, group = f"{folder}/passwd", f"{folder}/group"
    write(passwd, _text(_PASSWD).rstrip("\n") + f"\n{line}")
    write(group, _text(_GROUP))
    _log.info("uid %d has no entry in %s: %s gives OpenSSH and mpirun one", uid, _PASSWD, library)
    env = {"LD_PRELOAD": library, "NSS_WRAPPER_PASSWD": passwd, "NSS_WRAPPER_GROUP": group}
    return Account("trainer-launch", env)


def _text(path: str) -> str:
    return os.fsdecode(LiveFiles(_MAX_BYTES).read(path) or b"")


def port_of(ssh: Sequence[str]) -> int:
    """The port of the pods' sshd where none is given: as the image's ssh is configured, else by who we are."""
    configured = configured_port(ssh, "trainer-launch.invalid")
    if configured is not None and configured != _PLAIN_PORT:
        return configured
    return _PLAIN_PORT if os.geteuid() == 0 else _PORT_OF_IMAGES


def configured_port(ssh: Sequence[str], host: str) -> int | None:
    """Where this ssh, with its options, would go for a host; None: it does not say."""
    return port_in(deadline_subprocess.run((*ssh, "-G", host), None, _SECONDS).out)


def port_in(text: str) -> int | None:
    """The port in what `ssh -G` prints: its configuration, a line for each word."""
    words = next((line.split() for line in text.splitlines() if line.startswith("port ")), [])
    return parse_number(words[1], 1, 65535) if len(words) == 2 else None


def configuration(files: SshFiles, port: int, *, check_host_keys: bool = True) -> str:
    """Text of ssh_config: only the job's key, shown by both sides, no questions asked, a lost host soon noticed.

    All else is OpenSSH's default, which with -F nothing in the image changes.
    """
    lines = [
        f"Port {port}",
        f"IdentityFile {quoted(files.key)}",
        "IdentitiesOnly yes",
        "IdentityAgent none",
        f"UserKnownHostsFile {quoted(files.known_hosts) if check_host_keys else '/dev/null'}",
        "GlobalKnownHostsFile /dev/null",
        f"StrictHostKeyChecking {'yes' if check_host_keys else 'no'}",
        "BatchMode yes",
        "PreferredAuthentications publickey",
        "ClearAllForwardings yes",
        f"ConnectTimeout {_CONNECT_S}",
        f"ServerAliveInterval {ALIVE_EVERY_S}",
        f"ServerAliveCountMax {ALIVE_MISSED}",
        # It tells then which host it has lost; and of each host whose key is not checked.
        f"LogLevel {'INFO' if check_host_keys else 'ERROR'}",
    ]
    return "\n".join(lines) + "\n"


def known_hosts(public: str) -> str:
    """Every host, under any name and port, has to show the job's key."""
    return f"* {public}\n"


def quoted(text: str) -> str:
    """A text as an argument of a configuration line, of ssh or sshd."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
