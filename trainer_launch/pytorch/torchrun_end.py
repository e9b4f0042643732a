"""How a torchrun with our rendezvous ends: with one sentence, an exit code, and an error file; or begins again."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from trainer_launch.host import logs
from trainer_launch.model import exit_codes
from trainer_launch.pytorch.elastic_rendezvous import GaveUpError
from trainer_launch.supervisor import error_file

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # a launcher's, or the user's
_TORCHRUN = ("/torchrun", "/torch/distributed/run.py")
_log = logging.getLogger(__name__)


def end(sentence: str, code: int) -> NoReturn:
    """End torchrun: an exception would end it with a traceback, and always with 1."""
    logs.warn(sentence)
    raise SystemExit(code)


def end_given_up(ended: GaveUpError) -> NoReturn:
    """The coordinator has ended the job: a faulty worker's node has its code, the others have lost a peer."""
    given_up, own, text = ended.given_up, ended.own, str(ended)
    about: dict[str, Any] = {}
    lines: Sequence[str] = ()
    if own is not None:
        about, lines = {"rank": own.rank, "local_rank": own.local_rank, "hostname": socket.gethostname()}, own.lines
    if given_up.cause is not None:  # all nodes tell the same; no code of theirs may ask for a restart
        code = given_up.exit_code or exit_codes.FAILED
        _note(text, code, lines, about | {"reason": given_up.cause, "why_not_again": given_up.message})
    elif own is None:
        code = exit_codes.INFRASTRUCTURE
        said = f"{text}; it said: {given_up.message}" if given_up.message else text
        _note(said, code, lines, about | {"reason": "PeerLost"})
    else:
        code = own.code
        number = code if own.signal is None else -own.signal
        _note(own.message, number, lines, about | {"reason": own.reason, "why_not_again": text})
    end(f"the job has failed: {text}", code)


def forget_error() -> None:
    """The error file of a torchrun that the launcher ran before this one says nothing about this one."""
    with contextlib.suppress(OSError):
        os.unlink(os.environ.get(_ERROR_FILE, ""))


def begin_again(why: str) -> None:
    """Start this torchrun anew in the same process, but no program of the user's that uses torch's agent."""
    if not sys.argv[0].endswith(_TORCHRUN):
        return
    _log.warning("%s; starting torchrun again", why)
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def _note(message: str | None, code: int, lines: Sequence[str], about: dict[str, Any]) -> None:
    path = os.environ.get(_ERROR_FILE)
    if not path:
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            file.write(error_file.render(message, code, lines, about))
    except OSError as problem:
        _log.warning("cannot write the error file %s: %s", path, problem.strerror)
