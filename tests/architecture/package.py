"""The package's own files, read as text: what the house tests look at. Nothing of it is imported here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "trainer_launch"
FILES = sorted(PACKAGE.rglob("*.py"))
PLUGIN_FOLDERS = ("contracts", "planning/engines", "preflight/container", "preflight/gpu")


def name_of(path: Path) -> str:
    """The path as the house's drawing writes it: `supervisor/state_machine.py`."""
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


def is_plugin(path: Path) -> bool:
    """Whether a file is a contract, an engine or a check: those define NAME and what they do; helpers do not."""
    body = tree_of(path).body
    has_name = any(
        isinstance(node, ast.Assign | ast.AnnAssign) and "NAME" in map(ast.unparse, targets_of(node))
        for node in body
    )
    return has_name and any(
        isinstance(node, ast.FunctionDef) and node.name in {"read", "plan", "check"} for node in body
    )


def targets_of(node: ast.AST) -> list[ast.expr]:
    """What a statement assigns to or deletes."""
    if isinstance(node, ast.Assign | ast.Delete):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign | ast.AugAssign) else []


def plugins_in(folder: str) -> list[Path]:
    return [path for path in FILES if path.parent == PACKAGE / folder and is_plugin(path)]


def functions_of(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node
