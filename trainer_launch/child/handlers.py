"""What torch finds by the entry point `torchrun.handlers`: the maker of rendezvous handlers for our backend.

torch loads this in every process that imports torch elastic, so nothing else is imported before it is needed.
"""

from __future__ import annotations

from typing import Any

BACKEND = "trainer-launch"


class _Made:
    """The handler of our own agent or of `trainer_launch.launch`, while one of them runs."""

    handler: Any = None


def maker() -> Any:
    """The entry point: torch calls this, and registers what it returns."""
    return make


def make(params: Any) -> Any:
    """The handler for torch's parameters: our own agent's, else one for a plain torchrun."""
    if _Made.handler is not None:
        return _Made.handler
    from trainer_launch.child.plain_torchrun import handler

    return handler(params)


def use(handler: Any) -> None:
    """Let torch take this handler, None: no longer."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    _Made.handler = handler
    rendezvous_handler_registry.register(BACKEND, make)  # torch takes the same one again, and only that
