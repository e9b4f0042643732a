"""Name the cause of a failed run: an ordered table of rules, the first that applies wins. Pure."""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model import Death, Failure, exit_codes
from trainer_launch.model.signal_policy import signal_name
from trainer_launch.model.units import counted, in_units
from trainer_launch.supervisor import error_lines
from trainer_launch.supervisor.error_lines import PEER_HINT, Symptom, final_error, headline, recognise


class _Rule(Struct, frozen=True):
    reason: str
    applies: Callable[[Death, Evidence], bool]
    hint: str
    what: str = ""  # completes "rank 3 ended with signal SIGKILL, …"
    exit_code: int | None = None  # None: the program's own
    again: bool | None = None  # whether to start again can help; None: as the exit code says
    shows: Callable[[Evidence], tuple[str, ...]] = lambda _: ()  # the evidence, in words


def _signal_is(*numbers: int) -> Callable[[Death, Evidence], bool]:
    return lambda end, _: end.signal in numbers


def _is_known_as(reason: str) -> Callable[[Death, Evidence], bool]:
    return lambda death, _: death.reason == reason


def _killed_for_memory(death: Death, evidence: Evidence) -> bool:
    """Itself, or the data loader without which it could not go on."""
    lost_loader = death.signal is None and "killed by signal: Killed" in _error_text(death, evidence)
    return evidence.oom_killed and (death.signal == signal.SIGKILL or lost_loader)


def _error_text(death: Death, evidence: Evidence) -> str:
    """What the program itself said of its end, else its last error."""
    return death.message or "\n".join(final_error(evidence.last_lines))


def _symptom(death: Death, evidence: Evidence) -> tuple[Symptom, str] | None:
    """What its last error shows; who is killed from outside has not said why."""
    said_why = death.signal is None or death.signal in _CRASHES
    return recognise(_error_text(death, evidence)) if said_why else None


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
        _is_known_as("Hung"),
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
        lambda death, _: death.code in (exit_codes.NOT_EXECUTABLE, exit_codes.NOT_FOUND),
        "check the command, the image and the working directory",
        what="as a shell says of a command that it cannot run",
        again=False,
    ),
    _Rule(
        "Quarantined",
        _is_known_as("Quarantined"),
        "let the platform start this pod on another machine, and have this one checked (nvidia-smi -q, kernel log)",
        exit_code=exit_codes.INFRASTRUCTURE,
        again=True,
    ),
    _Rule("NotStarted", _is_known_as("NotStarted"), "correct what the message names, in this pod or its image"),
    _Rule("PeerLost", _is_known_as("PeerLost"), PEER_HINT, exit_code=exit_codes.INFRASTRUCTURE),
    _Rule(
        "ProgramError",
        _is_known_as("ProgramError"),
        "let all ranks enter the same collectives, as often as all others; a restart will not help",
        again=False,
    ),
    _Rule(
        "Misconfigured",
        _is_known_as("Misconfigured"),
        "correct what the message names, in the command or in the pods' variables; a restart will not help",
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


def classify(death: Death, evidence: Evidence) -> Failure:
    """Return the cause of a death, by the first rule that applies."""
    rule, shown = _cause(death, evidence)
    return Failure(
        reason=rule.reason,
        message=_message(death, evidence, rule),
        exit_code=death.exit_code if rule.exit_code is None else rule.exit_code,
        rank=death.rank,
        host=death.host,
        signal=death.signal,
        last_lines=death.lines or evidence.last_lines,
        evidence=(*shown, *((death.why_not_again,) if death.why_not_again else ())),
        hint=rule.hint,
        again=rule.again,
    )


def _cause(death: Death, evidence: Evidence) -> tuple[_Rule | Symptom, tuple[str, ...]]:
    """The first that applies, and what shows it; what the last error shows stands between the other rules."""
    rule = next((rule for rule in _FIRST if rule.applies(death, evidence)), None)
    if rule is None and (recognised := _symptom(death, evidence)) is not None:
        symptom, line = recognised
        return symptom, (*_device(symptom, death), line[:_WHY_CHARS])
    rule = rule or next(rule for rule in _LAST if rule.applies(death, evidence))
    return rule, rule.shows(evidence)


def _device(symptom: Symptom, death: Death) -> tuple[str, ...]:
    if death.local_rank is None or not symptom.reason.startswith("Device"):
        return ()
    return (f"the worker's local rank is {death.local_rank}, by which programs choose their device",)


def _message(death: Death, evidence: Evidence, rule: _Rule | Symptom) -> str:
    if death.message and (death.reason or (death.rank is None and not death.process)):
        return death.message  # not a worker's death
    who = death.process if death.rank is None else f"rank {death.rank}"
    sentence = f"{who} ended with {how(death, signal_word='signal ')}" + (f", {rule.what}" if rule.what else "")
    why = death.message
    if why is None and not evidence.stopped and (death.signal is None or death.signal in _CRASHES):
        why = headline(evidence.last_lines, only_named=death.signal is not None)  # who is killed cannot say why
    return f"{sentence}: {' '.join(why.split())[:_WHY_CHARS]}" if why else sentence


def how(death: Death, signal_word: str = "") -> str:
    """A death in words."""
    return f"exit code {death.exit_code}" if death.signal is None else f"{signal_word}{signal_name(death.signal)}"


# -- a worker's death, and what it shows about the machine ---------------------------------------


def with_error_file(death: Death, content: dict[str, Any], *, was_ended: bool) -> Death:
    """The death of a worker with what it has said in its error file.

    Who was leaving with an exit code of its own when our request to end came has that code.
    """
    ended = error_lines.ended_in(content) if was_ended and death.signal in (signal.SIGTERM, signal.SIGKILL) else {}
    return replace(death, **_words_of(content), **ended)


def with_device_fault(death: Death, evidence: Evidence) -> Death:
    """The death with its last error, if that proves that a device of this machine failed."""
    crashed = death.signal in _CRASHES
    message = death.message or ("" if death.signal and not crashed else "\n".join(final_error(evidence.last_lines)))
    recognised = recognise(message)
    is_proof = recognised is not None and recognised[0].is_proof
    return replace(death, fault=recognised[1][:_WHY_CHARS]) if recognised and is_proof else death


def with_torchruns_file(death: Death, content: dict[str, Any]) -> Death:
    """torchrun's own death as that of the worker which failed first, whose error file torchrun hands up.

    When torchrun itself was killed, the file is not about this death.
    """
    if not content or death.signal is not None:
        return death
    ended = error_lines.ended_in(content) or {"code": death.code}
    return replace(death, **_words_of(content), **ended)


def _words_of(content: dict[str, Any]) -> dict[str, Any]:
    return {"message": error_lines.message_in(content), "lines": tuple(error_lines.traceback_in(content))}


# -- what is known about a death ---------------------------------------------------------------


class Evidence(Struct, frozen=True, kw_only=True):
    """What else is known about a death. None: could not be read."""

    oom_kills_before: int | None = None
    oom_kills_after: int | None = None
    memory_limit_bytes: int | None = None  # of the cgroup
    memory_peak_bytes: int | None = None
    shm_free_bytes: int | None = None
    shm_size_bytes: int | None = None
    shm_largest: tuple[str, ...] = ()  # what fills it
    last_lines: tuple[str, ...] = ()  # what it wrote last
    stopped: bool = False  # we were asked to stop first
    handed_on: frozenset[int] = frozenset()  # signals that we got and handed on unchanged

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
