"""Learning-rate schedules by step, epoch and round, over clients of unequal length and several rounds."""

from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.optimizer.local import LocalOptimizer
from lightning_fed.errors import FederatedError
from lightning_fed.sampling import UnequalWork
from tests.parts import Classifier, federated_data, federated_trainer


class Rates(FederatedCallback):
    """Notes the learning rate of each local step as {round: {client: [rates]}}."""

    def __init__(self) -> None:
        self.rates: dict[int, dict[int, list[float]]] = {}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        client = trainer.client
        rates = self.rates.setdefault(client.round, {}).setdefault(client.id, [])
        rates.append(round(float(optimizer.param_groups[0]["lr"]), 6))


def run(folder: Any, configure: Any, *sizes: int, rounds: int = 3, **options: Any) -> dict[int, dict[int, list[float]]]:
    rates = Rates()
    trainer = federated_trainer(folder, rates, max_rounds=rounds, **options)
    trainer.fit(Classifier(optimizer=configure), federated_data(*(sizes or (24, 10))))
    return rates.rates


def halving(interval: str, lr: Any = 0.8, **keys: Any) -> Any:
    def configure(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=lr)
        schedule = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": interval, **keys}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    return configure


def test_step_restarts_for_each_client_and_round(tmp_path):
    each = {0: [0.8, 0.4, 0.2], 1: [0.8, 0.4]}
    assert run(tmp_path, halving("step")) == {1: each, 2: each, 3: each}


def test_step_restarts_where_rates_are_tensors(tmp_path):
    each = {0: [0.8, 0.4, 0.2], 1: [0.8, 0.4]}  # torch changes such a rate in place
    assert run(tmp_path, halving("step", torch.tensor(0.8)), rounds=2) == {1: each, 2: each}


def test_a_tensor_rate_goes_on_on_another_device():
    def made(lr: float) -> LocalOptimizer:
        return LocalOptimizer(Classifier(optimizer=lambda m: SGD(m.parameters(), lr=torch.tensor(lr))), restart=True)

    saved, resumed = made(0.1).state_dict(), made(0.1)
    saved["built"] = [{**group, "lr": "tensor(0.1000, device='cuda:0')"} for group in saved["built"]]  # as it was saved
    resumed.optimizer.param_groups[0]["lr"] = torch.empty((), device="meta")
    resumed.load_state_dict(saved)
    assert resumed.optimizer.param_groups[0]["lr"].device.type == "meta"
    with pytest.raises(FederatedError, match=r"with lr tensor\(0.1000\), got tensor\(0.2000\)"):
        made(0.2).load_state_dict(saved)


def test_step_continues_from_the_longest_client(tmp_path):
    assert run(tmp_path, halving("step"), rounds=2, local_schedule="continue") == {
        1: {0: [0.8, 0.4, 0.2], 1: [0.8, 0.4]},
        2: {0: [0.1, 0.05, 0.025], 1: [0.1, 0.05]},
    }


@pytest.mark.parametrize("schedule", ["restart", "continue"])
def test_step_frequency(tmp_path, schedule):
    rates = run(tmp_path, halving("step", frequency=2), 24, rounds=2, local_schedule=schedule)
    assert rates[1] == {0: [0.8, 0.8, 0.4]}
    assert rates[2] == {0: [0.8, 0.8, 0.4] if schedule == "restart" else [0.4, 0.4, 0.2]}


@pytest.mark.parametrize("interval", ["epoch", "round"])
def test_epoch_and_round_step_once_per_round(tmp_path, interval):
    rates = run(tmp_path, halving(interval), local_epochs=2)
    assert rates == {r: {0: [0.8 / 2 ** (r - 1)] * 6, 1: [0.8 / 2 ** (r - 1)] * 4} for r in (1, 2, 3)}


def test_round_frequency(tmp_path):
    rates = run(tmp_path, halving("round", frequency=2), 8, rounds=5)
    assert [rates[r][0] for r in range(1, 6)] == [[0.8], [0.8], [0.4], [0.4], [0.2]]


def test_default_interval_is_a_round(tmp_path):
    def configure(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=0.8)
        return [optimizer], [CosineAnnealingLR(optimizer, T_max=2)]

    rates = run(tmp_path, configure, 8)
    assert [rates[r][0] for r in (1, 2, 3)] == [[0.8], [0.4], [0.0]]


def test_step_and_round_schedules_together(tmp_path):
    def configure(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=0.8)
        step = {"scheduler": StepLR(optimizer, 1, 0.5), "interval": "step"}
        return [optimizer], [StepLR(optimizer, 1, 0.1), step]

    rates = run(tmp_path, configure, 16, rounds=2)
    assert rates == {1: {0: [0.8, 0.4]}, 2: {0: [0.08, 0.04]}}


def test_one_cycle_over_the_estimated_steps(tmp_path):
    def configure(module: Any) -> Any:
        optimizer = Adam(module.parameters())
        steps.append(module.trainer.estimated_stepping_batches)
        schedule = OneCycleLR(optimizer, 0.4, total_steps=steps[-1])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    steps: list[int] = []
    rates = run(tmp_path, configure, local_epochs=2, accumulate_grad_batches=2)
    assert steps == [4]  # windows of 2 and 1 batches, twice
    assert rates[1] == rates[3]
    continued = run(tmp_path, configure, local_epochs=2, accumulate_grad_batches=2, local_schedule="continue")
    assert steps == [4, 12]
    assert len({tuple(continued[r][0]) for r in (1, 2, 3)}) == 3


