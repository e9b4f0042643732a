"""Train nothing, but visibly, until there is a file `enough`: a checkpoint, and a line about each step.

Copied into the job's folder, where it keeps all it writes: `checkpoint`, `steps` (time, step, number of workers, a
word that differs for each start of the workers), and `worker-HOST-LOCAL_RANK` with its process id.
With SAVES_ON_SIGTERM, all workers exit with 0 after the step in which one of them gets SIGTERM. CHECKPOINT_STEPS
lie between two checkpoints, one by default. With KEEPS_STATE, workers that lose another keep their step. With
LEAVES_THINGS_BEHIND it trains as a soak wants it: slowly, with gradients, reporting its step; and when it dies
others have to clear a shared memory segment, and a helper in a session of its own.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import time

import torch
import torch.distributed as dist

FOLDER = os.path.dirname(os.path.abspath(__file__))
CHECKPOINT_STEPS = int(os.environ.get("CHECKPOINT_STEPS", "1"))
IS_SOAK = "LEAVES_THINGS_BEHIND" in os.environ
STEP_S = 0.2 if IS_SOAK else 0.05
GRADIENTS = 4096  # 16 KiB on every link at every step, for slow links to be felt
SEGMENT_BYTES = 262_144


def main() -> None:
    """Take all steps from the checkpoint on."""
    _write(f"worker-{os.environ['HOSTNAME']}-{os.environ['LOCAL_RANK']}", str(os.getpid()))
    if IS_SOAK:
        torch.set_num_threads(1)
        _leave_things_behind()
    signals: list[int] = []
    if "SAVES_ON_SIGTERM" in os.environ:
        signal.signal(signal.SIGTERM, lambda signum, _frame: signals.append(signum))
    if "KEEPS_STATE" in os.environ:
        _keep_state(signals)
    else:
        dist.init_process_group("gloo")
        step = torch.tensor([_checkpoint() if dist.get_rank() == 0 else 0])
        dist.broadcast(step, 0)
        _train({"step": int(step)}, signals)
    os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is tested here


def _keep_state(signals: list[int]) -> None:
    import trainer_launch

    state = {"step": 0}
    for generation in trainer_launch.generations():
        with generation:
            dist.init_process_group("gloo")
            if not generation.kept:
                state["step"] = _checkpoint()
            generation.share(state)
            _train(state, signals)


def _train(state: dict[str, int], signals: list[int]) -> None:
    is_first, start = dist.get_rank() == 0, secrets.token_hex(4)
    while True:
        number = state["step"] + 1
        is_enough = is_first and os.path.exists(os.path.join(FOLDER, "enough"))
        total = torch.tensor([1, int(is_enough), len(signals)])
        dist.all_reduce(total)
        assert int(total[0]) == dist.get_world_size()
        state["step"] = number
        if IS_SOAK:
            _do_what_others_do(number)
        if is_first:
            if number % CHECKPOINT_STEPS == 0:
                _write("checkpoint", str(number))
            with open(os.path.join(FOLDER, "steps"), "a") as file:
                file.write(f"{time.monotonic()} {number} {int(total[0])} {start}\n")
            print(f"step {number}", flush=True)  # as most programs do
        if int(total[1]) or int(total[2]):
            break
        time.sleep(STEP_S)
    dist.barrier()


def _do_what_others_do(number: int) -> None:
    import trainer_launch  # only the launcher's own jobs have it

    dist.all_reduce(torch.zeros(GRADIENTS))
    trainer_launch.report(step=number)


def _leave_things_behind() -> None:
    """Both live as long as this process, or longer."""
    subprocess.Popen(("sleep", "86400"), start_new_session=True)
    name = f"/dev/shm/torch_{os.getpid()}_{secrets.randbelow(1 << 31)}_0"
    os.write(os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), bytes(SEGMENT_BYTES))


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
