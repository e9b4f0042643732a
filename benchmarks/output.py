"""How fast labelled output is carried: MB/s for 1, 4 and 8 writers, beside `cat` moving the same bytes unlabelled.

Run: python benchmarks/output.py [megabytes]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from trainer_launch.model import Process
from trainer_launch.supervisor.system import System

LINE = b"epoch 3 step 1200 loss 0.4312 lr 3.0e-4 grad_norm 1.02 tokens/s 81234 mem 61.2\n"
WRITER = f"""
import os, sys
block = {LINE!r} * 800
for _ in range(int(sys.argv[1]) // len(block)):
    view = memoryview(block)
    while view:
        view = view[os.write(1, view):]
"""


def ours(writers: int, each_bytes: int) -> float:
    """Seconds until everything has passed through the prefixing thread."""
    system = System()
    started = time.monotonic()
    for i in range(writers):
        argv = (sys.executable, "-S", "-c", WRITER, str(each_bytes))
        system.spawn(Process(name=str(i), argv=argv, env=dict(os.environ), label=f"node0:rank{i}"))
    left = writers
    while left:
        left -= len(system.wait(None))  # nothing but exits happens here
    system.drain(60.0)
    took = time.monotonic() - started
    system.close()
    return took


def cat(writers: int, each_bytes: int) -> float:
    """Seconds for one `cat` per writer."""
    started = time.monotonic()
    pipes = []
    for _ in range(writers):
        writer = subprocess.Popen([sys.executable, "-S", "-c", WRITER, str(each_bytes)], stdout=subprocess.PIPE)
        pipes += [writer, subprocess.Popen(["cat"], stdin=writer.stdout)]
    for process in pipes:
        process.wait()
    return time.monotonic() - started


def main() -> None:
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1024
    report = os.dup(1)
    sink = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    assert sink.stdin is not None
    os.dup2(sink.stdin.fileno(), 1)  # a reader that is a process, as the container runtime is
    sink.stdin.close()
    for writers in (1, 4, 8):
        each = megabytes * 1_000_000 // writers
        for name, carry in (("prefixed", ours), ("cat", cat)):
            took = carry(writers, each)
            os.write(report, f"{name:>9} writers={writers} {megabytes / took:7.0f} MB/s\n".encode())


if __name__ == "__main__":
    main()
