"""What each host of an MPI job is asked over one ssh session, what it answers, and why ssh was refused."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import selectors
import shlex
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import PurePosixPath

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.host.deadline_subprocess import Ended, run
from trainer_launch.host.network import free_port, is_here, listen, route_to
from trainer_launch.model import Endpoint, Member, PortRange
from trainer_launch.model.errors import LaunchError
from trainer_launch.model.settings import Settings
from trainer_launch.mpi import host_readiness
from trainer_launch.mpi.host_readiness import Probes, Threads
from trainer_launch.mpi.mpirun_command import INTEL, OPEN_MPI, Dialect, recognised
from trainer_launch.mpi.ssh_client import Client, prepared
from trainer_launch.planning.reading import ports_of
from trainer_launch.planning.typed_mpirun import Typed
from trainer_launch.preflight.check import Subject, at_once
from trainer_launch.preflight.thresholds import Thresholds

_SHOWN = 200
_MAX_LINES = 200

# $1 mpirun, $2 the programs by which it starts ranks, $3 port to call back, $4 what to say there, then addresses.
_SCRIPT = r"""
say() { printf '%s %s\n' "$T" "$*"; }
say begin
mpirun=$(command -v "$1" 2>/dev/null) || mpirun=
if [ -n "$mpirun" ]; then
    say mpirun "$(readlink -f "$mpirun" 2>/dev/null || echo "$mpirun")"
    say version "$("$mpirun" --version 2>&1 </dev/null | grep -m 1 -i -e version -e mpi -e prrte)"
fi
for name in $2; do
    found=$(command -v "$name" 2>/dev/null) || continue
    say daemon "$name" "$(readlink -f "$found" 2>/dev/null || echo "$found")"
done
say path "$PATH"
say cpus "$(nproc 2>/dev/null)"
say gpus "$(ls -d /dev/nvidia[0-9]* 2>/dev/null | wc -l)"
port=$3 words=$4
shift 4
for address in "$@"; do
    if command -v python3 >/dev/null 2>&1; then
        why=$(python3 -I -S -c '
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), 3) as made:
    made.sendall(sys.argv[3].encode() + b"\n")
    made.recv(1)
' "$address" "$port" "$words" 2>&1 | tail -n 1)
    elif command -v bash >/dev/null 2>&1; then
        why=$(timeout 3 bash -c 'exec 3<>"/dev/tcp/$0/$1" && echo "$2" >&3 && read -r -n 1 -u 3' \
            "$address" "$port" "$words" 2>&1 | tail -n 1)
    else
        why='neither python3 nor bash is there to try it with'
    fi
    say called "$address" "$why"
done
say end
"""
_VERSION = re.compile(r"\d+(?:\.\d+)+\S{0,20}")


def script_command(
    token: str, host: str, mpirun: str, daemons: Sequence[str], addresses: Sequence[str] = (), port: int = 0
) -> str:
    """The command line for the host's shell; the host calls back `port` at these addresses of the launcher."""
    words = [mpirun, " ".join(daemons), str(port), f"{token} {host}", *addresses]
    args = " ".join(map(shlex.quote, words))
    return f"exec env T={shlex.quote(token)} sh -c {shlex.quote(_SCRIPT)} sh {args}"


class Answer(Struct, frozen=True, kw_only=True):
    """What a host has answered."""

    began: bool = False
    ended: bool = False
    noise: tuple[str, ...] = ()  # lines that its login shell prints by itself
    mpirun: str | None = None  # the file that it is in the end
    version: str | None = None
    daemons: Mapping[str, str] = field(default_factory=dict)  # name: file
    path: str = ""
    cpus: int | None = None
    gpus: int | None = None
    calls: Mapping[str, str] = field(default_factory=dict)  # address: why not


