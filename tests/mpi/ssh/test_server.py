"""What is told to an sshd that does not take everything as it is meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.ssh.secrets import client_of, require_openssh, secret
from tests.ports import free_port
from trainer_launch.model.errors import UsageError
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


def test_what_an_older_one_reads_otherwise_is_left_out_and_named(reach, monkeypatch) -> None:
    """Before 8.7 a quote could not be escaped; rather without than with another value."""
    real = ssh_server._tried
    monkeypatch.setattr(
        ssh_server,
        "_tried",
        lambda argv: frozenset(line for line in real(argv) if "AWKWARD" not in line),
    )
    assert prepared(reach, {"AWKWARD": 'a"b', "PLAIN": "c"}).unfit == ("AWKWARD",)
    text = Path(reach.files.server).read_text()
    assert "PLAIN=c" in text
    assert "AWKWARD" not in text


def test_one_that_does_not_take_its_configuration_at_all_is_quoted(reach, monkeypatch) -> None:
    monkeypatch.setattr(ssh_server, "configuration", lambda *_, **__: "Port no-number\n")
    with pytest.raises(UsageError, match=r"rejects its configuration: .*Badly formatted port number"):
        prepared(reach, {})
