"""A subprocess with a deadline: one command, killed with all that it has started when its time is up.

A child that hangs in the kernel, as at a dead file server, outlives even SIGKILL: it is left behind. What may hang
and needs no process of its own gets a thread.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import selectors
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from msgspec import Struct, field

from trainer_launch.host import process_tree
from trainer_launch.host.files import check_program
from trainer_launch.host.slow_files import HEARD_S
from trainer_launch.model.errors import MALFORMED

OUTPUT_BYTES = 8 << 20  # that are kept of each stream; the rest is read and dropped
REAP_S = 5.0  # what SIGKILL may take: a driver tears down what the child had
_READ_BYTES = 1 << 16
_TRIAL = Path(__file__).with_name("probe_process.py")
_TRIAL_REAP_S = 0.5
_SHOWN = 200  # characters of a stage
NO_THREAD = "no thread could be started for it"


def begin_thread(name: str, work: Callable[..., object], *args: object) -> threading.Thread | None:
    """A thread that does this, and that nobody has to wait for; None where no more of them are allowed."""
    thread = threading.Thread(target=work, args=args, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:
        return None
    return thread


class Ended(Struct, frozen=True, kw_only=True):
    """How a command ended."""

    status: int | None = None  # exit code, or the signal's number below 0; None: not even SIGKILL ended it
    stdout: bytes = b""
    stderr: bytes = b""
    timed_out: bool = False
    was_killed: bool = False  # it was itself still there at its limit, and not only what it has started
    took_s: float = 0.0
    problem: OSError | None = None  # why it could not be started

    @property
    def code(self) -> int | None:
        """As the shell has it; None: it was killed at its limit."""
        if self.timed_out or self.status is None:
            return None
        return self.status if self.status >= 0 else 128 - self.status

    @property
    def is_stuck(self) -> bool:
        """Whether not even SIGKILL ended it."""
        return self.status is None

    @property
    def out(self) -> str:
        """Its standard output."""
        return self.stdout.decode(errors="replace")

    @property
    def err(self) -> str:
        """Its standard error."""
        return self.stderr.decode(errors="replace")

    @property
    def failure(self) -> str:
        """Why it gave no exit code of its own; empty when it did."""
        if self.problem is not None:
            return str(self.problem)
        return f"no end within {self.took_s:.0f} s" if self.timed_out else ""

    def why(self, most: int = 200) -> str:
        """The last line that it said on stderr; without one, how it ended."""
        last = next((line for line in reversed(self.err.splitlines()) if line.strip()), "").strip()[:most]
        return last or ("no answer in time" if self.code is None else f"exit code {self.code}")


class Streams(Struct, frozen=True, kw_only=True):
    """A command's input and outputs, as for Popen."""

    text: str | None = None  # on its standard input
    stdin: int = subprocess.DEVNULL  # without a text
    stdout: int = subprocess.PIPE
    stderr: int = subprocess.PIPE
    pass_fds: Sequence[int] = ()


