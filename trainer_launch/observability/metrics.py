"""The metrics of this node for Prometheus, and their server; it takes no CPU time without requests."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainer_launch.host import network
from trainer_launch.model import Endpoint
from trainer_launch.model.errors import NodeError
from trainer_launch.observability import goodput
from trainer_launch.observability.event_log import Standing
from trainer_launch.observability.node_view import View
from trainer_launch.observability.progress import Progress
from trainer_launch.supervisor.run_observer import RunPhase, TimeKind

PATH = "/metrics"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PATIENCE_S = 5.0  # with a client that says nothing
AT_ONCE = 16  # clients; one more takes the place of the oldest
_PREFIX = "trainer_launch_"
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n"}
_NUMBERS = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}  # Python's words and Prometheus'
Sample = tuple[Mapping[str, str], float]
Family = tuple[str, str, Sequence[Sample]]  # a metric: its name, what it is, its samples
_log = logging.getLogger(__name__)


def metrics_text(
    view: View,
    standing: Standing,
    reports: Sequence[Progress],
    spent: Mapping[TimeKind, float] | None,
    at_s: float,
) -> str:
    """All metrics; `spent` is in seconds, `at_s` the time of the monotonic clock."""
    families = [*_of_node(view), *_of_job(standing, view), *_of_reports(reports, at_s)]
    return "".join(map(_shown, families if spent is None else [*families, *_of_goodput(spent)]))


def _of_node(view: View) -> Iterable[Family]:
    about = {
        "version": view.version,
        "contract": view.contract,
        "engine": view.engine,
        "host": view.host,
        "node": _number(view.node_rank),
    }
    yield "info", "What this launcher runs; always 1.", [(about, 1)]
    phases = [({"phase": phase.value}, float(view.phase == phase.value)) for phase in RunPhase]
    yield "phase", "1 for the current phase of this node's launcher.", phases
    yield "start_time_seconds", "When the launcher started, since the epoch.", [({}, view.started_s)]
    yield "attempts_total", "Starts of this node's processes by the launcher.", [({}, view.attempt)]


def _of_job(standing: Standing, view: View) -> Iterable[Family]:
    workers = standing.workers if standing.workers is not None else len(view.processes)
    yield "workers", "Workers of this node in the current generation.", [({}, workers)]
    yield "generation", "The job's generation: how many times it was formed.", _single(standing.generation)
    yield "nodes", "Nodes in the job's generation.", _single(standing.nodes)
    yield "restarts_total", "Worker failures after which the job restarted.", _single(standing.restarts)
    words = "Losses of ranks after which the surviving ones kept their state."
    yield "state_kept_total", words, [({}, view.times_kept)]
    late: list[Sample] = [({"rank": str(rank.rank), "node": _number(rank.node)}, 1) for rank in view.stragglers]
    yield "straggler", "1 for each rank of this node that is a straggler.", late


def _of_reports(reports: Sequence[Progress], at_s: float) -> Iterable[Family]:
    ranks = [report.local_rank if report.rank is None else report.rank for report in reports]
    each = [(report, {"rank": str(rank)}) for report, rank in zip(reports, ranks, strict=True)]
    steps = [(labels, report.step) for report, labels in each if report.step is not None]
    yield "step", "Finished training steps, as reported.", steps
    parts = [(labels, report.progress) for report, labels in each if report.progress is not None]
    yield "progress_ratio", "Finished share of the training, 0 to 1, as reported.", parts
    ages = [(labels, max(0.0, at_s - report.at_s)) for report, labels in each]
    yield "progress_age_seconds", "Seconds since the last report.", ages
    etas = [(labels, report.eta_s) for report, labels in each if report.eta_s is not None]
    yield "eta_seconds", "Seconds left, as reported.", etas
    values = [({**labels, "name": n}, value) for report, labels in each for n, value in report.metrics.items()]
    yield "metric", "A metric of the training, as reported.", values


def _of_goodput(spent: Mapping[TimeKind, float]) -> Iterable[Family]:
    yield "goodput_ratio", "Share of the wall time spent on steps that were kept.", [({}, goodput.ratio(spent))]
    samples = [({"phase": kind.value}, round(spent.get(kind, 0.0), 3)) for kind in TimeKind]
    words = "Wall time of the job, up to the workers' last progress, by what it was spent on."
    yield "goodput_seconds_total", words, samples


def _number(value: int | None) -> str:
    return "" if value is None else str(value)


def _single(value: int | None) -> list[Sample]:
    return [] if value is None else [({}, value)]


def _shown(family: Family) -> str:
    """A metric, a counter if its name ends so; "" without samples."""
    short, words, samples = family
    name, kind = _PREFIX + short, "counter" if short.endswith("_total") else "gauge"
    lines = [f"{name}{_labels(labels)} {_value(value)}\n" for labels, value in samples]
    return f"# HELP {name} {words}\n# TYPE {name} {kind}\n{''.join(lines)}" if lines else ""


def _labels(labels: Mapping[str, str]) -> str:
    pairs = [f'{name}="{"".join(_ESCAPES.get(c, c) for c in value)}"' for name, value in labels.items()]
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _value(value: float) -> str:
    text = repr(float(value))
    return _NUMBERS.get(text, text)


class MetricsServer:
    """Answers GET /metrics with what `text` returns."""

    def __init__(self, port: int, text: Callable[[], str]) -> None:
        self._port, self._text = port, text
        self._http: _Http | None = None

    def start(self) -> int | None:
        """Listen on every address; the port, or None when that is not possible, which is no reason to end a job."""
        try:
            listener = network.listen(Endpoint("", self._port), "--metrics-port")
        except NodeError as problem:
            _log.warning("%s; the job continues without metrics", problem)
            return None
        listener.setblocking(True)
        self._http = _Http(listener, self._text)
        self._thread = threading.Thread(target=self._http.run, name="metrics", daemon=True)
        self._thread.start()
        return int(listener.getsockname()[1])

    def close(self) -> None:
        """Stop listening."""
        if self._http is not None:
            self._http.closing.set()
            with contextlib.suppress(OSError):
                self._http.socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which close() alone does not
            self._thread.join(1.0)
            self._http.server_close()
            self._http = None


class _Http(ThreadingHTTPServer):
    """A thread for each client."""

    def __init__(self, listener: socket.socket, text: Callable[[], str]) -> None:
        super().__init__(("", 0), _MetricsHandler, bind_and_activate=False)
        self.socket.close()
        self.socket, self.text = listener, text
        self.closing = threading.Event()
        self._clients: list[Any] = []

    def run(self) -> None:
        """Until it is closed; `serve_forever` would wake up twice a second."""
        while not self.closing.is_set():
            self.handle_request()

    def get_request(self) -> tuple[Any, Any]:
        """The next client; out of descriptors, which the job needs more than we do, it pauses."""
        try:
            return super().get_request()
        except OSError:
            self.closing.wait(1.0)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Begin with a client; silent ones keep nobody out."""
        self._clients = [client for client in (*self._clients, request) if client.fileno() >= 0]
        for oldest in self._clients[:-AT_ONCE]:
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """The client is gone, or too slow."""


class _MetricsHandler(BaseHTTPRequestHandler):
    """The answer to a connection."""

    server: _Http
    timeout = PATIENCE_S
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "trainer-launch", ""

    def do_GET(self) -> None:
        """Send the text."""
        if self.path.partition("?")[0] != PATH:
            self.send_error(404, explain=f"see {PATH}")
            return
        content = self.server.text().encode(errors="replace")
        self.send_response(200)
        for name, value in (("Content-Type", CONTENT_TYPE), ("Content-Length", str(len(content)))):
            self.send_header(name, value)
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Log nothing: a scrape is no news."""
