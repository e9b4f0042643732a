"""`python -m benchmarks --only containers`: each figure has its reading."""

from __future__ import annotations

import pytest

from benchmarks import containers
from tests.containers.images import MAKING_S, bases

pytestmark = [pytest.mark.containers, pytest.mark.process, pytest.mark.timeout(MAKING_S)]


def test_each_way_to_start_a_container_is_timed_and_what_an_image_weighs_is_read() -> None:
    bases()  # skips where there can be none
    with containers.opened() as setup:
        for case in setup.cases:
            found = case.run()
            assert case.rows.keys() <= found.keys(), case.who
            assert all(float(str(found[row])) > 0 for row in case.rows), found
    assert [case.who for case in setup.cases] == [*containers.WAYS, "trainer-launch"]