class RunningCommand:
    """A command under way. Where it fills a pipe, it waits until `stop` or `end` reads on.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        streams: Streams = Streams(),  # noqa: B008
    ) -> None:
        self._began_s = time.monotonic()
        self._timed_out = self._was_killed = False
        self._kept = {"stdout": bytearray(), "stderr": bytearray()}
        check_program(argv[0], env)
        self.pipes = selectors.EpollSelector()  # itself readable when one of them is
        with _input(streams) as stdin:
            self._process = subprocess.Popen(
                argv,
                env=None if env is None else dict(env),
                stdin=stdin,
                stdout=streams.stdout,
                stderr=streams.stderr,
                pass_fds=streams.pass_fds,
                start_new_session=True,
            )
        for name, kept in self._kept.items():
            pipe = getattr(self._process, name)
            if pipe is not None:
                self.pipes.register(pipe, selectors.EVENT_READ, kept)

    def close_input(self) -> None:
        """Tell a child that reads its input that it is time to end."""
        if self._process.stdin is not None:
            self._process.stdin.close()

    def stop(self, limit_s: float) -> None:
        """Wait so long until it has ended, then kill it and all below it."""
        stop_all((self,), limit_s)

    def end(self, limit_s: float | None = None) -> Ended:
        """How it ended; one that is still there after this time is left behind."""
        until_s = time.monotonic() + (REAP_S if limit_s is None else limit_s)
        _read_until((self,), until_s)
        self.has_ended(until_s)
        self.close_input()
        self.pipes.close()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()
        return Ended(
            status=self._process.poll(),
            stdout=bytes(self._kept["stdout"]),
            stderr=bytes(self._kept["stderr"]),
            timed_out=self._timed_out,
            was_killed=self._was_killed,
            took_s=time.monotonic() - self._began_s,
        )

    def read(self) -> None:
        """Take in what it has written."""
        for key, _ in self.pipes.select(0):
            data = os.read(key.fd, _READ_BYTES)
            key.data.extend(data[: OUTPUT_BYTES - len(key.data)])
            if not data:
                self.pipes.unregister(key.fileobj)

    def has_ended(self, until_s: float) -> bool:
        """Whether its output and it itself end by then."""
        try:
            return not self.pipes.get_map() and self._process.wait(max(0.0, until_s - time.monotonic())) is not None
        except subprocess.TimeoutExpired:
            return False

    def kill(self) -> None:
        """Its time is up: SIGKILL for it and all below it."""
        self._timed_out = True
        with contextlib.suppress(ChildProcessError):  # somebody has waited for it
            is_over = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            self._was_killed = not is_over  # whatever it makes of the death of its children
        process_tree.kill(self._process.pid)


def stop_all(children: Sequence[RunningCommand], limit_s: float) -> None:
    """Wait so long until all have ended, then kill those that have not, and all below them."""
    until_s = time.monotonic() + limit_s
    _read_until(children, until_s)
    for child in children:
        if not child.has_ended(until_s):
            child.kill()


def _read_until(children: Sequence[RunningCommand], until_s: float) -> None:
    """Take in what they write, all at once, as nobody may wait for a reader."""
    with selectors.PollSelector() as talking:  # which takes no descriptor
        for child in children:
            if child.pipes.get_map():
                talking.register(child.pipes.fileno(), selectors.EVENT_READ, child)
        left_s = 1.0
        while talking.get_map() and left_s > 0:
            left_s = until_s - time.monotonic()
            for key, _ in talking.select(max(0.0, min(left_s, HEARD_S))):
                key.data.read()
                if not key.data.pipes.get_map():
                    talking.unregister(key.fileobj)


def run(
    argv: Sequence[str],
    env: Mapping[str, str] | None,
    limit_s: float,
    streams: Streams = Streams(),  # noqa: B008
    *,
    reap_s: float | None = None,
) -> Ended:
    """Run one command to its end, or to its limit in seconds. Blocks, and raises nothing."""
    try:
        child = RunningCommand(argv, env, streams)
    except (OSError, ValueError) as problem:  # the latter: a NUL in a word
        why = problem if isinstance(problem, OSError) else OSError(errno.EINVAL, str(problem))
        return Ended(status=127, stderr=f"{argv[0]}: {why.strerror}".encode(), problem=why)
    child.stop(limit_s)
    return child.end(REAP_S if reap_s is None else reap_s)


@contextlib.contextmanager
def _input(streams: Streams) -> Iterator[int]:
    """The standard input; for a text, a file with it: whoever is slow to read it holds nobody up."""
    if streams.text is None:
        yield streams.stdin
        return
    with os.fdopen(os.memfd_create("input", os.MFD_CLOEXEC), "w+b") as file:
        file.write(streams.text.encode(errors="surrogateescape"))
        file.seek(0)
        yield file.fileno()


class Tried(Struct, frozen=True, kw_only=True):
    """How a trial went."""

    stage: str = ""  # the last one that was begun
    errno: int | None = None  # of the call that failed
    values: Mapping[str, float] = field(default_factory=dict)  # what was measured, of a trial that went well
    timed_out: bool = False
    stuck: bool = False  # not even SIGKILL ended it
    problem: str = ""  # the child itself failed: nothing is known

    @property
    def is_good(self) -> bool:
        """Whether the trial succeeded."""
        return not (self.timed_out or self.problem or self.errno is not None)


def try_out(what: str, argument: str, limit_s: float) -> Tried:
    """Run one trial of host/probe_process.py, which takes nothing of ours but the standard library."""
    argv = (sys.executable, "-I", "-S", str(_TRIAL), what, argument, str(limit_s))
    ended = run(argv, None, limit_s, Streams(stderr=subprocess.DEVNULL), reap_s=_TRIAL_REAP_S)
    if ended.problem is not None:
        return Tried(problem=f"no child could be started: {ended.problem.strerror}")
    return _tried(ended.stdout, status=ended.status or 0, timed_out=ended.timed_out, stuck=ended.is_stuck)


def _tried(output: bytes, *, status: int = 0, timed_out: bool = False, stuck: bool = False) -> Tried:
    """Each line is a JSON object: a stage that begins, an error, or what was measured."""
    stage, number = "", None
    values: dict[str, float] = {}
    ended = False
    for line in output.splitlines():
        try:
            report = json.loads(line)
            stage = str(report.get("stage", stage))[:_SHOWN]
            number = int(report["errno"]) if "errno" in report else number
            values = {str(name): float(value) for name, value in report.get("values", values).items()}
        except MALFORMED:
            continue
        ended = ended or "values" in report or "errno" in report
    problem = "" if ended or timed_out else f"the child ended with {status} at the stage {stage or 'start'}"
    return Tried(
        stage=stage, errno=number, values=values, timed_out=timed_out and not ended, stuck=stuck, problem=problem
    )
