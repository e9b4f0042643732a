"""All that a release consists of, from the last commit: sdist, wheel, SBOM and checksums, the same bytes each time.

`make release` runs it. It publishes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
NAME = "trainer-launch"
EXTRAS = ("gpu", "local", "mpi", "report")  # torch is the image's own, and dev is for development


def output_of(argv: Sequence[str | Path], cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """What a program prints.

    Raises:
        SystemExit: it failed; its output is the message.
    """
    ended = subprocess.run(argv, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if ended.returncode:
        raise SystemExit(f"release: {argv[0]} ended with {ended.returncode}:\n{ended.stdout}")
    return ended.stdout


def built(folder: Path, epoch: int) -> list[Path]:
    """The sdist of the last commit, and the wheel of that sdist."""
    tree = folder / "tree"
    tree.mkdir()
    output_of(("git", "archive", "--output", folder / "tree.tar", "HEAD"), ROOT)
    output_of(("tar", "-xf", folder / "tree.tar", "-C", tree), ROOT)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env["SOURCE_DATE_EPOCH"] = str(epoch)
    output_of((sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", "."), tree, env)
    return sorted((folder / "dist").iterdir())


def requirements(name: str, extras: Sequence[str] = ()) -> Iterator[Requirement]:
    """What a distribution that is installed here needs, itself or for these extras."""
    for text in metadata.requires(name) or ():
        one = Requirement(text)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield one


def dependencies(extras: Sequence[str] = ()) -> dict[str, list[str]]:
    """Each distribution that an installation has, with those that it needs, by their canonical names."""
    found: dict[str, list[str]] = {}
    to_do = [(NAME, tuple(extras))]
    while to_do:
        name, wanted = to_do.pop()
        needs = {canonicalize_name(one.name): tuple(one.extras) for one in requirements(name, wanted)}
        found[name] = sorted({*found.get(name, ()), *needs})
        to_do += [(need, more) for need, more in needs.items() if need not in found or more]
    return found


def purl(name: str, version: str) -> str:
    """The name of a package in SBOMs."""
    return f"pkg:pypi/{name}@{version}"


def license_of(told: Any) -> str:
    """The name of a distribution's licence: some give its whole text, or only a classifier."""
    named = [one.rpartition(" :: ")[2] for one in told.get_all("Classifier") or () if one.startswith("License :: ")]
    names = (told.get("License-Expression"), told.get("License"), *named)
    return next((name for name in names if name and "\n" not in name), "")


def component(name: str, scope: str) -> dict[str, Any]:
    """A distribution that is installed here, as CycloneDX has it."""
    told = metadata.metadata(name)
    license_ = license_of(told)
    found = {"type": "library", "bom-ref": name, "name": name, "version": told["Version"], "scope": scope}
    found["purl"] = purl(name, told["Version"])
    return {**found, **({"licenses": [{"license": {"name": license_}}]} if license_ else {})}


def sbom(version: str, wheel: Path, epoch: int) -> dict[str, Any]:
    """A CycloneDX document of the wheel: what it needs, required or optional, in versions of constraints.txt."""
    required, every = dependencies(), dependencies(EXTRAS)
    checksum = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own: dict[str, Any] = {"type": "application", "bom-ref": NAME, "name": NAME, "version": version}
    own |= {"purl": purl(NAME, version)}
    own |= {"licenses": [{"license": {"id": "Apache-2.0"}}], "hashes": [{"alg": "SHA-256", "content": checksum}]}
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.5.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, checksum)}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.fromtimestamp(epoch, timezone.utc).isoformat().replace("+00:00", "Z"),
            "component": own,
        },
        "components": [
            component(name, "required" if name in required else "optional")
            for name in sorted(every.keys() - {NAME})
        ],
        "dependencies": [{"ref": name, "dependsOn": needs} for name, needs in sorted(every.items())],
    }


def release(folder: Path) -> list[Path]:
    """Make all of it, and leave nothing else in the folder.

    Raises:
        SystemExit: two builds differ.
    """
    epoch = int(output_of(("git", "show", "-s", "--format=%ct", "HEAD"), ROOT))
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        made = [{path.name: path.read_bytes() for path in built(Path(where), epoch)} for where in (one, other)]
    if made[0] != made[1]:
        raise SystemExit(f"release: two builds differ: {', '.join(made[0])}")
    folder.mkdir(parents=True, exist_ok=True)
    for old in (*folder.glob("trainer_launch-*"), *folder.glob("SHA256SUMS")):
        old.unlink()
    for name, content in made[0].items():
        (folder / name).write_bytes(content)
    (wheel,) = folder.glob("*.whl")
    version = wheel.name.split("-")[1]
    document = json.dumps(sbom(version, wheel, epoch), indent=2) + "\n"
    (folder / f"trainer_launch-{version}.cdx.json").write_text(document, encoding="utf-8")
    files = sorted(folder.glob("trainer_launch-*"))
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")
    return [*files, folder / "SHA256SUMS"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="make all files of a release from the last commit")
    parser.add_argument("folder", type=Path)
    changed = output_of(("git", "status", "--porcelain"), ROOT)
    for path in release(parser.parse_args().folder):
        print(path)
    if changed:
        print("release: the changes that are not committed are not in it", file=sys.stderr)


if __name__ == "__main__":
    main()
