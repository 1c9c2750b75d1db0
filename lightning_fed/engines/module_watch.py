"""What Python finds in a module, to tell whether it has changed: a captured step would not notice."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, device, nn
from torchmetrics import Metric, MetricCollection

__all__ = ["ModuleWatch"]

# What torch and Lightning keep for themselves; `log` is lent to a recorder for the time of a round.
_THEIRS = frozenset((*vars(nn.Module()), *vars(LightningModule()), "log")) - {"training"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class ModuleWatch:
    """Remembers the attributes of a module and of its parts, and where its tensors lie.

    Lists, dicts and sets are remembered with their entries; what other objects hold is not followed. The values of
    tensors may change, but for those on another device, which a step would have read once. Metric objects are left out.

    Args:
        module: The module.
        on: The device of its parameters.
    """

    def __init__(self, module: nn.Module, on: device) -> None:
        self._values: list[tuple[dict[str, Any], str, Any]] = []
        self._sizes: list[tuple[dict[str, Any], int]] = []
        self._containers: list[tuple[str, Any, list[Any]]] = []
        self._tensors: list[tuple[str, Tensor, tuple[Any, ...]]] = []
        self._device = on
        for part in module.modules():
            if _is_metric(part):
                continue
            own = vars(part)
            self._remember(own, [key for key in own if key not in _THEIRS])
            for entries in (part._parameters, part._buffers, part._modules):
                self._remember(entries, list(entries))

    def _remember(self, entries: dict[str, Any], keys: list[str]) -> None:
        self._sizes.append((entries, _size(entries)))
        for key in keys:
            value = entries[key]
            if _is_metric(value):
                continue
            self._values.append((entries, key, value))
            if isinstance(value, Tensor):
                self._tensors.append((key, value, self._state(value)))
            elif isinstance(value, (list, dict, set)):
                self._containers.append((key, value, _entries(value)))

    def _state(self, tensor: Tensor) -> tuple[Any, ...]:
        read_once = tensor._version if tensor.device != self._device else None
        return tensor.data_ptr(), tensor.requires_grad, read_once

    def changed(self) -> str | None:
        """Names the first attribute that is another one than it was, None if there is none."""
        for entries, key, value in self._values:
            if not _same(entries.get(key, self), value):
                return key
        for entries, size in self._sizes:
            if _size(entries) != size:
                return next(reversed([key for key in entries if key != "log"]), "attributes")
        for key, container, content in self._containers:
            now = _entries(container)
            if len(now) != len(content) or not all(map(_same, now, content)):
                return key
        for key, tensor, state in self._tensors:
            if self._state(tensor) != state:
                return key
        return None


def _is_metric(value: Any) -> bool:
    """Says whether something is a Metric object, or a collection of them, which keeps its own state too."""
    return isinstance(value, (Metric, MetricCollection))


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in _PLAIN and bool(one == other))


def _size(entries: dict[str, Any]) -> int:
    return len(entries) - ("log" in entries)


def _entries(container: Any) -> list[Any]:
    return [part for item in container.items() for part in item] if isinstance(container, dict) else list(container)
