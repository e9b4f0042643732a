"""JAXJob: kubeflow/trainer release-1.9, pkg/controller.v1/jax/envvar.go."""

from __future__ import annotations

from trainer_launch.rehearsal.controllers import v1
from trainer_launch.rehearsal.controllers.pod_values import Success, Template, Workload
from trainer_launch.rehearsal.controllers.pods import env_items
from trainer_launch.rehearsal.controllers.request import Request

KIND = v1.Kind(
    specs="jaxReplicaSpecs",
    roles=("Worker",),
    container="jax",
    port_name="jaxjob-port",
    port=6666,
    restart="Never",
)


def read(request: Request) -> Workload:
    """The pods of a JAXJob."""
    found = request.job
    found.get("spec").only(("runPolicy", "jaxReplicaSpecs"))
    specs = v1.replicas(found, KIND)
    worker = specs["worker"]
    name, space = v1.job_name(found), v1.namespace(found)

    def template(_: v1.Replicas, index: int) -> Template:
        env = {
            "PYTHONUNBUFFERED": "1",
            "COORDINATOR_PORT": str(worker.port),
            "COORDINATOR_ADDRESS": f"{name}-worker-0",
            "NUM_PROCESSES": str(worker.count),
            "PROCESS_ID": str(index),
        }
        return v1.with_env(worker.template, env_items(env))

    pods = v1.drafts(name, space, specs, template)
    return Workload(
        kind="JAXJob",
        name=name,
        namespace=space,
        drafts=pods,
        rules=v1.rules(found, Success(groups=(v1.everyone(pods, "worker"),))),
        ports={"COORDINATOR_PORT": f"{name}-worker-0"},
        ignored=v1.ignored(found, specs.values()),
    )
