"""Incident bundles on disk: one folder for each failure or hang that this node has seen, and how they are read.

An incident's folder has `incident.json` (what happened, in one sentence first), `output/`, `stacks/`, `native/`,
`flight_recorder/` (torch's own dumps: `torchfrtrace` reads the folder), `host/` and `environment.txt`. Each may be
missing; what could not be collected is told in `incident.json`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from typing import BinaryIO

from msgspec import Struct, field
from msgspec.structs import replace

from trainer_launch.host import files
from trainer_launch.model.collectives import RankState
from trainer_launch.model.errors import UsageError
from trainer_launch.model.json_lines import Count, FreeText, MessageError, Name, Text, decode, encode
from trainer_launch.model.redaction import redact_text

MAX_BYTES = 32 << 20  # of one node's bundle
KEPT = 10  # incidents of one node of a job
KEPT_OF_ALL = 50  # of the same node of all jobs that share the directory
_RECENT = timedelta(hours=1)  # other jobs may still write what is not older
_STAMP = "%Y%m%dT%H%M%SZ"
FAILURE, HANG = "failure", "hang"  # kinds of incidents
DEFAULT = "trainer-launch-incidents"
NOWHERE = "none"
ABOUT = "incident.json"
OUTPUT, STACKS, NATIVE, RECORDER, HOST = "output", "stacks", "native", "flight_recorder", "host"
_FILE_BYTES = 4 << 20
_MOMENT_S = 30.0  # incidents of several nodes are one: a node may be asked late, and clocks differ
_TOLD = "generation "  # begins the sentence of who has only been told of a failure
_ABOUT_BYTES = 1 << 20  # of the bundle, for incident.json
_ID = re.compile(r"\d{8}T\d{6}Z-[\w.-]{1,128}")
log = logging.getLogger(__name__)


class Incident(Struct, frozen=True, kw_only=True):
    """What `incident.json` says."""

    sentence: FreeText  # what happened, for people
    kind: Name  # failure or hang
    time_s: float  # since the epoch
    job: Text = ""
    host: Text = ""
    node_rank: Count | None = None
    generation: Count = 0
    reason: Text = ""  # the exit reason that it proves, "": none
    ranks: tuple[Count, ...] = ()  # whom the sentence is about
    restart_helps: bool | None = None
    states: tuple[RankState, ...] = ()  # of this node's ranks
    missing: tuple[FreeText, ...] = ()  # what could not be collected, and why
    took_s: float = 0.0


class Stored(Struct, frozen=True, kw_only=True):
    """An incident and where it is."""

    id: str
    folder: str
    incident: Incident
    files: tuple[str, ...] = field(default_factory=tuple)  # relative to the folder

    def files_in(self, part: str) -> Sequence[str]:
        """The files of one part."""
        return [name for name in self.files if name.startswith(f"{part}/")]


# -- writing -----------------------------------------------------------------------------------


def new_folder(
    place: str, name: str, at_s: float, *, must_be_ours: bool = False, used: Collection[str] = ()
) -> str:
    """Make the folder of a new incident, which is none of those that were used before.

    Raises:
        OSError: it cannot be made, or the place must be ours and is not.
    """
    os.makedirs(place, mode=0o700, exist_ok=True)
    if must_be_ours:
        _check_owner(place)
    stamp = datetime.fromtimestamp(at_s, timezone.utc).strftime(_STAMP)
    clean = re.sub(r"[^\w.-]", "_", name)[-100:]
    for number in range(1000):
        folder = f"{place}/{stamp}-{clean}-{number}"
        if folder in used:
            continue
        with contextlib.suppress(FileExistsError):
            os.makedirs(f"{folder}/{RECORDER}", mode=0o700)
            break
    else:
        raise FileExistsError(f"{place} has a thousand incidents of this second")
    return folder


def remove_old(folder: str) -> None:
    """Remove the oldest incidents of this node beyond those that are kept; newer ones may not be any yet."""
    place, last = os.path.split(folder)
    for old in _beyond([one for one in _ids(place) if one <= last], last):
        shutil.rmtree(f"{place}/{old}", ignore_errors=True)


def _beyond(ids: Sequence[str], last: str) -> set[str]:
    """The oldest of this job's node, and of the same node of all jobs, of which others may be at work right now."""
    name, (stamp, _, _) = _name_of(last), last.partition("-")
    own = [one for one in ids if _name_of(one) == name]
    of_all = [one for one in ids if _node_of(_name_of(one)) == _node_of(name)]
    # Not by strptime, which would import for 25 ms what it needs, while the job waits.
    begun = datetime.fromisoformat(f"{stamp[:4]}-{stamp[4:6]}-{stamp[6:11]}:{stamp[11:13]}:{stamp[13:15]}")
    recent = (begun - _RECENT).strftime(_STAMP)
    return {*own[:-KEPT], *(one for one in of_all[:-KEPT_OF_ALL] if one < recent)}


