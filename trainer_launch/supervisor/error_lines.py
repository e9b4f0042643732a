"""What the last lines of a program tell: the error that ended it, and which cause such an error has.

Only the last error counts, with the few lines that belong to it: a warning that was logged before it, or by a
library's threads after it, is no cause. Texts are those of Python, torch 2.4 to 2.13, NCCL, gloo, CUDA, ROCm,
TensorFlow 2.20, JAX 0.10 and MPICH 4.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from msgspec import Struct

from trainer_launch.host import files
from trainer_launch.host.slow_files import within
from trainer_launch.model import exit_codes, suggestions

_ERROR_BYTES = 4 << 20  # of torch's error file
_ERROR_LINES = 8  # an error's own text; what follows are frames
# Python's, those of TensorFlow's graphs, which stand before the reason, and MPICH's, whose last one tells it.
_FRAME = re.compile(r'\s*File "[^"]*", line \d+|Detected at node |\w+\(\d+\)\.*: *$|\s*$')
# How Python names what was not caught, perhaps with torch's prefix. Paddle's `FatalError` only repeats the signal.
_UNCAUGHT = re.compile(
    r"(\[rank\d+\]: *)?(?!FatalError: `)[A-Za-z_][\w.]*(Error|Exception|Interrupt|Exit|Timeout|Abort)\b(?![\w.])"
)
# C++ itself, the fatal lines of JAX's and TensorFlow's logging, which abort, and MPICH's, above its own stack.
_TERMINATED = re.compile(
    r"terminate called after throwing|terminate called without|"
    r"Abort\(-?\d+\) on node \d+ \(rank \d+ in comm \d+\): Fatal error in |"
    r"F\d{4} [\d:.]+ +\d+ \S+:\d+\] |[\d-]+ [\d:.]+: F \S+:\d+\] "
)
# What threads of libraries log: torch's C++ lines, NCCL's, Python's warnings.
_LOGGED = re.compile(r"(\[rank\d+\]: *)?\[[IWE]\d{3,4} |.*\bNCCL (WARN|INFO)\b|\S+:\d+: \w*Warning: ")
# What torch's agent logs of a worker's end: no word of the worker's own.
_OF_AGENT = re.compile(r"[IWE]\d{4} \S+ +\d+ \S*torch/(distributed/elastic|multiprocessing)/")
_NAME = re.compile(r"(?:\[rank\d+\]: *)?([A-Za-z_][\w.]*)(?=:|$)")

DEVICE_XIDS = (46, 48, 54, 56, 57, 58, 62, 63, 64, 65, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143)
_XID = rf"\bXid\b[^\n]{{0,60}}?\b(?:{'|'.join(map(str, DEVICE_XIDS))})\b"  # 13, 31 and 43 are programs' faults
_GLOO = r"(?i:gloo)[\s\S]{0,400}?"


class Symptom(Struct, frozen=True, kw_only=True):
    """A kind of error, and what it means."""

    reason: str
    pattern: str  # compiled when an error is looked at: most jobs have none
    what: str  # completes "rank 3 ended with exit code 1, …"
    hint: str
    exit_code: int | None = None  # None: the program's own
    again: bool | None = None  # whether to start again can help; None: as the exit code says
    is_proof: bool = False  # that a device of this machine failed


def final_error(lines: Iterable[str]) -> tuple[str, ...]:
    """The last error that was named, and what belongs to it; without one the very last line."""
    lines = tuple(line for line in lines if not _OF_AGENT.match(line))
    named = [n for n, line in enumerate(lines) if _UNCAUGHT.match(line) or _TERMINATED.match(line)]
    if not named:
        return lines[-1:]
    first, *rest = lines[named[-1] :]
    own = [line for line in rest if not (_LOGGED.match(line) or _FRAME.match(line))]
    return (first, *own[: _ERROR_LINES - 1])


def headline(lines: Iterable[str], *, only_named: bool) -> str:
    """The first line of the last error, for C++ with what it says; "" when there is none, or none was named."""
    first, *rest = (*final_error(lines), "")
    if _TERMINATED.match(first):
        return f"{first} {rest[0].strip()}".strip()
    return first if _UNCAUGHT.match(first) or not only_named else ""


def error_name(text: str) -> str | None:
    """The type of the exception that a message begins with, without its module: `ImportError`."""
    match = _NAME.match(text)
    return match.group(1).rpartition(".")[2] if match and _UNCAUGHT.match(text) else None


def essence(message: str) -> str:
    """An exception's message with, for the traceback of another process that torch puts into it, its last error."""
    told, mark, rest = message.partition("Original Traceback (most recent call last):")
    if not mark:
        return message
    return "\n".join([told.strip(), *final_error(line for line in rest.splitlines() if line.strip())])


