"""The last lines of a program: the error that ended it, and the cause that such an error has.

Only the last error counts, with the few lines that belong to it: a warning that was logged before it, or by a
library's threads after it, is no cause. Texts are those of Python, glibc, torch 2.4 to 2.15, NCCL, gloo, CUDA,
ROCm, TensorFlow 2.20, JAX 0.10 and MPICH 4.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from msgspec import Struct

from trainer_launch.host import files
from trainer_launch.model import Death, exit_codes, suggestions
from trainer_launch.model.redaction import presentable

_ERROR_LINES = 8  # an error's own text; what follows are frames
_MESSAGE_CHARS = 1000
_AFTERWORDS = 2  # lines that a program may print between an error and its end
# Python's, those of TensorFlow's graphs, which stand before the reason, and MPICH's, whose last one tells it.
_FRAME = re.compile(r'\s*File "[^"]*", line \d+|Detected at node |\w+\(\d+\)\.*: *$|\s*$')
_RANK = r"(?:\[rank\d+\]: *)?"
# How Python names what was not caught, perhaps with torch's prefix. Paddle's `FatalError` only repeats the signal.
_UNCAUGHT = re.compile(
    _RANK + r"(?!FatalError: `)[A-Za-z_][\w.]*(Error|Exception(Group)?|Interrupt|Exit|Timeout|Abort)\b(?![\w.])"
)
# What argparse says of a script, Python of none, and who aborts: C++, Python and glibc themselves, fatal lines of
# JAX's and TensorFlow's logging, MPICH above its own stack, and the watchdog of torch's backends in Python.
_ARGPARSE = (
    r"\.py(?: [\w-]+){0,4}: error: (?:unrecognized arguments|the following arguments are required|argument )"
)
_TERMINATED = re.compile(
    rf"\S+{_ARGPARSE}|\S+: can't open file '|Timeout \(\d+:\d\d:\d\d(?:\.\d+)?\)!$|"  # faulthandler's
    r"terminate called after throwing|terminate called without|Fatal (?:Python|glibc) error: |"
    r"(?:free|[mc]alloc|realloc|munmap_chunk|malloc_consolidate)\(\): |"
    r"double free or corruption|corrupted (?:size vs|double)|"
    r"\*\*\* [\w ]+ detected \*\*\*|[^\s:]+: \S+:\d+: .*Assertion [`'].*' failed|"
    r".*\b(?:Default timeout callback fired, calling os\.abort|Watchdog event loop appears stuck)|"
    r"Abort\(-?\d+\) on node \d+ \(rank \d+ in comm \d+\): Fatal error in |"
    r"F\d{4} [\d:.]+ +\d+ \S+:\d+\] |[\d-]+ [\d:.]+: F \S+:\d+\] "
)
_GOES_ON = re.compile(r"terminate called after|Fatal Python error|Timeout \(|Abort\(")  # in the line below
_DUMPED = re.compile(r"  |(?:Current t|T)hread 0x|Stack \(most recent")  # by Python, below that
# What threads of libraries log: torch's C++ lines, NCCL's, Python's warnings.
_LOGGED = re.compile(r"(\[rank\d+\]: *)?\[[IWE]\d{3,4} |.*\bNCCL (WARN|INFO)\b|\S+:\d+: \w*Warning: ")
# What torch's agent logs of a worker's end: no word of the worker's own.
_OF_AGENT = re.compile(r"[IWE]\d{4} \S+ +\d+ \S*torch/(distributed/elastic|multiprocessing)/")
# torchrun's, which tells no cause.
_OF_WORKERS = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
_CANNOT_RUN = re.compile(r"\S+: (?:line )?\d+: .*: (?:(?:command )?not found|Permission denied|No such file.*)$")
_ENDED_TORCHRUN = re.compile(r"(?:[\w.]+\.)?SignalException: Process \d+ got signal: (\d+)")
_NAME = re.compile(_RANK + r"([A-Za-z_][\w.]*)(?=:|$)")


_SYNTAX = re.compile(rf"{_RANK}(?:SyntaxError|IndentationError|TabError)\b(?!.*, line \d+\))")
_PLACE = re.compile(_RANK + r' *File "([^"]*)", line (\d+)$')
_CALL = re.compile(_RANK + r' *File "([^"]*)", line (\d+), in ')
_OF_TEXT = re.compile(r"( \(<[^()<>\n]*>, line \d+\))$")
# What Python draws around its errors.
_OF_GROUP = re.compile(r"^(\[rank\d+\]: )?\s*(?:\| ?|\+ (?=Exc)|\+[-+][-+ \d.]*$)+")
_DIRECT = "The above exception was the direct cause of the following exception:"
_HANDLING = "During handling of the above exception, another exception occurred:"
_TRACEBACK = re.compile(
    r"(?:Original |Exception Group )?Traceback \(most recent call last\):(?: \(RANK (?P<rank>\d+)\))?"
)
_MOST_INNER = 3
# Of a tensor in torch's TORCH_DISTRIBUTED_DEBUG=DETAIL, what is alike on all ranks.
_OPTIONS = re.compile(r", TensorDeviceTypes=(?:TensorOptions\(.{0,300}?memory_format=\([^)]*\)\))+")


def with_places(lines: Iterable[str]) -> tuple[str, ...]:
    """Lines without what torch's agent logs, without frames around groups; a SyntaxError with its place.

    A NameError or the like with its place where a program has evaluated a text, such as <string>.
    """
    plain: list[str] = []
    place, calls = "", list[re.Match[str]]()
    for raw in lines:
        line = _OF_GROUP.sub(r"\1", raw)
        if _OF_AGENT.match(line):
            continue
        if match := _PLACE.match(line):
            place = f" ({match[1].rpartition('/')[2]}, line {match[2]})"
        if match := _CALL.match(line):
            calls.append(match)
        elif _TRACEBACK.search(line):
            calls.clear()
        is_of_text = bool(calls) and re.match("<(?!frozen )", calls[-1][1]) is not None
        is_of_text = is_of_text and any(not call[1].startswith("<") for call in calls)  # python -c has but these
        if is_of_text and suggestions.is_typo_in_program(_bare(line)):
            line += f" ({calls[-1][1]}, line {calls[-1][2]})"
        plain.append(line + place if _SYNTAX.match(line) else line)
    return tuple(plain)


def final_error(lines: Iterable[str]) -> tuple[str, ...]:
    """The last error that was named, and what belongs to it; without one the very last line."""
    lines = with_places(lines)
    named = _named(lines)
    if not named:
        return lines[-1:]
    if lines[named[-1]].startswith(_OF_WORKERS):
        return _workers_error(lines[: named[-1]], named[:-1])
    if lines[named[-1]] == "Fatal Python error: Aborted" and _TERMINATED.match(lines[named[-2:][0]]):
        named = named[-2:][:1]  # what aborts has said why
    first, *rest = lines[named[-1] :]
    if first.startswith(("Fatal Python error: ", "Timeout (")):  # below is where each thread was, the main one last
        # Of a forked worker, only the thread that failed is shown.
        starts = "Thread 0x" if first.startswith("Timeout") else ("Current thread ", "Stack (most recent")
        failed = next((n for n in reversed(range(len(rest))) if rest[n].startswith(starts)), len(rest))
        return (first, *(line.strip() for line in rest[failed + 1 : failed + 2]))
    own = [line for line in rest if not (_LOGGED.match(line) or _FRAME.match(line))]
    return (first, *own[: _ERROR_LINES - 1])


def _named(lines: Sequence[str]) -> list[int]:
    """Where errors are named: by their form, or at the end of a traceback, whatever the exception is called."""
    named, is_below_calls, is_trace = list[int](), False, True  # of a long traceback, the head may be lost
    for n, line in enumerate(lines):
        if _UNCAUGHT.match(line) or _TERMINATED.match(line) or (is_below_calls and _NAME.match(line)):
            named.append(n)
        if re.match(r"(?:\[rank\d+\]: )?  ", line):
            is_below_calls = is_below_calls or (is_trace and _CALL.match(line) is not None)
        else:  # a stack that a program shows has no traceback's head, and no error below it
            is_below_calls, is_trace = False, _TRACEBACK.search(line) is not None
    return named


def latest(lines: Sequence[str], count: int) -> Sequence[str]:
    """The last lines; all that stand before torchrun's report, whose list of ranks is longer than any error.

    Of a crash with more frames also what was fatal, and the innermost frame of each thread.
    """
    end = next((n for n in reversed(range(len(lines))) if lines[n].startswith(_OF_WORKERS)), None)
    if end is None:
        start = head = max(0, len(lines) - count)
        while head and _DUMPED.match(lines[head]):
            head -= 1
        dump = range(head, start if lines and _GOES_ON.match(lines[head]) else 0)
        inner = [lines[n] for n in dump if not (lines[n].startswith("  ") and lines[n - 1].startswith("  "))]
        return [*inner, *lines[start:]]
    start = next((n for n in reversed(range(end)) if _TRACEBACK.match(lines[n])), end)
    root = next((n for n in range(end, len(lines)) if lines[n].startswith("Root Cause ")), end + 1)
    return [*(line for line in lines[:start] if not _OF_AGENT.match(line)), lines[end], *lines[root:]]


def last_chain(lines: Sequence[str]) -> Sequence[str]:
    """The last error and those that it was raised from: an error before these was handled."""
    start, after, is_linked, named = 0, 0, True, {*_named(lines)}
    for n, line in enumerate(lines):
        if _bare(line) in (_DIRECT, _HANDLING):
            is_linked = True
        elif n in named:
            start, after, is_linked = start if is_linked else after, n + 1, False
    return lines[start:]


def _bare(line: str) -> str:
    """A line without the rank that torch writes before it."""
    return re.sub(_RANK, "", line, count=1)


def _workers_error(lines: Sequence[str], named: Sequence[int]) -> tuple[str, ...]:
    """The last error of torchrun's workers, but no victim's where there is another; without one their last line."""
    at = ([n for n in named if not _is_victims(_bare(lines[n]))] or [-1, *named])[-1]
    until = next((n for n in range(at + 1, len(lines)) if _TRACEBACK.search(lines[n])), len(lines))
    return final_error(lines[:until])


def headline(lines: Iterable[str]) -> str:
    """The first line of the last error that was named, with the line below if it goes on there; "" without one."""
    lines = tuple(lines)
    first, *rest = (*final_error(lines), "")
    first = _bare(first)
    if _TERMINATED.match(first):
        return f"{first} {rest[0].strip()}".strip() if _GOES_ON.match(first) else first
    return first if _named(with_places(lines)) else ""


def last_words(lines: Iterable[str]) -> str:
    """The last line of stderr that no library has logged."""
    return next((line for line in reversed([*lines]) if not (_OF_AGENT.match(line) or _LOGGED.match(line))), "")


def printed_last(lines: Iterable[str]) -> str:
    """The error whose traceback a program has printed last; "": it went on after that, or has printed none."""
    shown = [line for line in lines if line.strip() and not _LOGGED.match(line)]
    start = next((n for n in reversed(range(len(shown))) if _TRACEBACK.match(shown[n])), len(shown))
    named = [n for n in _named(shown) if n > start]
    return headline(shown[start:]) if named and len(shown) - named[-1] <= 1 + _AFTERWORDS else ""


def shells_words(lines: Iterable[str]) -> str:
    """The last line in which a shell says that it cannot run a command."""
    return next((line for line in reversed([*lines]) if _CANNOT_RUN.match(line)), "")


def error_name(text: str) -> str | None:
    """The type of the exception that a message begins with, without its module: `ImportError`."""
    match = _NAME.match(text)
    return match.group(1).rpartition(".")[2] if match and _UNCAUGHT.match(text) else None


def essence(message: str) -> str:
    """An exception's message with, for each traceback that it quotes of another process, its last error."""
    head, *parts = (piece for piece in _TRACEBACK.split(_OPTIONS.sub("", message)))
    inner = [
        (f"rank {rank}: " if rank else "") + "\n".join(final_error(text.splitlines()))
        for rank, text in zip(parts[::2], parts[1::2], strict=True)
    ]
    return "\n".join([head.strip(), *inner[-_MOST_INNER:]]) if inner else head


