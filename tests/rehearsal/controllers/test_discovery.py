"""discover_hosts.sh of a rehearsal: rewritten in the launcher's pod when pods come and go, as the operators do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.launching import launch
from tests.rehearsal.controllers.manifests import replica

HEAD = "apiVersion: kubeflow.org/v2beta1\nkind: MPIJob\nmetadata: {name: j}\n"


WATCH = (
    "f=/etc/mpi/discover_hosts.sh; sh $f; echo then; "
    "for n in $(seq 300); do [ $(sh $f | wc -l) = 1 ] && break; sleep 0.1; done; sh $f; ls -l $f | cut -c1-10"
)


@pytest.mark.process
def test_it_follows_the_pods(tmp_path: Path) -> None:
    launcher = replica("l", f"command: [sh, -c, {json.dumps(WATCH)}]")
    worker = replica("w", "command: [sleep, '1000']", "replicas: 2")
    (tmp_path / "job.yaml").write_text(
        HEAD + f"spec: {{slotsPerWorker: 2, runPolicy: {{cleanPodPolicy: Running}}, "
        f"mpiReplicaSpecs: {{Launcher: {launcher}, Worker: {worker}}}}}"
    )
    fault = ("--fault", "kill pod node=1 at=1s back=never")
    ended = launch("rehearse", "-f", str(tmp_path / "job.yaml"), *fault)
    assert ended.returncode == 0, ended.stderr
    said = [line.removeprefix("[j-launcher] ") for line in ended.stdout.splitlines()]
    assert said == ["127.0.0.3", "127.0.0.4", "then", "127.0.0.3", "-r-xr-xr-x"]
