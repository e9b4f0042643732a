"""What each host is asked, as one shell script over one ssh session, and what its answer means. Pure.

Every line of the answer begins with a token, so that what a login shell prints by itself is told apart.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is asked of a host."""

    token: str
    mpirun: str  # as typed
    daemons: Sequence[str]
    addresses: Sequence[str] = ()  # of the launcher, to call back
    port: int = 0

    def command(self, host: str) -> str:
        """The command line for the host's shell."""
        words = [self.mpirun, " ".join(self.daemons), str(self.port), f"{self.token} {host}", *self.addresses]
        args = " ".join(map(shlex.quote, words))
        return f"exec env T={shlex.quote(self.token)} sh -c {shlex.quote(_SCRIPT)} sh {args}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a host has answered."""

    began: bool = False
    ended: bool = False
    noise: tuple[str, ...] = ()  # lines that its login shell prints by itself
    mpirun: str | None = None  # the file that it is in the end
    version: str | None = None
    daemons: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # name: file
    path: str = ""
    cpus: int | None = None
    gpus: int | None = None
    calls: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))  # address: why not


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
