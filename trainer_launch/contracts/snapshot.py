"""A pod as one JSON object: read in place of this container, and written for bug reports without its secrets.

`{"env": {}, "files": {path: content}, "hostname": ""}`, and when wanted "command", "args" (lists) and "namespace".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from msgspec import to_builtins

from trainer_launch.contracts.source import MAX_FILE_BYTES, PodInput
from trainer_launch.model import Fact, Job, Json, Member, Origin, Rendezvous
from trainer_launch.model.errors import UsageError
from trainer_launch.model.redaction import REDACTED, redact, redact_command, redact_file, redact_text
from trainer_launch.model.value_parsers import shown

# Files whose mere presence tells a contract; the others are known from the job's facts.
_MARKS = (
    "/etc/flux-config/entrypoint.sh",
    "/mnt/flux/config/etc/flux/system/hostlist",
    "/etc/mpi/hostfile",
    "/etc/mpi/discover_hosts.sh",
    "/etc/mpi/kubexec.sh",
    *(
        f"{directory}/{name}"
        for directory in ("/root/.ssh", "/home/mpiuser/.ssh")
        for name in ("id_rsa", "id_rsa.pub", "authorized_keys")
    ),
)


class SnapshotFiles:
    """Files that exist only as a mapping from path to content."""

    def __init__(self, contents: Mapping[str, str]) -> None:
        # surrogateescape: how the bytes of a file that is not UTF-8 survive in JSON
        self._contents = {path: text.encode("utf-8", "surrogateescape") for path, text in contents.items()}

    def read(self, path: str) -> bytes | None:
        """The file's bytes, cut where a reader would refuse them anyway; None when it is not there."""
        content = self._contents.get(path)
        return None if content is None else content[: MAX_FILE_BYTES + 1]

    def exists(self, path: str) -> bool:
        """Whether the file is there, or a file below it."""
        return path in self._contents or any(p.startswith(f"{path.rstrip('/')}/") for p in self._contents)


