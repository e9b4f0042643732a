"""What a pod gets from its cluster unasked: service links by the thousand, also for Services of our own name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.launching import launch, script

LINKS = {  # of a Service called trainer-launch-metrics, and of one called trainer-launch
    **{f"TRAINER_LAUNCH_METRICS_{name}": value for name, value in {
        "PORT": "tcp://10.0.0.1:9400", "SERVICE_HOST": "10.0.0.1", "SERVICE_PORT": "9400",
        "PORT_9400_TCP": "tcp://10.0.0.1:9400", "PORT_9400_TCP_PROTO": "tcp",
    }.items()},
    "TRAINER_LAUNCH_PORT": "tcp://10.0.0.2:80",
    "TRAINER_LAUNCH_SERVICE_PORT_HTTP": "80",
}  # fmt: skip
MANY = {f"SVC_{number}_SERVICE_{part}": "10.0.0.1" for number in range(4_500) for part in ("HOST", "PORT")}


@pytest.mark.process
def test_links_to_9000_services_and_to_ours_change_nothing() -> None:
    done = launch("run", "--", "sh", "-c", "env | grep -c '^SVC_'", env={**LINKS, **MANY})
    assert (done.returncode, done.stdout.strip()) == (0, "9000"), done.stderr
    assert "TRAINER_LAUNCH_" not in done.stderr
    assert "10.0.0.1" not in done.stderr


OWN_STORE = """
import os, torch, torch.distributed as dist
from datetime import timedelta

host, port, rank, size = (os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
is_master = rank == "0" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
store = dist.TCPStore(host, int(port), int(size), is_master, timedelta(seconds=30))
store.set(f"mine/{rank}", rank)
store.wait([f"mine/{other}" for other in range(int(size))])
dist.init_process_group("gloo", store=dist.PrefixStore("mine", store), rank=int(rank), world_size=int(size))
total = torch.ones(1)
dist.all_reduce(total)
print(f"met {int(total)}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.process
@pytest.mark.torch
def test_a_scripts_own_store_at_master_port_meets_as_under_torchrun(tmp_path: Path) -> None:
    done = launch("run", "--nproc-per-node", "2", "--", script(tmp_path, OWN_STORE))
    assert (done.returncode, done.stdout.count("met 2")) == (0, 2), done.stderr
