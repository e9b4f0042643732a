"""The text of the configurations; that OpenSSH understands it so is shown in test_sshd.py."""

from __future__ import annotations

from trainer_launch.mpi import ssh_client, ssh_server

PUBLIC = "ecdsa-sha2-nistp521 AAAAB3"
FILES = ssh_client.Files("/tmp/a folder")


def words(text: str) -> dict[str, str]:
    return {line.split(None, 1)[0]: line.split(None, 1)[1] for line in text.splitlines()}


def server(**changes) -> str:
    values = {"port": 2222, "addresses": (), "user": "mpiuser", "is_root": False, "log_level": "INFO"}
    return ssh_server.configuration(FILES, **{**values, **changes})


def test_only_the_jobs_key_comes_in_and_only_for_commands() -> None:
    found = words(server())
    assert found["AuthenticationMethods"] == "publickey"
    assert found["AuthorizedKeysFile"] == '"/tmp/a folder/authorized_keys"'
    assert found["HostKey"] == '"/tmp/a folder/job_key"'
    assert found["AllowUsers"] == "mpiuser"
    for name in ("PasswordAuthentication", "KbdInteractiveAuthentication", "UsePAM", "PermitUserEnvironment"):
        assert found[name] == "no"
    for name in ("AllowTcpForwarding", "AllowAgentForwarding", "X11Forwarding", "PermitTunnel", "PermitTTY"):
        assert found[name] == "no"
    assert ssh_server.authorized_keys(PUBLIC) == f"restrict {PUBLIC}\n"


def test_root_comes_in_by_key_where_sshd_is_roots() -> None:
    assert words(server())["PermitRootLogin"] == "no"
    assert words(server(is_root=True))["PermitRootLogin"] == "prohibit-password"


def test_a_client_takes_no_host_key_but_the_jobs() -> None:
    found = words(ssh_client.configuration(FILES, 2222))
    assert found["StrictHostKeyChecking"] == "yes"
    assert found["UserKnownHostsFile"] == '"/tmp/a folder/known_hosts"'
    assert found["GlobalKnownHostsFile"] == "/dev/null"
    assert found["BatchMode"] == found["IdentitiesOnly"] == "yes"
    assert found["IdentityAgent"] == "none"
    assert ssh_client.known_hosts(PUBLIC) == f"* {PUBLIC}\n"


def test_insecure_is_only_what_is_asked_for() -> None:
    careless = ssh_client.configuration(FILES, 2222, check_host_keys=False)
    assert words(careless)["StrictHostKeyChecking"] == "no"
    assert "IdentitiesOnly yes" in careless


def test_a_lost_host_is_noticed_in_seconds() -> None:
    found = words(ssh_client.configuration(FILES, 2222))
    assert int(found["ServerAliveInterval"]) * int(found["ServerAliveCountMax"]) <= 10
    assert int(found["ConnectTimeout"]) <= 10


def test_values_are_quoted_for_sshd() -> None:
    line = words(ssh_server.set_env({"A": 'say "hi" \\ #1', "B": ""}))["SetEnv"]
    assert line == r'"A=say \"hi\" \\ #1" "B="'
