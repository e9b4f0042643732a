"""torch's own log lines, without those that repeat the launcher's."""

from __future__ import annotations

import logging

from trainer_launch import log

# How torch carries out what the launcher has decided and logged.
_STEPS = (
    "Closing process %s via signal",
    "Sending process %s closing signal",
    "Terminating process %s via signal",
    "Received %s death signal, shutting down workers",
)
# A worker's failure, which the launcher logs with rank, node and exit code at level INFO.
_FAILURE = "failed (exitcode: %s)"
_LOGGERS = (
    "torch.distributed.elastic.agent.server.api",
    "torch.distributed.elastic.multiprocessing.api",
    "torch.multiprocessing.spawn",
)


def silence() -> None:
    """Log each event once; at level DEBUG everything stays."""
    for name in _LOGGERS:
        logging.getLogger(name).addFilter(_is_new)


def _is_new(record: logging.LogRecord) -> bool:
    ours = logging.getLogger(log.NAME)
    if ours.isEnabledFor(logging.DEBUG):
        return True
    text = str(record.msg)
    return not (text.startswith(_STEPS) or (text.startswith(_FAILURE) and ours.isEnabledFor(logging.INFO)))
