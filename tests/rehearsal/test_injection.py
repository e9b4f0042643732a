"""Faults: their words, the pods they are for, whether they are possible here, and when each comes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from tests.cli.launching import launch, program
from tests.refusals import refusal
from trainer_launch.model.errors import UsageError
from trainer_launch.model.value_parsers import MAX_LINE
from trainer_launch.rehearsal import faults, pod_isolation
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase, PodState
from trainer_launch.rehearsal.faults import KINDS, Faults, InjectedFault, When, target
from trainer_launch.rehearsal.history import HistoryEntry, What

FIRST_STEP = When(step=1)


def without_words(fault: InjectedFault) -> InjectedFault:
    return replace(fault, text="")


def fault(kind: str, when: When = FIRST_STEP, **fields: object) -> InjectedFault:
    return InjectedFault(kind=kind, when=when, **fields)  # type: ignore[arg-type]


MEANINGS = [
    ("kill worker node=1 at=step:40", fault("kill worker", When(step=40), node=1)),
    ("kill worker worker=3 node=0", fault("kill worker", node=0, local_rank=3)),
    ("kill pod back=3s at=1m", fault("kill pod", When(at_s=60.0), back_s=3.0)),
    ("kill pod back=never pod=job-worker-0", fault("kill pod", back_s=None, pod="job-worker-0")),
    ("term pod grace=10", fault("term pod", grace_s=10.0)),
    ("stop worker for=20s", fault("stop worker", for_s=20.0)),
    ("delay dns 20s", fault("delay dns", When(at_s=0.0), for_s=20.0)),
    ("delay dns for=20s", fault("delay dns", When(at_s=0.0), for_s=20.0)),
    ('kill pod at=line:"epoch [0-9]+ done"', fault("kill pod", When(line="epoch [0-9]+ done"))),
    (r"kill pod at=line:loss\s+nan", fault("kill pod", When(line=r"loss\s+nan"))),
    (r"""kill pod 'at=line:say "it"'""", fault("kill pod", When(line='say "it"'))),
    ("  kill\tpod   at=1.5h ", fault("kill pod", When(at_s=5400.0))),
]


@pytest.mark.parametrize(("text", "meant"), MEANINGS)
def test_every_fault_says_what_it_means(text: str, meant: InjectedFault) -> None:
    found = faults.parse(text)
    assert without_words(found) == meant
    assert without_words(faults.parse(found.text)) == meant


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("kill worker at=step:40  worker=0 node=1", "kill worker at=step:40 worker=0 node=1"),
        ('kill pod at="line:a b"', "kill pod 'at=line:a b'"),
    ],
)
def test_people_are_shown_a_fault_as_they_typed_it(text: str, shown: str) -> None:
    assert faults.parse(text).text == shown


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["missing fault", "kill worker, stop worker"]),
        ("kill wroker node=1", ["'kill wroker node=1'", "did you mean kill worker?"]),
        ("explode", ["unknown fault", "kill pod"]),
        ("kill worker nod=1", ["'nod'", "did you mean node?", "kill worker takes node, pod, worker, at"]),
        ("kill worker grace=3s", ["kill worker has no grace", "takes node, pod, worker, at"]),
        ("kill pod node=1 node=2", ["node is given twice"]),
        ("partition 10s for=10s", ["for is given twice"]),
        ("kill pod node=1 pod=x", ["node and pod", "one of them"]),
        ("kill pod node=-1", ["invalid value '-1' for node", "index"]),
        ("kill pod pod=a/b", ["invalid value 'a/b' for pod"]),
        ("kill pod 10s", ["'10s' is not KEY=VALUE", "kill pod takes"]),
        ("partition for=0s", ["invalid value '0s' for for", "60, 10m, 1h30m or 500ms"]),
        ("kill pod at=1.5d", ["invalid value '1.5d' for at", "a time with its unit"]),
        ("kill pod at=step:x", ["invalid value 'step:x' for at", "step:NUMBER"]),
        ("kill pod at=line:(", ["invalid value 'line:(' for at", "line:REGEX"]),
        ("kill pod at=line:" + "a" * 201, ["line:REGEX"]),
        ("kill pod 'at=line:x", ["unclosed '"]),
        ("add node", ["add node was removed in 0.3; use kill pod back=20s"]),
        ("scale workers=4", ["scale was removed in 0.3; use term pod"]),
        ("slow link rate=1MB/s", ["slow link was removed in 0.3; use partition"]),
        ("faults.yaml", ["'faults.yaml' was removed in 0.3; use --fault once for each fault"]),
        ("oom node=1", ["oom was removed in 0.3; use kill worker"]),
        ("fill shm", ["fill shm was removed in 0.3; mount a small memory volume"]),
        ("delay dns", ["delay dns needs for=10s"]),
        ("delay dns 20s node=1", ["delay dns has no node"]),
        ("term pod grace=2h", ["invalid value '2h' for grace", "one hour"]),
        ("kill pod back=sometimes", ["invalid value 'sometimes' for back", "never"]),
        ("kill pod " + "x" * 3000, ["longer than 2000"]),
        ("kill pod \x1b[31m=1", ["\\x1b"]),
    ],
)
def test_what_does_not_fit_is_said_in_one_sentence(text: str, parts: list[str]) -> None:
    sentence = refusal(lambda: faults.parse(text, "--fault"))
    assert sentence.startswith("--fault")
    assert "\n" not in sentence
    assert len(sentence) < 500
    for part in parts:
        assert part in sentence


# -- pods -------------------------------------------------------------------------------------

NODES = ("job-node-0-0", "job-node-0-1", "job-node-0-2")
PODS = (*NODES, "job-launcher-0-0")


@pytest.mark.parametrize(
    ("text", "pod"),
    [
        ("kill pod", "job-node-0-2"),
        ("kill pod node=0", "job-node-0-0"),
        ("kill pod pod=job-launcher-0-0", "job-launcher-0-0"),
        ("kill pod pod=launcher-0-0", "job-launcher-0-0"),
        ("delay dns 3s", None),
    ],
)
def test_a_fault_finds_its_pod(text: str, pod: str | None) -> None:
    assert target(faults.parse(text), NODES, PODS) == pod


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("kill pod node=3", ["no node 3", "nodes 0 to 2"]),
        ("kill pod pod=job-node-0-3", ["no pod job-node-0-3", "did you mean job-node-0-"]),
        ("kill pod pod=zebra", ["no pod zebra", "job-node-0-0"]),
        ("kill pod pod=0", ["0 is ambiguous", "full name"]),
    ],
)
def test_a_pod_that_the_job_has_not_is_refused(text: str, parts: list[str]) -> None:
    sentence = refusal(lambda: target(faults.parse(text), NODES, PODS))
    for part in parts:
        assert part in sentence


class Driver:
    """A job of one pod, which nothing befalls."""

    def __init__(self) -> None:
        draft = SimpleNamespace(role="node", hostname="job-0")
        running = PodState(phase=Phase.RUNNING, running=frozenset({"main"}))
        draft.template = SimpleNamespace(grace_s=30.0)
        self.state: Any = SimpleNamespace(
            condition=None, asked=0, pods={"job-0": SimpleNamespace(draft=draft)}, states={"job-0": running}
        )
        self.kubelet = SimpleNamespace(network=None)
        self.at_s = 0.0
        self.entries: list[HistoryEntry] = []

    def now_s(self) -> float:
        return self.at_s

    def record(self, entry: HistoryEntry) -> None:
        self.entries.append(entry)

    def delete(self, pod: str, grace_s: float, back_s: float | None) -> None:
        """Nothing becomes of the pod."""

    def came(self) -> list[str]:
        return [entry.text for entry in self.entries if entry.what is What.FAULT]


def begin(*texts: str) -> tuple[Faults, Driver]:
    driver: Any = Driver()
    return Faults(map(faults.parse, texts), driver), driver


def pass_time(faults: Faults, driver: Driver, at_s: float) -> list[str]:
    driver.at_s = at_s
    faults.pass_time()
    return driver.came()


def test_a_fault_comes_at_its_time_once() -> None:
    faults, driver = begin("kill pod at=2s", "term pod at=1s")
    assert (faults.due_s(), pass_time(faults, driver, 0.9)) == (1.0, [])
    assert (pass_time(faults, driver, 1.0), faults.due_s()) == (["term pod at=1s"], 2.0)
    assert pass_time(faults, driver, 60.0) == ["term pod at=1s", "kill pod at=2s"]
    assert (len(pass_time(faults, driver, 90.0)), faults.due_s()) == (2, None)


def test_a_step_that_was_jumped_over_counts_as_reached_once() -> None:
    faults, driver = begin("kill pod at=step:40", "kill pod at=step:60")
    for step in (39, 50, 40):
        faults.reached(step)
    assert driver.came() == ["kill pod at=step:40"]
    faults.finish()
    assert driver.entries[-1].why == "step 60 was not reached; the last one was 50"


def test_a_line_is_looked_through_for_the_pattern_up_to_a_length() -> None:
    faults, driver = begin(r"kill pod at=line:loss\s+nan")
    assert len(faults.patterns) == 1
    faults.printed("x" * MAX_LINE + "loss nan")
    assert driver.came() == []
    faults.printed("12:00 loss   nan!")
    faults.printed("loss nan")
    assert len(driver.came()) == 1
    assert not faults.patterns


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("kill pod at=step:40", "the steps are unknown. Print lines such as 'step 40' or call"),
        ("kill pod at=900s", "the job ended before 900 s"),
        ("kill pod at=line:nobody", "no line matched 'nobody'"),
    ],
)
def test_a_fault_that_never_came_has_its_reason(fault: str, why: str) -> None:
    faults, driver = begin(fault)
    faults.finish()
    assert why in driver.entries[-1].why


def test_a_fault_whose_pod_does_not_run_yet_waits_for_it() -> None:
    faults, driver = begin("kill pod at=step:3")
    driver.state.states["job-0"] = PodState()
    faults.reached(3)
    assert (driver.came(), faults.due_s()) == ([], 0.3)
    faults.finish()
    assert driver.entries[-1].why == "job-0 is not running"


def test_a_fault_that_waits_for_steps_says_so_after_a_minute_without_any(caplog: pytest.LogCaptureFixture) -> None:
    faults, driver = begin("kill pod at=step:40")
    assert faults.due_s() == 60.0
    pass_time(faults, driver, 59.9)
    assert caplog.messages == []
    pass_time(faults, driver, 60.0)
    pass_time(faults, driver, 90.0)
    (message,) = caplog.messages
    assert message.startswith(
        "no step in the first 60 s; fault 'kill pod at=step:40' waits for step 40. Print lines"
    )
    assert faults.due_s() is None


def test_a_fault_whose_steps_come_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    faults, driver = begin("kill pod at=step:40")
    faults.reached(1)
    assert (faults.due_s(), pass_time(faults, driver, 90.0), caplog.messages) == (None, [], [])
    others, driver = begin("kill pod at=2m")
    assert (others.due_s(), pass_time(others, driver, 90.0), caplog.messages) == (120.0, [], [])


class Network:
    """Pods that are cut off, or not."""

    def __init__(self) -> None:
        self.cut: list[str] = []

    def cut_off(self, pod: str) -> None:
        self.cut = [pod]

    def reconnect(self, pod: str) -> None:
        self.cut = []


@pytest.mark.parametrize(
    ("first", "second", "until_s"),
    [("for=5s", "for=6s", 8.0), ("for=7s", "for=3s", 8.0), ("for=5s", "", None)],
)
def test_a_pod_is_cut_off_until_the_last_of_its_partitions_is_over(
    first: str, second: str, until_s: float | None
) -> None:
    faults, driver = begin(f"partition node=0 {first} at=1s", f"partition node=0 {second} at=2s")
    network = Network()
    driver.kubelet = SimpleNamespace(network=network)
    cut = {}
    for at_s in (1.0, 2.0, 5.0, 6.0, 7.0, 8.0, 60.0):
        pass_time(faults, driver, at_s)
        cut[at_s] = bool(network.cut)
    assert next((at_s for at_s, is_cut in cut.items() if not is_cut), None) == until_s
    assert sum(entry.what is What.FAULT_OVER for entry in driver.entries) == (1 if until_s is None else 2)
    assert faults.due_s() is None


BY_US = ("kill worker", "stop worker", "kill pod", "term pod")
OWN_NETWORK = ("partition", "delay dns 3s")


def test_what_needs_only_signals_can_be_done_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert faults.isolate([faults.parse(text) for text in BY_US]) is False


@pytest.mark.parametrize("text", OWN_NETWORK)
def test_a_missing_program_is_named_with_its_package(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    sentence = refusal(lambda: faults.isolate([faults.parse(text)]))
    assert sentence.startswith(f"--fault '{text}' is not possible on this machine: unshare and nsenter and ip")
    assert "install util-linux and iproute2" in sentence


def test_the_reason_and_the_remedy_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in pod_isolation.PROGRAMS:
        program(tmp_path / name, "echo unshare failed: Operation not permitted >&2; exit 1")
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(UsageError, match=r"\(unshare failed: Operation not permitted\); run it as root"):
        faults.isolate([faults.parse("partition")])


def test_every_kind_of_fault_is_spoken_of_here() -> None:
    assert {faults.parse(text).kind for text in (*BY_US, *OWN_NETWORK)} == set(KINDS)


@pytest.mark.process
@pytest.mark.parametrize(
    ("words", "part"),
    [
        (
            ("--", "torchrun", "--rdzv-backend", "trainer-launch", "train.py"),
            "trainer-launch (--rdzv-backend) was rem",
        ),
        (("--", "torchrun", "--nnodes=2:1", "train.py"), "--nnodes is '2:1'"),
        (("--spares", "1", "--engine", "plain", "--", "train.py"), "--spares needs torch workers"),
        (("-f", "job.yaml"), "invalid value '9' for --redirects"),
    ],
)
def test_a_command_that_each_pod_would_refuse_is_refused_once(
    tmp_path: Path, words: tuple[str, ...], part: str
) -> None:
    (tmp_path / "train.py").write_text("print('began')")
    container = "{name: pytorch, image: i, args: [torchrun, --redirects, '9', train.py]}"
    worker = f"{{replicas: 2, template: {{spec: {{containers: [{container}]}}}}}}"
    (tmp_path / "job.yaml").write_text(
        "apiVersion: kubeflow.org/v1\nkind: PyTorchJob\nmetadata: {name: job}\n"
        f"spec: {{pytorchReplicaSpecs: {{Worker: {worker}}}}}\n"
    )
    ended = launch("rehearse", *(("--nodes", "2") if words[0] == "--" else ()), *words, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    (line,) = ended.stderr.splitlines()
    assert line.startswith("trainer-launch: error: ")
    assert part in line
