"""Try something that may hang in a child that can be killed: a dead file server holds only the child."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from types import MappingProxyType

from trainer_launch.model.errors import MALFORMED
from trainer_launch.model.frozen import dataclass

_PROBE = Path(__file__).with_name("probe_process.py")
_SHOWN = 200  # characters of a stage
_REAP_S = 0.5  # what SIGKILL may take; a process that does not go then is stuck inside the kernel


def _nothing() -> Mapping[str, float]:
    return MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """How it went."""

    stage: str = ""  # the last one that was begun
    errno: int | None = None  # of the call that failed
    values: Mapping[str, float] = field(default_factory=_nothing)  # what was measured, of a trial that went well
    timed_out: bool = False
    stuck: bool = False  # not even SIGKILL ended it
    trouble: str = ""  # the child itself failed: nothing is known

    @property
    def is_good(self) -> bool:
        """Whether it went well."""
        return not (self.timed_out or self.trouble or self.errno is not None)


def try_out(what: str, argument: str, limit_s: float) -> Tried:
    """Run one trial of host/probe_process.py, which takes nothing of ours but the standard library."""
    argv = (sys.executable, "-I", "-S", str(_PROBE), what, argument, str(limit_s))
    try:
        child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError as problem:
        return Tried(trouble=f"no child could be started: {problem.strerror}")
    try:
        said, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        child.kill()
        try:
            said, _ = child.communicate(timeout=_REAP_S)
        except subprocess.TimeoutExpired as late:
            return _read(late.output or b"", timed_out=True, stuck=True)
        return _read(said, timed_out=True)
    return _read(said, status=child.returncode)


def _read(said: bytes, *, status: int = 0, timed_out: bool = False, stuck: bool = False) -> Tried:
    """Each line is a JSON object: a stage that begins, an error, or what was measured."""
    stage, number, values = "", None, _nothing()
    ended = False
    for line in said.splitlines():
        try:
            told = json.loads(line)
            stage = str(told.get("stage", stage))[:_SHOWN]
            number = int(told["errno"]) if "errno" in told else number
            values = {str(name): float(value) for name, value in told.get("values", values).items()}
        except MALFORMED:
            continue
        ended = ended or "values" in told or "errno" in told
    trouble = "" if ended or timed_out else f"the child ended with {status} at the stage {stage or 'start'}"
    return Tried(
        stage=stage, errno=number, values=values, timed_out=timed_out and not ended, stuck=stuck, trouble=trouble
    )
