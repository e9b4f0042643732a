"""Incidents on disk: one folder for each failure or hang that this node has seen, how it is written and read.

An incident's folder has `incident.json` (what happened, in one sentence first), `sentence.txt`, `report.txt` (of a
hang), `output/`, `stacks/`, `flight_recorder/` (torch's own dumps: `torchfrtrace` reads the folder), `host/` and
`environment.txt`. Each may be missing; what could not be collected is listed in `incident.json`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import stat
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from itertools import islice

from msgspec import Struct
from msgspec.structs import replace

from trainer_launch.diagnosis.collectives import RankState
from trainer_launch.host import files
from trainer_launch.model.codec import MAX_TEXT, Count, Name, Real, Text, decoded, encode
from trainer_launch.model.errors import UsageError
from trainer_launch.model.redaction import redact_text
from trainer_launch.model.units import counted, listed, printable

MAX_BYTES = 32 << 20  # of one folder, beside incident.json
KEPT = 10  # incidents of one node of a job
FAILURE, HANG, REQUEST = "failure", "hang", "request"  # kinds of incidents; a person asks for the last
DEFAULT = "trainer-launch-incidents"
NOWHERE = "none"
ABOUT, SENTENCE = "incident.json", "sentence.txt"
OUTPUT, STACKS, RECORDER, HOST = "output", "stacks", "flight_recorder", "host"
REPORT = "report.txt"  # of a hang: what it is judged by, and where workers and the processes below them were
NO_FACTS_YET = f"{HOST}/: no answer yet"  # is missing until all of them are written
_READ_BYTES = 4 << 20  # of one file, which others may have written
_MOMENT_S = 30.0  # incidents of several nodes are one: a node may be asked late, and clocks differ
_MOST_FILES = 10_000  # of a folder
_SECOND_HAND = "generation "  # begins the sentence of a node that has only heard of a failure
_ID = re.compile(r"\d{8}T\d{6}Z-[\w.-]{1,128}")
log = logging.getLogger(__name__)


class Incident(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of `incident.json`."""

    sentence: str  # what happened, for people
    kind: Name
    time_s: Real  # since the epoch
    job: Text = ""
    host: Text = ""
    node_rank: Count | None = None
    generation: Count = 0
    reason: Text = ""  # the exit reason that it proves, "": none
    ranks: tuple[Count, ...] = ()  # whom the sentence is about
    restart_helps: bool | None = None
    states: tuple[RankState, ...] = ()  # of this node's ranks; of a hang, also other nodes'
    missing: tuple[str, ...] = ()  # what could not be collected, and why
    took_s: Real = 0.0


class Stored(Struct, frozen=True):
    """An incident and where it is."""

    id: str
    folder: str
    incident: Incident
    files: tuple[str, ...]  # relative to the folder
    size_bytes: int

    def files_in(self, part: str) -> Sequence[str]:
        """The files of one part."""
        return [name for name in self.files if name.startswith(f"{part}/")]


def new_folder(place: str, name: str, at_s: float, first: int = 0, must_be_ours: bool = False) -> str:
    """Make the folder of a new incident, numbered from `first` on.

    Raises:
        OSError: it cannot be made, or the place must be ours and is not.
    """
    os.makedirs(place, mode=0o700, exist_ok=True)
    if must_be_ours:
        _check_owner(place)
    stamp = datetime.fromtimestamp(at_s, timezone.utc).strftime("%Y%m%dT%H%M%SZ")
    clean = re.sub(r"[^\w.-]", "_", name)[-100:]
    for number in range(first, first + 1000):
        folder = f"{place}/{stamp}-{clean}-{number}"
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, mode=0o700)
            for part in (OUTPUT, STACKS, RECORDER, HOST):
                os.mkdir(f"{folder}/{part}", mode=0o700)
            return folder
    raise FileExistsError(errno.EEXIST, "it has a thousand incidents of this second", place)


