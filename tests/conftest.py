"""What all tests share."""

from __future__ import annotations

import collections
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterable
from pathlib import Path

import hypothesis
import pytest

from tests.timeouts import pytest_timeout_set_timer  # noqa: F401  a hook

# Under nohup, and behind a shell's &, signals are ignored, and launchers of tests would stay deaf to them.
for _number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(_number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# On a busy machine any example may take a moment; every test has a timeout. CI tries the same examples each time.
hypothesis.settings.register_profile("trainer-launch", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("trainer-launch")


_PROCESSES, _LONG = 1, 2


def quick_first(values: Iterable[object], count: int, long: pytest.MarkDecorator) -> list[object]:
    """Parameters of one value each; all but the first `count` are left to `make test-long`."""
    return [value if n < count else pytest.param(value, marks=long) for n, value in enumerate(values)]


def require(condition: object, reason: str) -> None:
    """Skip a test that this machine cannot run; in CI, where nothing may be missing, fail it."""
    if not condition:
        if os.environ.get("CI") == "true":
            pytest.fail(f"CI must be able to run this: {reason}")
        pytest.skip(reason)


def pytest_configure(config: pytest.Config) -> None:
    """Launchers of tests have a directory for what is temporary: a test that looks for its own sees no others.

    All processes of pytest share it; its name is short, as names of sockets are.
    """
    if hasattr(config, "workerinput"):
        return
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix="t")
    os.chmod(tempfile.tempdir, 0o1777)  # as /tmp: tests start programs as other users, too
    config.add_cleanup(lambda: shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Who is marked `torch` needs it."""
    if item.get_closest_marker("torch"):
        require(importlib.util.find_spec("torch"), "torch is not installed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is quick and tells most comes first: files of values, then of processes, then of long scenarios.

    Among those, files of many tests come first, so that no process of pytest is left with a big one at the end;
    the soak, which is one test of minutes, comes before them.
    """
    counted = collections.Counter(item.path for item in items)
    ranks: dict[Path, int] = {}
    for item in items:  # a file is as slow as its quickest test, as those of one file stay together
        ranks[item.path] = min(_rank(item), ranks.get(item.path, _LONG))
    items.sort(
        key=lambda item: (ranks[item.path], item.path.name != "test_soak.py", -counted[item.path], item.path)
    )


def _rank(item: pytest.Item) -> int:
    names = {mark.name for mark in item.iter_markers()}
    return _LONG if "long" in names else _PROCESSES if names & {"process", "torch"} else 0
