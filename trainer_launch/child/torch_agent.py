"""torch elastic's agent, started by PID 1 with torchrun's options and the training script.

It calls torch's own parser and `elastic_launch`, and changes these things from outside:

- the first worker's death ends this process the same way, and is written as JSON (torchrun ends with 1 always);
- SIGTERM reaches each worker alone first, so that its data loaders live while it saves a checkpoint; a second one
  (PID 1 sends it when most of the grace is used up) goes to the whole groups at once; others are handed on,
  where torchrun would die of them and leave the workers behind (`stop.py`);
- with `--rdzv-backend trainer-launch`, membership comes from the coordinator (`membership.py`);
- workers are forked from a process that has imported torch already, where that can be (`warm.py`);
- between starts, what dead workers have left behind is cleared (`slate.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from trainer_launch import exits, log, run_folder, signals
from trainer_launch.child import hangs, logs, membership, news, repeats, warm
from trainer_launch.child.handlers import BACKEND
from trainer_launch.child.rendezvous import GaveUpError, NotNeededError
from trainer_launch.child.roster import Roster
from trainer_launch.child.server import Server
from trainer_launch.child.slate import Slate
from trainer_launch.child.stop import Stop, park, stop_listening
from trainer_launch.errors import LaunchError
from trainer_launch.supervisor import error_file


def main(argv: list[str], server: Server | None, no_server: str | None) -> int:
    """Run the workers to their end; return the exit code of the first that failed, or 0."""
    roster = Roster(os.environ.get(run_folder.VARIABLE))
    stop = Stop(os.environ.get("TRAINER_LAUNCH_STOP_ORDER_OF_WORKERS", "leader"), roster)
    try:
        config, command, command_args = _config(argv)
        _take_over_signals(config, stop)
    except (AssertionError, KeyError, OSError, RuntimeError, ValueError) as problem:
        return _refuse(f"torch refused its options ({type(problem).__name__}: {problem}); see torchrun --help")
    rank_output = os.environ.pop("TRAINER_LAUNCH_RANK_OUTPUT", "")
    if rank_output:
        config.logs_specs = logs.PipedLogs(json.loads(rank_output), config.logs_specs)
    try:
        way = warm.choose(config, command, command_args, server, no_server)
        return _as_member(config, stop, roster, way)
    except SignalException:
        return exits.STOPPED  # before there was anything to stop
    except LaunchError as problem:  # a secret, a range of ports or a way to start that does not do
        return _refuse(str(problem), problem.exit_code)


def _as_member(config: LaunchConfig, stop: Stop, roster: Roster, way: warm.Ordinary) -> int:
    slate = Slate(os.environ.get(run_folder.VARIABLE, ""))
    roster.listen(config.event_log_handler)
    with membership.member(config, stop, look=roster.look) as node:
        calls = (roster.begin, stop.check, hangs.forget, slate, way.prepare, node.prepare, news.tell_start)
        config.logs_specs = logs.BeforeEachStart(calls, config.logs_specs)
        code = _run(way.launch, node, stop, roster)
    return exits.STOPPED if stop.asked else code


def _refuse(text: str, code: int = exits.MISCONFIGURED) -> int:
    reason = "Misconfigured" if code == exits.MISCONFIGURED else "PeerLost"
    _write({"reason": reason, "message": text, "exit_code": code})
    log.warn(text)
    return code


def _config(argv: list[str]) -> tuple[LaunchConfig, Any, list[str]]:
    args = get_args_parser().parse_args(argv)
    if args.standalone and args.rdzv_backend != BACKEND:
        args.rdzv_backend, args.rdzv_endpoint = "c10d", "localhost:0"
    if args.master_port is None:
        args.master_port = 29500
    config, command, command_args = config_from_args(args)
    return config, command, command_args


def _run(launch: Callable[[], object], node: membership.Alone, stop: Stop, roster: Roster) -> int:
    try:
        while not _launch_once(launch, node, stop):
            pass
    except ChildFailedError as failed:
        return exits.STOPPED if stop.asked else _report(failed, roster)
    except SignalException as stopped:
        return exits.of_signal(int(stopped.sigval))
    except NotNeededError:
        return exits.SUCCEEDED
    except GaveUpError as gave_up:
        return _report_given_up(gave_up, roster)
    except (RendezvousError, DistError) as lost:
        if "EADDRINUSE" in str(lost):
            raise  # torch's own store: a port that is taken here is no other node's fault
        return _report_lost(f"the nodes did not meet: {lost}")
    return exits.SUCCEEDED


def _launch_once(launch: Callable[[], object], node: membership.Alone, stop: Stop) -> bool:
    """Run torch's agent; False when its end is not the job's, and it has to run again."""
    try:
        launch()
    except DistError:
        if node.is_over():
            return False  # a node was lost while the agents exchanged their ranks
        raise
    # Another node's workers may fail after ours have succeeded: then all go on from the checkpoint.
    return stop.asked or node.finish()


def _take_over_signals(config: LaunchConfig, stop: Stop) -> None:
    names = getattr(config, "signals_to_handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT").split(",")
    given = signals.parse(os.environ.pop("TRAINER_LAUNCH_SIGNALS_OF_WORKERS", ""))
    stop.install({signal.Signals[name.strip()] for name in names}, given)
    park(config)


def _report(failed: ChildFailedError, roster: Roster) -> int:
    """Write the first failure for PID 1; its exit code becomes ours."""
    # Of forked workers torch tells one, which is not always the first.
    rank, first = first_failure({**roster.failures(), **failed.failures}, list(roster.deaths))
    number = -first.exitcode if first.exitcode < 0 else None
    code = first.exitcode if number is None else exits.of_signal(number)
    data = first.error_file_data if isinstance(first.error_file_data, dict) else {}
    hung = hangs.about(number) if number else None
    _write(
        {
            "reason": hangs.REASON if hung else None,
            "rank": hung.rank if hung else rank,
            "local_rank": hung.local_rank if hung else first.local_rank,
            "pid": first.pid,
            "exit_code": code,
            "signal": number,
            "timestamp": first.timestamp,
            "hostname": socket.gethostname(),
            "message": hung.message if hung else error_file.message_in(data),
            "lines": hung.lines if hung else error_file.traceback_in(data),
            "oom_kills_before": roster.oom_kills_before,
        }
    )
    return code


def _report_given_up(gave_up: GaveUpError, roster: Roster) -> int:
    """The coordinator has ended the job: the faulty node has its worker's own code, the others lost a peer."""
    own = gave_up.own
    if gave_up.given_up.cause is not None:
        return _report_cause(gave_up, gave_up.given_up.cause)
    if own is None:
        said = gave_up.given_up.message  # of the faulty worker, on another node
        return _report_lost(f"{gave_up}; it said: {said}" if said else str(gave_up))
    place = {"rank": own.rank, "local_rank": own.local_rank, "hostname": socket.gethostname()}
    how = {"exit_code": own.code, "signal": own.signal, "message": own.message, "lines": own.lines}
    memory = {"oom_kills_before": roster.oom_kills_before}
    _write({"reason": own.reason, "why_not_again": str(gave_up), **how, **place, **memory})
    return own.code


