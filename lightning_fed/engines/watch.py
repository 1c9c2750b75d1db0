"""Notices what training changes of a module besides its trained parameters and buffers."""

from collections import deque
from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torchmetrics import Metric

from lightning_fed.core.devices import same_values
from lightning_fed.core.train_state import TrainState
from lightning_fed.core.user_code import is_ours
from lightning_fed.errors import FederatedError

__all__ = ["ModuleWatch"]

_PLAIN = (type(None), bool, int, float, complex, str, bytes)
# What torch and Lightning keep in a module themselves, and lend to it.
_NOT_OF_THE_USER = frozenset({*vars(LightningModule()), "log"})
# Longer containers are compared by their length.
_MOST_ITEMS = 1000


class ModuleWatch:
    """Refuses parameters that were replaced, and names Python attributes that pass from client to client.

    Attributes are looked at once in a run, around the second client: what is made once and kept, such as a cache, is
    there by then.

    Args:
        state: What ``fit`` works on.
    """

    def __init__(self, state: TrainState) -> None:
        self._module, self._vector = state.module, state.vector
        vector = state.vector
        self._parameters = dict(zip(vector.names, vector.parameters, strict=True))
        self._known = {name for name, _ in state.module.named_parameters()}
        self._clients = 0
        self._before: dict[str, Any] = {}

    def expect_parameters(self) -> None:
        """Refuses other parameters than ``fit`` began with: nobody would train them.

        Raises:
            FederatedError: If one was replaced or added.
        """
        live = dict(self._module.named_parameters())
        if added := sorted(live.keys() - self._known):
            raise FederatedError(
                f"Expected {type(self._module).__name__} to keep the parameters that `fit` began with, but "
                f"`{added[0]}` was added: make it in `__init__`, `setup` or `configure_model`."
            )
        for name, parameter in self._parameters.items():
            if live.get(name) is not parameter:
                raise FederatedError(
                    f"Expected `{name}` of {type(self._module).__name__} to stay the parameter that clients train, but "
                    "it was replaced after `fit` had begun: replace it in `setup` or `configure_model`, or change its "
                    "values in place."
                )

    def guarded(self, name: str, hooks: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
        """Makes hooks that come after a client's training, where users have some, refuse to write to the module."""
        if all(is_ours(hook) for hook in hooks):
            return hooks

        def call(*args: Any) -> None:
            before = self._vector.data.clone()
            for hook in hooks:
                hook(*args)
            if not (self._vector.in_place and same_values(self._vector.data, before)):
                raise FederatedError(
                    f"Expected `{name}` to leave the parameters of {type(self._module).__name__} as they are, but it "
                    "wrote to them after the client's update was taken: edit `update.delta` in `on_client_end` instead."
                )

        return [call]

    def start_client(self) -> None:
        """Notes what attributes the second client finds."""
        self._clients += 1
        if self._clients == 2:
            self._before = _attributes(self._module)

    def end_client(self) -> None:
        """Says once which of them it leaves changed."""
        if self._clients != 2:
            return
        now, self._clients = _attributes(self._module), 3
        changed = [name for name, value in now.items() if not _is_kept(self._before.get(name), value)]
        self._before = {}
        if changed:
            more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
            rank_zero_warn(
                f"A client's training changes {', '.join(f'`{name}`' for name in changed[:3])}{more} of "
                f"{type(self._module).__name__}, and the next client finds it so: unless it is set anew where "
                "`batch_idx` is 0, keep it in a buffer (`register_buffer`), of which every client has its own."
            )


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Returns the user's own attributes of a module and its parts, each as something that can be compared."""
    found = {}
    for prefix, part in module.named_modules():
        if isinstance(part, Metric) or type(part).__module__.startswith(("torch.", "torchvision.")):
            continue
        for key, value in vars(part).items():
            if key not in _NOT_OF_THE_USER:
                found[f"{prefix}.{key}" if prefix else key] = _seen(value)
    return found


def _seen(value: Any) -> Any:
    """What is compared of a value: plain ones as they are, containers by their items, other objects by identity."""
    if isinstance(value, _PLAIN):
        return type(value), repr(value)  # NaN equals itself
    if isinstance(value, Tensor):  # the object is kept, or its id would be given away
        return _Same(value), None if isinstance(value, nn.Parameter) else value._version
    if isinstance(value, (list, tuple, set, dict, deque)) and len(value) > _MOST_ITEMS:
        return _Same(value), len(value)
    if isinstance(value, dict):
        return {key: _seen(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [_seen(item) for item in value]
    return _Same(value)


class _Same:
    """Equals another one of the same object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _is_kept(before: Any, now: Any) -> bool:
    """Says whether a value is as it was; lists and dicts may have grown, as those do that wait for a round's end."""
    if isinstance(before, list) and isinstance(now, list):
        return len(before) <= len(now) and all(map(_is_kept, before, now))
    if isinstance(before, dict) and isinstance(now, dict):
        return all(key in now and _is_kept(value, now[key]) for key, value in before.items())
    return bool(before == now)
