"""Each case in `cases/CONTRACT.yaml`: a manifest, and what one container of one of its pods sees.

The values are those that the controllers' own tests and code give; "source" says where. Content of a file that is
not known (`EXIST`, or empty: keys, scripts) only has to be there.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.rehearsal.controllers.manifests import cases
from trainer_launch.contracts import read_job
from trainer_launch.contracts.snapshot import flat, pod_from_snapshot
from trainer_launch.rehearsal.controllers import snapshot_of as snapshot
from trainer_launch.rehearsal.controllers import workload_of
from trainer_launch.rehearsal.controllers.documents import read_documents
from trainer_launch.rehearsal.controllers.pod_values import Container, Pod
from trainer_launch.rehearsal.controllers.pod_values import pods as pods

CASES = cases()
LEFT_OUT = ("EXIST", "")


def container_of(pod: Pod, name: str | None) -> Container:
    return pod.main if name is None else next(one for one in (*pod.init, *pod.containers) if one.name == name)


def pod_of(name: str, want: dict[str, Any]) -> Pod:
    documents = read_documents(CASES[name]["manifest"], name)
    workload = workload_of(documents)
    made = pods(workload, lambda _: want.get("address", "10.244.0.2"))
    return next(pod for pod in made if pod.name == want["hostname"])


@pytest.mark.parametrize("name", CASES)
def test_a_manifest_gives_what_the_controller_gives(name: str) -> None:
    want = CASES[name]["want"]
    pod = pod_of(name, want)
    container = container_of(pod, want.get("container"))
    assert dict(container.env) == want["env"]
    assert {
        path: "" if want["files"].get(path) in LEFT_OUT else file.text for path, file in container.files.items()
    } == {path: "" if text in LEFT_OUT else text for path, text in want["files"].items()}
    if "namespace" in want:
        assert pod.namespace == want["namespace"]
    if "command" in want:
        assert [list(container.command), list(container.args)] == [want["command"], want.get("args", [])]
    if "modes" in want:
        assert {path: f"{file.mode:04o}" for path, file in container.files.items()} == want["modes"]
    assert want.get("labels", {}).items() <= pod.draft.labels.items()


@pytest.mark.parametrize("name", CASES)
def test_what_is_rendered_is_read_back_as_the_job_that_it_is(name: str) -> None:
    want = CASES[name]["want"]
    pod = pod_of(name, want)
    rendered = json.loads(json.dumps(snapshot(pod, container_of(pod, want.get("container")))))
    job = read_job(pod_from_snapshot(rendered), None)
    assert job.contract in want["contract"]
    got = flat(job)
    assert {key: got[key] for key in want["job"]} == want["job"]
