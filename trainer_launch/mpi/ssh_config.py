"""What sshd and ssh are told, as text. Pure.

One key is all: every pod has it from the job's Secret. It opens each pod, and each pod shows it as its host key, so
that both sides know each other, and nobody in between can pretend to be either.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

ALIVE_EVERY_S = 3  # between two questions whether the other side is still there
ALIVE_MISSED = 3  # unanswered ones after which it is lost
CONNECT_S = 5  # for one attempt to connect
LOGIN_GRACE_S = 30  # for who has connected to prove the key


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """Where the files of one pod's ssh are, all in one private folder."""

    folder: str

    @property
    def key(self) -> str:
        """The job's private key, 0600."""
        return f"{self.folder}/job_key"

    @property
    def authorized(self) -> str:
        """The one key that opens this pod."""
        return f"{self.folder}/authorized_keys"

    @property
    def known_hosts(self) -> str:
        """The one key that every pod has to show."""
        return f"{self.folder}/known_hosts"

    @property
    def client(self) -> str:
        """The configuration of ssh."""
        return f"{self.folder}/ssh_config"

    @property
    def server(self) -> str:
        """The configuration of sshd."""
        return f"{self.folder}/sshd_config"

    @property
    def agent(self) -> str:
        """A program that is `ssh` with this configuration, for mpirun."""
        return f"{self.folder}/bin/{AGENT}"

    @property
    def ender(self) -> str:
        """A program that ends what other sessions of this pod have started; on workers."""
        return f"{self.folder}/bin/{ENDER}"


# On launchers and workers alike, so that each finds its own by PATH; a worker's sessions find both.
AGENT = "trainer-launch-ssh"
ENDER = "trainer-launch-end-sessions"


@dataclass(frozen=True, slots=True)
class Alias:
    """A host whose name no resolver knows, or whose port differs."""

    name: str
    address: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """What distinguishes one pod's sshd from another's."""

    files: Files
    port: int
    addresses: Sequence[str]  # to listen at; none: all
    user: str
    is_root: bool
    env: Mapping[str, str]  # what the sessions get besides what sshd gives them
    log_level: str = "INFO"


def server(settings: Server) -> str:
    """Text of sshd_config: only the job's key, and nothing but commands."""
    lines = [
        f"Port {settings.port}",
        *(f"ListenAddress {address}" for address in settings.addresses),
        f"HostKey {_quoted(settings.files.key)}",
        f"AuthorizedKeysFile {_quoted(settings.files.authorized)}",
        "AuthorizedKeysCommand none",
        f"AllowUsers {settings.user}",
        "AuthenticationMethods publickey",
        "PubkeyAuthentication yes",
        "PasswordAuthentication no",
        "KbdInteractiveAuthentication no",
        "HostbasedAuthentication no",
        "PermitEmptyPasswords no",
        f"PermitRootLogin {'prohibit-password' if settings.is_root else 'no'}",
        "UsePAM no",
        "StrictModes no",  # it would ask that /tmp be closed to others; the folder in it is
        "DisableForwarding yes",
        "AllowAgentForwarding no",
        "AllowTcpForwarding no",
        "AllowStreamLocalForwarding no",
        "X11Forwarding no",
        "PermitTunnel no",
        "GatewayPorts no",
        "PermitTTY no",
        "PermitUserEnvironment no",
        "PermitUserRC no",
        "PrintMotd no",
        "PrintLastLog no",
        "UseDNS no",
        "PidFile none",
        f"LoginGraceTime {LOGIN_GRACE_S}",
        "MaxStartups 200:30:400",  # a launcher's probes, and those of hundreds of workers for each other
        "MaxSessions 64",
        f"ClientAliveInterval {ALIVE_EVERY_S}",
        f"ClientAliveCountMax {ALIVE_MISSED}",
        f"LogLevel {settings.log_level}",
    ]
    if settings.env:
        lines.append(" ".join(["SetEnv", *(_quoted(f"{name}={value}") for name, value in settings.env.items())]))
    return "\n".join(lines) + "\n"


def client(files: Files, port: int, aliases: Iterable[Alias] = (), *, check_host_keys: bool = True) -> str:
    """Text of ssh_config: only the job's key, shown by both sides, no questions asked, a lost host soon noticed."""
    lines: list[str] = []
    for alias in aliases:
        lines += [f"Host {alias.name}", f"  HostName {alias.address}", f"  Port {alias.port}"]
    lines += [
        "Host *",
        f"  Port {port}",
        f"  IdentityFile {_quoted(files.key)}",
        "  IdentitiesOnly yes",
        "  IdentityAgent none",
        f"  UserKnownHostsFile {_quoted(files.known_hosts) if check_host_keys else '/dev/null'}",
        "  GlobalKnownHostsFile /dev/null",
        f"  StrictHostKeyChecking {'yes' if check_host_keys else 'no'}",
        "  CheckHostIP no",
        "  UpdateHostKeys no",
        "  VerifyHostKeyDNS no",
        "  BatchMode yes",
        "  PreferredAuthentications publickey",
        "  PasswordAuthentication no",
        "  KbdInteractiveAuthentication no",
        "  ForwardAgent no",
        "  ForwardX11 no",
        "  ClearAllForwardings yes",
        "  PermitLocalCommand no",
        "  ControlMaster no",
        "  ControlPath none",
        "  RequestTTY no",
        "  EscapeChar none",
        f"  ConnectTimeout {CONNECT_S}",
        "  ConnectionAttempts 1",
        f"  ServerAliveInterval {ALIVE_EVERY_S}",
        f"  ServerAliveCountMax {ALIVE_MISSED}",
        "  TCPKeepAlive yes",
        "  LogLevel ERROR",
    ]
    return "\n".join(lines) + "\n"


def known_hosts(public: str) -> str:
    """Every host, under any name and port, has to show the job's key."""
    return f"* {public}\n"


def authorized_keys(public: str) -> str:
    """Only who has the job's key comes in, and only for commands."""
    return f"restrict {public}\n"


def agent(program: str, files: Files) -> str:
    """A program that is `ssh` with our configuration; mpirun calls it as it calls ssh."""
    return f'#!/bin/sh\nexec {_shell_word(program)} -F {_shell_word(files.client)} "$@"\n'


def _quoted(text: str) -> str:
    """One argument of a configuration line."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def ender(python: str, package_root: str, launcher: int) -> str:
    """A program that ends all other sessions below process `launcher`, and what they have left behind."""
    code = (
        "import sys; sys.path.insert(0, sys.argv.pop(1)); "
        "from trainer_launch.mpi import ssh_sessions; ssh_sessions.main()"
    )
    words = " ".join(map(_shell_word, (python, "-I", "-S", "-c", code, package_root, str(launcher))))
    return f'#!/bin/sh\nexec {words} "$@"\n'


def _shell_word(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"
