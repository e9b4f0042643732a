"""The rooms of the package, as the imports make them and as CONTRIBUTING.md draws them."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from tests.architecture.package import FILES, PACKAGE, ROOT, imports_of

OURS = "trainer_launch"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def room_of(path: Path) -> str:
    """The folder that a file is in; those at the top are `entrances`."""
    inside = path.relative_to(PACKAGE)
    if len(inside.parts) > 1:
        return inside.parts[0]
    return "entrances"


@cache
def arrows() -> dict[str, frozenset[str]]:
    """What each room imports of the others, at the top of its files or inside functions."""
    files = {path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__"): path for path in FILES}
    found: dict[str, set[str]] = {room_of(path): set() for path in FILES}
    for path in FILES:
        for name in imports_of(path):
            inside = name.removeprefix(f"{OURS}.").replace(".", "/")
            if name.startswith(f"{OURS}.") and inside in files:
                found[room_of(path)].add(room_of(files[inside]))
    return {room: frozenset(others - {room}) for room, others in found.items()}


def drawn_floors() -> list[list[str]]:
    """The rooms of the drawing, from the top floor down."""
    drawing = CONTRIBUTING.read_text(encoding="utf-8").partition("<!-- floors -->")[2].partition("```\n")[2]
    return [
        re.findall(r"[a-z]+", line.partition("|")[0]) for line in drawing.partition("```")[0].splitlines() if line
    ]


def drawn_arrows() -> dict[str, frozenset[str]]:
    """The table below it: each room, and what it imports."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([a-z]+)/?` \| ([^|]*) \| [^|\n]* \|$", text, re.MULTILINE)
    return {room: frozenset(re.findall(r"[a-z]+", imports)) for room, imports in rows}
