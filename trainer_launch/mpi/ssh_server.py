"""sshd of a worker: made ready, after a check of what OpenSSH asks of the machine; and what lost sessions leave."""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import socket
import stat
from collections.abc import Mapping, Sequence

from msgspec import Struct

from trainer_launch.host import deadline_subprocess, process_tree
from trainer_launch.host.files import LiveFiles
from trainer_launch.host.process_tree import ProcessEntry
from trainer_launch.model.errors import LaunchError, NodeError, UsageError
from trainer_launch.mpi import ssh_client
from trainer_launch.mpi.rank_environment import Handed
from trainer_launch.mpi.ssh_client import SshFiles, quoted

_CAPABILITIES = {"SETGID": 6, "SETUID": 7, "SYS_CHROOT": 18}  # that sshd needs as root
_MAX_BYTES = 1_048_576
_SECONDS = 20.0  # for `sshd -T`, which takes milliseconds
_MISSING = re.compile(r"Missing privilege separation directory: (/\S+)")
_UNSAFE = re.compile(r"(/\S+) must be owned by root and not group or world-writable")
# bash reads ~/.bashrc where it finds that ssh started it and that it is the first shell: ranks would have another
# PATH than the container, and than those that run on the launcher's own node.
_NO_RC_FILES = {"SHLVL": "1"}
# From OpenSSH 9.8 on, who connects without a login more than 15 times is refused for a while: a launcher that looks
# whether sshd is up, and all that have the address of the same Kubernetes node.
_NO_PENALTIES = ("-o", "PerSourcePenalties=no")
_LOGIN_GRACE_S = 30  # for who has connected to prove the key
_SSHD = ("sshd", "sshd-session", "sshd-auth")
_GRACE_S = 3.0  # from SIGTERM to SIGKILL, for what a lost session has left
_LOOK_EVERY_S = 1.0
_log = logging.getLogger(__name__)


class PreparedSshd(Struct, frozen=True, kw_only=True):
    """An sshd that can be started."""

    argv: tuple[str, ...]
    unfit: tuple[str, ...]  # variables that this sshd would have given its sessions otherwise than they are


def prepared(
    reach: ssh_client.SshClient, handed: Handed, *, addresses: Sequence[str], log_level: str
) -> PreparedSshd:
    """Write what sshd needs into the private folder, and try it out.

    Raises:
        UsageError: this image, user or securityContext cannot run sshd.
        NodeError: the port is in use, or nothing can be written.
    """
    files = reach.files
    me = reach.account
    program = me.argv(ssh_client.find("sshd", handed.env.get("PATH")))
    is_root = os.geteuid() == 0
    if is_root:  # nobody else can read the passwords, sshd neither
        _check_account(me.name)
        check_capabilities(LiveFiles(_MAX_BYTES).read("/proc/self/status") or b"")
    check_port(reach.port, addresses)
    ssh_client.write(files.authorized, authorized_keys(reach.public))
    env = {**handed.env, **_NO_RC_FILES}
    text = configuration(
        files, port=reach.port, addresses=addresses, user=me.name, is_root=is_root, log_level=log_level
    )
    ssh_client.write(files.server, text + set_env(env))
    lines = _tried((*program, "-T", "-f", files.server))
    wrong = tuple(name for name, value in env.items() if f"setenv {name}={value}" not in lines)
    if wrong:  # an older sshd reads quotes in its own way: rather without than with another value
        os.unlink(files.server)
        kept = {name: value for name, value in env.items() if name not in wrong}
        ssh_client.write(files.server, text + set_env(kept))
    more = _NO_PENALTIES if any(line.startswith("persourcepenalties ") for line in lines) else ()
    return PreparedSshd(argv=(*program, "-D", "-e", "-f", files.server, *more), unfit=wrong)


def configuration(
    files: SshFiles,
    *,
    port: int,
    addresses: Sequence[str],  # to listen at; none: all
    user: str,
    is_root: bool,
    log_level: str,
) -> str:
    """Text of sshd_config: only the job's key, and nothing but commands; all else is OpenSSH's default."""
    lines = [
        f"Port {port}",
        *(f"ListenAddress {address}" for address in addresses),
        f"HostKey {quoted(files.key)}",
        f"AuthorizedKeysFile {quoted(files.authorized)}",
        f"AllowUsers {user}",
        "AuthenticationMethods publickey",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        f"PermitRootLogin {'prohibit-password' if is_root else 'no'}",
        "UsePAM no",
        "StrictModes no",  # it would ask that /tmp be closed to others; the folder in it is
        "DisableForwarding yes",
        "PermitTTY no",
        "PermitUserRC no",
        "UseDNS no",
        "PidFile none",
        f"LoginGraceTime {_LOGIN_GRACE_S}",
        "MaxStartups 200:30:400",  # a launcher's probes, and those of hundreds of workers for each other
        "MaxSessions 64",
        f"ClientAliveInterval {ssh_client.ALIVE_EVERY_S}",
        f"ClientAliveCountMax {ssh_client.ALIVE_MISSED}",
        f"LogLevel {log_level}",
    ]
    return "\n".join(lines) + "\n"


def set_env(env: Mapping[str, str]) -> str:
    """The line for what the sessions get besides what sshd gives them."""
    return " ".join(["SetEnv", *(quoted(f"{name}={value}") for name, value in env.items())]) + "\n" if env else ""


def authorized_keys(public: str) -> str:
    """Only who has the job's key comes in, and only for commands."""
    return f"restrict {public}\n"


