"""All GPUs of this node together: NCCL finds the ways between them, and every number of a sum is right."""

from __future__ import annotations

from collections.abc import Iterator

from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.preflight.check_context import Subject
from trainer_launch.preflight.gpu import findings_of_gpus
from trainer_launch.preflight.gpu.bench_results import PEERS, Benched, Ending
from trainer_launch.preflight.gpu.facts import numbered

NAME = "gpu-peers"
NEEDS_LOAD = True
_ACTION = "see NCCL_DEBUG=INFO, /dev/shm, the NVLinks (nvidia-smi nvlink -s) and the fabric manager of that machine"


def limit_s(subject: Subject) -> float:
    """As gpu-load's."""
    return findings_of_gpus.load_limit_s(subject)


def check(subject: Subject) -> Iterator[Finding]:
    """Which card is the faulty one cannot be told: all see the same."""
    found = findings_of_gpus.load(subject)
    if found is None or len(found.tested) < 2:
        return
    came = [one for one in found.tested if one.stage == PEERS or one.peers is not None]
    met = [one.peers for one in came if one.peers is not None and not one.peers.why]
    if any(one.ending not in (Ending.DONE, Ending.NO_TORCH) and one.stage != PEERS for one in found.tested):
        if came:
            text = "not tested: not all GPUs came so far"
            yield Finding(check=NAME, status=Status.SKIPPED, text=text)
    elif any(not peers.good for peers in met):
        yield _failed(came, "add wrongly together", "do not train on this node: have its NVLinks and cards tested")
    elif len(met) < len(came):
        came.sort(key=lambda one: one.ending is not Ending.FAILED)  # who failed knows more than who waited for it
        why = next(
            one.why or (one.peers.why if one.peers else "") for one in came if one.peers is None or one.peers.why
        )
        yield _failed(came, f"cannot work together: {why}", _ACTION)
    elif met:
        rate = min(peers.rate for peers in met)
        text = (
            f"{numbered([one.gpu for one in came])} add right together, at {rate:.3g} GB/s (bus bandwidth, 1 GiB)"
        )
        yield Finding(check=NAME, status=Status.PASS, text=text, measured=round(rate, 2), unit="GB/s")


def _failed(came: list[Benched], text: str, action: str) -> Finding:
    return Finding(
        check=NAME,
        status=Status.FAIL,
        fault=Fault.NODE,
        text=f"{numbered([one.gpu for one in came])} {text}",
        action=action,
    )
