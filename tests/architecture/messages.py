"""The texts in the package's code, with … in the place of what is filled in."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.architecture.package import FILES, tree_of

GAP = "…"
LOGGED = re.compile(r"%\.?[0-9]*[sdgfr]")  # what logging fills in


def text_of(node: ast.Constant | ast.JoinedStr) -> str:
    """One literal, as it would be printed."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else GAP for part in parts)


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Every literal; what is written as several in a row is one."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            yield " ".join(LOGGED.sub(GAP, text_of(node)).split())


@cache
def texts() -> str:
    """All of them, a line each."""
    return "\n".join(text for path in FILES for text in texts_of(tree_of(path)))
