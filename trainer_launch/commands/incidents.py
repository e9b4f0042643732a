"""`incidents`: what was collected about failures and hangs, in this container or in a copied directory, or now."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone

from trainer_launch.commands.options import Parsed
from trainer_launch.diagnosis import incident_bundle
from trainer_launch.diagnosis.collectives import Doing, RankState
from trainer_launch.diagnosis.incident_bundle import FAILURE, OUTPUT, REPORT, REQUEST, STACKS, Stored
from trainer_launch.diagnosis.stacks import Frame
from trainer_launch.host import runtime_directory
from trainer_launch.model.errors import UsageError
from trainer_launch.model.units import aligned, grouped, in_units, printable
from trainer_launch.observability import event_log, incident_watch, node_view

_WIDTH = 100
_LINES = 20
_STACKS = 4  # that are shown
_ANSWER_S, _FACTS_S = 10.0, 3.0  # for all nodes of a job to collect; for what stays
_LOOK_S = 0.05
_RANK = re.compile(r"\brank (\d{1,9})\b")
_PLACE = re.compile(r"[^ ]+:\d+ \([^)]*\)$")  # ends a place
# A call in an exception's traceback.
_FRAME = re.compile(r'^(?:\[rank\d+\]:)? *File "([^"\n]+)", line (\d{1,9}), in (.+)$', re.MULTILINE)
_OF_CHILD = re.compile(r"rank \d+'s .* \(pid \d+\): ")


def main(parsed: Parsed) -> int:
    """The command.

    Raises:
        UsageError: there is no such directory or incident; `collect`: no launcher runs here, or it runs nothing.
    """
    action, wanted, as_json = (parsed.flags[name] for name in ("action", "id", "json"))
    if wanted is not None and action in ("list", "collect"):
        raise UsageError(f"unexpected argument {wanted!r}: incidents {action} takes no ID")
    if action == "collect":
        chosen = [_collected(view) for view in _running()]
    else:
        place, is_awaited = _place(parsed)
        groups: list[list[Stored]] = []
        if not is_awaited or os.path.isdir(place):
            groups = incident_bundle.moments(incident_bundle.stored(place))
        if not groups:
            return _none_yet(place, action, as_json=as_json)
        whole = ([group] for group in groups) if action == "list" else (groups,)
        chosen = [_chosen(part, wanted, place) for part in whole]
    if as_json:
        values = [_values(entries) for entries in chosen]
        sys.stdout.write(json.dumps(values[0] if action == "show" else values, indent=2, allow_nan=False) + "\n")
    else:
        _print(_table(chosen) if action == "list" else (line for entries in chosen for line in _shown(entries)))
    return 0


def _chosen(groups: list[list[Stored]], wanted: str | None, place: str) -> list[Stored]:
    try:
        return incident_bundle.chosen(groups, wanted)
    except UsageError as problem:
        raise UsageError(f"{problem} (in {place}; see trainer-launch incidents list)") from None


def _place(parsed: Parsed) -> tuple[str, bool]:
    """The directory of all incidents, and whether a launcher makes it with the first one."""
    given, is_default = incident_watch.place_of(parsed.settings), parsed.settings.incident_dir is None
    if given is None:
        raise UsageError("--incident-dir is none, or there is no temporary directory: nothing is collected")
    places = [view.incident_dir for view in node_view.find() if view.incident_dir is not None]
    return (places or [given])[0] if is_default else given, is_default or given in places


def _none_yet(place: str, action: str, *, as_json: bool) -> int:
    as_value = "[]" if action == "list" else "null"
    _print([as_value if as_json else f"no incidents yet in {place}"])
    return 0


def _running() -> list[node_view.View]:
    """A launcher of each job that runs something here."""
    views = node_view.hearing()
    if not views:
        raise UsageError(
            "no launcher that collects incidents runs in this container; run it while a job runs without "
            "--incident-dir none, as the same user and with the same TMPDIR"
        )
    running = [view for view in views if view.processes]
    if not running:
        phases = ", ".join(dict.fromkeys(view.phase for view in views))
        raise UsageError(f"no worker runs here now, the launcher is {phases}; see trainer-launch status")
    # A shell whose torchrun is a launcher of its own knows less than that.
    chosen = [view for view in running if view.engine != "plain"] or running
    return [views[0] for views in grouped((view.job or view.run_dir, view) for view in chosen).values()]


def _collected(view: node_view.View) -> list[Stored]:
    """The incident that this launcher collects for us, of each node where they have one directory."""
    tail, place, begun_s = event_log.Tail(view.run_dir), view.incident_dir or "", time.time()
    while tail.read():  # what has happened before
        pass
    for _ in range(2):
        until_s = time.monotonic() + _ANSWER_S
        runtime_directory.request(view.run_dir)
        while time.monotonic() < until_s:
            ids = [news.event[1].get("id") for news in tail.read() if news.event[0] == "incident"]
            if ids and isinstance(ids[-1], str):
                return _complete(place, ids[-1])
            time.sleep(_LOOK_S)
    own = [entry for entry in incident_bundle.stored(place) if entry.incident.time_s >= begun_s]
    if not own:
        raise UsageError(f"the launcher with pid {view.pid} has collected nothing in {place}; see its log")
    sys.stderr.write("the coordinator did not answer: this is what this node has\n")
    return own[-1:]


def _complete(place: str, wanted: str) -> list[Stored]:
    """An incident once all is written, or after a while: a driver may not answer."""
    end_s = time.monotonic() + _FACTS_S
    while True:
        entries = incident_bundle.chosen(incident_bundle.moments(incident_bundle.stored(place)), wanted)
        is_whole = all(incident_bundle.NO_FACTS_YET not in entry.incident.missing for entry in entries)
        if is_whole or time.monotonic() >= end_s:
            return entries
        time.sleep(_LOOK_S)


def _values(entries: list[Stored]) -> dict[str, object]:
    return {**incident_bundle.as_json(entries[0]), "same_moment": [entry.id for entry in entries[1:]]}


def _print(lines: Iterable[str]) -> None:
    """As a terminal may show them: anybody may have written what was copied."""
    for part in (part for line in lines for part in line.splitlines() or [""]):
        sys.stdout.write(f"{printable(part.expandtabs())}\n")


def _table(groups: list[list[Stored]]) -> Iterator[str]:
    rows = [("ID", "KIND", "LINE OF CODE", "SENTENCE")]
    for entries in groups:
        incident = entries[0].incident
        sentence = " ".join(incident.sentence.split())
        short = sentence if len(sentence) <= _WIDTH else f"{sentence[: _WIDTH - 1]}…"
        rows.append((entries[0].id, incident.kind, line_of(entries), short))
    yield from aligned(rows)


def _shown(entries: list[Stored]) -> Iterator[str]:
    """The incidents of a moment: the sentence, the ranks of all nodes, then what each node has."""
    incident = entries[0].incident
    yield incident.sentence
    helps = {True: "a restart may help", False: "a restart will not help", None: ""}[incident.restart_helps]
    if words := "; ".join(filter(None, (incident.reason and f"reason={incident.reason}", helps))):
        yield words
    if any(entry.incident.states for entry in entries):
        yield ""
        rows = [(str(state.rank), *_cells(state)) for state in _states(entries)]
        yield from aligned([("RANK", "STATE", "COLLECTIVES", "PLACE"), *rows])
    for state in [state for state in _accused(entries) if state.stack][:_STACKS]:
        yield from ("", f"stack of {state}, innermost call first:")
        yield from (f"  {line}" for line in state.stack.splitlines())
    if children := [line for entry in entries for line in _children(entry)]:
        yield from ("", *children)
    for entry in entries:
        yield ""
        yield from _node(entry)


def _children(entry: Stored) -> list[str]:
    """Where processes below the workers were, such as the data loader that a rank waits for."""
    lines = incident_bundle.text_of(entry, REPORT).splitlines() if REPORT in entry.files else []
    return [line for line in lines if _OF_CHILD.match(line)]


def _node(entry: Stored) -> Iterator[str]:
    incident = entry.incident
    at = datetime.fromtimestamp(incident.time_s, timezone.utc).isoformat(sep=" ", timespec="seconds")
    node = "" if incident.node_rank is None else f", node {incident.node_rank}"
    yield f"{incident.kind} at {at} on {incident.host}{node}, generation {incident.generation}"
    if incident.missing:
        yield "not collected:"
        yield from (f"  {words}" for words in incident.missing)
    for name in entry.files_in(OUTPUT):
        yield f"last output of {name.partition('/')[2].removesuffix('.txt')}:"
        yield from (f"  {line}" for line in incident_bundle.text_of(entry, name).splitlines()[-_LINES:])
    for name in () if incident.states or incident.kind == FAILURE else entry.files_in(STACKS):
        yield f"processes and threads of {name.partition('/')[2].removesuffix('.txt')}:"
        lines = incident_bundle.text_of(entry, name).splitlines()
        yield from [line for line in lines if line.startswith(("==", "  thread "))][:_LINES]
    stacks = f"; stacks in {STACKS}/" if entry.files_in(STACKS) else ""
    yield f"{len(entry.files)} files, {in_units(entry.size_bytes)}, in {entry.folder}{stacks}"


def _states(entries: Sequence[Stored]) -> list[RankState]:
    """The ranks of all nodes, each as the node tells it that knows most of it: its own."""
    states: dict[int, RankState] = {}
    for state in (state for entry in entries for state in entry.incident.states):
        if state.rank not in states or _extent(state) > _extent(states[state.rank]):
            states[state.rank] = state
    return [states[rank] for rank in sorted(states)]


def _extent(state: RankState) -> tuple[int, int]:
    return sum(1 + len(group.last) for group in state.groups.values()), len(state.stack)


def _accused(entries: Sequence[Stored]) -> list[RankState]:
    """The ranks that the sentence is about; of what a person asked for, those that wait for no other."""
    first = entries[0].incident
    if first.kind == REQUEST:
        return [state for state in _states(entries) if state.doing is not Doing.COLLECTIVE]
    return [state for state in _states(entries) if state.rank in first.ranks]


def line_of(entries: Sequence[Stored]) -> str:
    """The line of code of the rank that the sentence is about: where it is, or what raised its exception."""
    first = entries[0].incident
    ranks = first.ranks or tuple(int(rank) for rank in _RANK.findall(first.sentence)[:1])
    for name, entry in ((f"{OUTPUT}/rank-{rank}.txt", entry) for rank in ranks for entry in entries):
        if first.kind == FAILURE and (line := _raised_at(entry, name)):
            return line
    places = (_PLACE.search(state.place) for state in (*_accused(entries), *_states(entries)))
    files = (line for entry in entries for name in entry.files_in(OUTPUT) if (line := _raised_at(entry, name)))
    line = next((place[0] for place in places if place is not None), "")
    return (next(files, "") or line if first.kind == FAILURE else line) or "-"


def _raised_at(entry: Stored, name: str) -> str:
    """The innermost call of the user's in the last traceback of a file."""
    text = incident_bundle.text_of(entry, name) if name in entry.files else ""
    frames = [Frame(file, int(line), function) for file, line, function in _FRAME.findall(text)]
    return next((str(frame) for frame in reversed(frames) if not frame.is_library), "")


def _cells(state: RankState) -> tuple[str, str, str]:
    """A rank in a table: its life, how far it is in the collectives of each group, and where it is."""
    far = [f"{group.title or name} #{group.done}/{group.entered}" for name, group in state.groups.items()]
    life = state.life.value + (f" ({state.how})" if state.how else "")
    return life, ", ".join(far) or "-", state.place or state.why or "-"
