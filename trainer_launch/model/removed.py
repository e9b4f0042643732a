"""Options of version 0.2 that are no more, and their successors; each gives exit code 2, in this version only."""

from collections.abc import Mapping

from trainer_launch.model.errors import UsageError

VERSION = "0.3"
# By flag, whose variable is removed with it; or by a flag and its value.
SUCCESSORS: Mapping[str, str] = {
    "--exec": "remove it: run starts a program as it is; --engine torchrun runs the image's torchrun",
    "--rendezvous": "use --engine torchrun for torchrun with its own rendezvous",
    "--rdzv-backend trainer-launch": "remove it: torchrun's nodes meet at the launcher's coordinator; "
    "--engine torchrun runs the image's torchrun with its own rendezvous",
    "--start-method forkserver": "use --start-method auto, which forks workers where that is safe",
    "--rejoin-timeout": "use --wait-timeout",
    "--deadline": "use --wait-timeout",
    "--recorder": "use --hang-report-after off to turn the flight recorder off",
    "--straggler-interval": "stragglers are detected once a minute; --hang-report-after off turns this off",
    "--progress-file": "print something, or call trainer_launch.report(), to show progress",
    "--ranks-by": "use --topology-label alone: ranks then follow the labels",
    "--stop-order": "remove it: each worker gets SIGTERM, then its process group, then SIGKILL after --grace",
    "--restart-window": "remove it: --max-restarts counts all failures of the job",
    "--host-discovery-script": "the platform's discover_hosts.sh is used; horovodrun's own --host-discovery-script "
    "works in a horovodrun command",
    "--hosts": "write -H HOST:N,… in the mpirun or horovodrun command",
    "--listen-address": "remove it: sshd listens on all addresses; restrict its port by a NetworkPolicy",
    "--numa-binding": "use torchrun --numa-binding in the command, or PET_NUMA_BINDING",
    "--write-reference": "use --report FILE.json, which --reference reads",
    "--state-dir": "use --report FILE.json, or TRAINER_LAUNCH_REPORT, the same for preflight and run",
    "--exit-warning": "use --policy CHECK=fatal for each check whose warnings should end the pod",
    "--fatal": "use --policy CHECK=fatal",
    "--skip": "use --policy CHECK=off",
    "--mode": "use --policy observe to run all checks and fail none, --policy off to run none",
    "--preflight": "use --policy observe to run all checks and fail none, --policy off to run none",
    "--storage shared:PATH": "use --storage PATH, which tests the directory on each node",
    "--level deep": "use --level standard, with --gpu-burn 5m for a longer load",
    "--threshold": "use --policy CHECK=warn or off, or --reference FILE.json for what your GPUs reach",
    "--pair-test": "remove it: pairs are tested over NCCL if all nodes have GPUs, else over sockets",
    "--plot": "use --report FILE.html, which shows the bandwidth of each pair of nodes",
    "--prometheus-file": "use --report FILE.json",
    "--image": "remove it: nodes whose versions differ are reported without it",
    "--color": "set the variable NO_COLOR=1 to turn colors off",
    "--hang-dir": "use --incident-dir",
    "--chaos": "use --fault, once for each fault",
    "--max-lost-steps": "remove it: the report has each fault's repeated steps",
    "--report FILE.png": "use --report FILE.html",
    "--fault FILE.yaml": "use --fault once for each fault",
    "--fault oom": "use kill worker: the kernel sends SIGKILL, too",
    "--fault add node": "use kill pod back=20s: an elastic job takes the pod in when it comes back",
    "--fault scale": "use term pod back=never for a pod less, kill pod back=20s for one that joins later",
    "--fault slow link": "use partition for=2s, once for each pause",
    "incidents bundle": "copy the directory that incidents show names: kubectl cp POD:DIRECTORY DIRECTORY",
    "incidents page": "use incidents show, or copy the directory that it names",
    "--fault fill shm": "mount a small memory volume at /dev/shm in the manifest",
}


def refuse(what: str, typed: str | None = None) -> None:
    """Refuse what was removed, `typed` as another flag or as a variable.

    Raises:
        UsageError: it was; the sentence names the successor.
    """
    if what in SUCCESSORS:
        raise UsageError(f"{typed or what} was removed in {VERSION}; {SUCCESSORS[what]}")
