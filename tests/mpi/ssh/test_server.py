"""What is told to an sshd that does not take everything as it is meant."""

from __future__ import annotations

import pytest

from tests.mpi.ssh.secrets import client_of, require_openssh, secret
from tests.ports import free_port
from trainer_launch.mpi import ssh_server
from trainer_launch.mpi.rank_environment import handed_on

pytestmark = pytest.mark.process


@pytest.fixture
def reach(tmp_path):
    require_openssh()
    return client_of(tmp_path, secret(tmp_path / "mount"), free_port())


def prepared(reach, env) -> ssh_server.PreparedSshd:
    return ssh_server.prepared(reach, handed_on(env, ()), addresses=["127.0.0.1"], log_level="INFO")


def test_the_installed_one_takes_every_value_as_it_is(reach) -> None:
    env = {
        "QUOTED": "a \"b\" 'c' \\ \\\\ #d",
        "TABS": "a\tb",
        "UTF8": "ü €",
        "BYTES": "\udcff",
        "EMPTY": "",
        "SPACES": "  a  ",
        "SEPARATORS": "a\x0bb\x0cc\x1cd\x85e\u2028f",
    }
    assert prepared(reach, env).unfit == ()
