"""ConfigMaps and Secrets of the same manifests: variables, files, what is not there, and what is never shown."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from tests.cli.launching import launched
from tests.refusals import refusal
from tests.rehearsal.controllers.manifests import documents_of, job_of, pytorch
from trainer_launch.rehearsal.controllers import rendered, workload_of
from trainer_launch.rehearsal.controllers.pod_values import Pod
from trainer_launch.rehearsal.controllers.pod_values import pods as pods

B64 = base64.b64encode(b"pass\nword").decode()
CONFIG = "kind: ConfigMap\napiVersion: v1\nmetadata: {name: c}\ndata: {LR: '0.1', COST: '$(LR) $$5'}\n"
SECRET = f"kind: Secret\napiVersion: v1\nmetadata: {{name: s}}\ndata: {{TOKEN: {B64}}}\nstringData: {{USER: me}}\n"


def job(container: str, spec: str = "", words: str = "command: [x]") -> str:
    one = f"{{name: pytorch, image: i, {words}, {container}}}"
    pod = f"{{containers: [{one}]{', ' + spec if spec else ''}}}"
    return pytorch(f"{{pytorchReplicaSpecs: {{Worker: {{template: {{spec: {pod}}}}}}}}}")


def pod_of(*manifests: str) -> Pod:
    return pods(job_of(*manifests))[0]


def own(pod: Pod) -> dict[str, str]:
    return {name: value for name, value in pod.main.env.items() if not name.startswith(("PET_", "PYTHON"))}


# -- variables --------------------------------------------------------------------------------


def test_single_keys_become_variables_as_they_are() -> None:
    env = (
        "env: [{name: A, valueFrom: {configMapKeyRef: {name: c, key: COST}}}, {name: B, valueFrom: "
        "{secretKeyRef: {name: s, key: TOKEN}}}, {name: C, value: 'of $(A) and $(B)'}]"
    )
    assert own(pod_of(job(env), CONFIG, SECRET)) == {
        "A": "$(LR) $$5",
        "B": "pass\nword",
        "C": "of $(LR) $$5 and pass\nword",
    }


def test_all_keys_become_variables_with_a_prefix_and_env_is_stronger() -> None:
    env = (
        "envFrom: [{prefix: P_, configMapRef: {name: c}}, {configMapRef: {name: c}}, {secretRef: {name: s}}], "
        "env: [{name: LR, value: '1'}, {name: X, value: $(P_LR)$(USER)}]"
    )
    found = own(pod_of(job(env), CONFIG, SECRET))
    assert (found["P_LR"], found["LR"], found["X"], found["TOKEN"]) == ("0.1", "1", "0.1me", "pass\nword")


def test_what_is_optional_may_be_missing_and_is_named_once() -> None:
    env = (
        "envFrom: [{configMapRef: {name: nil, optional: true}}], env: [{name: A, valueFrom: {secretKeyRef: "
        "{name: s, key: nil, optional: true}}}, {name: B, value: b}]"
    )
    made = job_of(job(env, "volumes: [{name: v, configMap: {name: nil, optional: true}}]"), SECRET)
    assert own(pods(made)[0]) == {"B": "b"}
    assert made.ignored == ("ConfigMap nil (optional, and not given)", "Secret s (optional, and not given)")


def test_a_secret_that_is_not_given_has_placeholders_and_is_named_once() -> None:
    """Whoever rehearses a job on a laptop need not have its credentials there."""
    env = (
        "envFrom: [{secretRef: {name: nil}}], env: [{name: A, valueFrom: {secretKeyRef: {name: nil, key: k}}}], "
        "volumeMounts: [{name: v, mountPath: /in}]"
    )
    volume = "volumes: [{name: v, secret: {secretName: nil, items: [{key: id, path: ssh/id}]}}]"
    made = job_of(job(env, volume))
    pod = pods(made)[0]
    assert own(pod) == {"A": "placeholder"}
    assert {path: file.text for path, file in pod.main.files.items()} == {"/in/ssh/id": "placeholder"}
    assert made.ignored == ("Secret nil (not given): 'placeholder' for each value",)
    assert pods(job_of(job(volume.replace(", items: [{key: id, path: ssh/id}]", ""))))[0].main.files == {}


@pytest.mark.parametrize(
    ("container", "part"),
    [
        ("env: [{name: A, valueFrom: {configMapKeyRef: {name: nil, key: k}}}]", "refers to the ConfigMap 'nil'"),
        ("env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: nil}}}]", "refers to the key 'nil'"),
        ("env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: ''}}}]", "expected the name of a key"),
        ("envFrom: [{configMapRef: {name: nil}}]", "envFrom[0].configMapRef refers to the ConfigMap 'nil'"),
        ("envFrom: [{prefix: x}]", "a configMapRef or a secretRef"),
        ("env: [{name: A, valueFrom: {secretKeyRef: {name: s, kye: no}}}]", "key is missing"),
    ],
)
def test_a_reference_to_nothing_is_one_sentence_that_says_where(container: str, part: str) -> None:
    text = refusal(lambda: job_of(job(container), CONFIG, SECRET))
    assert part in text
    assert "0.yaml, document 1 (PyTorchJob job)" in text
    assert "pass" not in text


# -- volumes ----------------------------------------------------------------------------------


def files(volume: str, mount: str = "mountPath: /in") -> dict[str, tuple[str, int]]:
    spec = f"volumes: [{{name: v, {volume}}}]"
    pod = pod_of(job(f"volumeMounts: [{{name: v, {mount}}}]", spec), CONFIG, SECRET)
    return {path: (file.text, file.mode) for path, file in pod.main.files.items()}


def test_every_key_is_a_file() -> None:
    assert files("configMap: {name: c}") == {"/in/LR": ("0.1", 0o644), "/in/COST": ("$(LR) $$5", 0o644)}
    assert files("secret: {secretName: s, defaultMode: 0400}")["/in/TOKEN"] == ("pass\nword", 0o400)


def test_or_those_that_are_chosen_by_paths_of_their_own() -> None:
    items = "items: [{key: LR, path: a/b.txt, mode: 0500}]"
    assert files(f"configMap: {{name: c, {items}}}") == {"/in/a/b.txt": ("0.1", 0o500)}
    assert files(f"configMap: {{name: c, {items}}}", "mountPath: /etc/b, subPath: a/b.txt") == {
        "/etc/b": ("0.1", 0o500)
    }
    assert files(f"configMap: {{name: c, {items}}}", "mountPath: /etc/b, subPath: a") == {
        "/etc/b/b.txt": ("0.1", 0o500)
    }


@pytest.mark.parametrize(
    ("volume", "part"),
    [
        ("configMap: {name: nil}", "refers to the ConfigMap 'nil'"),
        ("configMap: {name: c, items: [{key: nil, path: x}]}", "refers to the key 'nil'"),
        ("configMap: {name: c, items: [{key: LR, path: ../x}]}", "a path inside the volume"),
        ("configMap: {name: c, defaultMode: 4096}", "defaultMode"),
        ("secret: {name: s}", "secret.secretName is missing"),
    ],
)
def test_a_volume_of_nothing_is_refused(volume: str, part: str) -> None:
    mounted = job("volumeMounts: [{name: v, mountPath: /in}]", f"volumes: [{{name: v, {volume}}}]")
    assert part in refusal(lambda: job_of(mounted, CONFIG))


# -- what is given ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (
            "kind: Secret\nmetadata: {name: s}\nstringData: {pin: 123456}",
            "stringData.pin is there; expected a string",
        ),
        ("kind: Secret\nmetadata: {name: s}\ndata: {pin: 123-456}", "data.pin is there; expected text in base64"),
        ("kind: ConfigMap\nmetadata: {name: s}\ndata: {a/b: '123456'}", "a key of letters"),
    ],
)
def test_what_kubernetes_would_not_take_is_refused_without_its_values(given: str, part: str) -> None:
    text = refusal(lambda: job_of(job("tty: false"), f"apiVersion: v1\n{given}\n"))
    assert part in text
    assert "123" not in text


# -- what is shown ----------------------------------------------------------------------------


def test_a_snapshot_shows_nothing_of_a_secret_wherever_it_went() -> None:
    env = (
        "env: [{name: A, valueFrom: {secretKeyRef: {name: s, key: TOKEN}}}, {name: B, value: 'x$(A)'}, "
        "{name: C, value: 'y$(B)'}, {name: D, value: d}, "
        "{name: A2, valueFrom: {configMapKeyRef: {name: c, key: LR}}}], "
        "volumeMounts: [{name: v, mountPath: /in}]"
    )
    container = job(env, "volumes: [{name: v, secret: {secretName: s}}]", "command: [run, '--with=$(C)', plain]")
    made = workload_of(documents_of(container, CONFIG, SECRET), shows_secrets=False)
    text = json.dumps(rendered(pods(made)))
    assert "pass" not in text
    shown = json.loads(text)["job-worker-0.json"]
    assert {name: shown["env"][name] for name in ("A", "B", "C", "D", "A2")} == {
        "A": "[redacted]",
        "B": "x[redacted]",
        "C": "yx[redacted]",
        "D": "d",
        "A2": "0.1",
    }
    assert shown["command"] == ["run", "--with=yx[redacted]", "plain"]
    assert shown["files"] == {"/in/TOKEN": "[redacted]", "/in/USER": "[redacted]"}


# -- run --------------------------------------------------------------------------------------


@pytest.mark.process
def test_a_script_of_a_configmap_runs_with_its_own_settings(tmp_path: Path) -> None:
    script = (
        "import os\nfrom pathlib import Path\n"
        "print(os.environ['LR'], Path('/etc/pin').read_text(), Path('/scripts/raw').read_bytes())"
    )
    raw = base64.b64encode(b"\xff\x00").decode()
    given = {
        "job.yaml": job(
            "envFrom: [{configMapRef: {name: settings}}], volumeMounts: [{name: code, mountPath: /scripts}, "
            "{name: pin, mountPath: /etc/pin, subPath: pin}]",
            "volumes: [{name: code, configMap: {name: code, defaultMode: 0555}}, "
            "{name: pin, secret: {secretName: p}}]",
            "command: [python, /scripts/train.py]",
        ),
        "configs.yaml": json.dumps(
            {
                "kind": "ConfigMap",
                "apiVersion": "v1",
                "metadata": {"name": "code"},
                "data": {"train.py": script},
                "binaryData": {"raw": raw},
            }
        ),
        "settings.yaml": "kind: ConfigMap\napiVersion: v1\nmetadata: {name: settings}\ndata: {LR: '0.5'}",
        "secret.yaml": "kind: Secret\napiVersion: v1\nmetadata: {name: p}\nstringData: {pin: '4711'}",
    }
    words = []
    for name, text in given.items():
        (tmp_path / name).write_text(text)
        words += ["-f", str(tmp_path / name)]
    ended = launched("rehearse", *words, "--log-level", "debug")
    assert ended.stdout.splitlines() == ["[job-worker-0] 0.5 4711 b'\\xff\\x00'"]
    assert "4711" not in ended.stderr
    assert "ignored" not in ended.stderr
