"""--report FILE.html: a page of one file for people."""

from __future__ import annotations

import re

from msgspec.structs import replace

from tests.preflight.cluster.test_heatmap_data import seen
from tests.preflight.test_outputs import ALL, FATAL, HERE, RETRYABLE
from trainer_launch.model.findings import Report, Scope
from trainer_launch.preflight.report_page import page


def test_the_page_has_the_verdict_each_finding_with_its_remedy_and_what_passed() -> None:
    text = page(ALL, HERE, 30, 1.5e9)
    assert "<h1>Preflight FAILED: fix the job; a retry will not help</h1>" in text
    assert "node 1 of 2 (job-node-0-1); 2017-07-14 02:40:00+00:00; exit code 30; 2 failed, 1 warned" in text
    assert text.index("<b>FATAL shm</b>") < text.index("<b>FAIL dns (0-1)</b>") < text.index("<b>WARN cpu</b>")
    assert FATAL.action.replace("'", "&#x27;") in text
    assert FATAL.evidence[0] in text
    assert '<td class="" data-of="check">pids</td><td class="" data-of="result">passed</td>' in text


def test_the_page_of_node_0_has_all_nodes_the_faulty_first_and_the_pairs_as_a_picture() -> None:
    pairs = seen(4, bad=2)
    faulty = replace(RETRYABLE, scope=Scope.NODE, subject=pairs.names[2])
    absent = replace(RETRYABLE, scope=Scope.NODE, subject="node 4")
    text = page(Report(findings=(faulty, absent)), HERE, 20, 1.5e9, pairs.names, pairs)
    nodes = text[text.index("<h2>5 nodes</h2>") :]
    order = [nodes.index(f">{name}</td>") for name in (pairs.names[2], "node 4", pairs.names[0])]
    assert order == sorted(order)
    assert "<h2>Bandwidth between 4 nodes, 4 tests</h2>" in text
    assert "<svg " in text


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
