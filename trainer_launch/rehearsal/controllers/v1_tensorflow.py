"""TFJob, full and with dynamic workers.

kubeflow/trainer release-1.9, pkg/controller.v1/tensorflow/tensorflow.go.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from trainer_launch.contracts.source import MAX_VALUE_BYTES
from trainer_launch.rehearsal.controllers import v1
from trainer_launch.rehearsal.controllers.pod_values import Draft, Success, Template, Workload
from trainer_launch.rehearsal.controllers.pods import env_items
from trainer_launch.rehearsal.controllers.request import Request

KIND = v1.Kind(
    specs="tfReplicaSpecs",
    roles=("Chief", "Master", "PS", "Worker", "Evaluator"),
    container="tensorflow",
    port_name="tfjob-port",
    port=2222,
    restart="Never",
)


def read(request: Request) -> Workload:
    """The pods of a TFJob."""
    found = request.job
    spec = found.get("spec")
    spec.only(("runPolicy", "successPolicy", "tfReplicaSpecs", "enableDynamicWorker"))
    specs = v1.replicas(found, KIND)
    name, space = v1.job_name(found), v1.namespace(found)
    dynamic = spec.get("enableDynamicWorker").flag()
    addresses = {
        role: [f"{name}-{role}-{i}.{space}.svc{request.dotted_domain}:{one.port}" for i in range(one.count)]
        for role, one in specs.items()
    }
    alone = sum(one.count for one in specs.values()) == 1

    longest = max(sum(map(len, each)) for each in addresses.values())
    if longest > MAX_VALUE_BYTES and not dynamic:
        text = f"fewer replicas: Linux takes {MAX_VALUE_BYTES} bytes in a variable, and TF_CONFIG would be longer"
        raise found.get("spec", KIND.specs).bad(text, found=longest)

    def template(one: v1.Replicas, index: int) -> Template:
        if alone:
            return one.template
        made = _sparse(addresses, one.role, index) if dynamic else _full(addresses, one.role, index)
        config = json.dumps(made, separators=(",", ":"), ensure_ascii=False)
        return v1.with_env(one.template, env_items({"TF_CONFIG": config}), only=KIND.container)

    pods = v1.drafts(name, space, specs, template, request.dotted_domain)
    everybody = spec.get("successPolicy").choice(("", "AllWorkers"), "") == "AllWorkers"
    rules = v1.rules(found, Success(groups=(_judges(pods, everybody=everybody),)))
    if dynamic:
        rules = replace(rules, may_fail=v1.everyone(pods, "worker"))
    return Workload(
        kind="TFJob",
        name=name,
        namespace=space,
        drafts=pods,
        rules=rules,
        ignored=v1.ignored(found, specs.values()),
    )


def _judges(pods: tuple[Draft, ...], *, everybody: bool) -> tuple[str, ...]:
    """Whose success is the job's."""
    chiefs = (*v1.everyone(pods, "chief"), *v1.everyone(pods, "master"))
    workers = v1.everyone(pods, "worker")
    return chiefs or (workers if everybody else workers[:1])


def _full(addresses: Mapping[str, list[str]], role: str, index: int) -> dict[str, object]:
    cluster = {key: addresses[key] for key in sorted(addresses)}
    return {"cluster": cluster, "task": {"type": role, "index": index}, "environment": "cloud"}


def _sparse(addresses: Mapping[str, list[str]], role: str, index: int) -> dict[str, object]:
    """Everybody knows only itself; workers know all parameter servers."""
    worker: dict[str, str] = {}
    servers: list[str] | None = []
    if role == "worker":
        worker = {str(index): addresses["worker"][index]}
        servers = addresses.get("ps")
    elif role == "ps":
        servers = [addresses["ps"][index]]
    return {"cluster": {"worker": worker, "ps": servers}, "task": {"type": role, "index": index}}
