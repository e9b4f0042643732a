"""Who a worker may run as, and on which file system: root, a made-up user without a home, read-only roots."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.launching import clean_env
from tests.mpi.ssh import pods
from tests.mpi.ssh.secrets import Worker, refused, require_openssh, require_root, secret, worker
from tests.process.world import ROOT

pytestmark = pytest.mark.process
AS_USER = {"HOME": "/tmp"}


@pytest.fixture
def folder() -> Iterator[Path]:
    """One that other users can enter, which pytest's own they cannot."""
    require_openssh()
    require_root()
    made = Path(tempfile.mkdtemp(prefix="a pod "))
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def mount(folder) -> Path:
    """As Trainer v2 mounts it: root's, 0640, with the pod's fsGroup."""
    made = secret(folder / "mount")
    os.chown(made / "id_rsa", 0, pods.GROUP)
    (made / "id_rsa").chmod(0o640)
    return made


def sentence(it: Worker, code: int = 2) -> str:
    assert it.process.returncode == code, it.log()
    lines = [line for line in it.log().splitlines() if "error:" in line]
    assert len(lines) == 1, it.log()
    assert "Traceback" not in it.log()
    return lines[0]


def test_an_ordinary_user_without_a_home_on_a_read_only_root(folder, mount) -> None:
    lines = (pods.opened(folder), pods.made_up_user(folder), pods.READ_ONLY)
    with worker(folder, mount, env=AS_USER, wrap=pods.wrapped(*lines, user=pods.UID)) as it:
        done = it.ssh(
            "id -u; id -Gn >/dev/null; echo $HOME; touch /x 2>/dev/null || echo read-only",
            options=("-l", "mpiuser"),
        )
        assert done.stdout.split("\n") == [str(pods.UID), "/tmp", "read-only", ""], (done.stderr, it.log())
        it.process.terminate()
        assert it.wait() == 143
        assert it.last_words().startswith(f"reason=Stopped node=0 host={os.uname().nodename} exit=143 ")


def test_a_user_that_has_no_entry_is_told_so(folder, mount) -> None:
    """OpenSSH itself: "No user exists for uid", on both sides."""
    lines = (pods.opened(folder), pods.WITHOUT_NSS_WRAPPER)
    with refused(folder, mount, wrap=pods.wrapped(*lines, user=pods.UID)) as it:
        said = sentence(it)
        assert f"uid {pods.UID} has no entry in /etc/passwd" in said
        assert "libnss-wrapper" in said


def test_a_user_that_has_no_entry_gets_one_from_nss_wrapper_on_a_read_only_root(folder, mount) -> None:
    """Sessions themselves run without it, so that no rank loads a library that it did not ask for."""
    pods.require_nss_wrapper()
    wrap = pods.wrapped(pods.opened(folder), pods.READ_ONLY, user=pods.UID)
    with worker(folder, mount, env={"HOME": "/", "PATH": "/usr/bin:/bin"}, wrap=wrap) as it:  # sshd is in /usr/sbin
        done = it.ssh("id -u; echo $USER $LD_PRELOAD; touch ~/x && echo home", options=("-l", "trainer-launch"))
        assert done.stdout == f"{pods.UID}\ntrainer-launch\nhome\n", (done.stderr, it.log())


def test_a_user_that_may_not_read_the_key_is_told_so(folder, mount) -> None:
    os.chown(mount / "id_rsa", 0, 0)
    lines = (pods.opened(folder), pods.made_up_user(folder))
    with refused(folder, mount, wrap=pods.wrapped(*lines, user=pods.UID)) as it:
        said = sentence(it)
        assert f"cannot be read by uid {pods.UID};" in said
        assert "fsGroup" in said


def test_a_user_that_may_not_have_the_port_is_told_so(folder, mount) -> None:
    if int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text()) <= 22:
        pytest.skip("here everybody may have any port")
    lines = (pods.opened(folder), pods.made_up_user(folder))
    with refused(folder, mount, "--ssh-port", "22", wrap=pods.wrapped(*lines, user=pods.UID)) as it:
        assert "may not listen on port 22; set --ssh-port" in sentence(it)


def test_root_with_a_writable_root_gets_the_folder_that_sshd_wants(folder, mount) -> None:
    with worker(folder, mount, wrap=pods.wrapped(pods.ANOTHER_RUN)) as it:
        assert it.output("id -u; stat -c %a:%u /run/sshd") == "0\n755:0"


def test_root_on_a_read_only_root_is_told_what_to_mount(folder, mount) -> None:
    lines = (pods.ANOTHER_RUN, pods.READ_ONLY, "mount -o remount,ro /run")
    with refused(folder, mount, wrap=pods.wrapped(*lines)) as it:
        assert "needs the empty folder /run/sshd" in sentence(it)
        assert "mount an emptyDir there" in sentence(it)


def test_an_empty_dir_mounted_there_is_made_fit(folder, mount) -> None:
    """kubelet makes an emptyDir that everybody may write to, which sshd refuses."""
    lines = (pods.ANOTHER_RUN, "mkdir /run/sshd; mount -t tmpfs -o mode=777 tmpfs /run/sshd", pods.READ_ONLY)
    with worker(folder, mount, wrap=pods.wrapped(*lines, "mount -o remount,ro /run", drop=["sys_admin"])) as it:
        assert it.output("stat -c %a:%u /run/sshd") == "755:0"


def test_root_without_what_sshd_needs_is_told_so(folder, mount) -> None:
    os.chown(mount / "id_rsa", 0, 0)
    with refused(folder, mount, wrap=pods.wrapped(drop=["sys_chroot", "setuid", "setgid"])) as it:
        assert "needs the capabilities SETGID, SETUID, SYS_CHROOT, which this container has dropped" in sentence(it)


def test_a_locked_account_is_told_how_to_be_opened(folder, mount) -> None:
    """As root's is in Red Hat's images; sshd without PAM lets nobody in there."""
    shadow = folder / "shadow"
    shadow.write_text("root:!locked::0:99999:7:::\n")
    shadow.chmod(stat.S_IRUSR)
    with refused(folder, mount, wrap=pods.wrapped(f"mount --bind '{shadow}' /etc/shadow")) as it:
        assert "usermod -p '*' root" in sentence(it)


@pytest.mark.parametrize(
    ("image", "user", "port"),
    [
        ("Host *\n  Port 2222\n", None, 2222),  # mpi-operator's and Trainer's own images
        ("Host *\n  Port 2022\n", pods.UID, 2022),
        ("", None, 22),
        ("", pods.UID, 2222),
    ],
)
def test_the_port_is_the_images_own(folder, image, user, port) -> None:
    """So that launcher and workers of one image agree, whoever's sshd it is."""
    (folder / "ssh_config").write_text(image)
    own = f"mount --bind '{folder}/ssh_config' /etc/ssh/ssh_config"
    wrap = pods.wrapped(pods.opened(folder), pods.made_up_user(folder), own, user=user)
    code = "from trainer_launch.mpi import ssh_client; print(ssh_client.port_of(('ssh',)))"
    env = clean_env({"PYTHONPATH": str(ROOT)})
    done = subprocess.run((*wrap, sys.executable, "-c", code), env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{port}\n", done.stderr
