"""What of a container's environment its ranks get."""

from __future__ import annotations

import pytest

from trainer_launch.model.errors import UsageError
from trainer_launch.planning.ssh_environment import handed_on, named


def test_what_belongs_to_a_shell_or_to_us_stays() -> None:
    env = {"PWD": "/", "SHLVL": "1", "_": "x", "USER": "a", "SSH_AUTH_SOCK": "/s", "TRAINER_LAUNCH_GRACE": "3"}
    assert handed_on({**env, "CUDA_HOME": "/cuda"}, ()).env == {"CUDA_HOME": "/cuda"}


def test_secrets_go_only_by_name() -> None:
    env = {"HF_TOKEN": "a", "WANDB_API_KEY": "b", "PROXY": "http://me:pass@proxy:1", "TOKEN_FILE": "/run/token"}
    found = handed_on(env, {"WANDB_API_KEY"})
    assert found.env == {"TOKEN_FILE": "/run/token", "WANDB_API_KEY": "b"}
    assert found.secrets == ("HF_TOKEN", "PROXY")


def test_what_a_line_cannot_hold_is_named() -> None:
    found = handed_on({"A": "1\n2", "BASH_FUNC_f%%": "x", "C": "\0", "D": "d"}, ())
    assert (found.env, found.unfit) == ({"D": "d"}, ("A", "BASH_FUNC_f%%", "C"))


def test_beyond_the_limit_the_largest_go_first() -> None:
    env = {"PATH": "/bin", "HUGE": "x" * 2000, "LARGE": "x" * 900}
    found = handed_on(env, (), 1000)
    assert (found.env, found.unfit) == ({"LARGE": "x" * 900, "PATH": "/bin"}, ("HUGE",))


def test_names_are_names() -> None:
    assert named(" HF_TOKEN, WANDB_API_KEY,") == {"HF_TOKEN", "WANDB_API_KEY"}
    assert named(None) == frozenset()
    with pytest.raises(UsageError, match="--forward-env names"):
        named("HF_TOKEN=x")
