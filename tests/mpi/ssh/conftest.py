"""What tests of ssh share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mpi.ssh.secrets import require_openssh, secret


@pytest.fixture
def openssh() -> None:
    """Skip where there is no sshd."""
    require_openssh()


@pytest.fixture
def mount(tmp_path: Path) -> Path:
    """The job's Secret, as a pod has it mounted."""
    return secret(tmp_path / "a mount")
