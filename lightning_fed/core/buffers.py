"""The buffers of a module (BatchNorm statistics and counters): apart from the flat vector, never masked or stepped."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_fed.core.updates import Client, ReducedUpdate

__all__ = ["BufferSet", "GlobalBuffers"]


class BufferSet:
    """The buffers of a module (BatchNorm statistics and counters), read and written by name.

    Args:
        module: The module; buffers that user code replaces by assignment are found again at each call.

    Attributes:
        places: The submodule that each buffer hangs in, and its name there.
        further: The other places of buffers that hang in several, by the same name.
    """

    def __init__(self, module: nn.Module) -> None:
        names: dict[int, str] = {}
        self.places: dict[str, tuple[nn.Module, str]] = {}
        self.further: dict[str, list[tuple[nn.Module, str]]] = {}
        for prefix, owner in module.named_modules():
            for key, buffer in owner._buffers.items():
                if buffer is None:
                    continue
                name = names.setdefault(id(buffer), f"{prefix}.{key}" if prefix else key)
                if name in self.places:
                    self.further.setdefault(name, []).append((owner, key))
                else:
                    self.places[name] = (owner, key)

    def __len__(self) -> int:
        return len(self.places)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the live buffers by name, apart from any graph that user code left them in."""
        found = {name: owner._buffers[key] for name, (owner, key) in self.places.items()}
        return {name: buffer.detach() for name, buffer in found.items() if buffer is not None}

    def copy(self) -> dict[str, Tensor]:
        """Returns clones of the buffers by name."""
        return {name: buffer.clone() for name, buffer in self.tensors().items()}

    def load(self, values: dict[str, Tensor]) -> None:
        """Copies values into the live buffers, in place."""
        for name, buffer in self.tensors().items():
            buffer.copy_(values[name])


def _widen(buffer: Tensor) -> Tensor:
    """Clones a buffer, floating and complex ones in single precision at least."""
    if buffer.is_floating_point() or buffer.is_complex():
        return buffer.to(torch.promote_types(buffer.dtype, torch.float32), copy=True)
    return buffer.clone()


class GlobalBuffers:
    """The global model's buffers, and each client's own under the policy ``local``.

    Args:
        module: The resident module, whose buffers become the global ones.
        policy: See ``Aggregator``.
    """

    def __init__(self, module: nn.Module, policy: Literal["average", "local", "keep"]) -> None:
        self.live = BufferSet(module)
        self.policy = policy
        self.values = {name: _widen(buffer) for name, buffer in self.live.tensors().items()}
        self._of_client: dict[int, dict[str, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes of the live buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self.live.tensors().values())

    def load(self, client: Client | None = None) -> None:
        """Puts the global model's buffers, or those that this client starts from, into the module."""
        if self.values:
            own = self._of_client.get(client.id) if client is not None else None
            self.live.load(self.values if own is None else own)

    def store(self, client: Client) -> None:
        """Keeps a client's buffers for its next round, under the policy ``local``."""
        if self.policy == "local" and self.values:
            self._of_client[client.id] = self.live.copy()

    @property
    def in_use(self) -> bool:
        """Whether any client's buffers are kept here."""
        return bool(self._of_client)

    def move_out(self, client: int) -> dict[str, Tensor]:
        """Gives away a client's buffers, for the process that trains it next; nothing if it has none here."""
        return _moved(self._of_client.pop(client, {}), "cpu")

    def move_in(self, client: int, own: dict[str, Tensor]) -> None:
        """Keeps a client's buffers that come from another process."""
        if own:
            self._of_client[client] = _moved(own, next(iter(self.values.values())).device)

    def drop(self, client: int) -> None:
        """Drops a client's buffers, which have changed elsewhere."""
        self._of_client.pop(client, None)

    def step(self, update: ReducedUpdate) -> None:
        """Takes over the reduced buffers of a round."""
        for name, value in update.buffers.items():
            self.values[name].copy_(value)

    def state_dict(self, gather: Callable[[Any], list[Any]] | None = None) -> dict[str, Any]:
        """Returns the global buffers and those kept by clients.

        Args:
            gather: Returns an object of every process, where several hold clients' buffers.
        """
        of_client = self._of_client
        if gather is not None and self.policy == "local":
            own = {client: _moved(kept, "cpu") for client, kept in of_client.items()}
            of_client = {client: kept for part in gather(own) for client, kept in part.items()}
        return {"values": self.values, "of_client": of_client}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned."""
        for name, value in state["values"].items():
            self.values[name].copy_(value)
        self._of_client = {}
        for client, own in state["of_client"].items():
            self.move_in(client, own)


def _moved(buffers: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    return {name: buffer.to(device) for name, buffer in buffers.items()}
