"""Train nothing, slowly and visibly, until there is a file `enough`; a checkpoint every few steps, a line for each.

Copied into the job's folder, where it keeps: `checkpoint`, `steps` (time, step, number of workers, a word that
differs for each start of the workers), and `worker-HOST-LOCAL_RANK` with its process id. When it dies it leaves
behind what others have to clear: a shared memory segment, and a helper in a session of its own.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time

import torch
import torch.distributed as dist

import trainer_launch

FOLDER = os.path.dirname(os.path.abspath(__file__))
STEP_S = 0.2
CHECKPOINT_STEPS = 5  # tests/soak/steps.py knows it too
GRADIENTS = 4096  # 16 KiB on every link at every step, for slow links to be felt
SEGMENT_BYTES = 262_144


def main() -> None:
    """All steps from the checkpoint on."""
    _write(f"worker-{os.environ['HOSTNAME']}-{os.environ['LOCAL_RANK']}", str(os.getpid()))
    torch.set_num_threads(1)
    segment = _leave_things_behind()
    dist.init_process_group("gloo")
    is_first, start = dist.get_rank() == 0, secrets.token_hex(4)
    step = torch.tensor([_checkpoint() if is_first else 0])
    dist.broadcast(step, 0)
    number = int(step)
    while True:
        number += 1
        total = torch.tensor([1, int(is_first and os.path.exists(os.path.join(FOLDER, "enough")))])
        dist.all_reduce(total)
        dist.all_reduce(torch.zeros(GRADIENTS))
        assert int(total[0]) == dist.get_world_size()
        trainer_launch.report(step=number)
        if is_first:
            if number % CHECKPOINT_STEPS == 0:
                _write("checkpoint", str(number))
            with open(os.path.join(FOLDER, "steps"), "a") as file:
                file.write(f"{time.monotonic()} {number} {int(total[0])} {start}\n")
        if int(total[1]):
            break
        time.sleep(STEP_S)
    dist.barrier()
    os.close(segment)
    os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here


def _leave_things_behind() -> int:
    subprocess.Popen(("sleep", "86400"), start_new_session=True)
    name = f"/dev/shm/torch_{os.getpid()}_{secrets.randbelow(1 << 31)}_0"
    segment = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.write(segment, bytes(SEGMENT_BYTES))
    return segment


def _checkpoint() -> int:
    path = os.path.join(FOLDER, "checkpoint")
    if not os.path.exists(path):
        return 0
    with open(path) as file:
        return int(file.read())


def _write(name: str, text: str) -> None:
    path = os.path.join(FOLDER, name)
    with open(f"{path}.{os.getpid()}.new", "w") as file:
        file.write(text)
    os.replace(f"{path}.{os.getpid()}.new", path)


if __name__ == "__main__":
    main()
