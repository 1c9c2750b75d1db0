"""Trains the clients of a cohort one after another, with Lightning's automatic or manual optimization."""

from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.aggregators import Aggregator
from lightning_fed.client_algorithms.base import ClientAlgorithm
from lightning_fed.client_algorithms.losses import LossAlgorithm
from lightning_fed.core.devices import is_device_fault
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.seeding import Purpose, seed_everywhere, seed_for
from lightning_fed.core.train_state import LocalOptions
from lightning_fed.core.updates import Client, Need, Update
from lightning_fed.core.user_code import accepts, overrides
from lightning_fed.engines.base import ClientTrainer, FinishedClient, TrainingParts
from lightning_fed.engines.client_batches import (
    explained_batches,
    read_batches,
    samples_in_epoch,
    send_order,
    steps_in_epochs,
)
from lightning_fed.engines.local_step import LocalStep
from lightning_fed.engines.trial import Attributes
from lightning_fed.errors import FederatedError
from lightning_fed.functional.clients import difference

__all__ = ["ManualStep", "SequentialTrainer"]

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


class SequentialTrainer(ClientTrainer):
    """Loads the global model by one copy, runs local steps, and reads the update by one subtraction."""

    def __init__(self, parts: TrainingParts) -> None:
        super().__init__(parts)
        module = self.module
        self.step = (LocalStep if module.automatic_optimization else ManualStep)(parts)
        self.delta = torch.empty_like(self.state.weights)
        self.client_start_hooks = self.hooks.bound("on_client_start")
        self.step_start_hooks = self.hooks.bound("on_local_step_start")
        self.batch_start_hooks = self.hooks.bound("on_train_batch_start")
        self.batch_end_hooks = self.hooks.bound("on_train_batch_end", module=True)
        self.module_batch_start = module.on_train_batch_start if overrides(module, "on_train_batch_start") else None
        self.stream = torch.Generator()  # seeded for each client, which takes half as long as making a new one
        self.rates: list[tuple[float, float]] = []
        if parts.needs_distance:  # read as a step ends: hooks change rates up to the last moment, and steps are skipped
            local = self.optimizer
            local.optimizer.register_step_post_hook(
                lambda *_: None if self.phases.in_head else self.rates.append(local.step_options)
            )
        if self.options.changes_rates:  # after the hook above, which reads the scaled rates
            self.optimizer.scale_rates()

    def train(self, clients: tuple[Client, ...]) -> Iterator[FinishedClient]:
        for client in clients:
            if self.options.tolerance.max_diverged:
                self.recorder.mark()
            if (steps := self._train_or_skip(client)) is not None:
                yield self._finish(client, steps)

    def _train_or_skip(self, client: Client) -> int | None:
        """Trains one client; returns the steps taken, None if an exception leaves it out."""
        if self.options.tolerance.on_client_error == "raise":
            return self.train_client(client)
        before = Attributes(self.module)
        try:
            return self.train_client(client)
        except Exception as error:
            if is_device_fault(error):
                raise
            self.divergence.leave_out(client, error)
            before.put_back()
            self._leave_client()
            self.recorder.roll_back()
            return None

    def train_client(self, client: Client) -> int:
        """Trains one client in the resident module, where it stays; returns the steps taken."""
        self._start_client(client)
        with explained_batches((client,), self.state.source.batch_size):
            steps = self._run_local_steps(client)
        self.watch.end_client()
        self._leave_client()
        return steps

    def _start_client(self, client: Client) -> None:
        """Puts a client at the global model, or where hooks displace it."""
        state, at = self.state, (client.round, client.id)
        state.enter(client, self.parts.start)
        state.vector.data.copy_(self.parts.start)
        state.load_own(client.id)
        state.buffers.load(client)
        self.optimizer.start_client()
        self.optimizer.lr_factor = client.lr_factor
        self.rates.clear()
        self.stream.manual_seed(seed_for(state.seed, Purpose.SHUFFLE, *at))
        self.start_gradients.load(client)
        seed_everywhere(seed_for(state.seed, Purpose.LOCAL, *at))
        for hook in self.client_start_hooks:
            hook(client)
        self.optimizer.fresh.begin()
        self.watch.start_client()

    def _leave_client(self) -> None:
        """Cleans up after a client, before the next one; frozen parameters that it moved are buffers from now on."""
        moved, count = self.state.buffers.take_in_moved(), self.parts.processes.size
        if moved and count > 1:
            raise FederatedError(
                "Expected `--trainer.devices 1` where training moves frozen parameters, as it does "
                f"`{next(iter(moved))}` of {type(self.module).__name__}, got {count} processes: register it as a "
                "buffer."
            )
        self.state.leave_client()
        self.recorder.batch_size = 1
        self.state.vector.refresh()

    def _finish(self, client: Client, steps: int) -> FinishedClient:
        """Reads the update of the trained client, which stays in the resident module."""
        state, module = self.state, type(self.module).__name__
        difference(state.vector.data, state.origin, self.delta)
        if not steps and torch.count_nonzero(self.delta):
            raise FederatedError(
                f"Expected {module} to train by the loss that `training_step` returns, but it changed its weights "
                "itself: set `automatic_optimization = False` if it steps its optimizers."
                if self.module.automatic_optimization
                else f"Expected `training_step` of {module} to step an optimizer of `self.optimizers()`, because "
                "`automatic_optimization` is False, but it changed the weights itself."
            )
        update = Update(client, self.delta, steps, gradient=self.step.last_gradient)
        return FinishedClient(update, state.origin, rates=self.rates)

    def _run_local_steps(self, client: Client) -> int:
        """Runs local epochs or steps; returns the optimizer steps taken."""
        most, window, steps, filled = client.steps or self.options.local_steps, self.step.accumulate, 0, 0
        skipping, steps_before = False, -1
        for batch, batch_idx, last in self._batches(client):
            if batch_idx == 0 and most is not None:
                if steps == steps_before:  # the module skips every epoch before its first step: there is no end to it
                    break
                steps_before = steps
            self.state.is_last_batch = last
            skipping = skipping and batch_idx > 0
            if skipping:
                continue
            if filled == 0:
                for hook in self.step_start_hooks:
                    hook(client, steps)
            for hook in self.batch_start_hooks:
                hook(batch, batch_idx)
            if self.module_batch_start is not None and self.module_batch_start(batch, batch_idx) == -1:
                skipping, filled = True, 0  # the rest of the epoch, as the module asks
                continue
            filled += 1
            closes = filled == window or last
            output = self.step.step(batch, batch_idx, filled == 1, closes)
            if closes:
                filled = 0
                if self.step.taken:
                    steps += 1
                    self.optimizer.after_step(steps)
                    self.state.local_step = steps
            if self.batch_end_hooks:
                outputs = self.step.outputs(output)
                for hook in self.batch_end_hooks:
                    hook(outputs, batch, batch_idx)
            if steps == most:
                break
        self.optimizer.fresh.switch("eval")
        return steps

    def _batches(self, client: Client) -> Iterator[tuple[Any, int, bool]]:
        """Yields (batch, index within the epoch, whether it is the epoch's last) over all local epochs."""
        state, size = self.state, self.state.source.batch_size
        samples = samples_in_epoch(state.source, client.num_samples)
        batches, window = -(-samples // size), self.step.accumulate
        per_epoch, epochs, steps = -(-batches // window), self.options.epochs, None
        if client.steps is None and epochs is not None:
            steps = steps_in_epochs(epochs, per_epoch)
        for epoch in count() if steps is None else range(-(-steps // max(per_epoch, 1))):
            # A part of an epoch is its first batches; of a whole one all are read, which finds any too many.
            some = batches if steps is None else min(batches, (steps - epoch * per_epoch) * window)
            read = None if some == batches else some
            order = send_order(state.source, torch.randperm(client.num_samples, generator=self.stream)[:samples])
            # Random numbers drawn while reading come from a separate stream for each epoch; tensors need none.
            at = (client.round, client.id, epoch)
            seed = seed_for(state.seed, Purpose.READ, *at) if state.source.reads_are_seeded else 0
            for index, batch in enumerate(islice(read_batches(state.source, client.id, order, seed), read)):
                self.recorder.batch_size = taken = min(size, samples - index * size)
                self.parts.counts.samples += taken
                yield (batch if state.transfer is None else state.transfer(batch, 0)), index, index == some - 1
