"""Every client's optimizer is the one that ``configure_optimizers`` made: against loops that make one each time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from lightning_fed.client_algorithms import LocalOnly, PersonalParameters
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from tests.parts import Classifier, federated_data, federated_trainer

X = torch.tensor([[-1.5], [-1.0], [-0.5], [0.25], [0.5], [1.0], [1.25], [1.5]])


class Decay(Optimizer):
    """Counts its steps in a group, as many public optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                p.sub_(p.grad, alpha=group["lr"] / group["step"])


class Counts(SGD):
    """Counts them in an attribute that is there from the start, and in one that is not."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        self.calls, self.seen = 0, {"longest": 0}

    def step(self, closure: Any = None) -> None:
        self.calls, self.later = self.calls + 1, getattr(self, "later", 0) + 1
        self.seen["longest"] += 1
        self.param_groups[0]["lr"] = 0.1 / (self.calls + self.later + self.seen["longest"])
        super().step(closure)


class Around(Optimizer):
    """Steps another optimizer, whose groups it shows as its own."""

    def __init__(self, inner: Any) -> None:
        self.parts = {"inner": [inner]}
        super().__init__(inner.param_groups, inner.defaults)
        self.param_groups = inner.param_groups

    def step(self, closure: Any = None) -> None:
        self.parts["inner"][0].step(closure)


class Slow(Optimizer):
    """Lookahead as first published: slow weights and zeros for sums from the start, in state and in a list."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}
        self.defaults, self.state, self.steps = inner.defaults, {}, 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in inner.param_groups]
        self.sums = [torch.zeros_like(p) for p in inner.param_groups[0]["params"]]

    @property
    def param_groups(self) -> Any:
        return self.inner.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step(closure)
        self.steps += 1
        for p, total in zip(self.param_groups[0]["params"], self.sums, strict=True):
            p.add_(total.add_(p), alpha=0.01)
        if self.steps % 2 == 0:
            for p, slow in zip(self.param_groups[0]["params"], self.slow[0], strict=True):
                p.copy_(slow.lerp_(p, 0.5))


class Late(Optimizer):
    """Makes the optimizer that it steps with its first step."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:
        if not hasattr(self, "inner"):
            self.inner = SGD(self.param_groups[0]["params"], lr=0.1, momentum=0.9)
        self.inner.step(closure)


MAKES: dict[str, Callable[[Any], Any]] = {
    "group": lambda p: Decay(p, 0.1),
    "attributes": lambda p: Counts(p, 0.1),
    "around": lambda p: Around(SGD(p, 0.1, momentum=0.9)),
    "around groups": lambda p: Around(Decay(p, 0.1)),
    "slow": lambda p: Slow(SGD(p, 0.1, momentum=0.9)),
    "late": lambda p: Late(p, 0.1),
    "state": lambda p: Around(Adagrad(p, 0.5, initial_accumulator_value=0.1)),
}


class Line(Classifier):
    """y = w x + b, over all of a client's points at once."""

    def __init__(self, make: Callable[[Any], Any], start: float, **options: Any) -> None:
        super().__init__(nn.Linear(1, 1, **options), lambda module: make(module.parameters()))
        for p in self.parameters():
            nn.init.constant_(p, start)

    def loss(self, batch: Any) -> Tensor:
        return (self(X) - 2 * X - 1).square().mean()


class Ends(FederatedCallback):
    """Keeps the weights that each client ends with, and what it sends."""

    def __init__(self) -> None:
        self.weights: list[Tensor] = []
        self.deltas: list[Tensor] = []

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.weights.append(trainer.vector.data.clone())
        self.deltas.append(update.delta.clone())


def data(**options: Any) -> Any:
    """Two clients with the same points."""
    return federated_data(8, 8, dataset=TensorDataset(X.repeat(2, 1), X.repeat(2, 1)), val_dataset=None, **options)


def federated(folder: Path, module: Classifier, *callbacks: Any, **options: Any) -> Ends:
    """Three rounds of two equal clients with three steps each."""
    ends = Ends()
    trainer = federated_trainer(folder, *callbacks, ends, **{"max_rounds": 3, "local_epochs": 3, **options})
    trainer.fit(module, data())
    return ends


