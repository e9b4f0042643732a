"""What programs and children leave behind or print for us: a worker may write anything into any of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from msgspec import to_builtins

from tests.fuzz.oracle import FOLDER, assert_encodable, assert_terminal, attempt
from tests.fuzz.registry import target
from trainer_launch.commands import status
from trainer_launch.host import deadline_subprocess, process_tree, runtime_directory, shm
from trainer_launch.model import codec, findings
from trainer_launch.observability import event_log, metrics, node_view, progress, trainjob_status
from trainer_launch.preflight import gpu_collect
from trainer_launch.preflight.cluster import pair_tests
from trainer_launch.preflight.cluster import preflight_messages as msg

_VIEW = node_view.View(
    version="0", pid=1, started_ticks=1, run_dir="/r", host="h", node_rank=0, contract="c", engine="e",
    phase="running", since_s=0.0, started_s=0.0,
)  # fmt: skip
_TEST = msg.Test(1, 0, "h", 1, "t", 1.0)


@target()
def events(data: bytes) -> None:
    """The news of a run, which PID 1 and `status` read while the job runs."""
    told = event_log._parse_all(data)
    standing = event_log.stand(told)
    for one in told:
        json.dumps(one.event, allow_nan=True)
    assert_encodable(metrics.metrics_text(_VIEW, standing, (), None, at_s=1.0))


@target()
def report(data: bytes) -> None:
    """What a training process reports: for Prometheus, and for the TrainJob."""
    found = progress.parse(data)
    if found is None:
        return
    text = metrics.metrics_text(_VIEW, event_log.Standing(), (found,), None, at_s=1.0)
    assert_encodable(text)
    assert all(line.startswith(("#", "trainer_launch_")) for line in text.split("\n")[:-1]), text
    assert_terminal(status.shown_lines([status.report_line({**to_builtins(found), "age_s": 1.0})]))
    told = json.loads(trainjob_status.body(found, finished=False))["trainerStatus"]
    assert 0 <= told.get("progressPercentage", 0) <= 100
    assert all(len(one["value"]) <= 64 for one in told["metrics"])


@target()
def launchers_view(data: bytes) -> None:
    """What another launcher in this container says of itself; anybody may write such a file to /tmp."""
    path = Path(FOLDER, runtime_directory.LAUNCHER)
    path.write_bytes(
        data.replace(b"@PID", str(_self().pid).encode()).replace(b"@TICKS", str(_self().started).encode())
    )
    view = node_view.read(FOLDER)
    if view is not None:
        assert_encodable(metrics.metrics_text(view, event_log.Standing(), (), None, at_s=1.0))
        known = {**to_builtins(view), "standing": to_builtins(event_log.Standing()), "reports": [], "printed": None}
        json.dumps(known, allow_nan=False)
        assert_terminal(status.shown_lines(status.launcher_lines([known], 1.8e9)))
        sorted([(view.node_rank is None, view.node_rank or 0, view.pid), (False, 0, 1)])


def _self() -> process_tree.ProcessEntry:
    found = process_tree.read(int(Path("/proc/self").readlink().name))
    assert found is not None
    return found


@target()
def childs_answer(data: bytes) -> None:
    """What our own children print, should a library of theirs print into it, or somebody stand in their place."""
    shm._parsed(data, "h")
    tried = deadline_subprocess._tried(data)
    assert isinstance(tried.stage, str)
    assert all(isinstance(value, float | int) for value in tried.values.values())
    msg.render(msg.Result(1, pair_tests.read_answer(_TEST, data, "it said nothing")))
    attempt(codec.decode, msg.NodeReport, data, kinds=(codec.MessageError,))


@target(8000)
def gpu_answer(data: bytes) -> None:
    """What the children that look at GPUs print."""
    facts = gpu_collect.parse_facts(data)
    for gpu in facts.gpus:
        assert isinstance(gpu.uuid + gpu.model, str)
    gpu_collect.visible(facts.gpus, "0,GPU-1")
    test = gpu_collect.parse_test(0, "", deadline_subprocess.Ended(status=1, stdout=data), 1.0)
    assert isinstance(test.network, str)
    tested = gpu_collect.GpuFacts(trouble="", driver=facts.driver, tests=(test,))
    assert all(math.isfinite(one.value) for one in findings.fitted(tested.measures))
