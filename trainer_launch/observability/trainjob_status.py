"""Post rank 0's progress to Kubeflow's TrainJob status endpoint, from a daemon thread.

The token rotates, so its file is read for each request; it is shown to nobody and sent over verified TLS only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from http import client as http

from trainer_launch.contracts.trainer_v2_runtimes import METHOD, authorization_header
from trainer_launch.host.files import LiveFiles
from trainer_launch.model import StatusEndpoint
from trainer_launch.model.errors import ContractError
from trainer_launch.observability.progress import Progress
from trainer_launch.observability.report import MAX_METRICS

EVERY_S = 5.0  # what the server asks of its clients, and Kubeflow's own SDK keeps
TIMEOUT_S = 10.0  # for each step of a request
_LONGEST_PAUSE_S = 300.0  # after failures
_ANSWER_BYTES = 65_536
_TOKEN_BYTES = 65_536
_log = logging.getLogger(__name__)


def body(latest: Progress, *, finished: bool) -> bytes:
    """A TrainJob's status; `finished` says that the job has succeeded, whatever was reported last."""
    done = 1.0 if finished else latest.progress
    eta_s = 0.0 if finished else latest.eta_s
    metrics = [{"name": name, "value": f"{value:.15g}"} for name, value in latest.metrics.items()]
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
        self._logged: set[str] = set()
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

    def _run(self) -> None:
        pause_s = self._every_s
        while not self._closing.wait(pause_s):
            is_fine = self._post(finished=False)
            pause_s = self._every_s if is_fine else min(2 * pause_s, _LONGEST_PAUSE_S)
        self._post(finished=self._succeeded)

    def _post(self, *, finished: bool) -> bool:
        """Post what is new; each kind of trouble is logged once, and training is not concerned."""
        latest = self._latest()
        text = self._posted if latest is None else body(latest, finished=finished)
        if text == self._posted:
            return True
        why = send(self._endpoint, text)
        if not why:
            self._posted = text
        elif why not in self._logged:
            self._logged.add(why)
            _log.warning("cannot post progress to the TrainJob's status: %s (logged once)", why)
        return not why


def send(endpoint: StatusEndpoint, text: bytes) -> str:
    """Make one request; "" when it was accepted, else the reason in words that may be logged."""
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
        with contextlib.closing(connection):
            connection.request(METHOD, endpoint.path, text, headers)
            answer = connection.getresponse()
            answer.read(_ANSWER_BYTES)
    except ContractError as problem:
        return str(problem)
    except ssl.SSLCertVerificationError as problem:
        return f"invalid certificate: {problem.verify_message}"
    except TimeoutError:
        return "no answer before the timeout"
    except OSError as problem:
        place = f" ({problem.filename})" if isinstance(problem.filename, str) else ""
        return f"{problem.strerror or type(problem).__name__}{place}"
    except (http.HTTPException, ValueError) as problem:  # its text may quote what was sent
        return f"the answer is not HTTP: {type(problem).__name__}"
    return "" if answer.status == http.OK else f"the server answered {answer.status}"
