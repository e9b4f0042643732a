"""Name the cause of a failed run: ordered tables, the first that applies wins. Pure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model import Death, Failure, exit_codes
from trainer_launch.model.redaction import presentable
from trainer_launch.model.signal_policy import signal_name
from trainer_launch.model.units import counted, in_units
from trainer_launch.planning.command import is_shell
from trainer_launch.supervisor import error_lines
from trainer_launch.supervisor.error_lines import (
    LOST_CHILD,
    MISADDRESSED,
    PEER_HINT,
    Cause,
    final_error,
    headline,
    in_chain,
    last_words,
    recognise,
    shells_words,
)

_WHY_CHARS, _WHY_END_CHARS = 400, 150  # of what the program says; so many of them from its end
_FAULT_CHARS = 300
_AMPLE_SHM_BYTES = 1 << 30
_CRASHES = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
    signal.SIGSYS,
    signal.SIGTRAP,
)


def _killed_for_memory(death: Death, evidence: Evidence) -> bool:
    """Itself, or a process without which it could not go on, such as a data loader."""
    if not evidence.oom_killed or death.reason is not None:
        return False
    was_killed = death.signal == signal.SIGKILL or death.code in (128 + signal.SIGKILL, 256 - signal.SIGKILL)
    return was_killed or (death.signal is None and LOST_CHILD.search(_error_text(death, evidence)) is not None)


def _error_text(death: Death, evidence: Evidence) -> str:
    """The program's own words about its end, else its last error; nothing where it was killed from outside."""
    if death.signal is not None and death.signal not in _CRASHES:
        return ""
    return death.message or in_chain("\n".join(final_error(evidence.last_lines)), evidence.last_lines)


