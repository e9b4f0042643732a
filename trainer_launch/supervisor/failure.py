"""Name the cause of a failed run: an ordered table of rules, the first that applies wins. Pure."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model import Exit, Failure, FailureRecord, exit_codes
from trainer_launch.model.signal_policy import signal_name
from trainer_launch.model.units import counted, in_units
from trainer_launch.supervisor import error_lines
from trainer_launch.supervisor.error_lines import PEER_HINT, Symptom, final_error, headline, recognise


class _Rule(Struct, frozen=True):
    reason: str
    applies: Callable[[Exit, Evidence], bool]
    hint: str
    what: str = ""  # completes "rank 3 ended with signal SIGKILL, …"
    exit_code: int | None = None  # None: the program's own
    again: bool | None = None  # whether to start again can help; None: as the exit code says
    shows: Callable[[Evidence], tuple[str, ...]] = lambda _: ()  # the evidence, in words


def _signal_is(*numbers: int) -> Callable[[Exit, Evidence], bool]:
    return lambda end, _: end.signal in numbers


def _agent_says(reason: str) -> Callable[[Exit, Evidence], bool]:
    return lambda _, evidence: evidence.agent is not None and evidence.agent.reason == reason


def _killed_for_memory(end: Exit, evidence: Evidence) -> bool:
    """Itself, or the data loader without which it could not go on."""
    lost_loader = end.signal is None and "killed by signal: Killed" in _error_text(evidence)
    return evidence.oom_killed and (end.signal == signal.SIGKILL or lost_loader)


def _error_text(evidence: Evidence) -> str:
    """What the program itself said of its end: the agent's word for its worker, else its last error."""
    message = evidence.agent.message if evidence.agent else None
    return message or "\n".join(final_error(evidence.last_lines))


def _symptom(end: Exit, evidence: Evidence) -> tuple[Symptom, str] | None:
    """What its last error shows; who is killed from outside has not said why."""
    said_why = end.signal is None or end.signal in _CRASHES
    return recognise(_error_text(evidence)) if said_why else None


def _memory(evidence: Evidence) -> tuple[str, ...]:
    kills = (evidence.oom_kills_after or 0) - (evidence.oom_kills_before or 0)
    words = [f"the kernel killed {counted(kills, 'process')} of this container for memory"]
    if evidence.memory_limit_bytes is not None:
        words.append(f"limit {in_units(evidence.memory_limit_bytes)}")
    if evidence.memory_peak_bytes is not None:
        words.append(f"peak {in_units(evidence.memory_peak_bytes)}")
    return (", ".join(words),)


def _shm(evidence: Evidence) -> tuple[str, ...]:
    free, size = evidence.shm_free_bytes, evidence.shm_size_bytes
    if free is None or size is None:
        return ()
    largest = (f"its largest: {', '.join(evidence.shm_largest)}",) if evidence.shm_largest else ()
    return (f"/dev/shm has {in_units(free)} free of {in_units(size)}", *largest)


def _no_oom(evidence: Evidence) -> tuple[str, ...]:
    counted = evidence.oom_kills_after is not None
    return ("the kernel's count of memory kills in this container did not rise",) if counted else ()


_WHY_CHARS = 300
_OF_DEVICES = ("DeviceError", "DeviceUnavailable")
_CRASHES = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGSYS,
    signal.SIGTRAP,
)

