"""What a captured step logs: the calls are made once, their values are new after every replay."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.core.logged_values import scalar
from lightning_fed.core.recorder import MetricRecorder
from lightning_fed.engines.capturable import UNREAD
from lightning_fed.engines.graphs import CannotCapture

__all__ = ["CapturedLog"]


@dataclass(frozen=True)
class _Call:
    """One value logged: its place among the tensors (None for a number), the number, and how it is logged."""

    name: str
    place: int | None
    number: float
    by_default: bool
    options: tuple[tuple[Any, ...], dict[str, Any]]


class CapturedLog(MetricRecorder):
    """Notes what is logged while a step is captured, and logs it again after each replay.

    Args:
        device: Where the step runs.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._calls: list[_Call] = []
        self._tensors: list[Tensor] = []
        self._values: Tensor | None = None

    def log(self, name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Notes a value.

        Raises:
            CannotCapture: If it is a Metric object, or a tensor that the graph does not compute.
        """
        if isinstance(value, Metric):
            raise CannotCapture("`training_step` logs torchmetrics objects, which a graph does not update")
        if value is UNREAD:
            float(value)
        self._note(name, scalar(name, value), False, args, kwargs)

    def log_default(self, name: str, value: Tensor | float) -> None:
        """Notes a value that the module may log itself."""
        self._note(name, value.detach().reshape(()) if isinstance(value, Tensor) else value, True, (), {})

    def _note(self, name: str, value: Tensor | float, by_default: bool, args: Any, kwargs: Any) -> None:
        if not isinstance(value, Tensor):
            self._calls.append(_Call(name, None, value, by_default, (args, kwargs)))
            return
        if value.device != self._device:
            raise CannotCapture(f"`training_step` logs `{name}` from a tensor on {value.device}, not on {self._device}")
        self._calls.append(_Call(name, len(self._tensors), 0.0, by_default, (args, kwargs)))
        self._tensors.append(value)

    def close(self) -> None:
        """Brings all values into one tensor, as a part of the captured work."""
        self._values = torch.stack([tensor.double() for tensor in self._tensors])
        self._tensors = []

    def send(self, recorder: MetricRecorder) -> None:
        """Logs again, with the values that the last replay has left."""
        assert self._values is not None
        values = self._values.clone().unbind()  # the next replay writes here, and series keep what they were given
        for call in self._calls:
            value = call.number if call.place is None else values[call.place]
            if call.by_default:
                recorder.log_default(call.name, value)
            else:
                args, kwargs = call.options
                recorder.log(call.name, value, *args, **kwargs)
