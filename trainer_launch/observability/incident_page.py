"""An incident as one HTML page: how far each rank was, stacks, last output, and facts of the nodes.

Incidents of several nodes of the same moment are one page. Alike ranks of a large job share a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from html import escape

from msgspec import Struct

from trainer_launch.diagnosis import incident_bundle
from trainer_launch.diagnosis.collectives import RankState
from trainer_launch.diagnosis.incident_bundle import FAILURE, HOST, OUTPUT, RECORDER, STACKS, Stored
from trainer_launch.diagnosis.stacks import Frame
from trainer_launch.model.redaction import redact_text
from trainer_launch.model.units import counted, named_ranks
from trainer_launch.observability.html import clean, document, table

_EACH_MOST = 32  # ranks that have a row each; beyond, alike ones share it
_ROWS_MOST = 64  # ranks, nodes and other processes that are shown
_TEXT_CHARS = 32 << 10  # of one file
_RANK = re.compile(r"\brank (\d{1,9})\b")
_PLACE = re.compile(r"[^ ]+:\d+ \([^)]*\)$")  # ends a place
_FRAME = re.compile(
    r'^(?:\[rank\d+\]:)? *File "([^"\n]+)", line (\d{1,9}), in (.+)$', re.MULTILINE
)  # of an exception
_SHEET = """
h1{font-size:21px}header.incident{border-color:var(--bad)}
details{border-bottom:1px solid var(--line);padding:5px 0}summary{cursor:pointer;overflow-wrap:anywhere}
summary b{font-weight:600}pre{font:12px/1.4 ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;
background:var(--card);padding:10px 12px;margin:6px 0 12px;border-radius:6px;white-space:pre-wrap;
overflow-wrap:anywhere;max-height:480px;overflow:auto}
h4{margin:8px 0 0;font-size:13px;color:var(--soft);font-weight:600}
@media print{pre{max-height:none}}
"""


class _Row(Struct, frozen=True, kw_only=True):
    states: tuple[RankState, ...]
    is_accused: bool

    @property
    def ranks(self) -> list[int]:
        return [state.rank for state in self.states]

    @property
    def label(self) -> str:
        first = self.states[0]
        if len(self.states) > 1:
            return named_ranks(self.ranks)
        return f"rank {first.rank}" + ("" if first.node is None else f" (node {first.node})")

    @property
    def description(self) -> str:
        first = self.states[0]
        return ", ".join(filter(None, (life_of(first), first.place or first.why)))


def page(entries: Sequence[Stored]) -> str:
    """The page of one moment's incidents, one of each node."""
    first = entries[0].incident
    states = states_of(entries)
    rows = _rows(states, first.ranks)
    cells = [(row.label, *map(clean, cells_of(row.states[0]))) for row in rows]
    body = [
        _header(entries),
        table("Ranks", ("rank", "state", "collectives ended/entered", "place"), cells),
        *_ranks(entries[:_ROWS_MOST], rows),
        *_facts(entries[:_ROWS_MOST]),
        _missing(entries),
    ]
    return document(f"{first.kind}: {first.sentence}", _SHEET, body, "Written by trainer-launch incidents page.")


def states_of(entries: Sequence[Stored]) -> list[RankState]:
    """The ranks of all nodes, each as the node tells it that knows most of it: its own."""
    states: dict[int, RankState] = {}
    for state in (state for entry in entries for state in entry.incident.states):
        if state.rank not in states or _extent(state) > _extent(states[state.rank]):
            states[state.rank] = state
    return [states[rank] for rank in sorted(states)]


def _extent(state: RankState) -> tuple[int, int]:
    return sum(1 + len(group.last) for group in state.groups.values()), len(state.stack)


def accused(entries: Sequence[Stored]) -> list[RankState]:
    """The ranks that the sentence is about."""
    return [state for state in states_of(entries) if state.rank in entries[0].incident.ranks]


def line_of(entries: Sequence[Stored]) -> str:
    """The line of code of the rank that the sentence is about: where it is, or what raised its exception."""
    first = entries[0].incident
    ranks = first.ranks or tuple(int(rank) for rank in _RANK.findall(first.sentence)[:1])
    for name, entry in ((f"{OUTPUT}/rank-{rank}.txt", entry) for rank in ranks for entry in entries):
        if first.kind == FAILURE and (line := _raised_at(entry, name)):
            return line
    places = (_PLACE.search(state.place) for state in (*accused(entries), *states_of(entries)))
    files = (line for entry in entries for name in entry.files_in(OUTPUT) if (line := _raised_at(entry, name)))
    line = next((place[0] for place in places if place is not None), "")
    return (next(files, "") or line if first.kind == FAILURE else line) or "-"


def _raised_at(entry: Stored, name: str) -> str:
    """The innermost call of the user's in the last traceback of a file."""
    text = incident_bundle.text_of(entry, name) if name in entry.files else ""
    frames = [Frame(file, int(line), function) for file, line, function in _FRAME.findall(text)]
    return next((str(frame) for frame in reversed(frames) if not frame.is_library), "")


def life_of(state: RankState) -> str:
    """Whether the rank lives, and how it ended."""
    return state.life.value + (f" ({state.how})" if state.how else "")


