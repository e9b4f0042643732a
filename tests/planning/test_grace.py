"""Which of --grace and torch's shutdown timeout decides when workers get SIGKILL."""

from __future__ import annotations

import pytest

from trainer_launch.model.errors import UsageError
from trainer_launch.planning.command import grace_of, parse_command

PLAIN = parse_command(("train.py",))
TYPED = parse_command(("torchrun", "--shutdown-timeout", "60", "train.py"))
TORCHS = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "90"}
PET = {"PET_SHUTDOWN_TIMEOUT": "120"}


@pytest.mark.parametrize(
    ("command", "env", "seconds"),
    [
        (PLAIN, {}, 25),
        (TYPED, {}, 60),
        (PLAIN, TORCHS, 90),
        (None, TORCHS, 90),
        (PLAIN, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": ""}, 25),
        (PLAIN, {**TORCHS, **PET}, 120),
        (TYPED, {**TORCHS, **PET}, 60),
        (PLAIN, {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, 5),
    ],
)
def test_torchs_shutdown_timeout_sets_the_grace_in_torchruns_own_order(command, env, seconds: int) -> None:
    assert grace_of(25.0, command, env, is_given=False) == (seconds, None)


def test_an_explicit_grace_wins_and_a_longer_timeout_of_torch_causes_a_warning() -> None:
    assert grace_of(90.0, PLAIN, TORCHS, is_given=True) == (90, None)
    assert grace_of(100.0, TYPED, TORCHS, is_given=True) == (100, None)
    assert grace_of(20.0, TYPED, TORCHS, is_given=True) == (
        20,
        "--shutdown-timeout is 60 s, but workers get SIGKILL after 20 s, because --grace is set; "
        "set --grace to 60, or remove it",
    )


@pytest.mark.parametrize("env", [{"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, {"PET_SHUTDOWN_TIMEOUT": "-1"}])
def test_a_timeout_that_is_no_number_is_refused_with_its_name(env) -> None:
    with pytest.raises(UsageError) as refused:
        grace_of(25.0, PLAIN, env, is_given=False)
    assert str(refused.value).startswith(next(iter(env)))
