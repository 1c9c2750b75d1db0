"""The values of a module that training changes outside the flat vector: masks and optimizers leave them alone.

These are its buffers (BatchNorm statistics, counters) and frozen parameters that user code moves (EMA teachers, MoCo).
A buffer that is not persistent is a cache and no state: it belongs to the resident module, like an attribute.
"""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.spectral_norm import SpectralNorm

from lightning_fed.core.devices import copy_each, same_each, same_values, single_at_least, wide_dtype
from lightning_fed.core.reduction import is_averaged
from lightning_fed.core.updates import Client, ReducedUpdate
from lightning_fed.errors import FederatedError

__all__ = ["BufferSet", "FrozenParameters", "GlobalBuffers"]

# Frozen parameters are copied only if they are at most this many times as large as the trained ones. An EMA teacher is
# as large; the foundation model under adapters is much larger, and a copy would cost too much memory.
_MOST_FROZEN = 4
# Steps of a power iteration that starts near its end, as singular vectors change little in a round.
_ITERATIONS = 100
# After the name of a buffer: which of its entries a client has written, 1 or 0.
_WRITTEN = " written"


class BufferSet:
    """The persistent buffers of a module (BatchNorm statistics and counters), read and written by name.

    Args:
        module: The module; buffers that user code replaces by assignment are found again at each call.

    Attributes:
        places: The submodule that holds each buffer, and the buffer's name there.
        further: The other places of buffers that several submodules share, by the same name.
        caches: The places of the others, which are not persistent.
    """

    def __init__(self, module: nn.Module) -> None:
        names: dict[int, str] = {}
        self.places: dict[str, tuple[nn.Module, str]] = {}
        self.further: dict[str, list[tuple[nn.Module, str]]] = {}
        self.caches: list[tuple[nn.Module, str]] = []
        self._shapes: dict[str, torch.Size] = {}
        parts = list(module.named_modules())
        kept = {id(b) for _, p in parts for key, b in p._buffers.items() if key not in p._non_persistent_buffers_set}
        for prefix, owner in parts:
            for full, buffer in owner.named_buffers(prefix, recurse=False, remove_duplicate=False):
                name, key = names.setdefault(id(buffer), full), full.rpartition(".")[2]
                if id(buffer) not in kept:
                    self.caches.append((owner, key))
                elif name in self.places:
                    self.further.setdefault(name, []).append((owner, key))
                else:
                    self.places[name] = (owner, key)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the live buffers by name, detached from any graph; refuses one that has another shape than before."""
        held = ((name, _held(*place)) for name, place in self.places.items())
        found = {name: buffer.detach() for name, buffer in held if buffer is not None}
        for name, buffer in found.items():
            if (shape := self._shapes.setdefault(name, buffer.shape)) != buffer.shape:
                raise FederatedError(
                    f"Expected the buffer `{name}` to keep its shape {tuple(shape)} in `fit`, got {tuple(buffer.shape)}"
                    ": give it its last shape in `__init__`, or `persistent=False` if it is a cache."
                )
        return found

    def copy(self) -> dict[str, Tensor]:
        """Returns clones of the buffers by name."""
        live = self.tensors()
        copies = {name: torch.empty_like(buffer) for name, buffer in live.items()}
        copy_each(copies.values(), live.values())
        return copies

    def load(self, values: dict[str, Tensor]) -> None:
        """Copies values into the live buffers, in place."""
        live = self.tensors()
        copy_each(live.values(), (values[name] for name in live))


def _held(owner: nn.Module, key: str) -> Tensor | None:
    return owner._buffers[key] if key in owner._buffers else owner._parameters.get(key)


class FrozenParameters:
    """Finds parameters that training moves although they are not ``trained``, and keeps their former values."""

    def __init__(self, module: nn.Module, trained: Iterable[str]) -> None:
        self._module, self._trained = module, frozenset(trained)
        self._at_start = frozenset(name for name, _ in module.named_parameters()) - self._trained
        self._marks: dict[str, tuple[int, ...]] = {}
        self._norms = torch.empty(0)
        self._copies: dict[str, Tensor] = {}
        self._looked = False

    def start_round(self, taken_in: Iterable[str]) -> None:
        """Notes the values that clients of the round start from; parameters ``taken_in`` as buffers are left out."""
        named = dict(self._module.named_parameters())
        for name, p in named.items():
            if name in self._at_start and p.requires_grad:
                raise FederatedError(
                    f"Expected `{name}` of {type(self._module).__name__} to stay frozen as it was when `fit` began, "
                    "but it requires a gradient now: unfreeze it in `__init__` or `configure_model`."
                )
        known = self._trained.union(taken_in)
        frozen = {name: p for name, p in named.items() if name not in known and p.is_floating_point()}
        marks = {name: _mark(p) for name, p in frozen.items()}
        trained = sum(p.numel() for name, p in named.items() if name in self._trained)
        keeps = sum(p.numel() for p in frozen.values()) <= _MOST_FROZEN * trained
        if marks == self._marks and not keeps:
            return
        norms = _norms(frozen.values())
        if marks == self._marks and same_values(norms, self._norms):
            return
        self._marks, self._norms, self._looked = marks, norms, False
        self._copies = {name: p.detach().to("cpu", copy=True) for name, p in frozen.items() if keeps}

    def moved(self) -> dict[str, Tensor | None]:
        """Returns parameters changed since ``start_round`` with their former values, None where no copy is kept."""
        if not self._marks:
            return {}
        live = dict(self._module.named_parameters())
        found = {name for name, mark in self._marks.items() if name in live and _mark(live[name]) != mark}
        # A write to `.data` shows only in the values. Where no copy is kept, these are compared only once.
        if self._copies or not self._looked:
            norms = _norms(live[name] for name in self._marks if name in live)
            if len(norms) == len(self._norms) and not same_values(norms, self._norms):
                same = torch.isclose(norms, self._norms, rtol=0.0, atol=0.0, equal_nan=True)
                found.update(name for name, is_same in zip(self._marks, same, strict=True) if not is_same)
        self._looked = True
        return {name: self._copies.get(name) for name in self._marks if name in found}

    def forget(self, name: str) -> None:
        """Stops watching a parameter."""
        self._norms = self._norms[[known != name for known in self._marks]]
        del self._marks[name]
        self._copies.pop(name, None)


def _mark(parameter: Tensor) -> tuple[int, ...]:
    return id(parameter), parameter._version, parameter.data_ptr()


def _norms(parameters: Iterable[Tensor]) -> Tensor:
    norms = [torch.linalg.vector_norm(p.detach(), dtype=wide_dtype(p.device)) for p in parameters]
    return torch.stack(norms) if norms else torch.empty(0)


class GlobalBuffers:
    """The global model's buffers, and each client's own under the policy ``local``.

    A frozen parameter that training moves is treated as a buffer from then on.

    Args:
        module: The resident module, whose buffers become the global ones.
        policy: See ``Aggregator``.
        trained: Names of the parameters in the flat vector.

    Attributes:
        live: The buffers of the module.
        frozen: The parameters that are neither here nor in the flat vector.
        values: The buffers of the global model, by name.
        tables: Names of buffers of several numbers beside one of whole numbers, which may say which are filled: those
            that a client has not written do not count in their mean.
    """

    def __init__(
        self, module: nn.Module, policy: Literal["average", "local", "keep"], trained: Iterable[str] = ()
    ) -> None:
        self.live = BufferSet(module)
        self.frozen = FrozenParameters(module, trained)
        self._module, self.policy = module, policy
        self.values = {name: _widened(buffer) for name, buffer in self.live.tensors().items()}
        self._of_client: dict[int, dict[str, Tensor]] = {}
        owners = {name: id(o) for name, (o, _) in self.live.places.items() if not isinstance(o, _NormBase)}
        marked = {owners[name] for name in owners if not is_averaged(self.values[name])}
        many = (name for name in owners if self.values[name].numel() > 1 and is_averaged(self.values[name]))
        self.tables = [name for name in many if owners[name] in marked and policy == "average"]

    def aside(self) -> "GlobalBuffers":
        """Returns others, of the module as it is and of what clients keep, for training of which nothing stays here."""
        other = GlobalBuffers(self._module, self.policy, self.frozen._trained)
        other._of_client = self._of_client
        return other

    @property
    def num_bytes(self) -> int:
        """Bytes of the live buffers."""
        return sum(buffer.nbytes for buffer in self.live.tensors().values())

    def of_client(self) -> dict[str, Tensor]:
        """Returns what a client's training has made of the buffers: of ``tables`` what it wrote, and where."""
        found = self.live.tensors()
        for name in filter(found.__contains__, self.tables):
            written = found[name] != self.values[name].to(found[name].dtype)
            found[name] = torch.where(written, found[name], 0)
            found[name + _WRITTEN] = written.to(wide_dtype(written.device))
        return found

    def start_round(self) -> None:
        """Takes in changes that hooks made to frozen parameters between rounds, also if they are buffers here."""
        self.frozen.start_round(self.values)
        for name, place in self.live.places.items():
            value, now = self.values[name], _held(*place)
            if isinstance(now, nn.Parameter) and not same_values(now.detach(), value.to(now.dtype)):
                value.copy_(now.detach())

    def changed(self, before: dict[str, Tensor], beside: tuple[Tensor, Tensor]) -> tuple[bool, list[str]]:
        """Compares the live buffers with copies of them, and the tensors ``beside``, in one read of the device.

        Returns:
            Whether the two tensors ``beside`` are equal, and the names of the buffers that changed.
        """
        live = self.live.tensors()
        names = [name for name in before if name in live]
        pairs = ((live[name], before[name].to(live[name])) for name in names)
        first, *same = same_each([beside, *pairs])
        return first, [name for name, is_same in zip(names, same, strict=True) if not is_same]

    def take_over(self, names: Iterable[str]) -> None:
        """Copies these buffers of the module into the global model."""
        live = self.live.tensors()
        for name in names:
            self.values[name].copy_(live[name])

    def take_in_moved(self) -> dict[str, Tensor]:
        """Turns frozen parameters that a client's training moved into buffers; refuses those without a copy.

        Returns:
            Their values before, by name.
        """
        moved = self.frozen.moved()
        for name, value in moved.items():
            if value is None:
                raise FederatedError(
                    f"Expected `{name}` of {type(self._module).__name__}, which is frozen, to stay as it is while a "
                    "client trains, but it was changed: register it as a buffer with `register_buffer`, which clients "
                    "send back."
                )
            self._take_in(name, value)
            self.frozen.forget(name)
        return {name: self.values[name] for name in moved}

    def _take_in(self, name: str, value: Tensor) -> None:
        owner, _, key = name.rpartition(".")
        self.live.places[name] = self._module.get_submodule(owner), key
        self.values[name] = _widened(value.to(self.live.tensors()[name].device))

    @property
    def parameters(self) -> list[Tensor]:
        """The frozen parameters that are buffers here."""
        return [p for place in self.live.places.values() if isinstance(p := _held(*place), nn.Parameter)]

    def load(self, client: Client | None = None) -> None:
        """Puts the global model's buffers, or those that this client starts from, into the module."""
        if self.values:
            own = self._of_client.get(client.id) if client is not None else None
            self.live.load(self.values if own is None else {**self.values, **own})

    def store(self, client: Client) -> None:
        """Keeps a client's buffers for its next round, under the policy ``local``."""
        if self.policy == "local" and self.values:
            self._of_client[client.id] = self.live.copy()

    @property
    def in_use(self) -> bool:
        """Whether any client's buffers are kept here."""
        return bool(self._of_client)

    def move_out(self, client: int) -> dict[str, Tensor]:
        """Removes and returns a client's buffers, for the process that trains it next; empty if none are here."""
        return _moved(self._of_client.pop(client, {}), "cpu")

    def move_in(self, client: int, own: dict[str, Tensor]) -> None:
        """Keeps a client's buffers that come from another process."""
        if own and self.values:
            self._of_client[client] = _moved(own, next(iter(self.values.values())).device)

    def drop(self, client: int) -> None:
        """Drops a client's buffers, which have changed elsewhere."""
        self._of_client.pop(client, None)

    def step(self, update: ReducedUpdate) -> None:
        """Copies the reduced buffers of a round into the global model."""
        for name in self.tables:
            if (share := update.buffers.pop(name + _WRITTEN, None)) is not None:
                update.buffers[name] = torch.where(share > 0, update.buffers[name] / share, self.values[name])
        copy_each((self.values[name] for name in update.buffers), update.buffers.values())

    @torch.no_grad()
    def recompute(self) -> None:
        """Lets torch's spectral norms find the singular vectors of the live weights: a mean of clients' is none."""
        owners = set[int]()
        for part in self._module.modules():
            hooks = part._forward_pre_hooks.values()
            steps: list[Any] = [partial(hook, part, ()) for hook in hooks if isinstance(hook, SpectralNorm)]
            if isinstance(part, parametrize.ParametrizationList):
                steps += [part] * any(isinstance(each, parametrizations._SpectralNorm) for each in part)
            for step in steps * _ITERATIONS:
                step()
            owners.update(id(each) for each in part.modules() if steps)
        self.take_over(name for name, (owner, _) in self.live.places.items() if id(owner) in owners)

    def state_dict(self, gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        """Returns the global buffers, and those that clients keep; ``gather`` collects an object from each process."""
        own = {client: _moved(kept, "cpu") for client, kept in self._of_client.items()}
        everyone = gather(own) if self.policy == "local" else [own]
        of_client = {client: kept for part in everyone for client, kept in part.items()}
        return {"values": self.values, "of_client": of_client}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned; refuses a buffer that the module lacks, or has in another shape."""
        parameters = dict(self._module.named_parameters())
        everyone = parameters | dict(self._module.named_buffers())  # caches too, which older checkpoints hold
        for name, value in (item for held in (state["values"], *state["of_client"].values()) for item in held.items()):
            if name not in everyone or everyone[name].shape != value.shape:
                raise FederatedError(
                    f"Expected the checkpoint to hold buffers of this {type(self._module).__name__}, but `{name}` is "
                    f"none of them or has another shape than {tuple(value.shape)}: change `--model` or `--ckpt_path`."
                )
        for name, value in state["values"].items():
            if name not in self.values and name in parameters:
                self._take_in(name, value)
            if name in self.values:
                self.values[name].copy_(value)
        self._of_client = {}
        for client, own in state["of_client"].items():
            self.move_in(client, own)


def _widened(buffer: Tensor) -> Tensor:
    return buffer.to(single_at_least(buffer.dtype), copy=True)


def _moved(buffers: dict[str, Tensor], device: torch.device | str) -> dict[str, Tensor]:
    return {name: buffer.to(device) for name, buffer in buffers.items()}
