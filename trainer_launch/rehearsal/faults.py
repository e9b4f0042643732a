"""Faults: `--fault` in words, the pods that each kind is for, how it is injected at its moment, and how it ends.

kill worker node=1 at=step:40        stop worker for=20s at=1m         delay dns 20s
"""

from __future__ import annotations

import contextlib
import logging
import re
import shlex
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any, Protocol

import psutil
from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.model import removed, value_parsers
from trainer_launch.model.errors import NodeError, UsageError
from trainer_launch.model.suggestions import did_you_mean
from trainer_launch.model.units import listed
from trainer_launch.model.value_parsers import DURATION, MAX_COUNT, MAX_LINE, parse_number, shown
from trainer_launch.rehearsal import pod_isolation
from trainer_launch.rehearsal.controllers.job_lifecycle import JobRecord
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase
from trainer_launch.rehearsal.controllers.pod_values import Draft
from trainer_launch.rehearsal.history import HistoryEntry, What
from trainer_launch.rehearsal.kubelet import Kubelet
from trainer_launch.rehearsal.pod_watch import PodProcesses

MAX_TEXT = 2_000  # characters of one fault
MAX_S = 7 * 86_400.0  # no rehearsal lasts a week
MAX_STEP = 10**12 - 1
_MAX_PATTERN = 200  # characters of a regular expression
_MAX_GRACE_S = 3_600.0
_POD_NAME = re.compile(r"[a-z0-9A-Z]([a-z0-9A-Z.-]{0,251}[a-z0-9A-Z])?")
_LAUNCHER = "launcher"  # a role that is no node of the job: it only starts ranks elsewhere
_TRAINER = "node"  # the role of a TrainJob's nodes, beside which there may be initializers
_NO_STEP_S = 60.0  # without any step, after which faults that wait for a step warn
_RETRY_S = 0.3  # between two tries of a fault whose target is not there yet
_log = logging.getLogger(__name__)


class Rehearsed(Protocol):
    """The part of a rehearsal (`driver.py`) that faults act on."""

    state: JobRecord
    kubelet: Kubelet
    processes: PodProcesses

    def now_s(self) -> float:
        """Seconds since the rehearsal began."""

    def record(self, entry: HistoryEntry) -> None:
        """Take an entry into the history."""

    def leader(self, pod: str) -> int | None:
        """The first process of the main container, while it runs."""

    def delete(self, pod: str, grace_s: float, back_s: float | None) -> None:
        """Delete a pod, which is created again after `back_s`; None: never."""


class When(Struct, frozen=True, kw_only=True):
    """The moment of a fault: exactly one of the three is set."""

    at_s: float | None = None  # after the beginning of the rehearsal
    step: int | None = None  # when the job reaches this step, by report() or by a line such as "step 40"
    line: str | None = None  # when a pod prints a line that this regular expression is found in


class InjectedFault(Struct, frozen=True, kw_only=True):
    """A fault that comes once."""

    kind: str  # of KINDS
    when: When
    node: int | None = None  # index of the pod; None with no `pod`: the last node of the job
    pod: str | None = None  # by name, in place of `node`
    local_rank: int = 0  # which worker of the node
    for_s: float | None = None  # how long it lasts; None: as long as the job, or it is over at once
    grace_s: float | None = None  # of "term pod": until SIGKILL
    back_s: float | None = 1.0  # of "kill pod" and "term pod": until it is made anew; None: never
    text: str = ""  # in the words typed: what people are shown


class NotNow(Exception):
    """The fault cannot be injected as things stand; the text says why."""


class Never(NotNow):
    """Nor will it be possible later."""


class Effect(Struct, frozen=True):
    """The act of a fault, which follows its log line, and how it is undone."""

    do: Callable[[], None]
    undo: Callable[[], None] | None = None


def _kill_worker(rehearsal: Rehearsed, fault: InjectedFault, pod: str | None) -> Effect:
    process = _worker(rehearsal, fault, pod)
    return Effect(lambda: _send([process], signal.SIGKILL))


def _stop_worker(rehearsal: Rehearsed, fault: InjectedFault, pod: str | None) -> Effect:
    worker = _worker(rehearsal, fault, pod)
    processes = [worker]
    with contextlib.suppress(psutil.Error):
        processes += worker.children(recursive=True)
    return Effect(lambda: _send(processes, signal.SIGSTOP), lambda: _send(processes, signal.SIGCONT))


