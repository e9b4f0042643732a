"""One end of a pair test, in a child that is killed when its time is up.

Over plain sockets each test has a child of its own; collectives have one that has imported torch before.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from trainer_launch.host import deadline_subprocess
from trainer_launch.model.errors import MALFORMED
from trainer_launch.preflight.cluster import protocol as msg
from trainer_launch.preflight.cluster.collective_tests import Collectives
from trainer_launch.preflight.cluster.listener import Ear
from trainer_launch.preflight.cluster.transport import SOCKET

CHILD = (sys.executable, "-I", "-S", str(Path(__file__).parents[1] / "children" / "pair_bench.py"))
_MARGIN_S = 0.5  # it gives up by itself before that, and says where it was
_REAP_S = 0.5


class Bench:
    """This node's part in tests of any kind."""

    def __init__(self, collectives: Collectives | None = None) -> None:
        self._collectives = collectives

    def __call__(self, test: msg.Test, ear: Ear) -> msg.Result:
        """Play this node's part; always comes back in time."""
        if test.way == SOCKET:
            return run(test, ear)
        if self._collectives is None:
            return _failed(test, f"this node has no {test.way}")
        return msg.Result(test.round, self._collectives.run(test, ear))


def run(test: msg.Test, ear: Ear, child: Sequence[str] = CHILD) -> msg.Result:
    """A test over plain sockets."""
    limit = str(test.limit_s)
    if test.rank:
        return _result(test, (*child, "dial", test.token, limit, test.host, str(test.port)), ())
    with ear.lent() as descriptor:
        return _result(test, (*child, "listen", test.token, limit, str(descriptor)), (descriptor,))


def _result(test: msg.Test, argv: Sequence[str], descriptors: Sequence[int]) -> msg.Result:
    limit_s = test.limit_s + _MARGIN_S
    streams = deadline_subprocess.Streams(pass_fds=descriptors)
    child = deadline_subprocess.run(argv, None, limit_s, streams, reap_s=_REAP_S)
    if child.problem is not None:
        return _failed(test, f"its test could not be started: {child.problem.strerror}")
    if child.status is None:
        return _failed(test, "its test hangs in the kernel: not even SIGKILL ends it")
    if child.timed_out:
        return _failed(test, f"its test hung and was killed after {test.limit_s:g} s")
    return _read(test, child.stdout, child.status)


def _read(test: msg.Test, said: bytes, status: int) -> msg.Result:
    try:
        told = json.loads(said)
        rate, why = int(told["rate"]), str(told["why"])
    except MALFORMED:
        return _failed(test, f"its test ended with {status} and said nothing")
    return msg.Result(test.round, (msg.Seen(why[:300], max(0, min(rate, 2**52))),))


def _failed(test: msg.Test, why: str) -> msg.Result:
    return msg.Result(test.round, (msg.Seen(why, 0),) * test.rails)
