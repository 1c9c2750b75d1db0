"""The flat parameter vector of a module.

The trainable parameters of a model live in one contiguous vector w of shape (d,); every ``nn.Parameter`` and its
gradient is a view. Loading a model is one copy and an update one subtraction. Frozen parameters are not part of the
vector, tied parameters appear once, buffers are kept apart (``lightning_fed.core.buffers``).

Personal parameters, which stay with their client, come last: the first d weights are shared, the p after them personal.
"""

from collections.abc import Collection, Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.utils.dlpack import from_dlpack

from lightning_fed.errors import FederatedError, expect

__all__ = ["ParameterVector", "names_like"]


def _dense_strides(tensor: Tensor) -> tuple[int, ...]:
    """Strides for a view in a flat vector: the tensor's own if it is dense (channels_last too), else contiguous."""
    if tensor.ndim == 4 and tensor.is_contiguous(memory_format=torch.channels_last):
        return tuple(tensor.stride())
    if tensor.ndim == 5 and tensor.is_contiguous(memory_format=torch.channels_last_3d):
        return tuple(tensor.stride())
    return torch.empty(tensor.shape, device="meta").stride()


class ParameterVector:
    """Holds a module's trainable parameters, and their gradients, in two contiguous vectors.

    What has no ``all_`` before its name is of the shared part, which is what the server knows. Without personal
    parameters the two are the same objects.

    Attributes:
        data: Tensor of shape (d,): the live shared weights, in the parameters' dtype.
        personal: Tensor of shape (p,): the live personal weights.
        all_data: Tensor of shape (d + p,): both, of which they are views; what an optimizer steps.
        parameters: The trainable shared parameters in the order of ``module.named_parameters()``, tied ones once.
        names: Their names, in the same order.
        all_parameters: These, then the personal ones in the same order among themselves.
        all_names: Their names.

    Args:
        module: A module on its final device and in its final precision.
        personal: Names of the parameters that stay with their client.

    Raises:
        FederatedError: If nothing is trainable, a lazy module is uninitialised, or dtypes or devices are mixed.
    """

    def __init__(self, module: nn.Module, personal: Collection[str] = ()) -> None:
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._validate(module, named)
        self._owner = type(module).__name__
        named.sort(key=lambda pair: pair[0] in personal)  # stable: the order within each part stays
        self.all_names = tuple(name for name, _ in named)
        self.all_parameters = tuple(p for _, p in named)
        shared = len(named) - sum(name in personal for name in self.all_names)
        self.names, self.parameters = self.all_names[:shared], self.all_parameters[:shared]
        self._loose = self._hidden = False
        self._places, self._all_places = _places(self.parameters), _places(self.all_parameters)
        self._flatten()

    @staticmethod
    def _validate(module: nn.Module, named: list[tuple[str, nn.Parameter]]) -> None:
        lazy = [
            name
            for name, tensor in (*module.named_parameters(), *module.named_buffers())
            if isinstance(tensor, (UninitializedParameter, UninitializedBuffer))
        ]
        if lazy:
            raise FederatedError(
                f"Expected every parameter to be initialised, but `{lazy[0]}` is lazy: run one batch through "
                "the model in its `__init__` or give its layers explicit sizes."
            )
        if not named:
            raise FederatedError(
                f"Expected {type(module).__name__} to have trainable parameters, but none requires a gradient: "
                "unfreeze at least one, or use `validate` or `test`."
            )

    def _flatten(self) -> None:
        """Copies the parameters into fresh vectors and turns them into views; their values decide."""
        kinds = {(p.dtype, p.device) for p in self.all_parameters}
        if len(kinds) > 1:
            listed = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise FederatedError(
                f"Expected all trainable parameters of {self._owner} to share one dtype and device, "
                f"got {listed}: convert them in the module's `__init__`, or choose `--trainer.precision`."
            )
        first = self.all_parameters[0]
        self.numel = sum(p.numel() for p in self.parameters)
        self.all_numel = sum(p.numel() for p in self.all_parameters)
        self.all_data = torch.empty(self.all_numel, dtype=first.dtype, device=first.device)
        self._all_grad = torch.zeros_like(self.all_data)
        whole = self.numel == self.all_numel
        self.data = self.all_data if whole else self.all_data[: self.numel]
        self._grad = self._all_grad if whole else self._all_grad[: self.numel]
        self.personal = self.all_data[self.numel :]
        self._pointers: list[int] = []
        self._grads: list[Tensor] = []
        with torch.no_grad():
            for p, place in self.all_places().items():
                strides = _dense_strides(p)
                view = _window(self.all_data, p.shape, strides, place.start)
                view.copy_(p.data)
                p.data = view
                p.grad = self._all_grad.as_strided(p.shape, strides, place.start)
                self._pointers.append(p.data_ptr())
                self._grads.append(p.grad)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the live weights."""
        return self.data.dtype

    @property
    def device(self) -> torch.device:
        """Device of the live weights."""
        return self.data.device

    def refresh(self) -> bool:
        """Makes the parameters views again where ``.to()``, ``.double()`` or the user's code cut them loose.

        Returns:
            True if anything had to be mended; ``data`` and ``grad`` are then new tensors.
        """
        if self.in_place and all(p.dtype == self.dtype for p in self.all_parameters):
            return False
        self._flatten()
        return True

    @property
    def grad(self) -> Tensor:
        """The live gradients, shape (d,), brought together first if a backward pass has handed them over one by one."""
        if self._loose:
            self.collect_gradients()
        return self._grad

    @property
    def all_grad(self) -> Tensor:
        """The live gradients of both parts, shape (d + p,), brought together as ``grad`` is."""
        if self._loose:
            self.collect_gradients()
        return self._all_grad

    @property
    def in_place(self) -> bool:
        """Whether all parameters are views of the flat vector."""
        return all(p.data_ptr() == at for p, at in zip(self.all_parameters, self._pointers, strict=True))

    @property
    def whole(self) -> bool:
        """Whether every parameter has a gradient, and it is a view of the flat one."""
        return not self._hidden and all(
            p.grad is view for p, view in zip(self.all_parameters, self._grads, strict=True)
        )

    def zero_grad(self) -> None:
        """Zeroes the flat gradient in one call and puts back gradient views that the last step detached."""
        self._all_grad.zero_()
        self._loose = self._hidden = False
        for p, view in zip(self.all_parameters, self._grads, strict=True):
            if p.grad is not view:
                p.grad = view

    def drop_gradients(self) -> None:
        """Sets every ``.grad`` to None: the next backward pass hands its gradients over instead of adding them.

        A parameter that it does not reach keeps None and is skipped by optimizers, as under Lightning; a zero gradient
        would let weight decay and momentum move it.
        """
        self._loose, self._hidden = True, False
        for p in self.all_parameters:
            p.grad = None

    def loose_gradients(self) -> list[Tensor] | None:
        """Returns the gradients as backward passes have handed them over, in the order of the parameters.

        Returns:
            None if they have been brought together since, or if one is missing, sparse or part of a graph.
        """
        if not self._loose:
            return None
        gradients: list[Tensor] = []
        for p in self.all_parameters:
            gradient = p.grad
            if gradient is None or gradient.requires_grad or gradient.layout is not torch.strided:
                return None
            gradients.append(gradient)
        return gradients

    def collect_gradients(self, more: bool = False) -> None:
        """Copies the gradients of all parameters into the flat vector and makes them views of it.

        This includes gradients that user code assigned (``p.grad = ...``, or a backward pass with ``create_graph``).
        None counts as zero, and stays None for the optimizer. Set ``more`` if further backward passes follow.
        """
        self._loose = more
        views, gradients = [], []
        for p, view in zip(self.all_parameters, self._grads, strict=True):
            gradient = p.grad
            if gradient is view:
                continue
            if gradient is None:
                view.zero_()
                self._hidden = True
            else:
                views.append(view)
                gradient = gradient.detach() if gradient.requires_grad else gradient
                gradients.append(gradient if gradient.layout == torch.strided else gradient.to_dense())
                p.grad = view
        if views:
            torch._foreach_copy_(views, gradients)

    def copy_gradients(self, out: Tensor) -> None:
        """Copies what a backward pass left at the parameters to ``out``, shape (d,); the flat gradients stay."""
        views, gradients = [], []
        for p, place in self.places().items():
            view = out.as_strided(p.shape, p.stride(), out.storage_offset() + place.start)
            if p.grad is None:
                view.zero_()
            else:
                views.append(view)
                gradients.append(p.grad.detach() if p.grad.layout == torch.strided else p.grad.to_dense())
        if views:
            torch._foreach_copy_(views, gradients)

    def hide(self, parameters: Iterable[Tensor]) -> None:
        """Takes their gradients from some parameters: the next step leaves them, and the optimizer's state of them."""
        self.collect_gradients()
        for p in parameters:
            p.grad = None
            self._hidden = True

    def places(self) -> dict[Tensor, slice]:
        """Returns where each shared parameter lies in the flat vector, in order."""
        return self._places

    def all_places(self) -> dict[Tensor, slice]:
        """Returns where each parameter lies in ``all_data``, in order."""
        return self._all_places

    def gradients_except(self, parameters: Iterable[Tensor]) -> list[slice]:
        """Returns the parts of ``all_data`` that belong to none of these parameters."""
        wanted = {id(p) for p in parameters}
        return [place for p, place in self.all_places().items() if id(p) not in wanted]

    def scale_gradient(self, factor: float | Tensor) -> None:
        """Multiplies the gradient of the loss; terms of other algorithms are added afterwards."""
        self.grad.mul_(factor)

    def add_to_gradient(self, term: Tensor, alpha: float = 1.0) -> None:
        """Adds ``alpha`` times the gradient of a further term of the client's objective, shape (d,).

        A parameter that got no gradient from the loss gets that of the term and is stepped, unless the term is zero
        there.
        """
        self.grad.add_(term, alpha=alpha)
        if self._hidden:
            for p, view in zip(self.parameters, self._grads, strict=False):  # the shared ones come first
                if p.grad is None and bool(view.any()):
                    p.grad = view

    def release(self) -> None:
        """Makes the module an ordinary one again: parameters own their storage, gradients are None."""
        for p in self.all_parameters:
            p.data = p.data.clone(memory_format=torch.preserve_format)
            p.grad = None


