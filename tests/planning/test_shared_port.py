"""Whether scripts that meet at the nodes' typed address are led to the workers' store."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.planning.requests import MACHINE, given, request
from tests.planning.test_torchrun import ALONE, FIXED
from trainer_launch.model import Job, NodeRange, Origin
from trainer_launch.planning import engines
from trainer_launch.planning.job import overlay

FIRST = replace(FIXED, node_rank=0, is_coordinator=True)


@pytest.mark.parametrize(
    ("job", "typed", "shares"),
    [
        (FIRST, {"master_port": "29511"}, True),
        (FIRST, {"rdzv_backend": "c10d", "rdzv_endpoint": "job-node-0-0.job:29511"}, True),
        (FIRST, {"max_restarts": "1"}, False),
        (ALONE, {"master_port": "29511"}, False),
    ],
    ids=["a master", "a rendezvous", "nothing of it", "one node, whose store is there"],
)
@pytest.mark.parametrize("origin", [Origin.COMMAND, Origin.FLAG])
def test_a_typed_address_of_several_nodes_is_their_stores_as_well(
    job: Job, typed: dict[str, str], shares: bool, origin: Origin
) -> None:
    plan = engines.plan(request("train.py", overlay(job, typed, origin)))
    assert given(plan.hosting).shares_port is given(plan.membership).shares_port is shares


def test_where_another_node_may_take_the_coordinator_over_nobody_is_led_anywhere() -> None:
    elastic = overlay(replace(FIRST, nodes=NodeRange(1, 3)), {"master_port": "29511"}, Origin.COMMAND)
    plan = engines.plan(request("train.py", elastic, host=replace(MACHINE, hostname="job-node-0-0")))
    assert given(plan.hosting).seats is not None
    assert not given(plan.hosting).shares_port
