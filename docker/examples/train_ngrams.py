"""Train a language model of byte trigrams, in plain Python, on this node's share of text that every machine has.

    python train_ngrams.py --model model.json                       # alone
    JOB_COMPLETION_INDEX=3 python train_ngrams.py --nodes 10 --model node-3.json

The text is the source code of Python's own standard library; node i of n takes each n-th module, nobody the last.
The model is saved after every few modules, whole or not at all; who is started again goes on where it was saved. On
SIGTERM it saves and leaves with exit code 0.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sysconfig
from collections import Counter
from pathlib import Path

ALPHABET = 256  # bytes; a model that knows nothing needs 8 bits for each


def modules() -> list[Path]:
    """The standard library's modules in order of name, the same on every node."""
    found = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    if len(found) < 20:
        raise SystemExit("train_ngrams: this Python comes without the sources of its standard library")
    return found


class Model:
    """How often each byte follows each pair of bytes."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # by three characters, and by the first two of them
        self.read = 0  # modules so far

    def learn(self, text: str) -> None:
        """Count a module's trigrams."""
        self.counts.update(text[at : at + 3] for at in range(len(text) - 2))
        self.counts.update(text[at : at + 2] for at in range(len(text) - 2))
        self.read += 1

    def bits(self, text: str) -> float:
        """How many bits a byte of this text takes."""
        total = 0.0
        for at in range(len(text) - 2):
            seen, pair = self.counts[text[at : at + 3]], self.counts[text[at : at + 2]]
            total -= math.log2((seen + 0.01) / (pair + 0.01 * ALPHABET))
        return total / max(1, len(text) - 2)

    def save(self, path: Path) -> None:
        """Write it whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(json.dumps({"read": self.read, "counts": self.counts}))
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Go on from what `save` wrote."""
        content = json.loads(path.read_text())
        self.read, self.counts = content["read"], Counter(content["counts"])


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", type=Path, required=True, metavar="PATH", help="save to this file, resume from it"
    )
    parser.add_argument("--nodes", type=int, default=1, help="how many share the text (default: %(default)s)")
    parser.add_argument("--save-every", type=int, default=5, metavar="N", help="modules (default: %(default)s)")
    parser.add_argument("--modules", type=int, default=150, metavar="N", help="of the text (default: %(default)s)")
    args = parser.parse_args()
    node = int(os.environ.get("JOB_COMPLETION_INDEX", "0"))
    *text, held_out = modules()[: args.modules]
    share = text[node :: args.nodes]
    signals: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _frame: signals.append(number))

    model = Model()
    if args.model.exists():
        model.load(args.model)
        print(f"resumed at module {model.read} of {len(share)}", flush=True)
    while model.read < len(share) and not signals:
        model.learn(share[model.read].read_text(encoding="latin-1"))
        if model.read % args.save_every == 0 or model.read == len(share):
            model.save(args.model)
            print(f"step {model.read}/{len(share)}", flush=True)
    if signals:
        model.save(args.model)
        print(f"stopped at module {model.read}: asked by SIGTERM, saved", flush=True)
        return
    bits = model.bits(held_out.read_text(encoding="latin-1"))
    print(
        f"done: node {node} read {model.read} modules, {bits:.2f} bits for each byte of {held_out.name}", flush=True
    )


if __name__ == "__main__":
    main()
