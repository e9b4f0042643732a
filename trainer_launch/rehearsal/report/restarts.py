"""What is said when a container ends and its job goes on: why it ended, and what happens next. Pure."""

from __future__ import annotations

from trainer_launch.model import exit_codes
from trainer_launch.rehearsal.controllers.job_lifecycle import Exited, State
from trainer_launch.rehearsal.controllers.pod_lifecycle import Phase, PodState


def told(before: State, after: State, event: Exited, message: str) -> str:
    """One sentence, empty where there is nothing to explain; `message` is the first line it left at its end."""
    old, new = before.states[event.pod], after.states[event.pod]
    if before.condition is not None or before.asked:
        return ""  # everything ends
    followed = _followed(old, new, event) if after.condition is None else ""
    if event.code == exit_codes.SUCCEEDED and not followed:
        return ""
    is_main = event.container == after.pods[event.pod].draft.main
    who = event.pod if is_main else f"{event.pod}/{event.container}"
    why = message.partition(" | ")[2] or exit_codes.describe(event.code)
    return f"{who} ended with exit code {event.code} ({why})" + (f"; {followed}" if followed else "")


def _followed(old: PodState, new: PodState, event: Exited) -> str:
    if old.stopping:
        if new.running or not old.disrupted:
            return ""
        return "it is not created again" if new.phase is Phase.GONE else f"a new pod follows in {old.back_s:g} s"
    count = new.restarts.get(event.container, 0)
    if new.starts == old.starts and count > old.restarts.get(event.container, 0):
        wait_s = new.due_s.get(event.container, event.at_s) - event.at_s
        return f"restart {count} " + (f"in {wait_s:g} s" if wait_s else "now")
    return ""
