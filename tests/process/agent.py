"""Stands for torch's agent: starts workers, cleans the slate when they have died. `agent.py SPEC_AS_JSON`."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer_launch.child import slate

logging.basicConfig(level="INFO", format="[agent] %(message)s", stream=sys.stderr)
spec = json.loads(sys.argv[1])
run_dir, notes = spec["run_dir"], Path(os.environ["NOTES"])
marked = {**os.environ, "TRAINER_LAUNCH_RUN_DIR": run_dir}
clean = slate.Slate(run_dir)
clean()  # the first start
helper = subprocess.Popen(spec["helper"], env=marked)  # below the agent: a fork-server, say
subprocess.run(spec["stranger"], check=True)  # no mark, and an orphan of the launcher's
workers = [subprocess.Popen(argv, env=marked, start_new_session=True) for argv in spec["workers"]]
for worker in workers:
    worker.wait()
deadline = time.monotonic() + 10
while time.monotonic() < deadline and notes.read_text().count("left\n") < spec["left"]:
    time.sleep(0.005)
clean()
assert helper.poll() is None
helper.kill()
helper.wait()
with notes.open("a") as file:
    file.write("cleaned\n")
while spec.get("stay"):
    signal.pause()
