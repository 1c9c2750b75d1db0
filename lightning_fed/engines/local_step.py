"""One local optimizer step, as Lightning's automatic optimization would take it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS

from lightning_fed.client_algorithms.losses import ClientLosses
from lightning_fed.core.recorder import outside_graphs
from lightning_fed.core.user_code import accepts, loss_of, overrides
from lightning_fed.engines.base import TrainingParts
from lightning_fed.engines.second_pass import BatchGradient
from lightning_fed.engines.vectorized.step import SampleGradients
from lightning_fed.errors import FederatedError, expect

__all__ = ["LocalStep"]

_SKIPPED = "`training_step` returned None: such batches are skipped and do not count as local steps."


class LocalStep:
    """Forward, backward, hooks, clipping and step on the resident module.

    What is constant over a run is resolved once here: which hooks are overridden, whether precision needs a context.

    Attributes:
        last_gradient: Each step's raw gradient, shape (d,), before terms are added and clipping, if it is asked for.
        client_losses: Changes the loss before the backward pass; None if no client algorithm does.
        taken: Whether the last ``step`` moved the weights: it does not if ``training_step`` skipped the whole window.
    """

    def __init__(self, parts: TrainingParts) -> None:
        state, options, hooks, module = parts.state, parts.options, parts.hooks, parts.module
        self.state, self.options, self.module, self.recorder = state, options, module, state.recorder
        self.vector, self.local, self.phases = state.vector, state.optimizer, parts.phases
        self.former = self.local.flat_step
        self.local.step_flat(self.vector)
        self.optimizer = self.local.optimizer
        self.precision: Precision = state.fabric.strategy.precision
        self.plain_forward = type(self.precision) is Precision
        self.plain_backward = type(self.precision).backward is Precision.backward
        self.takes_batch_idx = accepts(module.training_step, "batch_idx", 2)
        self.replays = options.compile_mode in ("reduce-overhead", "max-autotune")
        self.forward: Callable[..., Any] = module.training_step
        if options.compile_mode:
            recorder = state.recorder
            recorder.log = outside_graphs(recorder.log)  # type: ignore[method-assign]  # shared by all clients
            self.forward = torch.compile(module.training_step, mode=options.compile_mode)
        self.client_losses = ClientLosses.of(state, options, hooks.callbacks)
        if self.client_losses is not None:
            self.forward = partial(self.client_losses.step, self.forward)
        self.accumulate = options.accumulate_grad_batches
        expect(
            self.accumulate == 1 or not isinstance(self.optimizer, LBFGS),
            "Expected `--trainer.accumulate_grad_batches 1` with LBFGS, which evaluates its last batch again and "
            f"again, got {self.accumulate}: choose a larger `--data.batch_size` instead.",
        )
        self.clip_val = options.gradient_clip_val
        self.own = {
            hook: getattr(module, hook)
            for hook in ("backward", "optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping")
            if overrides(module, hook)
        }
        self.before_zero_grad = hooks.bound("on_before_zero_grad", module=True)
        self.before_backward = hooks.bound("on_before_backward", module=True)
        self.after_backward = hooks.bound("on_after_backward", module=True)
        self.before_step = hooks.bound("on_before_optimizer_step", module=True)
        self.second = BatchGradient(parts, self.forward, self.client_losses) if parts.asks_twice else None
        if self.second is not None:
            self.before_step = self.second.within(self.before_step)
        self.samples = SampleGradients(parts, parts.combines) if parts.combines else None
        self.taken = self._warned = False
        self.last_gradient = torch.empty_like(state.weights) if parts.gradients.at == "last_step" else None
        self.undisplaced: Tensor | None = None
        self.with_closure = state.optimizer.needs_closure or "optimizer_step" in self.own

    def step(self, batch: Any, batch_idx: int, first: bool, closes: bool) -> Any:
        """Adds a batch's gradient; steps the optimizer with the batch that closes a window, if that has a gradient.

        Args:
            batch: The batch, on the device.
            batch_idx: Its index within the epoch.
            first: Whether it opens an accumulation window.
            closes: Whether it closes one.

        Returns:
            What ``training_step`` returned.
        """
        gradient = self._gradient if self.state.displacement is None else self._displaced_gradient
        if not (closes and self.with_closure):
            output, _ = gradient(batch, batch_idx, first)
            if self.replays and not closes:  # out of the memory of CUDA graphs, which the next batch writes to
                self.vector.collect_gradients(more=True)
            if closes and self.taken:
                self._before_step()
                self.local.step()
            return output
        outputs: list[Any] = []
        if first and self.state.local_step == 0:  # some optimizers look at gradients before they call the closure
            self.vector.drop_gradients()

        @torch.enable_grad()
        def closure() -> Tensor | None:
            output, loss = gradient(batch, batch_idx, first)
            outputs[:] = [output]
            if self.taken:
                self._before_step()
            elif isinstance(self.optimizer, LBFGS):  # which needs a loss to step
                raise FederatedError(
                    f"Expected `{type(self.module).__name__}.training_step` to return a loss for LBFGS, which needs it "
                    "to step, got None: choose another optimizer in `configure_optimizers`."
                )
            return None if loss is None else loss.detach()

        if "optimizer_step" in self.own:
            self.own["optimizer_step"](self.state.epochs, batch_idx, self.optimizer, closure)
        else:
            self.optimizer.step(closure)  # type: ignore[arg-type]  # torch asks for float, LBFGS takes a tensor
        if not outputs:
            raise FederatedError(
                f"Expected `{type(self.module).__name__}.optimizer_step` or {type(self.optimizer).__name__} to call "
                "the closure that it is given, which trains on the batch: pass it on as `optimizer.step(closure)`."
            )
        return outputs[0]

    def close(self) -> None:
        """Lets the optimizer step as it did before."""
        self.local.flat_step = self.former

    def _zero_grad(self, batch_idx: int) -> None:
        for hook in self.before_zero_grad:
            hook(self.optimizer)
        own = self.own.get("optimizer_zero_grad")
        # However the user's code zeroes gradients, none of the client before may remain.
        if own is None or self.state.local_step == 0:
            self.vector.drop_gradients()
        if own is not None:
            own(self.state.epochs, batch_idx, self.optimizer)

    def outputs(self, output: Any) -> dict[str, Any]:
        """Converts what ``training_step`` returned to what Lightning gives to ``on_train_batch_end``."""
        if output is None:
            return {}
        extra = output if isinstance(output, dict) else {}
        return {**extra, "loss": loss_of(output, self.module).detach() / self.accumulate}

    def _displaced_gradient(self, batch: Any, batch_idx: int, first: bool) -> tuple[Any, Tensor | None]:
        """Takes the gradient at the live weights less the client's displacement; see ``_gradient``."""
        displacement, weights = self.state.displacement, self.vector.data
        assert displacement is not None
        if self.undisplaced is None or self.undisplaced.dtype != weights.dtype:
            self.undisplaced = torch.empty_like(weights)
        self.undisplaced.copy_(weights)
        weights.sub_(displacement)
        result = self._gradient(batch, batch_idx, first)
        weights.copy_(self.undisplaced)  # copied: adding it back would leave rounding errors, which sign votes count
        return result

    def _gradient(self, batch: Any, batch_idx: int, first: bool) -> tuple[Any, Tensor | None]:
        """Takes the gradient at the live weights.

        Returns:
            What ``training_step`` returned, and the loss as it went into the backward pass, if there is one.
        """
        if first:
            self.taken = False
        if self.samples is not None and self.state.client is not None:
            self.taken, vector = True, self.vector
            self._zero_grad(batch_idx)
            vector.zero_grad()
            held = self.state.buffers.live.tensors()
            self.samples(self.state.client, batch, batch_idx, vector.all_data, held, vector.all_grad)
            return None, None
        args = (batch, batch_idx) if self.takes_batch_idx else (batch,)
        if self.second is not None:
            self.second.note(args)
        if self.plain_forward:
            output = self.forward(*args)
        else:
            with self.precision.forward_context():
                output = self.forward(*args)
        if output is None:  # skipped as in Lightning: the batch adds no gradient
            if not self._warned:
                self._warned = True
                rank_zero_warn(_SKIPPED)
            if first:
                self._zero_grad(batch_idx)
            return None, None
        loss = loss_of(output, self.module)
        self.recorder.log_default("train/loss", loss)
        if self.client_losses is not None:
            with self.precision.forward_context():
                loss = self.client_losses.total(loss, batch, self.recorder)
        self.taken = True
        if self.accumulate > 1:
            loss = loss / self.accumulate
        # After the forward pass, as in Lightning: gradients of a backward pass within `training_step` do not count.
        if first:
            self._zero_grad(batch_idx)
        for hook in self.before_backward:
            hook(loss)
        if "backward" in self.own:
            self.own["backward"](loss)
        elif self.plain_backward:
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        else:
            self.precision.backward(loss, self.module)
        for hook in self.after_backward:
            hook()
        return output, loss

    def _before_step(self) -> None:
        """Lets callbacks scale the gradient and add to it, then clips: the order is scale, add, clip, step."""
        if self.last_gradient is not None:
            self.last_gradient.copy_(self.vector.grad)
            for part in self.state.untrained:
                self.last_gradient[part] = 0
        for hook in self.before_step:
            hook(self.optimizer)
        if self.phases.alternate:  # after the hooks, which may add to any gradient
            self.vector.hide(self.phases.held)
        if "configure_gradient_clipping" in self.own:
            self.own["configure_gradient_clipping"](self.optimizer, self.clip_val, self.options.gradient_clip_algorithm)
        elif self.clip_val:
            by_value = self.options.gradient_clip_algorithm == "value"
            clip: Any = torch.nn.utils.clip_grad_value_ if by_value else torch.nn.utils.clip_grad_norm_
            # What the optimizer trains, in its order, as Lightning does.
            clip([p for group in self.optimizer.param_groups for p in group["params"]], self.clip_val)
