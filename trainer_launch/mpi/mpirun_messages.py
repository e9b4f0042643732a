"""mpirun's messages about the end of its job: the failed rank, a lost host, a host that was not reached. Pure.

Of Open MPI 4 and 5, MPICH and Intel MPI; and ssh's own words, which come through mpirun's stderr.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.membership.retry_policy import is_of_code
from trainer_launch.model import Death, exit_codes
from trainer_launch.supervisor.error_lines import error_name, headline, in_chain, with_places

_FATAL = frozenset(
    (signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
)
_MAX_CHARS = 400  # of a line that is looked at


class MpirunReport(Struct, frozen=True, kw_only=True):
    """The messages so far as values; None: no message was about it."""

    rank: int | None = None
    exit_code: int | None = None
    signal: int | None = None
    host: str | None = None  # where the first rank failed
    lost: str | None = None  # a host that mpirun has lost, by its name
    unreached: str | None = None  # a host that ssh could not log in to, or "" when it was not named
    words: str = ""  # why a daemon could not be started
    cut_off: bool = False  # a rank ended because its connection to another one did


def with_line(report: MpirunReport, line: str) -> MpirunReport:
    """Take one line of mpirun's stderr in; the first message about a value stands."""
    return _with_match(report, line, (*_PATTERNS, *_SSH_PATTERNS))


def _with_match(report: MpirunReport, line: str, patterns: Sequence[tuple[str, _Take]]) -> MpirunReport:
    for pattern, take in patterns:
        if match := re.search(pattern, line[:_MAX_CHARS]):
            return take(report, match)
    return report


def _failed(report: MpirunReport, match: re.Match[str]) -> MpirunReport:
    """Take in how a rank failed; ranks may print such lines: no failure has the code 0, or one of no process."""
    groups = match.groupdict()
    if end := groups.get("end"):  # MPICH's banner gives a signal that ranks have died of as their exit code
        groups["signal" if int(end) in _FATAL else "code"] = end
    rank, code, number = (int(groups[name]) if groups.get(name) else None for name in ("rank", "code", "signal"))
    code, number = exit_codes.failing(code), exit_codes.deadly(number)
    return replace(
        report,
        rank=report.rank if report.rank is not None else rank,
        exit_code=report.exit_code if report.exit_code is not None else code,
        signal=report.signal if report.signal is not None else number,
        host=report.host or groups.get("host"),
    )


def _failed_so(report: MpirunReport, match: re.Match[str]) -> MpirunReport:
    """Below a rank's name only: programs write such lines, too."""
    return report if report.rank is None else _failed(report, match)


def _not_run(code: int) -> _Take:
    return lambda report, _: report if report.exit_code is not None else replace(report, exit_code=code)


def _lost(report: MpirunReport, match: re.Match[str]) -> MpirunReport:
    """Open MPI 5 says it, too, of a host that ssh could not log in to."""
    host = match[1]
    if report.unreached is not None:
        return replace(report, unreached=report.unreached or host)
    return replace(report, lost=report.lost or host)


def _without_daemon(report: MpirunReport, match: re.Match[str]) -> MpirunReport:
    return report if report.lost or report.words else replace(report, words=match[0])


def _unreached(report: MpirunReport, match: re.Match[str]) -> MpirunReport:
    if report.words:
        return report
    return replace(report, unreached=match.groupdict().get("host") or "", words=match[0].strip()[:200])


def _process_ended(report: MpirunReport, match: re.Match[str]) -> MpirunReport:
    """Horovod also tells of ranks that it has ended itself, and takes the end of an ssh for that of its rank."""
    code = int(match["code"])
    if report.rank is not None or report.words or report.lost or exit_codes.failing(code) is None:
        return report
    if code in _SIGNALLED:
        return replace(report, rank=int(match["rank"]), signal=code - 128)
    return replace(report, rank=int(match["rank"]), exit_code=code)


def _process_ended_last(report: MpirunReport, match: re.Match[str]) -> MpirunReport:
    """An elastic job has survived every failure before its last one."""
    ended = _process_ended(MpirunReport(), match)
    return report if ended.rank is None or int(match["code"]) in _BY_HOROVOD else ended


