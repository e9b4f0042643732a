"""A user's training script that survives: it resumes, saves often, and once more when asked to stop."""

import json
import os
import signal
import sys
import time
from pathlib import Path

checkpoint, last = Path(sys.argv[1]), int(sys.argv[2])
asked: list[int] = []
signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
step = json.loads(checkpoint.read_text())["step"] if checkpoint.exists() else 0
if step:
    print(f"resumed at step {step}", flush=True)
while step < last and not asked:
    time.sleep(0.02)
    step += 1
    print(f"step {step} loss {1 / step:.3f}", flush=True)
    if asked or step % 10 == 0 or step == last:
        beside = checkpoint.with_suffix(".new")
        beside.write_text(json.dumps({"step": step}))
        os.replace(beside, checkpoint)
if step < last:
    sys.exit(143)
