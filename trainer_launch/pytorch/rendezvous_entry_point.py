"""What torch finds by the entry point `torchrun.handlers`: the maker of rendezvous handlers for our backend.

torch loads this in every process that imports torch elastic, so nothing else is imported before it is needed.
"""

from __future__ import annotations

from typing import Any

BACKEND = "trainer-launch"


def maker() -> Any:
    """The entry point: torch calls this, and registers what it returns."""
    return make


def make(params: Any) -> Any:
    """The handler for torch's parameters: our own agent's, else one for a plain torchrun."""
    from trainer_launch.pytorch.torchrun_rendezvous import handler

    return handler(params)
