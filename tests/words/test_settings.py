"""Our own knobs: flags over variables over defaults, and sentences for what does not fit."""

from __future__ import annotations

import pytest

from trainer_launch import settings
from trainer_launch.errors import UsageError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.FIELDS:
        monkeypatch.delenv(settings.PREFIX + name.upper(), raising=False)


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.load({}).grace == 25.0
    monkeypatch.setenv("TRAINER_LAUNCH_GRACE", "60")
    assert settings.load({}).grace == 60.0
    assert settings.load({"grace": "7"}).grace == 7.0


def test_an_empty_variable_is_as_good_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_LAUNCH_GRACE", "")
    assert settings.load({}).grace == 25.0


def test_a_bad_variable_is_named_with_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_LAUNCH_GRACE", "soon")
    with pytest.raises(UsageError, match="invalid value 'soon' for TRAINER_LAUNCH_GRACE: expected a number"):
        settings.load({})


def test_a_bad_flag_is_named_with_its_value() -> None:
    with pytest.raises(UsageError, match=r"invalid value 'sideways' for --stop-order: expected 'leader'"):
        settings.load({"stop_order": "sideways"})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("ssh_port", "0", "a whole number from 1 to 65535"),
        ("ssh_port", "22.5", "a whole number from 1 to 65535"),
        ("restart_window", "0", "a number above 0, at most 31536000"),
        ("grace", "nan", "a number from 0 to 86400"),
        ("grace", "inf", "a number from 0 to 86400"),
        ("prefix", "maybe", "true or false"),
        ("color", "", "'auto', 'always' or 'never'"),
    ],
)
def test_an_error_says_which_values_a_setting_takes(name: str, text: str, expected: str) -> None:
    with pytest.raises(
        UsageError, match=f"invalid value {text!r} for {settings.flag_of(name)}: expected {expected}$"
    ):
        settings.load({name: text})


@pytest.mark.parametrize(("text", "value"), [("1", True), ("ON", True), ("false", False), ("n", False)])
def test_a_switch_is_a_variable_too(text: str, value: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINER_LAUNCH_PREFIX", text)
    assert settings.load({}).prefix is value


def test_settings_do_not_change_but_can_be_replaced() -> None:
    loaded = settings.load({"grace": "7"})
    with pytest.raises(AttributeError, match="settings do not change"):
        loaded.grace = 8.0
    other = loaded.replaced(prefix=True)
    assert (other.grace, other.prefix, loaded.prefix) == (7.0, True, False)
    assert sorted(other.given) == ["grace", "prefix"]


def test_an_unknown_variable_is_reported_with_the_nearest_setting() -> None:
    names = ("TRAINER_LAUNCH_GRASE", "HOME", "TRAINER_LAUNCH_METRIC_PORT", "TRAINER_LAUNCH_PREFIX")
    assert settings.unknown_variables(dict.fromkeys(names, "1")) == [
        "unknown variable TRAINER_LAUNCH_GRASE; did you mean TRAINER_LAUNCH_GRACE?",
        "unknown variable TRAINER_LAUNCH_METRIC_PORT; did you mean TRAINER_LAUNCH_METRICS_PORT?",
    ]


@pytest.mark.parametrize("service", ["", "METRICS_", "MY_JOB_"])
def test_what_kubernetes_injects_for_a_service_of_our_name_is_no_typo(service: str) -> None:
    told = {"SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "9090", "SERVICE_PORT_HTTP": "9090"}
    told |= {
        "PORT": "tcp://10.0.0.1:9090",
        "PORT_9090_TCP": "tcp://10.0.0.1:9090",
        "PORT_9090_TCP_ADDR": "10.0.0.1",
    }
    assert settings.unknown_variables({f"TRAINER_LAUNCH_{service}{name}": told[name] for name in told}) == []


@pytest.mark.parametrize("name", ["metrics_port", "ssh_port", "master_port"])
def test_a_link_to_a_service_is_no_setting_of_the_same_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(settings.PREFIX + name.upper(), "tcp://[fd00::1]:9090")
    assert name not in settings.load({}).given
    assert str(getattr(settings.load({name: "7"}), name)) == "7"
    monkeypatch.setenv(settings.PREFIX + name.upper(), "9090")
    assert str(getattr(settings.load({}), name)) == "9090"


def test_every_setting_has_a_description() -> None:
    assert all(field.description for field in settings.FIELDS.values())


def test_only_settings_that_were_given_describe_the_job() -> None:
    assert settings.job_options(settings.load({})) == {}
    assert settings.job_options(settings.load({"nodes": "2", "node_rank": "1"})) == {
        "nnodes": "2",
        "node_rank": "1",
    }
