"""Ask a coordinator how its job stands: one connection, one question, one answer."""

from __future__ import annotations

import socket
import time

from trainer_launch.membership import protocol as msg
from trainer_launch.membership.server_messages import Lines, LostError
from trainer_launch.model import Endpoint
from trainer_launch.model.errors import NodeError

ANSWER_S = 5.0  # for all of it


def ask(endpoint: Endpoint, job: str, secret: bytes | None = None, timeout_s: float = ANSWER_S) -> msg.Status:
    """How the job stands.

    Raises:
        NodeError: nobody answers there, or not to us.
    """
    until_s = time.monotonic() + timeout_s
    try:
        with socket.create_connection((endpoint.host, endpoint.port), timeout=timeout_s) as sock:
            lines = Lines(sock, msg.parse, "the coordinator")
            challenge = lines.next(until_s)
            if not isinstance(challenge, msg.Challenge):
                raise LostError("its first word is no challenge")
            proof = None
            if secret is not None and challenge.nonce:
                proof = msg.prove(secret, challenge.nonce, job, msg.ASKING)
            sock.sendall(msg.render(msg.StatusQuery(msg.VERSION, job, proof)))
            answer = lines.next(until_s)
    except (OSError, UnicodeError) as problem:
        why = "no answer in time" if isinstance(problem, TimeoutError) else getattr(problem, "strerror", None)
        raise NodeError(f"the coordinator at {endpoint} cannot be asked: {why or problem}") from None
    except LostError as problem:
        raise NodeError(f"the coordinator at {endpoint} cannot be asked: {problem}") from None
    if isinstance(answer, msg.Refused):
        raise NodeError(f"the coordinator at {endpoint} does not answer: {answer.reason}")
    if not isinstance(answer, msg.Status):
        raise NodeError(f"what listens at {endpoint} does not answer a question about the job's status")
    return answer