def recognise(text: str) -> tuple[Symptom, str] | None:
    """The first symptom that fits an error's text, and the line that shows it."""
    for symptom in SYMPTOMS:
        match = re.search(symptom.pattern, text, re.MULTILINE)
        if match:
            return symptom, _line_at(text, match.end())
    return None


def _line_at(text: str, end: int) -> str:
    start = text.rfind("\n", 0, max(0, end - 1)) + 1
    return text[start:].partition("\n")[0].strip()


def _symptom(reason: str, *patterns: str, what: str, hint: str, code: int | None = None, **more: bool) -> Symptom:
    return Symptom(reason=reason, pattern="|".join(patterns), what=what, hint=hint, exit_code=code, **more)


_START = r"\A(?:\[rank\d+\]: *)?"
_FIX = "correct the program or its image; a restart will not help"
PEER_HINT = (
    "check the other pods (kubectl get pods): find the one that failed first, or why a missing one does not run"
)
_CUDA = r"(?:CUDA|HIP)(?: runtime)? error: |Cuda failure (?:\d+ )?'?|ROCm? error: "

_DEVICE_FAILED: dict[str, Any] = {
    "what": "because its GPU or the link to it failed",
    "hint": "run on another node and have this one's device checked (nvidia-smi -q, the node's kernel log)",
    "code": exit_codes.INFRASTRUCTURE,
    "again": True,
}

