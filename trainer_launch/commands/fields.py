"""Which settings each command has as flags, under which heading of its help, and what stands for their values."""

from __future__ import annotations

from trainer_launch.model.settings import Settings

_JOB = ("nodes", "nproc_per_node", "node_rank", "master_addr", "master_port", "max_restarts")
_CHECKING = (
    "preflight",
    "level",
    "pair_test",
    "threshold",
    "reference",
    "write_reference",
    "only",
    "skip",
    "fatal",
    "deadline",
    "storage",
    "image",
    "exit_warning",
    "report",
    "plot",
    "prometheus_file",
)
_RUN = tuple(name for name in Settings.model_fields if name not in (*_CHECKING, "listen_address"))
_EXPLAIN = tuple(
    name for name in _RUN if name not in ("color", "termination_log", "events", "metrics_port", "state_dir")
)
_PREFLIGHT = (
    *_CHECKING,
    "state_dir",
    "contract",
    "engine",
    *(name for name in _JOB if name != "max_restarts"),
    "min_nodes",
    "port_range",
    "secret_file",
    "ssh_dir",
    "ssh_port",
    "insecure_host_keys",
    "shm_size",
    "termination_log",
    "log_level",
)
_LOCAL = (
    "engine",
    "nodes",
    "nproc_per_node",
    "max_restarts",
    "rendezvous",
    "start_method",
    "preload",
    "grace",
    "stop_order",
    "signals",
    "hang_timeout",
    "prefix",
    "color",
    "events",
    "log_level",
)
_SSHD = (
    *("ssh_dir", "ssh_port", "listen_address", "insecure_host_keys", "forward_env"),
    *("contract", "grace", "signals", "shm_size"),
    *("color", "termination_log", "events", "metrics_port", "log_level"),
)
# Each command's module and its settings; only the one that is called is imported.
COMMANDS = {
    "run": _RUN,
    "preflight": _PREFLIGHT,
    "explain": _EXPLAIN,
    "sshd": _SSHD,
    "local": _LOCAL,
    "status": ("log_level",),
    "completion": (),
    "help": (),
    "version": (),
}
ALIASES = {"nodes": ("--nnodes",), "preflight": ("--mode",)}  # torchrun's word; what reads better
METAVARS = {
    "output_limit": "LINES",
    "contract": "NAME",
    "nodes": "N[:MAX]",
    "nproc_per_node": "N|auto",
    "node_rank": "N",
    "master_addr": "HOST",
    "master_port": "PORT",
    "max_restarts": "N",
    "preload": "A,B",
    "hosts": "HOST:N[,...]",
    "host_discovery_script": "PATH",
    "ssh_dir": "PATH",
    "ssh_port": "PORT",
    "listen_address": "ADDRESS[,...]",
    "forward_env": "NAME[,...]",
    "grace": "SECONDS",
    "signals": "NAME=ACTION[,...]",
    "wait_timeout": "SECONDS",
    "rejoin_timeout": "SECONDS",
    "min_nodes": "N",
    "shrink_after": "SECONDS",
    "restart_window": "SECONDS",
    "port_range": "LOW-HIGH",
    "secret_file": "PATH",
    "termination_log": "PATH",
    "shm_size": "SIZE|auto|keep",
    "threshold": "NAME=VALUE[,...]",
    "reference": "PATH",
    "write_reference": "PATH",
    "only": "CHECK[,...]",
    "skip": "CHECK[,...]",
    "fatal": "CHECK[,...]",
    "deadline": "SECONDS",
    "image": "NAME",
    "storage": "[shared:]PATH[,...]",
    "report": "PATH",
    "plot": "PATH",
    "prometheus_file": "PATH",
    "state_dir": "PATH",
    "hang_timeout": "SECONDS|auto",
    "hang_dir": "PATH",
    "progress_file": "PATH",
    "events": "PATH|-",
    "metrics_port": "PORT",
}

# The headings, in their order; a command shows those of its own settings.
GROUPS = {
    "checks": _CHECKING,
    "command": ("contract", "engine", "exec", "rendezvous", "start_method", "preload"),
    "job (default: what the platform injected)": (
        *_JOB[:-1],
        *("hosts", "host_discovery_script", "port_range", "secret_file"),
    ),
    "restarts": ("max_restarts", "restart_window", "rejoin_timeout", "min_nodes", "shrink_after", "wait_timeout"),
    "hang detection": ("hang_timeout", "hang_dir", "progress_file"),
    "stopping": ("grace", "stop_order", "signals", "termination_log"),
    "MPI": ("ssh_dir", "ssh_port", "listen_address", "insecure_host_keys", "forward_env"),
    "container": ("shm_size", "state_dir"),
    "output and monitoring": ("prefix", "output_limit", "color", "events", "metrics_port", "log_level"),
}
