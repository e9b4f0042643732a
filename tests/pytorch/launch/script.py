"""A script that calls `launch`, started as a user would start it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.cli.launching import clean_env, ended

ROOT = Path(__file__).parents[3]
SCRIPT = """
import json, os, signal, sys, threading, time
import trainer_launch
from trainer_launch import Elastic, RunPolicy, WorkerFailedError

def quick(**fields):
    return Elastic(**{"nproc_per_node": 2, "monitor_interval": 0.1, "start_method": "spawn", **fields})

def add(x, y=1):
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.barrier()
    dist.destroy_process_group()
    return [int(os.environ["RANK"]), int(total), x + y]

def unlucky():
    if os.environ["RANK"] == "1":
        raise ValueError("no luck")
    time.sleep(60)

def crash_once(mark):
    if os.environ["RANK"] == "0" and not os.path.exists(mark):
        open(mark, "x").close()
        os._exit(7)
    return os.environ["TORCHELASTIC_RESTART_COUNT"]

def give_back_a_function():
    return lambda: 1

def wait():
    signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b"saved\\n"), os._exit(0)))
    os.write(1, b"ready\\n")
    while True: time.sleep(0.1)

def wait_deaf():
    os.write(1, b"worker %d\\n" % os.getpid())
    time.sleep(60)

def failure(fn, *args, **fields):
    try:
        trainer_launch.launch(fn, quick(**fields), *args)
    except Exception as problem:
        return [type(problem).__name__, str(problem), getattr(problem, "rank", None)]

def say(what):
    print("said " + json.dumps(what), flush=True)
"""


def program(folder: Path, main: str, top: str = "") -> tuple[str, ...]:
    """A script whose main block is `main`; `top` stands before that, for workers to find."""
    path = folder / "job.py"
    path.write_text(
        f"{SCRIPT}\n{top}\nif __name__ == '__main__':\n" + "".join(f"    {line}\n" for line in main.splitlines())
    )
    return sys.executable, str(path)


def start(
    folder: Path, main: str, *, top: str = "", argv: tuple[str, ...] = (), **env: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        argv or program(folder, main, top),
        env=clean_env({"PYTHONPATH": str(ROOT), **env}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end(process: subprocess.Popen[str]) -> tuple[int, list, str]:
    """The exit code, what was said, and all output."""
    code, output = ended(process)
    said = [json.loads(line[5:]) for line in output.splitlines() if line.startswith("said ")]
    return code, said, output
