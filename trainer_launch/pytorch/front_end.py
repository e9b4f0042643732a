"""A front end such as `accelerate launch` as it is, until it starts the training: then it becomes the launcher.

The front end's own Python runs this file by its path: it needs torch, and nothing of ours. Arguments: the orders of
`planning/plain.py` as JSON, then PROGRAM or -m MODULE, and what was typed behind it. Where the front end calls
torch.distributed.run, or starts the script as a child, this process is replaced by `trainer-launch run`: it stays
PID 1, and what the front end has set in the environment is inherited.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, NoReturn

ORDERS, WORDS = json.loads(sys.argv[1]), sys.argv[2:]
# What front ends say where nobody has typed anything; a contract of the pod may know better.
DEFAULTS = {"master_port": ("29400", "29500"), "node_rank": ("0",), "master_addr": ("127.0.0.1", "None")}
MEETING = {name: os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT") if name in os.environ}  # the pod's
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
LAUNCHERS = ("torchrun", "mpirun", "mpiexec", "deepspeed")


def arguments(namespace: argparse.Namespace, parser: argparse.ArgumentParser) -> list[str]:
    """The words of torchrun that differ from its defaults."""
    words = []
    for action in parser._actions:
        value = getattr(namespace, action.dest, action.default)
        text = ",".join(value) if isinstance(value, list) else str(value)
        is_default = value in (None, action.default) or text in (
            str(action.default),
            *DEFAULTS.get(action.dest, ()),
        )
        if action.dest == "node_rank" and not ORDERS["is_one_of_several"]:
            is_default = namespace.rdzv_backend != "static"  # nobody else tells it, and static nodes need it
        if not action.option_strings or is_default or text.startswith("None:"):
            continue
        if action.dest == "standalone" and ORDERS["is_one_of_several"] and "--standalone" not in WORDS:
            continue
        if action.dest == "nnodes" and ORDERS["conflict"] and text in ("1", "1:1"):
            leave(2, f"it starts 1 node (--nnodes={text}), but {ORDERS['conflict']}; {ORDERS['advice']}")
        flag = action.option_strings[-1]
        words += [flag] if action.nargs == 0 else [f"{flag}={text}"]
    return [*words, "--", namespace.training_script, *namespace.training_script_args]


def become_launcher(command: list[str], env: Mapping[str, str] = os.environ) -> NoReturn:
    """Replace this process; what asks it to stop meanwhile waits until the launcher hears it."""
    signal.pthread_sigmask(signal.SIG_BLOCK, STOPS)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(ORDERS["launcher"][0], [*ORDERS["launcher"], *command], dict(env))


def leave(code: int, why: str) -> NoReturn:
    """End before any training has begun."""
    sys.stderr.write(f"trainer-launch: error: {ORDERS['name']}: {why}\n")
    tell(why)
    os._exit(code)


def tell(why: str) -> None:
    """Write the termination message, where there is a file for it."""
    with contextlib.suppress(OSError), open(ORDERS["termination_log"], "r+", encoding="utf-8") as file:
        file.truncate()
        file.write(f"{ORDERS['name']}: {why}\n")


class Child(subprocess.Popen):  # type: ignore[type-arg]
    """A child as ever, unless it is the training."""

    def __init__(self, args: Any, *more: Any, **options: Any) -> None:
        words = list(args) if isinstance(args, list | tuple) else [args]
        program = words[1:] if words[0] == sys.executable else words
        program = program[1:] if program[:1] == ["-m"] else program
        is_script = program is not words and program[0].endswith(".py")
        if is_script or program == sys.argv[-len(program) :] or os.path.basename(words[0]) in LAUNCHERS:
            env = dict(options.get("env") or os.environ)
            if ORDERS["is_one_of_several"] and env.get("MASTER_ADDR") in DEFAULTS["master_addr"]:
                env |= MEETING
            if ORDERS["workers"]:  # a child is one process
                env.setdefault(*ORDERS["workers"])
            become_launcher(words, env)
        super().__init__(args, *more, **options)


def main() -> None:
    """Run the front end."""
    for number in STOPS:
        code = 130 if number == signal.SIGINT else 143
        why = f"{number.name} stopped it before the training began"
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda *_, code=code, why=why: leave(code, why))
    import torch.distributed.run as torchrun  # as PID 1, signals have to be handled before

    parser_of = torchrun.get_args_parser
    torchrun.run = lambda namespace: become_launcher(["torchrun", *arguments(namespace, parser_of())])
    torchrun.main = lambda words=None: torchrun.run(parser_of().parse_args(words))
    subprocess.Popen = Child  # type: ignore[misc]
    sys.excepthook = failed
    is_module = WORDS[0] == "-m"
    sys.argv = WORDS[is_module:]
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(sys.argv[0])
    try:
        if is_module:
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            tell(f"it ended with {end.code} before the training began")
        raise


def failed(kind: type[BaseException], problem: BaseException, trace: TracebackType | None) -> None:
    """Say in the termination message how the front end failed."""
    tell(f"{kind.__name__} before the training began: {str(problem)[:500]}")
    sys.__excepthook__(kind, problem, trace)


main()