def _check_owner(place: str) -> None:
    """Anybody can make a directory of a known name in /tmp, and read or replace what is written there."""
    status = os.lstat(place)
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})", place)
    if not stat.S_ISDIR(status.st_mode) or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "it is a symbolic link, or other users may write there", place)


def add(folder: str, name: str, text: str) -> str | None:
    """Write a text without secrets into the folder; why not, if that fails."""
    if not text:
        return None
    try:
        files.replace(f"{folder}/{name}", redact_text(text).encode(errors="replace"))
    except OSError as problem:
        return f"{name}: {problem.strerror}"
    return None


def finish(folder: str, incident: Incident) -> Incident:
    """Write `incident.json`, which matters more than all the rest; return what it says in the end.

    The largest files go where the disk is full, or the folder is too large: workers write their dumps themselves.
    """
    if not os.path.isdir(folder):  # it was dropped meanwhile
        return incident
    others = sorted((size, name) for name, size in _sizes(folder).items() if name not in (ABOUT, SENTENCE))
    size_bytes = sum(size for size, _ in others)
    while True:
        problem = None if size_bytes > MAX_BYTES else _save(folder, incident)
        is_full = size_bytes > MAX_BYTES or (problem is not None and problem.errno == errno.ENOSPC)
        if not is_full or not others:
            if problem is not None:
                log.warning("cannot save %s/%s: %s: %s", folder, ABOUT, problem.strerror, incident.sentence)
            return incident
        size, name = others.pop()
        with contextlib.suppress(OSError):
            os.unlink(f"{folder}/{name}")
        size_bytes -= size
        incident = replace(incident, missing=(*incident.missing, f"{name}: removed, there was no room"))


def _save(folder: str, incident: Incident) -> OSError | None:
    try:
        files.replace(f"{folder}/{ABOUT}", encode(incident, MAX_TEXT))
        files.replace(f"{folder}/{SENTENCE}", f"{incident.sentence}\n".encode(errors="replace"))
    except OSError as problem:
        return problem
    return None


def drop(folder: str) -> None:
    """Remove the folder of what was no incident; who still writes to it finds nothing at its path."""
    with contextlib.suppress(OSError):
        os.rename(folder, f"{folder}~")
    files.remove_tree(f"{folder}~")


def remove_old(folder: str) -> None:
    """Keep the last incidents of this node of this job, up to this one: newer ones may not be any yet."""
    place, last = os.path.split(folder)
    own = [name for name in _ids(place) if _order(name) <= _order(last) and _name_of(name) == _name_of(last)]
    for old in own[:-KEPT]:
        files.remove_tree(f"{place}/{old}")


def read(folder: str) -> Incident | None:
    """Read a folder's `incident.json`; None: it is being written, or is somebody else's."""
    return decoded(Incident, files.read(f"{folder}/{ABOUT}", _READ_BYTES), _READ_BYTES)


def stored(place: str) -> list[Stored]:
    """All incidents in a folder, the oldest first; the folder of one incident is that one.

    Raises:
        UsageError: there is no such folder.
    """
    if not (os.path.isdir(place) and os.access(place, os.R_OK | os.X_OK)):
        why = "may not read" if os.path.isdir(place) else "no directory"
        raise UsageError(f"{why} {place}; set --incident-dir to where the incidents are")
    names = _ids(place)
    if os.path.isfile(f"{place}/{ABOUT}"):
        place, name = os.path.split(os.path.abspath(place))
        names = [name]
    entries = []
    for name in names:
        folder = f"{place}/{name}"
        incident, sizes = read(folder), _sizes(folder)
        if incident is not None:
            entries.append(Stored(name, folder, incident, tuple(sorted(sizes)), sum(sizes.values())))
    return entries


def moments(entries: Sequence[Stored]) -> list[list[Stored]]:
    """The incidents of all nodes, what nodes have of the same failure or hang together; the oldest first.

    A node may have only the hang that led to a failure.
    """
    groups: list[list[Stored]] = []
    for entry in entries:
        group = next((group for group in reversed(groups) if _is_same(group, entry.incident)), None)
        if group is None:
            groups.append([entry])
        else:
            group.append(entry)
    return groups


