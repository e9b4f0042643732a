"""Why a host did not run what ssh was asked for: the stage, by ssh's own words. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from trainer_launch.preflight.mpi.host_script import Answer

_SHOWN = 200
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


@dataclass(frozen=True, slots=True)
class Refusal:
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
