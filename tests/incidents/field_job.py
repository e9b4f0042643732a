"""More acts for the incident catalogue, as users meet them. `incident_job` says what comes before and after each.

An act whose fault comes later than its beginning says so by `begin`.
"""

from __future__ import annotations

import ast
import ctypes
import http.client
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from datetime import timedelta

import torch
import torch.distributed as dist
from incident_job import (  # type: ignore[import-not-found]
    LONG_S,
    begin,
    gate,
    grow_impatient,
    main,
    never_entered,  # noqa: F401 - an act of this job, too
    read_batch,
    spin,
    total,
)
from torch.utils.data import DataLoader, Dataset

KEPT: list[object] = []  # what a leak keeps


def stuck():
    begin()
    read_batch()


def compute(seconds):
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        spin()


def train(steps):
    for _ in range(steps):
        dist.all_reduce(total)
        time.sleep(0.05)


def address(path):
    """Of the catalogue's server."""
    return f"http://127.0.0.1:{os.environ['PORT']}/{path}"


class Records(Dataset):
    """What one record of rank 1 does to the data loader's process."""

    def __init__(self, load):
        self.load = load

    def __len__(self):
        return 500

    def __getitem__(self, number):
        if os.environ["RANK"] == "1":
            self.load()
        return torch.ones(4)


def read_records(load):
    for batch in DataLoader(Records(load), num_workers=1):
        dist.all_reduce(batch)


# -- point to point ----------------------------------------------------------------------------


def exchanges(rank):
    """Neighbours exchange their edges in each step."""
    peers = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < dist.get_world_size()]
    for step in range(6):
        sends = [dist.P2POp(dist.isend, torch.ones(2), peer) for peer in peers]
        works = dist.batch_isend_irecv([*sends, *(dist.P2POp(dist.irecv, torch.empty(2), peer) for peer in peers)])
        for work in works:
            work.wait()
        if rank == 1 and step == 5:
            stuck()
        dist.all_reduce(total)


def hands_on(rank):
    """Activations go from rank to rank, and all ranks add up at the end of a step."""
    for step in range(6):
        if rank > 0:
            dist.recv(torch.empty(4), rank - 1)
        if rank < dist.get_world_size() - 1:
            dist.send(total, rank + 1)
        if rank == 2 and step == 5:
            stuck()
        dist.all_reduce(total)


def skips_a_send(rank):
    """In the last step rank 1 does not send what rank 2 waits for."""
    for step in range(6):
        if rank > 0:
            dist.recv(torch.empty(4), rank - 1)
        if rank == 0 or (rank == 1 and step < 5):
            dist.send(total, rank + 1)
        if rank == 1:
            begin()
        dist.all_reduce(total)


def pipeline(rank):
    """Activations and gradients go from rank to rank; no collective after the first five."""
    last = dist.get_world_size() - 1
    for step in range(20):
        if rank > 0:
            dist.recv(torch.empty(4), rank - 1)
        if rank == 1 and step == 12:
            stuck()
        if rank < last:
            dist.send(total, rank + 1)
            dist.recv(torch.empty(4), rank + 1)
        if rank > 0:
            dist.send(total, rank - 1)
        time.sleep(0.02)


def mesh(rank):
    """Two nodes of two ranks: tensor parallel on a node, data parallel between nodes."""
    from torch.distributed.device_mesh import init_device_mesh

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    for step in range(8):
        if rank == 3 and step == 7:
            stuck()
        dist.all_reduce(total, group=both["tensor"].get_group())
        dist.all_reduce(total, group=both["data"].get_group())


# -- hangs -------------------------------------------------------------------------------------


def impatient(rank):
    """Rank 1 is only slower than the group's own timeout."""
    group = dist.new_group()
    dist.all_reduce(total, group=group)
    grow_impatient(group)
    begin()
    if rank == 1:
        compute(3.0)
    dist.all_reduce(total, group=group)


def impatient_in_buckets(rank):
    """As in DDP's backward: several operations time out at once."""
    patient = dist.new_group(timeout=timedelta(seconds=1))
    dist.all_reduce(total, group=patient)
    begin()
    if rank == 1:
        compute(3.0)
    for work in [dist.all_reduce(torch.ones(4), group=patient, async_op=True) for _ in range(4)]:
        work.wait()


