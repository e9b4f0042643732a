"""Fields have their units in their names, and the name of a module or a class is used once."""

from __future__ import annotations

import ast
import re
from collections import Counter

from tests.architecture.package import FILES, tree_of

MIRRORS = {"mpi_operator"}  # the controller has the name of its contract
# Seconds end in _s, bytes in _bytes; these names are torch's, Kubernetes's, Flyte's, or options that users write.
NOT_OURS = {"monitor_interval", "active_deadline_seconds", "hang_timeout", "wait_timeout"} | {
    *("nccl_heartbeat_timeout_sec", "nccl_collective_timeout_sec"),
}
NO_UNITS = re.compile(r"(seconds|secs?|_ms|millis|timeout|interval|duration|delay|_mb|_gb|_mib|_gib|_kb)$")


def test_no_two_modules_have_the_same_name_but_those_that_mirror_each_other() -> None:
    counts = Counter(path.stem for path in FILES if path.name != "__init__.py")
    assert {name for name, count in counts.items() if count > 1} <= MIRRORS


def test_no_two_classes_have_the_same_name() -> None:
    names = [node.name for path in FILES for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
    assert {name for name, count in Counter(names).items() if count > 1} == set()


def test_fields_have_their_units_in_their_names() -> None:
    for path in FILES:
        fields = {
            node.target.id
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
        assert {name for name in fields if NO_UNITS.search(name)} <= NOT_OURS, path
