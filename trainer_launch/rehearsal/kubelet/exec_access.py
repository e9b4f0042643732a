"""Ways into the running pods of a rehearsal, which the stand-in of kubectl (`rehearsal/kubelet/kubectl.py`) goes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer_launch.model import Process
from trainer_launch.rehearsal.controllers.pod_values import Pod

_STAND_IN = Path(__file__).with_name("kubectl.py")


class Doors:
    """A folder with a record of each container that runs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def kubectl(self) -> str:
        """The text of a program to be put in kubectl's place."""
        words = (sys.executable, "-I", "-S", str(_STAND_IN), str(self._folder))
        return f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n'

    def open(self, pod: Pod, name: str, process: Process, enter: Sequence[str] = ()) -> None:
        """A container is about to run; its pod is found by its name and by its address.

        `enter` is put before a command to run it in the pod's own place, when it has one.
        """
        place = self._folder / pod.name
        if not place.exists():
            place.mkdir(mode=0o700, parents=True)
            (place / "default").write_text(pod.containers[0].name, encoding="utf-8")
            (self._folder / pod.address).symlink_to(place)
        record = place / f"{name}.json"
        record.touch(0o600)  # its variables may be secrets
        told = {"env": dict(process.env), "cwd": process.cwd, "enter": list(enter)}
        record.write_text(json.dumps(told), encoding="utf-8", errors="surrogateescape")

    def close(self, pod: Pod, name: str) -> None:
        """A container has ended."""
        (self._folder / pod.name / f"{name}.json").unlink(missing_ok=True)
