"""The user's own code: the hooks of Lightning that it overrides, the names in it, and where it keeps its state."""

import functools
import inspect
import random
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from inspect import signature
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision, Precision
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from lightning_fed.core.seeding import GENERATORS
from lightning_fed.errors import FederatedError

__all__ = [
    "TRANSFER_HOOKS", "BatchTransfer", "Held", "accepts", "batch_transfer", "describe", "is_ours", "is_own",
    "lightning_class", "loss_of", "overrides", "own_places", "own_uses", "requires",
]  # fmt: skip

# The package `lightning` holds what is published as `pytorch_lightning` and `lightning_fabric` too.
PACKAGES = ("lightning.pytorch.", "lightning.fabric.", "pytorch_lightning.", "lightning_fabric.")
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
# Packages whose code is known here, as Python's standard library is.
_KNOWN = {"torch", "torchvision", "torchmetrics", "lightning", "pytorch_lightning", "lightning_fed", "numpy"}
_KNOWN |= sys.stdlib_module_names - {"__main__"}


def lightning_class(kind: Any, name: str) -> Any:
    """Returns the class of Lightning's own, such as LightningModule, that a class derives from, None if it does not."""
    found = (base for base in kind.__mro__ if base.__name__ == name and base.__module__.startswith(PACKAGES))
    return next(found, None)


def is_ours(hook: Any) -> bool:
    """Says whether a hook, bound to its arguments or not, is code of this package or of Lightning."""
    return str(getattr(hook, "func", hook).__module__).startswith(("lightning_fed.", *PACKAGES))


def overrides(part: Any, hook: str) -> bool:
    """Says whether the user's LightningModule or LightningDataModule overrides a hook."""
    kind = type(part)
    parent = lightning_class(kind, "LightningModule") or lightning_class(kind, "LightningDataModule")
    return parent is not None and bool(is_overridden(hook, part, parent))


def accepts(function: Callable[..., Any], name: str, at_least: int) -> bool:
    """Says whether a step function takes an argument, by name or as one of ``at_least`` positional ones."""
    parameters = signature(function).parameters.values()
    if any(p.name == name or p.kind == p.VAR_POSITIONAL for p in parameters):
        return True
    return len(list(parameters)) >= at_least


def requires(function: Callable[..., Any], name: str) -> bool:
    """Says whether a step function has an argument of a name without a default."""
    parameter = signature(function).parameters.get(name)
    return parameter is not None and parameter.default is parameter.empty


def loss_of(output: Any, module: LightningModule) -> Tensor:
    """Returns the loss in what ``training_step`` returned; it may lack a graph where no gradients are recorded."""
    loss = output.get("loss") if isinstance(output, dict) else output
    if isinstance(loss, Tensor) and loss.numel() == 1 and (loss.requires_grad or not torch.is_grad_enabled()):
        return loss
    if not isinstance(loss, Tensor):
        got = "a dict without a tensor under 'loss'" if isinstance(output, dict) else repr(type(output).__name__)
        got = "None" if output is None else got
    elif loss.numel() != 1:
        got = f"a tensor of shape {tuple(loss.shape)}: reduce it, for example with `.mean()`"
    else:
        got = "a loss that does not depend on any trainable parameter"
    raise FederatedError(
        f"Expected `{type(module).__name__}.training_step` to return a scalar loss tensor or a dict with one under "
        f"'loss', got {got}."
    )


@dataclass(frozen=True)
class BatchTransfer:
    """Moves a batch to the device and precision; it is called with the batch and the index of its data set.

    Attributes:
        stages: Functions of batch and index, applied in turn, each to the result of the one before.
        converts: Whether they change each number by itself, so that batches of several clients may be moved at once.
    """

    stages: list[Callable[[Any, int], Any]]
    converts: bool

    def __call__(self, batch: Any, dataloader_idx: int) -> Any:
        """Returns the batch as steps get it."""
        for stage in self.stages:
            batch = stage(batch, dataloader_idx)
        return batch