SYMPTOMS = (
    _symptom(
        "ProgramError",
        _START + r"(?:SyntaxError|IndentationError|TabError)\b",
        what="because its code cannot be parsed",
        hint=_FIX,
        again=False,
    ),
    _symptom(
        "ProgramError",
        _START + r"(?:ImportError|ModuleNotFoundError)\b",
        r"Error while finding module specification for|: No module named \S+$",
        what="because something it imports is not there",
        hint="install it into the image, or correct PYTHONPATH; a restart will not help",
        again=False,
    ),
    _symptom(
        "ProgramError",
        _START + suggestions.TYPO_IN_PROGRAM,
        what="because it uses a name, an attribute or a parameter that does not exist",
        hint="correct the program, or the version of the library that it calls; a restart will not help",
        again=False,
    ),
    _symptom(
        "Misconfigured",
        r"rendezvous: environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
        what="because the variables of a torch job are not set",
        hint="start it with --nproc-per-node N, or with the variables of a platform; trainer-launch explain shows "
        "what this pod was told",
        again=False,
    ),
    _symptom(
        "ProgramError",
        r"can't open file '.*': \[Errno 2\]",
        _START + r"FileNotFoundError: .*\.py'$",
        what="because its script is not there",
        hint="correct the path, the working directory or the volume that has the code; a restart will not help",
        again=False,
    ),
    _symptom(
        "ProgramError",
        r"^\S+: error: (?:unrecognized arguments|the following arguments are required|argument |invalid choice)",
        what="because it refuses its arguments",
        hint="correct the command's arguments; a restart will not help",
        again=False,
    ),
    _symptom(
        "ProgramError",
        r"Duplicate GPU detected",
        what="because two of its workers use the same GPU",
        hint="let each worker choose its device by LOCAL_RANK before the first collective",
        again=False,
    ),
    _symptom(
        "ProgramError",
        r"Received data size doesn't match expected size",
        what="because its ranks entered different collectives",
        hint="let all ranks call the same collectives with the same sizes; a restart will not help",
        again=False,
    ),
    _symptom(
        "SharedMemoryFull",
        r"killed by signal: Bus error",
        r"No space left on device[^\n]*/dev/shm|/dev/shm[^\n]*No space left on device",
        r"[Ee]rror while creating shared memory segment",
        r"unable to (?:mmap|write to file|allocate shared memory)[^\n]*(?:torch_|shm)",
        what="because /dev/shm has no room left",
        hint="mount an emptyDir with medium: Memory at /dev/shm, or use fewer data-loader workers",
    ),
    _symptom(
        "DeviceOutOfMemory",
        r"(?:CUDA|HIP) out of memory|" + rf"(?:{_CUDA})out of memory",
        r"Failed to CUDA (?:calloc|malloc)[^\n]*\d bytes|CUBLAS_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY",
        what="because its GPU has no memory left",
        hint="use a smaller batch, activation checkpointing or more sharding; nvidia-smi shows whether other "
        "processes hold this GPU's memory",
        again=False,
    ),
    _symptom(
        "OutOfMemory",
        r"\A(?:\[rank\d+\]: *)?MemoryError\b|DefaultCPUAllocator: (?:can't|not enough) ",
        r"\bOSError: \[Errno 12\] Cannot allocate memory",
        what="because the container has no memory left",
        hint="raise the container's memory limit, or use fewer data-loader workers or smaller batches",
    ),
    _symptom(
        "PortTaken",
        r"EADDRINUSE|\[Errno 98\] Address already in use",
        what="because another process of this node has its port",
        hint="let the program choose a free port, or end the process that has it",
    ),
    _symptom(
        "KernelError",
        r"device-side assert triggered|an illegal memory access was encountered|misaligned address",
        r"an illegal instruction was encountered|unspecified launch failure|invalid program counter",
        r"Memory access fault by GPU|CUBLAS_STATUS_EXECUTION_FAILED",
        what="because code that it ran on its GPU failed",
        hint="most often a bug of the program, such as an index out of range: CUDA_LAUNCH_BLOCKING=1 shows where. "
        "If it happens on one node only, have that device checked",
    ),
    _symptom(
        "DeviceError",
        rf"(?:{_CUDA})(?:uncorrectable|hardware stack error)",
        r"uncorrectable (?:NVLink|ECC) error|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|HARDWARE_STACK_ERROR",
        r"(?i:GPU has fallen off the bus|GPU is lost|Driver/library version mismatch|ERROR_DEVICE_IS_LOST)",
        _XID,
        **_DEVICE_FAILED,
        is_proof=True,
    ),
    _symptom(
        "DeviceError",
        rf"(?:{_CUDA})(?:unknown error|system not yet initialized)",
        r"CUDA-capable device\(s\) is/are busy|CUDA-capable devices are busy|SYSTEM_NOT_READY",
        **_DEVICE_FAILED,
    ),
    _symptom(
        "DeviceUnavailable",
        r"no CUDA-capable device is detected|No CUDA GPUs are available|Found no NVIDIA driver",
        r"No HIP GPUs are available|invalid device ordinal|no kernel image is available",
        r"CUDA driver version is insufficient|NVIDIA driver on your system is too old",
        r"forward compatibility was attempted on non supported HW|CUDA_ERROR_NO_DEVICE",
        what="because it cannot use the GPU it asks for",
        hint="compare the pod's resources.limits, the workers per node and the image's CUDA version with what "
        "nvidia-smi shows on this node",
    ),
    _symptom(
        "Hung",
        r"Watchdog caught collective operation timeout",
        _GLOO + r"Timed out waiting \d+ms|HeartbeatMonitor|monitoredBarrier after",
        what="because a collective did not complete in time",
        hint="another rank hangs, has died, or took another path: compare what all ranks did last",
    ),
    _symptom(
        "PeerLost",
        r"ncclRemoteError|DistNetworkError|Rendezvous(?:Timeout|Connection|Closed)Error",
        r"remote process exited or there was a network error|[Cc]onnection closed by remote peer",
        r"ncclSystemError[\s\S]*?(?:Connection refused|timed out|Broken pipe|reset by peer|No route to host)",
        r"DistStoreError: (?:Timed out|wait timeout|Connection)|TCPStore[^\n]*(?:Connection|Broken pipe|recvValue)",
        _GLOO + r"(?:Connection (?:closed|reset) by peer|Broken pipe|Connection refused|timed out)",
        _GLOO + r"(?:TIMEOUT self_rank|Socket closed )",  # Paddle's
        r"ucx function returned with failed status\([^\n]*(?:unreachable|remote peer|timeout|not connected)",
        _START + r"tensorflow\.\S*\.UnavailableError\b",
        _START + r"tensorflow\.\S*\.AbortedError\b[\s\S]*?(?:/job:|Collective ops is aborted)",
        r"because the JAX distributed service detected fatal errors",
        _START + r"xgboost\.core\.XGBoostError: [^\n]*/collective/result\.cc",
        what="because another rank or its network is gone",
        hint=PEER_HINT,
        code=exit_codes.INFRASTRUCTURE,
        again=True,
    ),
    _symptom(
        "DeviceError",
        r"ncclUnhandledCudaError|ncclSystemError|unhandled (?:cuda|system) error",
        what="because NCCL cannot use a device, a driver or the network of this node",
        hint="NCCL_DEBUG=WARN names the call that failed; run on another node and have this one checked",
        code=exit_codes.INFRASTRUCTURE,
        again=True,
    ),
)


