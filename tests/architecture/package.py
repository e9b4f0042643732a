"""The package's own files and its drawing in CONTRIBUTING.md, read as text; nothing of the package is imported."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trainer_launch"
FILES = sorted(PACKAGE.rglob("*.py"))
OURS = "trainer_launch"
CONTRIBUTING = ROOT / "CONTRIBUTING.md"


def name_of(path: Path) -> str:
    """The path as CONTRIBUTING.md writes it: `supervisor/processes.py`."""
    return path.relative_to(PACKAGE).as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


@cache
def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> set[str]:
    """Every name a file imports, at its top or inside functions; `from a import b` gives both a and a.b."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno}: imports are absolute here"
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def targets_of(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def contract_files() -> list[Path]:
    """The files that make a `Contract(…)`, but for `contracts/__init__.py`, which lists them."""
    values = {path: [node.value for node in tree_of(path).body if isinstance(node, ast.Assign)] for path in FILES}
    return [
        path
        for path in FILES
        if path.name != "__init__.py" and any(ast.unparse(value).startswith("Contract(") for value in values[path])
    ]


def package_of(path: Path) -> str:
    """The folder that a file is in; those at the top are `entrances`."""
    inside = path.relative_to(PACKAGE)
    if len(inside.parts) > 1:
        return inside.parts[0]
    return "entrances"


@cache
def arrows() -> dict[str, frozenset[str]]:
    """What each package imports of the others, at the top of its files or inside functions."""
    files = {path.relative_to(PACKAGE).with_suffix("").as_posix().removesuffix("/__init__"): path for path in FILES}
    found: dict[str, set[str]] = {package_of(path): set() for path in FILES}
    for path in FILES:
        for name in imports_of(path):
            inside = name.removeprefix(f"{OURS}.").replace(".", "/")
            if name.startswith(f"{OURS}.") and inside in files:
                found[package_of(path)].add(package_of(files[inside]))
    return {package: frozenset(others - {package}) for package, others in found.items()}


def drawn_floors() -> list[list[str]]:
    """The packages of the table, from the top floor down."""
    floors: dict[int, list[str]] = {}
    rows = re.findall(r"^\| (\d+) \| `([a-z]+)/?` \|", CONTRIBUTING.read_text(encoding="utf-8"), re.MULTILINE)
    for floor, package in rows:
        floors.setdefault(int(floor), []).append(package)
    return [floors[floor] for floor in sorted(floors, reverse=True)]


def told_path(title: str) -> list[str]:
    """The modules that a section of CONTRIBUTING.md names, in order, each once."""
    section = CONTRIBUTING.read_text(encoding="utf-8").partition(f"## {title}\n")[2].partition("\n## ")[0]
    return list(dict.fromkeys(re.findall(r"`(\w+(?:/\w+)+\.py)`", section)))