def _report_cause(gave_up: GaveUpError, cause: str) -> int:
    """All nodes tell the same cause; no code of theirs may ask a controller for a restart."""
    given_up, own = gave_up.given_up, gave_up.own
    code = given_up.exit_code or exits.FAILED
    note = {"reason": cause, "message": str(gave_up), "exit_code": code, "why_not_again": given_up.message}
    if own is not None:
        note |= {"rank": own.rank, "local_rank": own.local_rank, "lines": own.lines}
    _write(note)
    return code


def _report_lost(message: str) -> int:
    _write({"reason": "PeerLost", "message": message, "exit_code": exits.INFRASTRUCTURE})
    return exits.INFRASTRUCTURE


def first_failure(failures: dict[int, ProcessFailure], deaths: list[int]) -> tuple[int, ProcessFailure]:
    """The worker that failed first; `deaths` are pids in the order they were seen to die.

    torch's own stamps have whole seconds, and its list holds workers that the agent itself terminated.
    """
    order = {pid: place for place, pid in enumerate(deaths)}

    def place(item: tuple[int, ProcessFailure]) -> tuple[bool, int, int, int]:
        rank, failure = item
        ended_by_us = failure.exitcode == -signal.SIGTERM
        return ended_by_us, order.get(failure.pid, len(order)), failure.timestamp, rank

    return min(failures.items(), key=place)


def _write(failure: dict[str, Any]) -> None:
    path = os.environ.get("TRAINER_LAUNCH_FAILURE_FILE")
    if not path:
        return
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(failure, file)
    except OSError as problem:
        print(f"trainer-launch: cannot write {path}: {problem}", file=sys.stderr)  # noqa: T201


def run(argv: list[str], server: Server | None, no_server: str | None) -> None:
    """The process: `main`, and an end that nothing delays; `no_server` tells why there is none."""
    log.set_up(os.environ.get("TRAINER_LAUNCH_LOG_LEVEL") or "info", "agent")
    repeats.silence()
    # Not sys.exit: threads of torch's store must not delay a code that is already known.
    code = main(argv, server, no_server)
    stop_listening()
    if server is not None:
        server.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