# Before what the program's last error shows, and after it.
_FIRST = (
    Cause(
        reason="Stopped",
        applies=lambda _, evidence: evidence.stopped,
        what="because the pod was asked to stop",
        hint="nothing; if work was lost, raise --grace and terminationGracePeriodSeconds",
        exit_code=exit_codes.STOPPED,
    ),
    Cause(
        reason="OutOfMemory",
        applies=_killed_for_memory,
        what="because the container's memory was used up",
        hint="raise the container's memory limit, or use fewer data-loader workers or smaller batches",
    ),
    Cause(
        reason="SharedMemoryFull",
        applies=lambda death, evidence: death.signal == signal.SIGBUS and evidence.shm_full,
        what="because /dev/shm was full",
        hint="mount an emptyDir with medium: Memory at /dev/shm, or use fewer data-loader workers",
    ),
    Cause(
        reason="Failed",
        applies=lambda death, evidence: evidence.shm_ample and "signal: Bus error" in _error_text(death, evidence),
        what="because one of its data-loader processes got a bus error",
        hint="see whether a memory-mapped file was cut or its volume failed; if not, use fewer data-loader workers "
        "or a larger /dev/shm",
    ),
)
_NOT_RUNNABLE = Cause(
    reason="NotRunnable",
    what="because it cannot be run",
    hint="check the command, the image and the working directory",
    again=False,
)
_HUNG = Cause(
    reason="Hung",
    hint="correct the line of code that the named rank was in (trainer-launch incidents show has its stack)",
    exit_code=exit_codes.INFRASTRUCTURE,
    again=True,
)
# Where more is known than how a process ended. Of one reason, the first whose pattern fits what is known.
_BY_REASON = (
    replace(
        _HUNG,
        pattern=r"\Aranks? \S+ finished with exit code 0[\s\S]* had printed ",
        hint="correct the error that was printed, and let the program end with another exit code after it",
    ),
    replace(_HUNG, pattern=r"stopped \(SIGSTOP\)", hint="find out who stopped it"),
    replace(  # which a collective's own time-out has ended
        _HUNG,
        pattern=r"\Aranks? \S+ .*\bhad not entered ",
        hint=f"{_HUNG.hint}; if it was only slow there, raise the timeout of init_process_group",
    ),
    replace(
        _HUNG,
        pattern=r"\Aall known ranks entered .* name different roots",
        hint="make all ranks name the same root; if they do, check the network between the nodes, and the devices",
    ),
    replace(
        _HUNG, pattern=r"\Aall known ranks entered", hint="check the network between the nodes, and the devices"
    ),
    replace(
        _HUNG,
        pattern=r"\Aall (?:known )?ranks wait|\Aranks? \S+ .*never entered (?!.*\b(?:is|are|died)\b).* waits? in ",
        hint="make sends and receives match: each needs the other's peer, tag and place in the order; make groups "
        "in the same order on all ranks; of RPC, see which call does not return",
    ),
    replace(
        _HUNG,
        pattern=r"\Aranks \S+ have been |\Ano progress, but none of ",
        hint="see where each rank was (trainer-launch incidents show): nothing tells which one the others wait for",
    ),
    replace(
        _HUNG,
        pattern=r"\A(?!ranks? )\S+ has been ",
        hint="see where each of its processes was (trainer-launch incidents show)",
    ),
    _HUNG,
    _NOT_RUNNABLE,
    Cause(
        reason="Quarantined",
        hint="let the platform start this pod on another machine, and have this one checked (nvidia-smi -q, its "
        "kernel log)",
        exit_code=exit_codes.INFRASTRUCTURE,
        again=True,
    ),
    Cause(reason="NotStarted", hint="correct what the message names, in this pod or its image"),
    Cause(reason="PeerLost", hint=PEER_HINT, exit_code=exit_codes.INFRASTRUCTURE),
    Cause(
        reason="ProgramError",
        hint="make all ranks enter the same collectives, equally often",
        again=False,
    ),
    Cause(
        reason="Misconfigured",
        hint="correct what the message names, in the command or in the pods' variables; a restart will not help",
        exit_code=exit_codes.MISCONFIGURED,
        again=False,
    ),
    MISADDRESSED,
)
_LAST = (
    Cause(
        reason="Crashed",
        applies=lambda death, _: death.signal in _CRASHES,
        hint="correct the call at the first Python line below 'Fatal Python error', or the native library that it "
        "calls; without such a line, PYTHONFAULTHANDLER=1 shows it",
    ),
    Cause(
        reason="Killed",
        applies=lambda death, _: death.signal == signal.SIGKILL,
        hint="find out who sent SIGKILL: the program itself, kubectl exec, or the node when its own memory ran out "
        "(kubectl describe node; its kernel log)",
    ),
    Cause(
        reason="Killed",
        applies=lambda death, evidence: death.signal in evidence.handed_on,
        hint="add a handler for this signal to the program, or set its meaning with --signals",
    ),
    Cause(
        reason="Killed",
        applies=lambda death, _: death.signal in (signal.SIGXCPU, signal.SIGXFSZ),
        hint="it reached a limit: raise its CPU time (ulimit -t) or the size of its files (ulimit -f)",
    ),
    Cause(
        reason="Killed",
        applies=lambda death, _: death.signal == signal.SIGPIPE,
        hint="it wrote to a pipe or socket that nobody reads any more: see what ended at its other end",
    ),
    Cause(
        reason="Killed",
        applies=lambda death, _: death.signal is not None,
        hint="find out who sent it; the launcher did not: the program, its libraries, a wrapper or kubectl exec",
    ),
    Cause(
        reason="Failed",
        applies=lambda death, _: exit_codes.cannot_run(death.code),
        what="which a shell reports for a command that it cannot run",
        hint="install the command that the program calls into the image, or correct PATH",
    ),
    Cause(reason="Failed", applies=lambda *_: True),
)
CAUSES = (*_FIRST, *_BY_REASON, *_LAST)


