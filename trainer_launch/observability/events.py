"""The events of `--events` as flat values. Pure; docs/observing.md lists them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import TypeAlias

from trainer_launch.model import Exit, Outcome
from trainer_launch.model.exit_codes import retryable
from trainer_launch.model.redaction import redact_text
from trainer_launch.observability.progress import Progress
from trainer_launch.supervisor import events as ev
from trainer_launch.supervisor import outcome as ends
from trainer_launch.supervisor.state import Phase, State

LINE_BYTES = 4096  # PIPE_BUF: one write, never torn, never interleaved
TEXT_CHARS = 600
EVENTS = (
    "started",
    "waiting",
    "unresolved",
    "resolved",
    "spawned",
    "spawn_failed",
    "exited",
    "hung",
    "signal",
    "stopping",
    "restarting",
    "generation_formed",
    "generation_ended",
    "workers_started",
    "worker_failed",
    "coordinator",
    "coordinator_away",
    "given_up",
    "progress",
    "warning",
    "finished",
)

Value: TypeAlias = "str | int | float | bool | tuple[str, ...] | Mapping[str, float] | None"
Event: TypeAlias = tuple[str, Mapping[str, Value]]


def of_step(event: ev.Event, before: State, after: State) -> tuple[Event, ...]:
    """What a step of the supervisor tells."""
    told: list[Event] = []
    match event:
        case ev.GateOpened():
            told.append(("resolved", {}))
        case ev.Unresolved(text=text):
            told.append(("unresolved", {"text": text}))
        case ev.Exited(exit=end):
            told.append(("exited", _end(end)))
        case ev.SpawnFailed(process=name, code=code, text=text):
            told.append(("spawn_failed", {"process": name, "exit_code": code, "text": text}))
        case ev.Hung(text=text):
            told.append(("hung", {"text": text}))
        case ev.Signalled(number=number) if before.phase is not Phase.DONE:
            told.append(("signal", {"signal": number, "asks_to_stop": after.asked > before.asked}))
    rung = _rung(after)
    if rung is not None and rung != _rung(before):
        told.append(("stopping", {"rung": rung}))
    if after.restarts > before.restarts:
        told.append(("restarting", {"restart": after.restarts, "restarts_at_most": after.plan.restarts}))
    return tuple(told)


def of_progress(latest: Progress) -> Event:
    """What a training process says of itself."""
    return "progress", {
        "rank": latest.rank,
        "step": latest.step,
        "progress": latest.progress,
        "eta_s": latest.eta_s,
        "metrics": latest.metrics,
    }


def of_outcome(outcome: Outcome) -> Event:
    """The last line."""
    failure, code = outcome.failure, ends.exit_code(outcome)
    values: dict[str, Value] = {
        "verdict": outcome.verdict.value,
        "exit_code": code,
        "retryable": retryable(code) if failure is None or failure.again is None else failure.again,
        "reason": failure.reason if failure else outcome.verdict.value,
        "message": failure.message if failure else None,
        "rank": failure.rank if failure else None,
        "failed_node": failure.node_rank if failure else None,
        "host": failure.host if failure else None,
        "signal": failure.signal if failure else None,
        "stop_signal": outcome.stop_signal,
        "seconds": round(outcome.took_s, 3),
        "attempt": outcome.attempt,
        "survivors": len(outcome.survivors),
    }
    return "finished", values


def line(time_s: float, node: int | None, event: Event) -> bytes:
    """One event as one line of JSON, at most 4,096 bytes; without secrets by their looks."""
    name, values = event
    head = {"time": rfc3339_ms(time_s), "event": name, "node": node}
    text = _render({**head, **_shown(values, TEXT_CHARS)})
    for chars in (TEXT_CHARS // 4, TEXT_CHARS // 20):
        if len(text) > LINE_BYTES:  # escaped at its worst a character takes twelve bytes
            short = {key: value for key, value in values.items() if not isinstance(value, tuple | Mapping)}
            text = _render({**head, **_shown(short, chars), "is_cut": True})
    return text


def strict(value: float) -> float | str:
    """A number as every JSON reader takes it: the three that JSON lacks become words."""
    return value if math.isfinite(value) else str(value)


def rfc3339_ms(time_s: float) -> str:
    """UTC, to the millisecond."""
    when = datetime.fromtimestamp(time_s, timezone.utc)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond // 1000:03d}Z"


def _shown(values: Mapping[str, Value], chars: int) -> dict[str, object]:
    return {key: _shown_one(value, chars) for key, value in values.items()}


def _shown_one(value: Value, chars: int) -> object:
    if isinstance(value, str):
        return redact_text(value)[:chars]
    if isinstance(value, float):
        return strict(value)
    if isinstance(value, Mapping):
        return {name: strict(number) for name, number in value.items()}
    if isinstance(value, tuple):
        return [redact_text(text)[:chars] for text in value]
    return value


def _render(fields: Mapping[str, object]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), allow_nan=False).encode() + b"\n"


def _end(end: Exit) -> Mapping[str, Value]:
    return {"process": end.process, "exit_code": end.exit_code, "signal": end.signal}


def _rung(state: State) -> str | None:
    """How far a stop has come."""
    if state.phase is Phase.KILLING:
        return "kill"
    if state.phase is not Phase.STOPPING:
        return None
    return "everyone" if state.everyone_told else "leaders"
