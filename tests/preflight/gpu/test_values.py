"""What children say is read into values, whatever it is; and what all nodes should have alike is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as some
from msgspec.structs import replace

from tests.preflight.gpus import FACTS
from tests.preflight.world import HEALTHY
from trainer_launch.host.deadline_subprocess import Ended
from trainer_launch.host.network import AdapterPort, adapter_ports
from trainer_launch.model.findings import Fault, Status
from trainer_launch.preflight import check, gpu_checks
from trainer_launch.preflight.cluster import node_facts
from trainer_launch.preflight.cluster.node_facts import NCCL, differences
from trainer_launch.preflight.gpu_collect import Cards, Gpu, GpuFacts, parse_facts, parse_test, visible

JSON = some.recursive(
    some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=5),
    lambda inner: (
        some.lists(inner, max_size=4)
        | some.dictionaries(
            some.sampled_from(
                ("trouble", "gpus", "driver", "index", "facts", "stage", "measure", "lines", "error")
            ),
            inner,
            max_size=6,
        )
    ),
    max_leaves=12,
)


@given(JSON)
def test_whatever_a_child_says_is_read_or_refused(told: object) -> None:
    said = json.dumps(told).encode()
    parse_facts(said)
    parse_test(0, "", Ended(status=0, stdout=said), 1.0)


@given(some.binary(max_size=50))
def test_what_is_no_json_is_a_trouble(said: bytes) -> None:
    assert parse_facts(said).trouble


@pytest.mark.parametrize(
    ("shown", "indices"),
    [(None, [0, 1]), ("0", [0]), ("1,0", [0, 1]), ("GPU-1", [1]), ("", []), ("7", []), ("MIG-1", [0, 1])],
)
def test_the_job_sees_what_the_variable_shows(shown: str | None, indices: list[int]) -> None:
    assert [gpu.index for gpu in visible(FACTS.gpus, shown)] == indices


def test_models_driver_and_the_nccl_that_is_loaded_are_told() -> None:
    test = parse_test(0, "", Ended(status=0, stdout=b'{"facts": {"nccl": "2.28.9"}}'), 1.0)
    cards = Cards(lambda: replace(FACTS, tests=(test,)))
    assert node_facts.of_gpus(cards, 2) == {"gpus": "2 of NVIDIA H200", "driver": "580.159.04", NCCL: "2.28.9"}
    assert node_facts.of_gpus(None, 2) == {"gpus": "2"}


def test_a_node_whose_nccl_is_not_known_is_not_another_one_for_that() -> None:
    names = [f"node {number} (host-{number})" for number in range(4)]
    (found,) = differences(names, [{NCCL: "2.28.9"}, {NCCL: "2.28.9"}, {}, {NCCL: "2.27.7"}])
    assert (found.fault, found.subject) == (Fault.JOB, names[3])
    (found,) = differences(names, [{NCCL: "2.28.9"}, {}, {}, {}])
    assert found.text == "0 facts alike on all 4 nodes"


def loud(*cards: Gpu) -> list[tuple[str, str]]:
    """What the rules find of a node with these cards."""
    node = replace(HEALTHY, cards=Cards(lambda: replace(FACTS, gpus=cards)))
    found = [finding for one in gpu_checks.CHECKS for finding in one.run(node)]
    return [(one.check, one.status.value) for one in found if one.status not in (Status.PASS, Status.SKIPPED)]


def named(name: str) -> check.Check[check.Subject]:
    return next(one for one in gpu_checks.CHECKS if one.id == name)


def card(index: int, **facts: object) -> Gpu:
    return replace(FACTS.gpus[index], facts={**FACTS.gpus[index].facts, **facts})


@pytest.mark.parametrize(
    ("looks", "slowed", "status"), [(400, 1, "warn"), (400, 39, "warn"), (9, 2, "warn"), (400, 40, "fail")]
)
def test_a_card_is_blamed_for_heat_only_where_it_lasts(looks: int, slowed: int, status: str) -> None:
    hot = card(1, **{"load clock_reasons": {"looks": looks, "times": {"64": slowed}}})
    assert loud(card(0), hot) == [("gpu-clocks", status)]


@pytest.mark.parametrize(("bit", "status"), [("32", "warn"), ("64", "fail")])
def test_a_card_that_the_driver_keeps_cool_through_a_sustained_load_is_not_blamed(bit: str, status: str) -> None:
    hot = card(1, **{"load clock_reasons": {"looks": 4000, "times": {bit: 3000}}})
    node = replace(HEALTHY, burn_s=300.0, cards=Cards(lambda: replace(FACTS, gpus=(card(0), hot))))
    assert [one.status.value for one in named("gpu-clocks").run(node)] == [status]


def test_gpus_are_tested_as_the_jobs_workers_will_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run` tells NCCL to do without a /dev/shm that is too small; so does preflight."""
    seen: list[str | None] = []

    def collected(env: dict[str, str], *args: object, **more: object) -> GpuFacts:
        seen.append(env.get("NCCL_SHM_DISABLE"))
        return FACTS

    monkeypatch.setattr(check, "collect", collected)
    for size in (1 << 20, 16 << 30):
        node = replace(HEALTHY, host=replace(HEALTHY.host, shm_free_bytes=size))
        cards = check.with_gpus(node, "standard").cards
        assert cards is not None
        cards.facts()
    assert seen == ["1", None]


def test_what_nobody_knows_of_a_card_is_unknown_and_fails_nothing() -> None:
    gpus = tuple(replace(gpu, facts={}, unknown=dict.fromkeys(gpu.facts, "no answer")) for gpu in FACTS.gpus)
    blind = replace(HEALTHY, cards=Cards(lambda: replace(FACTS, gpus=gpus)))
    found = {one.id: [finding.status for finding in one.run(blind)] for one in gpu_checks.CHECKS}
    of_tests = ("gpu-count", "gpu-load", "gpu-peers", "gpu-network")
    assert found == {name: [Status.PASS if name in of_tests else Status.UNKNOWN] for name in found}


def test_rates_of_adapters_are_compared_between_nodes(tmp_path: Path) -> None:
    for device, state, rate in (("mlx5_0", "4: ACTIVE", "400 Gb/sec (4X NDR)"), ("mlx5_1", "1: DOWN", "")):
        port = tmp_path / "sys/class/infiniband" / device / "ports/1"
        port.mkdir(parents=True)
        (port / "state").write_text(state + "\n")
        (port / "rate").write_text(rate + "\n")
    ports = adapter_ports(tmp_path)
    assert ports == (
        AdapterPort("mlx5_0", 1, True, "400 Gb/sec (4X NDR)"),
        AdapterPort("mlx5_1", 1, False, ""),
    )
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1/link_layer").write_text("Unknown\n")  # as EFA's is
    assert [port.is_foreign for port in adapter_ports(tmp_path)] == [True, False]
    assert node_facts.of_adapters(ports) == {"adapters": "1 x 400 Gb/sec (4X NDR)"}
    assert node_facts.of_adapters(ports[1:]) == {"adapters": "none of them"}
    assert node_facts.of_adapters(()) == {}