def _check_owner(place: str) -> None:
    """Anybody can make a directory of a known name in /tmp, and read or replace what is written there."""
    found = os.lstat(place)
    if found.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to another user (uid {found.st_uid})", place)
    if not stat.S_ISDIR(found.st_mode) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "it is a symbolic link, or other users may write there", place)


def add(folder: str, part: str, name: str, text: str, *, anew: bool = False) -> str | None:
    """Write a text without secrets into a part of the bundle, as far as there is room; why not, if that fails."""
    if not text:
        return None
    most_bytes = max(0, min(_FILE_BYTES, MAX_BYTES - _ABOUT_BYTES - size_of(folder)))
    data = redact_text(text[:_FILE_BYTES]).encode(errors="replace")[:most_bytes]
    path = os.path.join(folder, part, name)
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(path, "wb" if anew else "xb") as file:
            file.write(data)
    except OSError as problem:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return f"{os.path.join(part, name)}: {problem.strerror}"
    return None if data else f"{os.path.join(part, name)}: the bundle has its {MAX_BYTES >> 20} MiB"


def finish(folder: str, incident: Incident) -> Incident:
    """Write `incident.json`, which matters more than all the rest; return what it says in the end.

    A bundle that is too large, and a full disk, cost the largest files.
    """
    incident = replace(incident, sentence=redact_text(incident.sentence))
    most_bytes = MAX_BYTES - _ABOUT_BYTES
    while True:
        lost = _cut(folder, most_bytes)
        words = (f"{os.path.relpath(path, folder)}: removed, there was no room" for path in lost)
        incident = replace(incident, missing=tuple(dict.fromkeys([*incident.missing, *words])))
        try:
            files.replace(f"{folder}/{ABOUT}", encode(incident))
        except OSError as problem:
            most_bytes = size_of(folder) - 1
            if problem.errno == errno.ENOSPC and any(size for path, size in _sizes(folder) if _is_spare(path)):
                continue
            log.warning("cannot save %s/%s: %s: %s", folder, ABOUT, problem.strerror, incident.sentence)
        return incident


def size_of(folder: str) -> int:
    """Bytes of all files in it."""
    return sum(size for _, size in _sizes(folder))


def _cut(folder: str, most_bytes: int) -> list[str]:
    """Remove the largest files until the bundle has this size: workers have written their dumps themselves."""
    sizes = sorted(_sizes(folder), key=lambda one: -one[1])
    total, lost = sum(size for _, size in sizes), list[str]()
    for path, size in sizes:
        if total > most_bytes and _is_spare(path):
            with contextlib.suppress(OSError):
                os.unlink(path)
            total -= size
            lost.append(path)
    return lost


def _is_spare(path: str) -> bool:
    return os.path.basename(path) != ABOUT


def _sizes(folder: str) -> list[tuple[str, int]]:
    found = []
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                found.append((os.path.join(place, name), os.lstat(os.path.join(place, name)).st_size))
    return found


