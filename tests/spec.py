"""Print the tests as a specification: a heading for each folder, a line for each file, a sentence for each test.

`make spec` prints all of it, `make spec SPEC_ARGS="ssh mpi"` those folders. Nothing is imported or run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent


def files(folder: str = "*") -> list[Path]:
    """The files of tests of a folder, or of all, in the order of their names."""
    return sorted(TESTS.glob(f"{folder}/**/test_*.py"))


def purpose(path: Path) -> str:
    """What a file says it is for, in its first line."""
    return (ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").partition("\n")[0]


def sentences(path: Path) -> Iterator[str]:
    """The names of a file's tests, as sentences; a test that has a docstring says more in its first line."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            more = (ast.get_docstring(node) or "").partition("\n")[0]
            yield node.name.removeprefix("test_").replace("_", " ") + (f" — {more}" if more else "")


def main(folders: list[str]) -> None:
    """Print it."""
    for folder in folders or sorted({path.parent.name for path in files()}):
        print(f"\n# {folder}")
        for path in files(folder):
            print(f"\n{path.stem.removeprefix('test_')}: {purpose(path)}")
            for sentence in sentences(path):
                print(f"  - {sentence}")


if __name__ == "__main__":
    main(sys.argv[1:])