@pytest.mark.parametrize(
    ("work", "most"),
    [
        (UnequalWork(steps=[1, 4]), 4), (UnequalWork(steps=[1, 4], share=0.5), 6), (UnequalWork(lr=[0.5, 2.0]), 6),
        (UnequalWork(epochs=[1, 4], share=0.5), 12),
    ],
)  # fmt: skip
def test_one_cycle_over_the_steps_of_clients_with_work_of_their_own(tmp_path, work, most):
    def configure(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=0.8)
        assert module.trainer.estimated_stepping_batches == most
        schedule = OneCycleLR(optimizer, 0.4, total_steps=most, cycle_momentum=False)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    rates = run(tmp_path, configure, 24, 24, 24, rounds=2, local_epochs=2, work=work)
    assert max(len(own) for cohort in rates.values() for own in cohort.values()) <= most


def test_plateau_follows_its_monitor(tmp_path):
    def configure(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=0.8)
        schedule = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": schedule, "monitor": "score"}

    class Scored(Classifier):
        def on_train_epoch_end(self) -> None:
            self.log("score", [0, 3.0, 2.0, 2.5, 2.6][self.trainer.round])

    rates = Rates()
    trainer = federated_trainer(tmp_path, rates, max_rounds=4)
    trainer.fit(Scored(optimizer=configure), federated_data(8))
    assert [rates.rates[r][0] for r in (1, 2, 3, 4)] == [[0.8], [0.8], [0.8], [0.4]]
    assert trainer.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.2]


def test_rates_set_by_hooks_between_rounds_hold_for_all_clients(tmp_path):
    class SetsRate(Classifier):
        def on_train_epoch_start(self) -> None:
            if self.trainer.round == 2:
                self.optimizers().param_groups[0]["lr"] = 0.5

        def on_validation_epoch_end(self) -> None:
            if self.trainer.round == 2:
                self.optimizers().param_groups[0]["lr"] /= 2

    rates = Rates()
    trainer = federated_trainer(tmp_path, rates, max_rounds=4)
    trainer.fit(SetsRate(optimizer=lambda m: SGD(m.parameters(), lr=1.0)), federated_data(8, 8))
    assert [rates.rates[r] for r in (1, 2, 3, 4)] == [{c: [lr] for c in (0, 1)} for lr in (1.0, 0.5, 0.25, 0.25)]


class Filled(SGD):
    """Fills its state when it is built, as some optimizers do."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)
        for p in self.param_groups[0]["params"]:
            self.state[p]["sum"] = torch.full_like(p, 0.1)

    @torch.no_grad()
    def step(self, closure: Any) -> None:
        closure()
        for p in self.param_groups[0]["params"]:
            total = self.state[p]["sum"].addcmul_(p.grad, p.grad)
            p.sub_(self.param_groups[0]["lr"] * p.grad / total.sqrt())


@pytest.mark.parametrize(
    "make",
    [SGD, lambda p, lr: SGD(p, lr, momentum=0.9), Adam, torch.optim.Adagrad, torch.optim.LBFGS, Filled],
    ids=["sgd", "momentum", "adam", "adagrad", "lbfgs", "filled"],
)
def test_optimizers_start_afresh_for_each_client(tmp_path, make):
    """Two clients with the same data send the same update, whatever state the first leaves behind."""

    class Deltas(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            self.deltas.append(update.delta.clone())

    def configure(module: Any) -> Any:
        return make(module.parameters(), lr=0.1)

    class FullBatch(Classifier):
        def loss(self, batch: Any) -> torch.Tensor:
            return self(torch.ones_like(batch[0]))[:, 0].pow(2).mean()

    callback = Deltas()
    callback.deltas = []
    federated_trainer(tmp_path, callback, local_epochs=3).fit(FullBatch(optimizer=configure), federated_data(8, 8))
    assert torch.equal(*callback.deltas)


@pytest.mark.parametrize(
    ("configure", "message"),
    [
        (halving("batch"), "interval.*step, epoch or round, got 'batch'"),
        (lambda m: ([SGD(m.parameters(), lr=1)], [{"interval": "step"}]), "key `scheduler`, got interval"),
        (lambda m: (o := SGD(m.parameters(), lr=1), [o], [ReduceLROnPlateau(o)])[1:], "ReduceLROnPlateau.*monitor"),
        (
            lambda m: {"optimizer": (o := SGD(m.parameters(), lr=1)), "lr_scheduler": ReduceLROnPlateau(o),
                       "monitor": "nothing"},
            "monitor='nothing'.*train/loss, val/loss",
        ),
    ],
    ids=["interval", "no_scheduler", "no_monitor", "unknown_monitor"],
)  # fmt: skip
def test_schedules_that_cannot_be(tmp_path, configure, message):
    with pytest.raises(FederatedError, match=message):
        run(tmp_path, configure, 8)


def test_unknown_keys_are_ignored_with_a_warning(tmp_path):
    with pytest.warns(UserWarning, match="unknown keys, which are ignored: colour"):
        assert run(tmp_path, halving("step", colour="red"), 16, rounds=1) == {1: {0: [0.8, 0.4]}}


@pytest.mark.parametrize(
    "wrap",
    [
        lambda o, s: {"optimizer": o, "lr_scheduler": s},
        lambda o, s: ([o], s),
        lambda o, s: ([o], [s]),
        lambda o, s: [[o], [s]],
        lambda o, s: [{"optimizer": o, "lr_scheduler": s}],
        lambda o, s: ({"optimizer": o, "lr_scheduler": {"scheduler": s, "name": "rate"}},),
    ],
)
def test_forms_of_configure_optimizers(tmp_path, wrap):
    def configure(module: Any) -> Any:
        optimizer = SGD(module.parameters(), lr=0.8)
        return wrap(optimizer, LambdaLR(optimizer, lambda epoch: 0.5**epoch))

    assert run(tmp_path, configure, 8, rounds=2) == {1: {0: [0.8]}, 2: {0: [0.4]}}
