"""`local --report`: a rehearsal as a page or a picture, and the verdict on the script."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from trainer_launch.host import atomic_file, logs
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.report.history import Chronicle
from trainer_launch.rehearsal.report.overview import Story, tell
from trainer_launch.rehearsal.report.summary import cost_lines
from trainer_launch.rehearsal.script_checks import judge
from trainer_launch.rehearsal.verdict import Verdict

ENDINGS = (".html", ".png")
_DRAW = (
    "import sys; '' in sys.path and sys.path.remove(''); "
    "from trainer_launch.rehearsal.report.timeline_png import main; sys.exit(main())"
)
_LIMIT_S = 120.0  # the first time, matplotlib looks at all fonts
_NO_MATPLOTLIB = 3  # exit code of the child
_MENDED = "pip install 'trainer-launch[report]', or name an .html file, which needs nothing"
_MODE = 0o644


def check(paths: Sequence[str]) -> None:
    """Find out before the job starts whether its story can be written.

    Raises:
        UsageError: another ending, a picture without matplotlib, or a folder that is not there or not ours.
    """
    for path in paths:
        if Path(path).suffix.lower() not in ENDINGS:
            raise UsageError(f"invalid value {path!r} for --report: expected a file that ends with .html or .png")
        if Path(path).suffix.lower() == ".png" and importlib.util.find_spec("matplotlib") is None:
            raise UsageError(f"--report {path!r}: a picture needs matplotlib: {_MENDED}")
        if os.path.isdir(path):
            raise UsageError(f"--report {path!r} is a directory; name a file in it")
        try:
            with tempfile.NamedTemporaryFile(dir=os.path.dirname(os.path.realpath(path)), prefix=".report-"):
                pass
        except OSError as problem:
            raise UsageError(
                f"--report {path!r} cannot be written: {problem.strerror}; name a file in a writable directory"
            ) from None


def conclude(chronicle: Chronicle, code: int, paths: Sequence[str], max_lost_steps: int) -> int:
    """Print what the faults cost and which checks failed, write the reports; return the rehearsal's exit code."""
    story = tell(chronicle)
    verdict = judge(story, max_lost_steps)
    sys.stderr.write(cost_lines(story) + verdict.text())
    for path in paths:
        _write(path, story, verdict)
    return verdict.exit_code(code)


def _write(path: str, story: Story, verdict: Verdict) -> None:
    """One report; no rehearsal ends otherwise for want of it."""
    is_page = Path(path).suffix.lower() == ".html"
    problem = _page(path, story, verdict) if is_page else _picture(path, story, verdict)
    if problem:
        logs.warn(f"--report: {path} was not written: {problem}")
    else:
        logs.warn(f"report: {path}")


def _page(path: str, story: Story, verdict: Verdict) -> str:
    from trainer_launch.rehearsal.report.html_page import page

    try:
        atomic_file.replace(os.path.realpath(path), page(story, verdict).encode(errors="replace"), _MODE)
    except OSError as problem:
        return problem.strerror or str(problem)
    return ""


def _picture(path: str, story: Story, verdict: Verdict) -> str:
    """Drawn by a child that may take its time and its memory; why not, if not."""
    from trainer_launch.rehearsal.report.timeline_data import drawing

    argv = (sys.executable, "-c", _DRAW, path)
    told = json.dumps(drawing(story, verdict))
    try:
        drawn = subprocess.run(
            argv, input=told, capture_output=True, text=True, errors="replace", timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        return str(problem)
    if drawn.returncode == _NO_MATPLOTLIB:
        return f"a picture needs matplotlib: {_MENDED}"
    last = (drawn.stdout.strip() or drawn.stderr.strip()).splitlines()[-1:] or ["no word"]
    return last[0][:200] if drawn.returncode else ""
