"""Each fault of the catalogue is found, with its machine, and nobody else; of healthy fleets nobody is accused."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.conftest import require
from tests.pods import missing
from tests.preflight.fault_catalogue import FAULTS, HEALTHY_FLEETS, FleetFault, HealthyFleet, accused, looked_for
from tests.preflight.fleet import simulated_library

pytestmark = pytest.mark.process

# What no rule finds yet. Who writes the rule removes the line.
SLOW = {"packets over 1,000 bytes to a node are lost (MTU)", "a firewall drops what one node sends to another"}


@pytest.fixture(autouse=True)
def played() -> Iterator[None]:
    with simulated_library():
        yield


def marked(fault: FleetFault) -> object:
    long = pytest.mark.long("tests/preflight/cluster/test_hosts.py")
    return pytest.param(fault, id=fault.text, marks=[long] if fault.text in SLOW else [])


@pytest.mark.parametrize("fault", [marked(fault) for fault in FAULTS])
def test_a_fault_is_found_with_its_machine_and_nobody_else_is_accused(fault: FleetFault) -> None:
    why = missing() if fault.needs_root else None
    require(why is None, why or "")
    result = looked_for(fault)
    assert result.is_right, result
    assert not result.accused


@pytest.mark.parametrize("nodes", [8, 64])
@pytest.mark.parametrize("fleet", [pytest.param(fleet, id=fleet.text) for fleet in HEALTHY_FLEETS])
def test_nobody_is_accused_in_a_healthy_fleet(fleet: HealthyFleet, nodes: int) -> None:
    failed, _ = accused(fleet, nodes)
    assert not failed


def test_there_are_enough_of_all_kinds_and_each_has_words_of_its_own() -> None:
    kinds = Counter(fault.kind for fault in FAULTS)
    wanted = ("device", "link", "rail", "clock", "driver", "disk", "DNS", "time", "shm", "version", "environment")
    assert kinds.keys() == set(wanted)
    assert (len(FAULTS) >= 40, len(HEALTHY_FLEETS) >= 20) == (True, True)
    texts = Counter((*(fault.text for fault in FAULTS), *(fleet.text for fleet in HEALTHY_FLEETS)))
    assert [text for text, count in texts.items() if count > 1] == []