def classify(death: Death, evidence: Evidence) -> Failure:
    """Return the cause of a death, by the first rule that applies."""
    cause, line = _cause(death, evidence)
    message = _message(death, evidence, cause, line)
    code = death.exit_code if cause.exit_code is None else cause.exit_code
    lines = death.lines or evidence.last_lines
    evident = (*_shown(cause, death, evidence), "" if line in message else line, death.why_not_again or "")
    says_nothing = not (cause.what or _why(death, evidence))
    return Failure(
        reason=cause.reason,
        message=message,
        exit_code=code,
        rank=None if cause.has_victim and f"rank {death.rank}: " not in message else death.rank,
        host=death.host,
        signal=death.signal,
        last_lines=tuple(presentable("\n".join(lines)).split("\n")) if lines else (),
        evidence=tuple(presentable(text) for text in evident if text),
        hint=cause.hint or ("it gave no reason: see the last lines of its output" if says_nothing else None),
        again=False if cause.reason == "NotStarted" and code < exit_codes.of_signal(0) else cause.again,
    )


def _cause(death: Death, evidence: Evidence) -> tuple[Cause, str]:
    """The first that applies, and the line that shows it; what the last error shows stands between the rules."""
    cause = next((cause for cause in _FIRST if cause.applies(death, evidence)), None)
    if cause is not None:
        return cause, ""
    if (recognised := recognise(_error_text(death, evidence), death.reason)) is not None:
        return recognised[0], " ".join(recognised[1].split())[:_WHY_CHARS]
    matching = (
        cause
        for cause in _BY_REASON
        if cause.reason == death.reason and re.search(cause.pattern, death.message or "")
    )
    return next(matching, None) or next(cause for cause in _LAST if cause.applies(death, evidence)), ""


def _shown(cause: Cause, death: Death, evidence: Evidence) -> Iterator[str]:
    """The evidence of a death beside its cause, in words."""
    if evidence.stopped:
        return
    if evidence.oom_killed:
        yield memory(evidence)
    elif cause.reason == "Killed" and death.signal == signal.SIGKILL and evidence.oom_kills_after is not None:
        yield "the kernel's count of memory kills in this container did not rise"
    if death.signal in evidence.handed_on:
        yield "the launcher received this signal and forwarded it"
    if evidence.shm_full:
        free, size = in_units(evidence.shm_free_bytes or 0), in_units(evidence.shm_size_bytes or 0)
        yield f"/dev/shm has {free} free of {size}"
        yield f"its largest files: {', '.join(evidence.shm_largest)}" if evidence.shm_largest else ""
    if death.local_rank is not None and cause.reason.startswith("Device"):
        yield f"the worker's local rank is {death.local_rank}, by which programs choose their device"


def memory(evidence: Evidence) -> str:
    """The kernel's kills for memory in this container, in words."""
    kills = (evidence.oom_kills_after or 0) - (evidence.oom_kills_before or 0)
    words = [f"the kernel killed {counted(kills, 'process')} of this container for memory"]
    if evidence.memory_limit_bytes is not None:
        words.append(f"limit {in_units(evidence.memory_limit_bytes)}")
    if evidence.memory_peak_bytes is not None:
        words.append(f"peak {in_units(evidence.memory_peak_bytes)}")
    return ", ".join(words)


def _message(death: Death, evidence: Evidence, cause: Cause, line: str) -> str:
    if death.message and (death.reason or (death.rank is None and not death.process)):
        return presentable(death.message)  # not a worker's death, or a whole sentence
    who = death.process if death.rank is None else f"rank {death.rank}"
    sentence = f"{who} ended with {how(death, signal_word='signal ')}" + (f", {cause.what}" if cause.what else "")
    why = " ".join(presentable(_why(death, evidence) or line).split())
    if len(why) > _WHY_CHARS:  # of inner errors the last words tell most
        why = f"{why[: _WHY_CHARS - _WHY_END_CHARS]} … {why[-_WHY_END_CHARS:]}"
    return f"{sentence}: {why}" if why else sentence


