"""The training program of the incident catalogue: five steps, then the situation that its argument names.

Most situations have a first act on one rank while the others wait in all_reduce #6. Who blocks, blocks without CPU
time until the catalogue lets go of the file GATE; what a healthy rank does takes longer than `--hang-timeout`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pdb  # noqa: T100 - one rank is paused in it
import resource
import signal
import subprocess
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

LONG_S = float(os.environ.get("LONG_S", "6"))  # more than --hang-timeout
total = torch.ones(4)


def gate():
    with open(os.environ["GATE"]) as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def read_batch():
    with open(os.environ["GATE"]) as file:
        fcntl.flock(file, fcntl.LOCK_SH)


def begin():
    """Note the time: from here on something is wrong."""
    with contextlib.suppress(OSError), open(os.environ["GATE"] + ".begun", "a") as file:
        file.write(f"{time.time()}\n")


class Blocked(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, number):
        read_batch()
        return torch.ones(1)


class Slow(Blocked):
    def __getitem__(self, number):
        time.sleep(LONG_S)
        return torch.ones(1)


class Killed(Blocked):
    def __getitem__(self, number):
        os.kill(os.getpid(), signal.SIGKILL)


class Disk:
    """A file on a disk that is slow once."""

    def __init__(self):
        self._wait_s = LONG_S

    def write(self, data):
        time.sleep(self._wait_s)
        self._wait_s = 0
        return len(data)

    def flush(self):
        pass


def is_first_start():
    return os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"


def group_of(*ranks):
    return dist.new_group([*ranks])


def grow_impatient(group):
    """From now on, when its ranks have met: they may come a second apart on a busy machine."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1), group)


def entered(rank):
    """The file that tells that a rank has entered the last collective."""
    return f"{os.environ['GATE']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}.{rank}"


def enter_last(rank):
    work = dist.all_reduce(total, async_op=True)
    open(entered(rank), "w").close()
    work.wait()


def others_wait():
    """Return once all other ranks wait in the last collective, so that nobody is lost in the middle of a step."""
    others = {*range(int(os.environ["WORLD_SIZE"]))} - {int(os.environ["RANK"])}
    while not all(os.path.exists(entered(rank)) for rank in others):
        time.sleep(0.02)


def kill(number):
    others_wait()
    os.kill(os.getpid(), number)
    time.sleep(60)


def spin():
    sum(range(10**6))


# -- hangs: somebody never enters ------------------------------------------------------------


def never_entered(rank):
    if rank == 1:
        read_batch()


def never_entered_once(rank):
    if rank == 1 and is_first_start():
        read_batch()


def never_entered_after_output(rank):
    if rank == 1:
        prints(rank)
        read_batch()


def two_never_entered(rank):
    if rank == 1:
        read_batch()
    if rank == 2:
        gate()


def in_data_loader(rank):
    if rank == 1:
        next(iter(DataLoader(Blocked())))


def in_data_loader_process(rank):
    if rank == 1:
        next(iter(DataLoader(Blocked(), num_workers=1)))


def stopped(rank):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)


def in_subprocess(rank):
    if rank == 1:
        subprocess.run(("flock", "--shared", os.environ["GATE"], "true"), check=True)


def barrier(rank):
    if rank == 1:
        read_batch()
    dist.barrier()


def broadcast_object(rank):
    if rank == 1:
        read_batch()
    dist.broadcast_object_list([{"step": 6}], src=0)


def gather_weights(rank):
    """As FSDP does before a layer."""
    if rank == 1:
        read_batch()
    dist.all_gather_into_tensor(torch.empty(8), total)


def scatter_gradients(rank):
    """As FSDP does after a layer."""
    if rank == 1:
        read_batch()
    dist.reduce_scatter_tensor(torch.empty(4), torch.ones(4 * dist.get_world_size()))


