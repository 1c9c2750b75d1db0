"""Objects as primitives that name them."""

from inspect import signature
from typing import Any

import torch
from lightning.pytorch import LightningDataModule

__all__ = ["describe"]


def describe(value: Any) -> Any:
    """Turns constructor arguments, and objects built from such, into primitives that name them.

    An object is named by its class and those attributes that bear the name of one of its constructor's arguments.
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
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    if isinstance(value, LightningDataModule):
        return True
    return type(value).__module__.startswith("lightning_fed.") and not isinstance(value, torch.nn.Module)
