"""What horovodrun finds as `ssh`: the job's own, with a guard around what it runs. Started by path with `-I -S`.

`horovod_ssh.py FOLDER [ssh's arguments as horovodrun or mpirun write them]`. FOLDER holds `ssh.json` (which ssh,
and the grace) and gets, for each session, a pipe into which the launcher writes signals for what runs there.
Horovod's own way to end a rank on another host is to end its ssh, of which the rank hears nothing and goes on; the
guard ends it when the connection is gone, however that came about.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Sequence

PIPES = "sessions"  # below FOLDER: host.local-rank.pid
STOPPING = "stopping"  # a file: nothing is started any more
TOLD = "ssh.json"
ASKED_TO_STOP = 143
_WITH_VALUE = frozenset("BbcDEeFIiJLlmOopQRSWw")  # ssh's options that take one
_LOCAL_RANK = re.compile(r"\bHOROVOD_LOCAL_RANK=([0-9]{1,6})\b")
# It reads names of signals from its standard input, a line each; at the end of that the connection is gone. With
# setsid the command has a session of its own, so that all it starts can be reached; what leaves that is on its own.
# A signal is for the rank alone, as its data loaders have to live while it saves, and for the shells above it.
_GUARD = """\
command -v setsid >/dev/null 2>&1 || exec sh -c "$0"
tell() {
    pid=$it all=$it
    while case "$(cat "/proc/$pid/comm")" in sh|dash|bash|ash|zsh|env|timeout) ;; *) false ;; esac; do
        read -r pid rest <"/proc/$pid/task/$pid/children" || [ "$pid" ] || break
        all="$pid $all"
    done
    kill -s "$1" $all
}
end() {
    left=GRACE
    while [ "$left" -gt 0 ] && kill -s 0 -- "-$it"; do sleep 1; left=$((left - 1)); done
    kill -s KILL -- "-$it"
}
exec 3<&0 </dev/null
setsid sh -c "$0" 3<&- & it=$!
{
    while read -r name <&3; do tell "$name"; done
    kill -s TERM -- "-$it"
    end
} >/dev/null 2>&1 & guard=$!
wait "$it"; code=$?
exec 2>/dev/null
kill -s KILL "$guard"
[ "$code" -gt 128 ] || kill -s TERM -- "-$it"
end
exit "$code"
"""


def main() -> None:
    """Become ssh."""
    folder, words = sys.argv[1], sys.argv[2:]
    if os.path.exists(f"{folder}/{STOPPING}"):
        sys.exit(ASKED_TO_STOP)
    with open(f"{folder}/{TOLD}", encoding="utf-8") as file:
        told = json.load(file)
    options, host, command = split(words)
    if not host or not command:
        os.execv(told["ssh"][0], [*told["ssh"], *words])
    text = " ".join(command)  # as ssh itself joins them
    _take_signals_from(f"{folder}/{PIPES}/{host}.{local_rank(text)}.{os.getpid()}")
    argv = [*told["ssh"], *options, "--", host, guarded(text, told["grace_s"])]
    os.execv(argv[0], argv)


def split(words: Sequence[str]) -> tuple[list[str], str, list[str]]:
    """Ssh's arguments: options, which may stand on both sides of the host, the host, and the command."""
    options: list[str] = []
    host = ""
    rest = list(words)
    while rest:
        word = rest[0]
        if word == "--" or not word.startswith("-"):
            if host:
                break
            rest = rest[1:] if word == "--" else rest
            host = rest.pop(0) if rest else ""
            if word == "--" or not host:
                break
            continue
        options.append(rest.pop(0))
        letters = word[1:]
        takes = next((at for at, letter in enumerate(letters) if letter in _WITH_VALUE), None)
        if takes == len(letters) - 1 and rest:
            options.append(rest.pop(0))
    return options, host, rest


def guarded(command: str, grace_s: float) -> str:
    """A command line for the other end's shell: `command` under guard, with its own exit code."""
    guard = _GUARD.replace("GRACE", str(max(1, round(grace_s))))
    return f"exec sh -c {shlex.quote(guard)} {shlex.quote(command)}"


def local_rank(command: str) -> str:
    """Which of a host's ranks a command is; "-" for one that is none."""
    found = _LOCAL_RANK.search(command)
    return found[1] if found else "-"


def _take_signals_from(pipe: str) -> None:
    """Standard input becomes a pipe with a writer that never ends: ourselves."""
    os.mkfifo(pipe, 0o600)
    descriptor = os.open(pipe, os.O_RDWR)
    os.dup2(descriptor, 0)
    if descriptor:
        os.close(descriptor)


if __name__ == "__main__":
    main()
