"""A user's training script that does not survive: it takes no notice of a request to stop."""

import signal
import sys
import time
from pathlib import Path

signal.signal(signal.SIGTERM, signal.SIG_IGN)
checkpoint, last = Path(sys.argv[1]), int(sys.argv[2])
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
while step < last:
    time.sleep(0.02)
    step += 1
    print(f"step {step}", flush=True)
    checkpoint.with_suffix(".new").write_text(str(step))  # it is killed at any moment
    checkpoint.with_suffix(".new").replace(checkpoint)
