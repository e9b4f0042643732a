"""A status server as Kubeflow's controller has it: HTTPS with a CA of its own, a token, one path, strict bodies."""

from __future__ import annotations

import json
import re
import shutil
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.conftest import require

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/job/status"
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


def make_certificates(folder: Path) -> None:
    """`ca.crt`, and for localhost `server.crt` with `server.key` signed by it."""
    require(shutil.which("openssl"), "openssl is not installed")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    signed = ("-days", "2", "-extfile", "extensions", "-out", "server.crt")
    extensions = folder / "extensions"
    extensions.write_text("subjectAltName=DNS:localhost\nbasicConstraints=CA:FALSE\n")
    for words in (
        ("req", "-x509", *curve, "-keyout", "ca.key", "-out", "ca.crt", "-subj", "/CN=test CA"),
        ("req", *curve[:-2], "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=localhost"),
        ("x509", "-req", "-in", "server.csr", "-CA", "ca.crt", "-CAkey", "ca.key", "-CAcreateserial", *signed),
    ):
        subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True, timeout=120)


class StatusServer:
    """`posted` is what was accepted; `tokens` what is; `script` holds statuses to answer with before all else."""

    def __init__(self, certificates: Path, *tokens: str) -> None:
        self.posted: list[dict[str, Any]] = []
        self.requests = 0
        self.tokens = set(tokens)
        self.script: list[int] = []
        self.hang = threading.Event()
        self.hang.set()
        self.changed = threading.Condition()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._server.socket = context.wrap_socket(
            self._server.socket, server_side=True, do_handshake_on_connect=False
        )
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, path: str, authorization: str, content: bytes) -> int:
        """The status to answer with."""
        self.hang.wait(60)
        with self.changed:
            self.requests += 1
            try:
                return self._judge(path, authorization, content)
            finally:
                self.changed.notify_all()

    def _judge(self, path: str, authorization: str, content: bytes) -> int:
        if self.script:
            return self.script.pop(0)
        if path != PATH:
            return 404
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() != "bearer" or token not in self.tokens:
            return 403
        if len(content) > 65536:
            return 413
        status = json.loads(content)["trainerStatus"]
        if not is_valid(status):
            return 422
        self.posted.append(status)
        return 200

    def await_(self, condition: Any, timeout_s: float = 20.0) -> None:
        """Wait until something is true of what was posted."""
        with self.changed:
            assert self.changed.wait_for(condition, timeout_s), f"{self.requests} requests, posted: {self.posted}"


def is_valid(status: dict[str, Any]) -> bool:
    """As the TrainJob's schema has it."""
    known = {"progressPercentage", "estimatedRemainingSeconds", "metrics", "lastUpdatedTime"}
    percent, left = status.get("progressPercentage", 0), status.get("estimatedRemainingSeconds", 0)
    metrics = status.get("metrics", [])
    return (
        set(status) <= known
        and type(percent) is int
        and 0 <= percent <= 100
        and type(left) is int
        and left >= 0
        and len(metrics) <= 256
        and all(set(metric) == {"name", "value"} for metric in metrics)
        and all(isinstance(text, str) and 1 <= len(text) <= 64 for metric in metrics for text in metric.values())
        and _TIME.fullmatch(status["lastUpdatedTime"]) is not None
    )


def _handler(server: StatusServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = 10

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            status = server.take(self.path, self.headers.get("Authorization", ""), content)
            self.send_response(status)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Quiet."""

        def handle(self) -> None:
            try:
                super().handle()
            except OSError:
                self.close_connection = True  # a client that does not trust us

    return Handler
