"""What other threads tell the supervisor's loop is never left until the next event."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process

CODE = """
import time
from trainer_launch.supervisor.system import System
system = System()
system.poke()
began_s = system.now()
system.wait(began_s + 20)
print(system.now() - began_s < 10)
"""


def test_a_poke_that_comes_before_a_wait_ends_it() -> None:
    ended = subprocess.run([sys.executable, "-c", CODE], text=True, capture_output=True, timeout=120, check=True)
    assert ended.stdout == "True\n"
