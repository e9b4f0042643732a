"""Which variables ranks get, from their own container by sshd and from the launcher by mpirun."""

from __future__ import annotations

import pytest

from trainer_launch.model.errors import UsageError
from trainer_launch.mpi.rank_environment import allowed, but_secrets, handed_on, withheld
from trainer_launch.planning.mpi import forwarded


def test_what_belongs_to_a_shell_or_to_us_stays() -> None:
    env = {"PWD": "/", "SHLVL": "1", "_": "x", "USER": "a", "SSH_AUTH_SOCK": "/s", "TRAINER_LAUNCH_GRACE": "3"}
    assert handed_on({**env, "CUDA_HOME": "/cuda"}, ()).env == {"CUDA_HOME": "/cuda"}


def test_secrets_go_only_by_name() -> None:
    env = {"HF_TOKEN": "a", "WANDB_API_KEY": "b", "PROXY": "http://me:pass@proxy:1", "TOKEN_FILE": "/run/token"}
    found = handed_on(env, {"WANDB_API_KEY"})
    assert found.env == {"TOKEN_FILE": "/run/token", "WANDB_API_KEY": "b"}
    assert found.secrets == ("HF_TOKEN", "PROXY")


def test_numbers_of_a_model_reach_ranks_though_they_count_tokens_and_keys() -> None:
    env = {"MAX_TOKENS": "4096", "PAD_TOKEN_ID": "0", "NUM_KEY_VALUE_HEADS": "8", "DB_PASSWORD": "1234"}
    found = handed_on(env, ())
    assert set(found.env) == {"MAX_TOKENS", "PAD_TOKEN_ID", "NUM_KEY_VALUE_HEADS"}
    assert found.secrets == ("DB_PASSWORD",)


def test_what_a_line_cannot_hold_is_forwarded() -> None:
    found = handed_on({"A": "1\n2", "BASH_FUNC_f%%": "x", "C": "\0", "D": "d"}, ())
    assert (found.env, found.unfit) == ({"D": "d"}, ("A", "BASH_FUNC_f%%", "C"))


def test_beyond_the_limit_the_largest_go_first() -> None:
    env = {"PATH": "/bin", "HUGE": "x" * 2000, "LARGE": "x" * 900}
    found = handed_on(env, (), 1000)
    assert (found.env, found.unfit) == ({"LARGE": "x" * 900, "PATH": "/bin"}, ("HUGE",))


def test_names_are_names() -> None:
    assert forwarded(" HF_TOKEN, WANDB_API_KEY,") == {"HF_TOKEN", "WANDB_API_KEY"}
    assert forwarded(None) == frozenset()
    with pytest.raises(UsageError, match="--forward-env names"):
        forwarded("HF_TOKEN=x")


ENV = {
    "PATH": "/opt/bin:/bin",
    "NCCL_DEBUG": "INFO",
    "UCX_TLS": "tcp",
    "OMP_NUM_THREADS": "4",
    "HF_HOME": "/models",
    "HF_TOKEN": "hf_abcdefghijklmnopqrstuvwx",
    "WANDB_API_KEY": "0123456789",
    "CUDA_VISIBLE_DEVICES": "",
    "HOSTNAME": "launcher",
    "KUBERNETES_SERVICE_HOST": "10.0.0.1",
    "PYTHON_NOTE": "two\nlines",
    "MY_OWN": "1",
}


def test_libraries_settings_go_along_and_a_pods_own_things_do_not() -> None:
    assert allowed(ENV) == ("HF_HOME", "NCCL_DEBUG", "OMP_NUM_THREADS", "PATH", "UCX_TLS")


def test_secrets_go_along_only_when_they_are_named() -> None:
    assert not {"HF_TOKEN", "WANDB_API_KEY"} & set(allowed(ENV))
    assert not {"HF_TOKEN", "WANDB_API_KEY"} & set(but_secrets(ENV))
    assert {"HF_TOKEN", "MY_OWN"} <= set(allowed(ENV, ("HF_TOKEN", "MY_OWN")))
    assert "HF_TOKEN" in but_secrets(ENV, ("HF_TOKEN",))


def test_what_is_held_back_is_told_by_name() -> None:
    assert withheld(ENV) == ("HF_TOKEN", "WANDB_API_KEY")
    assert withheld(ENV, ("HF_TOKEN",)) == ("WANDB_API_KEY",)


def test_hydra_hands_on_what_it_always_did_but_secrets_and_a_pods_own_things() -> None:
    handed_on = but_secrets(ENV | {"NVIDIA_VISIBLE_DEVICES": "", "TRAINER_LAUNCH_RUN_DIR": "/tmp/x"})
    assert "MY_OWN" in handed_on
    pods_own = {"HOSTNAME", "KUBERNETES_SERVICE_HOST", "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"}
    assert not {*pods_own, "TRAINER_LAUNCH_RUN_DIR"} & set(handed_on)