def _delete_pod(rehearsal: Rehearsed, fault: InjectedFault, pod: str | None) -> Effect:
    name = _living(rehearsal, pod)
    grace_s = 0.0
    if fault.kind == "term pod":
        grace_s = rehearsal.state.pods[name].draft.template.grace_s if fault.grace_s is None else fault.grace_s
    return Effect(lambda: rehearsal.delete(name, grace_s, fault.back_s))


def _disturb_network(rehearsal: Rehearsed, fault: InjectedFault, pod: str | None) -> Effect:
    network = rehearsal.kubelet.network
    assert network is not None, "asked for before anything was started"
    if pod is None:
        return Effect(lambda: network.hide_names(True), lambda: network.hide_names(False))
    return Effect(lambda: network.cut_off(pod), lambda: network.reconnect(pod))


class FaultKind(Struct, frozen=True):
    """The words of a kind of fault, and how it is injected."""

    inject: Callable[[Rehearsed, InjectedFault, str | None], Effect]  # raises NotNow
    keys: tuple[str, ...]  # besides at=
    needs: str = ""  # a key that must be given
    bare: str = ""  # the key whose value may stand alone
    first: When = When(step=1)  # without at=
    is_of_job: bool = False  # of no single pod
    needs_network: bool = False  # each pod has its own, in namespaces


_POD = ("node", "pod")
KINDS: Mapping[str, FaultKind] = {
    "kill worker": FaultKind(_kill_worker, (*_POD, "worker")),
    "stop worker": FaultKind(_stop_worker, (*_POD, "worker", "for"), bare="for"),
    "kill pod": FaultKind(_delete_pod, (*_POD, "back")),
    "term pod": FaultKind(_delete_pod, (*_POD, "grace", "back")),
    "partition": FaultKind(_disturb_network, (*_POD, "for"), bare="for", needs_network=True),
    "delay dns": FaultKind(
        _disturb_network,
        ("for",),
        needs="for",
        bare="for",
        first=When(at_s=0.0),
        is_of_job=True,
        needs_network=True,
    ),
}


def _living(rehearsal: Rehearsed, pod: str | None) -> str:
    state = rehearsal.state.states[pod or ""]
    if rehearsal.state.condition is not None or rehearsal.state.asked:
        raise Never("the job has ended")
    if state.is_over:
        raise Never(f"{pod} is {state.phase.value} and will not be created again")
    if state.phase is Phase.PENDING or state.stopping:
        raise NotNow(f"{pod} is not running")
    return pod or ""