def read(token: str, text: str) -> Answer:
    """The answer in a session's standard output."""
    said: dict[str, str] = {}
    daemons: dict[str, str] = {}
    calls: dict[str, str] = {}
    noise: list[str] = []
    for line in text.splitlines()[:_MAX_LINES]:
        first, _, rest = line.partition(" ")
        if first != token:
            noise += [line[:_SHOWN]] if line.strip() else []
            continue
        word, _, value = rest.partition(" ")
        if word == "daemon":
            daemons.setdefault(*_two(value))
        elif word == "called":
            calls.setdefault(*_two(value))
        else:
            said.setdefault(word, value.strip())
    return Answer(
        began="begin" in said,
        ended="end" in said,
        noise=tuple(noise),
        mpirun=said.get("mpirun") or None,
        version=version_in(said.get("version", "")),
        daemons=daemons,
        path=said.get("path", ""),
        cpus=_number(said.get("cpus", "")),
        gpus=_number(said.get("gpus", "")),
        calls=calls,
    )


def version_in(said: str) -> str | None:
    """The version in mpirun's own words; the words themselves where there is none."""
    found = _VERSION.search(said)
    return found[0].rstrip(",)") if found else said[:_SHOWN] or None


def _two(value: str) -> tuple[str, str]:
    first, _, rest = value.partition(" ")
    return first, rest.strip()[:_SHOWN]


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 8 else None


# -- why a host did not run what ssh was asked for ---------------------------------------------


_SSH_FAILED = 255


class Stage(str, Enum):
    """What a host has to pass, in order."""

    DNS = "DNS"
    PORT = "port"
    BANNER = "banner"
    HOST_KEY = "host key"
    KEY = "key"
    SHELL = "shell"
    PASSED = "passed"


class Refusal(Struct, frozen=True):
    """Where a host is stuck, and why."""

    stage: Stage
    why: str


