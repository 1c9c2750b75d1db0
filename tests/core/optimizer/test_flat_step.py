"""Local steps of the flat vector at once against those of every parameter: the same bits, whatever users do."""

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW
from torch.optim.lr_scheduler import CyclicLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.optimizer.flat_step import FlatStep
from tests.parts import CLASSES, FEATURES, Classifier, built, federated_data, federated_trainer

STEPS = 2 * 3 * 3  # two rounds of three clients of 20 samples in batches of 8


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 7), nn.ReLU(), nn.Linear(7, CLASSES))


def momentum(module: nn.Module) -> Any:
    return SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)


def adam(module: nn.Module) -> Any:
    return Adam(module.parameters(), lr=0.01)


def groups(module: nn.Module) -> Any:
    last, first = {"params": module.net[2].parameters()}, {"params": module.net[0].parameters(), "lr": 0.3}
    return SGD([last, first], lr=0.1, momentum=0.9)


def classifier(optimizer: Callable[[nn.Module], Any] = momentum) -> Callable[[], Classifier]:
    return lambda: Classifier(mlp(), optimizer)


class Ends(FederatedCallback):
    """Keeps each client's update and, where asked, the optimizer's state as it ends."""

    def __init__(self, states: bool = False) -> None:
        self.updates: list[Tensor] = []
        self.states: list[Any] | None = [] if states else None

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.updates.append(update.delta.clone())
        if self.states is not None:
            self.states.append(copy.deepcopy(trainer.optimizers[0].state_dict()["state"]))


def trained(
    folder: Path, make: Callable[[], Classifier], *callbacks: Any, states: bool = False, **options: Any
) -> tuple[Ends, int]:
    """Trains two rounds of three clients; returns how they ended, and the steps that were taken at once."""
    ends, module = Ends(states), built(make)
    options = {"max_rounds": 2, **options}
    trainer = federated_trainer(folder, *(make_callback() for make_callback in callbacks), ends, **options)
    trainer.fit(module, federated_data(20, 20, 20))
    assert trainer.local_optimizer is not None
    assert trainer.local_optimizer.flat_step is not None
    return ends, trainer.local_optimizer.flat_step.steps


def both(
    monkeypatch: pytest.MonkeyPatch, folder: Path, make: Callable[[], Classifier], *callbacks: Any,
    states: bool = False, **options: Any,
) -> int:  # fmt: skip
    """Trains both ways and expects the same; returns how many steps were taken at once."""
    fast, steps = trained(folder, make, *callbacks, states=states, **options)
    with monkeypatch.context() as patch:
        patch.setattr(FlatStep, "start_client", lambda self: False)
        slow, none = trained(folder, make, *callbacks, states=states, **options)
    assert none == 0
    assert len(fast.updates) == len(slow.updates) == 6
    assert all(torch.equal(a, b) for a, b in zip(fast.updates, slow.updates, strict=True))
    assert str(fast.states) == str(slow.states)
    assert slow.states is None or any(slow.states)
    return steps


@pytest.mark.parametrize(
    "optimizer",
    [
        momentum,
        lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, dampening=0.5),
        lambda m: SGD(m.parameters(), lr=torch.tensor(0.1), momentum=0.9),
        lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9, nesterov=True, foreach=True),
        adam,
        lambda m: Adam(m.parameters(), lr=0.01, foreach=True),
        lambda m: AdamW(m.parameters(), lr=0.01, amsgrad=True),
        lambda m: Adagrad(m.parameters(), lr=0.1, initial_accumulator_value=0.5),
        lambda m: optim.NAdam(m.parameters()),
        lambda m: optim.RAdam(m.parameters()),
        lambda m: optim.Adamax(m.parameters()),
        lambda m: optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
        lambda m: optim.Adadelta(m.parameters()),
        lambda m: optim.ASGD(m.parameters()),
        lambda m: optim.Rprop(m.parameters()),
        groups,
        lambda m: SGD(m.net[2].parameters(), lr=0.1, momentum=0.9),
    ],
    ids=["momentum", "dampening", "tensor_lr", "foreach", "adam", "adam_foreach", "adamw", "adagrad", "nadam",
         "radam", "adamax", "rmsprop", "adadelta", "asgd", "rprop", "groups", "last_layer"],
)  # fmt: skip
def test_every_step_is_taken_at_once_and_leaves_the_same_state(monkeypatch, tmp_path, optimizer):
    assert both(monkeypatch, tmp_path, classifier(optimizer), states=True) == STEPS


