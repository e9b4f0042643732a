"""Print how large the package and its tests are, each figure beside its limit in `tests/limits.json`: `make size`.

A figure may exceed its limit by 2 %; `tests/architecture/test_sizes.py` fails beyond that. Whoever makes a figure
smaller lowers its limit, and whoever needs more raises it, in the same change.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from pathlib import Path

from tests.architecture.package import CONTRIBUTING, FILES, ROOT, small_with_one_importer, told_path
from trainer_launch.host import runtime_directory as names

LIMITS = json.loads((ROOT / "tests" / "limits.json").read_text(encoding="utf-8"))
MARGIN = 1.02
# What our own processes leave for each other.
OUR_VARIABLES = (
    *(names.VARIABLE, names.MPI_RUN, names.NODE_LABEL, names.INSIDE),
    *(names.IN_COLOR, names.LISTEN_AT),
)
OUR_FILES = (names.LAUNCHER, names.FAILURE, names.NEWS, names.STACKS, names.PROGRESS, names.FUNCTION)


def figures() -> dict[str, int]:
    """Each figure by its name."""
    return {
        "lines of Python in the package": sum(len(path.read_text(encoding="utf-8").splitlines()) for path in FILES),
        "files of Python in the package": len(FILES),
        "modules under 100 lines with one importer": len(small_with_one_importer()),
        "module names used twice": len(names_used_twice()),
        "process roles in a torch pod": len(process_roles()),
        "variables between our own processes": len(OUR_VARIABLES),
        "files between our own processes": len(OUR_FILES),
        "modules on the path of a worker's death": len(told_path("A worker's death")),
        "modules on the path of a node's loss": len(told_path("A node's loss")),
        "modules on a command line's way to a plan": len(told_path("A command line's way to a plan")),
        "files under tests": len(test_files()),
    }


def names_used_twice() -> dict[str, int]:
    """The basenames of more than one module, packages' own apart."""
    counts = Counter(path.stem for path in FILES if path.name != "__init__.py")
    return {name: count for name, count in counts.items() if count > 1}


def process_roles() -> list[str]:
    """The rows of the table in CONTRIBUTING.md."""
    table = CONTRIBUTING.read_text(encoding="utf-8").partition("| process |")[2].partition("\n\n")[0]
    return re.findall(r"^\| ([a-zA-Z0-9 ]+) \|", table, re.MULTILINE)


def test_files() -> list[Path]:
    """All files under tests/ that are not made by running them."""
    made = {"__pycache__", ".pytest_cache"}
    return [path for path in (ROOT / "tests").rglob("*") if path.is_file() and not made & set(path.parts)]


def main() -> int:
    """Print the table; 1 if a figure is beyond its limit."""
    print(f"{'':45} {'now':>8} {'limit':>8} {'target':>8}")
    for name, now in figures().items():
        limit, target = LIMITS["figures"][name]["limit"], LIMITS["figures"][name]["target"]
        print(f"{name:45} {now:8,} {limit:8,} {target:8,}{'  TOO MUCH' if now > limit * MARGIN else ''}")
    return int(any(now > LIMITS["figures"][name]["limit"] * MARGIN for name, now in figures().items()))


if __name__ == "__main__":
    sys.exit(main())