def _check_account(name: str) -> None:
    shadow = LiveFiles(_MAX_BYTES).read("/etc/shadow") or b""
    if any(line.startswith(f"{name}:!".encode()) for line in shadow.splitlines()):
        raise UsageError(
            f"user {name}'s account is locked in /etc/shadow (its password is !), and sshd refuses it; "
            f"unlock it in the image without giving it a password: usermod -p '*' {name}"
        )


def check_capabilities(status: bytes) -> None:
    """Find in the text of /proc/self/status what sshd needs as root. Raises UsageError: a capability is missing."""
    match = re.search(rb"^CapEff:\s*([0-9a-f]{1,16})$", status, re.MULTILINE)
    effective = int(match[1], 16) if match else -1
    missing = [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]
    if missing:
        raise UsageError(
            f"sshd as root needs the capabilities {', '.join(missing)}, which this container has dropped; add "
            f"them, or let the pod run as an ordinary user, which needs none (runAsUser: 1000)"
        )


def check_port(port: int, addresses: Sequence[str]) -> None:
    """Try whether sshd may listen there.

    Raises:
        UsageError: this user may not.
        NodeError: something else does already.
    """
    for address in addresses or ("0.0.0.0", "::"):
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            socket.create_server((address, port), family=family).close()
        except PermissionError:
            raise UsageError(
                f"uid {os.geteuid()} may not listen on port {port}; set --ssh-port (TRAINER_LAUNCH_SSH_PORT) to "
                f"one from 1024 up, the same in all pods: images use 2222"
            ) from None
        except OSError as problem:
            if problem.errno == errno.EADDRINUSE:
                raise NodeError(
                    f"port {port} is in use by another program in this pod, perhaps another sshd; end it, or set "
                    f"--ssh-port"
                ) from None
            if address != "::":  # there may be no IPv6 at all
                raise NodeError(f"sshd cannot listen on {address} port {port}: {problem.strerror}") from None


def _tried(argv: tuple[str, ...]) -> frozenset[str]:
    """The lines of the configuration as sshd understands it; the folder that it wants is made."""
    done = deadline_subprocess.run(argv, None, _SECONDS)
    if done.failure:
        raise NodeError(f"sshd cannot be tried out: {done.failure}")
    if done.code == 0:
        return frozenset(os.fsdecode(done.stdout).split("\n"))
    missing = _MISSING.search(done.err) or _UNSAFE.search(done.err)
    if missing is None:
        raise _refusal(done.err)
    if _made(missing[1]):
        return _tried(argv)
    raise UsageError(
        f"sshd as root needs the empty folder {missing[1]}, which this read-only root filesystem does not have; "
        f"mount an emptyDir there, make it in the image, or let the pod run as an ordinary user (runAsUser: 1000)"
    )


def _refusal(text: str) -> LaunchError:
    lines = [line for line in text.splitlines() if line.strip()] or ["nothing"]
    return UsageError(f"sshd rejects its configuration: {lines[0][:300]}; OpenSSH 7.8 or newer is needed")


def _made(folder: str) -> bool:
    """Make sshd's folder, or take the write bits off the emptyDir that is mounted there; whether it is fit then."""
    try:
        os.makedirs(folder, mode=0o755, exist_ok=True)
        os.chmod(folder, 0o755)
        status = os.stat(folder)
    except OSError:
        return False
    return status.st_uid == 0 and not stat.S_IMODE(status.st_mode) & 0o022


class Sessions:
    """Looks every second whether a session's connection was lost while its command ran on; ends what it left.

    The supervisor's loop calls it as it does the hang watch.
    """

    def __init__(self, launcher: int, now_s: float) -> None:
        self._launcher = launcher
        self._commands: set[tuple[int, int]] = set()  # what sshd has started itself
        self._doomed: dict[tuple[int, int], float] = {}  # and when SIGKILL is due
        self.due_s = now_s + _LOOK_EVERY_S

    def look(self, now_s: float) -> None:
        """Look once; it never finds a hang."""
        self.due_s = now_s + _LOOK_EVERY_S
        if not self._doomed and self._is_idle():
            self._commands = set()
            return
        entries = process_tree.descendants(self._launcher)  # parents first
        left: dict[int, ProcessEntry] = {}
        for entry in entries:
            is_lost = self._is_lost(entry)
            if is_lost and entry.key not in self._doomed:
                _log.warning("%s lost its ssh connection; ending it and everything it started", entry)
            if is_lost or entry.key in self._doomed or entry.parent in left:
                left[entry.pid] = entry
        servers = {entry.pid for entry in entries if entry.name in _SSHD}
        self._commands = {entry.key for entry in entries if entry.parent in servers and entry.name not in _SSHD}
        for entry in left.values():
            if entry.key not in self._doomed:
                process_tree.send(entry.pid, signal.SIGTERM)
                process_tree.send(entry.pid, signal.SIGCONT)  # one that is suspended could not hear it
            elif now_s >= self._doomed[entry.key]:
                process_tree.send(entry.pid, signal.SIGKILL)
        self._doomed = {entry.key: self._doomed.get(entry.key, now_s + _GRACE_S) for entry in left.values()}

    def _is_lost(self, entry: ProcessEntry) -> bool:
        """Whether a command's session has ended under it: the launcher has inherited it.

        A daemon that a command left behind on purpose, as Open MPI's does, was never sshd's own child.
        """
        return entry.parent == self._launcher and entry.key in self._commands

    def _is_idle(self) -> bool:
        """Whether there is nothing but sshd itself: found out without looking at every process of the machine."""
        below = process_tree.children(self._launcher)
        return below is not None and len(below) == 1 and process_tree.children(next(iter(below))) == frozenset()
