"""What a worker's container has in its environment, for the ranks that come in by ssh. Pure.

sshd starts each session with an environment of its own: without this, LD_LIBRARY_PATH, CUDA's and NCCL's variables
of the image and of the pod would not reach a single rank.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from msgspec import Struct

from trainer_launch.model.errors import UsageError
from trainer_launch.model.redaction import redact
from trainer_launch.model.settings import PREFIX

MAX_BYTES = 128 * 1024  # sshd hands its configuration from process to process, 256 KiB of it at most
# sshd's own words for a session, and what belonged to the shell that started the container.
_NOT_OURS = frozenset(("USER", "LOGNAME", "SHELL", "MAIL", "PWD", "OLDPWD", "SHLVL", "_", "TERM"))
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}")


class Handed(Struct, frozen=True):
    """What a session gets; the names of what it does not get, for people."""

    env: Mapping[str, str]
    secrets: tuple[str, ...]  # they look like secrets, and nobody named them
    unfit: tuple[str, ...]  # a line of a configuration cannot hold them


def handed_on(env: Mapping[str, str], named: Collection[str], limit_bytes: int = MAX_BYTES) -> Handed:
    """The part of the container's environment that its sessions get; `named` are handed on whatever they look like.

    A configuration has lines, so a value cannot have any; beyond the limit the largest values are left out.
    """
    wanted = {
        name: value
        for name, value in sorted(env.items())
        if name not in _NOT_OURS and not name.startswith((PREFIX, "SSH_"))
    }
    secrets = tuple(name for name, value in wanted.items() if name not in named and redact(name, value) != value)
    kept = {name: value for name, value in wanted.items() if name not in secrets}
    fits = {name: value for name, value in kept.items() if _fits(name, value)}
    total = sum(map(_size, fits.items()))
    for entry in sorted(fits.items(), key=_size, reverse=True):
        if total <= limit_bytes:
            break
        total -= _size(entry)
        del fits[entry[0]]
    return Handed(fits, secrets, tuple(name for name in kept if name not in fits))


def named(words: str | None) -> frozenset[str]:
    """The variables of `--forward-env A,B`.

    Raises:
        UsageError: one of them is no variable's name.
    """
    found = frozenset(word.strip() for word in (words or "").split(",") if word.strip())
    for name in sorted(found):
        if _NAME.fullmatch(name) is None:
            raise UsageError(
                f"--forward-env names {name[:60]!r}; expected names of variables, as in HF_TOKEN,WANDB_API_KEY"
            )
    return found


def _fits(name: str, value: str) -> bool:
    return _NAME.fullmatch(name) is not None and not any(c in value for c in "\n\r\0")


def _size(entry: tuple[str, str]) -> int:
    return len("=".join(entry).encode(errors="surrogateescape")) + 4  # its quotes, and a blank