class _Snapshot(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    env: dict[str, str]
    files: dict[str, str] = {}
    hostname: str = ""
    command: list[str] | None = None
    args: list[str] | None = None
    namespace: str | None = None
    job: Any = None  # for people
    pod: dict[str, Any] | None = None  # for people, but for its stop signal


def pod_from_snapshot(data: object) -> PodInput:
    """The pod that a snapshot describes; a snapshot of another shape is a `UsageError`."""
    try:
        snapshot = msgspec.convert(data, _Snapshot)
    except (msgspec.ValidationError, UnicodeEncodeError) as problem:  # the latter of a lone surrogate
        keys = ", ".join(_Snapshot.__struct_fields__)
        raise UsageError(
            f"the snapshot cannot be read: {shown(str(problem))}; expected a JSON object of {keys}"
        ) from None
    bad_name = next((name for name in snapshot.env if not name or "=" in name or "\0" in name), None)
    if bad_name is not None:
        raise UsageError(f"env in the snapshot has {shown(bad_name)}; expected names of variables")
    relative = next((path for path in snapshot.files if not path.startswith("/")), None)
    if relative is not None:
        raise UsageError(f"files in the snapshot has {shown(relative)}; expected absolute paths")
    try:
        files = SnapshotFiles(snapshot.files)
    except UnicodeEncodeError as problem:
        raise UsageError("files in the snapshot hold characters that no file can hold; expected text") from problem
    return PodInput(
        env=snapshot.env,
        files=files,
        hostname=snapshot.hostname,
        command=(*(snapshot.command or ()), *(snapshot.args or ())),
        namespace=snapshot.namespace or None,
        stop_signal=str((snapshot.pod or {}).get("stop_signal") or "") or None,
    )


def snapshot_of(pod: PodInput, job: Job) -> dict[str, Json]:
    """The pod as a snapshot that may be shown to others, and the job that was read from it."""
    paths = dict.fromkeys((*_MARKS, *(fact.name for fact in job.facts if fact.origin is Origin.FILE)))
    contents = {path: _content(pod, path) for path in paths}
    return {
        "env": {name: redact(name, value) for name, value in sorted(pod.env.items())},
        "files": {path: content for path, content in contents.items() if content is not None},
        "hostname": pod.hostname,
        "command": list(redact_command(pod.command)),
        "namespace": pod.namespace,
        "job": _plain(flat(job), redact_text),
    }


def _content(pod: PodInput, path: str) -> str | None:
    data = pod.files.read(path)
    if data is None:  # there, but not for us to read: that it is there still tells the contract
        return REDACTED if pod.files.exists(path) else None
    return redact_file(path, data.decode("utf-8", "surrogateescape"))


_AS_THEY_ARE = (
    *("contract", "role", "nproc_per_node", "node_rank", "hostname_index", "world_size", "is_coordinator"),
    *(
        "max_restarts",
        "several_nodes_shown_by",
        "completion_index",
        "foreign_replicated_job",
        "rank_behind_workers",
    ),
    *("worker_for_each_gpu", "sparse", "ssh_dir", "secret_file", "should_report_progress"),
)  # fields of Job


def flat(job: Job) -> dict[str, Json]:
    """A job as plain JSON: the platform's own words, then the fields of Job."""
    nodes, mpi, status = job.nodes, job.mpi, job.status
    made: dict[str, Json] = {
        "standalone": None,
        **{fact.field: fact.became for fact in job.facts if _is_word(fact)},
        **{name: getattr(job, name) for name in _AS_THEY_ARE},
        "nodes": nodes.fixed if nodes else None,
        "min_nodes": nodes.min if nodes else None,
        "max_nodes": nodes.max if nodes else None,
        "elastic": nodes.fixed is None if nodes else None,
        **_master(job),
        **_hosts(job.members),
        **_rendezvous(job.rendezvous),
        **({} if mpi is None else to_builtins(mpi)),
        "status_enabled": status is not None,
        **({} if status is None else to_builtins(status)),
    }
    return {key: _plain(value) for key, value in made.items()}


def _is_word(fact: Fact) -> bool:
    """Whether a fact became a key of its own: `null` too where it was derived."""
    return bool(fact.field) and (fact.became is not None or fact.origin is Origin.DERIVED)


def _master(job: Job) -> dict[str, Json]:
    # The endpoint of a rendezvous names no master.
    meeting = job.rendezvous
    is_named = meeting is None or (meeting.written is None and meeting.kind != "dynamic")
    master = job.coordinator if is_named else None
    return {
        "master_addr": master.host if master else None,
        "master_port": master.port if master else None,
    }


def _hosts(members: tuple[Member, ...] | None) -> dict[str, Json]:
    if members is None:
        return {"hosts": None, "slots": None, "total_slots": None}
    slots = [m.slots for m in members if m.slots is not None]
    complete = len(slots) == len(members)
    return {
        "hosts": [m.host for m in members],
        "slots": list(slots) if complete else None,
        "total_slots": sum(slots) if complete else None,
    }


def _rendezvous(meeting: Rendezvous | None) -> dict[str, Json]:
    if meeting is None:
        keys = ("rendezvous", "rdzv_backend", "rdzv_endpoint", "rdzv_host", "rdzv_port", "rdzv_id", "rdzv_conf")
        return dict.fromkeys(keys)
    endpoint = meeting.endpoint if meeting.written is not None else None
    return {
        "rendezvous": meeting.kind,
        "rdzv_backend": meeting.backend,
        "rdzv_endpoint": meeting.written,
        "rdzv_host": endpoint.host if endpoint else None,
        "rdzv_port": endpoint.port if endpoint else None,
        "rdzv_id": meeting.run_id,
        "rdzv_conf": dict(meeting.conf),
    }


def _plain(value: Json, text: Callable[[str], str] = str) -> Json:
    """With plain dicts and lists, and each text as `text` makes it."""
    if isinstance(value, str):
        return text(value)
    if isinstance(value, Mapping):
        return {key: _plain(inner, text) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner, text) for inner in value]
    return value
