"""Small shell scripts on the job's hosts, by the same way by which mpirun reaches them."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from trainer_launch.host import deadline_subprocess

_WORDS = 200

# A rank, or a process of one, bears the job's mark and its number. Small images lack pgrep and ps, and /proc shows
# an environment to its owner and to root only, which is just right.
_FIND = """
marked() {
  [ "$(tr '\\0' '\\n' <"/proc/$1/environ" | grep -cE '^(%(mark)s$|(OMPI_COMM_WORLD|PMI|HOROVOD)_RANK=)')" -ge 2 ]
}
for folder in /proc/[0-9]*; do
  pid=${folder#/proc/}
  if [ "$pid" != $$ ] && marked "$pid"; then
    %(what)s
  fi
done 2>/dev/null
true
"""
# Each rank alone, as its data loaders have to live while it saves; where it is a shell, also what that waits for.
_TELL_RANK = """above=$(sed -n 's/^PPid:[^0-9]*//p' "/proc/$pid/status")
    case "$(cat "/proc/$above/comm")" in sh|bash|dash|ash|zsh|env|timeout) shell=yes ;; *) shell=no ;; esac
    if [ $shell = yes ] || ! marked "$above"; then kill -%(name)s "$pid"; fi"""


def telling(mark: str, name: str) -> str:
    """A script that lets the ranks of a job on this host have a signal, by its name without SIG."""
    return _FIND % {"mark": mark, "what": _TELL_RANK % {"name": name}}


def sweeping(mark: str) -> str:
    """A script that kills what is left of a job on this host."""
    return _FIND % {"mark": mark, "what": 'kill -KILL "$pid"'}


def word(script: str) -> str:
    """A script as one command for whatever shell is behind sshd."""
    return f"exec /bin/sh -c {shlex.quote(script)}"


def run(argv: Sequence[str], env: Mapping[str, str], limit_s: float) -> str | None:
    """Run to the end; why it failed, in ssh's own words or the shell's; None: it went well. Blocks."""
    told = deadline_subprocess.run(argv, env, limit_s)
    if told.code == 0:
        return None
    if told.code is None:
        return f"no end within {limit_s:g} s"
    return words_of(told.err) or f"exit code {told.code}"


def words_of(said: str) -> str:
    """The last line of what another host has said, fit for a terminal."""
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "").strip()[:_WORDS]
    return "".join(c if c.isprintable() else "?" for c in last)
