"""Three pods with a network of their own, seen from inside: prints what was found, as JSON. Run in `unshare`."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from trainer_launch.model import Process
from trainer_launch.rehearsal.faults import grammar
from trainer_launch.rehearsal.kubelet.pod_isolation import OwnNetwork

SERVER = """
import socket, threading
def hear(peer):
    with peer:
        while peer.recv(65536): pass
with socket.create_server(("", 5000)) as listening:
    print("listening", flush=True)
    while True: threading.Thread(target=hear, args=(listening.accept()[0],), daemon=True).start()
"""
REACH = """
import socket
try:
    socket.create_connection(("pod-2.job", 5000), timeout=1.5).close()
    print("yes")
except socket.gaierror: print("no such name")
except TimeoutError: print("silence")
except OSError as problem: print(problem)
"""
FREE = "import os; room = os.statvfs('/dev/shm'); print(room.f_bavail * room.f_frsize)"


def main(scratch: str) -> None:
    seen: dict[str, object] = {}
    with closing(OwnNetwork(Path(scratch))) as network:
        for number in range(3):
            network.add(f"pod-{number}", number, (f"pod-{number}.job",))

        def python(pod: str, code: str) -> str:
            process = network.wrap(pod, Process(name="x", argv=(sys.executable, "-c", code), env={}, cwd=scratch))
            return subprocess.run(process.argv, capture_output=True, text=True, check=True).stdout.strip()

        seen["place"] = python("pod-1", "import os, socket; print(socket.gethostname(), os.getcwd())")
        seen["links"] = python("pod-1", "import socket; print(*[name for _, name in socket.if_nameindex()])")
        wrapped = network.wrap("pod-2", Process(name="x", argv=(sys.executable, "-c", SERVER), env={}))
        with subprocess.Popen(wrapped.argv, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            server.stdout.readline()
            for text in ("partition", "delay dns 3s"):
                fault = grammar.parse(text)
                pod = "pod-2" if text == "partition" else None
                before = python("pod-0", REACH)
                network.begin(fault, pod)
                network.begin(fault, pod)
                network.end(fault, pod)
                during = python("pod-0", REACH)  # of two at once the last one's end counts
                network.end(fault, pod)
                seen[text] = [before, during, python("pod-0", REACH)]
            server.kill()
        free = [python("pod-0", FREE)]
        python("pod-0", "open('/dev/shm/left', 'w').write('of the old pod')")
        network.renew("pod-0")
        free.append(python("pod-0", FREE))
        seen["shm"] = list(map(int, free))
    print(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