def _window(vector: Tensor, shape: torch.Size, strides: tuple[int, ...], start: int) -> Tensor:
    """Returns a view of a vector whose storage is no longer than the view, so that `torch.save` writes nothing else."""
    view = vector.as_strided(shape, strides, start)
    known = view.device.type in ("cpu", "cuda")  # to DLPack, of which torch makes a storage of its own
    return from_dlpack(view).as_strided(shape, strides) if known else view


def _places(parameters: Iterable[Tensor]) -> dict[Tensor, slice]:
    places: dict[Tensor, slice] = {}
    offset = 0
    for p in parameters:
        places[p] = slice(offset, offset + p.numel())
        offset += p.numel()
    return places


def names_like(names: Sequence[str], patterns: Sequence[str], option: str) -> frozenset[str]:
    """Returns the names that fit one of the patterns, as ``head.*`` does; ``head`` means all below it.

    Raises:
        FederatedError: If one of the ``option``'s patterns fits no name, or it is no list.
    """
    expect(not isinstance(patterns, str), f"Expected `{option}` to be a list of names, got {patterns!r}.")
    found: set[str] = set()
    for pattern in patterns:
        fitting = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        known = ", ".join(names if len(names) < 8 else (*names[:3], "...", *names[-3:]))
        expect(fitting, f"Expected trainable parameters for the pattern `{pattern}` in `{option}`, got {known}.")
        found |= fitting
    return frozenset(found)
