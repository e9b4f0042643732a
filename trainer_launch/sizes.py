"""Sizes for people. Pure."""

from __future__ import annotations

MIB = 1 << 20


def in_units(size_bytes: float) -> str:
    """In three digits and the unit that fits: 1.2 GiB."""
    units = ["GiB", "MiB", "KiB", "B"]
    while size_bytes >= 1000 and len(units) > 1:
        size_bytes /= 1024
        units.pop()
    return f"{size_bytes:.3g} {units[-1]}"


def in_mib(size_bytes: float) -> str:
    """In whole MiB, for sizes that are compared with each other."""
    return f"{size_bytes / MIB:.0f} MiB"