_WORDS: tuple[tuple[re.Pattern[str], Stage], ...] = (
    (
        re.compile(r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed|host key is known"),
        Stage.HOST_KEY,
    ),
    (re.compile(r"no matching host key|Server host key|Bad server host key"), Stage.HOST_KEY),
    (
        re.compile(r"Permission denied|Too many authentication failures|no matching key|UNPROTECTED PRIVATE"),
        Stage.KEY,
    ),
    (re.compile(r"This account is (?:currently )?not available|account is locked|may not log in"), Stage.SHELL),
    (re.compile(r"Could not resolve hostname"), Stage.DNS),
    (re.compile(r"ssh: connect to host"), Stage.PORT),
    (re.compile(r"kex_exchange_identification|banner|Connection (?:closed|reset) by"), Stage.BANNER),
)


def refusal(code: int | None, err: str, answer: Answer) -> Refusal | None:
    """Why a host did not run the script to its end; None: it did. `code` None: it was given up for its time."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    if answer.ended:
        return None
    if answer.began:
        how = "did not end in time" if code is None else f"exited with code {code}"
        return Refusal(Stage.SHELL, f"the test command {how}")
    if code == _SSH_FAILED or code is None:
        for pattern, stage in _WORDS:
            told = next((line for line in lines if pattern.search(line)), None)
            if told:
                return Refusal(stage, told.strip("@ \t")[:_SHOWN])
    if code is None:
        return Refusal(
            Stage.SHELL, "login succeeded, but no command ran in time" if answer.noise else "no answer in time"
        )
    last = lines[-1][:_SHOWN] if lines else "it said nothing"
    if code == _SSH_FAILED:
        return Refusal(Stage.BANNER, last)
    said = f"; it said: {answer.noise[-1]}" if answer.noise else f"; {last}" if lines else ""
    return Refusal(Stage.SHELL, f"its login shell ends with code {code} before any command{said}")


# -- who calls back, and all hosts at once --------------------------------------------------------------------


AT_ONCE = 64  # sessions under way; PRRTE has 128
_LINE_BYTES = 400
_CALLERS = 512  # that are heard at once
_HEAR_S = 2.0  # for one line of who has called


class CallbackListener:
    """Listens on a port of its own, `among` those allowed, for hosts that call back with `TOKEN HOST`.

    Raises NodeError where none of these is free.
    """

    def __init__(self, token: str, among: PortRange | None = None) -> None:
        self._token = token
        self.heard: dict[str, str] = {}  # host: from which address
        self._room = threading.BoundedSemaphore(_CALLERS)  # anybody may call
        self._listener = listen(
            Endpoint("", 0 if among is None else free_port(among)), "the MPI launcher's preflight"
        )
        self._listener.setblocking(True)
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(_HEAR_S)

    def _listen(self) -> None:
        while True:
            try:
                made, address = self._listener.accept()
            except OSError:
                return
            if self._room.acquire(blocking=False):
                threading.Thread(target=self._hear, args=(made, str(address[0])), daemon=True).start()
            else:
                made.close()

    def _hear(self, made: socket.socket, address: str) -> None:
        """One line, and a byte in return so that the other side knows that it was we who answered."""
        until_s, said = time.monotonic() + _HEAR_S, b""
        with contextlib.closing(made), contextlib.ExitStack() as over, contextlib.suppress(OSError):
            over.callback(self._room.release)
            while not said.endswith(b"\n") and len(said) < _LINE_BYTES:
                made.settimeout(max(0.01, until_s - time.monotonic()))
                data = made.recv(_LINE_BYTES)
                if not data or time.monotonic() > until_s:
                    return
                said += data
            token, _, host = said.decode("ascii", "replace").strip().partition(" ")
            if token == self._token:
                self.heard.setdefault(host, address)
                made.sendall(b".")


def ways_back(hosts: Iterable[str], source_to: Callable[[str], str], most: int = 3) -> tuple[str, ...]:
    """Our own addresses that hosts would see: those from which packets to them go, without loopback's."""
    found: dict[str, None] = {}
    for host in hosts:
        with contextlib.suppress(OSError):
            source = source_to(host)
            if not source.startswith("127.") and source != "::1":
                found[source] = None
        if len(found) == most:
            break
    return tuple(found)


# -- the launcher, and all that was found out of its hosts --------------------------------------


_ASK_S = 20.0  # for all that a host is asked, with three addresses to call back at 3 s each
_VERSION_S = 20.0
_THREADS = 16
_NEW_OPEN_MPI = 5


class Launcher(Struct, frozen=True, kw_only=True):
    """What is known before any host was asked."""

    subject: Subject
    settings: Settings
    folder: str  # private and new
    typed: Typed  # of which nothing but the program is known where ranks are started without MPI
    deadline_s: float  # for hosts to come
    thresholds: Thresholds  # of pairs

    @property
    def mpirun(self) -> str | None:
        """As typed; None: ranks are started without MPI."""
        return self.typed.mpirun or None

    @property
    def members(self) -> Sequence[Member]:
        """The hosts."""
        return self.subject.job.members or ()


class Hosts(Struct, frozen=True, kw_only=True):
    """All that was found out of the hosts; those that let us in may be asked more."""

    launcher: Launcher
    trouble: LaunchError | None = None  # no host was asked
    client: Client | None = None
    refusals: Mapping[str, Refusal | None] = field(default_factory=dict)
    answers: Mapping[str, Answer] = field(default_factory=dict)
    own: Own | None = None
    dialect: Dialect | None = None
    callers: Sequence[str] = ()  # who called back

    @property
    def let_in(self) -> Mapping[str, Answer]:
        """The hosts that ran the whole script."""
        return {host: answer for host, answer in self.answers.items() if self.refusals[host] is None}


class Own(Struct, frozen=True, kw_only=True):
    """What the launcher itself has, by which the others are measured."""

    mpirun: str  # as typed
    version: str | None
    daemons: Sequence[str]  # names, one of which every host needs; none: it is no mpirun that we know
    daemon: str | None  # the file, where it is here
    is_here: bool = True
    is_needed: bool = True  # by a command that is known


def look(launcher: Launcher) -> Hosts:
    """Look at all hosts, to the end of the deadline at most if some are not there."""
    try:
        client = prepared(
            launcher.subject.job,
            f"{launcher.folder}/ssh",
            port=launcher.settings.ssh_port,
            check_host_keys=not launcher.settings.insecure_host_keys,
            path=launcher.subject.env.get("PATH"),
        )
    except LaunchError as problem:
        return Hosts(launcher=launcher, trouble=problem)
    hosts = [member.host for member in launcher.members]
    stuck = _wait(hosts, client.port, launcher.deadline_s)
    there = [host for host in hosts if host not in stuck]
    dialect, own = _own(launcher)
    token = secrets.token_hex(12)
    listener = CallbackListener(token, ports_of(launcher.settings))
    try:
        addresses = ways_back(there, _source_to)

        def asked(host: str) -> Ended:
            command = script_command(token, host, launcher.mpirun or "-", own.daemons, addresses, listener.port)
            return run(argv_on(host, command, client), launcher.subject.env, _ASK_S)

        told = at_once(there, asked, AT_ONCE)
    finally:
        listener.close()
    answers = {host: read(token, one.out) for host, one in told.items()}
    refusals = {host: refusal(one.code, one.err, answers[host]) for host, one in told.items()}
    return Hosts(
        launcher=launcher,
        client=client,
        refusals={host: stuck.get(host) or refusals.get(host) for host in hosts},
        answers=answers,
        own=own,
        dialect=dialect,
        callers=[*listener.heard, *(host for host in there if is_here(host))],
    )


def argv_on(host: str, command: str, client: Client) -> Sequence[str]:
    """How a shell's command is run on a host: here it needs no ssh."""
    return ("/bin/sh", "-c", command) if is_here(host) else client.argv(host, command)


def _source_to(host: str) -> str:
    found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    return route_to(str(found[0][4][0])).source


# -- waiting ----------------------------------------------------------------------------------


def _wait(hosts: Sequence[str], port: int, deadline_s: float) -> dict[str, Refusal]:
    """Wait until every host has shown its banner; who has not at the deadline, and where each is stuck."""
    until_s = time.monotonic() + max(deadline_s, 5.0)
    threads = Threads(_THREADS)
    with selectors.DefaultSelector() as selector:
        selector.register(threads.fd, selectors.EVENT_READ, threads.settle)
        probes = Probes(selector, threads, port, lambda host: None)
        probes.watch(hosts)
        while time.monotonic() < until_s and len(host_readiness.ready(probes.readiness)) < len(hosts):
            due_s = until_s if probes.due_s is None else min(until_s, probes.due_s)
            for key, _ in selector.select(max(0.0, due_s - time.monotonic())):
                key.data()
            probes.tick(time.monotonic())
        probes.rest()
        return {
            host: Refusal(Stage[reached.stage.name], reached.why)
            for host, reached in probes.readiness.items()
            if reached.stage is not host_readiness.Stage.READY
        }


# -- the launcher itself ----------------------------------------------------------------------


def _own(launcher: Launcher) -> tuple[Dialect | None, Own]:
    """The launcher's mpirun, and what it starts on other hosts."""
    env = launcher.subject.env
    path = env.get("PATH")
    found = shutil.which(launcher.mpirun, path=path) if launcher.mpirun else None
    if found is None or launcher.mpirun is None:
        nothing = Own(mpirun=launcher.mpirun or "", version=None, daemons=(), daemon=None)
        return None, replace(nothing, is_here=False, is_needed=launcher.subject.command is not None)
    said = run((found, "--version"), env, _VERSION_S)
    dialect = recognised(said.out + said.err)
    daemons = _daemons(dialect)
    if "/" in launcher.mpirun:  # it starts what lies beside itself
        daemons = tuple(str(PurePosixPath(launcher.mpirun).parent / name) for name in daemons)
    here = next((one for name in daemons if (one := shutil.which(name, path=path))), None)
    line = next((text for text in said.out.splitlines() if version_in(text) != text[:200]), "")
    return dialect, Own(
        mpirun=found,
        version=version_in(line),
        daemons=daemons,
        daemon=None if here is None else os.path.realpath(here),
    )


def _daemons(dialect: Dialect | None) -> tuple[str, ...]:
    if dialect is None:
        return ()
    if dialect.name == OPEN_MPI:
        return ("prted",) if dialect.major >= _NEW_OPEN_MPI else ("orted",)
    return ("hydra_bstrap_proxy", "hydra_pmi_proxy") if dialect.name == INTEL else ("hydra_pmi_proxy",)