def _worker(rehearsal: Rehearsed, fault: InjectedFault, pod: str | None) -> psutil.Process:
    name = _living(rehearsal, pod)
    process = rehearsal.processes.worker(rehearsal.state.pods[name], rehearsal.leader(name), fault.local_rank)
    if process is None:
        raise NotNow(f"{name} has no worker {fault.local_rank}")
    return process


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    """Signal all of them that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)


def nodes_of(drafts: Iterable[Draft]) -> tuple[str, ...]:
    """The pods that are nodes of the job, node 0 first; all of them where every pod only starts others."""
    drafts = tuple(drafts)
    nodes = [draft for draft in drafts if draft.role != _LAUNCHER]
    trainers = [draft for draft in nodes if draft.role == _TRAINER]
    return tuple(draft.hostname for draft in trainers or nodes or drafts)


def target(fault: InjectedFault, nodes: Sequence[str], pods: Sequence[str]) -> str | None:
    """The name of the pod; None for a fault of the whole job.

    `nodes` are those with an index, in its order; `pods` all, a launcher too. Of a name its end suffices: worker-0.

    Raises:
        UsageError: the job has no such pod.
    """
    if KINDS[fault.kind].is_of_job:
        return None
    where = f"--fault {shown(fault.text)}"
    if fault.pod is None:
        place = -1 if fault.node is None else fault.node
        if place < len(nodes):
            return nodes[place]
        there = f"nodes 0 to {len(nodes) - 1}" if len(nodes) > 1 else "one node, 0"
        raise UsageError(f"{where}: there is no node {place}; the job has {there}")
    fitting = [pod for pod in pods if pod == fault.pod] or [pod for pod in pods if pod.endswith(f"-{fault.pod}")]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise UsageError(f"{where}: {fault.pod} is ambiguous: {' or '.join(fitting[:5])}; give the full name")
    hint = did_you_mean(fault.pod, pods) or f"the job has {listed(pods)}"
    raise UsageError(f"{where}: the job has no pod {fault.pod}; {hint}")


def check_targets(faults: Sequence[InjectedFault], drafts: Sequence[Draft]) -> None:
    """Check the faults against this job. Raises UsageError: a fault is for a pod that the job has not."""
    for fault in faults:
        target(fault, nodes_of(drafts), tuple(draft.hostname for draft in drafts))


class Faults:
    """All faults that are asked for, and what has become of each. Times are the rehearsal's."""

    def __init__(self, faults: Iterable[InjectedFault], rehearsal: Rehearsed) -> None:
        self._rehearsal = rehearsal
        # Those to come, with the moment of the next try, and why one that was due could not be injected yet.
        self._waiting = [(fault, "") for fault in faults]
        # Until when (None: as long as the job), and how to undo it.
        self._lasting: list[tuple[float | None, InjectedFault, str | None, Callable[[], None]]] = []
        self.injected = 0
        self._last_step: int | None = None  # the highest that was reported
        self._warns_at_s: float | None = _NO_STEP_S  # None: the warning was given, or there are steps

    @property
    def patterns(self) -> tuple[re.Pattern[str], ...]:
        """The lines that faults wait for."""
        return tuple(re.compile(fault.when.line) for fault, _ in self._waiting if fault.when.line is not None)

    def due_s(self) -> float | None:
        """When `pass_time` wants to be called; None: never."""
        times = [fault.when.at_s for fault, _ in self._waiting] + [until_s for until_s, *_ in self._lasting]
        times += [self._warns_at_s] if any(fault.when.step is not None for fault, _ in self._waiting) else []
        return min((at_s for at_s in times if at_s is not None), default=None)

    def precede(self) -> None:
        """No pod has started yet: names that come late are not there from the beginning."""
        self._take(lambda fault: fault.when.at_s == 0.0 and KINDS[fault.kind].needs_network)

    def pass_time(self) -> None:
        """Time has passed."""
        now_s = self._rehearsal.now_s()
        over = [lasting for lasting in self._lasting if lasting[0] is not None and lasting[0] <= now_s]
        self._lasting = [lasting for lasting in self._lasting if lasting not in over]
        for _, fault, pod, undo in over:
            self._end(fault, pod, undo)
        self._take(lambda fault: fault.when.at_s is not None and fault.when.at_s <= now_s)
        late = next((fault for fault, _ in self._waiting if fault.when.step is not None), None)
        if late is not None and self._warns_at_s is not None and now_s >= self._warns_at_s:
            self._warns_at_s = None
            _log.warning(
                "no step in the first %g s; fault %r waits for step %s. %s",
                _NO_STEP_S,
                late.text,
                late.when.step,
                _how_to_report(late.when.step or 1),
            )

    def reached(self, step: int) -> None:
        """A pod has reached a step."""
        self._last_step, self._warns_at_s = max(step, self._last_step or 0), None
        self._take(lambda fault: fault.when.step is not None and fault.when.step <= step)

    def printed(self, line: str) -> None:
        """A pod has printed a line."""
        self._take(
            lambda fault: fault.when.line is not None and re.search(fault.when.line, line[:MAX_LINE]) is not None
        )

    def finish(self) -> None:
        """The rehearsal is over: record the faults that never came."""
        for fault, why in self._waiting:
            self._note(What.FAULT_MISSED, fault, why=why or _why_never(fault, self._last_step))
        self._waiting = []

    def _take(self, comes: Callable[[InjectedFault], bool]) -> None:
        """Inject the faults that come now, each once and in the order they were given."""
        now = [fault for fault, _ in self._waiting if comes(fault)]
        self._waiting = [waiting for waiting in self._waiting if waiting[0] not in now]
        for fault in now:
            self._inject(fault)

    def _inject(self, fault: InjectedFault) -> None:
        rehearsal = self._rehearsal
        try:
            pods = rehearsal.state.pods
            pod = target(fault, nodes_of(pod.draft for pod in pods.values()), tuple(pods))
            effect = KINDS[fault.kind].inject(rehearsal, fault, pod)
        except Never as problem:
            self._miss(fault, str(problem))
            return
        except NotNow as problem:
            later = replace(fault, when=When(at_s=rehearsal.now_s() + _RETRY_S))
            self._waiting.append((later, str(problem)))
            return
        _log.warning("fault: %s", fault.text)
        self._note(What.FAULT, fault, pod)
        self.injected += 1
        try:
            effect.do()
        except NodeError as problem:
            self._miss(fault, str(problem))
            return
        if effect.undo is not None:
            until_s = None if fault.for_s is None else rehearsal.now_s() + fault.for_s
            self._lasting.append((until_s, fault, pod, effect.undo))

    def _end(self, fault: InjectedFault, pod: str | None, undo: Callable[[], None]) -> None:
        _log.warning("fault ended: %s", fault.text)
        self._note(What.FAULT_OVER, fault, pod)
        others = ((other.kind, place) for _, other, place, _ in self._lasting)
        if KINDS[fault.kind].needs_network and (fault.kind, pod) in others:
            return  # of several at once the last one's end counts
        try:
            undo()
        except NodeError as problem:
            _log.warning("the fault could not be undone: %s", problem)

    def _miss(self, fault: InjectedFault, why: str) -> None:
        _log.warning("fault did not happen: %s: %s", fault.text, why)
        self._note(What.FAULT_MISSED, fault, why=why)

    def _note(self, what: What, fault: InjectedFault, pod: str | None = None, why: str = "") -> None:
        now_s = self._rehearsal.now_s()
        self._rehearsal.record(HistoryEntry(at_s=now_s, what=what, pod=pod, text=fault.text, why=why))


