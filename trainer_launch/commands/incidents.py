"""`incidents`: what was collected about failures and hangs, in this container or in a copied directory."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import datetime, timezone

from trainer_launch.commands.options import Parsed
from trainer_launch.diagnosis import incident_bundle
from trainer_launch.diagnosis.incident_bundle import OUTPUT, STACKS, Stored
from trainer_launch.model.errors import UsageError
from trainer_launch.model.units import aligned, in_units
from trainer_launch.observability import incident_page, incident_watch

_WIDTH = 100
_LINES = 20


def main(parsed: Parsed) -> int:
    """The command.

    Raises:
        UsageError: there is no such directory or incident.
    """
    place = incident_watch.place_of(parsed.settings)
    if place is None:
        raise UsageError("--incident-dir is none, or there is no temporary directory: nothing is collected")
    action, wanted, as_json = (parsed.flags[name] for name in ("action", "id", "json"))
    if action == "list":
        entries = incident_bundle.stored(place)
        sys.stdout.write(
            _json([incident_bundle.as_json(entry) for entry in entries]) if as_json else _table(entries, place)
        )
        return 0
    if action == "page" and sys.stdout.isatty():
        raise UsageError("a page is a file; redirect it: trainer-launch incidents page >incident.html")
    entry = incident_bundle.chosen(place, wanted)
    entries = incident_bundle.moment(place, entry)
    if action == "page":
        sys.stdout.buffer.write(incident_page.page(entries).encode(errors="replace"))
    elif as_json:
        others = [each.id for each in entries if each is not entry]
        sys.stdout.write(_json({**incident_bundle.as_json(entry), "same_moment": others}))
    else:
        sys.stdout.write("".join(f"{line}\n" for line in _shown(entries)))
    return 0


def _json(value: object) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _table(entries: list[Stored], place: str) -> str:
    if not entries:
        return f"no incidents in {place}\n"
    rows = [("ID", "KIND", "SENTENCE")]
    for entry in entries:
        sentence = entry.incident.sentence
        rows.append(
            (entry.id, entry.incident.kind, sentence if len(sentence) <= _WIDTH else f"{sentence[: _WIDTH - 1]}…")
        )
    return "".join(f"{line}\n" for line in aligned(rows))


def _shown(entries: list[Stored]) -> Iterator[str]:
    """One moment's incidents: the sentence, the ranks of all nodes, then what each node has."""
    incident = entries[0].incident
    yield incident.sentence
    helps = {True: "a restart may help", False: "a restart will not help", None: ""}[incident.restart_helps]
    if words := "; ".join(filter(None, (incident.reason and f"reason={incident.reason}", helps))):
        yield words
    if any(entry.incident.states for entry in entries):
        yield ""
        rows = [(str(state.rank), *incident_page.cells_of(state)) for state in incident_page.states_of(entries)]
        yield from aligned([("RANK", "STATE", "COLLECTIVES", "PLACE"), *rows])
    for entry in entries:
        yield ""
        yield from _node(entry)


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
    stacks = f"; stacks in {STACKS}/" if entry.files_in(STACKS) else ""
    yield f"{len(entry.files)} files, {in_units(entry.size_bytes)}, in {entry.folder}{stacks}"
