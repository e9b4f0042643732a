"""Forks programs from a real fork-server as the agent does, without torch elastic around it.

Each line of standard input is a request: {"argv", "is_module", "environment", "folder"}; each is answered by how it
ended. The first line is the server's settings.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys

from trainer_launch.child.server import Server
from trainer_launch.child.worker import Program


def main() -> None:
    del sys.path[0]  # our own folder; the agent has none either
    folder = os.environ["TRAINER_LAUNCH_RUN_DIR"]
    sys.modules["__mark__"] = sys  # only a fork of this process has it
    server = Server(json.loads(sys.stdin.readline()), folder)
    server.start()
    server.wait()
    print(json.dumps({"reason": server.reason, "apart": server.apart}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        program = Program(is_module=request["is_module"], folder=folder)
        program.environments = {0: {"RANK": "0", **request["environment"]}}
        program.outputs = {0: [f"{request['folder']}/out", f"{request['folder']}/err"]}
        worker = multiprocessing.get_context("forkserver").Process(target=program, args=("0", *request["argv"]))
        worker.start()
        worker.join()
        print(json.dumps({"code": worker.exitcode}), flush=True)


if __name__ == "__main__":
    main()
