"""Train a classifier of handwritten digits with XGBoost, its rows spread over all pods, on data of scikit-learn.

    python train_xgboost.py                                     # alone
    trainer-launch rehearse -f xgboostjob-digits.yaml              # a master and two workers, as the v1 operator's
    trainer-launch rehearse -f trainjob-xgboost.yaml               # two nodes of Kubeflow Trainer v2

Pod 0 starts XGBoost's tracker and trains like the others. The tracker takes any free port and the job's own port
only tells which: XGBoost cannot open the same port again for a minute after its connections were cut, but a pod
that is started again must not wait for that. When a pod is lost the others' collectives fail and they end, too;
started again, all go on from the checkpoint, which pod 0 reads and sends to the others. On SIGTERM, to any pod,
pod 0 saves after the round they are in, and all end with 143: the job is not done.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xgboost as xgb
from sklearn.datasets import load_digits
from xgboost import collective
from xgboost.tracker import RabitTracker

try:
    from trainer_launch import report
except ImportError:  # an image without it

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


PATIENCE_S = 300  # for pod 0, which may be started again
ASKED_TO_STOP = 143
HELD_OUT = 5  # each fifth row is not trained on
PARAMS = {"objective": "multi:softprob", "num_class": 10, "max_depth": 4, "eta": 0.1, "seed": 1}


@dataclass(frozen=True)
class Place:
    """Who this pod is, and where pod 0 is."""

    rank: int
    size: int
    host: str
    port: int

    @classmethod
    def of(cls, env: os._Environ[str]) -> Place:
        """By the variables of the Trainer v2 runtime, or of the v1 operator; alone without either."""
        if "DMLC_TRACKER_URI" in env:
            uri, port = env["DMLC_TRACKER_URI"], int(env["DMLC_TRACKER_PORT"])
            return cls(int(env["DMLC_TASK_ID"]), int(env["DMLC_NUM_WORKER"]), uri, port)
        if "MASTER_ADDR" in env:
            return cls(int(env["RANK"]), int(env["WORLD_SIZE"]), env["MASTER_ADDR"], int(env["MASTER_PORT"]))
        return cls(0, 1, "localhost", 0)


@contextmanager
def together(place: Place) -> Iterator[None]:
    """All pods as one group of XGBoost's collective."""
    if place.size == 1:
        yield
        return
    tracker = None
    if place.rank == 0:
        tracker = RabitTracker(n_workers=place.size, host_ip="0.0.0.0", sortby="task", timeout=PATIENCE_S)
        tracker.start()
        port = int(tracker.worker_args()["dmlc_tracker_port"])
        threading.Thread(target=tell, args=(place.port, port), daemon=True).start()
    else:
        port = ask(place.host, place.port)
    # Sorted as text, so with leading zeros: this pod's rank is then the one in the group. One retry: the tracker
    # listens by now, and one that is gone later would be tried for half a minute before a lost pod is told.
    task = f"{place.rank:06d}"
    with collective.CommunicatorContext(
        dmlc_tracker_uri=place.host, dmlc_tracker_port=port, dmlc_task_id=task, dmlc_retry=1
    ):
        yield
    if tracker:
        tracker.wait_for(PATIENCE_S)


def tell(port: int, number: int) -> None:
    """Send the number to whoever comes to the port."""
    with socket.create_server(("", port)) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"%d\n" % number)


def ask(host: str, port: int) -> int:
    """What pod 0 tells, as soon as its name resolves and it listens."""
    end_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            with socket.create_connection((host, port), timeout=5) as connection:
                return int(connection.makefile().readline())
        except (OSError, ValueError) as problem:
            if time.monotonic() > end_s:
                raise SystemExit(f"train_xgboost: pod 0 ({host}:{port}) did not answer: {problem}") from None
        time.sleep(0.2)


class Progress(xgb.callback.TrainingCallback):
    """After each round: say how far it is, save, and stop when a pod was asked to."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.signals: list[int] = []
        self.stopped = False
        signal.signal(signal.SIGTERM, lambda number, _frame: self.signals.append(number))

    def after_iteration(self, model: xgb.Booster, epoch: int, evals_log: dict[str, Any]) -> bool:
        """True ends the training, on all pods after the same round."""
        asked = np.array([len(self.signals)])
        self.stopped = bool(collective.allreduce(asked, collective.Op.MAX)[0])
        rounds, loss = model.num_boosted_rounds(), evals_log["train"]["mlogloss"][-1]
        report(step=rounds, progress=rounds / self.args.rounds, metrics={"loss": loss})
        is_last = self.stopped or rounds == self.args.rounds
        if collective.get_rank() == 0:
            if rounds % self.args.log_every == 0 or is_last:
                print(f"step {rounds}/{self.args.rounds}  loss {loss:.3f}", flush=True)
            if self.args.checkpoint and (rounds % self.args.checkpoint_every == 0 or is_last):
                save(self.args.checkpoint, model)
        return self.stopped


def save(path: Path, model: xgb.Booster) -> None:
    """Write the model whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".new")
    temporary.write_bytes(model.save_raw("ubj"))
    temporary.replace(path)


def load(path: Path | None) -> xgb.Booster | None:
    """The checkpoint, if there is one."""
    return xgb.Booster(model_file=bytearray(path.read_bytes())) if path and path.exists() else None


def train(args: argparse.Namespace, model: xgb.Booster | None) -> tuple[xgb.Booster, bool]:
    """Train to the last round, going on from pod 0's checkpoint; the model, and whether it was stopped before."""
    rank, size = collective.get_rank(), collective.get_world_size()
    pixels, digits, known = data()
    rows = xgb.DMatrix(pixels[known][rank::size], digits[known][rank::size])
    print(f"rank {rank} of {size}: {rows.num_row()} rows", flush=True)
    if sent := collective.broadcast(bytes(model.save_raw("ubj")) if model and rank == 0 else b"", 0):
        model = xgb.Booster(model_file=bytearray(sent))
        if rank == 0:
            print(f"resumed at step {model.num_boosted_rounds()} from {args.checkpoint}", flush=True)
    left = args.rounds - (model.num_boosted_rounds() if model else 0)
    progress = Progress(args)
    model = xgb.train(
        PARAMS, rows, left, evals=[(rows, "train")], verbose_eval=False, xgb_model=model, callbacks=[progress]
    )
    return model, progress.stopped


def data() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pictures of 8 by 8 pixels, what they show, and which of them are for training."""
    pixels, digits = load_digits(return_X_y=True)
    return pixels, digits, np.arange(len(digits)) % HELD_OUT != 0


def accuracy(model: xgb.Booster) -> float:
    """Which part of the held-out pictures is read right."""
    pixels, digits, known = data()
    guesses = model.predict(xgb.DMatrix(pixels[~known])).argmax(axis=1)
    return float((guesses == digits[~known]).mean())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=100, help="train up to this round (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="save to this file and resume from it")
    parser.add_argument("--checkpoint-every", type=int, default=10, metavar="N", help="default: %(default)s")
    parser.add_argument("--log-every", type=int, default=10, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    place, model = Place.of(os.environ), load(args.checkpoint)
    stopped = False
    if model is None or model.num_boosted_rounds() < args.rounds:  # else the others may be gone already
        with together(place):
            model, stopped = train(args, model)
    if stopped:
        return ASKED_TO_STOP
    if place.rank == 0:
        print(f"done: {accuracy(model):.1%} of the held-out digits are read right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
