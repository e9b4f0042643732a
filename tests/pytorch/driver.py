"""Does with a fork server what PID 1 does: starts it, asks it, reaps what it has forked.

Each line of standard input is a request; each is answered by a line. The first line has the server's settings.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
from typing import Any

from trainer_launch.model import PortRange, Workers
from trainer_launch.pytorch.fork_server import ForkServer, ServerError
from trainer_launch.pytorch.messages import ForkedWorker, ForkWorkers, OpenStore
from trainer_launch.supervisor.inherited import adopt_orphans


def main() -> None:
    del sys.path[0]  # our own folder; PID 1 has none either
    adopt_orphans()
    settings = json.loads(sys.stdin.readline())
    server = started(settings)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "renew":
                server.close()
                server.popen.wait()
                server = started(settings)
            else:
                DEEDS[request.pop("do")](server, **request)
        except ServerError as problem:
            say(error=str(problem))
    server.close()
    server.popen.wait()


def started(settings: dict[str, Any]) -> ForkServer:
    forks = settings["script"] is not None  # else it only opens stores
    workers = Workers(count=1, argv=(), env=dict(os.environ), python=sys.executable, forks=forks, **settings)
    server = ForkServer(workers)
    select.select([server.fd], [], [])
    try:
        told = server.answer()
    except ServerError as problem:
        say(reason=str(problem), pid=server.pid)
        return server
    assert told is not None
    say(reason=told.unfit, pid=server.pid)
    return server


def fork(server: ForkServer, argv: list[str], workers: list[dict[str, Any]], cwd: str, wait: bool = True) -> None:
    """A worker's `out` and `err` are the files that it writes to; without them it inherits ours."""
    fds: list[int] = []
    forked: list[ForkedWorker] = []
    for number, worker in enumerate(workers):
        files = opened(worker)
        _, of_generations = socket.socketpair()
        fds += [*files.values(), of_generations.detach()]
        given, stacks = {**os.environ, **worker.get("environment", {})}, worker.get("stacks")
        forked.append(ForkedWorker(local_rank=number, environment=given, streams=tuple(files), stacks=stacks))
    request = ForkWorkers(argv=tuple(argv), cwd=cwd, workers=tuple(forked))
    try:
        pids = server.start(request, fds).pids
    finally:
        for fd in fds:
            os.close(fd)
    say(pids=pids, parents=[parent_of(pid) for pid in pids])
    if wait:
        reap(server, pids)


def opened(worker: dict[str, Any]) -> dict[int, int]:
    paths = {1: worker.get("out"), 2: worker.get("err")}
    return {n: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for n, path in paths.items() if path}


def parent_of(pid: int) -> int:
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def reap(server: ForkServer, pids: list[int] | tuple[int, ...]) -> None:
    say(codes=[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids])


def store(server: ForkServer, ports: list[int] | None) -> None:
    started = server.start(OpenStore(PortRange(*ports) if ports else None))
    (pid,) = started.pids
    say(pid=pid, port=started.port, parent=parent_of(pid))


def answer(server: ForkServer) -> None:
    say(kind=type(server.answer()).__name__)


def kill(server: ForkServer, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    say()


def close(server: ForkServer) -> None:
    server.close()
    say(code=server.popen.wait())


DEEDS: dict[str, Any] = {deed.__name__: deed for deed in (fork, reap, store, answer, kill, close)}


def say(**values: object) -> None:
    print(json.dumps({"me": os.getpid(), **values}), flush=True)


if __name__ == "__main__":
    main()
