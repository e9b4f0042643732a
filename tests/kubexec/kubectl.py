#!/usr/bin/env python3
"""A kubectl that knows `exec POD [--container NAME] -- COMMAND…` alone, for pods that are namespaces here.

FOLDER/POD holds the pid of the pod's process 1; no file: no such pod; an empty one: its container does not run yet.
As with the real one, the command outlives who asked for it, and has the container's environment, not the caller's.
"""

import os
import subprocess
import sys
from pathlib import Path


def main(folder: str, words: list[str]) -> int:
    if words[:1] != ["exec"] or "--" not in words:
        sys.exit(f"error: unknown command {words[:1]}")
    pod, command = words[1], words[words.index("--") + 1 :]
    try:
        pid = Path(folder, pod).read_text().strip()
    except OSError:
        sys.exit(f'Error from server (NotFound): pods "{pod}" not found')
    if not pid:
        sys.exit('error: unable to upgrade connection: container not found ("mpi")')
    try:
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        sys.exit(f"error: cannot exec into a container in a completed pod; current phase is Failed ({pod})")
    env = dict(os.fsdecode(entry).split("=", 1) for entry in entries if b"=" in entry)
    argv = ["nsenter", "--target", pid, "--mount", "--uts", "--pid", "--", *command]
    code = subprocess.run(argv, env=env, check=False).returncode
    if code:
        print(f"command terminated with exit code {code}", file=sys.stderr)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
