"""Train nothing, but visibly, until there is a file `enough`: a checkpoint at each step, and a line about it.

Copied into the job's folder, where it keeps all it writes: `checkpoint`, `steps` (time, step, number of workers, a
word that differs for each start of the workers), and `worker-HOST-LOCAL_RANK` with its process id.
With SAVES_ON_SIGTERM, all workers exit with 0 after the step in which one of them gets SIGTERM.
"""

from __future__ import annotations

import os
import secrets
import signal
import time

import torch
import torch.distributed as dist

FOLDER = os.path.dirname(os.path.abspath(__file__))
STEP_S = 0.05


def main() -> None:
    """All steps from the checkpoint on."""
    _write(f"worker-{os.environ['HOSTNAME']}-{os.environ['LOCAL_RANK']}", str(os.getpid()))
    dist.init_process_group("gloo")
    signals: list[int] = []
    if "SAVES_ON_SIGTERM" in os.environ:
        signal.signal(signal.SIGTERM, lambda signum, _frame: signals.append(signum))
    is_first, start = dist.get_rank() == 0, secrets.token_hex(4)
    step = torch.tensor([_checkpoint() if is_first else 0])
    dist.broadcast(step, 0)
    number = int(step)
    while True:
        number += 1
        is_enough = is_first and os.path.exists(os.path.join(FOLDER, "enough"))
        total = torch.tensor([1, int(is_enough), len(signals)])
        dist.all_reduce(total)
        assert int(total[0]) == dist.get_world_size()
        if is_first:
            _write("checkpoint", str(number))
            with open(os.path.join(FOLDER, "steps"), "a") as file:
                file.write(f"{time.monotonic()} {number} {int(total[0])} {start}\n")
        if int(total[1]) or int(total[2]):
            break
        time.sleep(STEP_S)
    dist.barrier()
    os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here


def _checkpoint() -> int:
    path = os.path.join(FOLDER, "checkpoint")
    if not os.path.exists(path):
        return 0
    with open(path) as file:
        return int(file.read())


def _write(name: str, text: str) -> None:
    path = os.path.join(FOLDER, name)
    with open(path + ".new", "w") as file:
        file.write(text)
    os.replace(path + ".new", path)


if __name__ == "__main__":
    main()
