"""What the page on migrating shows: manifests before and after, and Flyte's workflow."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs"
PAGE = FOLDER / "migrating.md"
FLYTE_WORKFLOW = FOLDER.parent / "docker" / "examples" / "flyte_workflow.py"
# A flytekit that only marks functions: tests/frameworks reads the page with a real one.
STUBS = {
    "flytekit/__init__.py": """
class PodTemplate:
    def __init__(self, **given): pass

def task(function=None, **given):
    return function or (lambda each: each)
""",
    "flytekit/core/__init__.py": "",
    "flytekit/core/base_task.py": "class IgnoreOutputs(Exception): pass\n",
    "flytekitplugins/__init__.py": "",
    "flytekitplugins/kfpytorch.py": """
class RestartPolicy: FAILURE = 1
class PyTorch:
    def __init__(self, **given): pass
Master = Worker = PyTorch
""",
    "kubernetes/__init__.py": "",
    "kubernetes/client.py": """
class V1Container:
    def __init__(self, **given): pass
V1EmptyDirVolumeSource = V1PodSpec = V1Volume = V1VolumeMount = V1Container
""",
}
# What Flyte runs in a container, as far as this needs it: it ends with 0 also where outputs are not to be kept.
PYFLYTE_EXECUTE = """#!/bin/sh
'''exec' "{python}" "$0" "$@" # a path with a blank cannot stand after #!
'''
import importlib, sys
sys.path.insert(0, {folder!r})
if __name__ == "__main__":
    words = sys.argv[sys.argv.index("--") + 1:]
    from flytekit.core.base_task import IgnoreOutputs
    task = getattr(importlib.import_module(words[1]), words[3])
    try:
        print("outputs:", task(lr=0.5), flush=True)
    except IgnoreOutputs:
        print("no outputs", flush=True)
"""


def blocks(page: Path, language: str) -> list[str]:
    """The page's examples in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def before(diff: str) -> str:
    """What a diff is of."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("+"))


def after(diff: str) -> str:
    """What a diff makes."""
    return "".join(line[1:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))
