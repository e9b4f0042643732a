"""Each case in `cases/CONTRACT.json` is one pod and what must be read from it.

`{"name": …, "pod": {...snapshot...}, "contract": [accepted names], "want": {keys of the flat job}}`, or
`"error": "<what the message names>"`. `"ask_for"` names the contract as --contract would.
"source" says where the values are from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contracts.pods import CASES
from trainer_launch.contracts import CONTRACTS, read_job
from trainer_launch.contracts.snapshot import flat, pod_from_snapshot
from trainer_launch.model import Job
from trainer_launch.model.errors import LaunchError

KEYS = {"name", "source", "note", "pod", "contract", "ask_for", "want", "error", "warns"}


def read(case: dict[str, Any]) -> Job:
    return read_job(pod_from_snapshot(case["pod"]), case.get("ask_for"))


@pytest.mark.parametrize("name", CASES)
def test_each_pod_is_read_as_its_case_says(name: str) -> None:
    case = CASES[name]
    assert set(case) <= KEYS
    if "error" in case:
        with pytest.raises(LaunchError) as caught:
            read(case)
        assert case["error"] in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    job = read(case)
    if "contract" in case:
        assert job.contract in case["contract"]
    assert differences(case.get("want", {}), flat(job)) == []
    assert all(any(word in warning for warning in job.warnings) for word in case.get("warns", []))


def differences(want: dict[str, Any], got: dict[str, Any]) -> list[str]:
    """One line per key that is not as wanted."""
    absent = object()
    return [
        f"{key}: want {value!r}, got {'nothing' if got.get(key, absent) is absent else repr(got[key])}"
        for key, value in want.items()
        if got.get(key, absent) != value or type(got[key]) is not type(value)
    ]


@pytest.mark.parametrize("contract", [contract.name for contract in CONTRACTS])
def test_each_contract_has_at_least_three_cases(contract: str) -> None:
    read_as = [name for name, case in CASES.items() if contract in case.get("contract", ())]
    assert len(read_as) + len([name for name in CASES if name.startswith(f"{contract}/")]) >= 3


def test_no_two_cases_have_the_same_name() -> None:
    files = [json.loads(path.read_text(encoding="utf-8")) for path in (Path(__file__).parent / "cases").iterdir()]
    assert sum(len(cases) for cases in files) == len(CASES)
