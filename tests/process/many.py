"""Run many plans in one launcher process: `many.py N` prints, as JSON, the exit code and the survivors of each."""

from __future__ import annotations

import json
import os
import sys

from tests.process.world import survivors, worker
from trainer_launch.model import Plan, Process
from trainer_launch.supervisor import outcome
from trainer_launch.supervisor.processes import Processes
from trainer_launch.supervisor.run_loop import ProgramLoop
from trainer_launch.supervisor.run_observer import RunObserver
from trainer_launch.supervisor.system import System

ROGUES = (  # each leaves something behind that does not listen to SIGTERM
    ["fork:ignore+rest", "exit:0"],
    ["fork:ignore+detach+rest", "exit:0"],
    ["fork:setsid+ignore+fork:rest+rest", "exit:0"],
    ["fork:detach+setsid+ignore+detach+fork:fork:rest+rest", "fork:rest", "exit:0"],
)


def one(system, argv):
    process = Process(name="main", argv=tuple(argv), env=dict(os.environ))
    plan = Plan(engine="test", processes=(process,), grace_s=0.02)
    return outcome.exit_code(ProgramLoop(Processes(plan, system, RunObserver())).run())


def main():
    system, result = System(), []
    for trial in range(int(sys.argv[1])):
        code = one(system, worker(*ROGUES[trial % len(ROGUES)]))
        result.append([code, len(survivors(os.environ["TOKEN"])) - 1])  # but for ourselves
    system.close()
    print(json.dumps(result))


main()
