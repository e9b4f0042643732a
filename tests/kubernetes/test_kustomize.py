"""`kubectl apply -k` finds in docker/kubernetes what it needs, by kustomize itself where that is there."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.conftest import require
from tests.kubernetes import pod_rules, published

FOLDERS = pytest.mark.parametrize("folder", published.KUSTOMIZATIONS, ids=published.name)
_FIRST = (1, 21)  # kubectl's own kustomize knows no folders among resources before


def kustomize() -> list[str]:
    """The words that build a folder; skips where there are none."""
    if found := shutil.which("kustomize"):
        return [found, "build"]
    kubectl = shutil.which("kubectl")
    told = ""
    if kubectl:
        asked = subprocess.run([kubectl, "version", "--client"], capture_output=True, text=True, timeout=120)
        told = asked.stdout
    version = re.search(r"v(\d+)\.(\d+)", told)
    known = version is not None and (int(version[1]), int(version[2])) >= _FIRST
    require(known, "needs kustomize, or kubectl 1.21 or newer")
    return [str(kubectl), "kustomize"]


def said(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return read


@pytest.mark.process
@FOLDERS
def test_kustomize_builds_it_with_the_images_that_are_named(folder: Path) -> None:
    built = subprocess.run([*kustomize(), str(folder)], capture_output=True, text=True, timeout=100)
    assert built.returncode == 0, built.stderr
    documents = list(yaml.safe_load_all(built.stdout))
    sources = [document for path in resources(folder) for document in published.documents(path)]
    assert named(documents) == named(sources)
    used = {one["image"] for document in documents for pod in published.pods(document) for one in pod.containers}
    new = {f"{image['newName']}:{image['newTag']}" for image in said(folder).get("images", [])}
    assert used <= new or folder.name == "runtimes", "a base: who applies it names the images"
    pods = [pod for document in documents for pod in published.pods(document)]
    assert [text for pod in pods for text in pod_rules.restricted(pod)] == [], "aliases of YAML are resolved"


def named(documents: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return sorted((document["kind"], document["metadata"]["name"]) for document in documents)


def resources(folder: Path) -> list[Path]:
    """The manifests that a folder leads to. By our own reading, which knows `resources` and nothing else."""
    found: list[Path] = []
    for one in said(folder)["resources"]:
        path = (folder / one).resolve()
        found += resources(path) if path.is_dir() else [path]
    return found


@FOLDERS
def test_a_kustomization_lists_what_is_there_and_names_images_that_are_used(folder: Path) -> None:
    """What can be told without kustomize: neither what `images` do, nor a field that kustomize refuses."""
    known = {"apiVersion", "kind", "resources", "images"}
    assert said(folder).keys() <= known
    here = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
    assert here <= set(said(folder)["resources"]), "a manifest that nobody applies"
    used = {
        one["image"] for path in resources(folder) for pod in published.all_pods(path) for one in pod.containers
    }
    replaced = {image["name"] for image in said(folder).get("images", [])}
    assert used == replaced or not replaced


def test_every_manifest_is_reached_from_a_folder_that_can_be_applied() -> None:
    reached = {path for folder in published.KUSTOMIZATIONS for path in resources(folder)}
    assert reached == {path.resolve() for path in published.FOR_PRODUCTION}
