"""What this node is, by stable names, to be compared with the other nodes; no secret leaves it."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from trainer_launch.host import deadline_subprocess
from trainer_launch.model.redaction import REDACTED, redact, redact_command
from trainer_launch.model.units import counted, printable
from trainer_launch.planning.command import Command
from trainer_launch.preflight.cluster.comparison import ENV
from trainer_launch.preflight.cluster.protocol import MAX_VALUE

_VERSIONS = Path(__file__).parents[1] / "children" / "worker_versions.py"
_VERSIONS_S = 20.0  # a cold disk, or a machine with much else to do
LEAST_S, READ_S = 10.0, 30.0  # for versions and code: more than both take where nothing hangs
_MAX_BYTES = 24_000
_PREFIXES = (
    "NCCL_",
    "RCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "TORCH_",
    "PYTORCH_",
    "OMP_",
    "KMP_",
    "GOMP_",
    "MKL_",
    "CUDA_",
    "CUBLAS_",
    "HSA_",
)
_IMAGE = "FLYTE_INTERNAL_IMAGE"  # its name; a container does not know it, and elsewhere --image tells
_NAMES = frozenset(("PYTHONHASHSEED", "PYTHONPATH", "LD_PRELOAD"))
# Each node has its own, by what they are for.
_OWN = frozenset(("CUDA_VISIBLE_DEVICES", "NCCL_HOSTID"))
_DRIVER = re.compile(r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]*)")
_MODEL = re.compile(r"^Model:\s*(.+?)\s*$", re.MULTILINE)


def read_meanwhile(
    command: Command | None, known: Mapping[str, str], limit_s: float = READ_S
) -> Callable[[], Mapping[str, str]]:
    """Find versions and code out while others are waited for; what hangs, on a dead mount, stays unknown."""
    found = dict(known)
    until_s = time.monotonic() + limit_s

    def read() -> None:
        found.update(versions(command))
        program = _program(command) if command is not None else ()
        code = code_hash(program[0]) if program else None
        found.update({"code": code} if code is not None else {})

    thread = threading.Thread(target=read, name="facts", daemon=True)
    thread.start()

    def take() -> Mapping[str, str]:
        thread.join(max(0.0, until_s - time.monotonic()))
        return dict(found)

    return take


def quick_facts(
    env: Mapping[str, str],
    command: Command | None,
    workers: int | None,
    gpus: int,
    salt: bytes,
    root: Path = Path("/"),
) -> dict[str, str]:
    """What is there to be read."""
    found = devices(gpus, root)
    found |= {"image": env[_IMAGE]} if env.get(_IMAGE) else {}
    if workers is not None:
        found["nproc_per_node"] = str(workers)
    if command is not None:
        found["command"] = " ".join(redact_command(_program(command) or command.argv))
    return found | {f"{ENV}{name}": shown for name, shown in variables(env, salt).items()}


def variables(env: Mapping[str, str], salt: bytes) -> dict[str, str]:
    """The variables that all nodes should have alike; of a secret, only a hash with this preflight's salt."""
    chosen = {}
    for name in sorted(env):
        if name in _OWN or not (name.startswith(_PREFIXES) or name in _NAMES):
            continue
        value = env[name]
        if REDACTED in redact(name, value):
            value = (
                f"secret #{hmac.new(salt, value.encode(errors='surrogateescape'), hashlib.sha256).hexdigest()[:12]}"
            )
        chosen[name] = value
    return chosen


def versions(command: Command | None) -> dict[str, str]:
    """What the program's own interpreter would import."""
    python = command.python[0] if command is not None and command.python else sys.executable
    ended = deadline_subprocess.run((python, str(_VERSIONS)), None, _VERSIONS_S)
    try:
        told = json.loads(ended.stdout) if ended.code == 0 else {}
    except ValueError:
        return {}
    return {str(key): str(value) for key, value in told.items()} if isinstance(told, dict) else {}


def devices(gpus: int, root: Path = Path("/")) -> dict[str, str]:
    """The GPUs that this container may use, and their driver, by the kernel's files."""
    found = {"gpus": str(gpus)}
    folder = root / "proc/driver/nvidia"
    try:
        driver = _DRIVER.search((folder / "version").read_text(encoding="utf-8", errors="replace"))
        models = Counter(
            model[1]
            for path in sorted((folder / "gpus").glob("*/information"))
            for model in [_MODEL.search(path.read_text(encoding="utf-8", errors="replace"))]
            if model is not None
        )
    except OSError:
        return found
    found |= {"driver": driver[1]} if driver is not None else {}
    if models:
        found["gpus"] = f"{gpus} of {', '.join(sorted(models))}"
    return found


def _program(command: Command) -> tuple[str, ...]:
    """The script or module and its arguments, without torchrun's own options, which tell each node its rank."""
    return command.torchrun.program if command.torchrun is not None else command.program


def cut(found: Mapping[str, str]) -> dict[str, str]:
    """A long value is told by its beginning and a hash; what does not fit into a message is left out."""
    told: dict[str, str] = {}
    size = 0
    for key, value in found.items():
        shown = value
        if len(value) > MAX_VALUE:
            number = hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()[:12]
            shown = f"{value[: MAX_VALUE - 30]}... #{number}"
        shown = printable(shown)
        size += len(json.dumps(key)) + len(json.dumps(shown)) + 2
        if size > _MAX_BYTES or len(key) > MAX_VALUE:
            break
        told[key] = shown
    return told


# -- the program's code as one number ----------------------------------------------------------


_SOURCES = frozenset((".py", ".sh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".h", ".hpp", ".yaml", ".yml", ".toml"))
_MAX_FILES = 3000
_MAX_SOURCE_BYTES = 64 << 20
_MAX_S = 5.0
_OTHERS = frozenset(("__pycache__", "node_modules", "site-packages", "venv"))


def code_hash(program: str) -> str | None:
    """A short hash, with how many files it is of; None without a script, or where it cannot be read in time.

    Above the limits, which fall alike on all nodes, only sizes count.
    """
    script = Path(program)
    if not script.is_file():
        return None
    folder = script.resolve().parent
    found = hashlib.sha256()
    until_s = time.monotonic() + _MAX_S
    count = size = 0
    for path in _sources(folder, until_s):
        if count >= _MAX_FILES or time.monotonic() >= until_s:
            break
        try:
            length = path.stat().st_size
            size += length
            content = path.read_bytes() if size <= _MAX_SOURCE_BYTES else str(length).encode()
        except OSError:
            continue
        count += 1
        found.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode(errors="surrogateescape"))
        found.update(content)
    # What a slow disk leaves unread would look like other code.
    return None if time.monotonic() >= until_s else f"{found.hexdigest()[:12]} ({counted(count, 'file')})"


def _sources(folder: Path, until_s: float) -> Iterator[Path]:
    """Source files, in an order that is the same everywhere; no more of them when the time is up."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in _OTHERS)
        if time.monotonic() >= until_s:
            return
        for name in sorted(files):
            path = Path(place, name)
            if path.suffix in _SOURCES and not name.startswith(".") and not path.is_symlink():
                yield path
