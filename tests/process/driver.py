"""Run one plan under the supervisor, as the command line would: `python driver.py PLAN_AS_JSON`.

Besides the plan's own fields: `last_words` (a path).
"""

from __future__ import annotations

import json
import logging
import os
import sys

from trainer_launch.model import Destination, Plan, Process, signal_policy
from trainer_launch.supervisor import outcome
from trainer_launch.supervisor.processes import Processes
from trainer_launch.supervisor.run_loop import ProgramLoop
from trainer_launch.supervisor.run_observer import RunObserver
from trainer_launch.supervisor.system import System


def read(process):
    """JSON has no numbers as keys."""
    streams = {int(stream): Destination(**to) for stream, to in process.get("streams", {}).items()}
    return {**process, "streams": streams}


def plan_of(spec):
    processes = tuple(
        Process(**{"name": "main", "env": dict(os.environ), **read(p)}) for p in spec.pop("processes")
    )
    spec["signals"] = signal_policy.parse(spec.get("signals", ""))
    return Plan(engine="test", processes=processes, **{"grace_s": 5.0, **spec})


def main():
    logging.basicConfig(level=os.environ.get("LEVEL", "INFO"), format="[launcher] %(message)s", stream=sys.stderr)
    spec = json.loads(sys.argv[1])
    last_words = spec.pop("last_words", None)
    ended = ProgramLoop(Processes(plan_of(spec), System(), RunObserver())).run()
    logging.info("%s", outcome.summary(ended))
    if last_words:
        outcome.write_termination_message(outcome.termination_message(ended), last_words)
    sys.exit(outcome.exit_code(ended))


if __name__ == "__main__":
    main()
