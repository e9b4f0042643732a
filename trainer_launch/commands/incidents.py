"""`incidents`: what was collected about failures and hangs, in this container or in a copied directory."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from datetime import datetime, timezone

from trainer_launch.commands.options import Parsed
from trainer_launch.model.collectives import Life, RankState
from trainer_launch.model.errors import UsageError
from trainer_launch.model.units import aligned, in_units
from trainer_launch.observability import incident_watch
from trainer_launch.supervisor import incident_bundle
from trainer_launch.supervisor.incident_bundle import OUTPUT, STACKS, Stored

HELP = "show what was collected about failures and hangs"
ABOUT = "Use it with kubectl exec, or on a copied directory."
USAGE = "[list | show [ID] | bundle [ID]] [options]"
EXAMPLES = """examples:
  kubectl exec POD -- trainer-launch incidents
  kubectl exec POD -- trainer-launch incidents show          # the newest
  kubectl exec POD -- trainer-launch incidents bundle >incident.tar.gz
  trainer-launch incidents show --incident-dir ./copied
"""
_ACTIONS = ("list", "show", "bundle")
_WIDTH = 100
_LINES = 20


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What only `incidents` knows."""
    parser.add_argument(
        "action", nargs="?", default="list", choices=_ACTIONS, metavar="ACTION", help=argparse.SUPPRESS
    )
    parser.add_argument("id", nargs="?", metavar="ID", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print JSON")


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
        found = incident_bundle.stored(place)
        sys.stdout.write(
            _json([incident_bundle.as_json(one) for one in found]) if as_json else _table(found, place)
        )
        return 0
    one = incident_bundle.chosen(place, wanted)
    if action == "bundle":
        if sys.stdout.isatty():
            raise UsageError("a bundle is binary; redirect it: trainer-launch incidents bundle >incident.tar.gz")
        incident_bundle.pack(one, sys.stdout.buffer)
        return 0
    sys.stdout.write(
        _json(incident_bundle.as_json(one)) if as_json else "".join(f"{line}\n" for line in _shown(one))
    )
    return 0


def _json(value: object) -> str:
    return json.dumps(value, indent=2, allow_nan=False) + "\n"


def _table(found: list[Stored], place: str) -> str:
    if not found:
        return f"no incidents in {place}\n"
    rows = [("ID", "KIND", "SENTENCE")]
    for one in found:
        sentence = one.incident.sentence
        rows.append(
            (one.id, one.incident.kind, sentence if len(sentence) <= _WIDTH else f"{sentence[: _WIDTH - 1]}…")
        )
    return "".join(f"{line}\n" for line in aligned(rows))


def _shown(one: Stored) -> Iterator[str]:
    incident = one.incident
    yield incident.sentence
    yield ""
    at = datetime.fromtimestamp(incident.time_s, timezone.utc).isoformat(sep=" ", timespec="seconds")
    node = "" if incident.node_rank is None else f", node {incident.node_rank}"
    yield f"{incident.kind} at {at} on {incident.host}{node}, generation {incident.generation}"
    if incident.restart_helps is not None:
        yield "a restart may help" if incident.restart_helps else "a restart will not help"
    if incident.states:
        yield ""
        yield from aligned([("RANK", "STATE", "COLLECTIVES", "PLACE"), *map(_row, incident.states)])
    if incident.missing:
        yield ""
        yield "not collected:"
        yield from (f"  {words}" for words in incident.missing)
    for name in incident_bundle.files_of(one, OUTPUT):
        yield ""
        yield f"last output of {name.partition('/')[2].removesuffix('.txt')}:"
        yield from (f"  {line}" for line in incident_bundle.text_of(one, name).splitlines()[-_LINES:])
    yield ""
    stacks = incident_bundle.files_of(one, STACKS)
    yield f"{len(one.files)} files, {in_units(incident_bundle.size_of(one.folder))}, in {one.folder}" + (
        f"; stacks of each worker in {STACKS}/" if stacks else ""
    )


def _row(state: RankState) -> tuple[str, str, str, str]:
    far = [f"{group.title or name} #{group.done}/{group.entered}" for name, group in state.groups.items()]
    life = state.life.value if state.life is not Life.DEAD else f"dead ({state.how})"
    return str(state.rank), life, ", ".join(far) or "-", state.place or "-"