def with_cause(message: str, trace: Sequence[str]) -> str:
    """A message with the error that it was raised from, or the last one of its group, by its traceback."""
    lines = with_places(map(_bare, trace))
    if (own := headline(lines)).startswith(message) and _OF_TEXT.search(own):
        message = own
    if _DIRECT not in lines and _HANDLING in lines:  # of an error and a peer that was lost, the error came first
        handled = headline(lines[: lines.index(_HANDLING)])
        if not handled or handled in message or (_is_victims(handled) and _is_victims(message)):
            return message
        return handled if _is_victims(message) else f"{message} (while handling {handled})"
    until = lines.index(_DIRECT) if _DIRECT in lines else len(lines) if "sub-exception" in message else 0
    cause = headline(lines[:until])
    return f"{message} (from {cause})" if cause and cause not in message else message


def in_chain(message: str, lines: Sequence[str]) -> str:
    """The same, by the last lines of a program's output."""
    return with_cause(message, last_chain(lines))


def _is_victims(text: str) -> bool:
    return (recognised := recognise(text)) is not None and recognised[0].has_victim


DEVICE_XIDS = (46, 48, 54, 56, 57, 58, 62, 63, 64, 65, 74, 79, 92, 94, 95, 109, 110, 119, 120, 136, 140, 143)
_XID = rf"\bXid\b[^\n]{{0,60}}?\b(?:{'|'.join(map(str, DEVICE_XIDS))})\b"  # 13, 31 and 43 are programs' faults
_GLOO = r"(?:gloo/\S*\.cc:\d+\]|\[gloo\]|\b[Gg]loo:)[^\n]{0,400}?"
_START = rf"\A{_RANK}"
_CUDA = r"(?:CUDA|HIP)(?: runtime)? error: |Cuda failure (?:\d+ )?'?|ROCm? error: "
PEER_HINT = (
    "check the other pods (kubectl get pods): find the one that failed first, or why a missing one does not run. "
    "If all run, check node 0's address and the network policies"
)


