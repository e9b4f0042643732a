"""A maintainer's questions are answered by names: the noun of each leads to one module, and that has the answer."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.architecture.package import FILES, PACKAGE, name_of, tree_of

# The question, what a maintainer searches for among the modules' names, the module, and what answers there.
QUESTIONS = [
    ("how is a node declared lost", "membership", "membership/membership.py", "_lose"),
    (
        "where is the termination message written",
        "termination message",
        "observability/termination_message.py",
        "conclude",
    ),
    ("what does the DNS check do", "preflight dns", "preflight/container/dns_checks.py", "dns"),
    ("which variables does a JAXJob inject", "contracts jax", "contracts/v1_jobs.py", "JAX"),
    ("who may form a generation without node 0", "election", "membership/election.py", "may_form"),
    ("how does a generation get its ranks", "generation", "membership/generation.py", "_ranks"),
    ("when is a failure not repeated", "retry policy", "membership/retry_policy.py", "why_not_again"),
    ("how long is a silent node waited for", "timeouts", "membership/timeouts.py", "LEASE_S"),
    ("how is a worker forked from warm torch", "fork server process", "pytorch/fork_server_process.py", "main"),
    ("what do PID 1 and the fork server say to each other", "messages", "pytorch/messages.py", "Forked"),
    ("when does a worker count as hung", "hang detection", "supervisor/hang_detection.py", "judge"),
    ("why did a process die", "failure", "supervisor/failure.py", "classify"),
    ("how much memory may this container use", "cgroup", "host/cgroup.py", "memory_limit_bytes"),
    (
        "how is a program with a deadline run and killed",
        "deadline subprocess",
        "host/deadline_subprocess.py",
        "run",
    ),
    ("how are all descendants of a process killed", "process tree", "host/process_tree.py", "kill"),
    ("how far has an MPI host come", "host readiness", "mpi/host_readiness.py", "ready"),
    ("how does mpirun reach the other hosts", "ssh client", "mpi/ssh_client.py", "Client"),
    ("how many workers does this node get", "topology", "planning/topology.py", "place"),
    ("which values are hidden in logs", "redaction", "model/redaction.py", "redact"),
    ("what does an exit code mean", "exit codes", "model/exit_codes.py", "MISCONFIGURED"),
    (
        "which node or link is faulty after the pair tests",
        "fault isolation",
        "preflight/fault_isolation.py",
        "verdict",
    ),
    ("what is written to the event log", "event log", "observability/event_log.py", "File"),
    (
        "how are a PyTorchJob's pods made on a laptop",
        "controllers pytorch",
        "rehearsal/controllers/v1_pytorch.py",
        "read",
    ),
    ("what can --fault say", "faults grammar", "rehearsal/faults/grammar.py", "parse"),
]


def found_by(words: str) -> list[str]:
    """The modules whose path has all these words, the last one in its own name; the shortest name is first."""
    *folders, noun = words.split()
    hits = [name_of(path) for path in FILES if path.name != "__init__.py" and has(path, folders, noun)]
    return sorted(hits, key=lambda name: (len(Path(name).stem), len(name), name))


def has(path: Path, words: list[str], noun: str) -> bool:
    """Whether the file's own name has the noun, and its path the other words."""
    return noun in path.stem and all(word in name_of(path) for word in words)


def defined_in(path: Path) -> set[str]:
    """What a module defines at its top."""
    found: set[str] = set()
    for node in tree_of(path).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return found


@pytest.mark.parametrize(("question", "words", "module", "answer"), QUESTIONS, ids=lambda text: text[:60])
def test_a_search_among_the_names_of_files_leads_to_the_answer(
    question: str, words: str, module: str, answer: str
) -> None:
    assert found_by(words)[:1] == [module], question
    assert answer in defined_in(PACKAGE / module), question