def batch_transfer(
    fabric: Fabric, module: LightningModule, datamodule: LightningDataModule | None, resident: bool
) -> BatchTransfer | None:
    """Builds the function that moves a batch to the device and precision.

    Args:
        fabric: Gives device and precision.
        module: May override Lightning's batch transfer hooks.
        datamodule: May override them too, and then takes precedence, as in Lightning.
        resident: Whether batches are on the device already.

    Returns:
        The function, None if there is nothing to do.
    """
    stages: list[Callable[[Any, int], Any]] = []
    converts = True
    for hook in TRANSFER_HOOKS:
        parts = (module,) if datamodule is None else (datamodule, module)
        if (owner := next((part for part in parts if overrides(part, hook)), None)) is not None:
            stages.append(_bind(getattr(owner, hook), fabric, hook))
            converts = False
        elif hook == "transfer_batch_to_device" and not resident:
            stages.append(lambda batch, _: fabric.to_device(batch))
    precision = fabric.strategy.precision
    convert = precision.convert_input
    # Under autocast Lightning's trainer does not convert batches; Fabric would also convert the targets of the loss.
    if not isinstance(precision, MixedPrecision) and type(precision).convert_input is not Precision.convert_input:
        stages.append(lambda batch, _: convert(batch))
        converts = converts and is_ours(convert)
    return BatchTransfer(stages, converts) if stages else None


def _bind(method: Callable[..., Any], fabric: Fabric, hook: str) -> Callable[[Any, int], Any]:
    if hook == "transfer_batch_to_device":
        return lambda batch, idx: method(batch, fabric.device, idx)
    return method


def is_own(kind: type | FunctionType) -> bool:
    """Returns whether a class or function is the user's own, or of a package that is not known here."""
    package = str(kind.__module__ or "builtins").partition(".")[0]
    return package not in _KNOWN


def own_uses(objects: Iterable[Any], names: Iterable[str]) -> tuple[str, str] | None:
    """Returns the first of some names that the user's methods, or functions named in them, use; and where."""
    parts = [part for item in objects for part in (item.modules() if isinstance(item, nn.Module) else (item,))]
    places = [vars(place) for part in parts for place in (part, *filter(is_own, type(part).__mro__))]
    todo = [function for place in places for value in place.values() for function in _functions(value)]
    used: dict[FunctionType, list[str]] = {}
    while todo:
        function = todo.pop()
        if function not in used and is_own(function):
            used[function] = list(_names(function.__code__))
            held = function.__globals__
            todo += [other for name in used[function] if name in held for other in _functions(held[name])]
    return next(((name, f.__qualname__) for name in sorted(names) for f, found in used.items() if name in found), None)


def own_places(module: nn.Module) -> list[Any]:
    """Returns the user's own classes and Python modules, whose class and global variables training may change.

    It starts at the classes of the module's parts and their Python modules, and follows imports within their packages.
    """
    todo: list[Any] = [base for part in module.modules() for base in type(part).__mro__ if is_own(base)]
    packages, found = {base.__module__.partition(".")[0] for base in todo}, dict[int, Any]()
    while todo:
        value = todo.pop()
        for place in (value, sys.modules.get(value.__module__)):
            if isinstance(place, (type, ModuleType)) and id(place) not in found:
                found[id(place)] = place
                if value.__module__.partition(".")[0] in packages:
                    todo += [v for v in vars(place).values() if isinstance(v, (type, FunctionType)) and is_own(v)]
    return list(found.values())


def _functions(value: Any) -> list[FunctionType]:
    """Returns the function that a value is or wraps, or those that a class or property holds."""
    if isinstance(value, (property, type)):
        held = vars(value).values() if isinstance(value, type) else (value.fget, value.fset)
        return [function for function in held if isinstance(function, FunctionType)]
    if isinstance(value, (functools.partial, functools.cached_property)):
        value = value.func
    value = inspect.unwrap(value.__func__ if isinstance(value, (staticmethod, classmethod)) else value)
    return [value] if isinstance(value, FunctionType) else []


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """Returns the globals and attributes that a function names, and so for functions and comprehensions within it."""
    inner = (name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant))
    return (*code.co_names, *inner)