class Cause(Struct, frozen=True, kw_only=True):
    """Why a process ended, and what to do about it."""

    reason: str
    pattern: str = ""  # of the last error; compiled when an error is looked at: most jobs have none
    applies: Callable[[Death, Any], bool] = lambda death, evidence: False  # where no pattern tells
    what: str = ""  # completes "rank 3 ended with exit code 1, …"
    hint: str = ""
    exit_code: int | None = None  # None: the program's own
    again: bool | None = None  # whether a restart can help; None: nobody knows
    is_final: bool = False  # so sure to come again that the job is not restarted
    is_proof: bool = False  # that a device of this machine failed
    has_victim: bool = False  # a rank that says it has not caused it, unless it names itself


def recognise(text: str, reason: str | None = None) -> tuple[Cause, str] | None:
    """The first cause, of this reason, that fits an error's text, and the line that shows it."""
    for cause in SYMPTOMS:
        match = re.search(cause.pattern, text, re.MULTILINE) if reason in (None, cause.reason) else None
        if match:
            return cause, _line_at(text, match.end())
    return None


def _line_at(text: str, end: int) -> str:
    start = text.rfind("\n", 0, max(0, end - 1)) + 1
    return text[start:].partition("\n")[0].strip()


def _cause(reason: str, *patterns: str, code: int | None = None, **more: Any) -> Cause:
    return Cause(reason=reason, pattern="|".join(patterns), exit_code=code, **more)


