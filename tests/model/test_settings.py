"""Our own knobs: flags over variables over defaults, and sentences for what does not fit."""

from __future__ import annotations

import pytest

from trainer_launch.model import settings
from trainer_launch.model.errors import UsageError


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in settings.Settings.model_fields:
        monkeypatch.delenv(settings.PREFIX + name.upper(), raising=False)


def test_a_flag_wins_over_its_variable_and_a_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.load({}).grace == 25.0
    monkeypatch.setenv("TRAINER_LAUNCH_GRACE", "")
    assert settings.load({}).grace == 25.0
    monkeypatch.setenv("TRAINER_LAUNCH_GRACE", "60")
    assert settings.load({}).grace == 60.0
    assert settings.load({"grace": "7"}).grace == 7.0


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


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("60", 60.0),
        ("1.5m", 90.0),
        ("1h30m", 5400.0),
        ("1h30m15s500ms", 5415.5),
        ("500ms", 0.5),
    ],
)
def test_seconds_may_have_units(text: str, seconds: float) -> None:
    assert settings.load({"grace": text}).grace == seconds
    assert settings.load({}, {"TRAINER_LAUNCH_WAIT_TIMEOUT": text}).wait_timeout == seconds


@pytest.mark.parametrize(
    "text",
    [
        *(" 60", "60 ", "6e1", "60_0", "+60", "-1", ".5", "5.", "60S", "60 s", "10m1h", "1m1m"),
        *("1d", "inf", "nan", "\u0663", "1\n"),
    ],
)
def test_what_is_no_plain_number_and_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected a time such as 60, 10m, 1h30m or 500ms, 0 to 86400 s$"):
        settings.load({"grace": text})


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("hang_timeout", "auto", "auto"),
        ("hang_timeout", "10m", 600.0),
        ("hang_report_after", "off", "off"),
        ("hang_report_after", "90s", 90.0),
        ("events", None, None),
        ("wait_timeout", 7, 7.0),
        ("metrics_port", 0, 0),
        ("prefix", True, True),
    ],
)
def test_words_times_and_values_of_python_are_accepted(name: str, value: object, expected: object) -> None:
    found = getattr(settings.load({name: value}), name)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("hang_timeout", value) for value in ("off", "0.5", "8d", "")),
        *(("ssh_port", value) for value in ("0", "65536", "7.0", " 7", "7_0", True, 7.5)),
        *(("prefix", value) for value in ("2", "01", "", " 1", "1 ", "1.0", "tr", "none", "enable", "-1", 1)),
        *(("wait_timeout", value) for value in (-1, float("nan"), float("inf"), True, None)),
        ("engine", "Torch"),
        ("level", "deeper"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"invalid value .* for {settings.flag_of(name)}: expected "):
        settings.load({name: value})


@pytest.mark.parametrize("word", ["1", "0", "true", "false", "yes", "no", "on", "off", "t", "f", "y", "n"])
def test_a_boolean_word_is_read_in_any_case(word: str) -> None:
    for spelled in (word, word.upper(), word.title(), word.swapcase()):
        assert settings.load({"prefix": spelled}).prefix == (word in {"1", "true", "yes", "on", "t", "y"})