def _is_same(group: Sequence[Stored], now: Incident) -> bool:
    """Whether an incident belongs to these, which have none of this kind of its node."""
    first = group[0].incident
    if None in (first.node_rank, now.node_rank) or not now.job:
        return False
    if (now.job, now.generation) != (first.job, first.generation) or now.time_s - first.time_s > _MOMENT_S:
        return False
    is_kind = first.kind == now.kind or REQUEST not in (first.kind, now.kind)
    own = (now.node_rank, now.kind)
    return is_kind and all((entry.incident.node_rank, entry.incident.kind) != own for entry in group)


def chosen(groups: Sequence[Sequence[Stored]], wanted: str | None) -> list[Stored]:
    """The one of these incidents that an ID or its beginning names, of each node; the newest without one.

    The node that tells most is first: the one whose rank is named, and those that have seen a failure.

    Raises:
        UsageError: there is none, or there are several.
    """
    ids = [entry.id for group in groups for entry in group]
    fitting = {name for name in ids if name == wanted} or {name for name in ids if name.startswith(wanted or "")}
    of_groups = [group for group in groups if any(entry.id in fitting for entry in group)]
    if not of_groups:
        raise UsageError(f"no incident {wanted!r}")
    if wanted is not None and len(of_groups) > 1:
        names = listed([group[0].id for group in of_groups])
        raise UsageError(f"{wanted!r} fits {counted(len(of_groups), 'incident')}; which one: {names}?")
    about = max((entry for entry in of_groups[-1] if entry.id in fitting), key=lambda entry: entry.incident.time_s)
    kind_last = sorted(
        of_groups[-1], key=lambda each: (each.incident.kind == about.incident.kind, each.incident.time_s)
    )
    nodes = {entry.incident.node_rank: entry for entry in (*kind_last, about)}
    return sorted(nodes.values(), key=_by_evidence)


def _by_evidence(entry: Stored) -> tuple[bool, bool, bool, int]:
    incident = entry.incident
    named = {state.node for state in incident.states if state.rank in incident.ranks}
    node = incident.node_rank
    return not incident.ranks, incident.sentence.startswith(_SECOND_HAND), node not in named, node or 0


def text_of(entry: Stored, name: str) -> str:
    """A file of it as text that cannot command a terminal."""
    data = files.read(f"{entry.folder}/{name}", _READ_BYTES)
    if data is None:
        return "cannot be read\n"
    lines = data.decode(errors="replace").split("\n")
    return "\n".join(printable(line.rstrip("\r").expandtabs()) for line in lines)


def as_json(entry: Stored) -> Mapping[str, object]:
    """For machines: what incident.json says, with the ID and the files."""
    values: dict[str, object] = json.loads(encode(entry.incident))
    return {"id": entry.id, "folder": entry.folder, **values, "files": list(entry.files)}


def _ids(place: str) -> list[str]:
    with contextlib.suppress(OSError):
        names = (name for name in os.listdir(place) if _ID.fullmatch(name))
        return sorted((name for name in names if not os.path.islink(f"{place}/{name}")), key=_order)
    return []


def _order(entry_id: str) -> tuple[str, int, str]:
    """By time, then by number, then by node."""
    at, _, rest = entry_id.partition("-")
    number = rest.rpartition("-")[2]
    return at, int(number) if number.isdecimal() else 0, rest


def _name_of(entry_id: str) -> str:
    """The job and the node, of an ID: between the time and the number."""
    return re.sub(r"-[0-9]{1,4}$", "", entry_id.partition("-")[2])


def _sizes(folder: str) -> dict[str, int]:
    """All files below, relative to the folder, and how many bytes each has; links and FIFOs are none."""
    sizes = {}
    paths = (os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)
    for path in islice(paths, _MOST_FILES):
        with contextlib.suppress(OSError):
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode):
                sizes[os.path.relpath(path, folder)] = status.st_size
    return sizes