_IN_VAIN = {"again": False}  # the launcher starts it once more, if at all: a volume may not have been there yet
_FINAL = {"again": False, "is_final": True}
_DEVICE_FAILED: dict[str, Any] = {
    "what": "because its GPU or the link to it failed",
    "hint": "run on another node and have this one's device checked (nvidia-smi -q, the node's kernel log)",
    "code": exit_codes.INFRASTRUCTURE,
    "again": True,
}

SYMPTOMS = (
    _cause(
        "ProgramError",
        _START + suggestions.UNPARSABLE_CODE,
        what="because its code cannot be parsed",
        hint="correct the program or its image; a restart will not help",
        **_IN_VAIN,
    ),
    _cause(
        "ProgramError",
        _START + r"ImportError: (?!No module named )",  # a name, or a library
        what="because an import failed",
        hint="install the version that the program needs into the image; a restart will not help",
        **_IN_VAIN,
    ),
    _cause(
        "ProgramError",
        _START + r"(?:ImportError|ModuleNotFoundError)\b",
        "^" + suggestions.MISSING_PROGRAM,
        what="because a module that it imports is missing",
        hint="install it into the image, or correct PYTHONPATH; a restart will not help",
        **_IN_VAIN,
    ),
    _cause(
        "ProgramError",
        _START + suggestions.TYPO_IN_PROGRAM,
        what="because it uses a name, an attribute or a parameter that does not exist",
        hint="correct the program, or the version of the library that it calls; a restart will not help",
        **_IN_VAIN,
    ),
    _cause(
        "ProgramError",
        r"\bpy\S{0,99}: can't open file '.*': \[Errno 2\]",
        what="because its script does not exist",
        hint="correct the path, the working directory or the volume that has the code; a restart will not help",
        **_FINAL,
    ),
    _cause(
        "ProgramError",
        _ARGPARSE,
        what="because it rejected its arguments",
        hint="correct the command's arguments; a restart will not help",
        **_FINAL,
    ),
    _cause(
        "Misconfigured",
        r"rendezvous: environment variable (?:RANK|WORLD_SIZE|MASTER_ADDR|MASTER_PORT) expected, but not set",
        what="because the variables of a torch job are not set",
        hint="start it with --nproc-per-node N, or with the variables of a platform; trainer-launch explain shows "
        "what it reads in this pod",
        **_FINAL,
    ),
    _cause(
        "Misconfigured",
        r"coordinator_\w*address should be defined|(?:of processes|of the current process) must be defined",
        r"Cannot automatically initialize distributed workload|Kubernetes API Error: 403\b",  # where JAX asks it
        what="because JAX lacks the coordinator's address, the number of processes or its rank",
        hint="call jax.distributed.initialize with coordinator_address, num_processes and process_id; a TrainJob "
        "of JAX has them in JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID",
        **_FINAL,
    ),
    _cause(
        "Misconfigured",
        r"Unable to find address for: |[Nn]o socket interface found",
        what="because GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME names no interface of this node",
        hint="set the exact name of an interface that ip addr shows here; ^ and = are for NCCL's variable only",
        **_FINAL,
    ),
    _cause(
        "ProgramError",
        r"Duplicate GPU detected",
        what="because two of its workers use the same GPU",
        hint="make each worker choose its device by LOCAL_RANK before the first collective",
        **_FINAL,
    ),
    _cause(
        "ProgramError",
        r"Received data size doesn't match expected size|Detected mismatch between collectives on ranks",
        r"Error when verifying shape tensors for collective|\A\S+ \S+ and its peers entered different collectives",
        what="because its ranks entered different collectives",
        hint="make all ranks call the same collectives with the same sizes; a restart will not help",
        has_victim=True,
        **_FINAL,
    ),
    _cause(
        "Failed",
        r"CheckpointException ranks:",
        what="because a distributed checkpoint failed",
        hint="correct the error of the rank that the message names",
        has_victim=True,
    ),
    _cause(
        "SharedMemoryFull",
        r"killed by signal: Bus error",
        r"No space left on device[^\n]*/dev/shm|/dev/shm[^\n]*No space left on device",
        r"[Ee]rror while creating shared memory segment",
        r"unable to (?:mmap|write to file|allocate shared memory)[^\n]*(?:torch_|shm)",
        what="because /dev/shm has no room left",
        hint="mount an emptyDir with medium: Memory at /dev/shm, or use fewer data-loader workers",
    ),
    _cause(
        "DeviceOutOfMemory",
        r"(?:CUDA|HIP) out of memory|" + rf"(?:{_CUDA})out of memory",
        r"Failed to CUDA (?:calloc|malloc)[^\n]*\d bytes|CUBLAS_STATUS_ALLOC_FAILED|CUDA_ERROR_OUT_OF_MEMORY",
        what="because its GPU ran out of memory",
        hint="use a smaller batch, activation checkpointing or more sharding; nvidia-smi shows whether other "
        "processes hold this GPU's memory",
    ),
    _cause(
        "Failed",
        r"Unable to allocate [\d.]+ [TPE]iB|tried to allocate \d{13,} bytes",  # numpy's and torch's words
        what="because it asked for more memory than there is",
        hint="correct the shape or size that the error names",
    ),
    _cause(
        "OutOfMemory",
        _START + r"(?:[\w.]*_Array)?MemoryError\b|DefaultCPUAllocator: (?:can't|not enough) ",
        r"\bOSError: \[Errno 12\] Cannot allocate memory",
        what="because an allocation failed",
        hint="if the container's memory was nearly used up, raise its limit or use smaller batches; if not, "
        "correct the size that was asked for",
    ),
    _cause(
        "Failed",
        r"OSError: \[Errno (?:28|122)\] |No space left on device|Not enough free space to write",
        r"Disk quota exceeded|database or disk is full",
        what="because a volume was full",
        hint="df -h and df -i in the pod show which one: free or enlarge it, or write elsewhere",
    ),
    _cause(
        "Failed",
        r"inline_container\.cc:\d+\] \. (?:unexpected pos|PytorchStreamWriter failed writing)",  # of torch.save
        _START + r"OSError: \d+ requested and \d+ written",  # numpy's
        what="because it could not write a file to its end",
        hint="df -h and df -i in the pod show whether its volume is full: free or enlarge it, or write elsewhere",
    ),
    _cause(
        "Failed",
        r"Too many open files|received \d+ items of ancdata",
        what="because it had too many open files",
        hint="raise the limit (ulimit -n), close files after use, or use fewer data-loader workers",
    ),
    _cause(
        "Failed",
        r"can't start new thread|(?:Thread creation|pthread_create) failed[^\n]*: Resource temporarily unavailable",
        what="because it could start no more threads",
        hint="raise the limit of processes (the pod's pids limit, ulimit -u), or use fewer threads and data-loader "
        "workers",
    ),
    _cause(
        "PortTaken",
        r"EADDRINUSE|\[Errno 98\] Address already in use",
        what="because another process on this node uses its port",
        hint="make the program choose a free port, or end the process that uses it",
    ),
    _cause(
        "KernelError",
        r"device-side assert triggered|an illegal memory access was encountered|misaligned address",
        r"an illegal instruction was encountered|unspecified launch failure|invalid program counter",
        r"Memory access fault by GPU|CUBLAS_STATUS_EXECUTION_FAILED",
        what="because code that it ran on its GPU failed",
        hint="most often a bug of the program, such as an index out of range: CUDA_LAUNCH_BLOCKING=1 shows where. "
        "If it happens on one node only, have that device checked",
    ),
    _cause(
        "DeviceError",
        rf"(?:{_CUDA})(?:uncorrectable|hardware stack error)",
        r"uncorrectable (?:NVLink|ECC) error|ECC_UNCORRECTABLE|NVLINK_UNCORRECTABLE|HARDWARE_STACK_ERROR",
        r"(?i:GPU has fallen off the bus|GPU is lost|Driver/library version mismatch|ERROR_DEVICE_IS_LOST)",
        _XID,
        **_DEVICE_FAILED,
        is_proof=True,
    ),
    _cause(
        "DeviceError",
        rf"(?:{_CUDA})(?:unknown error|system not yet initialized)",
        r"CUDA-capable device\(s\) is/are busy|CUDA-capable devices are busy|SYSTEM_NOT_READY",
        **_DEVICE_FAILED,
    ),
    _cause(
        "DeviceUnavailable",
        r"is only supported with GPUs, no GPUs found|Distributed package doesn't have \w*CCL built in",
        r"no CUDA-capable device is detected|No CUDA GPUs are available|Found no NVIDIA driver",
        r"No HIP GPUs are available|invalid device ordinal|no kernel image is available",
        r"Torch not compiled with CUDA|CUDA driver version is insufficient|NVIDIA driver on your system is too old",
        r"forward compatibility was attempted on non supported HW|CUDA_ERROR_NO_DEVICE",
        what="because it cannot use the GPU it asks for",
        hint="compare the pod's resources.limits, the workers per node and the image's CUDA version with what "
        "nvidia-smi shows on this node",
    ),
    _cause(
        "Hung",
        r"Watchdog caught collective operation timeout|HeartbeatMonitor|monitoredBarrier (?:after|in)",
        _GLOO + r"Timed out waiting \d+ms",
        r"Application timeout caused pair closure",  # what gloo says of the other operations at that time
        # Of torch 2.15's backends in Python, which abort and have named nothing.
        r"Default timeout callback fired|Watchdog (?:cpu|stream) timeout fired|Watchdog event loop appears stuck",
        what="because a collective did not complete in time",
        hint="trainer-launch incidents show has what each rank did last: correct the rank that had not entered the "
        "collective. If it is only slow, raise the timeout of init_process_group",
        has_victim=True,
    ),
    _cause(
        "Hung",
        r"\bwait timeout after \d+ms, keys: |store->get\([^)]*\) got error: Socket Timeout",
        _START + r"(?:RuntimeError|\S*DistStoreError): (?:Wait timeout$|Timeout waiting for key: )",  # in a file
        what="because no rank set a key of the store in time",
        hint="trainer-launch incidents show has what each rank did last: see why none has set the key",
        has_victim=True,
    ),
    _cause(
        "PeerLost",
        r"ncclRemoteError|DistNetworkError(?!: Interrupted)|Rendezvous(?:Timeout|Connection|Closed)Error",
        r"remote process exited or there was a network error|Net : [Cc]onnection closed by remote peer",
        r"ncclSystemError[\s\S]*?(?:Connection refused|timed out|Broken pipe|reset by peer|No route to host)",
        r"DistStoreError: (?:Timed out|Connection)|TCPStore[^\n]*(?:Connection|Broken pipe|recvValue)",
        r"store->get\([^)]*\) got error: ",
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
        has_victim=True,
    ),
    _cause(
        "DeviceError",
        r"ncclUnhandledCudaError|ncclSystemError|unhandled (?:cuda|system) error",
        what="because NCCL cannot use a device, a driver or the network of this node",
        hint="NCCL_DEBUG=WARN names the call that failed; run on another node and have this one checked",
        code=exit_codes.INFRASTRUCTURE,
        again=True,
    ),
)
_ADDRESS = re.compile(r"DistNetworkError: .{0,300}?(?:to connect to|any network address of) \([^()]*, (\d+)\)")
MISADDRESSED = Cause(
    reason="Failed",
    what="because nothing answers at the address where it meets the other ranks",
    hint="correct the address that the program uses: the launcher's is in MASTER_ADDR and MASTER_PORT",
)