def _why_never(fault: InjectedFault, last_step: int | None) -> str:
    """Why a fault never came, and how it would have."""
    when = fault.when
    if when.at_s is not None:
        return f"the job ended before {when.at_s:g} s"
    if when.step is None:
        return f"no line matched {when.line!r}"
    if last_step is not None:
        return f"step {when.step} was not reached; the last one was {last_step}"
    return f"step {when.step} was not reached, because the steps are unknown. {_how_to_report(when.step)}"


def _how_to_report(step: int) -> str:
    return (
        f"Print lines such as 'step {step}' or call trainer_launch.report(step=...), or use at=20s or at=line:REGEX"
    )


def isolate(faults: Sequence[InjectedFault]) -> bool:
    """Whether the pods have a network of their own; for that the same command begins once more, in namespaces.

    Raises:
        UsageError: a fault cannot be carried out on this machine.
    """
    if pod_isolation.is_inside():
        return True
    on_network = next((fault for fault in faults if KINDS[fault.kind].needs_network), None)
    if on_network is None and not wants_names(faults):
        return False
    capability = pod_isolation.capability()
    if not capability.why_not:
        pod_isolation.enter(as_user=capability.as_user)  # does not return
    if on_network is not None:
        raise UsageError(f"--fault {shown(on_network.text)} is not possible on this machine: {capability.why_not}")
    _log.warning(
        "the loss of node 0 cannot be survived here, because pods have no names of their own: %s",
        capability.why_not,
    )
    return False


def wants_names(faults: Iterable[InjectedFault]) -> bool:
    """Whether node 0 is lost for good: the survivors look for each other by their pods' names."""
    return any(
        fault.kind in ("kill pod", "term pod") and fault.back_s is None and fault.node == 0 for fault in faults
    )


