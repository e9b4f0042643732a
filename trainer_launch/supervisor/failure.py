"""Name the cause of a failed run: an ordered table of rules, the first that applies wins. Pure."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from trainer_launch import exits
from trainer_launch.model import Exit, Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFailure:
    """The first worker that failed, as the engine's agent wrote it down."""

    reason: str | None = None
    rank: int | None = None
    local_rank: int | None = None
    exit_code: int | None = None  # as the shell has it
    signal: int | None = None
    message: str | None = None
    timestamp: float | None = None  # seconds since 1970
    hostname: str | None = None
    lines: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What else is known about a death. None: could not be read."""

    oom_kills_before: int | None = None
    oom_kills_after: int | None = None
    shm_free_bytes: int | None = None
    shm_size_bytes: int | None = None
    agent: AgentFailure | None = None
    last_lines: tuple[str, ...] = ()  # what it wrote last
    stopped: bool = False  # we were asked to stop first
    text: str = ""  # what exec said, when it did not even start

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel killed for memory in our cgroup since the run began."""
        before, after = self.oom_kills_before, self.oom_kills_after
        return before is not None and after is not None and after > before

    @property
    def shm_full(self) -> bool:
        """Whether /dev/shm has no room worth the name: under 2 %, or under 1 MiB."""
        free, size = self.shm_free_bytes, self.shm_size_bytes
        return free is not None and size is not None and free < max(1 << 20, size // 50)


@dataclass(frozen=True, slots=True)
class _Rule:
    reason: str
    applies: Callable[[Exit, Evidence], bool]
    hint: str
    exit_code: int | None = None  # None: the program's own


def _signal_is(*numbers: int) -> Callable[[Exit, Evidence], bool]:
    return lambda end, _: end.signal in numbers


def _agent_says(reason: str) -> Callable[[Exit, Evidence], bool]:
    return lambda _, evidence: evidence.agent is not None and evidence.agent.reason == reason


def _last_words_match(pattern: str) -> Callable[[Exit, Evidence], bool]:
    compiled = re.compile(pattern)

    def applies(_: Exit, evidence: Evidence) -> bool:
        message = evidence.agent.message if evidence.agent else None
        return any(compiled.search(text) for text in (message or "", *_final_error(evidence.last_lines)))

    return applies


# How Python names what was not caught, perhaps with torch's prefix; warnings and hints may follow it.
_UNCAUGHT = re.compile(r"(\[rank\d+\]: *)?[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Timeout|Abort)\b")


def _final_error(lines: tuple[str, ...]) -> tuple[str, ...]:
    """The last error that Python named and what follows it; without one the very last line."""
    starts = [number for number, line in enumerate(lines) if _UNCAUGHT.match(line)]
    return lines[starts[-1] :] if starts else lines[-1:]


_WHY_CHARS = 300
_CRASHES = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGSYS,
    signal.SIGTRAP,
)
_DEVICE = r"uncorrectable (NVLink|ECC) error|ECC_UNCORRECTABLE|GPU has fallen off the bus|GPU is lost|\bXid\b"
_PEER = (
    r"ncclRemoteError|DistNetworkError|Rendezvous(Timeout|Connection|Closed)Error|Connection (closed|reset) by peer"
)

