"""Pods: variables and files of all contracts, from a snapshot; TF_CONFIG; lists of hosts."""

from __future__ import annotations

import json
from typing import Any

from tests.fuzz.oracle import Refused, attempt, text_of
from tests.fuzz.registry import target
from tests.planning.requests import GPU_MACHINE
from trainer_launch.contracts import read_job, snapshot
from trainer_launch.contracts.snapshot import flat
from trainer_launch.contracts.source import PodInput
from trainer_launch.model import Job, hostfile
from trainer_launch.model.errors import ContractError, LaunchError
from trainer_launch.model.redaction import REDACTED, redact
from trainer_launch.model.value_parsers import parse_host
from trainer_launch.planning.command import parse_command
from trainer_launch.planning.job import place


@target(6000)
def pod(data: bytes) -> None:
    """A snapshot, as `explain --pod` reads it: contract, job, place among the nodes, and a snapshot of it again."""
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        return
    found = attempt(snapshot.pod_from_snapshot, told)
    if isinstance(found, Refused):
        return
    job = _job(found)
    if isinstance(job, Refused):
        return
    json.dumps(flat(job))
    attempt(place, job, GPU_MACHINE)
    again = snapshot.snapshot_of(found, job)
    attempt(read_job, snapshot.pod_from_snapshot(json.loads(json.dumps(again))))
    if found.command:
        attempt(parse_command, found.command)


def _job(found: PodInput) -> Job | Refused:
    """Read it twice, in two orders of its variables: that is never a difference."""
    secrets = {name: value for name, value in found.env.items() if redact(name, value) == REDACTED}
    shown = "\n".join((*found.env, *(value for name, value in found.env.items() if name not in secrets)))
    hidden = [value for value in secrets.values() if len(value) > 8 and value not in shown]
    job = attempt(read_job, found, hides=hidden)
    turned = PodInput(
        env=dict(reversed(list(found.env.items()))),
        files=found.files,
        hostname=found.hostname,
        command=found.command,
        namespace=found.namespace,
    )
    assert attempt(read_job, turned) == job
    return job


@target()
def json_config(data: bytes) -> None:
    """TF_CONFIG, whose keys may stand in any order."""
    text = text_of(data)
    job, turned = attempt(_read, {"TF_CONFIG": text}, "tfjob-v1", names="TF_CONFIG"), _turned(text)
    if not isinstance(job, Refused) and turned is not None:
        assert _comparable(_read({"TF_CONFIG": turned}, "tfjob-v1")) == _comparable(job)


def _read(env: dict[str, str], contract: str) -> Job:
    return read_job(PodInput(env=env, files=snapshot.SnapshotFiles({}), hostname="job-worker-0"), contract)


def _comparable(job: Job) -> object:
    return json.dumps({**flat(job), "warnings": sorted(job.warnings)}, sort_keys=True)


def _turned(text: str) -> str | None:
    def reversed_keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: reversed_keys(inner) for key, inner in reversed(value.items())}
        return [reversed_keys(inner) for inner in value] if isinstance(value, list) else value

    try:
        return json.dumps(reversed_keys(json.loads(text)))
    except (ValueError, RecursionError):
        return None


_DIALECTS = (
    (hostfile.parse_open_mpi, hostfile.render_open_mpi),
    (hostfile.parse_hydra, hostfile.render_hydra),
    (hostfile.parse_horovod, hostfile.render_horovod),
    (hostfile.parse_discovery, hostfile.render_hydra),
)


@target()
def hosts(data: bytes) -> None:
    """Lists of hosts of all dialects, Flux's short form among them; each is written as it was read."""
    if not data:
        return
    text = text_of(data[1:])
    number = data[0] % (len(_DIALECTS) + 1)
    if number == len(_DIALECTS):
        names = attempt(hostfile.expand_hostlist, text, "the list", kinds=(LaunchError,), names="the list")
        if not isinstance(names, Refused):
            assert len(names) <= hostfile.MAX_HOSTS
            assert hostfile.expand_hostlist(",".join(names)) == names
        return
    parse, render = _DIALECTS[number]
    members = attempt(parse, text, "/etc/hosts of\nit", kinds=(ContractError,), names="/etc/hosts of")
    if isinstance(members, Refused):
        return
    assert len({member.host for member in members}) == len(members) <= hostfile.MAX_HOSTS
    assert all(parse_host(member.host) == member.host for member in members)
    assert all(member.slots is None or 0 <= member.slots < 10**7 for member in members)
    parse = hostfile.parse_hydra if parse is hostfile.parse_discovery else parse  # which takes echo for the shell's
    assert tuple((m.host, m.slots) for m in parse(render(members))) == tuple((m.host, m.slots) for m in members)
