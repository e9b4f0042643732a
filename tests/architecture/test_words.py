"""Every module says in its first line what it is for, and is called what it is."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.architecture.package import FILES, ROOT, name_of, tree_of

MOST = 116
NO_NAMES = re.compile(r"(^|_)(utils?|common|base|core|managers?|helpers?|misc|tools?|lib|shared|stuff)$")
# Seconds end in _s and bytes in _bytes; the first names are torch's and Kubernetes's, and users write them.
NOT_OURS = {"monitor_interval", "active_deadline_seconds", "hang_timeout", "rejoin_timeout", "wait_timeout"} | {
    *("nccl_heartbeat_timeout_sec", "nccl_collective_timeout_sec"),  # Flyte's names, as the two before
}
NO_UNITS = re.compile(r"(seconds|secs?|_ms|millis|timeout|interval|duration|delay|_mb|_gb|_mib|_gib|_kb)$")

each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


def first_line(path: Path) -> str:
    return (ast.get_docstring(tree_of(path)) or "").partition("\n")[0]


@each_file
def test_the_first_line_says_what_the_file_is_for(path: Path) -> None:
    line = first_line(path)
    assert re.fullmatch(r"[^\s].{19,}[.]", line), line
    assert len(line) + len('"""') <= MOST


def test_no_two_files_are_for_the_same() -> None:
    lines = [first_line(path) for path in FILES]
    assert {line for line in lines if lines.count(line) > 1} == set()


@each_file
def test_a_file_is_not_called_by_what_says_nothing(path: Path) -> None:
    assert not [part for part in path.relative_to(ROOT).with_suffix("").parts if NO_NAMES.search(part)]


@each_file
def test_fields_have_their_units_in_their_names(path: Path) -> None:
    fields = {
        node.target.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {name for name in fields if NO_UNITS.search(name)} <= NOT_OURS
