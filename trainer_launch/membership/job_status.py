"""How the job stands, for who asks: made of the coordinator's state. Pure."""

from __future__ import annotations

from typing import TypeAlias

from trainer_launch.membership import protocol as msg
from trainer_launch.membership.state import Key, Node, Phase, State, has_finished, is_working

Progress: TypeAlias = "tuple[float | None, float]"  # the part that is done, and how long ago that was said
ROWS_BYTES = 40_000  # leaves room in a line for all else
_ROW_BYTES = 60  # a row without its host
_LOST, _MISSING = "lost", "missing"


def answer(query: msg.StatusQuery, state: State, now_s: float, progress: Progress | None) -> msg.FromServer:
    """What to say to who asks."""
    if query.version != msg.VERSION:
        return msg.Refused(f"the coordinator speaks version {msg.VERSION}, not {query.version}", retry=False)
    if query.job != state.settings.job:
        return msg.Refused(f"this coordinator serves job {state.settings.job}, not {query.job}", retry=False)
    return status(state, now_s, progress)


def status(state: State, now_s: float, progress: Progress | None = None) -> msg.Status:
    """The whole table, or as much of it as fits into a line."""
    known = sorted(state.nodes.values(), key=lambda node: node.order)
    rows = [*(_row(state, node, now_s) for node in known), *_never_seen(state)]
    done, age_s = progress if progress is not None else (None, None)
    ended = state.end
    return msg.Status(
        phase=state.phase.value,
        generation=state.generation,
        restarts=state.restarts,
        max_restarts=state.settings.max_restarts,
        min_nodes=state.settings.min_nodes,
        max_nodes=state.settings.max_nodes,
        n_nodes=len(rows),
        nodes=_fitting(rows),
        progress=done,
        progress_age_s=age_s,
        end=None if ended is None else ended.reason if isinstance(ended, msg.GiveUp) else "all nodes are done",
    )


def _row(state: State, node: Node, now_s: float) -> msg.Row:
    word = _state_of(state, node)
    away_s = None if word != _LOST or node.lost_s is None else round(max(0.0, now_s - node.lost_s), 1)
    return node.node_rank, node.host, word, away_s


def _state_of(state: State, node: Node) -> str:
    if _is_done(state, node.key):
        return "done"
    if node.peer is None:
        return _LOST
    if is_working(state, node.key):
        return "running" if state.phase is Phase.RUNNING else "starting"
    return "joined" if node.joined else "connected"


def _is_done(state: State, key: Key) -> bool:
    if state.phase is Phase.OVER:
        return isinstance(state.end, msg.Finished) and state.run is not None and key in state.run.done
    return has_finished(state, key)


def _never_seen(state: State) -> list[msg.Row]:
    """Of a job whose nodes have ranks, those that have not called yet."""
    ranks = {node.node_rank for node in state.nodes.values()}
    if None in ranks:
        return []
    return [(rank, "", _MISSING, None) for rank in range(state.settings.min_nodes) if rank not in ranks]


def _fitting(rows: list[msg.Row]) -> tuple[msg.Row, ...]:
    """As many as fit, in their order; those that are not there matter most."""
    room = ROWS_BYTES
    chosen: set[int] = set()
    for i in sorted(range(len(rows)), key=lambda i: rows[i][2] not in (_LOST, _MISSING)):
        room -= _ROW_BYTES + 2 * len(rows[i][1])  # an escaped character takes two
        if room < 0:
            break
        chosen.add(i)
    return tuple(row for i, row in enumerate(rows) if i in chosen)