def in_backward(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    if rank == 1:
        read_batch()
    model(torch.ones(1, 2)).sum().backward()


def asynchronous(rank):
    """One is five collectives ahead."""
    if rank == 1:
        read_batch()
    works = [dist.all_reduce(total, async_op=True) for _ in range(5)]
    for work in works:
        work.wait()


def chain(rank):
    """Rank 2 waits for rank 1, which waits for rank 0, which is in the data loader."""
    first, second = group_of(0, 1), group_of(1, 2)
    if rank == 0:
        next(iter(DataLoader(Blocked())))
    if rank < 2:
        dist.all_reduce(total, group=first)
    if rank > 0:
        dist.all_reduce(total, group=second)


def in_subgroup(rank):
    pair = group_of(0, 1)
    if rank == 1:
        read_batch()
    if rank < 2:
        dist.broadcast(total, src=0, group=pair)


def receives_from_nobody(rank):
    if rank == 1:
        dist.recv(total, src=0)


def both_receive(rank):
    dist.recv(total, src=1 - rank)


def sends_to_nobody(rank):
    if rank == 1:
        dist.send(torch.ones(1 << 22), dst=0)


def all_blocked(rank):
    read_batch()


# -- hangs: the ranks disagree ---------------------------------------------------------------


def other_operation(rank):
    if rank == 1:
        dist.barrier()


def other_size(rank):
    """One of them is large enough to wait for more."""
    dist.all_reduce(torch.ones(8 if rank == 1 else 4))


def other_type(rank):
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 1 else torch.float32))


def other_root(rank):
    dist.broadcast(total, src=rank)
    dist.broadcast(total, src=rank)
    dist.all_reduce(total)


def one_more_step(rank):
    if rank == 1:
        dist.all_reduce(total)


def circle(rank):
    first, second = group_of(0, 1), group_of(0, 1)
    for group in (first, second) if rank == 0 else (second, first):
        dist.all_reduce(total, group=group)


def circle_of_three(rank):
    groups = [group_of(0, 1), group_of(1, 2), group_of(0, 2)]
    own = [groups[0], groups[2]] if rank == 0 else [groups[1], groups[0]] if rank == 1 else [groups[2], groups[1]]
    for group in own:
        dist.all_reduce(total, group=group)


def other_group(rank):
    pair = group_of(0, 1)
    dist.all_reduce(total, group=pair if rank == 1 else None)
    gate()


# -- ends ------------------------------------------------------------------------------------


def finishes_early(rank):
    if rank == 1:
        others_wait()
        os._exit(0)


def finishes_unseen(rank):
    """Its connections stay open in a child, so that nothing but the recorders tells."""
    if rank == 1:
        if os.fork():
            os._exit(0)
        gate()
        os._exit(0)


def raises(rank):
    if rank == 1:
        others_wait()
        raise ValueError("no luck")


def all_raise(rank):
    raise ValueError("no luck")


def misspelt(rank):
    if rank == 1:
        totl.sum()  # type: ignore[name-defined]  # noqa: F821


def not_installed(rank):
    if rank == 1:
        import no_such_module  # type: ignore[import-not-found]  # noqa: F401


def killed(rank):
    if rank == 1:
        kill(signal.SIGKILL)


def killed_in_collective(rank):
    if rank == 0:
        gate()
    dist.all_reduce(total, async_op=True)
    os.kill(os.getpid(), signal.SIGKILL)


def killed_in_checkpoint(rank):
    if rank == 1:
        if os.fork() == 0:
            others_wait()
            os.kill(os.getppid(), signal.SIGKILL)
            os._exit(0)
        torch.save(total, Disk(), _use_new_zipfile_serialization=False)


def segfault(rank):
    if rank == 1:
        kill(signal.SIGSEGV)


def abort(rank):
    if rank == 1:
        kill(signal.SIGABRT)


def leaves_with_7(rank):
    if rank == 1:
        others_wait()
        os._exit(7)


def unhandled_signal(rank):
    if rank == 1:
        kill(signal.SIGUSR2)


def memory(rank):
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 32, 1 << 32))
        bytearray(1 << 33)


def loader_killed(rank):
    if rank == 1:
        next(iter(DataLoader(Killed(), num_workers=1)))


def device_error(rank):
    if rank == 1:
        others_wait()
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def device_memory(rank):
    if rank == 1:
        others_wait()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


def monitored(rank):
    if rank == 1:
        read_batch()
    dist.monitored_barrier(timeout=timedelta(seconds=1))