def test_steps_without_state_are_taken_at_once(monkeypatch, tmp_path):
    assert both(monkeypatch, tmp_path, classifier(lambda m: SGD(m.parameters(), lr=0.1))) == STEPS


class AfterSecondStep(FederatedCallback):
    """Does something to the optimizer or the module after the second step of a client."""

    def __init__(self, act: Callable[[Any, Any], Any]) -> None:
        self.act = act

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.local_step == 2:
            self.act(trainer.optimizers[0], pl_module)


def reload(own: Any, module: Any) -> None:
    state = copy.deepcopy(own.state_dict())
    for entry in state["state"].values():
        entry["momentum_buffer"].mul_(0.5)
    own.load_state_dict(state)


def clamp(own: Any, module: Any) -> None:
    for p in module.parameters():
        p.data = p.data.clamp(-0.3, 0.3)


ACTS: dict[str, tuple[Callable[[Any, Any], Any], bool]] = {
    "clear": (lambda own, module: own.state.clear(), True),
    "replace": (lambda own, module: setattr(own, "state", defaultdict(dict)), False),
    "zero": (lambda own, module: [s["momentum_buffer"].zero_() for s in own.state.values()], None),
    "zero one": (lambda own, module: own.state[module.net[0].bias]["momentum_buffer"].zero_(), None),
    "one": (lambda own, module: own.state[module.net[0].bias].update(momentum_buffer=torch.ones(7)), True),
    "pop": (lambda own, module: own.state.pop(module.net[0].bias), True),
    "load": (reload, True),
    "clamp": (clamp, False),
    "rate": (lambda own, module: own.param_groups[0].update(lr=0.01), None),
}


