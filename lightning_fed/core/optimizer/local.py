"""The optimizer and schedules that a module configures, made fresh for every client without rebuilding them."""

import re
from copy import deepcopy
from traceback import walk_tb
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import LBFGS, Optimizer, SparseAdam

from lightning_fed.core.devices import out_of_memory
from lightning_fed.core.optimizer.flat_step import FlatStep
from lightning_fed.core.optimizer.fresh import FreshOptimizers, expect_own_parameters, of_torch, parse_configured
from lightning_fed.core.vector import ParameterVector
from lightning_fed.errors import FederatedError

__all__ = ["LocalOptimizer"]


class LocalOptimizer:
    """The optimizer, or optimizers, that start each client's round with their initial state and hyper-parameters.

    A schedule with interval ``epoch`` or ``round`` steps once per round. One with interval ``step`` steps after each
    local step. With ``restart`` it starts anew for each client and round. With ``continue`` every client of a round
    starts it after as many steps as the longest client of each earlier round took. Hyper-parameters that the user's
    own code sets between rounds (``self.optimizers().param_groups[0]["lr"] = ...``) hold for all later clients.
    A module that optimizes by itself also steps its schedules; they too are reset for the next client.

    Attributes:
        fresh: What they hold beside state and groups, or all that they hold, put back for each client.
        optimizers: The module's own optimizers, one unless it optimizes by itself.
        optimizer: The first of them.
        schedulers: All schedules, in the order in which the module returns them.
        step_schedulers: Schedules that step with each local step, or whenever the module steps them.
        round_schedulers: Schedules that step with each round.
        lr_factor: The client's own factor on the learning rates, after ``scale_rates``.
        flat_step: Steps the whole flat vector at once in ``step``; None until ``step_flat``.
        needs_closure: Whether the optimizer evaluates the loss itself, as LBFGS and optimizers from elsewhere may.
    """

    def __init__(self, module: LightningModule, restart: bool) -> None:
        self._module = module
        self._restart = restart
        try:
            configured = module.configure_optimizers()
        except FederatedError:  # already one sentence that names the options
            raise
        except (ValueError, TypeError) as error:  # what torch says of a bad option, such as a negative learning rate
            *_, (frame, _) = walk_tb(error.__traceback__)
            if isinstance(error, TypeError) and not str(frame.f_globals.get("__name__")).startswith("torch.optim"):
                raise  # a defect in the user's code
            raise FederatedError(
                f"Expected `{type(module).__name__}.configure_optimizers` to build an optimizer, but it refuses: "
                f"{error}; change `--model.optimizer`, `--model.lr_scheduler`, `--optimizer` or `--lr_scheduler`."
            ) from error
        self.optimizers, self.schedulers = parse_configured(module, configured)
        self.optimizer, self._automatic = self.optimizers[0], module.automatic_optimization
        self.step_schedulers = [c for c in self.schedulers if c.interval == "step" or not self._automatic]
        self.round_schedulers = [c for c in self.schedulers if c.interval != "step" and self._automatic]
        expect_own_parameters(module, self.optimizers)
        self.needs_closure = not of_torch(self.optimizer) or isinstance(self.optimizer, LBFGS)
        self.fresh = FreshOptimizers(module, self.optimizers)
        # Most optimizers start with no state, but some, such as Adagrad, fill it when they are built.
        self._initial = [{p: deepcopy(state) for p, state in each.state.items()} for each in self.optimizers]
        self.flat_step: FlatStep | None = None
        self.lr_factor = 1.0
        self._rates: list[tuple[dict[str, Any], Any, Any]] = []
        self.start_round()
        self._built = [{k: _without_device(repr(v)) for k, v in group.items()} for group in self._groups]
        self._num_built = [len(each.param_groups) for each in self.optimizers]

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters of all optimizers."""
        return [p for group in self._param_groups for p in group["params"]]

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def step_options(self) -> tuple[float, float]:
        """Learning rate and momentum of the next step, those of the first parameter group."""
        group = self.optimizer.param_groups[0]
        return float(group["lr"]), float(group.get("momentum", 0.0))

    def start_round(self) -> None:
        """Remembers hyper-parameters and step schedules as every client of the round finds them."""
        self._groups = [{k: deepcopy(v) for k, v in g.items() if k != "params"} for g in self._param_groups]
        self._step_states = [deepcopy(c.scheduler.state_dict()) for c in self.step_schedulers]
        self.fresh.take()
        if self.flat_step is not None:
            self.flat_step.start_round()

    def step_flat(self, vector: ParameterVector) -> None:
        """Lets ``step`` move the flat vector at once where that gives the same weights."""
        if not isinstance(self.optimizer, SparseAdam):  # which steps by sparse gradients alone
            self.flat_step = FlatStep(self.optimizer, vector, self._initial[0])

    def step(self) -> None:
        """Takes one local step."""
        if self.flat_step is None or not self.flat_step.step():
            self.optimizer.step()

    def refusal(self, error: Exception) -> FederatedError | None:
        """Returns a sentence for what the step of an optimizer from a package raised; None for any other error."""
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        steps = [at for at, f in enumerate(frames) if any(f.f_locals.get("self") is each for each in self.fresh.all)]
        inner = frames[steps[-1] :] if steps else []
        # A step may call the closure, in which the user's code runs; a defect in an optimizer of the user's is shown.
        ours = any(str(f.f_globals.get("__name__")).startswith("lightning_fed.") for f in inner)
        if not inner or ours or "-packages" not in inner[0].f_code.co_filename or out_of_memory(error):
            return None
        name = type(inner[0].f_locals["self"]).__name__
        return FederatedError(
            f"Expected an optimizer that can step by the gradients of `training_step`, but {name} raised "
            f"{type(error).__name__}{f' ({error})' if str(error) else ''}: choose another in `configure_optimizers`, "
            "or by `--optimizer`."
        )

    def scale_rates(self) -> None:
        """Multiplies the learning rates of every step by ``lr_factor``, after schedules and hooks have set them."""
        for optimizer in self.optimizers:
            optimizer.register_step_pre_hook(self._scale)
            optimizer.register_step_post_hook(self._scale_back)

    def _scale(self, optimizer: Optimizer, *_: Any) -> None:
        if self._rates:  # torch also calls this for the step of a base class
            return
        self._rates = [(group, group["lr"], group["lr"] * self.lr_factor) for group in optimizer.param_groups]
        for group, _, own in self._rates:
            group["lr"] = own

    def _scale_back(self, *_: Any) -> None:
        for group, rate, own in self._rates:
            if group["lr"] is own:  # nobody has set it within the step
                group["lr"] = rate
        self._rates = []

    def start_client(self) -> None:
        """Forgets the last client: puts state, hyper-parameters, attributes and step schedules back."""
        self.lr_factor, self._rates = 1.0, []
        self.fresh.put_back()
        if not self.fresh.copies and (self.flat_step is None or not self.flat_step.start_client()):
            for optimizer, initial in zip(self.optimizers, self._initial, strict=True):
                optimizer.state.clear()
                optimizer.state.update({p: deepcopy(state) for p, state in initial.items()})
        for group, values in zip(self._param_groups, self._groups, strict=True):
            for key in group.keys() - values.keys() - {"params"}:
                del group[key]
            group.update({k: v.clone() if isinstance(v, Tensor) else v for k, v in values.items()})
        for config, state in zip(self.step_schedulers, self._step_states, strict=True):
            config.scheduler.load_state_dict(deepcopy(state))

    def after_step(self, step: int) -> None:
        """Advances the step schedules after local step number ``step`` (from 1), unless the module does."""
        for config in self.step_schedulers if self._automatic else ():
            if step % config.frequency == 0:
                self._advance(config)

    def _advance(self, config: LRSchedulerConfig, metric: Any = None) -> None:
        try:
            self._module.lr_scheduler_step(config.scheduler, metric)
        except ValueError as error:
            if "zip()" not in str(error):
                raise
            name, groups = type(config.scheduler).__name__, len(self._param_groups)
            raise FederatedError(
                f"Expected a schedule for the {groups} parameter groups of the optimizer, one of which a callback has "
                f"added, but {name} was made for fewer: choose one that multiplies each group's own rate, such as "
                "StepLR or ExponentialLR, in `configure_optimizers` or `--lr_scheduler`."
            ) from error

    def end_round(self, round: int, max_steps: int, metrics: dict[str, Any]) -> None:
        """Advances the schedules by a round.

        Args:
            round: Index of the round that ends, from 1.
            max_steps: Local steps of the client that took most.
            metrics: What the round logged, for schedules that monitor a metric; they do not step if nobody trained.
        """
        if not self._restart:
            for step in range(1, max_steps + 1):
                self.after_step(step)
        for config in self.round_schedulers:
            if round % config.frequency == 0 and (max_steps or not config.reduce_on_plateau):
                self._step_round(config, metrics)
        self.start_round()

    def _step_round(self, config: LRSchedulerConfig, metrics: dict[str, Any]) -> None:
        if not config.reduce_on_plateau:
            self._advance(config)
        elif config.monitor in metrics:
            self._advance(config, metrics[config.monitor])
        elif config.strict:
            raise FederatedError(
                f"Expected `monitor={config.monitor!r}` of the learning-rate schedule to name a logged metric, "
                f"got only {', '.join(sorted(metrics)) or 'none'}: change it in `configure_optimizers`."
            )

    def _added(self) -> list[list[list[str]]]:
        """Names the parameters of the groups that callbacks have added to each optimizer."""
        names = {p: name for name, p in self._module.named_parameters()}
        return [
            [[names[p] for p in group["params"]] for group in optimizer.param_groups[count:]]
            for optimizer, count in zip(self.optimizers, self._num_built, strict=True)
        ]

    def state_dict(self) -> dict[str, Any]:
        """Returns hyper-parameters and schedules between rounds; no client's optimizer state outlives its round."""
        return {
            "built": self._built,
            "groups": self._groups,
            "added": self._added(),
            "step_schedulers": self._step_states,
            "round_schedulers": [c.scheduler.state_dict() for c in self.round_schedulers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores what ``state_dict`` returned; refuses changed optimizer options, because they would be lost."""
        self._expect_same(state["built"])
        named = dict(self._module.named_parameters())
        for optimizer, groups in zip(self.optimizers, state.get("added", ()), strict=False):
            for names in groups:
                optimizer.add_param_group({"params": [named[name] for name in names if name in named]})
        schedulers = {"step_schedulers": len(self.step_schedulers), "round_schedulers": len(self.round_schedulers)}
        for name, count in {"groups": len(self._param_groups), **schedulers}.items():
            if len(state[name]) != count:
                raise FederatedError(
                    f"Expected the checkpoint to hold {count} {name.replace('_', ' ')} of the optimizer, got "
                    f"{len(state[name])}: a resumed run keeps them, start a new one with `--weights`."
                )
        self._groups = [_placed(*pair) for pair in zip(state["groups"], self._param_groups, strict=True)]
        self._step_states = state["step_schedulers"]
        for config, scheduler in zip(self.round_schedulers, state["round_schedulers"], strict=True):
            config.scheduler.load_state_dict(scheduler)
        self.start_client()

    def _expect_same(self, built: list[dict[str, str]]) -> None:
        if len(built) != len(self._built):
            changed = [("number of parameter groups", str(len(built)), str(len(self._built)))]
        else:
            pairs = zip(built, self._built, strict=True)
            both = [(k, _without_device(was[k]), now[k]) for was, now in pairs for k in was.keys() & now.keys()]
            changed = [(k, was, now) for k, was, now in both if was != now]
        if changed:
            name, was, now = sorted(changed)[0]
            raise FederatedError(
                f"Expected the optimizer of the checkpoint's run, with {name} {was}, got {now}: a resumed run keeps "
                "its options; to change them, start a new run with `--weights` instead of `--ckpt_path`."
            )


def _without_device(value: str) -> str:
    """Removes the device from a hyper-parameter's text, because a run may resume on another device."""
    return re.sub(r", device='[^']*'", "", value)


def _placed(saved: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Moves tensors among saved hyper-parameters to the devices of the module's own."""
    return {
        key: value.to(own[key].device) if isinstance(value, Tensor) and isinstance(own.get(key), Tensor) else value
        for key, value in saved.items()
    }