# -- torch's error file ------------------------------------------------------------------------


log = logging.getLogger(__name__)

_NO_MESSAGE = "<NONE>"  # torch's word for a worker that left no error file


def read_error_file(path: str | None) -> dict[str, Any]:
    """What a worker under torch's @record wrote before it died; nothing, when it wrote nothing."""
    try:
        data = json.loads((files.read(path, _ERROR_BYTES) if path else None) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def message_in(data: dict[str, Any]) -> str | None:
    """The error's own words."""
    message = data.get("message")
    if isinstance(message, dict):
        message = message.get("message")
    return None if message in (None, _NO_MESSAGE) else essence(str(message))[:1000]


def traceback_in(data: dict[str, Any]) -> list[str]:
    """The last lines of its traceback."""
    message = data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    text = extra.get("py_callstack") if isinstance(extra, dict) else None
    return str(text).strip().splitlines()[-20:] if text else []


def hand_up(path: str | None, exit_code: int, own: str | None) -> None:
    """Copy the error file of the worker that failed first to the launcher's own, as torchrun does.

    `own` is the launcher's TORCHELASTIC_ERROR_FILE, by which a platform asks for it. `exit_code` is the worker's,
    -N for signal N: the worker could not know it.
    """
    data = read_error_file(path)
    if not own or not data:
        return
    message = data.get("message")
    if exit_code and isinstance(message, dict):
        message["errorCode"] = exit_code
    try:
        within(own, 0, Path(own).write_text, json.dumps(data), "utf-8")
    except OSError as problem:
        log.warning("TORCHELASTIC_ERROR_FILE=%s was not written: %s", own, problem.strerror)


def ended_in(data: dict[str, Any]) -> dict[str, int | None]:
    """How the worker that failed ended, where torch has added it: its exit code, or the signal."""
    message = data.get("message")
    code = message.get("errorCode") if isinstance(message, dict) else None
    if not isinstance(code, int) or isinstance(code, bool):
        return {}
    exited, killed = exit_codes.failing(code), exit_codes.deadly(-code)
    return {} if exited == killed else {"code": exited, "signal": killed}
