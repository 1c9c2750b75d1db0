"""Runs a training step with the loss algorithms of a run: alone, or under ``torch.func.vmap``."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from lightning_fed.client_algorithms.losses.base import (
    Features,
    LossAlgorithm,
    LossCall,
    ModelPass,
    feature_layer,
    last_linear,
)
from lightning_fed.core.recorder import MetricRecorder
from lightning_fed.core.train_state import LocalOptions, TrainState
from lightning_fed.errors import FederatedError

__all__ = ["ClientLosses"]


class ClientLosses:
    """Lets loss algorithms change the scores of a training step and add to its loss, in the order of their names.

    Args:
        state: What ``fit`` works on.
        algorithms: Those of the run that are active.
    """

    def __init__(self, state: TrainState, algorithms: Iterable[LossAlgorithm]) -> None:
        self.state, self.module = state, state.module
        self.algorithms = sorted(algorithms, key=lambda one: type(one).__qualname__)
        self.adds = [type(one).term is not LossAlgorithm.term for one in self.algorithms]
        named = {one.layer for one, adds in zip(self.algorithms, self.adds, strict=True) if adds}
        self.layers = {name: feature_layer(self.module, name) for name in named if name or last_linear(self.module)}
        self._calls: list[LossCall] = []

    @classmethod
    def of(cls, state: TrainState, options: LocalOptions, callbacks: Iterable[Any]) -> "ClientLosses | None":
        """Makes it for the callbacks of a run; None if none changes the loss, which then costs nothing."""
        active = [one for one in callbacks if isinstance(one, LossAlgorithm) and one.active]
        if active and (options.compile_mode is not None or state.module._compiler_ctx is not None):
            raise FederatedError(
                f"Expected a training step that is not compiled for {type(active[0]).__name__}, which changes its "
                "loss: leave `--trainer.compile` and `torch.compile` out."
            )
        return cls(state, active) if active else None

    def own(self, count: int | None = None) -> list[dict[str, Tensor]]:
        """Returns what each algorithm keeps for the client that trains, and its w; of ``count`` lanes a row for each.

        w too, though it is one: under vmap in-place sums, such as those of an LSTM, take no shared weights.
        """
        weights = self.state.received
        shared = {"weights": weights if count is None else weights.expand(count, -1)}
        return [*(one.own() for one in self.algorithms), shared]

    def step(self, training_step: Callable[..., Any], *args: Any, own: list[dict[str, Tensor]] | None = None) -> Any:
        """Calls ``training_step`` with scores as the algorithms want them; returns what it returns."""
        own, self._calls = self.own() if own is None else own, []
        with self._hooked(partial(self._note_call, own)) as features:
            self._features = features
            return training_step(*args)

    def total(
        self, loss: Tensor, batch: Any, recorder: MetricRecorder, own: list[dict[str, Tensor]] | None = None
    ) -> Tensor:
        """Adds the algorithms' terms to the loss of the last ``step``, and records their sum as ``train/term``."""
        self._expect_calls()
        (call, *_), self._calls = self._calls, []  # nothing of a step is held until the next
        self._features = Features(self.module)
        if not any(self.adds):
            return loss
        *mine, shared = self.own() if own is None else own
        call.loss, call.batch, call.weights, call.losses = loss.reshape(()), batch, shared["weights"], self
        pairs = zip(self.algorithms, mine, self.adds, strict=True)
        terms = [_scalar(one, one.term(call, kept)) for one, kept, adds in pairs if adds]
        term = sum(terms[1:], start=terms[0])
        recorder.log_default("train/term", term)
        return loss + term

    def call_at(self, call: LossCall, vector: Tensor) -> ModelPass:
        """Does what ``LossCall.at`` says."""
        live = self.state.vector
        places = zip(live.names, live.parameters, live.places().values(), strict=True)
        tensors = {name: _view(vector[place], p).to(p.dtype) for name, p, place in places}
        tensors |= {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        found = ModelPass()

        def keep(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            found.output = output

        with torch.no_grad(), _as_reference(self.module), self._hooked(keep) as found.features:
            functional_call(self.module, tensors, call.args, call.kwargs)
        return found

    @contextmanager
    def _hooked(self, on_output: Callable[..., Any]) -> Iterator[dict[str | None, Tensor]]:
        """Has calls of the module noted within the block; yields where the features of the last one are."""
        features = Features(self.module)

        def note(name: str | None, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            features[name] = args[0] if args else next(iter(kwargs.values()))

        handles = [self.module.register_forward_hook(on_output, with_kwargs=True)]
        for name, layer in self.layers.items():
            handles.append(layer.register_forward_pre_hook(partial(note, name), with_kwargs=True))
        try:
            yield features
        finally:
            for handle in handles:
                handle.remove()

    def _note_call(
        self, own: list[dict[str, Tensor]], _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Any:
        """Takes note of a call of the module, and returns its output as the algorithms change it."""
        self._calls.append(LossCall(output, copy(self._features), args, kwargs))
        for one, mine in zip(self.algorithms, own, strict=False):  # w comes last
            output = one.logits(output, mine)
        return output

    def _expect_calls(self) -> None:
        """Refuses a step that did not call the module, or of which it is not known which call a term is for."""
        count, name = len(self._calls), type(self.module).__name__
        if count and (count == 1 or not any(self.adds)):
            return
        who = " and ".join(type(one).__name__ for one in self.algorithms)
        how = "" if not any(self.adds) else " once"
        raise FederatedError(
            f"Expected `training_step` of {name} to call `self(x)`{how} for {who}, which reads its scores there, but "
            f"it does so {count} times: compute the scores in `forward`, and call `self(x)` instead of a layer."
        )


def _view(vector: Tensor, parameter: Tensor) -> Tensor:
    """Views a part of a flat vector as a parameter of the same memory order; of a tensor under vmap too."""
    strides = parameter.stride()
    order = sorted(range(parameter.ndim), key=lambda dim: -strides[dim])
    shape = [parameter.shape[dim] for dim in order]
    return vector.view(shape).permute([order.index(dim) for dim in range(parameter.ndim)])


@contextmanager
def _as_reference(module: nn.Module) -> Iterator[None]:
    """Puts all parts in eval mode within the block, but for BatchNorm in train mode: see ``LossCall.at``."""
    training = [part for part in module.modules() if part.training and not isinstance(part, _NormBase)]
    for part in training:
        part.training = False
    try:
        yield
    finally:
        for part in training:
            part.training = True


def _scalar(one: LossAlgorithm, term: Any) -> Tensor:
    if not isinstance(term, Tensor) or term.numel() != 1:
        got = f"a tensor of shape {tuple(term.shape)}" if isinstance(term, Tensor) else type(term).__name__
        raise FederatedError(
            f"Expected `term` of {type(one).__name__} to return a scalar tensor, got {got}: reduce it, for example "
            "with `.mean()`."
        )
    return term.reshape(())
