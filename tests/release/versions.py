"""`make test-versions`: the main tests with other versions of torch, Python, MPI and OpenSSH.

    python -m tests.release.versions                      all rows, one after the other
    python -m tests.release.versions torch-2.4 mpi-5.0    these rows

Each row gets an environment, once, in the user's cache, and then runs each column's tests. The results replace the
same rows of docs/evidence.md.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "evidence.md"
BEGIN, END = "<!-- versions -->", "<!-- /versions -->"
NOT_RUN = "not run"
_SETUP = "tests/setup"
TORCH = {
    "warm start": ("tests/pytorch/test_fork_server.py", "tests/pytorch/test_first_import.py"),
    "`launch()`": ("tests/pytorch/launch",),
    "survival": (
        *("tests/survival/test_survival.py", "tests/survival/test_node_zero.py", "-k"),
        "costs_seconds_and_no_other and fixed or lost_for_good or without_node_0",
    ),
    "stops": (
        "tests/cli/test_torch.py",
        "tests/cli/test_signals.py",
        "-k",
        "stop or sigterm or signal or drain or saves",
    ),
    "kept state": ("tests/pytorch/test_generations.py", "tests/pytorch/test_survivors.py"),
    "parity with torchrun": (
        "tests/pytorch/test_parity.py",
        "tests/pytorch/test_torchrun_engine.py",
    ),
}
MPI = {
    "Open MPI jobs": ("tests/hosts/test_mpi_jobs.py",),
    "MPICH jobs": ("tests/hosts/test_other_mpis.py", "-k", "mpich"),
    "ssh and sshd": ("tests/mpi/ssh/test_sshd.py", "tests/mpi/ssh/test_users.py", "tests/mpi/ssh/test_unheard.py"),
    "rehearsal": ("tests/mpi/ssh/test_local.py",),
    "`kubectl exec`": ("tests/kubexec",),
}
_SAYS = {  # what tells the versions that a row really has
    "torch": "import platform, torch; print(f'torch {torch.__version__}, Python {platform.python_version()}')",
    "mpi": """
