"""One local step of a module with Lightning's manual optimization."""

from collections.abc import Callable
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.aggregators import Aggregator
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.client_algorithms.losses import LossAlgorithm
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.train_state import LocalOptions
from lightning_fed.core.updates import Need
from lightning_fed.core.user_code import accepts
from lightning_fed.engines.base import TrainingParts
from lightning_fed.errors import FederatedError

__all__ = ["ManualStep"]

_LENT = ("_lightning_optimizers", "backward")  # where the module finds what stands in for its optimizers
_BY_DISTANCE = "divides by the distance that one optimizer travels"


class ManualStep:
    """Calls ``training_step``, in which the module takes gradients and steps its optimizers as it likes.

    Attributes:
        taken: Whether the last ``step`` stepped an optimizer.

    Raises:
        FederatedError: If an option or callback needs gradients or steps that only automatic optimization has.
    """

    accumulate = 1
    last_gradient: Tensor | None = None

    def __init__(self, parts: TrainingParts) -> None:
        state, hooks, module = parts.state, parts.hooks, parts.module
        _expect_options(parts.options, module)
        for callback in hooks.callbacks:
            if why := _needs_gradients(callback):
                name = type(callback).__name__
                raise _refusal(module, f"{name} {why}", "leave it out of `--aggregator`, `--client` or `callbacks`")
        self.state, self.module, self.recorder = state, module, state.recorder
        self.lightning_module = module
        self.precision = state.fabric.strategy.precision
        self.takes_batch_idx = accepts(module.training_step, "batch_idx", 2)
        self.before_backward = hooks.bound("on_before_backward", module=True)
        self.after_backward = hooks.bound("on_after_backward", module=True)
        self.before_step = hooks.bound("on_before_optimizer_step", module=True)
        self.taken = False
        optimizers, kind = state.optimizer.optimizers, cast(Any, LightningOptimizer)
        self._handles = [optimizer.register_step_post_hook(self._note_step) for optimizer in optimizers]
        # The module's `optimizers` and `manual_backward` call this object.
        self._strategy = vars(state.fabric.strategy)
        self._former = {name: self._strategy[name] for name in _LENT if name in self._strategy}
        wrapped = [kind._to_lightning_optimizer(optimizer, self) for optimizer in optimizers]
        self._strategy.update(zip(_LENT, (wrapped, self.backward), strict=True))

    def close(self) -> None:
        """Lets the module's ``optimizers`` and ``manual_backward`` call again what they called before."""
        for handle in self._handles:
            handle.remove()
        for name in _LENT:
            del self._strategy[name]
        self._strategy.update(self._former)

    def _note_step(self, *_: Any) -> None:
        self.taken = True
        self.state.optimizer_steps += 1

    def step(self, batch: Any, batch_idx: int, first: bool, closes: bool) -> Any:
        """Runs ``training_step`` on a batch; only before a client's first one are gradients cleared.

        ``first`` and ``closes`` are ignored, because the module accumulates gradients itself.

        Returns:
            What ``training_step`` returned.
        """
        self.taken = False
        if batch_idx == 0 and self.state.local_step == 0:
            for parameter in self.module.parameters():
                parameter.grad = None
        with self.precision.forward_context():
            output = self.module.training_step(*((batch, batch_idx) if self.takes_batch_idx else (batch,)))
        loss = output.get("loss") if isinstance(output, dict) else output
        if isinstance(loss, Tensor) and loss.numel() == 1:
            self.recorder.log_default("train/loss", loss)
        return output

    def outputs(self, output: Any) -> dict[str, Any]:
        """Converts what ``training_step`` returned to what Lightning gives to ``on_train_batch_end``."""
        given = dict(output) if isinstance(output, dict) else {} if output is None else {"loss": output}
        return {key: value.detach() if key == "loss" else value for key, value in given.items()}

    def backward(self, loss: Tensor, _: Any, *args: Any, **kwargs: Any) -> None:
        """Does what the module's ``manual_backward`` asks for, with hooks before and after it."""
        for hook in self.before_backward:
            hook(loss)
        self.module.backward(loss, *args, **kwargs)
        for hook in self.after_backward:
            hook()

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        """Takes the ``step`` of one of the module's ``optimizers``, with hooks before it."""

        @torch.enable_grad()
        def with_hooks() -> Any:
            result = closure()
            for hook in self.before_step:
                hook(optimizer)
            return result

        return optimizer.step(with_hooks, **kwargs)


def _expect_options(options: LocalOptions, module: LightningModule) -> None:
    for name, given in {
        "gradient_clip_val": options.gradient_clip_val,
        "accumulate_grad_batches": options.accumulate_grad_batches > 1,
        "compile": options.compile_mode,
        "local_schedule continue": options.local_schedule == "continue",
    }.items():
        if given:
            raise _refusal(
                module, f"`--trainer.{name}` is for optimization by the trainer", f"remove `--trainer.{name}`"
            )


def _needs_gradients(callback: Any) -> str:
    """Returns what a callback needs that only automatic optimization has; empty if it needs only weights."""
    if isinstance(callback, Aggregator):
        if callback.all_needs & Need.ANY_GRADIENT:
            return "asks for the clients' gradients"
        if callback.all_needs & Need.ANY_LOSS:
            return "asks for the clients' losses at the global model, by passes that must not train"
        return _BY_DISTANCE if Need.NORMALIZED_MEAN in callback.all_needs else ""
    own = getattr(type(callback), "start_gradients", None)
    if own not in (None, FederatedCallback.start_gradients):
        return "asks for gradients over a client's data"
    if isinstance(callback, ClientAlgorithm):
        if callback.needs_distance:
            return _BY_DISTANCE
        if type(callback).on_before_optimizer_step is not FederatedCallback.on_before_optimizer_step:
            return "adds to the gradient of each local step"
        if isinstance(callback, LossAlgorithm):
            return "changes the loss before the backward pass"
        if callback.displaces:
            return "moves the point where gradients are taken"
    return ""


def _refusal(module: LightningModule, what: str, change: str) -> FederatedError:
    return FederatedError(
        f"Expected automatic optimization, but {type(module).__name__} sets `automatic_optimization = False`, and "
        f"{what}: {change}, or return the loss from `training_step`."
    )
