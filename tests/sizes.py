"""Print how large the project is, beside 0.2 and the goals of 0.3: `make size`. A size never fails a test."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from trainer_launch.model.settings import Settings

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trainer_launch"
# What runs a node's workers; as the files are rewritten, their successors take their places here.
NODES_SIDE = (
    "supervisor/processes.py",
    "supervisor/run_loop.py",
    "supervisor/run_observer.py",
    "pytorch/node.py",
    "pytorch/worker_ends.py",
    "pytorch/worker_group.py",
)


def figures() -> list[tuple[str, int, int, int]]:
    """Each figure: its name, its value in 0.2, now, and the goal of 0.3."""
    files = list(PACKAGE.rglob("*.py"))
    tests = [path for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    names = Counter(re.findall(r"^class ([A-Z]\w*)", "\n".join(map(read, files)), re.MULTILINE))
    return [
        ("lines of Python in the package", 56_700, lines(files), 42_000),
        ("files of Python in the package", 248, len(files), 190),
        ("lines under tests/ and benchmarks/", 71_200, lines(tests), 55_000),
        ("lines of a node's side", 2_054, lines(PACKAGE / name for name in NODES_SIDE), 1_350),
        ("lines of pytorch/", 6_388, lines((PACKAGE / "pytorch").rglob("*.py")), 3_500),
        ("lines of preflight/", 9_696, lines((PACKAGE / "preflight").rglob("*.py")), 6_000),
        ("lines of rehearsal/", 10_057, lines((PACKAGE / "rehearsal").rglob("*.py")), 7_000),
        ("options", 64, len(Settings.model_fields), 44),
        ("class names used more than once", 30, sum(count > 1 for count in names.values()), 0),
        ("words in docs/", 27_200, words((ROOT / "docs").glob("*.md")), 14_000),
        ("words in RESULTS.md", 11_100, words([ROOT / "benchmarks" / "RESULTS.md"]), 1_500),
    ]


def read(path: Path) -> str:
    """A file's text."""
    return path.read_text(encoding="utf-8")


def lines(paths: Iterable[Path]) -> int:
    """How many lines the files have together."""
    return sum(len(read(path).splitlines()) for path in paths)


def words(paths: Iterable[Path]) -> int:
    """How many words the pages have together, as `wc -w` counts."""
    return sum(len(read(path).split()) for path in paths)


def main() -> None:
    """Print the table."""
    print(f"{'':36} {'0.2':>8} {'now':>8} {'0.3 goal':>9}")
    for name, before, now, goal in figures():
        print(f"{name:36} {before:8,} {now:8,} {goal:9,}")


if __name__ == "__main__":
    main()
