"""How mpirun reaches hosts where the user has set that up: by which ssh, or by something that is none. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from trainer_launch.planning.typed_mpirun import MCA_VARIABLES, Typed

# Options and MCA parameters; variables of the same meaning, as Open MPI's are made of the parameters' names.
_PROGRAMS = ("plm_rsh_agent", "plm_ssh_agent", "launcher-exec", "bootstrap-exec")
_PROGRAM_VARIABLES = ("HYDRA_LAUNCHER_EXEC", "I_MPI_HYDRA_BOOTSTRAP_EXEC")
_KINDS = ("plm", "launcher", "bootstrap")
_KIND_VARIABLES = ("HYDRA_LAUNCHER", "I_MPI_HYDRA_BOOTSTRAP")
_ARGS = ("plm_rsh_args", "plm_ssh_args")
_SSH = "ssh"


def own_ssh(typed: Typed, env: Mapping[str, str]) -> tuple[str, ...] | None:
    """The ssh that mpirun calls, with its options; None: hosts are reached without one."""
    program = _told(typed, env, _PROGRAMS, _PROGRAM_VARIABLES).partition(":")[0].split()  # tried in turn
    kind = _told(typed, env, _KINDS, _KIND_VARIABLES)
    if program:
        is_ssh = program[0].rpartition("/")[2] == _SSH
    else:  # Open MPI's own component for ssh bears the name of rsh
        is_component = kind == _told(typed, env, ("plm",), ())
        is_ssh = kind in ("", _SSH) or (is_component and (kind == "rsh" or kind.startswith("^")))
    return (*(program or (_SSH,)), *_told(typed, env, _ARGS, ()).split()) if is_ssh else None


def _told(typed: Typed, env: Mapping[str, str], names: Iterable[str], variables: Iterable[str]) -> str:
    """The first of these settings that has a value: what was typed goes before what is set."""
    listed = tuple(names)
    found = [typed.values.get(name) for name in listed]
    found += [env.get(f"{prefix}{name}") for prefix in MCA_VARIABLES for name in listed]
    found += [env.get(name) for name in variables]
    return next((value for value in found if value), "")