def is_misaddressed(text: str, store_port: int) -> bool:
    """Whether a rank could not connect to a store that is none of the launcher's, which listens at `store_port`."""
    match = _ADDRESS.search(text)
    return match is not None and int(match[1]) != store_port


# A process without which another cannot go on has been killed, or has gone without a word.
LOST_CHILD = re.compile(
    r"killed by signal: Killed|DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly|\bSIGKILL\b|"
    r"(?:exit|code|status)[=: ]{1,2}(?:-9|137)\b|signal 9\b|terminated abruptly|BrokenProcessPool"
)


_FILE_BYTES = 1 << 20  # of a file that a worker can write
OWN = "trainerLaunch"  # in what a forked worker leaves at its end
_NO_MESSAGE = "<NONE>"  # torch's word for a worker that left no error file


def read_error_file(path: str | None) -> dict[str, Any]:
    """The content of a worker's error file, which torch's @record writes; {} where there is none."""
    try:
        data = json.loads((files.read(path, _FILE_BYTES) if path else None) or b"{}")
    except (ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}


def read_own_error(path: str | None) -> dict[str, Any]:
    """The same, of the worker itself: a torchrun that it has started leaves the error of its own worker there."""
    data = read_error_file(path)
    message = data.get("message")
    is_torchs = isinstance(message, dict) and {"errorCode", "extraInfo"} <= message.keys() and OWN not in message
    return {} if is_torchs else data


