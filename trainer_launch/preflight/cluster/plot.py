"""--plot: the picture of the pair tests, drawn by a child that may take its time and its memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from trainer_launch.host import logs
from trainer_launch.preflight.cluster.heatmap_data import Seen, drawing

_DRAWS = Path(__file__).parents[1] / "children" / "heatmap.py"
_LIMIT_S = 120.0  # the first time, matplotlib looks at all fonts
_WHYS = {3: "it needs matplotlib: pip install 'trainer-launch[report]'"}  # by the child's exit code


def plot(path: str, seen: Seen | None) -> None:
    """Draw it, or say why not: no job ends for want of a picture."""
    if seen is None or not seen.tests:
        logs.warn(f"--plot: {path} was not written: no pairs of nodes were tested")
        return
    argv = (sys.executable, str(_DRAWS), path)
    try:
        drawn = subprocess.run(
            argv,
            input=json.dumps(drawing(seen)),
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as problem:
        logs.warn(f"--plot: {path} was not written: {problem}")
        return
    if drawn.returncode:
        last = (drawn.stdout.strip() or drawn.stderr.strip()).splitlines()[-1:] or ["no word"]
        logs.warn(f"--plot: {path} was not written: {_WHYS.get(drawn.returncode, last[0][:200])}")