def times_out(rank):
    group = dist.new_group()
    grow_impatient(group)
    if rank == 1:
        read_batch()
    dist.all_reduce(total, group=group)


def unused_parameters(rank):
    layers = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, batch):
            return self.layers[0](batch)

    model = torch.nn.parallel.DistributedDataParallel(Model())
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()


def other_model(rank):
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2 + rank))


# -- healthy ---------------------------------------------------------------------------------


def saves(rank):
    if rank == 0:
        torch.save(total, Disk(), _use_new_zipfile_serialization=False)


def compiles(rank):
    def backend(graph, inputs):
        time.sleep(LONG_S)
        return graph.forward

    if rank == 1:
        torch.compile(lambda it: it + 1, backend=backend)(total)


def debugged(rank):
    """A person types `continue` after a while."""
    if rank == 1:
        prompt, person = os.pipe()
        if os.fork() == 0:
            time.sleep(LONG_S)
            os.write(person, b"continue\n")
            os._exit(0)
        pdb.Pdb(stdin=os.fdopen(prompt), stdout=sys.stdout, nosigint=True).set_trace()


def evaluates(rank):
    if rank == 0:
        end_s = time.monotonic() + LONG_S
        while time.monotonic() < end_s:
            spin()


def accumulates(rank):
    end_s = time.monotonic() + LONG_S
    while time.monotonic() < end_s:
        spin()


def prints(rank):
    if rank == 1:
        for _ in range(int(LONG_S / 0.5)):
            time.sleep(0.5)
            print("still here\n", end="", flush=True)


def reports(rank):
    from trainer_launch import report

    if rank == 1:
        for number in range(int(LONG_S / 0.5)):
            time.sleep(0.5)
            report(step=number)


def alone(rank):
    """Its own collectives advance."""
    group = dist.new_group([1])
    if rank == 1:
        for _ in range(int(LONG_S / 0.5)):
            time.sleep(0.5)
            dist.all_reduce(total, group=group)


def equally_slow(rank):
    for _ in range(4):
        time.sleep(1.5)
        dist.all_reduce(total)


def pauses(rank):
    """Stopped and continued in time."""
    if rank == 1:
        if os.fork() == 0:
            time.sleep(1.0)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)


def trains(rank):
    """Until rank 0 finds the gate open."""
    is_open = torch.zeros(1)
    with open(os.environ["GATE"]) as file:
        while not is_open:
            if rank == 0:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    is_open += 1
            dist.all_reduce(is_open)
            time.sleep(0.05)


def joins(rank):
    """Uneven data as torch handles it: who has finished joins in the others' collectives."""
    from torch.distributed.algorithms.join import Join

    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with Join([model]):
        for _ in range(6 if rank == 0 else 2):
            model(torch.ones(1, 2)).sum().backward()
            time.sleep(0.5)


def drains(rank):
    """Saves for long after SIGTERM."""

    def save(number, frame):
        time.sleep(LONG_S)
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    os.write(1, b"ready\n")
    while True:
        time.sleep(0.1)
        dist.all_reduce(total)


# Before the first collective.


def imports(rank):
    if rank == 1:
        time.sleep(LONG_S)


def downloads(rank):
    if rank == 0:
        time.sleep(LONG_S)
    dist.barrier()


def first_batch(rank):
    if rank == 1:
        next(iter(DataLoader(Slow())))


def main(name, acts, before=("imports",), first=("downloads", "first_batch")):
    """One of `acts`: before init_process_group, before the first collective, or after five."""
    rank = int(os.environ["RANK"])

    def act():
        begin()
        acts[name](rank)

    if name in before:
        act()
    dist.init_process_group("gloo")
    if name in first:
        act()
    for step in range(5):
        dist.all_reduce(total)
        print(f"rank {rank} step {step}\n", end="", flush=True)
    if name not in (*before, *first):
        act()
    enter_last(rank)
    print(f"rank {rank} is done\n", end="", flush=True)
    os._exit(0)  # torch 2.13's gloo may abort while Python shuts down; not what is shown here


if __name__ == "__main__":
    main(sys.argv[1], globals())
