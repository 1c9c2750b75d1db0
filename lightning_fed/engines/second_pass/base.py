"""What a second gradient of a batch is, whoever computes it."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.optim import LBFGS
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_fed.engines.base import Engine
from lightning_fed.engines.trial import without_trace
from lightning_fed.errors import FederatedError

__all__ = ["SecondGradient"]


class SecondGradient(ABC):
    """``trainer.gradient_at``: the gradient of the step's batch at other live weights, by the function of the first.

    The second pass finds the random streams and buffers that the first one found, so that at the live weights it gives
    the first gradient again. It goes through ``training_step`` and ``backward``, not through hooks around these, and
    leaves no trace: what it logs is dropped; buffers, attributes, random streams and the first gradient stay. With a
    displacement the gradient is taken at the point less that. Its samples count as gradients, not as trained samples.
    Both gradients are zero where no client's optimizer steps, so that no length counts, and no point moves, there.

    Args:
        engine: The engine of the run; its client algorithms say who asks.

    Raises:
        FederatedError: If a step of the run has several gradients of its own already, or is compiled.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.state, self.module = engine, engine.state, engine.module
        self._is_open = False
        _expect_one_gradient(engine)
        engine.state.gradient_at = self

    def within(self, hooks: list[Callable[..., Any]]) -> list[Callable[..., Any]]:
        """Makes of the hooks before a step one that lets them ask."""

        def call(*args: Any) -> None:
            self._is_open = True
            for place in self.state.untrained:
                self.state.vector.grad[..., place] = 0
            try:
                for hook in hooks:
                    hook(*args)
            finally:
                self._is_open = False
                self.forget()

        return [call]

    def __call__(self, point: Tensor, out: Tensor, part: tuple[int, int] | None = None) -> None:
        """Computes the gradient.

        Args:
            point: Live weights, shape (d,), or (m, d) for m clients at once.
            out: Receives the gradients, of the same shape.
            part: (k, n) for the k-th, from 0, of n parts of the batch as equal as can be.
        """
        if not self._is_open:
            raise FederatedError(
                "Expected `trainer.gradient_at` to be called in `on_before_optimizer_step`, got a call where there is "
                "no batch of a local step: move it there."
            )
        if part is not None and not 0 <= part[0] < part[1]:
            raise FederatedError(f"Expected `part` of `trainer.gradient_at` to be (k, n) with 0 ≤ k < n, got {part!r}.")
        with without_trace(self.module, self.state.buffers.parameters, quick=True):
            self._compute(point, out, part)
        for place in self.state.untrained:
            out[..., place] = 0

    @abstractmethod
    def _compute(self, point: Tensor, out: Tensor, part: tuple[int, int] | None) -> None:
        """Computes it; what is to be put back in the end is taken care of, but for weights and gradients."""

    @abstractmethod
    def forget(self) -> None:
        """Lets go of the batch."""

    def take(self, batch: Any, size: int, part: tuple[int, int] | None, dim: int) -> tuple[Any, int]:
        """Takes a part of a batch of a size, whose samples lie along a dimension; returns it and its size."""
        if part is None:
            return batch, size
        start, stop = (size * place // part[1] for place in (part[0], part[0] + 1))
        leaves, spec = tree_flatten(batch)
        cut = [isinstance(leaf, Tensor) and leaf.ndim > dim and leaf.shape[dim] == size for leaf in leaves]
        if start == stop or not any(cut):
            raise FederatedError(
                f"Expected batches of at least {part[1]} samples, in tensors, of which {self.asking} takes {part[1]} "
                f"parts, got one of {size}: choose another `--data.batch_size`, or set `--data.drop_last true`."
            )
        taken = [t.narrow(dim, start, stop - start) if own else t for t, own in zip(leaves, cut, strict=True)]
        return tree_unflatten(taken, spec), stop - start

    @property
    def asking(self) -> str:
        """The name of the client algorithm that asks."""
        return next(type(each).__name__ for each in self.engine.algorithms if each.takes_second_gradient)


def _expect_one_gradient(engine: Engine) -> None:
    """Refuses a step that adds up gradients, asks for several, or whose compiled form draws other random numbers."""
    options, optimizer = engine.options, engine.optimizer.optimizer
    name = next(type(each).__name__ for each in engine.algorithms if each.takes_second_gradient)
    why = f"for {name}, which takes a second gradient of the batch of each step"
    if options.accumulate_grad_batches > 1:
        raise FederatedError(
            f"Expected `--trainer.accumulate_grad_batches 1` {why}, got {options.accumulate_grad_batches}: choose a "
            "larger `--data.batch_size` instead."
        )
    if isinstance(optimizer, LBFGS):
        raise FederatedError(
            f"Expected an optimizer that takes one gradient in a step {why}, got LBFGS: change `--model.optimizer`."
        )
    if options.compile_mode is not None:
        raise FederatedError(f"Expected `--trainer.compile false` {why}, got {options.compile_mode}: leave it out.")