_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_GLOBAL = (random._inst, np.random.mtrand._rand, torch.default_generator)
# Larger containers, and arrays of more bytes, are not looked into, nor is more than so much in all.
_MOST, _MOST_BYTES, _MOST_PARTS = 1000, 1 << 16, 20_000


class Held:
    """What objects of the user's hold now, at any depth, to be compared with what they hold later.

    Attributes:
        generators: The random generators among it, but for the global ones.
        whole: Whether nothing was too large to be looked into.
    """

    def __init__(self, *roots: Any) -> None:
        self.whole, self.generators, self._marks = True, list[Any](), list[Any]()
        self._values, seen = list(roots), {*map(id, _GLOBAL)}  # the values are kept, so that no id is used again
        for value in self._values:  # grows meanwhile
            if type(value) in _PLAIN or id(value) in seen:
                self._marks.append((type(value), value if type(value) in _PLAIN else id(value)))
                continue
            seen.add(id(value))
            self.generators += [value] if isinstance(value, GENERATORS) else []
            parts, content = _parts(value), _content(value)
            fits = len(parts) <= _MOST and len(self._values) <= _MOST_PARTS
            self.whole = self.whole and fits and content != "large"
            self._marks.append((id(value), len(parts), content))
            self._values += parts if fits else ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Held) and self._marks == other._marks

    __hash__ = None  # type: ignore[assignment]  # it changes


def _content(value: Any) -> Any:
    """Returns what tells whether a tensor or an array has been written to."""
    if isinstance(value, np.ndarray):
        return value.tobytes() if value.nbytes <= _MOST_BYTES else "large"
    return value._version if isinstance(value, Tensor) and not value.is_inference() else None


def _parts(value: Any) -> Collection[Any]:
    """Returns what an object holds in itself: no classes, Python modules, nor what belongs to a trainer."""
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, MethodType):
        return (value.__self__, value.__func__)
    if isinstance(value, FunctionType):
        used = [value.__globals__.get(name) for name in _names(value.__code__)] if is_own(value) else []
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
        return cells + [held for held in used if isinstance(held, GENERATORS)]
    if isinstance(value, (dict, list, tuple, set)):
        return value.values() if isinstance(value, dict) else value
    module = type(value).__module__
    of_trainer = module.startswith(("lightning_fed.", *PACKAGES)) and ".data" not in module
    if of_trainer or isinstance(value, (type, ModuleType, LightningModule, Tensor, *GENERATORS)):
        return ()
    of_class = (each for base in type(value).__mro__ if is_own(base) for each in vars(base).values())
    return [*getattr(value, "__dict__", {}).values(), *of_class]


def describe(value: Any) -> Any:
    """Turns constructor arguments, and objects built from such, into primitives that name them.

    An object is named by its class and by the attributes that are called like an argument of its constructor.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, dict):
        return {str(key): describe(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(item) for item in value]
    if isinstance(value, type) or hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    names = {
        name
        for base in type(value).__mro__[:-1]
        if "__init__" in vars(base)
        for name in signature(vars(base)["__init__"]).parameters
    }
    own = vars(value) if hasattr(value, "__dict__") else {}
    simple = {name: describe(own[name]) for name in sorted(names) if name in own and _is_simple(own[name])}
    return {"class_path": f"{type(value).__module__}.{type(value).__qualname__}", "init_args": simple}


def _is_simple(value: Any) -> bool:
    """Leaves out data sets, modules and tensors, which have no short name; a data module is known by its class."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return len(value) < 100 and all(map(_is_simple, value))
    if value is None or isinstance(value, (bool, int, float, str, LightningDataModule)):
        return True
    return type(value).__module__.startswith("lightning_fed.") and not isinstance(value, nn.Module)
