"""How far each host has come on its way to take a daemon, and the table that shows it. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from trainer_launch.model.units import counted


class Stage(IntEnum):
    """What a host has to pass, in order."""

    DNS = 0
    PORT = 1
    BANNER = 2
    KEY = 3
    READY = 4


@dataclass(frozen=True, slots=True)
class Sight:
    """The stage that a host has not passed yet, and why."""

    stage: Stage = Stage.DNS
    why: str = "not asked yet"

    def __str__(self) -> str:
        return "ready" if self.stage is Stage.READY else f"{_NAMES[self.stage]}: {self.why}"


_NAMES = {Stage.DNS: "DNS", Stage.PORT: "port", Stage.BANNER: "banner", Stage.KEY: "key", Stage.READY: "ready"}
_PASSED, _STUCK, _AHEAD = "ok", "--", ""
_MAX_NAME = 40


def table(sights: Mapping[str, Sight], rows: int, columns: int) -> list[str]:
    """Lines of at most `columns` characters: who is stuck first, then the others, as many as fit."""
    hosts = sorted(sights, key=lambda host: sights[host].stage is Stage.READY)  # stable: the order of ranks stays
    shown = hosts if len(hosts) <= rows - 1 else hosts[: max(1, rows - 2)]
    width = min(_MAX_NAME, max(4, *(len(host) for host in shown)) if shown else 4)
    lines = [f"{'NAME':<{width}}  DNS  PORT  BANNER  KEY  READY"]
    lines += [_row(host, sights[host], width) for host in shown]
    rest = [sights[host] for host in hosts[len(shown) :]]
    if rest:
        ready = sum(sight.stage is Stage.READY for sight in rest)
        lines.append(f"… and {len(rest)} more, {ready} of them ready")
    return [line[:columns].rstrip() for line in lines]


def _row(host: str, sight: Sight, width: int) -> str:
    name = host if len(host) <= width else f"{host[: width - 1]}…"
    marks = [_PASSED if s < sight.stage else _STUCK if s == sight.stage else _AHEAD for s in Stage]
    if sight.stage is Stage.READY:
        return f"{name:<{width}}  {'ok':<4} {'ok':<5} {'ok':<7} {'':<4} yes"
    cells = f"{marks[0]:<4} {marks[1]:<5} {marks[2]:<7} {marks[3]:<4}"
    return f"{name:<{width}}  {cells} {sight.why}"


def summary(sights: Mapping[str, Sight], most: int = 5) -> str:
    """One line for a log."""
    stuck = [(host, sight) for host, sight in sights.items() if sight.stage is not Stage.READY]
    words = "; ".join(f"{host} ({sight})" for host, sight in stuck[:most])
    more = f"; and {len(stuck) - most} more" if len(stuck) > most else ""
    return f"{len(sights) - len(stuck)} of {counted(len(sights), 'host')} ready; waiting for {words}{more}"


def stuck(sights: Mapping[str, Sight]) -> dict[str, str]:
    """Where each host that is not ready is stuck."""
    return {host: str(sight) for host, sight in sights.items() if sight.stage is not Stage.READY}


def ready(sights: Mapping[str, Sight], among: Sequence[str] | None = None) -> frozenset[str]:
    """Who has passed everything."""
    hosts = sights if among is None else among
    return frozenset(host for host in hosts if sights.get(host, Sight()).stage is Stage.READY)
