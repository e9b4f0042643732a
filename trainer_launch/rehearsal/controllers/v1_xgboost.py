"""XGBoostJob: kubeflow/trainer release-1.9, pkg/controller.v1/xgboost/xgboost.go."""

from __future__ import annotations

from trainer_launch.rehearsal.controllers import v1
from trainer_launch.rehearsal.controllers.pod_values import Success, Template, Workload
from trainer_launch.rehearsal.controllers.pods import env_items
from trainer_launch.rehearsal.controllers.request import Request

KIND = v1.Kind(
    specs="xgbReplicaSpecs",
    roles=("Master", "Worker"),
    container="xgboost",
    port_name="xgboostjob-port",
    port=9999,
    restart="Never",
)


def read(request: Request) -> Workload:
    """The pods of an XGBoostJob."""
    found = request.job
    found.get("spec").only(("runPolicy", "xgbReplicaSpecs"))
    specs = v1.replicas(found, KIND)
    if "master" not in specs or specs["master"].count != 1:
        raise found.get("spec", "xgbReplicaSpecs", "Master").bad("one Master")
    name, space = v1.job_name(found), v1.namespace(found)
    master = f"{name}-master-0"
    total = sum(one.count for one in specs.values())

    def template(one: v1.Replicas, index: int) -> Template:
        rank = index if one.role == "master" else index + specs["master"].count
        env = {"MASTER_PORT": str(specs["master"].port), "MASTER_ADDR": master, "WORLD_SIZE": str(total)}
        env |= {"RANK": str(rank), "PYTHONUNBUFFERED": "1"}
        if total > 1 and "worker" in specs:
            workers = ",".join(f"{name}-worker-{i}" for i in range(specs["worker"].count))
            env |= {"WORKER_PORT": str(specs["worker"].port), "WORKER_ADDRS": workers}
        return v1.with_env(one.template, env_items(env))

    pods = v1.drafts(name, space, specs, template)
    return Workload(
        kind="XGBoostJob",
        name=name,
        namespace=space,
        drafts=pods,
        rules=v1.rules(found, Success(groups=((master,),))),
        ports={"MASTER_PORT": master},
        ignored=v1.ignored(found, specs.values()),
    )
