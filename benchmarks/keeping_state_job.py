"""The job of keeping_state.py: each rank has 104 MB of state, takes steps, and writes a line about each.

usage: keeping_state_job.py WAY STEP:RANK..., in the folder of the run; WAY is the name of a function in `WAYS`.

`steps` gets: time, rank, step, process, what differs for each meeting of the ranks. In each STEP the RANK sends
itself SIGKILL, once and right before its collective, so that no rank completes that step with it; the times of that
are in `killed-0`, `killed-1` and so on. The ways that need a checkpoint save one each 10 steps.
"""

from __future__ import annotations

import glob
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

NUMBERS = 13_000_000  # of 4 bytes, twice
STEP_S = 0.05
CHECKPOINT_STEPS = 10
CHECKPOINT = "checkpoint.pt"

torch.set_num_threads(1)


def empty_state() -> dict[str, Any]:
    return {"weights": torch.zeros(NUMBERS), "momentum": torch.zeros(NUMBERS), "step": 0}


def may_die(rank: int, step: int) -> None:
    """End where it is this rank's turn."""
    turn = f"{step}:{rank}"
    if turn not in sys.argv:
        return
    path = f"killed-{sys.argv.index(turn) - 2}"
    if not os.path.exists(path):
        with open(f"{path}.new", "w") as file:
            file.write(str(time.monotonic()))
        os.rename(f"{path}.new", path)
        os.kill(os.getpid(), signal.SIGKILL)


def has_done(rank: int, step: int, meeting: object) -> None:
    """Write the line of a step, and wait for the next one."""
    with open("steps", "a") as file:
        file.write(f"{time.monotonic()} {rank} {step} {os.getpid()} {meeting}\n")
    time.sleep(STEP_S)


def take_steps(state: dict[str, Any], rank: int, meeting: object, *, is_saving: bool) -> None:
    """Train with the default process group, for ever."""
    while True:
        may_die(rank, state["step"] + 1)
        gradient = torch.ones(1000)
        distributed.all_reduce(gradient)
        state["weights"][:1000] += gradient
        state["step"] += 1
        has_done(rank, state["step"], meeting)
        if is_saving and distributed.get_rank() == 0 and state["step"] % CHECKPOINT_STEPS == 0:
            torch.save(state, f"{CHECKPOINT}.new")
            os.replace(f"{CHECKPOINT}.new", CHECKPOINT)


def loaded(state: dict[str, Any]) -> dict[str, Any]:
    """The last checkpoint; the state as it is where there is none."""
    return torch.load(CHECKPOINT) if os.path.exists(CHECKPOINT) else state


def checkpoint() -> None:
    """Ours and torchrun's: all workers are started again."""
    distributed.init_process_group("gloo")
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    take_steps(loaded(empty_state()), distributed.get_rank(), restarts, is_saving=True)


def generations() -> None:
    """Ours: the others keep their state."""
    import trainer_launch

    state = empty_state()
    for generation in trainer_launch.generations():
        with generation:
            distributed.init_process_group("gloo")
            generation.share(state)
            take_steps(state, generation.rank, generation.number, is_saving=False)


def in_process() -> None:
    """nvidia-resiliency-ext's wrapper, as its own basic example has it: the function runs again with the others.

    TUNED: its intervals are shortened as far as their checks of each other allow.
    """
    from nvidia_resiliency_ext import inprocess

    first_rank, port = int(os.environ["RANK"]), int(os.environ["MASTER_PORT"])
    short = timedelta(seconds=0.1)
    intervals = ("monitor_thread", "monitor_process", "heartbeat", "progress_watchdog")
    tuned = {f"{name}_interval": short for name in intervals} | {"last_call_wait": short}

    def train(call_wrapper: inprocess.CallWrapper | None = None) -> None:
        assert call_wrapper is not None
        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = ("127.0.0.1", port + 1, world_size, rank == 0)
        store = distributed.TCPStore(*where, multi_tenant=True, wait_for_workers=True, use_libuv=True)
        numbered = distributed.PrefixStore(str(call_wrapper.iteration), store)
        limit = timedelta(seconds=10)
        distributed.init_process_group("gloo", store=numbered, rank=rank, world_size=world_size, timeout=limit)
        take_steps(loaded(empty_state()), first_rank, call_wrapper.iteration, is_saving=True)

    options = tuned if "TUNED" in os.environ else {}
    # A string, as `from __future__ import annotations` makes it, is not seen by the wrapper.
    train.__annotations__ = {"call_wrapper": inprocess.CallWrapper}
    inprocess.Wrapper(store_kwargs={"port": port + 2}, **options)(train)()


def replica() -> None:
    """torchft's manager, as its own example of replicas has it: one worker is a replica group.

    TUNED: a collective with a lost replica fails after 1 s.
    """
    from torchft import Manager, ProcessGroupGloo

    rank, state = int(os.environ["REPLICA_GROUP_ID"]), empty_state()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=1 if "TUNED" in os.environ else 5)),
        min_replica_size=1,
        load_state_dict=state.update,
        state_dict=lambda: dict(state),
        replica_id=f"replica_{rank}",
        timeout=timedelta(seconds=10),
        init_sync=False,  # all begin alike
    )
    open(f"replica-{rank}", "w").close()
    while len(glob.glob("replica-*")) < int(os.environ["NUM_REPLICA_GROUPS"]):
        time.sleep(STEP_S)  # or the first would train alone
    while True:
        manager.start_quorum()
        may_die(rank, manager.current_step() + 1)
        gradient = torch.ones(1000)
        manager.allreduce(gradient).wait()
        if manager.should_commit():
            state["weights"][:1000] += gradient
            state["step"] = manager.current_step()
            has_done(rank, state["step"], 0)


WAYS: dict[str, Callable[[], None]] = {way.__name__: way for way in (checkpoint, generations, in_process, replica)}

if __name__ == "__main__":
    WAYS[sys.argv[1]]()