def by_hand(module: Line, rounds: int = 3) -> Tensor:
    """Their updates if each is given a new optimizer, at the mean of the last round, which is where both have ended."""
    w, updates = nn.utils.parameters_to_vector(module.parameters()).detach().clone(), []
    for _ in range(rounds):
        for _ in range(2):
            nn.utils.vector_to_parameters(w.clone(), module.parameters())
            optimizer = module.configure_optimizers()
            for _ in range(3):
                optimizer.zero_grad()
                module.loss(None).backward()
                optimizer.step()
            updates.append(nn.utils.parameters_to_vector(module.parameters()).detach() - w)
        w = w + updates[-1]
    return torch.stack(updates)


@pytest.mark.parametrize("start", [0.0, 0.5])
@pytest.mark.parametrize("make", MAKES.values(), ids=list(MAKES))
def test_an_optimizer_of_any_class_is_fresh_for_each_client(tmp_path, make, start):
    torch.testing.assert_close(torch.stack(federated(tmp_path, Line(make, start)).deltas), by_hand(Line(make, start)))


def test_steps_are_counted_from_the_first_for_each_client(tmp_path):
    class Square(Line):
        def loss(self, batch: Any) -> Tensor:
            return 0.2834 * (self(torch.ones(1, 1)) - 2).square().sum()

    ends = federated(tmp_path, Square(MAKES["group"], -0.9762, bias=False), max_rounds=2)
    assert [round(float(delta), 4) for delta in ends.deltas] == [0.2998, 0.2998, 0.2696, 0.2696]


def test_slow_weights_are_those_that_a_hook_puts_the_client_at(tmp_path):
    made = Line(MAKES["slow"], 0.5)
    ends = federated(tmp_path, Line(MAKES["slow"], 0.5), LocalOnly())
    torch.testing.assert_close(torch.stack(ends.weights[-2:]), 0.5 + by_hand(made)[::2].sum(0).expand(2, 2))


@pytest.mark.parametrize(
    ("interval", "schedule", "rates"),
    [
        ("step", "restart", [[0.1, 0.05, 0.025]] * 3),
        ("step", "continue", [[0.1 / 2**k for k in range(at, at + 3)] for at in (0, 3, 6)]),
        ("round", "restart", [[0.1 / 2**at] * 3 for at in range(3)]),
    ],
)
def test_schedules_of_the_inner_optimizer_go_on(tmp_path, interval, schedule, rates):
    class Rates(FederatedCallback):
        seen: list[float] = []

        def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            self.seen.append(float(optimizer.param_groups[0]["lr"]))

    class Scheduled(Line):
        def configure_optimizers(self) -> Any:
            inner = Decay(self.parameters(), 0.1)
            step = {"scheduler": StepLR(inner, 1, 0.5), "interval": interval}
            return {"optimizer": Around(inner), "lr_scheduler": step}

    callback = Rates()
    callback.seen = []
    ends = federated(tmp_path, Scheduled(MAKES["group"], 0.5), callback, local_schedule=schedule)
    assert torch.equal(torch.stack(ends.deltas[::2]), torch.stack(ends.deltas[1::2]))
    assert callback.seen == pytest.approx([rate for own in rates for rate in (*own, *own)])


def test_a_resumed_run_makes_them_as_fresh(tmp_path):
    whole, options = Line(MAKES["slow"], 0.5), {"logger": False, "enable_checkpointing": True, "local_epochs": 3}
    federated_trainer(tmp_path / "whole", max_rounds=4, **options).fit(whole, data())
    federated_trainer(tmp_path / "cut", max_rounds=2, **options).fit(Line(MAKES["slow"], 0.5), data())
    resumed = Line(MAKES["slow"], 0.0)
    (last,) = (tmp_path / "cut").rglob("last.ckpt")
    federated_trainer(tmp_path / "cut", max_rounds=4, **options).fit(resumed, data(), ckpt_path=str(last))
    assert torch.equal(resumed.net.weight, whole.net.weight)


def test_each_of_several_optimizers_is_fresh(tmp_path):
    class Manual(Line):
        def __init__(self) -> None:
            super().__init__(MAKES["group"], 0.5)
            self.automatic_optimization = False

        def configure_optimizers(self) -> Any:
            return [Counts([self.net.weight], 0.1), Adam([self.net.bias], 0.1), Around(Decay([self.net.bias], 0.01))]

        def training_step(self, batch: Any, batch_idx: int) -> None:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

    deltas = federated(tmp_path, Manual()).deltas
    assert torch.equal(torch.stack(deltas[::2]), torch.stack(deltas[1::2]))
    assert all(delta.all() for delta in deltas)