RULES = (
    _Rule(
        "Stopped",
        lambda _, evidence: evidence.stopped,
        "nothing, unless work was lost: then give it more grace",
        exits.STOPPED,
    ),
    _Rule(
        "OutOfMemory",
        lambda end, evidence: end.signal == signal.SIGKILL and evidence.oom_killed,
        "raise the container's memory limit, or use fewer data-loader workers or smaller batches",
    ),
    _Rule(
        "SharedMemoryFull",
        lambda end, evidence: end.signal == signal.SIGBUS and evidence.shm_full,
        "mount an emptyDir with medium: Memory at /dev/shm, or use fewer data-loader workers",
    ),
    _Rule(
        "NotRunnable",
        lambda end, _: end.code in (exits.NOT_EXECUTABLE, exits.NOT_FOUND),
        "check the command, the image and the working directory",
    ),
    _Rule(
        "PeerLost",
        _agent_says("PeerLost"),
        "see how the other nodes ended; the one that failed first tells why",
        exits.INFRASTRUCTURE,
    ),
    _Rule(
        "Misconfigured",
        _agent_says("Misconfigured"),
        "correct torchrun's option or its PET_ variable; trying again cannot help",
        exits.MISCONFIGURED,
    ),
    _Rule(
        "DeviceError",
        _last_words_match(_DEVICE),
        "run on another node and have this one's device checked",
        exits.INFRASTRUCTURE,
    ),
    _Rule(
        "PeerLost",
        _last_words_match(_PEER),
        "see how the other nodes ended; the one that failed first tells why",
        exits.INFRASTRUCTURE,
    ),
    _Rule("Crashed", _signal_is(*_CRASHES), "a native library failed; PYTHONFAULTHANDLER=1 shows where"),
    _Rule("Killed", lambda end, _: end.signal is not None, "somebody outside this container's limits ended it"),
    _Rule("Failed", lambda _end, _evidence: True, "the program's own lines tell why"),
)


def classify(exit: Exit, evidence: Evidence) -> Failure:
    """Return the cause of a death, by the first rule that applies."""
    # The agent's note speaks of its workers; when the agent itself was killed, it is not about this death.
    agent = evidence.agent if exit.signal is None else None
    evidence = replace(evidence, agent=agent)
    end = _worker(exit, agent)
    rule = next(rule for rule in RULES if rule.applies(end, evidence))
    return Failure(
        reason=rule.reason,
        message=_message(end, evidence),
        exit_code=end.exit_code if rule.exit_code is None else rule.exit_code,
        rank=agent.rank if agent else None,
        host=agent.hostname if agent else None,
        signal=end.signal,
        last_lines=(agent.lines if agent else ()) or evidence.last_lines,
        hint=rule.hint,
    )


def unresolved(text: str) -> Failure:
    """Return the cause of a run whose peers' names never resolved."""
    return Failure(
        reason="PeerLost",
        message=text,
        exit_code=exits.INFRASTRUCTURE,
        hint="see whether the job's headless service and the other pods exist",
    )


def parse_agent_failure(text: str) -> AgentFailure | None:
    """Parse an agent's note; None when it is no such note, because it must not hide the failure itself."""
    try:
        note = json.loads(text)
    except ValueError:
        return None
    if not isinstance(note, dict):
        return None
    lines = note.get("lines")
    return AgentFailure(
        **{key: _of_type(note.get(key), str) for key in ("reason", "message", "hostname")},
        **{key: _of_type(note.get(key), int) for key in ("rank", "local_rank", "exit_code", "signal")},
        timestamp=_of_type(note.get("timestamp"), (int, float)),
        lines=tuple(str(line) for line in lines) if isinstance(lines, list) else (),
    )


def _worker(exit: Exit, agent: AgentFailure | None) -> Exit:
    """Return the worker's own death where the agent knows it."""
    if agent is None:
        return exit
    if agent.signal is not None:
        return replace(exit, code=None, signal=agent.signal)
    return exit if agent.exit_code is None else replace(exit, code=agent.exit_code)


def _message(end: Exit, evidence: Evidence) -> str:
    if evidence.text:
        return evidence.text
    agent = evidence.agent
    who = end.process if agent is None or agent.rank is None else f"rank {agent.rank}"
    how = f"exit code {end.code}" if end.signal is None else f"signal {_signal_name(end.signal)}"
    why = agent.message if agent else None
    if why is None and end.signal is None:
        why = "".join(_final_error(evidence.last_lines)[:1])  # who is killed cannot say why
    return f"{who} ended with {how}: {why[:_WHY_CHARS]}" if why else f"{who} ended with {how}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)


def _of_type(value: object, kind: type | tuple[type, ...]) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
