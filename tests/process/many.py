"""Run many plans in one launcher process and print what each came to, as JSON: `many.py codes|signals|trials N`."""

from __future__ import annotations

import json
import os
import sys

from tests.process.world import survivors, worker
from trainer_launch.model import Plan, Process
from trainer_launch.supervisor import outcome
from trainer_launch.supervisor.run_loop import supervise
from trainer_launch.supervisor.system import System

ROGUES = (  # each leaves something behind that does not listen to SIGTERM
    ["fork:ignore+rest", "exit:0"],
    ["fork:ignore+detach+rest", "exit:0"],
    ["fork:setsid+ignore+fork:rest+rest", "exit:0"],
    ["fork:detach+setsid+ignore+detach+fork:fork:rest+rest", "fork:rest", "exit:0"],
)
KILLING = (1, 2, 3, 4, 6, 8, 9, 10, 11, 13, 14, 15, 34, 64)


def one(system, argv):
    process = Process(name="main", argv=tuple(argv), env=dict(os.environ))
    return outcome.exit_code(supervise(Plan(engine="test", processes=(process,), grace_s=0.02), system))


def main():
    system = System()
    if sys.argv[1] == "codes":
        codes = {*range(0, 256, 15), 1, 2, 126, 127, 128, 137, 138, 143}
        result = {code: one(system, ["sh", "-c", f"exit {code}"]) for code in sorted(codes)}
    elif sys.argv[1] == "signals":
        result = {number: one(system, ["sh", "-c", f"ulimit -c 0; kill -{number} $$"]) for number in KILLING}
    else:
        result = {}
        for trial in range(int(sys.argv[2])):
            code = one(system, worker(*ROGUES[trial % len(ROGUES)]))
            result[trial] = [code, len(survivors(os.environ["TOKEN"])) - 1]  # but for ourselves
    system.close()
    print(json.dumps(result))


main()