# Before what the program's last error shows, and after it.
_FIRST = (
    _Rule(
        "Stopped",
        lambda _, evidence: evidence.stopped,
        "nothing; if work was lost, raise --grace and terminationGracePeriodSeconds",
        exit_code=exit_codes.STOPPED,
    ),
    _Rule(
        "Hung",
        _agent_says("Hung"),
        "look at the rank and line that the message names; trainer-launch incidents show has those of all ranks; "
        "if all ranks are in the same collective, check the network between the nodes",
        exit_code=exit_codes.INFRASTRUCTURE,
        again=True,
        shows=lambda evidence: _memory(evidence) if evidence.oom_killed else (),
    ),
    _Rule(
        "OutOfMemory",
        _killed_for_memory,
        "raise the container's memory limit, or use fewer data-loader workers or smaller batches",
        what="because the container's memory was used up",
        shows=_memory,
    ),
    _Rule(
        "SharedMemoryFull",
        lambda end, evidence: end.signal == signal.SIGBUS and evidence.shm_full,
        "mount an emptyDir with medium: Memory at /dev/shm, or use fewer data-loader workers",
        what="because /dev/shm was full",
        shows=_shm,
    ),
    _Rule(
        "NotRunnable",
        lambda end, _: end.code in (exit_codes.NOT_EXECUTABLE, exit_codes.NOT_FOUND),
        "check the command, the image and the working directory",
        what="as a shell says of a command that it cannot run",
        again=False,
    ),
    _Rule(
        "Quarantined",
        _agent_says("Quarantined"),
        "let the platform start this pod on another machine, and have this one checked (nvidia-smi -q, kernel log)",
        exit_code=exit_codes.INFRASTRUCTURE,
        again=True,
    ),
    _Rule("NotStarted", _agent_says("NotStarted"), "correct what the message names, in this pod or its image"),
    _Rule("PeerLost", _agent_says("PeerLost"), PEER_HINT, exit_code=exit_codes.INFRASTRUCTURE),
    _Rule(
        "ProgramError",
        _agent_says("ProgramError"),
        "let all ranks enter the same collectives, as often as all others; a restart will not help",
        again=False,
    ),
    _Rule(
        "Misconfigured",
        _agent_says("Misconfigured"),
        "correct torchrun's option or its PET_ variable; a restart will not help",
        exit_code=exit_codes.MISCONFIGURED,
        again=False,
    ),
)
_LAST = (
    _Rule(
        "Crashed",
        _signal_is(*_CRASHES),
        "a native library failed; PYTHONFAULTHANDLER=1 shows where",
        shows=lambda evidence: _shm(evidence) if evidence.shm_full else (),
    ),
    _Rule(
        "Killed",
        _signal_is(signal.SIGKILL),
        "find out who sent SIGKILL: the program itself, kubectl exec, or the node when its own memory ran out "
        "(kubectl describe node; its kernel log)",
        shows=_no_oom,
    ),
    _Rule(
        "Killed",
        lambda end, evidence: end.signal in evidence.handed_on,
        "add a handler for this signal to the program, or set its meaning with --signals",
        shows=lambda _: ("the launcher received this signal and forwarded it",),
    ),
    _Rule(
        "Killed",
        lambda end, _: end.signal is not None,
        "find out who sent it; the launcher did not: the program itself, its libraries, a wrapper or kubectl exec",
    ),
    _Rule("Failed", lambda _end, _evidence: True, "see the program's output above"),
)
RULES = (*_FIRST, *_LAST)


def classify(death: Exit, evidence: Evidence) -> Failure:
    """Return the cause of a death, by the first rule that applies."""
    # The agent's note speaks of its workers; when the agent itself was killed, it is not about this death.
    agent = evidence.agent if death.signal is None else None
    evidence = replace(evidence, agent=agent)
    end = _worker(death, agent)
    rule, shown = _cause(end, evidence)
    return Failure(
        reason=rule.reason,
        message=_message(end, evidence, rule),
        exit_code=end.exit_code if rule.exit_code is None else rule.exit_code,
        rank=agent.rank if agent else None,
        host=agent.hostname if agent else None,
        signal=end.signal,
        last_lines=(agent.lines if agent else ()) or evidence.last_lines,
        evidence=(*shown, *((agent.why_not_again,) if agent and agent.why_not_again else ())),
        hint=rule.hint,
        again=rule.again,
    )


def _cause(end: Exit, evidence: Evidence) -> tuple[_Rule | Symptom, tuple[str, ...]]:
    """The first that applies, and what shows it; what the last error shows stands between the other rules."""
    rule = next((rule for rule in _FIRST if rule.applies(end, evidence)), None)
    if rule is None and (found := _symptom(end, evidence)) is not None:
        symptom, line = found
        return symptom, (*_device(symptom, evidence), line[:_WHY_CHARS])
    rule = rule or next(rule for rule in _LAST if rule.applies(end, evidence))
    return rule, rule.shows(evidence)


def _device(symptom: Symptom, evidence: Evidence) -> tuple[str, ...]:
    local_rank = evidence.agent.local_rank if evidence.agent else None
    if local_rank is None or not symptom.reason.startswith("Device"):
        return ()
    return (f"the worker's local rank is {local_rank}, by which programs choose their device",)


def unresolved(text: str) -> Failure:
    """Return the cause of a run whose peers' names never resolved."""
    return Failure(
        reason="PeerLost",
        message=text,
        exit_code=exit_codes.INFRASTRUCTURE,
        hint="check that the job's headless Service and the other pods exist",
    )


def _worker(death: Exit, agent: FailureRecord | None) -> Exit:
    """Return the worker's own death where the agent knows it."""
    if agent is None:
        return death
    if agent.signal is not None:
        return replace(death, code=None, signal=agent.signal)
    return death if agent.exit_code is None else replace(death, code=agent.exit_code)


def _message(end: Exit, evidence: Evidence, rule: _Rule | Symptom) -> str:
    if evidence.text:
        return evidence.text
    agent = evidence.agent
    if agent and agent.message and (agent.reason or (agent.rank is None and not end.process)):
        return agent.message  # not a worker's death
    who = end.process if agent is None or agent.rank is None else f"rank {agent.rank}"
    how = f"exit code {end.code}" if end.signal is None else f"signal {signal_name(end.signal)}"
    told = f"{who} ended with {how}" + (f", {rule.what}" if rule.what else "")
    why = agent.message if agent else None
    if why is None and not evidence.stopped and (end.signal is None or end.signal in _CRASHES):
        why = headline(evidence.last_lines, only_named=end.signal is not None)  # who is killed cannot say why
    return f"{told}: {' '.join(why.split())[:_WHY_CHARS]}" if why else told


