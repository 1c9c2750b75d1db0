"""A device of the tests' own, on a machine without one: tensors on "meta" that hold numbers, and refuse the CPU's."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
_CPU = torch.device("cpu")
# What is given to Python, or has a shape that depends on numbers: the host waits for it.
_WAITS = frozenset(("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim", "bincount"))


class PretendedDevice(TorchDispatchMode):
    """Within the block, tensors on the device "meta" compute: by the CPU's kernels, on memory of their own.

    Such a tensor and one of the CPU with dimensions meet in copies alone.

    Attributes:
        counts: How often the host copied to the device ("to"), and waited for it ("wait"), as it does to copy back.
        kernels: How often something was computed, by operation: of lists of tensors of one dtype at once, as on a GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.kernels: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        device = kwargs.get("device")
        if device != DEVICE and all(tensor.device != DEVICE for tensor in given):
            return func(*args, **kwargs)
        self._look(func, given, device, args)
        twins = {id(tensor): (tensor, _twin(tensor)) for tensor in given if tensor.device == DEVICE}
        args, kwargs = tree_map(lambda leaf: twins.get(id(leaf), (leaf, leaf))[1], (args, kwargs))
        result = func(*args, **(kwargs if device is None else {**kwargs, "device": _CPU}))
        for tensor, twin in twins.values():  # an `out` that was resized
            if tensor.shape != twin.shape:
                tensor.resize_(twin.shape)
        if device not in (None, DEVICE):
            return result
        kept = {id(tensor) for tensor in given} - twins.keys()
        return tree_map(lambda leaf: leaf if id(leaf) in kept else _sent(leaf, list(twins.values())), result)

    def _look(self, func: Any, given: list[Tensor], device: torch.device | None, args: Any) -> None:
        """Counts, and refuses what a device refuses."""
        name = func._schema.name.removeprefix("aten::")
        if name in ("copy_", "_to_copy"):
            into = given[0].device if name == "copy_" else device or given[0].device
            if into != given[-1].device:
                self.counts["to" if into == DEVICE else "wait"] += 1
        elif foreign := [tensor for tensor in given if tensor.device != DEVICE and tensor.ndim]:
            raise RuntimeError(
                f"Expected all tensors on one device, but {name} got one of {foreign[0].shape} on the CPU"
            )
        self.counts["wait"] += name in _WAITS
        self.kernels[name] += _kernels(func, name, args)


def _kernels(func: Any, name: str, args: Any) -> int:
    """Returns how many kernels compute an operation: none where it makes a view or room for numbers."""
    aliased = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    if "empty" in name or not all(alias.is_write for alias in aliased):
        return 0
    if not name.startswith("_foreach_"):
        return 1
    lists = [{tensor.dtype for tensor in part} for part in args if isinstance(part, (list, tuple))]
    together = all(len(dtypes) == 1 for dtypes in lists) and (name == "_foreach_copy_" or len(set().union(*lists)) == 1)
    return 1 if together else len(args[0])


def _twin(tensor: Tensor) -> Tensor:
    """Returns a tensor of the CPU over the same numbers."""
    storage: Any = tensor.untyped_storage()
    if not hasattr(storage, "numbers"):
        raise RuntimeError(f"Expected numbers on the device, but those of {tensor.shape} were copied out of Python")
    place = tensor.storage_offset(), tensor.shape, tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(storage.numbers, *place)


def _sent(result: Any, twins: list[tuple[Tensor, Tensor]]) -> Any:
    """Returns the device's tensor for one of the CPU: the one that it is the twin of, a view of it, or a new one."""
    if not isinstance(result, Tensor):
        return result
    numbers = result.untyped_storage()
    storage: Any = torch.empty(numbers.nbytes(), dtype=torch.uint8, device=DEVICE).untyped_storage()
    storage.numbers = numbers
    for tensor, twin in twins:
        if twin is result:
            return tensor
        if numbers.nbytes() and twin.untyped_storage().data_ptr() == numbers.data_ptr():
            storage = tensor.untyped_storage()
    place = result.storage_offset(), result.shape, result.stride()
    return torch.empty(0, dtype=result.dtype, device=DEVICE).set_(storage, *place)
