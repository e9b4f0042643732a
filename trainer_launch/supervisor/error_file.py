"""torch's error files: what a program under `@record` writes before it fails, torchrun about its first worker."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer_launch.model import exit_codes
from trainer_launch.supervisor.error_lines import essence

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


def ended_in(data: dict[str, Any]) -> dict[str, int]:
    """The exit code, as the shell has it, and the signal of the worker that failed, where torch has added it."""
    message = data.get("message")
    code = message.get("errorCode") if isinstance(message, dict) else None
    if not isinstance(code, int) or isinstance(code, bool):
        return {}
    return {"exit_code": code} if code >= 0 else {"exit_code": exit_codes.of_signal(-code), "signal": -code}


def render(message: str | None, code: int, lines: Iterable[str], about: dict[str, Any]) -> str:
    """A file in torch's own form; `code` is negative for a signal, `about` is what torch has no keys for."""
    extra = {"py_callstack": "\n".join(lines), "timestamp": str(int(time.time()))}
    said = {"message": message or _NO_MESSAGE, "errorCode": code, "extraInfo": extra}
    return json.dumps({"message": said, **about})
