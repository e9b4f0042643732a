"""Limits that the container has set for its processes, beside the cgroup's."""

from __future__ import annotations

import re
import resource
from dataclasses import dataclass
from pathlib import Path

_RESERVED = re.compile(r"([0-9]{1,5})(?:-([0-9]{1,5}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """None always means: no limit, or the kernel does not say."""

    nofile_soft: int | None
    nofile_hard: int | None
    memlock_bytes: int | None
    ephemeral_ports: tuple[int, int] | None  # the first and the last that the kernel picks from
    reserved_ports: tuple[tuple[int, int], ...] = ()  # that it never picks


def limits(root: Path = Path("/")) -> Limits:
    """Read them; `root` stands for `/` in tests."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Limits(
        nofile_soft=_finite(soft),
        nofile_hard=_finite(hard),
        memlock_bytes=_finite(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        ephemeral_ports=_range(_text(root / "proc/sys/net/ipv4/ip_local_port_range")),
        reserved_ports=_ranges(_text(root / "proc/sys/net/ipv4/ip_local_reserved_ports")),
    )


def _finite(limit: int) -> int | None:
    return None if limit == resource.RLIM_INFINITY else limit


def _range(text: str) -> tuple[int, int] | None:
    fields = text.split()
    return (int(fields[0]), int(fields[1])) if len(fields) == 2 and all(map(str.isdigit, fields)) else None


def _ranges(text: str) -> tuple[tuple[int, int], ...]:
    found = (_RESERVED.fullmatch(part.strip()) for part in text.split(","))
    return tuple((int(match[1]), int(match[2] or match[1])) for match in found if match)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""
