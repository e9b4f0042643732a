"""The newest state of all ranks goes to those that lack it, piece by piece along a chain of ranks."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from msgspec import Struct

_PIECE_BYTES = 16 << 20


class PartialStateError(RuntimeError):
    """The state has arrived only in part, so that this process has none any more."""


class _Hole(Struct, frozen=True):
    """The place of a tensor in a state."""

    shape: tuple[int, ...]
    dtype: Any
    on_device: bool


def share(state: Mapping[str, Any], step: str, *, has_state: bool, kept: int) -> int:
    """Do as `Generation.share` promises; the default process group has to be there.

    Args:
        state: what is shared.
        step: the name of the number of steps in it.
        has_state: whether this process has the state of the last generation.
        kept: how many processes have it, as far as the launcher knows.

    Returns:
        The step of the newest state.

    Raises:
        PartialStateError: a rank was lost while this one received.
    """
    import torch
    from torch import distributed

    count = state.get(step)
    if isinstance(count, torch.Tensor):
        count = int(count)
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise ValueError(f"share() needs the number of steps done as state[{step!r}], and has {count!r}")
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    device = _device()
    steps = torch.zeros(world_size, 2, dtype=torch.int64, device=device)
    steps[rank] = torch.tensor([has_state, count])
    distributed.all_reduce(steps)
    all_steps = [(bool(is_kept), int(done)) for is_kept, done in steps.tolist()]
    chain = chain_of(all_steps, kept)
    if len(chain) > 1 and rank in chain:
        at = chain.index(rank)
        link = _Link(chain[at - 1] if at else None, chain[at + 1] if at + 1 < len(chain) else None, device)
        _take(state, link) if at else _give(state, link)
    return all_steps[chain[0]][1]


def chain_of(steps: Sequence[tuple[bool, int]], kept: int) -> list[int]:
    """The rank with the newest state, then the ranks that lack it.

    Args:
        steps: for each rank whether it has kept its state, and the step of what it has.
        kept: how many have kept theirs, as far as the launcher knows.

    Raises:
        RuntimeError: all of those have ended meanwhile.
    """
    newest = max(steps)
    if kept and not newest[0]:
        raise RuntimeError("the last rank that had kept its state has ended; restart from the last checkpoint")
    return [steps.index(newest), *(rank for rank, own in enumerate(steps) if own < newest)]


def _device() -> Any:
    """The device from which the default group sends."""
    import torch
    from torch import distributed

    backend = distributed.get_backend()
    if "gloo" in backend or "mpi" in backend:
        return torch.device("cpu")
    return torch.device("xpu" if "xccl" in backend else "cuda")


class _Link:
    """A rank's place in the chain: bytes come from the rank before, and go on to the next one."""

    def __init__(self, before: int | None, after: int | None, device: Any) -> None:
        self._before, self._after, self.device = before, after, device

    def pass_on(self, data: Any) -> None:
        """Send or receive these bytes, a flat tensor of uint8, which has them afterwards."""
        import torch
        from torch import distributed

        sent: Any = None
        for start in range(0, data.numel(), _PIECE_BYTES):
            piece = data[start : start + _PIECE_BYTES]
            carried = piece.to(self.device)
            if self._before is not None:
                carried = carried if carried is piece else torch.empty_like(carried)
                distributed.recv(carried, self._before)
                if carried is not piece:
                    piece.copy_(carried)
            if self._after is not None:
                if sent is not None:
                    sent.wait()
                sent = distributed.isend(carried, self._after)
        if sent is not None:
            sent.wait()

    def pass_message(self, message: bytes | None) -> bytes:
        """Send or receive bytes of any length."""
        import torch

        size = torch.tensor([len(message or b"")], dtype=torch.int64).view(torch.uint8)
        self.pass_on(size)
        data = torch.frombuffer(bytearray(message or bytes(int(size.view(torch.int64)))), dtype=torch.uint8)
        self.pass_on(data)
        return bytes(data.numpy())


def _give(state: Mapping[str, Any], link: _Link) -> None:
    tensors: list[Any] = []
    plan = {name: _emptied(_content(value), tensors) for name, value in state.items()}
    link.pass_message(pickle.dumps(plan))
    for tensor in tensors:
        flat = _bytes_of(tensor.detach().contiguous())
        link.pass_on(flat)


def _take(state: Mapping[str, Any], link: _Link) -> None:
    plan: dict[str, Any] = pickle.loads(link.pass_message(None))
    if plan.keys() != state.keys():
        raise ValueError(f"share(): the newest state has {sorted(plan)}, and this rank's has {sorted(state)}")
    for name, emptied in plan.items():
        own = state[name]
        content = _content(own)
        try:
            content = _filled(emptied, content, link)
        except RuntimeError as error:
            raise PartialStateError(f"share(): the state has arrived only in part: {error}") from error
        if hasattr(own, "load_state_dict"):
            own.load_state_dict(content)
        elif content is not own:
            if not isinstance(state, MutableMapping):
                raise ValueError(f"share(): state[{name!r}] has to be replaced, and the state is not a dict")
            state[name] = content


def _content(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _emptied(value: Any, tensors: list[Any]) -> Any:
    """A value with holes for its tensors, which are listed in the order of the holes."""
    import torch

    if isinstance(value, torch.Tensor):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise ValueError(f"share() takes state that all ranks have alike, and no {type(value).__name__}")
        tensors.append(value)
        return _Hole(tuple(value.shape), value.dtype, value.device.type != "cpu")
    if isinstance(value, Mapping):
        return {key: _emptied(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_emptied(item, tensors) for item in value)
    return value


def _filled(emptied: Any, own: Any, link: _Link) -> Any:
    """The value again; a tensor that this rank has in the same place and form is filled in place."""
    import torch

    if isinstance(emptied, _Hole):
        fits = isinstance(own, torch.Tensor) and (tuple(own.shape), own.dtype) == (emptied.shape, emptied.dtype)
        place = link.device if emptied.on_device else "cpu"
        target = own.detach() if fits else torch.empty(emptied.shape, dtype=emptied.dtype, device=place)
        whole = target if target.is_contiguous() else target.contiguous()
        link.pass_on(_bytes_of(whole))
        if whole is not target:
            target.copy_(whole)
        return own if fits else target
    if isinstance(emptied, dict):
        mine = own if isinstance(own, Mapping) else {}
        return {key: _filled(item, mine.get(key), link) for key, item in emptied.items()}
    if type(emptied) in (list, tuple):
        items = own if isinstance(own, Sequence) and len(own) == len(emptied) else [None] * len(emptied)
        return type(emptied)(_filled(item, each, link) for item, each in zip(emptied, items, strict=True))
    return emptied


def _bytes_of(tensor: Any) -> Any:
    """The memory of a contiguous tensor."""
    import torch

    return tensor.reshape(-1).view(torch.uint8)
