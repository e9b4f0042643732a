"""PaddleJob, collective and with parameter servers.

kubeflow/trainer release-1.9, pkg/controller.v1/paddlepaddle/envvar.go.
"""

from __future__ import annotations

from trainer_launch.rehearsal.controllers import v1
from trainer_launch.rehearsal.controllers.pod_values import EnvItem, Success, Template, Workload
from trainer_launch.rehearsal.controllers.pods import env_items
from trainer_launch.rehearsal.controllers.request import Request

KIND = v1.Kind(
    specs="paddleReplicaSpecs",
    roles=("Master", "Worker"),
    container="paddle",
    port_name="master",
    port=36543,
    restart="OnFailure",
)


def read(request: Request) -> Workload:
    """The pods of a PaddleJob."""
    found = request.job
    spec = found.get("spec")
    spec.only(("runPolicy", "elasticPolicy", "paddleReplicaSpecs"))
    specs = v1.replicas(found, KIND)
    name, space = v1.job_name(found), v1.namespace(found)
    total = sum(one.count for one in specs.values())
    first = specs.get("master") or specs["worker"]  # where all meet

    def template(one: v1.Replicas, index: int) -> Template:
        env = {"PYTHONUNBUFFERED": "1", "PADDLE_JOB_ID": name, "PADDLE_NNODES": str(total)}
        items = list(env_items(env))
        if one is first and index == 0:  # its own name is not published before it is ready
            items.append(EnvItem(name="POD_IP_DUMMY", field="status.podIP"))
            items.append(EnvItem(name="PADDLE_MASTER", value=f"$(POD_IP_DUMMY):{first.port}"))
        else:
            items.append(EnvItem(name="PADDLE_MASTER", value=f"{name}-{first.role}-0:{first.port}"))
        if "master" in specs:
            kind = "PADDLE_SERVER_NUM" if one.role == "master" else "PADDLE_TRAINER_NUM"
            items.append(EnvItem(name=kind, value="1"))
        return v1.with_env(one.template, items)

    pods = v1.drafts(name, space, specs, template)
    return Workload(
        kind="PaddleJob",
        name=name,
        namespace=space,
        drafts=pods,
        rules=v1.rules(found, Success(groups=(v1.everyone(pods, first.role),))),
        ignored=(
            *v1.ignored(found, specs.values()),
            *(["elasticPolicy (as in the operator)"] if spec.get("elasticPolicy").given else []),
        ),
    )
