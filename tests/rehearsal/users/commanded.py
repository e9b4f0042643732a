"""How users' scripts are rehearsed by the command itself."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainer_launch.rehearsal.controllers.local_jobs import RUN

__all__ = ["RUN", "clean", "command"]
USERS = Path(__file__).parent
JOB = """
apiVersion: kubeflow.org/v1
kind: PyTorchJob
metadata: {name: demo}
spec:
  runPolicy: {backoffLimit: 5}
  pytorchReplicaSpecs:
    Master:
      replicas: 1
      restartPolicy: OnFailure
      template:
        spec:
          containers:
            - name: pytorch
              image: any
              command: COMMAND
"""


def command(folder: Path, script: str, *flags: str, last: int = 60) -> tuple[str, ...]:
    """Rehearse one pod that runs a user's script up to step `last`."""
    run = [sys.executable, str(USERS / f"{script}.py"), str(folder / "checkpoint"), str(last)]
    (folder / "job.yaml").write_text(JOB.replace("COMMAND", repr(run)))
    return (sys.executable, "-c", RUN, "rehearse", "-f", str(folder / "job.yaml"), *flags)


def clean() -> dict[str, str]:
    """The environment without settings of ours."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TRAINER_LAUNCH_")}