def cells_of(state: RankState) -> tuple[str, str, str]:
    """A rank in a table: its life, how far it is in the collectives of each group, and where it is."""
    far = [f"{group.title or name} #{group.done}/{group.entered}" for name, group in state.groups.items()]
    return life_of(state), ", ".join(far) or "-", state.place or state.why or "-"


def _rows(states: Sequence[RankState], accused: Iterable[int]) -> list[_Row]:
    named, alike = set(accused), dict[object, list[RankState]]()
    for state in states:
        far = tuple((name, group.done, group.entered) for name, group in sorted(state.groups.items()))
        is_single = len(states) <= _EACH_MOST or state.rank in named
        key = state.rank if is_single else (state.life, state.how, state.place, state.why, far)
        alike.setdefault(key, []).append(state)
    rows = [_Row(states=tuple(each), is_accused=each[0].rank in named) for each in alike.values()]
    if len(states) > _EACH_MOST:
        rows.sort(key=lambda row: (not row.is_accused, len(row.states), row.ranks[0]))
    return rows


def _header(entries: Sequence[Stored]) -> str:
    first = entries[0].incident
    at = datetime.fromtimestamp(first.time_s, timezone.utc).isoformat(sep=" ", timespec="seconds")
    by_node = sorted(entries, key=lambda entry: entry.incident.node_rank or 0)
    hosts = ", ".join(dict.fromkeys(clean(entry.incident.host) for entry in by_node[:8]))
    about = [
        f"{first.kind} at {at}",
        f"job {clean(first.job)}" if first.job else "",
        f"generation {first.generation}",
    ]
    about += [f"{counted(len(entries), 'node')} ({hosts}{', …' if len(entries) > 8 else ''})"]
    about += [f"reason {clean(first.reason)}" if first.reason else ""]
    helps = {True: "A restart may help.", False: "A restart will not help.", None: ""}[first.restart_helps]
    sentence = " ".join(redact_text(first.sentence).split())
    return (
        f'<header class="incident"><h1>{escape(sentence)}</h1><p>{escape("; ".join(filter(None, about)))}</p>'
        f"{f'<p><b>{helps}</b></p>' if helps else ''}</header>"
    )


def _ranks(entries: Sequence[Stored], rows: Sequence[_Row]) -> Iterator[str]:
    """Stacks and last output: of each rank, or of one of those that are alike; then of what has no rank."""
    yield "<section><h2>Stacks and last output</h2>"
    ranked = {f"rank-{rank}.txt" for row in rows for rank in row.ranks}
    for row in rows[:_ROWS_MOST]:
        parts = "".join(_of_process(entry, f"rank-{row.ranks[0]}.txt") for entry in entries)
        parts = parts or _titled("stack", row.states[0].stack)
        more = f"; shown: rank {row.ranks[0]}" if len(row.states) > 1 else ""
        summary = f"<b>{escape(row.label)}</b> {escape(clean(row.description))}{more}"
        yield f"<details{' open' * row.is_accused}><summary>{summary}</summary>{parts or 'nothing'}</details>"
    for entry in entries:
        names = {name.partition("/")[2] for part in (OUTPUT, STACKS) for name in entry.files_in(part)}
        for file in sorted(names - ranked)[:_ROWS_MOST]:
            summary = f"<b>{escape(file.removesuffix('.txt'))}</b> {escape(clean(entry.incident.host))}"
            is_open = " open" * (not rows)
            yield f"<details{is_open}><summary>{summary}</summary>{_of_process(entry, file)}</details>"
    yield "</section>"


def _of_process(entry: Stored, file: str) -> str:
    return _text(entry, f"{OUTPUT}/{file}", "last output") + _text(entry, f"{STACKS}/{file}", "stacks")


def _facts(entries: Sequence[Stored]) -> Iterator[str]:
    yield "<section><h2>Facts of each node</h2>"
    for entry in entries:
        node = clean(entry.incident.host) + (
            "" if entry.incident.node_rank is None else f" (node {entry.incident.node_rank})"
        )
        names = [*entry.files_in(HOST), "report.txt", "environment.txt"]
        parts = "".join(_text(entry, name, name.rpartition("/")[2].removesuffix(".txt")) for name in names)
        dumps = len(entry.files_in(RECORDER))
        more = f"; {counted(dumps, 'dump')} of the flight recorder" if dumps else ""
        yield f"<details><summary><b>{escape(node)}</b> {escape(entry.id)}{more}</summary>{parts}</details>"
    yield "</section>"


def _text(entry: Stored, name: str, title: str) -> str:
    """The end of a file below its title; "" when it is not there."""
    if name not in entry.files:
        return ""
    return _titled(title, incident_bundle.text_of(entry, name)[-_TEXT_CHARS:].strip("\n"))


def _titled(title: str, text: str) -> str:
    return f"<h4>{escape(clean(title))}</h4><pre>{escape(redact_text(text))}</pre>" if text else ""


def _missing(entries: Sequence[Stored]) -> str:
    words = dict.fromkeys(clean(text) for entry in entries for text in entry.incident.missing)
    items = "".join(f"<li>{escape(text)}</li>" for text in [*words][:200])
    return f'<section><h2>Not collected</h2><ul class="note">{items}</ul></section>' if items else ""
