"""What importing a module brings."""

from __future__ import annotations

import pytest

from trainer_launch.pytorch.recorded_imports import Imports

NEEDS = {"torch": {"torch.nn", "json"}, "torch.nn": {"torch", "numpy"}, "numpy": {"json"}}


def imports() -> Imports:
    return Imports(dict.fromkeys(("json", "pickle", "numpy", "torch.nn", "torch")), NEEDS)


def test_an_import_brings_what_it_needs_in_the_order_in_which_that_appeared() -> None:
    assert imports().brought("torch") == ("json", "numpy", "torch.nn", "torch")
    assert imports().brought("torch.nn") == ("json", "numpy", "torch.nn", "torch")
    assert imports().brought("pickle") == ("pickle",)


def test_what_the_server_has_learnt_no_worker_looks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    found = imports()
    found.learn(["torch"])
    monkeypatch.delattr(Imports, "closure")
    assert found.brought("torch") == ("json", "numpy", "torch.nn", "torch")
