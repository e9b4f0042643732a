"""What `Elastic` takes and refuses. Pure."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import trainer_launch
from tests.cli.launching import clean_env
from trainer_launch import Elastic, RunPolicy, launch
from trainer_launch.commands.function_launcher import in_callers_words, settings_of
from trainer_launch.model.errors import UsageError
from trainer_launch.planning.reading import live_pod, read
from trainer_launch.pytorch import function_launch


def test_what_nobody_said_is_left_to_the_pod() -> None:
    assert Elastic().options() == {}
    said = Elastic(nnodes="1:2", nproc_per_node=4, max_restarts=0, rdzv_configs={"node_rank": 1})
    assert said.options() == {"nnodes": "1:2", "nproc_per_node": "4", "max_restarts": "0", "node_rank": "1"}


def test_the_fields_come_in_the_order_that_flyte_has() -> None:
    assert Elastic(2, 8, "fork", 5, 3, {"join_timeout": 900, "timeout": 900}, True, RunPolicy()).patience_s == 900


def test_a_deadline_may_come_in_flytes_own_run_policy() -> None:
    assert Elastic(run_policy=SimpleNamespace(active_deadline_seconds=60)).deadline_s == 60
    assert Elastic(run_policy=RunPolicy(ttl_seconds_after_finished=5)).deadline_s is None


FLYTE_1 = SimpleNamespace(
    nnodes="2:3",
    nproc_per_node=4,
    start_method="fork",
    monitor_interval=5,
    max_restarts=0,
    rdzv_configs={"timeout": 900, "join_timeout": 900},
    increase_shared_mem=True,
    run_policy=None,
)
FLYTE_2 = SimpleNamespace(
    nnodes=2,
    nproc_per_node=8,
    rdzv_backend="c10d",
    run_policy=SimpleNamespace(active_deadline_seconds=60),
    monitor_interval=3,
    max_restarts=3,
    rdzv_configs={"timeout": 900, "join_timeout": 900},
    nccl_heartbeat_timeout_sec=300,
    nccl_async_error_handling=False,
    nccl_collective_timeout_sec=120,
    nccl_enable_monitoring=True,
    one_of_a_later_flyte=1,
)


def test_flytes_own_elastic_is_taken_with_all_its_values() -> None:
    first, second = Elastic.of(FLYTE_1), Elastic.of(FLYTE_2)
    assert first.options() == {"nnodes": "2:3", "nproc_per_node": "4", "max_restarts": "0"}
    assert (first.start_method, first.patience_s, first.variables()) == ("fork", 900, {})
    assert second.options() == {"nnodes": "2", "nproc_per_node": "8", "max_restarts": "3"}
    assert (second.start_method, second.deadline_s, second.nccl_collective_timeout_sec) == ("spawn", 60, 120)
    assert second.variables() == {
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300",
        "TORCH_NCCL_ENABLE_MONITORING": "1",
    }
    assert Elastic.of(second) == second


@pytest.mark.parametrize(
    ("configs", "env", "waits_s"),
    [
        ({}, {}, 900),
        ({"timeout": 300}, {}, 300),
        ({"timeout": 300, "join_timeout": 200}, {}, 200),
        ({"timeout": 300, "join_timeout": 200, "patience": 100}, {}, 100),
        ({"close_timeout": 7, "last_call_timeout": 30}, {}, 900),
        ({}, {"TRAINER_LAUNCH_WAIT_TIMEOUT": "60"}, 60),
        ({"timeout": 300}, {"TRAINER_LAUNCH_WAIT_TIMEOUT": "60"}, 300),
    ],
)
def test_nodes_wait_for_each_other_as_rdzv_configs_says_else_900_s(
    configs: dict[str, int], env: dict[str, str], waits_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name not in clean_env()]:
        monkeypatch.delenv(name)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    elastic = Elastic(nnodes=1, nproc_per_node=2, rdzv_configs=configs)
    settings = settings_of(elastic, "worker.py")
    assert settings.wait_timeout == waits_s
    assert settings.max_restarts == "0"


@pytest.mark.parametrize(
    ("fields", "variables"),
    [
        ({}, {}),
        ({"nccl_heartbeat_timeout_sec": 300}, {"TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "300"}),
        ({"nccl_async_error_handling": True}, {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}),
        ({"nccl_enable_monitoring": True}, {"TORCH_NCCL_ENABLE_MONITORING": "1"}),
    ],
)
def test_each_field_about_nccl_is_the_variable_that_torch_reads(
    fields: dict[str, Any], variables: dict[str, str]
) -> None:
    assert Elastic(**fields).variables() == variables


def test_flyte_2s_default_of_restarts_holds_when_its_class_is_passed() -> None:
    flytes = SimpleNamespace(nnodes=1, nproc_per_node=2, max_restarts=3)
    assert settings_of(Elastic.of(flytes), "worker.py").max_restarts == "3"


def test_a_field_that_no_flyte_has_is_refused_in_ours_and_left_alone_in_another_class() -> None:
    with pytest.raises(TypeError, match="max_restart"):
        Elastic(max_restart=3)  # type: ignore[call-arg]
    assert Elastic.of(SimpleNamespace(nnodes=1, nproc_per_node=2, of_flyte_3=1)).options()["nnodes"] == "1"


@pytest.mark.parametrize("other", [{"nnodes": 1}, Elastic, SimpleNamespace(nnodes=1), None])
def test_what_has_not_the_fields_is_no_elastic(other: object) -> None:
    with pytest.raises(UsageError, match=r"expected trainer_launch\.Elastic, or an object with the same fields"):
        Elastic.of(other)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"start_method": "exec"}, "'exec' - at `$.start_method`"),
        ({"rdzv_configs": {"patience": "long"}}, "patience of Elastic is 'long'"),
        ({"increase_shared_mem": "no"}, "Expected `bool`, got `str` - at `$.increase_shared_mem`"),
        ({"run_policy": RunPolicy(active_deadline_seconds=-1)}, "active_deadline_seconds of Elastic is '-1'"),
    ],
)
def test_what_does_not_fit_is_named(fields, said: str) -> None:
    with pytest.raises(UsageError) as refused:
        Elastic.of(Elastic(**fields))
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"nnodes": 0}, "nnodes is '0'; expected N or MIN:MAX"),
        ({"nnodes": "2:1"}, "nnodes is '2:1'"),
        ({"nproc_per_node": "many"}, "nproc_per_node is 'many'; expected a whole number from 1 to"),
        ({"max_restarts": -1}, "max_restarts is '-1'; expected a whole number from 0 to"),
    ],
)
def test_the_launcher_names_the_field_of_an_option_that_does_not_fit(
    fields: dict[str, Any], refusal: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name not in clean_env()]:
        monkeypatch.delenv(name)
    settings = settings_of(Elastic(**fields), "worker.py")
    with pytest.raises(UsageError) as refused:
        read(live_pod((sys.executable, "worker.py")), settings)
    assert in_callers_words(str(refused.value)).startswith(refusal)


def test_launch_wants_a_function_and_an_elastic() -> None:
    with pytest.raises(UsageError, match="expected a function"):
        launch(3, Elastic())  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"expected trainer_launch\.Elastic"):
        launch(print, {"nnodes": 1})


def test_every_public_name_is_there_and_others_are_not() -> None:
    assert all(getattr(trainer_launch, name) for name in trainer_launch.__all__)
    with pytest.raises(AttributeError, match="no attribute 'lunch'"):
        trainer_launch.lunch  # noqa: B018


def test_importing_the_package_or_elastic_loads_nothing_heavy() -> None:
    code = "import sys, trainer_launch; print(*sys.modules); trainer_launch.Elastic(); print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, timeout=30, check=True)
    alone, with_elastic = (set(line.split()) for line in ended.stdout.splitlines())
    assert {name for name in alone if name.startswith("trainer_launch")} == {"trainer_launch"}
    assert "torch" not in with_elastic


def test_launch_takes_the_fields_of_elastic_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """All other names are the function's."""
    given: list[object] = []

    def started(_fn: object, args: tuple[object, ...], kwargs: dict[str, object], elastic: Elastic, _: str) -> int:
        given.append((args, kwargs, elastic))
        raise UsageError("started")

    monkeypatch.setattr(function_launch, "_start", started)
    for call in (
        lambda: launch(print, nproc_per_node=2, max_restarts=1, sep="-"),
        lambda: launch(print, Elastic(nproc_per_node=2, max_restarts=1), sep="-"),
    ):
        with pytest.raises(UsageError, match="started"):
            call()
    assert given[0] == given[1] == ((), {"sep": "-"}, Elastic(nproc_per_node=2, max_restarts=1))