def comes_too_late(rank):
    """Rank 1 enters after the others' time-out, and before these have ended."""
    group, came = dist.new_group(), os.environ["GATE"] + ".came"
    grow_impatient(group)
    begin()
    if rank == 1:
        compute(3.0)
        open(came, "w").close()
    try:
        dist.all_reduce(total, group=group)
    finally:
        while not os.path.exists(came):
            time.sleep(0.02)


def beats(rank):
    """A thread of rank 0 prints now and then, as progress bars do."""

    def beat():
        while True:
            time.sleep(0.7)
            print("still here\n", end="", flush=True)

    if rank == 0:
        threading.Thread(target=beat, daemon=True).start()
    if rank == 1:
        stuck()


def backtracks(rank):
    """A regular expression that never ends, and holds the GIL."""
    if rank == 1:
        re.match(r"(\w+\s?)+$", "a" * 60 + "!")


def loops(rank):
    while rank == 1:
        spin()


def holds_gil(rank):
    """As a C extension that waits for a lock."""
    if rank == 1:
        ctypes.PyDLL(None).sleep(100_000)


def upload():
    """A thread that never ends."""
    gate()


def hangs_at_exit(rank):
    """All have finished; a thread keeps rank 1."""
    if rank == 1:
        threading.Thread(target=upload).start()
    dist.barrier()
    dist.destroy_process_group()
    begin()
    sys.exit(0)


def raises_and_hangs(rank):
    if rank == 0:
        threading.Thread(target=upload).start()
        raise ValueError("the learning rate is -0.1")


def leaves_before_start(rank):
    """Before init_process_group."""
    if rank == 1:
        print("no data for this rank\n", end="", flush=True)
        sys.exit(0)


# -- ends --------------------------------------------------------------------------------------


def barrier_alone(rank):
    """A barrier that only rank 0 calls, as before a last checkpoint."""
    if rank == 0:
        dist.barrier()
    time.sleep(0.3)
    begin()
    os._exit(0)


def asked_to_leave(rank):
    """Somebody outside sends SIGTERM to rank 1, which saves and ends."""

    def save(number, frame):
        os.write(1, b"saved\n")
        os._exit(0)

    if rank == 1:
        signal.signal(signal.SIGTERM, save)
        if os.fork() == 0:
            time.sleep(0.5)
            begin()
            os.kill(os.getppid(), signal.SIGTERM)
            os._exit(0)
    train(60)


def cleans_up(rank):
    """Rank 1 leaves its group at once, and raises later."""
    try:
        if rank == 1:
            time.sleep(0.3)
            raise ValueError("label 17 is out of range")
        dist.all_reduce(total)
    except ValueError:
        dist.destroy_process_group()
        time.sleep(1.5)
        raise


def crashes_harder(rank):
    """Rank 2 raises; what rank 0 does about its lost connection is worse."""
    try:
        if rank == 2:
            time.sleep(0.3)
            raise ValueError("the tokenizer has another vocabulary")
        dist.all_reduce(total)
    except RuntimeError:
        if rank == 0:
            ctypes.string_at(0)
        raise


def leaks_files(rank):
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        while True:
            KEPT.append(os.open(os.devnull, os.O_RDONLY))


def leaves_with_2(rank):
    if rank == 1:
        time.sleep(0.3)
        print("the data server is busy", file=sys.stderr, flush=True)
        sys.exit(2)


def lacks_a_tool(rank):
    if rank == 1:
        time.sleep(0.3)
        sys.exit(os.waitstatus_to_exitcode(os.system("no-such-tool pull data")))


def reads_bad_record(rank):
    if rank == 1:
        ast.literal_eval('{"text": "she said "no" and left"}')


def asks_for_petabytes(rank):
    import numpy

    if rank == 1:
        numpy.zeros((1 << 25, 1 << 25))


def wrong_address(rank):
    """Before init_process_group of the others."""
    if rank == 1:
        where = "tcp://127.0.0.1:1"
        dist.init_process_group("gloo", where, rank=rank, world_size=2, timeout=timedelta(seconds=2))


def bad_gradient(rank):
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))

    def check(gradient):
        if rank == 0:
            raise FloatingPointError("the gradient's norm is inf")

    model.module.weight.register_hook(check)
    model(torch.ones(1, 2)).sum().backward()


