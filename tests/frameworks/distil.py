"""Distils published API classes to what a check of manifests needs: types, their fields, and which are required.

Run by the Python of the environment `kubernetes`; prints a line of JSON for each file of tests/kubernetes/schemas
that comes from classes. A type is a mapping of its fields ("name!": it is required) to `string`, `integer`,
`boolean`, `number`, `any`, the name of another type, `[T]` for a list and `{T}` for a mapping.
"""

from __future__ import annotations

import datetime
import importlib
import json
import re
import sys
import types
import typing
from importlib import metadata
from typing import Any

PLAIN = {
    str: "string",
    int: "integer",
    bool: "boolean",
    float: "number",
    object: "any",
    datetime.datetime: "string",
}
# Classes that stand for one value.
VALUES = {"IntOrString": "int-or-string", "Quantity": "quantity", "Time": "string", "MicroTime": "string"}
PREFIXES = r"IoK8s\w*?V\d+(?:(?:alpha|beta)\d+)?|IoK8sApimachineryPkg(?:UtilIntstr|ApiResource)|TrainerV1alpha1"
PREFIX = re.compile(rf"^(?:{PREFIXES}|SchedulingV1beta1|KubeflowOrgV1|K8sIoApi\w*?V\d|V1)(?=[A-Z])")
OF_JOBSET = "JobsetV1alpha2"  # it has a SuccessPolicy of its own
V1_KINDS = ("PyTorchJob", "TFJob", "MPIJob", "XGBoostJob", "PaddleJob", "JAXJob")
LEFT_OUT = ("status",)  # of a kind: what nobody writes into a manifest
UNKNOWN_HERE = ("MetricSpec",)  # types that no manifest of ours has


class Reader:
    """Follows classes from the kinds on."""

    def __init__(self) -> None:
        self.types: dict[str, dict[str, str]] = {}
        self.read: dict[str, Any] = {}

    def model(self, model: Any) -> str:
        """A pydantic class; its short name."""
        name = PREFIX.sub("", model.__name__).replace(OF_JOBSET, "jobset.")
        if name in VALUES:
            return VALUES[name]
        if self.read.setdefault(name, model) is not model:
            sys.exit(f"two classes are called {name}")
        if name not in self.types:
            self.types[name] = {}
            self.types[name] |= {
                f"{field.alias or key}{'!' if field.is_required() else ''}": self.annotation(field.annotation)
                for key, field in model.model_fields.items()
                if not (key in LEFT_OUT and "kind" in model.model_fields)
            }
        return name

    def annotation(self, given: Any) -> str:
        """What pydantic says of a field."""
        origin, inner = typing.get_origin(given), typing.get_args(given)
        if origin in (typing.Union, types.UnionType):
            (only,) = [one for one in inner if one is not type(None)]
            return self.annotation(only)
        if origin is typing.Annotated:
            return self.annotation(inner[0])
        if origin is list:
            return f"[{self.annotation(inner[0])}]"
        if origin is dict:
            return f"{{{self.annotation(inner[1])}}}"
        if given in PLAIN or given is Any:
            return PLAIN.get(given, "any")
        return self.model(given)

    def openapi(self, name: str) -> str:
        """A class of the Kubernetes client's kind, by the words that it has for types."""
        if found := re.fullmatch(r"list\[(.*)\]", name):
            return f"[{self.openapi(found[1])}]"
        if found := re.fullmatch(r"dict\(str, (.*)\)", name):
            return f"{{{self.openapi(found[1])}}}"
        short = PREFIX.sub("", name)
        plain = {"str": "string", "int": "integer", "bool": "boolean", "float": "number", "datetime": "string"}
        if name in plain or short in VALUES:
            return plain.get(name) or VALUES[short]
        if name == "object" or short in UNKNOWN_HERE:
            return "any"
        if short not in self.types and not name.startswith("V1"):
            self.types[short] = {}
            model = getattr(importlib.import_module("kubeflow.training.models"), name)
            of_kind = "kind" in model.openapi_types
            self.types[short] |= {
                model.attribute_map[key]: self.openapi(words)
                for key, words in model.openapi_types.items()
                if not (key in LEFT_OUT and of_kind)
            }
        return short


def main() -> None:
    models = importlib.import_module("kubeflow_trainer_api.models")
    reader = Reader()
    core = ("PersistentVolumeClaim", "PodTemplateSpec")
    for name in core:
        reader.model(getattr(models, f"IoK8sApiCoreV1{name}"))
    reader.model(models.IoK8sApiBatchV1JobTemplateSpec)
    kubernetes = dict(reader.types)
    for name in ("TrainJob", "TrainingRuntime", "ClusterTrainingRuntime"):
        reader.model(getattr(models, f"TrainerV1alpha1{name}"))
    reader.model(models.JobsetV1alpha2JobSet)
    trainer = {name: fields for name, fields in reader.types.items() if name not in kubernetes}
    operator = Reader()
    for name in V1_KINDS:
        operator.openapi(f"KubeflowOrgV1{name}")
    unknown = {
        word
        for fields in operator.types.values()
        for text in fields.values()
        for word in re.findall(r"[A-Z]\w+", text)
        if word not in operator.types and word not in kubernetes
    }
    if unknown:
        sys.exit(f"types without a description: {sorted(unknown)}")
    sources = ("kubeflow-trainer-api", "kubeflow-trainer-api", "kubeflow-training")
    files = ("kubernetes", "trainer", "training-operator")
    for file, source, found in zip(files, sources, (kubernetes, trainer, operator.types), strict=True):
        release = f"{source} {metadata.version(source)}"
        print(json.dumps({"file": file, "source": release, "types": dict(sorted(found.items()))}))


if __name__ == "__main__":
    main()
