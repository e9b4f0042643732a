"""Jobs whose two processes train as one, with real TensorFlow and JAX: lost ones end the other, and both go on."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.frameworks import frameworks
from tests.frameworks.rehearsals import (
    AT_100,
    RUN_S,
    assert_learnt,
    changed,
    got_over,
    lives,
    succeeded,
)
from trainer_launch.model import exit_codes

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.process,
    pytest.mark.timeout(frameworks.MAKING_S + RUN_S),
]
TF, JAXJOB, TRAINJOB = "tfjob-simple.yaml", "jaxjob-simple.yaml", "trainjob-jax.yaml"
# Framework, title, pods, and how a process says who it is.
JOBS = {
    TF: (
        "tensorflow",
        "TFJob tfjob-simple",
        ("tfjob-simple-worker-0", "tfjob-simple-worker-1"),
        "worker",
    ),
    JAXJOB: ("jax", "JAXJob jaxjob-simple", ("jaxjob-simple-worker-0", "jaxjob-simple-worker-1"), "process"),
    TRAINJOB: ("jax", "TrainJob jax-bytes", ("jax-bytes-node-0-0", "jax-bytes-node-0-1"), "process"),
}


@pytest.mark.parametrize("manifest", JOBS)
def test_two_processes_learn_as_one(manifest: str) -> None:
    framework, title, pods, word = JOBS[manifest]
    output = succeeded(framework, manifest)
    assert f"{title}: Succeeded" in output
    assert_learnt(output)
    assert {f"{word} {n} of 2" for n in (0, 1)} <= set(re.findall(rf"{word} \d of \d", output))
    assert [lives(output, pod) for pod in pods] == [(1, 0), (1, 0)]


@pytest.mark.parametrize("manifest", [TF, JAXJOB])
def test_a_process_that_is_killed_ends_the_other_and_both_start_again_in_place(manifest: str) -> None:
    framework, _, pods, _ = JOBS[manifest]
    output = got_over(framework, manifest, pods[1], after=r"step 100/")
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 80
    assert [lives(output, pod) for pod in pods] == [(1, 1), (1, 1)]
    assert output.count("step 1/") == 1


@pytest.mark.parametrize(("manifest", "lost"), [(TF, 0), (JAXJOB, 0), (JAXJOB, 1), (TRAINJOB, 1)])
def test_a_pod_that_is_lost_is_made_anew_and_both_go_on_from_the_checkpoint(manifest: str, lost: int) -> None:
    framework, _, pods, _ = JOBS[manifest]
    output = succeeded(framework, manifest, f"kill pod node={lost} {AT_100}")
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 80
    told = [lives(output, pod) for pod in pods]
    assert (told[lost], told[1 - lost][0]) == ((2, 0), 1)
    assert told[1 - lost][1] >= 1, "it starts again in place until the other pod is there"
    assert output.count("step 1/") == 1


@pytest.mark.parametrize(("manifest", "lost"), [(TF, 1), (JAXJOB, 0)])
def test_under_exit_code_the_survivor_of_a_killed_process_is_retryable_too(
    manifest: str, lost: int, tmp_path: Path
) -> None:
    """The framework itself ends with 1, which the policy takes for the end of the job; the launcher knows why."""

    def change(text: str) -> str:
        return text.replace("OnFailure", "ExitCode").replace("run, --]", "run, --prefix, --]")

    framework, _, pods, _ = JOBS[manifest]
    output = succeeded(framework, changed(manifest, tmp_path, change), f"kill pod node={lost} {AT_100}")
    survivor = pods[1 - lost]
    assert f"{survivor} failed (exit code {exit_codes.INFRASTRUCTURE}): the controller recreates it" in output
    assert [lives(output, pod) for pod in pods] == [(2, 0), (2, 0)]
    assert "resumed at step" in output


@pytest.mark.parametrize("manifest", JOBS)
def test_sigterm_to_one_process_stops_both_after_the_same_step_and_they_go_on_there(manifest: str) -> None:
    framework, _, pods, _ = JOBS[manifest]
    output = succeeded(framework, manifest, f"term pod node=1 grace=20s {AT_100}")
    stopped = re.findall(r"stopped at step (\d+): asked by SIGTERM", output)
    assert len(stopped) == 2
    assert re.findall(r"resumed at step (\d+)", output) == stopped[:1] == stopped[1:]
    assert [lives(output, pod) for pod in pods] == [(1, 1), (2, 0)]
