"""A user's training script that does not survive: it saves, and never looks at what it has saved."""

import sys
import time
from pathlib import Path

checkpoint, last = Path(sys.argv[1]), int(sys.argv[2])
for step in range(1, last + 1):
    time.sleep(0.02)
    print(f"step {step} loss {1 / step:.3f}", flush=True)
    if step % 10 == 0:
        checkpoint.write_text(str(step))
