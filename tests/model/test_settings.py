"""Our own knobs: flags over variables over defaults, and sentences for what does not fit."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest

from trainer_launch.model import settings
from trainer_launch.model.errors import UsageError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.Settings.model_fields:
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
def test_a_link_to_a_service_does_not_count_as_the_setting_of_the_same_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(settings.PREFIX + name.upper(), "tcp://[fd00::1]:9090")
    assert name not in settings.load({}).model_fields_set
    assert str(getattr(settings.load({name: "7"}), name)) == "7"
    monkeypatch.setenv(settings.PREFIX + name.upper(), "9090")
    assert str(getattr(settings.load({}), name)) == "9090"


TEXTS = (
    "",
    "7",
    "007",
    "0",
    "-1",
    "7.5",
    "7.",
    ".5",
    "1e3",
    "99999",
    "9999999999",
    "1_000",
    " 7",
    "inf",
    "nan",
    "\u0663",
)
SWITCHES = ("1", "true", "yes", "off", "auto", "none", "None")
BOOLEAN_WORDS = ("1", "0", "true", "false", "yes", "no", "on", "off", "t", "f", "y", "n")


def outcome(read: Callable[[dict[str, object]], object], name: str, value: object) -> str:
    try:
        found = read({name: value})
    except UsageError as problem:
        return str(problem)
    return repr(found[name] if isinstance(found, dict) else getattr(found, name))


@pytest.mark.parametrize("name", settings.Settings.model_fields)
def test_what_needs_no_parser_is_read_as_the_parser_would(name: str) -> None:
    choices = [
        value for value in get_args(settings.Settings.model_fields[name].annotation) if isinstance(value, str)
    ]
    for value in (*TEXTS, *SWITCHES, *choices, True, False, 7, 7.5, -1, 10**9):
        assert outcome(settings.load, name, value) == outcome(
            lambda given: settings.parsed(given, given), name, value
        ), value


@pytest.mark.parametrize("word", BOOLEAN_WORDS)
def test_a_boolean_word_in_any_case_is_read_as_the_parser_would_and_without_it(word: str) -> None:
    for given in (word, word.upper(), word.title(), word.swapcase()):
        read = settings.Settings.model_fields["exec"].read(given)
        assert isinstance(read, bool)
        assert {"exec": read} == settings.parsed({"exec": given}), given


@pytest.mark.parametrize("word", ["2", "01", "", " 1", "1 ", "1.0", "tr", "none", "enable", "-1"])
def test_what_is_no_boolean_word_is_left_to_the_parser(word: str) -> None:
    with pytest.raises(ValueError, match=r"^$"):
        settings.Settings.model_fields["exec"].read(word)
    with pytest.raises(UsageError, match=r"expected .*bool"):
        settings.parsed({"exec": word})


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError, match="frozen"):
        settings.load({}).grace = 1.0


def test_every_setting_has_a_description() -> None:
    assert all(field.description for field in settings.Settings.model_fields.values())


def test_only_settings_that_were_given_describe_the_job() -> None:
    assert settings.job_options(settings.load({})) == {}
    assert settings.job_options(settings.load({"nodes": "2", "node_rank": "1"})) == {
        "nnodes": "2",
        "node_rank": "1",
    }
