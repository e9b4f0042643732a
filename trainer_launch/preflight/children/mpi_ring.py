"""A hello and a ring over MPI, one rank on each host; mpirun's program is `python3 -c TEXT TOKEN`.

The hosts need Python and mpi4py, and nothing of ours. Rank 0 prints lines of TOKEN and JSON: first `hello`, all
hosts' names in the order of ranks, then `pairs`: for each edge of the ring both ranks, half the time of an exchange
of one byte in seconds, and bytes per second. Edges that share no rank are tested at the same time.
"""

from __future__ import annotations

import json
import socket
import sys
import time
from typing import Any

from mpi4py import MPI

BYTES = 1 << 20
PINGS = 50
SEND_S = 0.1
WARM = 3


def main() -> None:
    """One rank."""
    token = sys.argv[1]
    world = MPI.COMM_WORLD
    rank, size = world.Get_rank(), world.Get_size()
    tell(world, token, "hello", world.gather(socket.gethostname(), root=0))
    mine: list[list[float]] = []
    for edges in rounds(size):
        ends = next((edge for edge in edges if rank in edge), None)
        world.Barrier()
        if ends is not None:
            other = ends[1] if rank == ends[0] else ends[0]
            latency = ping(world, other, rank == ends[0])
            rate = stream(world, other, rank == ends[0])
            if rank == ends[0]:
                mine.append([*ends, latency, rate])
    found = world.gather(mine, root=0)
    tell(world, token, "pairs", found and [pair for some in found for pair in some])


def rounds(size: int) -> list[list[tuple[int, int]]]:
    """The ring's even edges, its odd ones, and with an odd number of ranks the one that closes it."""
    if size < 2:
        return []
    edges = [(min(i, (i + 1) % size), max(i, (i + 1) % size)) for i in range(size if size > 2 else 1)]
    closing = edges[size - 1 :] if size % 2 else []
    edges = edges[: len(edges) - len(closing)]
    return [chosen for chosen in (edges[0::2], edges[1::2], closing) if chosen]


def ping(world: Any, other: int, begins: bool) -> float:
    """Half the shortest time of an exchange of one byte, in seconds."""
    byte = bytearray(1)
    best = float("inf")
    for number in range(WARM + PINGS):
        began = time.perf_counter()
        for sends in (begins, not begins):
            if sends:
                world.Send([byte, MPI.BYTE], dest=other)
            else:
                world.Recv([byte, MPI.BYTE], source=other)
        if number >= WARM:
            best = min(best, time.perf_counter() - began)
    return best / 2


def stream(world: Any, other: int, sends: bool) -> float:
    """Bytes per second of one direction, for a moment; every block is looked at."""
    block = bytes(range(256)) * (BYTES // 256)
    taken = bytearray(BYTES)
    total, began, more = 0, time.perf_counter(), True
    while more:
        if sends:
            more = time.perf_counter() - began < SEND_S
            world.Send([block, MPI.BYTE], dest=other, tag=1 if more else 2)
        else:
            status = MPI.Status()
            world.Recv([taken, MPI.BYTE], source=other, tag=MPI.ANY_TAG, status=status)
            more = status.Get_tag() == 1
            if taken != block:
                raise SystemExit(f"the data of rank {other} arrives damaged")
        total += BYTES
    if sends:
        world.Recv([bytearray(1), MPI.BYTE], source=other, tag=3)
    else:
        world.Send([bytearray(1), MPI.BYTE], dest=other, tag=3)
    return total / max(1e-6, time.perf_counter() - began)


def tell(world: Any, token: str, word: str, value: object) -> None:
    """Print a value, where it has arrived."""
    if world.Get_rank() == 0:
        sys.stdout.write(f"{token} {json.dumps({word: value})}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
