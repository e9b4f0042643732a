"""A user's training script that does not survive: asked to stop it saves, and leaves as if all were done."""

import signal
import sys
import time
from pathlib import Path
from types import FrameType

checkpoint, last = Path(sys.argv[1]), int(sys.argv[2])
step = int(checkpoint.read_text()) if checkpoint.exists() else 0


def leave(_number: int, _frame: FrameType | None) -> None:
    checkpoint.write_text(str(step))
    sys.exit(0)


signal.signal(signal.SIGTERM, leave)
while step < last:
    time.sleep(0.02)
    step += 1
    print(f"Step: {step}", flush=True)
