"""Lightning's finetuning callbacks: frozen weights are trained by every client from a round on, and a run resumes."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, LearningRateMonitor
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR
from torch.utils.data import DataLoader

from lightning_fed.client_algorithms import SCAFFOLD
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from lightning_fed.runs.folder import read_rows
from tests.parts import FEATURES, Classifier, built, federated_data, federated_trainer, lightning_trainer, points

GAMMA, RATE, RATIO, MOMENTUM = 0.8, 0.2, 0.1, 0.9


def trained(module: nn.Module) -> Iterator[nn.Parameter]:
    return filter(lambda p: p.requires_grad, module.parameters())


class Tuned(Classifier):
    """A backbone under a head; ``choose`` says what the optimizer gets."""

    def __init__(self, choose: Callable[[Any], Any] = trained, optimizer: Any = None, norm: bool = False) -> None:
        super().__init__()
        self.choose = choose
        self.make = optimizer or (lambda parameters: SGD(parameters, lr=RATE))
        hidden = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.backbone = nn.Sequential(nn.Linear(FEATURES, 4), hidden, nn.Tanh())
        self.net = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.backbone(x))

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.choose(self))
        return [optimizer], [ExponentialLR(optimizer, GAMMA)]


class HeadAlone(Tuned):
    """Keeps what is frozen out of its checkpoints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.strict_loading = False

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        kept = {name for name, p in self.named_parameters() if p.requires_grad}
        return {name: value for name, value in super().state_dict(*args, **kwargs).items() if name in kept}


class InParts(BaseFinetuning):
    """Unfreezes the backbone's normalisation, which it froze as well, and then the rest."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[1], optimizer, initial_denom_lr=4)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer, lr=0.05)


def by_hand(module: Tuned, data: list[tuple[Tensor, Tensor]], rounds: int, epochs: int) -> dict[str, Tensor]:
    """FedAvg of SGD with momentum over full batches, whose backbone is trained from the third round on."""
    weights = {name: value.detach().clone() for name, value in module.state_dict().items()}
    backbone_rate, sizes = 0.0, [len(y) for _, y in data]
    for round in range(rounds):
        rate = RATE * GAMMA**round
        backbone_rate = RATIO * rate if round == 2 else min(3 * backbone_rate, rate)
        total = {name: torch.zeros_like(value) for name, value in weights.items()}
        for x, y in data:
            own = {name: value.clone().requires_grad_() for name, value in weights.items()}
            velocity = {name: torch.zeros_like(value) for name, value in weights.items()}
            for _ in range(epochs):
                hidden = torch.tanh(x @ own["backbone.0.weight"].T + own["backbone.0.bias"])
                loss = F.cross_entropy(hidden @ own["net.weight"].T + own["net.bias"], y)
                gradients = dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
                for name in own:
                    velocity[name] = MOMENTUM * velocity[name] + gradients[name]
                    step = rate if name.startswith("net") else backbone_rate
                    own[name] = (own[name] - step * velocity[name]).detach().requires_grad_()
            for name in total:
                total[name] += len(y) / sum(sizes) * own[name].detach()
        weights = total
    return weights


def test_as_a_loop_by_hand(tmp_path) -> None:
    module, data = built(lambda: Tuned(optimizer=lambda p: SGD(p, lr=RATE, momentum=MOMENTUM))), points(20)
    x, y = data[:]
    clients = [(x[:8].double(), y[:8]), (x[8:].double(), y[8:])]
    wanted = by_hand(module.double(), clients, rounds=5, epochs=2)
    callback = BackboneFinetuning(2, lambda epoch: 3.0, backbone_initial_ratio_lr=RATIO)
    trainer = federated_trainer(tmp_path, callback, max_rounds=5, local_epochs=2, precision="64-true")
    trainer.fit(module, federated_data(8, 12, dataset=data, batch_size=20))
    for name, value in module.state_dict().items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-10, atol=1e-12)


CHOICES: dict[str, Callable[[Any], Any]] = {
    "filter": trained,
    "head": lambda module: module.net.parameters(),
    "all": lambda module: module.parameters(),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES)
@pytest.mark.parametrize(
    "make",
    [
        lambda: BackboneFinetuning(1, backbone_initial_lr=0.02, should_align=False, lambda_func=lambda epoch: epoch),
        lambda: BackboneFinetuning(2, train_bn=False),
        InParts,
    ],
    ids=["rates", "without_normalisation", "own"],
)
def test_one_client_as_under_lightning(tmp_path, choose: Any, make: Any) -> None:
    ours, theirs = built(lambda: Tuned(choose, norm=True)), built(lambda: Tuned(choose, norm=True))
    federated_trainer(tmp_path, make(), max_rounds=4, precision="64-true").fit(ours, federated_data(batch_size=20))
    lightning = lightning_trainer(tmp_path, make(), max_epochs=4, precision="64-true")
    lightning.fit(theirs, DataLoader(points(20), batch_size=20))
    start = built(lambda: Tuned(choose, norm=True)).backbone[0].weight
    assert not torch.equal(ours.backbone[0].weight.to(start), start)
    for name, value in ours.state_dict().items():
        torch.testing.assert_close(value, theirs.state_dict()[name], rtol=1e-9, atol=1e-11)


def fit(folder: Path, rounds: int, kind: Any, make: Any, *others: Any, **options: Any) -> Any:
    options = {"logger": [], "enable_checkpointing": True, "name": "run", **options}
    trainer = federated_trainer(folder, make(), *others, max_rounds=rounds, **options)
    module = built(lambda: kind(optimizer=lambda p: Adam(p, lr=0.01), norm=True))
    trainer.fit(module, federated_data(10, 12), ckpt_path="last")
    return trainer


def rows(folder: Path) -> list[dict[str, str]]:
    (path,) = folder.glob("run/version_*/metrics.csv")
    return [{k: v for k, v in row.items() if not k.startswith("time/") and v} for row in read_rows(path)]


@pytest.mark.parametrize("kind", [Tuned, HeadAlone])
@pytest.mark.parametrize("make", [lambda: BackboneFinetuning(2), InParts], ids=["stock", "own"])
def test_resumed_to_the_bit_before_and_after_the_unfreezing(tmp_path, kind: Any, make: Any) -> None:
    whole = fit(tmp_path / "whole", 5, kind, make)
    for rounds in (1, 2, 3, 4, 5):
        part = fit(tmp_path / "parts", rounds, kind, make)
        assert part.resumed == (rounds > 1)
    assert rows(tmp_path / "parts") == rows(tmp_path / "whole")
    pairs = zip(part.lightning_module.parameters(), whole.lightning_module.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    buffers = zip(part.lightning_module.buffers(), whole.lightning_module.buffers(), strict=True)
    assert all(torch.equal(a, b) for a, b in buffers)


def test_rates_are_columns(tmp_path) -> None:
    fit(tmp_path, 3, Tuned, lambda: BackboneFinetuning(1), LearningRateMonitor())
    first, second, third = rows(tmp_path)[1:]
    assert float(first["lr"]) == 0.01
    assert "lr" not in second
    assert float(second["lr/2"]) == pytest.approx(0.1 * float(second["lr/1"])) == pytest.approx(0.1 * 0.01 * GAMMA)
    assert float(third["lr/2"]) == pytest.approx(2 * float(second["lr/2"])) == float(third["lr-Adam/pg2"])


def test_other_methods_go_with_it_or_refuse_rates_that_differ(tmp_path) -> None:
    data = federated_data(8, 12)
    trainer = federated_trainer(tmp_path, BackboneFinetuning(1), SCAFFOLD(option="I"), max_rounds=3)
    module = built(Tuned)
    before = module.backbone[0].weight.detach().clone()
    trainer.fit(module, data)
    assert not torch.equal(module.backbone[0].weight, before)
    trainer = federated_trainer(tmp_path, BackboneFinetuning(1), SCAFFOLD(option="II"), max_rounds=3)
    with pytest.raises(FederatedError, match="every parameter group of the clients' SGD to have the same lr"):
        trainer.fit(built(Tuned), data)


class Looks(FederatedCallback):
    """Keeps the clients' gradients at w of the first layer."""

    def __init__(self) -> None:
        self.sizes: list[float] = []

    def start_gradients(self, round: int) -> Any:
        return "client"

    def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
        weight = pl_module.backbone[0].weight
        self.sizes.append(float(trainer.start_gradients.gradient[trainer.vector.places()[weight]].norm()))


