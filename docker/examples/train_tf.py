"""Train a small model of bytes with TensorFlow, in any role of a TFJob, on text that every machine has.

    python train_tf.py                          # one process
    trainer-launch rehearse -f tfjob-simple.yaml   # two workers: MultiWorkerMirroredStrategy
    trainer-launch rehearse -f tfjob-ps.yaml       # ParameterServerStrategy: chief, server, workers, evaluator

The text is the source code of Python's own standard library, so nothing is downloaded. With `--checkpoint PATH`
the run continues where the last one ended: worker 0 or the chief writes the file whole or not at all, and all
variables begin with what it holds. On SIGTERM, to a worker that trains or to the chief, they save after the step
they are in and leave with 143, which a controller takes for "again"; 0 would be success. What a step reads
follows from (seed, step, worker).

What a lost peer means: mirrored workers end, all of them, and have to be started again, by a restartPolicy; the
chief goes on without a worker, but ends when it loses a parameter server.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # warnings and worse are enough
import numpy as np
import tensorflow as tf

try:
    from trainer_launch import report
except ImportError:  # an image without it

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


CONTEXT = 8  # bytes seen, of which the next one is guessed; a model that knows nothing has loss ln(256) = 5.55
EMBEDDING, HIDDEN, VOCABULARY = 16, 128, 256
TEXT_BYTES, HELD_OUT_BYTES = 3_000_000, 65_536  # the end of the text is never trained on
LEARNING_RATE = 0.5


@dataclass(frozen=True)
class Cluster:
    """TF_CONFIG: who takes part, and who this is."""

    spec: dict[str, list[str]]
    role: str
    index: int

    @classmethod
    def read(cls) -> Cluster:
        config = json.loads(os.environ.get("TF_CONFIG", "{}"))
        task = config.get("task", {"type": "worker", "index": 0})
        found = config.get("cluster", {})
        if isinstance(found.get("worker"), dict):
            raise SystemExit("train_tf: TF_CONFIG is sparse (enableDynamicWorker), and tells too little for this")
        # The operator lists evaluators as well; TensorFlow would wait for them, and they take no part.
        return cls({role: found[role] for role in found if role != "evaluator"}, task["type"], task["index"])

    def resolver(self) -> Any:
        return tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(self.spec), task_type=self.role, task_id=self.index, rpc_layer="grpc"
        )


class Model(tf.Module):
    """Which byte comes next: the embeddings of the last ones, one hidden layer, and a linear one."""

    def __init__(self, seed: int, saved: dict[str, np.ndarray]) -> None:
        super().__init__()
        draw = np.random.default_rng(seed)

        def variable(key: str, *shape: int) -> tf.Variable:
            fresh = draw.normal(0, shape[0] ** -0.5, shape).astype(np.float32)
            # Each replica takes the same step, by the mean of all gradients: assigning means averaging.
            return tf.Variable(saved.get(key, fresh), name=key, aggregation=tf.VariableAggregation.MEAN)

        self.weights = {
            "embed": variable("embed", VOCABULARY, EMBEDDING),
            "hidden": variable("hidden", CONTEXT * EMBEDDING, HIDDEN),
            "out": variable("out", HIDDEN, VOCABULARY),
        }

    def loss(self, rows: tf.Tensor) -> tf.Tensor:
        """The mean loss of guessing the last byte of each row."""
        seen = tf.reshape(tf.gather(self.weights["embed"], rows[:, :-1]), (-1, CONTEXT * EMBEDDING))
        logits = tf.nn.relu(seen @ self.weights["hidden"]) @ self.weights["out"]
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(rows[:, -1], logits))

    def step(self, rows: tf.Tensor) -> tf.Tensor:
        """Learn from these rows; their loss before that."""
        with tf.GradientTape() as tape:
            loss = self.loss(rows)
        for weight, gradient in zip(
            self.weights.values(), tape.gradient(loss, [*self.weights.values()]), strict=True
        ):
            weight.assign_sub(LEARNING_RATE * tf.convert_to_tensor(gradient))
        return loss


@dataclass
class Training:
    """The text, and the run's state on disk."""

    args: argparse.Namespace
    text: np.ndarray

    def rows(self, step: int, worker: int = 0) -> tf.Tensor:
        """What a worker reads for a step."""
        draw = np.random.default_rng((self.args.seed, step, worker))
        starts = draw.integers(len(self.text) - HELD_OUT_BYTES - CONTEXT, size=(self.args.batch, 1))
        return tf.constant(self.text[starts + np.arange(CONTEXT + 1)].astype(np.int32))

    def held_out(self) -> tf.Tensor:
        starts = np.arange(len(self.text) - HELD_OUT_BYTES, len(self.text) - CONTEXT - 1, 16)[:, None]
        return tf.constant(self.text[starts + np.arange(CONTEXT + 1)].astype(np.int32))

    def load(self) -> dict[str, np.ndarray]:
        """What was saved; empty before that."""
        path = self.args.checkpoint
        if path is None or not path.exists():
            return {}
        with np.load(path) as content:
            return {key: content[key] for key in content.files}

    def save(self, model: Model, step: int) -> None:
        """Write the checkpoint whole or not at all."""
        path = self.args.checkpoint
        if path is None:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        with temporary.open("wb") as file:
            np.savez(file, step=step, **{key: weight.numpy() for key, weight in model.weights.items()})
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def say(self, step: int, loss: float) -> None:
        report(step=step, progress=step / self.args.steps, metrics={"loss": loss})
        if step == 1 or step % self.args.log_every == 0 or step == self.args.steps:
            put(f"step {step}/{self.args.steps}  loss {loss:.3f}")