def parse(text: str, where: str = "--fault") -> InjectedFault:
    """The fault of a text, which messages call `where`.

    Raises:
        UsageError: the text is no fault, in one sentence that says what is wrong and what fits.
    """
    if len(text) > MAX_TEXT:
        raise UsageError(f"{where} is longer than {MAX_TEXT} characters: {shown(text)}")
    name = f"{where} {shown(text)}"
    kind, words = _kind(split(text, where), name)
    bare, takes = KINDS[kind].bare, (*KINDS[kind].keys, "at")
    fitting = f"{kind} takes {', '.join(takes)}"
    given: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals and bare and _VALUES[bare].parse(word) is not None:
            key, value = bare, word
        elif not equals:
            raise UsageError(f"{name}: {shown(word)} is not KEY=VALUE; {fitting}")
        if key not in takes:
            hint = f"{did_you_mean(key, takes)} {fitting}".strip()
            problem = f"{kind} has no {key}" if key in _VALUES else f"there is no {shown(key)}"
            raise UsageError(f"{name}: {problem}; {fitting if key in _VALUES else hint}")
        if key in given:
            raise UsageError(f"{name}: {key} is given twice")
        given[key] = value
    needs = KINDS[kind].needs
    if needs and needs not in given:
        raise UsageError(f"{name}: {kind} needs {needs}={_VALUES[needs].example}")
    if "node" in given and "pod" in given:
        raise UsageError(f"{name}: node and pod exclude each other; give one of them")
    fields: dict[str, Any] = {"when": KINDS[kind].first}
    for key, value in given.items():
        how = _VALUES[key]
        fields[how.field] = None if (key, value) == ("back", "never") else how.parse(value)
        if fields[how.field] is None and (key, value) != ("back", "never"):
            raise UsageError(f"{name}: invalid value {shown(value)} for {key}=: expected {how.expected}")
    return InjectedFault(kind=kind, text=" ".join((kind, *map(shlex.quote, words))), **fields)


def split(text: str, where: str) -> list[str]:
    """Split at blanks that stand in no quotes. Quotes go, all that is in them stays as it is, backslashes too."""
    words = shlex.shlex(text, posix=True)
    words.whitespace_split, words.escape, words.commenters = True, "", ""
    try:
        return list(words)
    except ValueError:
        raise UsageError(f"{where} {shown(text)} has an unclosed {words.state}") from None  # type: ignore[attr-defined]


def _kind(words: list[str], name: str) -> tuple[str, list[str]]:
    """The kind of fault, and the words behind it."""
    for length in (2, 1):
        kind = " ".join(words[:length])
        if kind in KINDS:
            return kind, words[length:]
    if words[-1:] and words[-1].endswith((".yaml", ".yml")):
        removed.refuse("--fault FILE.yaml", name)
    kind = " ".join(takewhile(lambda word: "=" not in word, words[:2]))
    removed.refuse(f"--fault {kind}", f"{name}: {kind}")
    hint = did_you_mean(kind, KINDS) or f"expected one of: {', '.join(KINDS)}"
    raise UsageError(f"{name}: unknown fault; {hint}" if kind else f"{name}: missing fault; {hint}")


class _FaultValue(Struct, frozen=True):
    """How the value of a key is read; `parse` gives None for one that does not fit."""

    field: str
    parse: Callable[[str], Any]
    expected: str
    example: str = ""


def _duration(least_s: float, most_s: float) -> Callable[[str], float | None]:
    def parsed(text: str) -> float | None:
        seconds = value_parsers.parse_duration(text)
        return seconds if seconds is not None and least_s <= seconds <= most_s else None

    return parsed


def _number(least: int, most: int) -> Callable[[str], int | None]:
    return lambda text: parse_number(text, least, most)


def _when(text: str) -> When | None:
    word, colon, rest = text.partition(":")
    if not colon:
        seconds = _duration(0.0, MAX_S)(text)
        return None if seconds is None else When(at_s=seconds)
    if word == "step":
        number = parse_number(rest, 0, MAX_STEP)
        return None if number is None else When(step=number)
    if word == "line" and 0 < len(rest) <= _MAX_PATTERN and "\n" not in rest and _is_pattern(rest):
        return When(line=rest)
    return None


def _is_pattern(text: str) -> bool:
    try:
        return bool(re.compile(text))
    except (re.error, OverflowError, RecursionError):
        return False


_VALUES = {
    "node": _FaultValue("node", _number(0, MAX_COUNT), "the index of a pod, such as 1"),
    "pod": _FaultValue("pod", lambda text: text if _POD_NAME.fullmatch(text) else None, "the name of a pod"),
    "worker": _FaultValue("local_rank", _number(0, MAX_COUNT), "a worker's local rank, such as 0"),
    "for": _FaultValue("for_s", _duration(0.001, MAX_S), DURATION, "10s"),
    "grace": _FaultValue("grace_s", _duration(0.0, _MAX_GRACE_S), f"{DURATION}, one hour at most"),
    "back": _FaultValue("back_s", _duration(0.0, MAX_S), f"{DURATION}, or never"),
    "at": _FaultValue(
        "when",
        _when,
        "a time with its unit (12s, 1m), step:NUMBER, or line:REGEX, in quotes if it has blanks",
    ),
}
