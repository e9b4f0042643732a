"""Train a small model of bytes with JAX, data-parallel, in a JAXJob or TrainJob, on text that every machine has.

    python train_jax.py                           # one process
    trainer-launch rehearse -f jaxjob-simple.yaml    # a JAXJob of two processes
    trainer-launch rehearse -f trainjob-jax.yaml     # a TrainJob over a JAX runtime of two nodes

The text is the source code of Python's own standard library, so nothing is downloaded. With `--checkpoint PATH` the
run continues where the last one ended: process 0 writes the file whole or not at all, and sends what it finds there
to the others. On SIGTERM, to any process, all save after the same step and leave with 143, which a controller takes
for "again"; 0 would be success. What a step reads follows from (seed, step, process). When a process is lost, all
others end as well, and have to be started again, by a restartPolicy or a JobSet.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

try:
    from trainer_launch import report
except ImportError:  # an image without it

    def report(**_: object) -> None:  # type: ignore[misc]
        """Nobody is there to be told."""


CONTEXT = 8  # bytes seen, of which the next one is guessed; a model that knows nothing has loss ln(256) = 5.55
EMBEDDING, HIDDEN, VOCABULARY = 16, 128, 256
TEXT_BYTES, HELD_OUT_BYTES = 3_000_000, 65_536  # the end of the text is never trained on
LEARNING_RATE = 0.5

Weights = dict[str, Any]


def join() -> None:
    """Meet the other processes, as the job's variables say; alone when there are none."""
    env = os.environ
    if "JAX_COORDINATOR_ADDRESS" in env:  # Kubeflow Trainer v2
        address, size, process = (
            env[f"JAX_{key}"] for key in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
        )
    elif "COORDINATOR_ADDRESS" in env:  # a JAXJob, which gives the port apart
        address = f"{env['COORDINATOR_ADDRESS']}:{env['COORDINATOR_PORT']}"
        size, process = env["NUM_PROCESSES"], env["PROCESS_ID"]
    else:
        return
    jax.config.update("jax_cpu_collectives_implementation", "gloo")  # where there is no GPU
    jax.distributed.initialize(address, int(size), int(process))


@dataclass
class Training:
    """The text, how it is shared out, and the run's state on disk."""

    args: argparse.Namespace
    text: np.ndarray

    def __post_init__(self) -> None:
        mesh = Mesh(np.array(jax.devices()), ("data",))
        self.shared_out, self.everywhere = (NamedSharding(mesh, PartitionSpec(*how)) for how in (("data",), ()))
        self.leads = jax.process_index() == 0

    def rows(self, step: int) -> Any:
        """The global batch of a step, of which each process reads its own share."""
        draw = np.random.default_rng((self.args.seed, step, jax.process_index()))
        size = self.args.batch * jax.local_device_count()
        starts = draw.integers(len(self.text) - HELD_OUT_BYTES - CONTEXT, size=(size, 1))
        return jax.make_array_from_process_local_data(self.shared_out, self._rows_at(starts))

    def held_out(self) -> Any:
        starts = np.arange(len(self.text) - HELD_OUT_BYTES, len(self.text) - CONTEXT - 1, 16)[:, None]
        return self._rows_at(starts)

    def _rows_at(self, starts: np.ndarray) -> np.ndarray:
        return self.text[starts + np.arange(CONTEXT + 1)].astype(np.int32)

    def begin(self) -> tuple[Weights, int]:
        """Where process 0's checkpoint ends, or a fresh start; the same in every process."""
        draw, path = np.random.default_rng(self.args.seed), self.args.checkpoint
        shapes = {
            "embed": (VOCABULARY, EMBEDDING),
            "hidden": (CONTEXT * EMBEDDING, HIDDEN),
            "out": (HIDDEN, VOCABULARY),
        }
        state: dict[str, Any] = {"step": np.int32(0)}
        state |= {key: draw.normal(0, shape[0] ** -0.5, shape).astype(np.float32) for key, shape in shapes.items()}
        if self.leads and path and path.exists():
            with np.load(path) as content:
                state = {key: content[key] for key in state}
            put(f"resumed at step {int(state['step'])} from {path}")
        if jax.process_count() > 1:
            state = multihost_utils.broadcast_one_to_all(state)
        step = int(state.pop("step"))
        return {
            key: jax.make_array_from_process_local_data(self.everywhere, np.asarray(value))
            for key, value in state.items()
        }, step

    def save(self, weights: Weights, step: int) -> None:
        """Write the checkpoint whole or not at all."""
        path = self.args.checkpoint
        if path is None or not self.leads:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        with temporary.open("wb") as file:
            content = {"step": np.int32(step), **{key: np.asarray(value) for key, value in weights.items()}}
            np.savez(file, **content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)


def loss_of(weights: Weights, rows: Any) -> Any:
    """The mean loss of guessing the last byte of each row."""
    seen = weights["embed"][rows[:, :-1]].reshape(len(rows), -1)
    scores = jax.nn.log_softmax(jax.nn.relu(seen @ weights["hidden"]) @ weights["out"])
    return -jnp.take_along_axis(scores, rows[:, -1:], axis=1).mean()


@jax.jit  # type: ignore[untyped-decorator, unused-ignore]
def step_of(weights: Weights, rows: Any) -> tuple[Weights, Any]:
    """Learn from rows of all processes: a mean over what is shared out is an all-reduce."""
    loss, gradients = jax.value_and_grad(loss_of)(weights, rows)
    return jax.tree.map(lambda weight, gradient: weight - LEARNING_RATE * gradient, weights, gradients), loss


def train(training: Training) -> None:
    args = training.args
    weights, step = training.begin()
    while step < args.steps:
        weights, total = step_of(weights, training.rows(step))
        loss, step = float(total), step + 1
        # JAX tells all processes of a SIGTERM to one, and chooses the step; alone there is nobody to agree with.
        stop = jax.process_count() > 1 and multihost_utils.reached_preemption_sync_point(step)
        if training.leads:
            report(step=step, progress=step / args.steps, metrics={"loss": loss})
            if step == 1 or step % args.log_every == 0 or step == args.steps:
                put(f"step {step}/{args.steps}  loss {loss:.3f}")
        if stop or step == args.steps or step % args.checkpoint_every == 0:
            training.save(weights, step)
        if stop:
            put(f"stopped at step {step}: asked by SIGTERM")
            sys.exit(128 + signal.SIGTERM)
    if training.leads:
        here = {key: np.asarray(value) for key, value in weights.items()}
        put(f"done: held-out loss {float(loss_of(here, training.held_out())):.3f}")


def put(text: str) -> None:
    print(text + "\n", end="", flush=True)


def read_text() -> np.ndarray:
    """The standard library's modules in order of name; the same on every node."""
    text = b"".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    if len(text) < 2 * HELD_OUT_BYTES:
        raise SystemExit("train_jax: this Python comes without the sources of its standard library")
    return np.frombuffer(text[:TEXT_BYTES], np.uint8)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="train up to this step (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=64, help="rows per device and step (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the weights and the data (default: %(default)s)")
    parser.add_argument("--checkpoint", type=Path, metavar="PATH", help="an .npz file to save to and resume from")
    parser.add_argument("--checkpoint-every", type=int, default=20, metavar="N", help="default: %(default)s")
    parser.add_argument("--log-every", type=int, default=20, metavar="N", help="default: %(default)s")
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    join()
    put(f"process {jax.process_index()} of {jax.process_count()} on {jax.devices()[0].platform}, pid {os.getpid()}")
    train(Training(args, read_text()))


if __name__ == "__main__":
    main()
