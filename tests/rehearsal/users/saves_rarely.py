"""A user's training script that does not survive: it resumes, but saves only now and then."""

import sys
import time
from pathlib import Path

checkpoint, last = Path(sys.argv[1]), int(sys.argv[2])
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
while step < last:
    time.sleep(0.01)
    step += 1
    print(f"step={step}", flush=True)
    if step % 1000 == 20:
        checkpoint.write_text(str(step))
