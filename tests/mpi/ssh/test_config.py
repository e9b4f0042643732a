"""What OpenSSH itself makes of the configurations: all that they do not say is its default."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.mpi.ssh.secrets import client_of
from tests.ports import free_port
from trainer_launch.mpi import ssh_client, ssh_server
from trainer_launch.mpi.rank_environment import Handed, handed_on

pytestmark = [pytest.mark.process, pytest.mark.usefixtures("openssh")]


def understood(*argv: str) -> dict[str, str]:
    text = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout
    return dict(line.lower().partition(" ")[::2] for line in text.splitlines())


@pytest.mark.parametrize(("checks", "word"), [(True, "true"), (False, "false")])
def test_a_client_takes_no_host_key_but_the_jobs_unless_it_is_asked_not_to_check(
    tmp_path: Path, mount: Path, checks: bool, word: str
) -> None:
    reach = client_of(tmp_path, mount, 4022, check_host_keys=checks)
    told = understood(*reach.ssh, "-G", "-F", reach.files.client, "any-host")
    expected = {
        "port": "4022",
        "stricthostkeychecking": word,
        "globalknownhostsfile": "/dev/null",
        "userknownhostsfile": reach.files.known_hosts if checks else "/dev/null",
        "identityfile": reach.files.key,
        "identitiesonly": "yes",
        "batchmode": "yes",
        "identityagent": "none",
        "preferredauthentications": "publickey",
        "forwardagent": "no",
        "forwardx11": "no",
        "updatehostkeys": "false",
        "permitlocalcommand": "no",
        "controlmaster": "false",
    }
    assert {name: told[name] for name in expected} == expected
    assert int(told["serveraliveinterval"]) * int(told["serveralivecountmax"]) <= 10, "a lost host is soon noticed"


def test_a_server_lets_only_the_jobs_key_in_and_only_for_commands(tmp_path: Path, mount: Path) -> None:
    reach = client_of(tmp_path, mount, free_port())
    handed = Handed({"A": "b"}, (), ())
    ready = ssh_server.prepared(reach, handed, addresses=["127.0.0.1"], log_level="INFO")
    told = understood(*(word for word in ready.argv if word not in ("-D", "-e")), "-T")
    names = ["password", "kbdinteractive", "hostbased"]
    expected = {
        "authenticationmethods": "publickey",
        "authorizedkeysfile": reach.files.authorized,
        "usepam": "no",
        "hostkey": reach.files.key,
        "disableforwarding": "yes",
        "permittty": "no",
        "permituserrc": "no",
        "permituserenvironment": "no",
        "permitemptypasswords": "no",
        "authorizedkeyscommand": "none",
        **{f"{name}authentication": "no" for name in names},
    }
    assert {name: told[name] for name in expected} == expected
    assert Path(reach.files.authorized).read_text() == f"restrict {reach.public}\n"
    assert ssh_client.known_hosts(reach.public) == f"* {reach.public}\n"


def test_an_installed_sshd_takes_every_value_as_it_is(tmp_path: Path, mount: Path) -> None:
    env = {
        "QUOTED": "a \"b\" 'c' \\ \\\\ #d",
        "TABS": "a\tb",
        "UTF8": "ü €",
        "BYTES": "\udcff",
        "EMPTY": "",
        "SPACES": "  a  ",
        "SEPARATORS": "a\x0bb\x0cc\x1cd\x85e\u2028f",
    }
    reach = client_of(tmp_path, mount, free_port())
    made = ssh_server.prepared(reach, handed_on(env, ()), addresses=["127.0.0.1"], log_level="INFO")
    assert made.unfit == ()
