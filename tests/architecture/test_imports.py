"""Imports go down the floors of CONTRIBUTING.md only; and who may touch the outside world."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture.package import (
    FILES,
    OURS,
    arrows,
    contract_files,
    drawn_floors,
    imports_of,
    module_of,
    name_of,
    package_of,
    targets_of,
    tree_of,
)

PURE_FOLDERS = ("contracts/",)
SAYS_PURE = re.compile(r"\b(Pure|No effects|Values only)\b|, purely|as a pure")
FIRST_WORDS = re.compile(r'r?"""(.*?)(?:"""|\n\n)', re.DOTALL)  # of a module's docstring
OUTSIDE_WORLD = {"os", "subprocess", "socket", "time", "pathlib"}
OF_WORKERS = (
    *("pytorch/forked_process.py", "pytorch/first_import.py", "pytorch/front_end.py"),
    "pytorch/generations.py",
)
OF_CHILDREN = ("preflight/children/",)
READS_ENVIRONMENT = (
    *("cli.py", "commands/", "model/settings.py", "planning/reading.py", *OF_CHILDREN, *OF_WORKERS),
    *("pytorch/error_file.py", "pytorch/fork_server_process.py", "pytorch/function_launch.py"),
    *("observability/report.py", "supervisor/output.py"),
    *("rehearsal/kubelet.py", "rehearsal/pod_isolation.py", "rehearsal/first_process.py"),
    "observability/live.py",
)
WRITES_ENVIRONMENT = (*OF_CHILDREN, *OF_WORKERS)  # its own process's, before the program begins


def is_pure(path: Path) -> bool:
    """Whether a file is in a folder of deciders, or says of itself in its first lines that it is one."""
    first = FIRST_WORDS.match(path.read_text(encoding="utf-8"))
    words = first[1] if first else ""
    return name_of(path).startswith(PURE_FOLDERS) or SAYS_PURE.search(words) is not None


def test_every_package_is_on_one_floor_of_the_table() -> None:
    assert sorted(package for floor in drawn_floors() for package in floor) == sorted(arrows())


@pytest.mark.parametrize("package", sorted(set(map(package_of, FILES))))
def test_a_package_imports_only_from_lower_floors(package: str) -> None:
    """So there is no cycle between packages, either."""
    floor = {name: number for number, names in enumerate(drawn_floors()) for name in names}
    assert [other for other in arrows()[package] if floor[package] >= floor[other]] == []


def test_no_file_imports_itself_by_way_of_others() -> None:
    """Also by imports inside functions and for type checking: a cycle is one subject in several files."""
    below = {module_of(path): files_imported_by(path) for path in FILES}
    while ends := [name for name, others in below.items() if not others & below.keys()]:
        for name in ends:
            del below[name]
    while tops := [name for name in below if not any(name in others for others in below.values())]:
        for name in tops:
            del below[name]
    assert list(below) == []


def files_imported_by(path: Path) -> set[str]:
    """The modules of ours that a file imports; of a package only what `__init__.py` itself has counts as that."""
    modules, found = set(map(module_of, FILES)), set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & modules
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names & modules or {node.module}
    return found


def test_contracts_never_import_each_other() -> None:
    modules = set(map(module_of, contract_files()))
    for path in FILES:
        if name_of(path).startswith("contracts/") and path.name != "__init__.py":
            others = imports_of(path) & (modules - {module_of(path)})
            assert not others, f"{name_of(path)} imports {others}; share by a module without a Contract"


def test_deciders_cannot_do_anything() -> None:
    for path in filter(is_pure, FILES):
        names = imports_of(path)
        if all(name.startswith("pathlib.Pure") for name in names if name.startswith("pathlib.")):
            names -= {"pathlib", "pathlib.PurePath", "pathlib.PurePosixPath"}
        assert not {name.split(".")[0] for name in names} & OUTSIDE_WORLD, path


def test_nothing_imports_what_runs_in_children() -> None:
    """These programs are started by path."""
    for path in FILES:
        assert [name for name in imports_of(path) if f"{name}.".startswith(f"{OURS}.preflight.children.")] == [], (
            path
        )


def test_the_environment_is_read_in_one_place() -> None:
    others = [path for path in FILES if not name_of(path).startswith(READS_ENVIRONMENT)]
    assert {name_of(path): uses for path in others if (uses := [*uses_of_environment(tree_of(path))])} == {}


def test_the_environment_is_written_nowhere() -> None:
    others = [path for path in FILES if not name_of(path).startswith(WRITES_ENVIRONMENT)]
    assert {name_of(path): uses for path in others if (uses := [*writes_to_environment(tree_of(path))])} == {}


ONE_PLACE = {
    "os.replace": ("host/files.py",),
    "/environ": ("host/process_tree.py", "mpi/host_access.py"),  # the last is a shell's text
}


@pytest.mark.parametrize("words", ONE_PLACE)
def test_what_has_one_place_is_done_there(words: str) -> None:
    places = {name_of(path) for path in FILES if words in path.read_text(encoding="utf-8")}
    assert places == set(ONE_PLACE[words]), "use the function that is there"


def uses_of_environment(tree: ast.AST) -> Iterator[str]:
    """Where `os.environ`, `os.getenv` or their like occur."""
    words = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in words and ast.unparse(node.value) == "os":
            yield f"line {node.lineno}: os.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (f"line {node.lineno}: os.{alias.name}" for alias in node.names if alias.name in words)


def writes_to_environment(tree: ast.AST) -> Iterator[str]:
    """Where `os.environ` is assigned to, deleted from, or changed by a method."""
    changes = {"update", "pop", "popitem", "setdefault", "clear", "__setitem__", "__delitem__"}
    for node in ast.walk(tree):
        if any(ast.unparse(target).startswith("os.environ") for target in targets_of(node)):
            yield f"line {getattr(node, 'lineno', '?')}: assigned or deleted"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called, owner = node.func.attr, ast.unparse(node.func.value)
            if (owner == "os.environ" and called in changes) or (
                owner == "os" and called in {"putenv", "unsetenv"}
            ):
                yield f"line {node.lineno}: {owner}.{called}()"