# -- a worker's death, and what it shows about the machine ---------------------------------------


def code_of(death: FailureRecord) -> int:
    """The exit code that says it."""
    return exit_codes.of_signal(death.signal) if death.signal is not None else death.exit_code or exit_codes.FAILED


def death_of(
    rank: int | None,
    local_rank: int | None,
    code: int | None,
    number: int | None,
    said: dict[str, Any],
    *,
    was_ended: bool = False,
) -> FailureRecord:
    """The death of a worker with what it has said in its error file.

    Who was leaving with an exit code of its own when our request to end came has that code.
    """
    left = error_lines.ended_in(said) if was_ended and number in (signal.SIGTERM, signal.SIGKILL) else {}
    return FailureRecord(
        rank=rank,
        local_rank=local_rank,
        exit_code=left.get("exit_code", code),
        signal=None if left else number,
        message=error_lines.message_in(said),
        lines=tuple(error_lines.traceback_in(said)),
    )


def fault_of(death: FailureRecord, evidence: Evidence, *, was_ended: bool = False) -> FailureRecord:
    """The death with what it shows about its machine: a failed device, perhaps the machine, or nothing.

    Who was being ended by us shows no more than a proof.
    """
    crashed = death.signal in _CRASHES
    said = death.message or ("" if death.signal and not crashed else "\n".join(final_error(evidence.last_lines)))
    found = recognise(said)
    if found is not None:
        symptom, line = found
        fault = "device" if symptom.is_proof else "machine" if symptom.reason in _OF_DEVICES else None
        fault = None if was_ended and fault == "machine" else fault
        return replace(death, fault=fault, evidence=line[:_WHY_CHARS] if fault else "")
    if was_ended or death.message or not crashed or (death.signal == signal.SIGBUS and evidence.shm_full):
        return death  # the program's own words, its exit code, or a signal that somebody sent, such as SIGKILL
    who = "a worker" if death.rank is None else f"rank {death.rank}"
    return replace(death, fault="machine", evidence=f"{who} was ended by {signal_name(death.signal or 0)}")


# -- what is known about a death ---------------------------------------------------------------


_MOST_RANKS = 2**31  # as the coordinator has it
_MAX_NAME = 253  # as in DNS


class Evidence(Struct, frozen=True, kw_only=True):
    """What else is known about a death. None: could not be read."""

    oom_kills_before: int | None = None
    oom_kills_after: int | None = None
    memory_limit_bytes: int | None = None  # of the cgroup
    memory_peak_bytes: int | None = None
    shm_free_bytes: int | None = None
    shm_size_bytes: int | None = None
    shm_largest: tuple[str, ...] = ()  # what fills it, and who has that
    agent: FailureRecord | None = None
    last_lines: tuple[str, ...] = ()  # what it wrote last
    stopped: bool = False  # we were asked to stop first
    handed_on: frozenset[int] = frozenset()  # signals that we got and handed on unchanged
    text: str = ""  # what exec said, when it did not even start

    @property
    def oom_killed(self) -> bool:
        """Whether the kernel killed for memory in our cgroup since what died was started."""
        before, after = self.oom_kills_before, self.oom_kills_after
        return before is not None and after is not None and after > before

    @property
    def shm_full(self) -> bool:
        """Whether /dev/shm has no room worth the name: under 2 %, or under 1 MiB."""
        free, size = self.shm_free_bytes, self.shm_size_bytes
        return free is not None and size is not None and free < max(1 << 20, size // 50)


def parse_agent_failure(text: str) -> FailureRecord | None:
    """Parse an agent's note, or torchrun's error file; None when it is neither: it must not hide the failure."""
    try:
        note = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(note, dict):
        return None
    if isinstance(note.get("message"), dict):
        words = {"message": error_lines.message_in(note), "lines": error_lines.traceback_in(note)}
        note = {**note, **error_lines.ended_in(note), **words}
    lines = note.get("lines")
    return FailureRecord(
        **{key: _of_type(note.get(key), str) for key in ("reason", "message", "why_not_again")},
        hostname=_name(note.get("hostname")),
        rank=_index(note.get("rank")),
        local_rank=_index(note.get("local_rank")),
        exit_code=exit_codes.failing(_of_type(note.get("exit_code"), int)),
        signal=exit_codes.deadly(_of_type(note.get("signal"), int)),
        lines=tuple(str(line) for line in lines) if isinstance(lines, list) else (),
    )


def _name(value: object) -> str | None:
    """One that fits into a line of the termination message."""
    return value if isinstance(value, str) and value.isprintable() and len(value) <= _MAX_NAME else None


def _index(value: object) -> int | None:
    number: int | None = _of_type(value, int)
    return number if number is not None and 0 <= number < _MOST_RANKS else None


def _of_type(value: object, kind: type | tuple[type, ...]) -> Any:
    return value if isinstance(value, kind) and not isinstance(value, bool) else None
