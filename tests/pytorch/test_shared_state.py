"""What `share` gives: every kind of state, to the last bit, from the newest rank to all that lack it."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.cli.launching import launch, script

pytestmark = [pytest.mark.process, pytest.mark.torch]

BEGIN = """
import torch
from torch import distributed
from trainer_launch.pytorch.shared_state import share

distributed.init_process_group("gloo")
rank = distributed.get_rank()

class Position:
    def __init__(self):
        self.taken = rank
    def state_dict(self):
        return {"taken": self.taken}
    def load_state_dict(self, state):
        self.taken = state["taken"]

def made(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 + seed)
    for _ in range(seed):  # a new rank's optimizer has no state yet
        model(torch.randn(8, 4)).sum().backward()
        optimizer.step()
    state = {"model": model, "optimizer": optimizer, "position": Position(), "step": seed}
    state["odd"] = [torch.randn(3).bfloat16(), {"flag": torch.rand(5) > 0.5, "scalar": torch.tensor(1.5 + seed)}]
    state["complex"] = torch.randn(2, 2, dtype=torch.complex64)
    state["turned"] = torch.randn(4, 3).t()  # not contiguous
    state["empty"], state["large"] = torch.empty(0), torch.randn(5_000_000)
    state["name"], state["count"] = f"rank {rank}", rank
    return state

def plain(value):
    value = value.state_dict() if hasattr(value, "state_dict") else value
    if isinstance(value, torch.Tensor):
        flat = value.detach().contiguous().reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), flat.numpy().tobytes())
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value
"""


def run(tmp_path: Path, body: str) -> tuple[int, str]:
    path = script(tmp_path, BEGIN + textwrap.dedent(body))
    ended = launch("run", "--nproc-per-node", "4", "--max-restarts", "0", "--incident-dir", "none", "--", path)
    return ended.returncode, ended.stdout + ended.stderr


def test_every_kind_of_state_arrives_as_it_was_and_in_place(tmp_path: Path) -> None:
    body = """
        state = made({0: 0, 1: 3, 2: 1, 3: 3}[rank])
        model, large = state["model"], state["large"]
        before, where = plain(state), [each.data_ptr() for each in (*model.parameters(), large)]
        assert share(state, "step", has_state=True, kept=4) == 3
        assert where == [each.data_ptr() for each in (*model.parameters(), large)], "in place"
        giver = 3 if rank == 3 else 1
        assert (state["name"], state["count"], state["position"].taken) == (f"rank {giver}", giver, giver)
        assert rank not in (1, 3) or plain(state) == before, "who is not behind keeps what it has"
        everybody = [None] * 4
        distributed.all_gather_object(everybody, plain(state))
        assert everybody[0] == everybody[1] == everybody[2]
    """
    code, output = run(tmp_path, body)
    assert code == 0, output


def test_of_equal_steps_a_rank_that_has_kept_its_state_is_newer_than_a_new_process(tmp_path: Path) -> None:
    body = """
        state = {"step": 7, "value": torch.full((3,), float(rank))}
        assert share(state, "step", has_state=rank == 2, kept=1) == 7
        assert state["value"].tolist() == [2.0, 2.0, 2.0]
    """
    code, output = run(tmp_path, body)
    assert code == 0, output


def test_where_nobody_is_behind_nothing_is_sent(tmp_path: Path) -> None:
    body = """
        state = {"step": 7, "value": torch.full((3,), float(rank))}
        assert share(state, "step", has_state=False, kept=0) == 7
        assert state["value"].tolist() == [float(rank)] * 3
    """
    code, output = run(tmp_path, body)
    assert code == 0, output


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            'share({"value": 1}, "step", has_state=True, kept=0)',
            "ValueError: share() needs the number of steps done",
        ),
        ('share({"step": 1.5}, "step", has_state=True, kept=0)', "as state['step'], and has 1.5"),
        (
            'share({"step": rank, "other" if rank else "one": 1}, "step", has_state=True, kept=0)',
            "ValueError: share(): the newest state has ['other', 'step'], and this rank's has ['one', 'step']",
        ),
        (
            'share({"step": rank}, "step", has_state=False, kept=2)',
            "RuntimeError: the last rank that had kept its state has ended",
        ),
    ],
    ids=["no step", "no whole number", "other names", "the last one is lost"],
)
def test_what_cannot_be_shared_is_one_clear_error(tmp_path: Path, body: str, error: str) -> None:
    code, output = run(tmp_path, body)
    assert code == 1, output
    assert error in output
