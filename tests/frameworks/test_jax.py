"""JAXJobs and TrainJobs of JAX train with real JAX, and get over lost pods as far as JAX can."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.launching import launch
from tests.frameworks import frameworks
from tests.frameworks.rehearsals import RUN_S, Rehearsal, changed, explained, got_over, lives, losses
from trainer_launch.model import exit_codes

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.process,
    pytest.mark.timeout(frameworks.MAKING_S + RUN_S),
]
JOBS = {
    "jaxjob-simple.yaml": ("JAXJob jaxjob-simple", ("jaxjob-simple-worker-0", "jaxjob-simple-worker-1")),
    "trainjob-jax.yaml": ("TrainJob jax-bytes", ("jax-bytes-node-0-0", "jax-bytes-node-0-1")),
}
# By the line, as steps are reported once a second, in which a quick machine does hundreds.
AT_100 = r"at=line:step\s100/"


def jax(manifest: str | Path, *faults: str) -> Rehearsal:
    return Rehearsal("jax", manifest, *(word for text in faults for word in ("--fault", text)))


@pytest.mark.parametrize("manifest", JOBS)
def test_two_processes_learn_as_one(manifest: str) -> None:
    title, pods = JOBS[manifest]
    with jax(manifest) as job:
        code, output = job.ended()
    assert code == 0, output
    assert f"{title}: Succeeded" in output
    told = losses(output)
    assert told[0] > 5 > 3 > told[-1], "a model that knows nothing has 5.55"
    assert set(re.findall(r"process \d of \d", output)) == {"process 0 of 2", "process 1 of 2"}
    assert [lives(output, pod) for pod in pods] == [(1, 0), (1, 0)]


def test_a_process_that_is_killed_ends_the_other_and_both_start_again_in_place() -> None:
    _, pods = JOBS["jaxjob-simple.yaml"]
    output = got_over("jax", "jaxjob-simple.yaml", pods[1], after=r"step 100/")
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 80
    assert [lives(output, pod) for pod in pods] == [(1, 1), (1, 1)]
    assert output.count("step 1/") == 1


@pytest.mark.parametrize(
    ("manifest", "lost"), [("jaxjob-simple.yaml", 0), ("jaxjob-simple.yaml", 1), ("trainjob-jax.yaml", 1)]
)
def test_a_pod_that_is_lost_is_made_anew_and_both_go_on_from_the_checkpoint(manifest: str, lost: int) -> None:
    _, pods = JOBS[manifest]
    with jax(manifest, f"kill pod node={lost} {AT_100}") as job:
        code, output = job.ended()
    assert code == 0, output
    assert int(re.findall(r"resumed at step (\d+)", output)[0]) >= 80
    told = [lives(output, pod) for pod in pods]
    assert (told[lost], told[1 - lost]) == ((2, 0), (1, 1))


def test_under_exit_code_the_survivor_of_a_killed_process_is_retryable_too(tmp_path: Path) -> None:
    def change(text: str) -> str:
        return text.replace("OnFailure", "ExitCode").replace("run, --]", "run, --prefix, --]")

    _, pods = JOBS["jaxjob-simple.yaml"]
    with jax(changed("jaxjob-simple.yaml", tmp_path, change), f"kill pod node=0 {AT_100}") as job:
        code, output = job.ended()
    assert code == 0, output
    assert f"{pods[1]} failed (exit code {exit_codes.INFRASTRUCTURE}): the controller recreates it" in output
    assert [lives(output, pod) for pod in pods] == [(2, 0), (2, 0)]
    assert "resumed at step" in output


@pytest.mark.parametrize("manifest", JOBS)
def test_sigterm_to_one_process_stops_both_after_the_same_step_and_they_go_on_there(manifest: str) -> None:
    _, pods = JOBS[manifest]
    with jax(manifest, f"term pod node=1 grace=20s {AT_100}") as job:
        code, output = job.ended()
    assert code == 0, output
    stopped = re.findall(r"stopped at step (\d+): asked by SIGTERM", output)
    assert len(stopped) == 2
    assert re.findall(r"resumed at step (\d+)", output) == stopped[:1] == stopped[1:]
    assert [lives(output, pod) for pod in pods] == [(1, 1), (2, 0)]


@pytest.mark.parametrize("manifest", JOBS)
def test_rendered_pods_tell_each_process_its_place(manifest: str, tmp_path: Path) -> None:
    rendered = launch("rehearse", "-f", str(frameworks.EXAMPLES / manifest), "--render", str(tmp_path))
    assert rendered.returncode == 0, rendered.stderr
    jobs = [json.loads(explained(path).stdout)["job"] for path in sorted(tmp_path.glob("*.json"))]
    assert [(job["nodes"], job["node_rank"]) for job in jobs] == [(2, 0), (2, 1)]