_NOT_RUN = (
    r"was unable to (?:find the specified executable|(?:launch|start) the specified application)|"
    r'via the "execve" system call|execvp error on file |unable to change wdir to '
)
_MPIRUN = r"\b(?:mpirun|mpiexec|prterun|orterun)\S{0,20} "
# What Open MPI 4 and 5 refuse before they start any rank, and what Hydra does, each line of which begins with "[".
_REFUSED = (
    r"There are not enough slots (?:available in the system|on the nodes)|"
    rf"{_MPIRUN}Error: (?:unknown option|option \S+ did not have)|option was included on the {_MPIRUN}command line|"
    r"parameter given to a command line option does not match|No executable was specified on the|"
    r"The specified .{0,60} is not recognized|"
    r"(?:unable to open|a parse error in|a bad parameter in) the hostfile|No nodes are available for this job|"
    r"node not present in the allocation|found no available cpus|that would re(?:sult in|quire) binding|"
    rf"Your job failed to map|{_MPIRUN}has detected an attempt to run as root|"
    r"A requested component was not found, or was unable to be opened|Sorry! +You were supposed to get help about|"
    r"\[(?:mpiexec|proxy:\S{1,20})@\S{1,253}\] \w+ \([^)]{1,99}\): (?:[Uu]nrecognized |[Mm]issing |"
    r"unable to open host file|token .{1,60} not supported|mapping option .{1,60} larger than|"
    r"unable to find interface)"
)
_NAMED = re.compile(r" *(?:Error|Framework|Component): ")
_PARAGRAPH_LINES, _ERROR_LINES = 5, 12  # of Open MPI's, and down to what it names at the end
_Take = Callable[[MpirunReport, "re.Match[str]"], MpirunReport]
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:-]{0,252}"
_HOST = rf"(?P<host>{_NAME})"
_RANK, _SIGNAL = r"(?P<rank>\d+)", r"(?P<signal>\d+)"
_PATTERNS: tuple[tuple[str, _Take], ...] = (
    # Open MPI; its 5 breaks the first line
    (rf"noticed that process rank {_RANK} with PID \d+ on node {_HOST} exited on( signal {_SIGNAL})?", _failed),
    (rf"^signal {_SIGNAL} \(", _failed_so),
    (rf"^\s*Process name:\s*\[\S+,{_RANK}\]\s*$", _failed),
    (r"^\s*Exit code:\s*(?P<code>\d+)", _failed_so),
    (rf"MPI_ABORT was invoked on rank {_RANK} ", _failed),
    (r"\*\*\* An error occurred in Socket closed", lambda report, _: replace(report, cut_off=True)),
    (rf"^\s*Remote daemon:? ?.*? on node ({_NAME})", _lost),
    (r"(?:ORTE|PRTE|PRRTE) .*has (?:lost communication|unexpectedly failed)", _without_daemon),
    (r"daemon failed to report back", _without_daemon),
    (r"unable to find the specified executable", _not_run(exit_codes.NOT_FOUND)),
    (r'unable to (?:launch|start) the specified application|via the "execve"', _not_run(exit_codes.NOT_EXECUTABLE)),
    # Hydra
    (r"execvp error on file .*\(No such file", _not_run(exit_codes.NOT_FOUND)),
    (r"execvp error on file |unable to change wdir to ", _not_run(exit_codes.NOT_EXECUTABLE)),
    (rf"^=\s+(?:RANK {_RANK} )?PID \d+ RUNNING AT {_HOST}", _failed),
    (r"^=\s+EXIT CODE: (?P<end>\d+)", _failed),
    (rf"^=\s+KILLED BY SIGNAL: {_SIGNAL}", _failed),
    (rf"THE EXIT STRING: .*\(signal {_SIGNAL}\)", lambda *how: replace(_failed(*how), exit_code=None)),
    (rf"MPI_Abort\(.*\) - process {_RANK}", _failed),
    (rf"^Abort\(-?\d+\) on node \d+ \(rank {_RANK} in comm 0\)", _failed),
)
# Of ssh. Hydra keeps one for each host, horovodrun for each rank, and neither says anything when it ends.
_SSH_PATTERNS: tuple[tuple[str, _Take], ...] = (
    (rf"^(?:Connection to|Timeout, server) ({_NAME}) (?:closed by remote host|not responding)", _lost),
    (rf"^Read from remote host ({_NAME}): ", _lost),
    (rf"ssh: connect to host {_HOST} port \d+: .*", _unreached),
    (rf"ssh: Could not resolve hostname {_HOST}: .*", _unreached),
    (rf"(?:\S+@)?{_HOST}: Permission denied \(.*", _unreached),
    (r"Host key verification failed.*", _unreached),
    (r"kex_exchange_identification: .*", _unreached),
    (rf"No \S+ host key is known for \[?{_HOST}\]?.*", _unreached),
)
_OF_RANK = re.compile(r"^\[(\d{1,6})\]<(?:stdout|stderr)>:(.*)", re.DOTALL)
_SIGNALLED = range(129, 193)  # as the shell has it
_BY_HOROVOD = (255, exit_codes.STOPPED)  # how ranks end whose ssh has failed, or that it ends itself
_LATE_PATTERNS: tuple[tuple[str, _Take], ...] = (
    (rf"^ssh not successful for host {_HOST}:", _unreached),
    (r"Timed out waiting for .{1,300}", _unreached),
)
_ENDING = r"^Process (?P<rank>\d{1,6}) exit with status code (?P<code>\d{1,3})\."
_CUT = (r"^(?:client_loop: send disconnect|Connection (?:closed|reset) by \S+ port \d).*", _without_daemon)


