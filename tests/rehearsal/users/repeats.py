"""A framework's launcher that shows once more what its worker has said when that fails, and starts it again."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from trainer_launch import report


def work(checkpoint: Path, last: int) -> None:
    """Train from the checkpoint on."""
    first = int(checkpoint.read_text()) if checkpoint.exists() else 0
    for step in range(first + 1, last + 1):
        time.sleep(0.05)
        checkpoint.with_suffix(".new").write_text(str(step))
        checkpoint.with_suffix(".new").replace(checkpoint)
        print(f"step {step}", flush=True)
        report(step=step)


def main() -> int:
    """Run the worker until it succeeds."""
    if os.environ.get("LOCAL_RANK"):
        work(Path(sys.argv[1]), int(sys.argv[2]))
        return 0
    said: list[str] = []
    while True:
        env = {**os.environ, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        worker = subprocess.Popen([sys.executable, *sys.argv], env=env, stdout=subprocess.PIPE, text=True)
        assert worker.stdout is not None
        for line in worker.stdout:
            said.append(line)
            print(line, end="", flush=True)
        if worker.wait() == 0:
            return 0
        print("".join(said), end="", flush=True)


if __name__ == "__main__":
    sys.exit(main())