import re, subprocess
asked = {"Open MPI": "mpirun.openmpi --version", "MPICH": "mpirun.mpich --version", "OpenSSH": "ssh -V"}
for name, words in asked.items():
    said = subprocess.run(words.split(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True).stdout
    print(name, re.search(r"\\d+\\.\\d+[.\\d]*", said)[0], end=", ")
import platform
print("Python", platform.python_version())
""",
}


class Debian(Struct, frozen=True):
    """A root of another release, by tests/setup/debian.sh."""

    suite: str
    packages: str


class Row(Struct, frozen=True):
    """One selection of versions; without a root it is this machine's Debian and its Pythons."""

    python: str
    torch: str = ""
    root: Debian | None = None

    @property
    def suites(self) -> Mapping[str, Sequence[str]]:
        """The row's cells: the arguments of pytest, by the head of the column."""
        return TORCH if self.torch else MPI

    @property
    def inside(self) -> tuple[str, ...]:
        """What to put before a command."""
        return (f"{_SETUP}/debian.sh", self.root.suite, self.root.packages) if self.root else ()


_TOOLS = "iproute2,nftables,libnss-wrapper,procps,openssl"
SID = Debian("sid", f"python3.14-venv,{_TOOLS}")
TRIXIE = Debian("trixie", f"python3-venv,openmpi-bin,mpich,openssh-server,openssh-client,{_TOOLS}")
ROWS = {
    "torch-2.4": Row("3.10", "2.4.1"),
    "torch-2.8": Row("3.12", "2.8.0"),
    "torch-2.13": Row("3.11", "2.13.0"),
    "torch-2.13-sid": Row("3.14", "2.13.0", SID),
    "torch-2.14": Row("3.13", "2.14.1"),
    "torch-2.15": Row("3.13", "2.15.0"),
    "mpi-4.1": Row("3.11"),
    "mpi-5.0": Row("3.13", root=TRIXIE),
}


def run(row: Row) -> Iterator[list[str]]:
    """The row's cells but its name, after each suite: what it has, one for each suite, and when."""
    torch = row.torch and f"torch=={row.torch}"
    made = _done(*row.inside, f"{_SETUP}/pythons.sh", row.python, TORCH=torch)
    if made.returncode != 0:
        why = made.stderr.strip().splitlines()[-1].partition(": ")[2].replace("|", "/")
        label = f"torch {row.torch}, Python {row.python}" if row.torch else f"MPI, Python {row.python}"
        yield not_run(row, label, why)
        return
    python = (*row.inside, made.stdout.strip())
    has = _done(*python, "-c", _SAYS["torch" if row.torch else "mpi"]).stdout.strip()
    print(f"== {has}", flush=True)
    commit = _done("git", "rev-parse", "--short=8", "HEAD").stdout.strip()
    cells = dict.fromkeys(row.suites, "-")
    for name, words in row.suites.items():
        cells[name] = _cell(name, python, words)
        yield [has, *cells.values(), f"{time.strftime('%Y-%m-%d', time.gmtime())}, {commit}"]


def not_run(row: Row, label: str, why: str) -> list[str]:
    """The cells of a row that could not run."""
    print(f"== {label}: {NOT_RUN}: {why}", flush=True)
    return [label, *(["-"] * len(row.suites)), f"{NOT_RUN}: {why}"[:190]]


def _cell(name: str, python: Sequence[str], words: Sequence[str]) -> str:
    # Below this tree's folder, as a root of another Debian sees only that.
    with tempfile.TemporaryDirectory(prefix="versions-", dir=ROOT / ".venv") as folder:
        report = Path(folder, "report.xml")
        options = ("-n", "3", "--dist", "loadfile", "-p", "no:cacheprovider", "-q", f"--junitxml={report}")
        # Of two MPIs on one machine mpi4py would take any; tests of MPICH choose theirs.
        ended = _done(*python, "-m", "pytest", *options, *words, MPI4PY_MPIABI="openmpi")
        (ROOT / ".venv" / f"versions-{report.parent.name}.log").write_text(ended.stdout + ended.stderr)
        said = counted(report.read_text()) if report.exists() else "did not begin"
        print(f"   {name}: {said}", flush=True)
        for test in failed(report.read_text()) if report.exists() else ():
            print(f"      failed: {test}", flush=True)
    return said


def counted(report: str) -> str:
    """What pytest's report in JUnit's XML comes to, as a cell."""
    suite = ElementTree.fromstring(report).find("testsuite")
    assert suite is not None
    number = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    bad = number["failures"] + number["errors"]
    return told(number["tests"] - bad - number["skipped"], bad, number["skipped"])


def failed(report: str) -> list[str]:
    """The names of the tests that failed."""
    cases = ElementTree.fromstring(report).iter("testcase")
    return [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]


def told(passed: int, bad: int, skipped: int) -> str:
    """Counts as a cell."""
    parts = [
        f"{passed:,} passed",
        *([f"**{bad} failed**"] if bad else []),
        *([f"{skipped} skipped"] if skipped else []),
    ]
    return ", ".join(parts)


def between(text: str) -> tuple[str, str, str]:
    """A page's text before, in and after its generated part."""
    before, _, rest = text.partition(f"{BEGIN}\n")
    inner, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n", inner, f"{END}{after}"


def results(page: str) -> dict[str, list[str]]:
    """The rows of the page by their names."""
    lines = [line for line in between(page)[1].splitlines() if line.startswith("| `")]
    split = ([cell.strip() for cell in line.strip("|").split("|")] for line in lines)
    return {name.strip("`"): cells for name, *cells in split}


def tables(found: Mapping[str, Sequence[str]]) -> str:
    """The tables of the page."""
    parts = []
    for suites in (TORCH, MPI):
        head = ("row", "versions", *suites, "when")
        rows = [(f"`{name}`", *found[name]) for name, row in ROWS.items() if row.suites is suites and name in found]
        parts.append(_table(head, rows))
    return "\n" + "\n".join(parts) + "\n"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows)).replace(
        " --- ", "---"
    )


def write(path: Path, text: str) -> None:
    """Replace a page's generated part."""
    before, _, after = between(path.read_text(encoding="utf-8"))
    path.write_text(before + text + after, encoding="utf-8")


def _done(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = {**os.environ, **env}
    return subprocess.run(words, cwd=ROOT, env=given, stdin=subprocess.DEVNULL, capture_output=True, text=True)


def main(names: Sequence[str]) -> int:
    """Run the rows with these names, or all; 1 where a test failed, 3 where a row could not run."""
    unknown = sorted(set(names) - set(ROWS))
    if unknown:
        print(f"versions: unknown row {unknown[0]!r}; expected one of: {', '.join(ROWS)}", file=sys.stderr)
        return 2
    done: dict[str, list[str]] = {}
    for name in names or ROWS:
        for cells in run(ROWS[name]):
            done[name] = cells
            found = results(PAGE.read_text(encoding="utf-8")) | done
            write(PAGE, tables(found))
    print(tables(done))
    texts = [" ".join(cells) for cells in done.values()]
    if any("failed" in text or "did not begin" in text for text in texts):
        return 1
    return 3 if any(NOT_RUN in text for text in texts) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