def rank_and_text(line: str) -> tuple[int | None, str]:
    """A line of horovodrun's output without its label, and whose it is; None: its own."""
    match = _OF_RANK.match(line)
    return (int(match[1]), match[2]) if match else (None, line)


def with_line_of_horovod(report: MpirunReport, line: str, *, is_elastic: bool) -> MpirunReport:
    """Take one line of horovodrun's output in; an elastic job survives failures, so its last one counts."""
    rank, text = rank_and_text(line)
    if rank is not None:
        return _with_match(report, text, (*_SSH_PATTERNS, _CUT))
    ended = _process_ended_last if is_elastic else _process_ended
    return _with_match(report, text, (*_LATE_PATTERNS, (_ENDING, ended)))


_TAG = re.compile(r"\s*(?:\[[^\]\s]{1,80}\](?:<std(?:err|out)>)?:? *)?")  # before a line, by mpirun or torch
_CUT_OFF = "a rank lost another one, which had ended or was cut off before; mpirun does not say which"
_CUT_OFF_CODE = 14  # MPI_ERR_UNKNOWN, with which Open MPI 5 ends a rank that lost another one


class MpirunEnd(Struct, frozen=True):
    """mpirun has ended; its messages, and the last lines of its stderr."""

    death: Death  # its own
    report: MpirunReport
    lines: tuple[str, ...] = ()
    is_hydras: bool = False

    @property
    def code(self) -> int:
        """The exit code of the first failed rank, where that is known; mpirun's own otherwise."""
        return self.death.exit_code if self.report.exit_code is None else self.report.exit_code

    @property
    def signal(self) -> int | None:
        """The signal that ended the first failed rank; mpirun itself, where no rank has failed."""
        is_own = self.report.rank is None and self.report.exit_code is None
        return self.death.signal if self.report.signal is None and is_own else self.report.signal

    @property
    def is_unreached(self) -> bool:
        """Whether no daemon could be started on a host."""
        return bool(self.report.words) and self.report.rank is None


def death_of(end: MpirunEnd, attempt: int) -> Death:
    """The death of the first failed rank, with its last error; of a lost peer where only that is known."""
    report, refusal = end.report, _refusal(end)
    error = refusal or _error_of(end).strip()
    is_not_run = report.rank is None and exit_codes.cannot_run(report.exit_code)
    reason = "NotRunnable" if is_not_run else "Misconfigured" if refusal else None
    return replace(
        end.death,
        attempt=attempt,
        rank=report.rank,
        host=report.host,
        code=None if end.signal is not None else end.code,
        signal=end.signal,
        lines=end.lines,
        error=error_name(error),
        # "": it named no error, and mpirun's own last words are none.
        message=_CUT_OFF if report.cut_off else error if end.signal is None else None,
        reason="PeerLost" if report.cut_off else reason,
    )


def first_failure(end: MpirunEnd) -> MpirunEnd:
    """The end without a culprit, where mpirun reports only a rank that had lost the failed one."""
    report = end.report
    if not report.cut_off:
        return end
    if report.signal is not None or end.code != _CUT_OFF_CODE or _error_of(end):
        return replace(end, report=replace(report, cut_off=False))  # who failed by itself is known
    return replace(end, report=MpirunReport(exit_code=exit_codes.INFRASTRUCTURE, cut_off=True))


def _refusal(end: MpirunEnd) -> str:
    """mpirun's reason to start no rank; "": none, or ranks have run, which may print the same."""
    has_run = end.report.rank is not None or any(line.startswith("Primary job ") for line in end.lines)
    lines = () if has_run else end.lines
    for at, line in enumerate(lines):
        words = " ".join(each.strip() for each in lines[at : at + 2])
        match = re.search(f"{_REFUSED}|{_NOT_RUN}", words) if line.startswith("[") is end.is_hydras else None
        if match and match.start() < len(line):
            middle, last = at + _PARAGRAPH_LINES, at + _ERROR_LINES
            named = (text for text in lines[middle:last] if _NAMED.match(text))
            return line if end.is_hydras else " ".join(" ".join((*lines[at:middle], *named)).split())
    return ""


def _error_of(end: MpirunEnd) -> str:
    """The last error of the ranks; one of the code counts before what it has done to other ranks. "": none."""
    lines = with_places(_TAG.sub("", line, count=1) for line in end.lines)
    of_code = (line for line in reversed(lines) if is_of_code(error_name(line), line))
    return next(of_code, None) or in_chain(headline(lines), lines)
