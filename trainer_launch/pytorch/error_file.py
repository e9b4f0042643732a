"""What a worker under torch's @record wrote before it failed: its error file, as values."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from trainer_launch.supervisor.symptoms import essence

log = logging.getLogger(__name__)

_NO_MESSAGE = "<NONE>"  # torch's word for a worker that left no error file


def read_error_file(path: str | None) -> dict[str, Any]:
    """What a worker under torch's @record wrote before it died; nothing, when it wrote nothing."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def message_in(data: dict[str, Any]) -> str | None:
    """The error's own words."""
    message = data.get("message")
    if isinstance(message, dict):
        message = message.get("message")
    return None if message in (None, _NO_MESSAGE) else essence(str(message))[:1000]


def traceback_in(data: dict[str, Any]) -> list[str]:
    """The last lines of its traceback."""
    message = data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    text = extra.get("py_callstack") if isinstance(extra, dict) else None
    return str(text).strip().splitlines()[-20:] if text else []


def hand_up(path: str | None, exit_code: int, own: str | None) -> None:
    """Copy the error file of the worker that failed first to the launcher's own, as torchrun does.

    `own` is the launcher's TORCHELASTIC_ERROR_FILE, by which a platform asks for it. `exit_code` is the worker's,
    -N for signal N: the worker could not know it.
    """
    data = read_error_file(path)
    if not own or not data:
        return
    message = data.get("message")
    if exit_code and isinstance(message, dict):
        message["errorCode"] = exit_code
    try:
        Path(own).write_text(json.dumps(data), encoding="utf-8")
    except OSError as problem:
        log.warning("TORCHELASTIC_ERROR_FILE=%s was not written: %s", own, problem.strerror)