@pytest.mark.parametrize(("act", "looks"), ACTS.values(), ids=ACTS)
def test_what_hooks_do_between_steps_counts(monkeypatch, tmp_path, act, looks):
    steps = both(monkeypatch, tmp_path, classifier(momentum), lambda: AfterSecondStep(act))
    assert steps == (STEPS if looks is None else STEPS * 2 // 3)
    idle = trained(tmp_path, classifier(momentum))[0]
    acted = trained(tmp_path, classifier(momentum), lambda: AfterSecondStep(act))[0]
    assert not torch.equal(idle.updates[0], acted.updates[0]), "the act must matter"


def test_a_count_that_a_hook_changes_is_that_of_one_parameter(monkeypatch, tmp_path):
    act = AfterSecondStep(lambda own, module: own.state[module.net[0].bias]["step"].zero_())
    assert both(monkeypatch, tmp_path, classifier(adam), lambda: act, states=True) == STEPS * 2 // 3


class Gradients(FederatedCallback):
    """Replaces the gradients that the optimizer gets."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        for p in pl_module.parameters():
            p.grad = p.grad * 2


def test_gradients_that_hooks_replace_are_stepped(monkeypatch, tmp_path):
    assert both(monkeypatch, tmp_path, classifier(), Gradients) == STEPS


class WarmStart(FederatedCallback):
    """Starts each client with momentum."""

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        for p in pl_module.parameters():
            trainer.optimizers[0].state[p]["momentum_buffer"] = torch.ones_like(p)


def test_a_state_that_is_there_before_the_first_step_is_used(monkeypatch, tmp_path):
    assert both(monkeypatch, tmp_path, classifier(), WarmStart, states=True) == 0


class Heads(Classifier):
    """Only some batches reach the second head."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(FEATURES, 6), adam)
        self.heads = nn.ModuleList(nn.Linear(6, CLASSES) for _ in range(2))

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        h = self.net(x)
        loss = F.cross_entropy(self.heads[0](h), y)
        return loss if y[0] == 1 else loss + F.cross_entropy(self.heads[1](h), y)


def test_parameters_without_gradient_are_left_to_the_optimizer(monkeypatch, tmp_path):
    assert 0 < both(monkeypatch, tmp_path, Heads, states=True) < STEPS


def hooked(kind: str) -> Callable[[nn.Module], Any]:
    def optimizer(module: nn.Module) -> Any:
        own = momentum(module)

        def hook(*_: Any) -> None:
            own.param_groups[0]["lr"] *= 0.9

        getattr(own, f"register_step_{kind}_hook")(hook)
        return own

    return optimizer


@pytest.mark.parametrize(("kind", "steps"), [("pre", 0), ("post", STEPS)])
def test_hooks_on_the_step_are_called(monkeypatch, tmp_path, kind, steps):
    assert both(monkeypatch, tmp_path, classifier(hooked(kind))) == steps


def test_hooks_on_all_optimizers_are_called(monkeypatch, tmp_path):
    calls: list[int] = []
    handle = register_optimizer_step_post_hook(lambda *_: calls.append(1))
    try:
        assert both(monkeypatch, tmp_path, classifier()) == 0
    finally:
        handle.remove()
    assert len(calls) == 2 * STEPS


def test_a_step_that_the_user_replaced_is_called(monkeypatch, tmp_path):
    def optimizer(module: nn.Module) -> Any:
        own = momentum(module)
        step = own.step
        own.step = lambda closure=None: (own.param_groups[0].update(lr=0.05), step())
        return own

    assert both(monkeypatch, tmp_path, classifier(optimizer)) == 0


@pytest.mark.parametrize(
    "schedule", [lambda o: StepLR(o, 1, 0.5), lambda o: CyclicLR(o, 0.01, 0.3, 2, cycle_momentum=True)]
)
def test_schedules_within_a_client_are_followed_without_a_warning(monkeypatch, tmp_path, schedule):
    def optimizer(module: nn.Module) -> Any:
        own = momentum(module)
        return {"optimizer": own, "lr_scheduler": {"scheduler": schedule(own), "interval": "step"}}

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        assert both(monkeypatch, tmp_path, classifier(optimizer)) == STEPS


class Unfreezing(FederatedCallback):
    """Gives the optimizer the first layer in the second round."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.round == 1:
            trainer.optimizers[0].add_param_group({"params": list(pl_module.net[0].parameters()), "lr": 0.3})
            trainer.local_optimizer.start_round()


def test_a_group_that_is_added_between_rounds_is_stepped(monkeypatch, tmp_path):
    make = classifier(lambda m: SGD(m.net[2].parameters(), lr=0.1, momentum=0.9))
    assert both(monkeypatch, tmp_path, make, Unfreezing) == STEPS
    ends, _ = trained(tmp_path, make, Unfreezing)
    assert ends.updates[0][: FEATURES * 7].abs().sum() > 0


def test_frozen_parameters_among_the_optimizers_do_not_hinder(monkeypatch, tmp_path):
    def make() -> Classifier:
        module = Classifier(mlp(), momentum)
        module.net[0].requires_grad_(False)
        return module

    assert both(monkeypatch, tmp_path, make) == STEPS


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (lambda m: SGD(m.parameters(), lr=0.1, fused=True), {}),
        (momentum, {"precision": "bf16-true"}),
        (type("Own", (SGD,), {"step": lambda self, closure=None: SGD.step(self, closure)}), {}),
    ],
    ids=["fused", "bfloat16", "subclass"],
)
def test_where_bits_could_differ_the_optimizer_steps_by_itself(monkeypatch, tmp_path, optimizer, options):
    make = (lambda m: optimizer(m.parameters(), lr=0.1)) if isinstance(optimizer, type) else optimizer
    assert both(monkeypatch, tmp_path, classifier(make), **options) == 0


def test_mixed_precision_steps_at_once(monkeypatch, tmp_path):
    assert both(monkeypatch, tmp_path, classifier(), precision="bf16-mixed") == STEPS


def test_after_the_run_the_state_is_an_empty_one(tmp_path):
    make, ends = classifier(), Ends()
    trainer = federated_trainer(tmp_path, ends)
    trainer.fit(built(make), federated_data(20))
    assert dict(trainer.optimizers[0].state) == {}
    assert "momentum" in str(trainer.optimizers[0].state_dict())