def _why(death: Death, evidence: Evidence) -> str:
    """The program's own words: an error that is named, or else the last line of stderr."""
    words = shells_words(evidence.last_lines) if exit_codes.cannot_run(death.code) else ""
    if words or death.message is not None:
        return death.message or words
    is_killed = death.signal is not None and death.signal not in _CRASHES  # it cannot say why
    if evidence.stopped or is_killed:
        return ""
    if error := headline(evidence.last_lines):
        return in_chain(error, evidence.last_lines)
    return "" if death.signal is not None else last_words(evidence.last_errors)


def how(death: Death, signal_word: str = "") -> str:
    """A death in words."""
    return f"exit code {death.exit_code}" if death.signal is None else f"{signal_word}{signal_name(death.signal)}"


def with_error_file(death: Death, content: dict[str, Any], *, was_ended: bool) -> Death:
    """The death of a worker with what it has said in its error file.

    Who was leaving with an exit code of its own when our request to end came has that code.
    """
    ended = error_lines.ended_in(content) if was_ended and death.signal in (signal.SIGTERM, signal.SIGKILL) else {}
    return replace(death, **_words_of(content), **ended)


def with_symptom(
    death: Death, evidence: Evidence, store_port: int | None = None, started: Sequence[str] = ()
) -> Death:
    """The death with what its last error proves: that a device failed, or that a restart is in vain.

    `store_port` is where the ranks of its generation meet: who looks for them elsewhere has lost no peer. `started`
    is its command, where it ended soon after its start: a command that a shell lacks then is missing each time.
    """
    text = death.message or _error_text(death, evidence)
    cause, line = recognise(text) or (None, "")
    if store_port is not None and error_lines.is_misaddressed(text, store_port):
        cause = MISADDRESSED
    is_shells = bool(started) and (is_shell(started[0]) or started[0].endswith(".sh"))
    if cause is None and is_shells and exit_codes.cannot_run(death.code) and shells_words(evidence.last_lines):
        cause = _NOT_RUNNABLE
    if cause is not None and cause.is_proof:
        death = replace(death, fault=presentable(line)[:_FAULT_CHARS])
    if cause is None or not (cause.is_final or cause in (MISADDRESSED, _NOT_RUNNABLE)) or death.reason is not None:
        return death
    return replace(death, reason=cause.reason, message=_message(death, evidence, cause, line))


def with_torchruns_file(death: Death, content: dict[str, Any], lines: Sequence[str] = ()) -> Death:
    """torchrun's own death as that of the worker which failed first, whose error file torchrun hands up.

    When torchrun itself was ended, the file is not about this death. A request to end, from whomever, shows as an
    exception and exit code 1: `lines` are its last ones.
    """
    number = error_lines.ended_torchrun(lines) if death.code == exit_codes.FAILED else None
    if number is not None:
        return replace(death, code=None, signal=number)
    if not content or death.signal is not None:
        return death
    ended = error_lines.ended_in(content) or {"code": death.code}
    return replace(death, **_words_of(content), **ended)


def _words_of(content: dict[str, Any]) -> dict[str, Any]:
    return {"message": error_lines.message_in(content), "lines": tuple(error_lines.traceback_in(content))}


class Evidence(Struct, frozen=True, kw_only=True):
    """Observations beside a death. None: could not be read."""

    oom_kills_before: int | None = None
    oom_kills_after: int | None = None
    memory_limit_bytes: int | None = None  # of the cgroup
    memory_peak_bytes: int | None = None
    shm_free_bytes: int | None = None
    shm_size_bytes: int | None = None
    shm_largest: tuple[str, ...] = ()  # what fills it
    last_lines: tuple[str, ...] = ()  # what it wrote last
    last_errors: tuple[str, ...] = ()  # the same of stderr alone
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

    @property
    def shm_ample(self) -> bool:
        """Whether /dev/shm has more room than batches of data loaders take as a rule, and was not found full."""
        return (self.shm_size_bytes or 0) >= _AMPLE_SHM_BYTES and not self.shm_full
