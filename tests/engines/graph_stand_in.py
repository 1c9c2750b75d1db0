"""A stand-in for CUDA graphs on the CPU: records every operation of torch and does it again into the same memory.

Stricter than a GPU in what it shows: after a capture all that was written is put back, as a capture does not do the
work, and before a replay all that other graphs have computed is spoilt, as graphs share their memory.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_WAITING = ("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select", "aten.equal", "aten.is_nonzero")


def _tensors(*trees: Any) -> list[Tensor]:
    return [leaf for tree in trees for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class NoWaiting(TorchDispatchMode):
    """Raises where a GPU would have to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith(_WAITING):
            raise RuntimeError(f"called a synchronizing operation: {func}")
        return func(*args, **(kwargs or {}))


class Tape(NoWaiting):
    """Records operations; tensors that they make stay alive."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.made: dict[int, Tensor] = {}
        self.outside: dict[int, tuple[Tensor, Tensor]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors(args, kwargs)
        for tensor in given:
            if _address(tensor) not in self.made and _address(tensor) not in self.outside:
                whole = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
                self.outside[_address(tensor)] = (whole, whole.clone())
        result = super().__torch_dispatch__(func, types, args, kwargs)
        here = {_address(tensor) for tensor in given}
        new = [tensor for tensor in _tensors(result) if _address(tensor) not in here]
        for tensor in new:
            self.made.setdefault(_address(tensor), tensor)
        is_view = not new and not func._schema.is_mutable and "batch_norm" not in str(func)
        if not is_view:
            # References of one's own: a tensor that autograd frees must not give its address to another one.
            self.steps.append((func, args, kwargs, _tensors(result)))
        return result

    def put_back(self) -> None:
        for whole, before in self.outside.values():
            whole.copy_(before)
        self.spoil()

    def spoil(self) -> None:
        for tensor in self.made.values():
            torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).fill_(
                0xFF if tensor.is_floating_point() else 0
            )

    def play(self) -> None:
        for func, args, kwargs, results in self.steps:
            fresh = _tensors(func(*args, **kwargs))
            for into, value in zip(results, fresh, strict=True):
                if _address(into) != _address(value):
                    into.copy_(value)


class StandIn:
    """What ``CudaGraphs`` is, on the CPU."""

    def __init__(self) -> None:
        self.tapes: list[Tape] = []
        self.replays = 0

    def warm_up(self, work: Callable[[], Any]) -> None:
        work()
        with NoWaiting():
            work()

    def capture(self, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        tape = Tape()
        try:
            with tape:
                result = work()
        finally:
            with torch.no_grad():
                tape.put_back()
        self.tapes.append(tape)

        def replay() -> None:
            self.replays += 1
            with torch.no_grad():
                for other in self.tapes:
                    if other is not tape:
                        other.spoil()
                tape.play()

        return replay, result
