"""What fuzzing begins with: the cases of other tests, and real outputs of programs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from msgspec import to_builtins

from tests.contracts import nasty
from tests.contracts.pods import CASES
from tests.rehearsal.controllers.manifests import cases as manifests
from trainer_launch.membership import protocol as coordination
from trainer_launch.membership.protocol import Claim
from trainer_launch.model.findings import Fault, Finding, Status
from trainer_launch.observability import node_view
from trainer_launch.preflight.cluster import preflight_messages as calling
from trainer_launch.preflight.report_formats import finding_as_json

_TESTS = Path(__file__).parents[1]
_BAD = Finding(check="dns", status=Status.FAIL, fault=Fault.NODE, text="no address", measured=1.5, evidence=("a",))


def of(name: str) -> list[bytes]:
    """The seeds of a target."""
    made = globals().get(f"_{name}")
    return [text if isinstance(text, bytes) else text.encode("utf-8", "replace") for text in made()] if made else []


def _pod() -> Iterator[str]:
    yield from (json.dumps(case["pod"]) for case in list(CASES.values())[::2])

    url = "https://s.svc:1/apis/trainer.kubeflow.org/v1alpha1/namespaces/n/trainjobs/j/status"
    token = {"KUBEFLOW_TRAINER_SERVER_TOKEN": "opaque-0123456789", "KUBEFLOW_TRAINER_SERVER_CA_CERT": "/c"}
    yield json.dumps({"env": {"KUBEFLOW_TRAINER_SERVER_URL": url, **token}})


def _json_config() -> Iterator[str]:
    for case in CASES.values():
        env = case["pod"].get("env", {})
        yield from (env[name] for name in ("TF_CONFIG", "MX_CONFIG") if name in env)


def _hosts() -> Iterator[bytes]:
    for number in range(5):
        for text in nasty.CONTENTS:
            yield bytes([number]) + text.encode("utf-8", "replace")
        yield bytes([number]) + b"a slots=2 max_slots=4\nb:2\n[::1]:3\nname-[0-3,08-10],c # x\necho d:1\n"


def _value() -> Iterator[bytes]:
    texts = (
        *nasty.VALUES[:60],
        "a,b=c",
        "k=v,l=w",
        "1-2",
        "500m",
        "16Gi",
        "1e3",
        "1.5m",
        "10Mbit/s",
        "'a b' c",
        "^=eth0,ib",
    )
    for number in range(10):
        for text in texts:
            yield bytes([number]) + text.encode("utf-8", "replace")


def _secrets() -> Iterator[str]:
    yield "--token=abc HF_TOKEN=hf_abcdefghijklmnop https://u:p@h/x?sig=abc Authorization: Bearer abcdefghijkl"
    yield "password: 'x y' \x1b[31m eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.abc -----BEGIN PRIVATE KEY-----"


_CONVERSATION = (
    coordination.Hello(coordination.VERSION, "job", 0, "n-0", "i0", claims=(Claim(3, 0, "0-2", True),)),
    coordination.Hello(coordination.VERSION, "job", 1, "n-1", "i1", 2, 1, "proof", workers=8, role="trainer"),
    coordination.Join("i0"), coordination.Join("i1", 1), coordination.Took(1), coordination.Store(1, "10.0.0.1", 4000),
    coordination.Failed(1, 0, 1, None, "boom", "ValueError"), coordination.Renew(), coordination.Done(1),
    coordination.Leave("bye"), coordination.StatusQuery(coordination.VERSION, "job"),
    coordination.Hello(coordination.VERSION, "job", 2, "n-2", "i2", 2**31 - 1),
)  # fmt: skip
_FROM_SERVER = (
    coordination.Challenge("ab"), coordination.Welcome(5.0), coordination.Refused("no", True),
    coordination.Quarantined("no", False),
    coordination.Waiting(1, 2, ("n-1",)), coordination.Formed(1, 0, 2, 0, True, Claim(1, 0, "0-1", False), 8, 16, 4, 8),
    coordination.Go(1, "h", 1), coordination.Restart(1, "x"), coordination.GiveUp("x", "n", 1, 1, None, "m"),
    coordination.Finished(), coordination.Status("running", 1, 0, 3, 1, 2, 2, ((0, "h", "up", 1.0),), 0.5, 1.0, None),
)  # fmt: skip
_CALLED = (
    calling.Present(calling.VERSION, "job", 0, "n-0", "i0", 4000), calling.Present(calling.VERSION, "job", 1, "n-1", "i1", 1),
    calling.Time(1.5), calling.Record({"torch": "2.13", "ENV NCCL_X": "1"}, 0.1, 0.1, (_BAD,), tokens={"/ckpt": "i0"}),
    calling.Result(1, (calling.Seen("", 10**9),)), calling.Found((_BAD,)), calling.Alive(),
    coordination.Hello(coordination.VERSION, "job", 1, "n-1", "i1"),
    calling.Waiting(1, 2, ("a",), 3.0), calling.TimeIs(1.0, 2.0, 3.0), calling.Complete("salt", ("i0", "i1")),
    calling.Test(1, 0, 2, "h", 1, "tok", 5.0), calling.Decided((_BAD,)),
    calling.Refused("no", False), calling.Here("dns"),
)  # fmt: skip


def _coordinator_lines() -> Iterator[bytes]:
    yield from (coordination.render(message).strip() for message in (*_CONVERSATION, *_FROM_SERVER))


def _cluster_preflight_lines() -> Iterator[bytes]:
    yield from (calling.render(message).strip() for message in _CALLED)


def _coordinator_talk() -> Iterator[bytes]:
    lines = [coordination.render(message).strip() for message in _CONVERSATION]
    for job in range(3):
        told = [bytes([48 + number % 2]) + line for number, line in enumerate(lines)]
        yield bytes([job]) + b"\n".join(
            [b"0+", b"1+", *told, b"0-", b"1t", b"\x60t", b"0+", told[0], b"0" + lines[2]]
        )
        both = [lines[0], lines[2], lines[4], lines[5], lines[8]], [lines[1], lines[3], lines[4], lines[8]]
        yield bytes([job]) + b"\n".join([b"0" + line for line in both[0]] + [b"1" + line for line in both[1]])


def _cluster_preflight_talk() -> Iterator[bytes]:
    lines = [calling.render(message).strip() for message in _CALLED]
    for flags in (0, 1, 4, 12):
        told = [b"0" + lines[0], b"1" + lines[1], b"0" + lines[3], b"1" + lines[3]]
        told += [
            b"0" + lines[7],
            b"1" + lines[7],
            b"0" + lines[4],
            b"1" + lines[4],
            b"0" + lines[5],
            b"0" + lines[8],
        ]
        yield bytes([flags]) + b"\n".join(told)
        yield bytes([flags]) + b"\n".join([*told, b"0-", b"1t", b"0" + lines[0], b"\x60t"])


def _findings() -> Iterator[str]:
    yield json.dumps({"format": "trainer-launch-preflight", "version": 2, "findings": [finding_as_json(_BAD)]})


def _manifest() -> Iterator[str]:
    yield from (case["manifest"] for case in list(manifests().values())[::2])
    yield (
        "kind: PyTorchJob\napiVersion: kubeflow.org/v1\nmetadata:\n  name: job\n  labels:\n    a: b\nspec:\n"
        "  pytorchReplicaSpecs:\n    Worker:\n      replicas: 2\n      template:\n        spec:\n          containers:\n"
        "          - name: pytorch\n            command: [python, train.py]\n            env:\n            - name: A\n"
        "              value: x\n            - name: B\n              valueFrom:\n                configMapKeyRef:\n"
        "                  name: c\n                  key: k\n            resources:\n              limits:\n"
        "                cpu: 1\n                nvidia.com/gpu: 1\n            volumeMounts:\n            - name: v\n"
        "              mountPath: /etc/v\n              subPathExpr: $(A)\n          volumes:\n          - name: v\n"
        "            configMap:\n              name: c\n              items:\n              - key: k\n                path: p/q\n"
        "---\nkind: ConfigMap\napiVersion: v1\nmetadata:\n  name: c\ndata:\n  k: value\n"
    )


def _fault() -> Iterator[str]:
    yield from (
        "kill worker node=1 at=step:40",
        "stop worker for=20s at=1m",
        "delay dns 20s",
    )
    yield from (
        "term pod pod=job-0 grace=5s back=never at=line:'loss [0-9]+'",
        "partition 5s node=0",
    )


def _fault_file() -> Iterator[str]:
    yield "faults:\n- kill worker node=1 at=step:40\n- {fault: partition, node: 1, for: 10s, at: 30s}\n- fault: kill pod\n  pod: a\n"


def _command() -> Iterator[str]:
    for line in (
        "torchrun --nnodes 2 --nproc-per-node=4 --rdzv-conf a=b,c=d -m pkg.mod --x", "torchrun --nproc_per_node auto -t 3 t.py",
        "mpirun -np 4 -H a:2,b:2 -x A,B=c --mca btl tcp --bind-to none python t.py", "mpiexec -f hosts -n 2 -genv A b ./x : -n 1 y",
        "horovodrun -np 4 --min-np 2 -H a:2 --blacklist-cooldown-range 1 2 -p 22 --mpi-args=--x python t.py", "python -um mod a",
        "python3.11 -W ignore -X dev t.py --lr 1", "bash -c ls", "-m torch.distributed.run --standalone t.py", "-np 2 -p22 python",
    ):  # fmt: skip
        yield line.replace(" ", "\0")
        yield "\0".join(line.split()[1:])


def _setting() -> Iterator[str]:
    yield "grace=60\0nodes=1:3\0nproc_per_node=auto\0master_port=29500\0hosts=a:2,b:2\0signals=USR1=checkpoint"
    yield "shrink_after=0\0wait_timeout=1h30m\0grace=nan\0metrics_port=0\0ssh_port=22\0min_nodes=2\0nodes=2"
    yield "engine=mpi\0prefix=true\0color=always\0port_range=1-2\0preload=numpy\0hang_timeout=auto\0unknown_thing=1\0deadline=1e3"


def _option() -> Iterator[str]:
    yield from (
        "USR1=checkpoint,TERM=drain",
        "RTMIN+1=forward",
        "gemm=0.85,pair=0.3,pair-mbps=10",
        "dns,shm",
        "HF_TOKEN,A",
        "60",
    )
    yield from ("python 'a b' c", "auto", "8Gi", "1_0", "\u0663")


def _reference() -> Iterator[bytes]:
    yield (_TESTS.parent / "trainer_launch/preflight/references.json").read_bytes()[:6000]
    row = {"model": "H100", "measure": "gemm", "value": 1.5, "unit": "TFLOP/s", "source": "me"}
    yield json.dumps({"format": "trainer-launch-references", "version": 1, "references": [row]}).encode()
    yield json.dumps(
        {"format": "trainer-launch-preflight", "version": 2, "verdict": "pass", "measured": [row]}
    ).encode()


def _agents_note() -> Iterator[str]:
    yield json.dumps({"reason": "OOM", "rank": 1, "exit_code": 1, "timestamp": 1.5, "lines": ["a"], "message": "m"})
    yield (
        json.dumps({"event": "generation_formed", "time_s": 1.5, "generation": 1, "nodes": 2, "restarts": 0}) + "\n"
    )


def _report() -> Iterator[str]:
    more = {"step": 3, "progress": 0.5, "eta_s": 10.5, "metrics": {"loss": 0.5, "a b": 1}}
    yield json.dumps({"rank": 0, "local_rank": 0, "pid": 7, "at_s": 1.0, "time_s": 1.7e9, **more})


def _launchers_view() -> Iterator[str]:
    view = node_view.View(
        version="0", pid=1, started_ticks=2, run_dir="/r", host="h", node_rank=0, contract="c", engine="e", phase="running",
        since_s=1.0, started_s=1.0, processes=(("a", 1),), exits=(("a", 1),), job="j", coordinator=("h", 1),
    )  # fmt: skip
    text = json.dumps(to_builtins(view))
    yield text.replace('"pid": 1', '"pid": @PID').replace('"started_ticks": 2', '"started_ticks": @TICKS')


def _childs_answer() -> Iterator[str]:
    yield '{"hostname":"h","before":[["a",1]]}'
    yield '{"stage":"write"}\n{"errno":28}\n{"values":{"same":1.0,"seconds":0.5}}'
    yield '{"rate":1000,"why":""}'
    yield '{"rails":[["",1000]]}'
    yield 't {"hello":["a","b"]}\nt {"pairs":[[0,1,0.5,1000]]}'
    yield '[["gemm",1.5,"TFLOP/s","H100",0]]'
    yield '[[0,"GPU-1","kind","abc"]]'


def _gpu_answer() -> Iterator[str]:
    facts = {
        "name": ["known", "H100"],
        "uuid": ["known", "GPU-1"],
        "ecc": ["unsupported"],
        "temp": ["unknown", "x"],
    }
    told = {"trouble": "", "driver": ["known", "550"], "log": ["known", [["0:1", 79, 5]]]}
    yield json.dumps({**told, "gpus": [{"index": 0, "lost": "", "facts": facts}]})
    watched = {
        "index": 0,
        "busy": 3,
        "xids": ["known", [79]],
        "reasons": {"4": 2},
        "facts": {"sm": ["known", [1, 2, 3]]},
    }
    yield json.dumps({"trouble": "", "gpus": [watched]})
    for line in (
        {"stage": "gemm"}, {"facts": {"torch": "2"}}, {"figures": [["gemm", 1.5, "TFLOP/s"]]}, {"ending": "done"},
        {"checksum": "ab", "repeats": 3, "different": 0}, {"tested_bytes": 1, "wrong_words": 0}, {"why": "x", "ending": "import"},
        {"sums_right": True, "lines": ["Using network IB"]}, {"peers": {"rate": 1.5, "why": "", "size": 2, "good": True}},
    ):  # fmt: skip
        yield json.dumps(line)


def _symptom() -> Iterator[str]:
    yield "Traceback (most recent call last):\n  File \"t.py\", line 1, in <module>\nModuleNotFoundError: No module named 'x'"
    yield "[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1 GiB\nterminate called after throwing an instance of"
    yield "RuntimeError: [1] is setting up NCCL communicator\nncclSystemError: System call (e.g. socket, malloc) failed\nNCCL WARN x"
    yield "RuntimeError: CUDA error: uncorrectable ECC error encountered\nNVRM: Xid (PCI:0000:01:00): 79, pid=1, GPU has fallen off"
    yield "F0000 00:00:1700000000.1 1 x.cc:1] no\nOSError: [Errno 28] No space left on device\nfoo.DataLoader worker (pid 1) Bus error"
    for path in sorted((_TESTS / "supervisor").glob("*.txt")):
        yield path.read_text(encoding="utf-8")[:4000]


def _stacks() -> Iterator[str]:
    yield (
        'Thread 0x00007f00 (most recent call first):\n  File "/usr/lib/python3.11/threading.py", line 320 in wait\n\n'
        'Current thread 0x00007f01 (most recent call first):\n  File "/x/site-packages/torch/distributed/c10d.py", line 10 in '
        'all_reduce\n  File "/app/train.py", line 31 in main\n'
    )


def _mpi_output() -> Iterator[str]:
    yield "mpirun noticed that process rank 3 with PID 0 on node a exited on signal 9 (Killed).\n  Exit code:    1\n"
    yield "=   BAD TERMINATION\n=   RANK 1 PID 7 RUNNING AT b\n=   EXIT CODE: 9\n=   KILLED BY SIGNAL: 9\nAbort(1) on node 1 (rank 1 in comm 0): x"
    yield "Process 3 exit with status code 1.\nProcess name: a[1]\nssh not successful for host a:\nTimed out waiting for x\n[1]<stderr>:ssh: x"
    yield "mpirun (Open MPI) 4.1.4\nHYDRA build details:\n    Version: 4.0.2\nIntel(R) MPI Library for Linux* OS, Version 2021.1"
    yield "T begin\nT mpirun /usr/bin/mpirun\nT version mpirun (Open MPI) 4.1.4\nT daemon orted /x\nT cpus 4\nT called 10.0.0.1 x\nT end\nhi"
    yield "ssh: connect to host a port 22: Connection refused\nHost key verification failed.\nroot@a: Permission denied (publickey)."


def _heard() -> Iterator[bytes]:
    yield b"epoch 1\rstep 5 loss 0.5\r\n[0] step: 7/100\n\nloss" + b"x" * 300
    yield b"[pod:0] step=1\n[pod:1] step=2\n" * 20


def _request() -> Iterator[bytes]:
    yield b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n"
    yield b"HEAD /metrics?x HTTP/1.0\r\n\r\n"
    yield b"POST / HTTP/1.1\r\n\r\n"


def _key_file() -> Iterator[bytes]:
    yield b"-----BEGIN OPENSSH PRIVATE KEY-----\r\nAAAA\r\n-----END OPENSSH PRIVATE KEY-----\r\n"
    yield b"ssh-rsa AAAAB3NzaC1yc2EAAAADAQABAAAB user@host\n"


def _kernel_file() -> Iterator[bytes]:
    texts = (
        "100000 100000", "max", "1000", "1000", "inactive_file 5\nx 1", "100", "3", "oom_kill 2\n", "0::/a/b\n3:cpu,cpuacct:/x",
        "CapEff:\t000001ffffffffff\nSigCgt:\t00ff\n", "tmpfs /dev/shm tmpfs rw,nosuid 0 0", "7 (a) b) S 1 7 7 " + "0 " * 40,
        "voluntary_ctxt_switches:\t5\nSigCgt:\t2", "7f00-7f01 r--p 0 fd:01 12 /x", "32768 60999", "1-5,7",
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54", "Model: \t NVIDIA H100", "6,1,5,-;NVRM: Xid (PCI:0000:01): 79, x",
        "4: ACTIVE", "400 Gb/sec (4X NDR)",
    )  # fmt: skip
    for number, text in enumerate(texts):
        yield bytes([number]) + text.encode()


def _variables() -> Iterator[str]:
    yield 'PATH=/bin\0A=b c"d\\e\0HF_TOKEN=hf_x\0CUDA_VISIBLE_DEVICES=0,1,GPU-x\0LINES=a\nb\0SSH_X=1\0TRAINER_LAUNCH_X=1'


def _argv() -> Iterator[bytes]:
    lines = (
        "--nodes=1:4 --nproc-per-node auto --no-prefix -- torchrun t.py", "--help", "--grace -1 x",
        "--level node --threshold gemm=0.8 --only dns,shm --json --warnings pass", "--pod p.json --json --save-pod s.json -- a",
        "--ssh-port 2222 --forward-env A,B", "--fault kill@worker -f j.yaml --nodes 2 -- a", "--json --pid 4242", "bash",
    )  # fmt: skip
    for number, line in enumerate(lines):
        for command in {number % 7, max(0, number - 2) % 7}:
            yield bytes([command]) + line.replace(" ", "\0").replace("@", " ").encode()


def _stand_ins() -> Iterator[str]:
    for line in (
        "-o PasswordAuthentication=no -o StrictHostKeyChecking=no -p 22 -xl me host HOROVOD_LOCAL_RANK=1 python t.py", "-- -host id",
        "exec pod/a -c main -n ns -i -- orted -mca x y", "exec --container=main a -- sh -c ls", "exec .. -- id", "get pods",
    ):  # fmt: skip
        yield line.replace(" ", "\0")


def _ssh_said() -> Iterator[str]:
    yield "user root\nport 2222\nsetenv A=b\nssh: connect to host a port 22: Connection refused"
    yield "CapEff:\t00000000a80425fb\n/run/sshd must be owned by root and not group or world-writable"
    yield "Missing privilege separation directory: /run/sshd\n\x1b[31mroot@a: Permission denied (publickey).\r\n"


def _proc_file() -> Iterator[str]:
    row = "0: 00000000:733C 00000000:0000 0A 00000000:00000000 00:00000000 00000000 0 0 41 1 0 100 0 0 10 0"
    yield f"  sl local rem st\n {row}\n"
    yield "12 13\n"
    yield "RANK=3\0OMPI_COMM_WORLD_LOCAL_RANK=1\0A\0=b"


def _line_pattern() -> Iterator[str]:
    yield from (
        "loss [0-9.]+ acc .*",
        "(?i)epoch|saved",
        "([a-z]+ )+x",
        "[0-9]+(\\.[0-9]{1,3}){3}",
        "(?<=a)b(?!c)",
        "(a)\\1+$",
        "x*?y{2,}",
    )


def _other_end() -> Iterator[bytes]:
    yield b"".join(coordination.render(message) for message in _FROM_SERVER)
    yield b"".join(calling.render(message) for message in _CALLED)
    yield b"Welcome\r\nSSH-2.0-OpenSSH_9.2p1\r\n"
    yield b"HTTP/1.1 400 Bad Request\r\n\r\n"


def _ending() -> Iterator[str]:
    note = {
        "reason": None,
        "rank": 1,
        "local_rank": 0,
        "exit_code": 1,
        "signal": None,
        "timestamp": 1.5,
        "hostname": "h",
    }
    for more in ({}, {"reason": "Hung", "message": "m", "lines": ["a"], "why_not_again": "x"}, {"signal": 9}):
        for printed in (_symptom(), _mpi_output(), ["Exit code: 0", "Process 3 exit with status code 0."]):
            yield "\n".join([json.dumps({**note, **more}), *printed])[:4000]