@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_what_a_step_leaves_on_an_optimizer_of_torchs_own_is_gone(tmp_path, engine):
    found = []

    class Marks(Line):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.optimizers()
            found.append((optimizer.param_groups[0].get("seen"), getattr(optimizer, "seen", None)))
            optimizer.seen = optimizer.param_groups[0]["seen"] = 1
            return self.loss(batch)

    ends = federated(tmp_path, Marks(lambda p: SGD(p, 0.1), 0.5), engine=engine)
    assert len(ends.deltas) == 6
    assert [each for each in found if each != (1, 1)] == [(None, None)] * 6


def test_one_that_cannot_be_copied_is_refused(tmp_path):
    def make(params: Any) -> Any:
        optimizer = Decay(params, 0.1)
        optimizer.file = open(__file__)  # noqa: SIM115
        return optimizer

    with pytest.raises(FederatedError, match=r"can be copied.*Decay cannot \(TypeError: cannot pickle"):
        federated(tmp_path, Line(make, 0.5))


class Free(Optimizer):
    """Schedule-free SGD: takes gradients at y between z, which steps, and x, its mean, which is the model to use."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr, "train_mode": False, "k": 0})

    @torch.no_grad()
    def _switch(self, to_train: bool, weight: float) -> None:
        for group in self.param_groups:
            for p in group["params"] if group["train_mode"] != to_train else ():
                if "z" in self.state[p]:
                    p.lerp_(self.state[p]["z"], weight)
            group["train_mode"] = to_train

    def train(self) -> None:
        self._switch(True, 0.1)

    def eval(self) -> None:
        self._switch(False, 1 - 1 / 0.9)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        if closure is not None:
            with torch.enable_grad():
                closure()
        (group,) = self.param_groups
        assert group["train_mode"], "call `train` first"
        group["k"] += 1
        for p in group["params"]:
            z = self.state[p].setdefault("z", p.clone())
            p.lerp_(z, 1 - 1 / 0.9)
            z.sub_(p.grad, alpha=group["lr"])
            p.lerp_(z, 1 / group["k"]).lerp_(z, 0.1)


class Switches(Line):
    """Calls ``train`` and ``eval`` where its page says."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.optimizers().train()

    def on_validation_epoch_start(self) -> None:
        self.optimizers().eval()


def means(w: Tensor, rounds: int = 2) -> Tensor:
    """The models to use of clients of three steps each: the means of z."""
    ends = []
    for _ in range(rounds):
        z, x = w.clone(), w.clone()
        for k in (1, 2, 3):
            y = 0.1 * z + 0.9 * x
            errors = X[:, 0] * y[0] + y[1] - 2 * X[:, 0] - 1
            z = z - 0.1 * torch.stack([(2 * errors * X[:, 0]).mean(), (2 * errors).mean()])
            x = (1 - 1 / k) * x + z / k
        w = x
        ends.append(x)
    return torch.stack(ends)


@pytest.mark.parametrize("personal", [False, True])
@pytest.mark.parametrize(
    ("kind", "make"),
    [(Switches, lambda p: Free(p, 0.1)), (Line, lambda p: Free(p, 0.1)), (Line, lambda p: Around(Free(p, 0.1)))],
    ids=["called", "not called", "wrapped"],
)
def test_a_client_sends_and_keeps_the_weights_to_use(tmp_path, kind, make, personal):
    class Whole(Ends):
        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            self.weights.append(trainer.vector.all_data.clone())

    whole, module = Whole(), kind(make, 0.5)
    algorithms = [PersonalParameters(["net.bias"])] if personal else []
    trainer = federated_trainer(tmp_path, whole, *algorithms, max_rounds=2, local_epochs=3)
    trainer.fit(module, data())
    expected = means(torch.tensor([0.5, 0.5]))
    torch.testing.assert_close(torch.stack(whole.weights), expected.repeat_interleave(2, 0))
    torch.testing.assert_close(module.net.weight[0], expected[-1, :1])
