"""The kinds of faults: how each is written, which pods it is for, how it is injected and how it ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import psutil
from msgspec import Struct

from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase

if TYPE_CHECKING:
    from trainer_launch.rehearsal.driver import Rehearsal


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


def _kill_worker(driver: Rehearsal, fault: InjectedFault, pod: str | None) -> Effect:
    process = _worker(driver, fault, pod)
    return Effect(lambda: _send([process], signal.SIGKILL))


def _stop_worker(driver: Rehearsal, fault: InjectedFault, pod: str | None) -> Effect:
    worker = _worker(driver, fault, pod)
    processes = [worker]
    with contextlib.suppress(psutil.Error):
        processes += worker.children(recursive=True)
    return Effect(lambda: _send(processes, signal.SIGSTOP), lambda: _send(processes, signal.SIGCONT))


def _kill_pod(driver: Rehearsal, fault: InjectedFault, pod: str | None) -> Effect:
    name = _living(driver, pod)
    return Effect(lambda: driver.delete(name, 0.0, fault.back_s))


def _term_pod(driver: Rehearsal, fault: InjectedFault, pod: str | None) -> Effect:
    name = _living(driver, pod)
    grace_s = driver.state.pods[name].draft.template.grace_s if fault.grace_s is None else fault.grace_s
    return Effect(lambda: driver.delete(name, grace_s, fault.back_s))


def _scale(driver: Rehearsal, fault: InjectedFault, pod: str | None) -> Effect:
    _refuse_after_end(driver)
    return Effect(lambda: driver.scale(fault.workers))


def _on_network(driver: Rehearsal, fault: InjectedFault, pod: str | None) -> Effect:
    network = driver.kubelet.network
    assert network is not None, "asked for before anything was started"
    return Effect(lambda: network.begin(fault, pod), lambda: network.end(fault, pod))


class FaultKind(Struct, frozen=True):
    """How one kind of fault is written, and how it is injected."""

    inject: Callable[[Rehearsal, InjectedFault, str | None], Effect]  # raises NotNow
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


def _refuse_after_end(driver: Rehearsal) -> None:
    if driver.state.condition is not None or driver.state.asked:
        raise Never("the job has ended")


def _living(driver: Rehearsal, pod: str | None) -> str:
    state = driver.state.states[pod or ""]
    _refuse_after_end(driver)
    if state.is_over:
        raise Never(f"{pod} is {state.phase.value} and will not be created again")
    if state.phase is Phase.PENDING or state.stopping:
        raise NotNow(f"{pod} is not running")
    return pod or ""


def _worker(driver: Rehearsal, fault: InjectedFault, pod: str | None) -> psutil.Process:
    name = _living(driver, pod)
    process = driver.processes.worker(driver.state.pods[name], driver.leader(name), fault.local_rank)
    if process is None:
        raise NotNow(f"{name} has no worker {fault.local_rank}")
    return process


def _send(processes: Sequence[psutil.Process], number: int) -> None:
    """Signal all of them that are still there."""
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