# -- reading -----------------------------------------------------------------------------------


def stored(place: str) -> list[Stored]:
    """All incidents in a folder, the oldest first; the folder of one incident is that one.

    Raises:
        UsageError: there is no such folder.
    """
    if os.path.isfile(f"{place}/{ABOUT}"):
        folder = os.path.abspath(place)
        return [one for one in [_read(os.path.dirname(folder), os.path.basename(folder))] if one is not None]
    if not os.path.isdir(place):
        raise UsageError(f"no directory {place}; set --incident-dir to where the incidents are")
    return [one for one in (_read(place, name) for name in _ids(place)) if one is not None]


def chosen(place: str, wanted: str | None) -> Stored:
    """The incident that an ID or its beginning names; the newest without one.

    Raises:
        UsageError: there is none, or there are several.
    """
    found = stored(place)
    if not found:
        raise UsageError(f"no incidents in {place}")
    if wanted is None:
        return found[-1]
    fitting = [one for one in found if one.id.startswith(wanted)]
    exact = [one for one in found if one.id == wanted]
    if len(exact or fitting) != 1:
        how = "no incident" if not fitting else f"{len(fitting)} incidents"
        raise UsageError(f"{how} {wanted!r} in {place}; see trainer-launch incidents list")
    return (exact or fitting)[0]


def moment(place: str, one: Stored) -> list[Stored]:
    """This incident and, on a shared volume, other nodes' of the same moment; the one that tells most first.

    All nodes tell a suspected hang alike. Of a failure, those who have seen it say more than those who were told: a
    node may have only the hang that led to it.
    """
    about, nodes = one.incident, {one.incident.node_rank: one}
    others = stored(place) if about.node_rank is not None and about.job else ()
    for other in sorted(others, key=lambda each: each.incident.kind != about.kind):
        said = other.incident
        is_same = (said.job, said.generation) == (about.job, about.generation)
        if is_same and said.node_rank is not None and abs(said.time_s - about.time_s) <= _MOMENT_S:
            nodes.setdefault(said.node_rank, other)
    found = sorted(nodes.values(), key=lambda each: each.incident.node_rank or 0)
    return sorted(found, key=lambda each: (not each.incident.ranks, each.incident.sentence.startswith(_TOLD)))


def text_of(one: Stored, name: str) -> str:
    """A file of it as text."""
    try:
        with open(os.path.join(one.folder, name), encoding="utf-8", errors="replace") as file:
            return file.read(_FILE_BYTES)
    except OSError as problem:
        return f"cannot be read: {problem.strerror}\n"


def pack(found: Sequence[Stored], file: BinaryIO) -> None:
    """Write them as a .tar.gz."""
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for one in found:
            archive.add(one.folder, arcname=one.id)


def as_json(one: Stored) -> Mapping[str, object]:
    """For machines: what incident.json says, with the ID and the files."""
    told: dict[str, object] = json.loads(encode(one.incident))
    return {"id": one.id, "folder": one.folder, **told, "files": list(one.files)}


def _ids(place: str) -> list[str]:
    with contextlib.suppress(OSError):
        return sorted(name for name in os.listdir(place) if _ID.fullmatch(name))
    return []


def _name_of(one: str) -> str:
    return re.sub(r"-[0-9]{1,3}$", "", one.partition("-")[2])


def _node_of(name: str) -> str:
    found = re.search(r"-node[0-9]+$", name)
    return found[0] if found else ""


def _read(place: str, name: str) -> Stored | None:
    folder = f"{place}/{name}"
    try:
        with open(f"{folder}/{ABOUT}", "rb") as file:
            incident = decode(Incident, file.read(_FILE_BYTES), _FILE_BYTES)
    except (OSError, MessageError):  # it is being written, or is somebody else's
        return None
    files = tuple(sorted(os.path.relpath(path, folder) for path, _ in _sizes(folder)))
    return Stored(id=name, folder=folder, incident=incident, files=files)
