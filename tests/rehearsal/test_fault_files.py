"""Faults in a YAML file: texts and objects alike; a complaint names file and entry."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.rehearsal.refusals import refusal
from trainer_launch.model.errors import UsageError
from trainer_launch.rehearsal.faults import grammar, requests

GOOD = r"""
faults:
- kill worker node=1 at=step:40
- 'kill pod at=line:"epoch \d+ done"'
- {fault: partition, node: 1, for: 10s, at: 1m}
- fault: term pod
  grace: 10
  back: never
  at: step:7
- {fault: partition, pod: job-worker-0, for: 2.5, at: 'line:link (is )?up'}
"""


def test_texts_and_objects_are_the_same_faults() -> None:
    texts = [
        "kill worker node=1 at=step:40",
        r'kill pod at=line:"epoch \d+ done"',
        "partition node=1 for=10s at=1m",
        "term pod grace=10s back=never at=step:7",
        "partition pod=job-worker-0 for=2.5s at='line:link (is )?up'",
    ]
    faults = [*requests.read(GOOD, "f.yaml"), *map(grammar.parse, texts)]
    values = [replace(fault, text="") for fault in faults]
    assert values[: len(texts)] == values[len(texts) :]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("", ["f.yaml holds 0 documents"]),
        ("faults: [add node]\n---\nfaults: [add node]", ["f.yaml holds 2 documents"]),
        ("- add node", ["f.yaml", "expected an object"]),
        ("fault: [add node]", ["f.yaml: fault is a list; expected only faults:"]),
        ("faults: []", ["faults", "a list of faults"]),
        ("faults: add node", ["faults is 'add node'", "a list"]),
        ("faults: [add node, kil pod]", ["f.yaml: faults[1] 'kil pod'", "did you mean kill pod?"]),
        ("faults: [add node, 3]", ["f.yaml: faults[1]", "the number 3", "kill worker node=1"]),
        ("faults: [{kind: add node}]", ["f.yaml: faults[0].fault is missing"]),
        ("faults: [{fault: add node, for: 3}]", ["f.yaml: faults[0] (add node)", "add node has no for"]),
        ("faults: [{fault: add node, node: true}]", ["faults[0].node is true", "a string"]),
        ("faults: [{fault: add node, node: [1]}]", ["faults[0].node"]),
        ("faults: [{fault: explode}]", ["faults[0] (explode)", "expected one of"]),
        ("faults:\n- {fault: add node, at: 1s, at: 2s}", ["'at' stands twice", "line 2"]),
        ("faults: [" + "add node," * 1001 + "]", ["1001 faults", "1000"]),
        ("faults: [", ["f.yaml is not valid YAML", "line"]),
        ("x" * 2_000_000, ["f.yaml is larger"]),
    ],
)
def test_a_complaint_names_file_and_entry(text: str, parts: list[str]) -> None:
    with pytest.raises(UsageError) as refused:
        requests.read(text, "f.yaml")
    assert "\n" not in str(refused.value)
    for part in parts:
        assert part in str(refused.value)


VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20))
KEYS = st.sampled_from(["fault", "node", "pod", "at", "for", "rate", "grace", "back", "worker", "x"])
ENTRIES = st.one_of(VALUES, st.dictionaries(KEYS, VALUES, max_size=4), st.lists(VALUES, max_size=2))


@hypothesis.given(st.lists(ENTRIES, max_size=4), st.sampled_from(sorted(grammar.KINDS)))
def test_any_file_is_faults_or_one_sentence(entries: list, kind: str) -> None:
    yaml = pytest.importorskip("yaml")
    for entry in entries:
        if isinstance(entry, dict) and "fault" in entry:
            entry["fault"] = kind
    text = yaml.safe_dump({"faults": entries})
    refused = refusal(lambda: requests.read(text, "f.yaml"))
    assert "\n" not in refused
    if refused:
        assert refused.startswith("f.yaml")
    else:
        assert all(grammar.parse(one.text) == one for one in requests.read(text, "f.yaml"))


def test_a_file_is_told_from_a_fault_by_its_name() -> None:
    assert requests.names_file("faults.yaml")
    assert requests.names_file("my faults.yml")
    assert not requests.names_file("kill pod at=line:a.yaml")
    assert not requests.names_file("add node")
