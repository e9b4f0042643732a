"""Faults in words: what each means, whom it is for, and what does not fit."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.rehearsal.refusals import refusal
from trainer_launch.rehearsal import faults
from trainer_launch.rehearsal.faults import InjectedFault, When, target

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
