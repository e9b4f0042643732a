"""--report FILE.html: a page of one file for people."""

from __future__ import annotations

import re

from msgspec.structs import replace

from tests.preflight.cluster.job import Simulation
from tests.preflight.test_outputs import ALL, FATAL, HERE, RETRYABLE
from trainer_launch.model.findings import Report, Scope
from trainer_launch.preflight.cluster.present_nodes import PairTest, PairTests
from trainer_launch.preflight.fault_isolation import Faulty
from trainer_launch.preflight.report_page import page


def test_the_page_has_the_verdict_each_finding_with_its_remedy_and_what_passed() -> None:
    text = page(ALL, HERE, 30, 1.5e9)
    assert "<h1>Preflight FAILED: fix the job; a retry will not help</h1>" in text
    assert "node 1 of 2 (job-node-0-1); 2017-07-14 02:40:00+00:00; exit code 30; 2 failed, 1 warned" in text
    assert text.index("<b>FATAL shm</b>") < text.index("<b>FAIL dns (0-1)</b>") < text.index("<b>WARN cpu</b>")
    assert FATAL.action.replace("'", "&#x27;") in text
    assert FATAL.evidence[0] in text
    assert '<td class="" data-of="check">pids</td><td class="" data-of="result">passed</td>' in text


def of_ring(nodes: int, bad: int) -> PairTests:
    """Tests around the ring, with a node that fails always."""
    tests = []
    for node in range(nodes):
        ends = (node, node + 1) if node + 1 < nodes else (0, node)
        whys, rate = (("no", "no"), 0) if bad in ends else (("", ""), 10**9 + node)
        tests.append(PairTest(ends, whys, rate))
    return PairTests(tuple(f"node {node}" for node in range(nodes)), tuple(tests), Faulty(nodes=(bad,), rounds=2))


def bars(pairs: PairTests) -> list[tuple[str, str, str, str]]:
    """Each row of the picture: whether it is faulty, its nodes, its bar, and its figure."""
    text = page(ALL, HERE, 0, 1.5e9, pairs.names, pairs)
    cells = r'<tr class="(bad|)"><td>(.*?)</td><td class="bar"><i style="width:(.*?)%"></i></td><td>(.*?)</td></tr>'
    return re.findall(cells, text)


def test_each_pair_has_a_bar_by_its_slowest_test_the_slowest_first() -> None:
    tests = (PairTest((0, 1), ("", ""), 9_000_000), PairTest((0, 1), ("", ""), 5_000_000))
    failed = (PairTest((1, 2), ("", "no"), 7), PairTest((1, 2), ("", ""), 7))
    faster = PairTest((0, 2), ("", ""), 10_000_000)
    assert bars(PairTests(("a", "<b>\x1b[31m", "c"), (*tests, *failed, faster), Faulty(unresolved=((1, 2),)))) == [
        ("bad", "&lt;b&gt; - c", "0.0", "failed"),
        ("", "a - &lt;b&gt;", "50.0", "5 MB/s"),
        ("", "a - c", "100.0", "10 MB/s"),
    ]


def test_all_pairs_of_a_faulty_node_are_red_also_where_only_a_rail_of_it_is() -> None:
    assert [kind for kind, *_ in bars(of_ring(600, bad=300))] == ["bad"] * 2 + [""] * 254
    tests = (PairTest((0, 1), ("", ""), 9_000_000, 0), PairTest((0, 1), ("", "no"), 0, 1))
    assert [kind for kind, *_ in bars(PairTests(("a", "b"), tests, Faulty(rails=((1, (1,)),), rounds=2)))] == [
        "bad"
    ]


def test_what_the_cluster_preflight_has_tested_is_in_the_picture() -> None:
    job = Simulation(4, outcome=lambda node, partner: ("lost", 0) if 2 in (node, partner) else ("", 10**9))
    job.come(*range(4))
    names = job.hall.pair_tests.names
    failed = {nodes for _, nodes, _, figure in bars(job.hall.pair_tests) if figure == "failed"}
    assert failed >= {f"{names[1]} - {names[2]}", f"{names[2]} - {names[3]}"}


def test_the_page_of_node_0_has_all_nodes_the_faulty_first_and_the_pairs_as_a_picture() -> None:
    pairs = of_ring(4, bad=2)
    faulty = replace(RETRYABLE, scope=Scope.NODE, subject=pairs.names[2])
    absent = replace(RETRYABLE, scope=Scope.NODE, subject="node 4")
    text = page(Report(findings=(faulty, absent)), HERE, 20, 1.5e9, pairs.names, pairs)
    nodes = text[text.index("<h2>5 nodes</h2>") :]
    order = [nodes.index(f">{name}</td>") for name in (pairs.names[2], "node 4", pairs.names[0])]
    assert order == sorted(order)
    assert "<h2>Bandwidth between 4 nodes, 4 tests</h2>" in text
    assert text.count('class="bar"') == 4


def test_the_page_of_another_node_does_not_take_faults_of_others_for_its_own() -> None:
    other = replace(RETRYABLE, scope=Scope.NODE, subject="node 0 (job-node-0-0)")
    own = replace(RETRYABLE, scope=Scope.GPU, subject="GPU 3")
    text = page(Report(findings=(other, own, replace(FATAL, scope=Scope.JOB))), HERE, 20, 1.5e9)
    rows = re.findall(r'data-of="node">(.*?)</td>.*?data-of="checks">(.*?)</td>', text)
    assert sorted(rows) == [("node 0 (job-node-0-0)", "dns"), (HERE.name, "dns")]


def test_nothing_in_the_page_runs_loads_or_tells_a_secret() -> None:
    hostile = replace(
        FATAL, text="<script>alert(1)</script> token=ghp_0123456789abcdefghijABCDEFGHIJ012345 \x1b[31m"
    )
    text = page(Report(findings=(hostile,)), HERE, 30, 1.5e9)
    assert "<script" not in text
    assert "ghp_0123" not in text
    assert "\x1b" not in text
    assert "default-src 'none'" in text
