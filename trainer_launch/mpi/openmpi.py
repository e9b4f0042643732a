"""Open MPI's mpirun: its command line and its variables. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trainer_launch.planning.typed_mpirun import Typed

# A host that vanished is noticed after some 3 s, by mpirun and by its daemons alike (Open MPI: 8 minutes).
_ALIVE = {"keepalive_time": "1", "keepalive_intvl": "1", "keepalive_probes": "2"}


def argv(
    typed: Typed, hostfile: str | None, number: int | None, forward: Sequence[str], *, is_root: bool
) -> tuple[str, ...]:
    """The command: ours first, then what was typed."""
    words: list[str] = [typed.mpirun]
    if is_root and "allow-run-as-root" not in typed.names:
        words.append("--allow-run-as-root")
    if hostfile is not None:
        words += ["--hostfile", hostfile]
    if number is not None:
        words += ["-np", str(number)]
    for name in forward:
        if name not in typed.named:
            words += ["-x", name]
    return (*words, *typed.kept, *typed.program)


def env(given: Mapping[str, str], major: int, ssh_config: str | None) -> dict[str, str]:
    """The launcher's variables with ours; what is set already stands.

    Open MPI 5 reads those of its runtime by another name, and mostly under another word.
    """
    new = major >= 5
    prefix = "PRTE_MCA_" if new else "OMPI_MCA_"
    ssh = "plm_ssh" if new else "plm_rsh"
    told = dict(given)
    if new:
        for name, value in given.items():
            if name.startswith("OMPI_MCA_plm_rsh_"):
                told.setdefault(f"PRTE_MCA_plm_ssh_{name.removeprefix('OMPI_MCA_plm_rsh_')}", value)
    for name, value in _ALIVE.items():
        told.setdefault(f"{prefix}oob_tcp_{name}", value)
    told.setdefault(f"{prefix}{'prte' if new else 'orte'}_keep_fqdn_hostnames", "true")
    if ssh_config is not None:
        # The configuration is on this host only, so this host starts the daemons of all others itself.
        args = f"{prefix}{ssh}_args"
        told[args] = f"-F {ssh_config} {told.get(args, '')}".strip()
        told.setdefault(f"{prefix}{ssh}_no_tree_spawn", "1")
        told.setdefault(f"{prefix}{ssh}_agent", "ssh")
    return told
