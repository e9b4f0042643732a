"""Which MPI an mpirun belongs to, by what it says of its version. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

OPEN_MPI, MPICH, INTEL = "Open MPI", "MPICH", "Intel MPI"

_OPEN = re.compile(r"(?:mpirun|mpiexec|orterun|prterun)\S* \((?:Open MPI|OpenRTE|PRRTE)\) v?(\d+)(\.\S*)?")
_PRRTE = re.compile(r"prterun|PRRTE|PMIx Reference RunTime")
_VERSION = re.compile(r"[Vv]ersion:?\s+(\d+)(\.\S*)?")


@dataclass(frozen=True, slots=True)
class Dialect:
    """An implementation, and the first number of its version (0: unknown)."""

    name: str
    major: int = 0
    version: str = ""

    @property
    def is_hydra(self) -> bool:
        """Whether its mpirun is a Hydra."""
        return self.name != OPEN_MPI

    def __str__(self) -> str:
        return f"{self.name} {self.version}".strip()


def recognised(said: str) -> Dialect | None:
    """The dialect of `mpirun --version`; None when it is none that we know."""
    found = _OPEN.search(said)
    if found:
        major = int(found[1])
        # PRRTE counts for itself: its 3 is Open MPI's 5.
        return Dialect(OPEN_MPI, 5 if _PRRTE.search(found[0]) else major, found[1] + (found[2] or ""))
    name = INTEL if "Intel(R) MPI" in said else MPICH if "HYDRA" in said or "MPICH" in said else None
    if name is None:
        return None
    version = _VERSION.search(said)
    return Dialect(name, int(version[1]), version[1] + (version[2] or "")) if version else Dialect(name)