@pytest.mark.parametrize("choose", [CHOICES["filter"], CHOICES["head"]], ids=["filter", "head"])
def test_gradients_over_all_data_are_zero_while_it_is_frozen(tmp_path, choose: Any) -> None:
    looks = Looks()
    trainer = federated_trainer(tmp_path, BackboneFinetuning(2), looks, max_rounds=4)
    trainer.fit(built(lambda: Tuned(choose)), federated_data(20))
    assert [size > 0 for size in looks.sizes] == [False, False, True, True]


def test_a_module_without_a_backbone_is_refused(tmp_path) -> None:
    with pytest.raises(FederatedError, match="Expected Classifier to have a module `backbone` for BackboneFinetuning"):
        federated_trainer(tmp_path, BackboneFinetuning()).fit(Classifier(), federated_data())


def test_many_clients_at_once_are_refused_or_trained_one_by_one(tmp_path) -> None:
    data = federated_data(8, 12)
    with pytest.raises(FederatedError, match="BackboneFinetuning freezes weights .* `--trainer.engine sequential`"):
        federated_trainer(tmp_path, BackboneFinetuning(), engine="vectorized").fit(built(Tuned), data)
    trainer = federated_trainer(tmp_path, BackboneFinetuning(1), engine="auto", max_rounds=2)
    trainer.fit(built(Tuned), data)
    assert trainer.engine_choice["engine"] == "sequential"


def test_a_checkpoint_is_resumed_with_the_callback_or_not_at_all(tmp_path) -> None:
    run = fit(tmp_path, 2, Tuned, lambda: BackboneFinetuning(1)).run
    trainer = federated_trainer(tmp_path, max_rounds=3)
    with pytest.raises(FederatedError, match="FedAvg, BackboneFinetuning, got FedAvg: give the same"):
        trainer.fit(
            built(lambda: Tuned(norm=True)), federated_data(10, 12), ckpt_path=str(run.checkpoints / "last.ckpt")
        )


class Strict(LambdaLR):
    """Has one rate for each group that it was made for, as torch's do from a version on."""

    def step(self, epoch: int | None = None) -> None:
        list(zip(self.base_lrs, self.optimizer.param_groups, strict=True))
        super().step(epoch)


def test_a_schedule_made_for_fewer_groups_ends_in_a_sentence(tmp_path) -> None:
    class Scheduled(Tuned):
        def configure_optimizers(self) -> Any:
            optimizer = self.make(self.choose(self))
            return [optimizer], [Strict(optimizer, lambda epoch: 1.0)]

    with pytest.raises(FederatedError, match="a schedule for the 2 parameter groups .* Strict was made for fewer"):
        federated_trainer(tmp_path, BackboneFinetuning(1), max_rounds=3).fit(built(Scheduled), federated_data())
