"""The kinds of faults: how each is written, which pods it is for, how it is injected and how it ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import psutil
from msgspec import Struct

from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase
from trainer_launch.rehearsal.controllers.restart_decisions import State
from trainer_launch.rehearsal.kubelet.pods import Kubelet
from trainer_launch.rehearsal.pod_watch import PodProcesses
from trainer_launch.rehearsal.report.history import HistoryEntry


class Rehearsed(Protocol):
    """What a fault needs of the rehearsal that it is injected into; `driver.py` has it."""

    state: State
    kubelet: Kubelet
    processes: PodProcesses

    def now_s(self) -> float:
        """Seconds since the rehearsal began."""

    def tell(self, entry: HistoryEntry) -> None:
        """Take it into the history."""

    def leader(self, pod: str) -> int | None:
        """The first process of the main container, while it runs."""

    def scale(self, workers: int | None) -> None:
        """The controller sees another number of Worker replicas; None: one more than now."""

    def delete(self, pod: str, grace_s: float, back_s: float | None) -> None:
        """Somebody deletes a pod, which is created again after `back_s`; None: never."""


class When(Struct, frozen=True, kw_only=True):
    """When a fault comes: exactly one of the three is set."""

    at_s: float | None = None  # after the beginning of the rehearsal
    step: int | None = None  # when the job reaches this step, by report() or by a line such as "step 40"
    line: str | None = None  # when a pod says a line that this regular expression is found in


class InjectedFault(Struct, frozen=True, kw_only=True):
    """One fault, once."""

    kind: str  # of KINDS
    when: When
    node: int | None = None  # index of the pod; None with no `pod`: the last node of the job
    pod: str | None = None  # by name, in place of `node`
    local_rank: int = 0  # which worker of the node
    for_s: float | None = None  # how long it lasts; None: as long as the job, or it is over at once
    grace_s: float | None = None  # of "term pod": until SIGKILL
    back_s: float | None = 1.0  # of "kill pod" and "term pod": until it is made anew; None: never
    workers: int | None = None  # of "scale": how many Worker replicas the job has from then on
    text: str = ""  # in the words typed: what people are shown


class NotNow(Exception):
    """It cannot be done as things stand; the text says why."""


class Never(NotNow):
    """Nor will it be possible later."""


class Effect(Struct, frozen=True):
    """What is to be done for a fault, once it has been said, and how that is undone."""

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


def _kill_pod(rehearsal: Rehearsed, fault: InjectedFault, pod: str | None) -> Effect:
    name = _living(rehearsal, pod)
    return Effect(lambda: rehearsal.delete(name, 0.0, fault.back_s))


def _term_pod(rehearsal: Rehearsed, fault: InjectedFault, pod: str | None) -> Effect:
    name = _living(rehearsal, pod)
    grace_s = rehearsal.state.pods[name].draft.template.grace_s if fault.grace_s is None else fault.grace_s
    return Effect(lambda: rehearsal.delete(name, grace_s, fault.back_s))


def _scale(rehearsal: Rehearsed, fault: InjectedFault, pod: str | None) -> Effect:
    _refuse_after_end(rehearsal)
    return Effect(lambda: rehearsal.scale(fault.workers))


def _on_network(rehearsal: Rehearsed, fault: InjectedFault, pod: str | None) -> Effect:
    network = rehearsal.kubelet.network
    assert network is not None, "asked for before anything was started"
    return Effect(lambda: network.begin(fault.kind, pod), lambda: network.end(fault.kind, pod))


class FaultKind(Struct, frozen=True):
    """How one kind of fault is written, and how it is injected."""

    inject: Callable[[Rehearsed, InjectedFault, str | None], Effect]  # raises NotNow
    keys: tuple[str, ...]  # besides at=
    needs: str = ""  # one that must be given
    bare: str = ""  # the key whose value may stand alone
    first: When = When(step=1)  # when it comes, if nothing is said
    is_of_job: bool = False  # of no single pod
    scales: bool = False  # the number of pods
    needs_network: bool = False  # each pod has its own, in namespaces


_POD = ("node", "pod")
KINDS: Mapping[str, FaultKind] = {
    "kill worker": FaultKind(_kill_worker, (*_POD, "worker")),
    "stop worker": FaultKind(_stop_worker, (*_POD, "worker", "for"), bare="for"),
    "kill pod": FaultKind(_kill_pod, (*_POD, "back")),
    "term pod": FaultKind(_term_pod, (*_POD, "grace", "back")),
    "add node": FaultKind(_scale, (), is_of_job=True, scales=True),
    "scale": FaultKind(_scale, ("workers",), needs="workers", is_of_job=True, scales=True),
    "partition": FaultKind(_on_network, (*_POD, "for"), bare="for", needs_network=True),
    "delay dns": FaultKind(
        _on_network, ("for",), needs="for", bare="for", first=When(at_s=0.0), is_of_job=True, needs_network=True
    ),
}


def _refuse_after_end(rehearsal: Rehearsed) -> None:
    if rehearsal.state.condition is not None or rehearsal.state.asked:
        raise Never("the job has ended")


def _living(rehearsal: Rehearsed, pod: str | None) -> str:
    state = rehearsal.state.states[pod or ""]
    _refuse_after_end(rehearsal)
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
