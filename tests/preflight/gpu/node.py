"""trainer-launch on a machine whose GPUs are played: as the program itself, but for what /dev and the bench say."""

from __future__ import annotations

import os

from tests.preflight.gpu.machine import BENCH
from trainer_launch import cli
from trainer_launch.host import machine
from trainer_launch.model import Gpus
from trainer_launch.preflight import gpu_collect as collect
from trainer_launch.preflight import stamp


def main() -> None:
    """FAKE_GPUS says how many there are, FAKE_HOST_PATH where the machine's stamps lie."""
    count = int(os.environ["FAKE_GPUS"])
    machine.count = lambda env, root=None: Gpus(count=count, reason=f"{count} in /dev")
    collect.BENCH = BENCH
    stamp.FOLDER = os.environ.get("FAKE_HOST_PATH", stamp.FOLDER)
    cli.main()


if __name__ == "__main__":
    main()