def requests_to_stop() -> list[int]:
    """The SIGTERMs received from now on.

    Not before TensorFlow's cluster stands: its start puts its own handler in the place of ours, and lets no handler
    of Python run while it waits for the others; and there is nothing to save yet.
    """
    received: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: received.append(number))
    return received


def put(text: str) -> None:
    print(text + "\n", end="", flush=True)


def mirrored(cluster: Cluster, training: Training) -> None:
    """All workers hold the same variables, and take each step together."""
    args, leads = training.args, cluster.index == 0 and cluster.role in ("chief", "worker")
    workers = sum(map(len, cluster.spec.values()))
    strategy = (
        tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=cluster.resolver())
        if workers > 1
        else tf.distribute.get_strategy()
    )
    put(f"{cluster.role} {cluster.index} of {max(1, workers)}, pid {os.getpid()}")
    with strategy.scope():  # every worker gets the values of worker 0, which alone needs the disk
        saved = training.load()
        model = Model(args.seed, saved)
        began = tf.Variable(
            int(saved.get("step", 0)), dtype=tf.int64, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA
        )
    step, asked = int(began.numpy()), requests_to_stop()
    if leads and step:
        put(f"resumed at step {step} from {args.checkpoint}")

    @tf.function  # type: ignore[untyped-decorator, unused-ignore]
    def together(rows: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
        def one(rows: tf.Tensor, stop: tf.Tensor) -> tf.Tensor:
            return tf.stack([model.step(rows), stop])

        return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(one, (rows, stop)), axis=None)

    while step < args.steps:
        loss, stop = together(training.rows(step, cluster.index), tf.constant(float(len(asked)))).numpy()
        step += 1
        if leads:
            training.say(step, float(loss))
            if stop or step == args.steps or step % args.checkpoint_every == 0:
                training.save(model, step)
        if stop:  # the same answer on every worker
            put(f"stopped at step {step}: asked by SIGTERM")
            sys.exit(128 + signal.SIGTERM)
    if leads:
        put(f"done: held-out loss {float(model.loss(training.held_out())):.3f}")


def coordinate(cluster: Cluster, training: Training) -> None:
    """The chief: it holds nothing, and hands out steps that workers take on what the parameter servers hold."""
    args = training.args
    strategy = tf.distribute.ParameterServerStrategy(cluster.resolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    saved = training.load()
    with strategy.scope():
        model = Model(args.seed, saved)
    step, asked = int(saved.get("step", 0)), requests_to_stop()
    if step:
        put(f"resumed at step {step} from {args.checkpoint}")
    one = tf.function(model.step)
    while step < args.steps:
        together = range(step, min(step + len(cluster.spec["worker"]), args.steps))
        losses = [coordinator.schedule(one, args=(training.rows(each),)) for each in together]
        coordinator.join()  # what a lost worker had to do, another one does; a lost parameter server ends it
        for step, loss in zip((each + 1 for each in together), losses, strict=True):
            training.say(step, float(loss.fetch()))
        if asked or step >= args.steps or step % args.checkpoint_every < len(losses):
            training.save(model, step)
        if asked:
            put(f"stopped at step {step}: asked by SIGTERM")
            os._exit(128 + signal.SIGTERM)
    put("done")
    os._exit(0)  # TensorFlow's own end would wait for a worker that was lost and is coming back: for ever


def serve(cluster: Cluster) -> None:
    """A parameter server, or a worker of one: it does what the chief asks, until it is ended."""
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster.spec), job_name=cluster.role, task_index=cluster.index, protocol="grpc"
    )
    put(f"{cluster.role} {cluster.index} serves")
    server.join()


def evaluate(training: Training) -> None:
    """The evaluator: look at each checkpoint that it finds, until the last."""
    seen, asked = 0, requests_to_stop()
    while seen < training.args.steps and not asked:
        saved = training.load()
        if saved and int(saved["step"]) > seen:
            seen = int(saved["step"])
            loss = float(Model(training.args.seed, saved).loss(training.held_out()))
            put(f"evaluated step {seen}: held-out loss {loss:.3f}")
        time.sleep(0.2)


def read_text() -> np.ndarray:
    """The standard library's modules in order of name; the same on every node."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    if len(text) < 2 * HELD_OUT_BYTES:
        raise SystemExit("train_tf: this Python comes without the sources of its standard library")
    return np.frombuffer(text[:TEXT_BYTES], np.uint8)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="train up to this step (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="rows per worker and step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the data (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="an .npz file to save to and resume from")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    args, cluster = parse_args(), Cluster.read()
    if cluster.role == "ps" or (cluster.role == "worker" and "ps" in cluster.spec):
        serve(cluster)
        return
    training = Training(args, read_text())
    if cluster.role == "evaluator":
        evaluate(training)
    elif "ps" in cluster.spec:
        coordinate(cluster, training)
    else:
        mirrored(cluster, training)


if __name__ == "__main__":
    main()
