"""What Kubeflow's SDKs submit: an API server that has published runtimes, and keeps what is created."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.frameworks import frameworks
from trainer_launch.rehearsal.controllers.trainer_v2 import PUBLISHED

_GROUP = "/apis/trainer.kubeflow.org/v1alpha1"
_FRAMEWORKS = {"torch-distributed": "torch", "deepspeed-distributed": "deepspeed", "mlx-distributed": "mlx"}

EXAMPLE = frameworks.EXAMPLES / "create_job.py"
# The SDK of the v1 Training Operator gives the function of the example one argument: a dict.
_V1 = """
import sys
from kubeflow.training import TrainingClient

{function}
TrainingClient().create_job(
    name="line",
    train_func=train,
    parameters={{"steps": int(sys.argv[1]), "checkpoint": sys.argv[2]}},
    num_workers=2,
    num_procs_per_worker=1,
)
"""


def _runtime(name: str) -> dict[str, Any]:
    """As Trainer is released with it."""
    specs = json.loads(PUBLISHED.read_text(encoding="utf-8"))["specs"]
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "ClusterTrainingRuntime",
        "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": _FRAMEWORKS[name]}},
        "spec": specs[name],
    }


class _Api(BaseHTTPRequestHandler):
    server: _Server

    def do_GET(self) -> None:
        prefix, _, name = self.path.rpartition("/")
        found = prefix == f"{_GROUP}/clustertrainingruntimes" and name in _FRAMEWORKS
        self._answer(200 if found else 404, _runtime(name) if found else {"kind": "Status", "code": 404})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.created.append(body)
        self._answer(201, body)

    def _answer(self, code: int, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Nothing: tests show what the SDK says."""


class _Server(ThreadingHTTPServer):
    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Api)
        self.created: list[dict[str, Any]] = []


@contextlib.contextmanager
def _served() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def submitted(words: Sequence[str | Path], folder: Path) -> dict[str, Any]:
    """The one object that a program of Kubeflow's SDKs creates."""
    with _served() as server:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "default"}}],
            "current-context": "c",
            "users": [{"name": "u", "user": {}}],
        }
        (folder / "kubeconfig").write_text(json.dumps(config))
        env = frameworks.env({"KUBECONFIG": str(folder / "kubeconfig"), "no_proxy": "127.0.0.1"})
        argv = [frameworks.python("kubeflow"), *map(str, words)]
        ended = subprocess.run(argv, env=env, cwd=folder, capture_output=True, text=True, timeout=120)
        assert ended.returncode == 0, ended.stderr
        (created,) = server.created
        return created


def submitted_by_v1(folder: Path, steps: int, checkpoint: str) -> dict[str, Any]:
    """The PyTorchJob of two pods that the SDK of the v1 Training Operator creates for the example's function."""
    text = EXAMPLE.read_text()
    function = text[text.index("def train(") : text.index("def create_job(")]
    head = "def train(given):\n    steps, checkpoint = given['steps'], given['checkpoint']"
    (folder / "submit.py").write_text(_V1.format(function=re.sub(r"def train\(.*", head, function, count=1)))
    return submitted([folder / "submit.py", str(steps), checkpoint], folder)