def message_in(data: dict[str, Any]) -> str | None:
    """The error's own words, with those of the error that it was raised from; fit to be shown."""
    message = data.get("message")
    if isinstance(message, dict):
        message = message.get("message")
    if message in (None, _NO_MESSAGE):
        return None
    text, trace = essence(str(message)).rstrip(), _traceback(data)
    calls = [call for line in trace if (call := _CALL.match(line))]
    if text.endswith(":") and calls:  # an assertion without words
        text += f" {calls[-1][1].rpartition('/')[2]}, line {calls[-1][2]}"
    return presentable(with_cause(text, trace))[:_MESSAGE_CHARS]


def traceback_in(data: dict[str, Any]) -> list[str]:
    """The last lines of its traceback."""
    return _traceback(data)[-20:]


def _traceback(data: dict[str, Any]) -> list[str]:
    message = data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    text = extra.get("py_callstack") if isinstance(extra, dict) else None
    return str(text).strip().splitlines() if text else []


def ended_torchrun(lines: Sequence[str]) -> int | None:
    """The signal that torchrun says it was ended by."""
    match = _ENDED_TORCHRUN.match((*final_error(lines), "")[0])
    return exit_codes.deadly(int(match[1])) if match else None


def ended_in(data: dict[str, Any]) -> dict[str, int | None]:
    """How the worker that failed ended, where torch has added it: its exit code, or the signal."""
    message = data.get("message")
    code = message.get("errorCode") if isinstance(message, dict) else None
    if not isinstance(code, int) or isinstance(code, bool):
        return {}
    exited, killed = exit_codes.failing(code), exit_codes.deadly(-code)
    return {} if exited == killed else {"code": exited, "signal": killed}
