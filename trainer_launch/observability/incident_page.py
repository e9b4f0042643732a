"""An incident as one HTML page: ranks against collectives around the moment, stacks, last output, and facts.

Incidents of several nodes of the same moment are one page. Alike ranks of a large job share a row.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from html import escape

from msgspec import Struct

from trainer_launch.diagnosis import incident_bundle
from trainer_launch.diagnosis.collectives import Doing, RankState
from trainer_launch.diagnosis.incident_bundle import FAILURE, HOST, OUTPUT, RECORDER, REQUEST, STACKS, Stored
from trainer_launch.diagnosis.stacks import Frame
from trainer_launch.model.redaction import redact_text
from trainer_launch.model.units import counted, named_ranks
from trainer_launch.observability.html import Scale, axis, clean, document, seconds, table

_EACH_MOST = 32  # ranks that have a row each; beyond, alike ones share it
_ROWS_MOST = 64  # ranks, nodes and other processes that are shown
_SPAN_S = 86_400.0  # of the chart
_LABEL_CHARS = 24  # beside the chart
_LEAD = 0.25  # of the longest wait, shown before it
_TEXT_CHARS = 32 << 10  # of one file
_NS = 1e9
_RANK = re.compile(r"\brank (\d{1,9})\b")
_PLACE = re.compile(r"[^ ]+:\d+ \([^)]*\)$")  # ends a place
_FRAME = re.compile(
    r'^(?:\[rank\d+\]:)? *File "([^"\n]+)", line (\d{1,9}), in (.+)$', re.MULTILINE
)  # of an exception
_SHEET = """
h1{font-size:21px}header.incident{border-color:var(--bad)}.axis span:first-child{transform:translateX(-100%)}
.chart{--label:calc(min(var(--chars),26) * 7.4px + 12px)}
.tick{position:absolute;top:2px;bottom:2px;min-width:2px;background:var(--g)}
.s.wait{background:color-mix(in srgb,var(--g) 38%,transparent);color:var(--fg);font-weight:500;text-align:left;
padding-left:6px;border-left:3px solid var(--g);text-overflow:ellipsis}
.s.never{background:repeating-linear-gradient(135deg,var(--badbg) 0 5px,transparent 5px 10px);color:var(--bad);
box-shadow:inset 0 0 0 1px var(--bad);text-align:left;padding-left:6px;text-overflow:ellipsis}
.name.hit-rank{color:var(--bad);font-weight:700}
.g0{--g:#0072b2}.g1{--g:#e69f00}.g2{--g:#009e73}.g3{--g:#cc79a7}.g4{--g:#56b4e9}
.legend i.g0,.legend i.g1,.legend i.g2,.legend i.g3,.legend i.g4{background:var(--g)}
.legend i.never{background:repeating-linear-gradient(135deg,var(--badbg) 0 5px,transparent 5px 10px);
box-shadow:inset 0 0 0 1px var(--bad)}
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
    def short_label(self) -> str:
        return self.label if len(self.label) <= _LABEL_CHARS else counted(len(self.states), "rank")

    @property
    def description(self) -> str:
        first = self.states[0]
        return ", ".join(filter(None, (life_of(first), first.place or first.why)))


def page(entries: Sequence[Stored]) -> str:
    """The page of one moment's incidents, one of each node."""
    first = entries[0].incident
    states = states_of(entries)
    rows = _rows(states, first.ranks)
    now_ns = max(entry.incident.time_s for entry in entries) * _NS
    cells = [(row.label, *map(clean, cells_of(row.states[0]))) for row in rows]
    body = [
        _header(entries),
        *_chart(rows, states, now_ns),
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
        if state.rank not in states or _known(state) > _known(states[state.rank]):
            states[state.rank] = state
    return [states[rank] for rank in sorted(states)]


def _known(state: RankState) -> tuple[int, int]:
    return sum(1 + len(group.last) for group in state.groups.values()), len(state.stack)


def accused(entries: Sequence[Stored]) -> list[RankState]:
    """The ranks that the sentence is about; of what a person asked for, those that wait for no other."""
    first = entries[0].incident
    if first.kind == REQUEST:
        return [state for state in states_of(entries) if state.doing is not Doing.COLLECTIVE]
    return [state for state in states_of(entries) if state.rank in first.ranks]


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
    """Whether it lives, and how it ended."""
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


def _chart(rows: Sequence[_Row], states: Sequence[RankState], now_ns: float) -> Iterator[str]:
    """Who entered which collective when, and who waits in which; positions are percentages of the time shown."""
    names = sorted({name for state in states for name in state.groups})
    groups = [group for state in states for group in state.groups.values()]
    times_ns = [collective.at_ns for group in groups for collective in group.last]
    if not times_ns:
        yield '<p class="note">No collectives are known: the flight recorder was off, or nobody answered.</p>'
        return
    colours = {name: f"g{number % 5}" for number, name in enumerate(names)}
    titles = {n: next((s.groups[n].title for s in states if n in s.groups and s.groups[n].title), n) for n in names}
    stuck = _stuck(states)
    waits_s = [max(0.0, (now_ns - since) / _NS) for _, since in stuck.values()]
    span_s = max(waits_s) * (1 + _LEAD) if waits_s else (now_ns - min(times_ns)) / _NS
    drawing = _Drawing(Scale(min(max(span_s, 0.001), _SPAN_S)), now_ns, colours, titles, stuck)
    chars = max(5, *(len(row.short_label) for row in rows))
    yield '<section><h2>Ranks and collectives</h2><ul class="legend">'
    yield from (f'<li><i class="{colours[n]}"></i>{escape(clean(titles[n]))}</li>' for n in names[:5])
    yield '<li>narrow: entered; wide: entered and still waits</li><li><i class="never"></i>never entered</li></ul>'
    yield f'<div class="chart" style="--chars:{chars}"><div class="plot">'
    yield from map(drawing.lane, rows[:_ROWS_MOST])
    yield f"</div>{axis(drawing.scale, before=True)}</div>"
    if len(rows) > _ROWS_MOST:
        yield f'<p class="note">… and {counted(len(rows) - _ROWS_MOST, "row")} more.</p>'
    yield '<p class="note">Seconds before the incident. The clocks of nodes may differ.</p></section>'


def _stuck(states: Sequence[RankState]) -> dict[str, tuple[int, int]]:
    """Of each group that waits: the number of the collective, and when the first rank entered it."""
    stuck: dict[str, tuple[int, int]] = {}
    for state in states:
        for name, group in state.groups.items():
            waiting = group.at(group.done + 1) if group.entered > group.done else None
            if waiting is not None:
                stuck[name] = min(stuck.get(name, (waiting.number, waiting.at_ns)), (waiting.number, waiting.at_ns))
    return stuck


class _Drawing(Struct, frozen=True):
    scale: Scale
    now_ns: float
    colours: Mapping[str, str]
    titles: Mapping[str, str]
    stuck: Mapping[str, tuple[int, int]]

    def lane(self, row: _Row) -> str:
        name = f'<div class="name{" hit-rank" * row.is_accused}" title="{escape(clean(row.description))}">'
        marks = "".join(mark for group in self.colours for mark in self._marks(row, group))
        return f'<div class="row lane">{name}{escape(row.short_label)}</div><div class="track">{marks}</div></div>'

    def _at(self, at_ns: float) -> float:
        return self.scale.end_s - (self.now_ns - at_ns) / _NS

    def _marks(self, row: _Row, name: str) -> Iterator[str]:
        groups = [state.groups[name] for state in row.states if name in state.groups]
        entered: dict[int, list[int]] = {}
        for collective in (each for group in groups for each in group.last):
            entered.setdefault(collective.number, []).append(collective.at_ns)
        done = min((group.done for group in groups), default=0)
        title, number_of_stuck = clean(self.titles[name]), self.stuck.get(name, (0, 0))[0]
        for number, times in sorted(entered.items()):
            begin_s, end_s = self._at(min(times)), self._at(max(times))
            if end_s >= 0 and number <= done:
                words = f"#{number} of {title}, {seconds(self.scale.end_s - begin_s)} before"
                place = self.scale.span(begin_s, end_s)
                yield f'<i class="tick {self.colours[name]}" style="{place}" title="{escape(words)}"></i>'
        waiting = min((number for number in entered if number > done), default=None)
        if waiting is not None:
            begin_s = self._at(min(entered[waiting]))
            operation = next(at.operation for group in groups if (at := group.at(waiting)) is not None)
            text = f"waits in {clean(operation)} #{waiting} of {title} for {seconds(self.scale.end_s - begin_s)}"
            yield self._bar("wait", name, begin_s, text)
        elif number_of_stuck > max([done, *(group.entered for group in groups)], default=0) and groups:
            text = f"never entered #{number_of_stuck}: {clean(row.description)}"
            yield self._bar("never", name, self._at(self.stuck[name][1]), text)

    def _bar(self, kind: str, name: str, begin_s: float, text: str) -> str:
        place, words = self.scale.span(begin_s, self.scale.end_s), escape(text)
        return f'<span class="s {kind} {self.colours[name]}" style="{place}" title="{words}">{words}</span>'


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
        who = clean(entry.incident.host) + (
            "" if entry.incident.node_rank is None else f" (node {entry.incident.node_rank})"
        )
        names = [*entry.files_in(HOST), "report.txt", "environment.txt"]
        parts = "".join(_text(entry, name, name.rpartition("/")[2].removesuffix(".txt")) for name in names)
        dumps = len(entry.files_in(RECORDER))
        more = f"; {counted(dumps, 'dump')} of the flight recorder" if dumps else ""
        yield f"<details><summary><b>{escape(who)}</b> {escape(entry.id)}{more}</summary>{parts}</details>"
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
