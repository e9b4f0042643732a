"""Forks of the process that calls `launch`: its launcher, and a server whose workers inherit its state.

The server speaks as the fork server does (`messages.py`), so that the launcher needs to know of no difference.
"""

from __future__ import annotations

import functools
import gc
import importlib
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from trainer_launch.host import files, process_attributes, process_tree
from trainer_launch.model import exit_codes
from trainer_launch.pytorch import fork_server_process, forked_process, messages, process_reset
from trainer_launch.pytorch.forked_process import Origin
from trainer_launch.pytorch.messages import ForkedWorker, ForkWorkers

_kept: list[object] = []  # what has to live as long as the process
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def start_launcher(argv: Sequence[str], env: Mapping[str, str], work: Callable[[], None]) -> int:
    """Start a launcher that can fork workers from this process; its pid.

    `argv` gets two more words: the launcher's end of the connection, and the server's pid.
    """
    ours, theirs = socket.socketpair()
    sys.stdout.flush()  # or each fork would write it again
    sys.stderr.flush()
    with ours, theirs:
        pid = os.fork()
        if pid == 0:
            _become_launcher(argv, env, ours, theirs, work)
    return pid


def _become_launcher(
    argv: Sequence[str],
    env: Mapping[str, str],
    ours: socket.socket,
    theirs: socket.socket,
    work: Callable[[], None],
) -> NoReturn:
    """Fork the server first: so it is the launcher's child."""
    try:
        os.setpgid(0, 0)  # out of reach of a terminal's Ctrl-C, which the caller forwards
        launcher = os.getpid()
        server = os.fork()
        if server == 0:
            ours.close()
            _become_server(theirs, launcher, work)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.set_inheritable(ours.fileno(), True)
        os.execve(argv[0], (*argv, str(ours.fileno()), str(server)), env)
    except BaseException:  # noqa: BLE001  nobody above would see it
        traceback.print_exc()
    finally:
        os._exit(exit_codes.FAILED)


def _become_server(connection: socket.socket, launcher: int, work: Callable[[], None]) -> NoReturn:
    """Serve until the launcher closes the connection."""

    try:
        process_attributes.die_with_parent(signal.SIGKILL)
        process_tree.mark_descendants()  # as the launcher does, whose fork this is not
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in _IGNORED}
        mask = frozenset(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        for number in _IGNORED:
            signal.signal(number, signal.SIG_IGN)
        importlib.import_module("torch.distributed")  # stores need it, and each would import it again
        origin = Origin(launcher=launcher, handlers=handlers, mask=mask)
        gc.freeze()  # workers would otherwise copy what the collector marks
        messages.send(connection, messages.Ready())
        become = functools.partial(functools.partial, _be_worker, work)
        fork_server_process.serve(connection, origin, become)()
    except BaseException:  # noqa: BLE001  nobody above would see it
        traceback.print_exc()
    finally:
        os._exit(exit_codes.FAILED)


def _be_worker(
    work: Callable[[], None],
    origin: Origin,
    request: ForkWorkers,
    worker: ForkedWorker,
    fds: Sequence[int],
    go: int,
) -> NoReturn:
    """Do the work as a process of multiprocessing would; nothing that the caller has registered runs at its end."""
    code = exit_codes.FAILED
    try:
        os.setsid()
        process_reset.restore_signals(origin.handlers)
        files.take_streams(dict(zip(worker.streams, fds, strict=False)))
        for fd in fds:
            os.close(fd)
        forked_process.wait_for_go(origin, go)
        os.environ.clear()
        os.environ.update(worker.environment)
        words = [os.fsencode(word) for word in sys.orig_argv]
        # By a variable the launcher knows what is its own, also what has left this session.
        _kept.append(process_attributes.show_as(words, [b"=".join(pair) for pair in os.environb.items()]))
        if worker.stacks is not None:
            forked_process.arm(worker.stacks)
        signal.pthread_sigmask(signal.SIG_SETMASK, origin.mask)
        process = multiprocessing.get_context("fork").Process(target=work)
        code = getattr(process, "_bootstrap")()  # noqa: B009  what its start() calls in the new process
    except BaseException:  # noqa: BLE001  nobody above would see it
        traceback.print_exc()
    finally:
        os._exit(code)