def store_resets(rank):
    """The object store closes the connection in the middle of an answer."""
    if rank == 1:
        store = http.client.HTTPConnection("127.0.0.1", int(os.environ["PORT"]))
        store.request("GET", "/resets")
        store.getresponse()


def loader_crashes(rank):
    read_records(lambda: ctypes.string_at(0))


def loader_fills_memory(rank):
    read_records(lambda: KEPT.append(torch.ones(8 << 20)))


def child_fills_memory(rank):
    if rank == 1:
        code = "kept = []\nwhile True: kept.append(b'x' * (16 << 20))"
        subprocess.run((sys.executable, "-c", code), check=True)


def read_shard(number):
    raise ValueError(f"shard {number} is corrupt")


def child_raises(rank):
    import torch.multiprocessing

    if rank == 1:
        torch.multiprocessing.spawn(read_shard, nprocs=1)


def quota_is_full(rank):
    """In a distributed checkpoint."""
    import torch.distributed.checkpoint as dcp

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            if rank == 1:
                raise OSError(122, "Disk quota exceeded")
            return super().write_data(plan, planner)

    dcp.save({f"rank {rank}": total}, storage_writer=Writer(os.environ["GATE"] + ".checkpoint"))


def frees_wrongly(rank):
    if rank == 1:
        libc = ctypes.CDLL(None)
        libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, (ctypes.c_void_p,)
        time.sleep(0.3)
        libc.free(libc.malloc(64) + 16)


def python_aborts(rank):
    if rank == 1:
        time.sleep(0.3)
        ctypes.pythonapi.Py_FatalError(b"the cache is corrupt")


def shows_secrets(rank):
    if rank == 1:
        time.sleep(0.3)
        name, word = "aws_secret_access_" + "key", "wJalrXUtnFEMI/K7MDENG" + "/bPxRfiCYEXAMPLEKEY"
        raise RuntimeError(
            "upload failed\n  https://user:" + "PassOfUser9@store.example.com/bucket\n"
            f"  Authorization: Bearer hf_{'AbCdEfGhIjKlMnOpQrStUvWxYz012345'}\n  {name}={word}\n  status 403"
        )


# -- healthy -----------------------------------------------------------------------------------


def evaluates_after_training(rank):
    train(100)
    if rank == 0:
        compute(LONG_S)
    dist.barrier()


def evaluates_for_minutes(rank):
    os.nice(10)
    train(500)
    if rank == 0:
        compute(LONG_S)
    dist.barrier()


def download_stalls(rank):
    """In the middle of the body."""
    if rank == 1:
        with urllib.request.urlopen(address("stalls")) as answer:
            while answer.read(1024):
                pass


def receives(rank):
    """A library of its own, without urllib."""
    if rank == 1:
        with socket.create_connection(("127.0.0.1", int(os.environ["PORT"]))) as store:
            store.sendall(b"GET /silent HTTP/1.0\r\n\r\n")
            while store.recv(4096):
                pass


def fetches(rank):
    if rank == 1:
        subprocess.run(("curl", "-sf", "-o", os.devnull, address("silent")), check=True)


def writes_slowly(rank):
    """A checkpoint without torch.save, to a disk that takes 64 KiB a second."""
    if rank == 0:
        with open(os.environ["DISK"], "wb") as file:
            file.write(bytes(1 << 21))
    dist.barrier()


def reads_slowly(rank):
    """An index, from a disk that gives 512 bytes a second."""
    if rank == 1:
        with open(os.environ["DISK"], "rb", buffering=0) as file:
            while file.read(512):
                pass


def asks_a_person(rank):
    if rank == 0:
        prompt, person = os.pipe()
        if os.fork() == 0:
            time.sleep(LONG_S)
            os.write(person, b"yes\n")
            os._exit(0)
        os.dup2(prompt, 0)
        input("resume from step 5? ")


def waits_before_start(rank):
    """Before init_process_group, after a line of output."""
    print(f"rank {rank} starts\n", end="", flush=True)
    if rank == 1:
        time.sleep(LONG_S)


def exports(rank):
    """The others have left; rank 0 waits for a remote service."""
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        receives(1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], globals(), ("leaves_before_start", "waits_before_start", "wrong_address"), ())
