"""Post rank 0's progress to Kubeflow's TrainJob status endpoint, from a daemon thread.

The token rotates, so its file is read for each request; it is shown to nobody and sent over verified TLS only.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from http import client as http

from msgspec import Struct

from trainer_launch.contracts.trainer_status import METHOD, StatusEndpoint, authorization_header
from trainer_launch.host.files import LiveFiles
from trainer_launch.model.errors import ContractError
from trainer_launch.observability.progress import Progress
from trainer_launch.observability.report import MAX_METRICS, MAX_NAME

EVERY_S = 5.0  # what the server asks of its clients, and Kubeflow's own SDK keeps
TIMEOUT_S = 10.0  # for each step of a request
REFUSALS = 3  # answers 4xx in a row, after which nothing more is sent
_LONGEST_PAUSE_S = 300.0
_ANSWER_BYTES = 65_536
_TOKEN_BYTES = 65_536
_TRY_LATER = (408, 429)  # 4xx by number only
_log = logging.getLogger(__name__)


class Answer(Struct, frozen=True):
    """What came of a request: an HTTP status, or none, and the reason in words that may be logged."""

    status: int | None
    why: str = ""


def body(latest: Progress, *, finished: bool) -> bytes:
    """A TrainJob's status; `finished` says that the job has succeeded, whatever was reported last."""
    done = 1.0 if finished else latest.progress
    eta_s = 0.0 if finished else latest.eta_s
    metrics = [{"name": name, "value": _text(value)} for name, value in latest.metrics.items()]
    at = f"{datetime.fromtimestamp(latest.time_s, timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
    status: dict[str, object] = {"lastUpdatedTime": at, "metrics": metrics[:MAX_METRICS]}
    if done is not None:
        status["progressPercentage"] = math.floor(round(100 * done, 9))  # 100 * 0.29 is 28.999999999999996
    if eta_s is not None:
        status["estimatedRemainingSeconds"] = min(math.ceil(eta_s), 2**31 - 1)
    return json.dumps({"trainerStatus": status}).encode()


class Poster:
    """Posts the latest progress when it is new, at most every `every_s`."""

    def __init__(
        self, endpoint: StatusEndpoint, latest: Callable[[], Progress | None], every_s: float = EVERY_S
    ) -> None:
        self._endpoint = endpoint
        self._latest = latest
        self._every_s = every_s
        self._closing = threading.Event()
        self._succeeded = False
        self._posted = b""
        self._refusals = 0
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="trainjob status", daemon=True)

    def start(self) -> None:
        """Begin, unless the token would have to cross the network in the clear."""
        if self._endpoint.scheme != "https":
            _log.warning(
                "the TrainJob status endpoint does not use https: progress is not posted, to protect the token"
            )
            return
        self._thread.start()

    def close(self, wait_s: float, *, succeeded: bool) -> None:
        """Post the last state; who does not answer within `wait_s` misses it."""
        self._succeeded = succeeded
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(wait_s)

    # -- in the thread ------------------------------------------------------------------------

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._closing.wait(pause_s) and self._refusals < REFUSALS:
            answer = self._post(finished=False)
            failed = answer is not None and answer.status != http.OK
            pause_s = min(2 * pause_s, max(_LONGEST_PAUSE_S, self._every_s)) if failed else self._every_s
        if self._refusals < REFUSALS:
            self._post(finished=self._succeeded)

    def _post(self, *, finished: bool) -> Answer | None:
        """Post what is new; None when nothing is."""
        latest = self._latest()
        if latest is None:
            return None
        text = body(latest, finished=finished)
        if text == self._posted:
            return None
        answer = send(self._endpoint, text)
        if answer.status == http.OK:
            self._posted, self._refusals = text, 0
            return answer
        refused = answer.status is not None and answer.status // 100 == 4 and answer.status not in _TRY_LATER
        self._refusals = self._refusals + 1 if refused else 0
        self._say(answer)
        return answer

    def _say(self, answer: Answer) -> None:
        """Each kind of trouble once; training is not concerned."""
        if answer.why not in self._said and len(self._said) < 20:
            self._said.add(answer.why)
            _log.warning("cannot post progress to the TrainJob's status: %s (logged once)", answer.why)
        if self._refusals == REFUSALS:
            _log.warning("the TrainJob status endpoint refused %d reports; no more are sent", REFUSALS)


def send(endpoint: StatusEndpoint, text: bytes) -> Answer:
    """One request; what goes wrong is an answer too."""
    import ssl  # 15 ms, which only a pod with this endpoint needs

    try:
        token = (LiveFiles(_TOKEN_BYTES).read(endpoint.token_file) or b"").decode("ascii", errors="replace")
        headers = {"Authorization": authorization_header(token), "Content-Type": "application/json"}
        context = ssl.create_default_context(cafile=endpoint.ca_file)
        # Python 3.13 asks for extensions that a cluster's own CA need not have; chain and name are checked as ever.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        connection = http.HTTPSConnection(
            endpoint.server_host, endpoint.server_port, timeout=TIMEOUT_S, context=context
        )
        try:
            connection.request(METHOD, endpoint.path, text, headers)
            answer = connection.getresponse()
            answer.read(_ANSWER_BYTES)
        finally:
            connection.close()
    except ContractError as problem:
        return Answer(None, str(problem))
    except ssl.SSLCertVerificationError as problem:
        return Answer(None, f"invalid certificate: {problem.verify_message}")
    except OSError as problem:
        place = f" ({problem.filename})" if isinstance(problem.filename, str) else ""
        return Answer(None, f"{_os_text(problem)}{place}")
    except (http.HTTPException, ValueError) as problem:  # its text may quote what was sent
        return Answer(None, f"the answer is not HTTP: {type(problem).__name__}")
    return Answer(answer.status, f"the server answered {answer.status}")


def _os_text(problem: OSError) -> str:
    if isinstance(problem, TimeoutError):
        return "no answer before the timeout"
    return problem.strerror or (os.strerror(problem.errno) if problem.errno else type(problem).__name__)


def _text(value: float) -> str:
    """A metric's value as the endpoint wants it, at most 64 characters."""
    is_whole = float(value).is_integer() and abs(value) < 1e15
    return (str(int(value)) if is_whole else repr(float(value)))[:MAX_NAME]
