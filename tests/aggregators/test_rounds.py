"""Weights, empty clients and buffers over whole rounds of the trainer, against a loop by hand."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import AFL, FedAvg, FedDGGA
from lightning_fed.client_algorithms import FedCM
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.seeding import Purpose, generator_for
from lightning_fed.core.updates import Client, Update
from lightning_fed.data import FederatedDataModule, Partitioner
from lightning_fed.masks import SignAgreement
from lightning_fed.sampling import WeightedSampler
from tests.parts import Classifier, federated_data, federated_trainer

SEED, ROUNDS, CLIENTS, EMPTY = 3, 3, 4, 1


class Net(LightningModule):
    """BatchNorm and buffers of every kind that users register."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))
        self.register_buffer("samples", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros((), dtype=torch.float64))
        self.register_buffer("scale", torch.tensor(0.1307))
        self.register_buffer("hidden", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("angles", torch.polar(torch.ones(3), torch.arange(3.0)), persistent=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.samples += len(y)
        self.largest.clamp_(min=x.max())
        self.seen[y] = True
        return cross_entropy(self.layers(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.5)


class Uneven(Partitioner):
    """One client gets nothing, the others ever more."""

    def assign(self, targets: Any, num_samples: int, num_clients: int, generator: np.random.Generator) -> np.ndarray:
        return generator.choice([0, 2, 3], p=[0.15, 0.3, 0.55], size=num_samples)


class Starts(FederatedCallback):
    """Notes the statistics that every client starts from."""

    def __init__(self) -> None:
        self.means: dict[tuple[int, int], Tensor] = {}
        self.entered: list[int] = []

    def on_client_start(self, trainer: FederatedTrainer, pl_module: Any, client: Client) -> None:
        self.means[client.round, client.id] = pl_module.layers[1].running_mean.clone()

    def on_before_server_step(self, trainer: FederatedTrainer, pl_module: Any, update: Any) -> None:
        self.entered += [client.id for client in update.clients]


def make_data() -> FederatedDataModule:
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (120,), generator=rng)
    inputs = torch.randn(120, 4, generator=rng) + labels[:, None]
    return FederatedDataModule(TensorDataset(inputs, labels), Uneven(), num_clients=CLIENTS, batch_size=16)


def fit(tmp_path: Path, net: Net, aggregator: FedAvg, **options: Any) -> tuple[Starts, FederatedDataModule]:
    starts, data = Starts(), make_data()
    FederatedTrainer(
        accelerator="cpu", logger=False, callbacks=[starts, aggregator], default_root_dir=str(tmp_path), seed=SEED,
        max_rounds=ROUNDS, enable_progress_bar=False, enable_checkpointing=False, **options,
    ).fit(net, data)  # fmt: skip
    return starts, data


def by_hand(
    net: Net, data: FederatedDataModule, policy: str, weighting: str, lr: float, threshold: float | None
) -> dict[tuple[int, int], Tensor]:
    """Trains ``net`` in place; returns the statistics that every client starts from."""
    x, y = data.load_datasets().train.tensors
    rows_of = np.split(data.split.index, data.split.offsets[1:-1])
    own: dict[int, dict[str, Tensor]] = {}
    starts: dict[tuple[int, int], Tensor] = {}
    for round in range(1, ROUNDS + 1):
        w, b = [p.detach().clone() for p in net.parameters()], {n: v.clone() for n, v in net.named_buffers()}
        deltas, buffers, sizes = [], [], []
        for client, rows in enumerate(rows_of):
            if len(rows) == 0:
                continue
            local = deepcopy(net)
            for name, buffer in local.named_buffers():
                buffer.copy_(own.get(client, b)[name] if policy == "local" else b[name])
            starts[round, client] = local.layers[1].running_mean.clone()
            optimizer = local.configure_optimizers()
            order = torch.randperm(len(rows), generator=generator_for(SEED, Purpose.SHUFFLE, round, client))
            for batch in torch.from_numpy(rows)[order].split(16):
                optimizer.zero_grad()
                local.training_step((x[batch], y[batch]), 0).backward()
                optimizer.step()
            own[client] = {name: buffer.clone() for name, buffer in local.named_buffers()}
            deltas.append([p.detach() - v for p, v in zip(local.parameters(), w, strict=True)])
            buffers.append(own[client])
            sizes.append(len(rows) if weighting == "samples" else 1)
        shares = [size / sum(sizes) for size in sizes]
        for k, p in enumerate(net.parameters()):
            agreed = torch.stack([delta[k] for delta in deltas]).sign().mean(0).abs()
            mask = 1.0 if threshold is None else torch.where(agreed >= threshold - 1e-6, 1.0, agreed)
            p.data = w[k] + lr * mask * sum(share * delta[k] for share, delta in zip(shares, deltas, strict=True))
        if policy == "average":
            for name, buffer in net.named_buffers():
                stack = torch.stack([values[name] for values in buffers])
                if buffer.is_floating_point():
                    weights = torch.tensor(shares, dtype=torch.float64).view(-1, *[1] * buffer.ndim)
                    buffer.copy_((weights * stack).sum(0))
                elif not buffer.is_complex():
                    buffer.copy_(stack.amax(0))
    return starts


@pytest.mark.parametrize("policy", ["average", "local", "keep"])
@pytest.mark.parametrize(
    ("weighting", "lr", "threshold"),
    [("samples", 1.0, None), ("uniform", 0.5, None), ("samples", 1.0, 0.4), ("uniform", 0.5, 1.0)],
)
def test_rounds_agree_with_a_loop_by_hand(
    tmp_path: Path, policy: Any, weighting: Any, lr: float, threshold: float | None
) -> None:
    torch.manual_seed(0)
    net = Net()
    expected, initial = deepcopy(net), deepcopy(net)
    mask = None if threshold is None else SignAgreement(threshold)
    starts, data = fit(tmp_path, net, FedAvg(lr, mask, weighting, policy))
    starts_by_hand = by_hand(expected, data, policy, weighting, lr, threshold)

    assert sorted(set(starts.entered)) == [0, 2, 3]
    assert len(set(data.split.sizes.tolist())) == CLIENTS
    for (name, ours), theirs in zip(net.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    for (name, ours), theirs in zip(net.named_buffers(), expected.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6, msg=lambda text, name=name: f"{name}: {text}")
    assert starts.means.keys() == starts_by_hand.keys()
    for place, mean in starts.means.items():
        torch.testing.assert_close(mean, starts_by_hand[place], rtol=0, atol=2e-6)
    same = [torch.equal(a, b) for a, b in zip(net.buffers(), initial.buffers(), strict=True)]
    assert all(same) == (policy != "average")


def test_averaging_leaves_constants_to_the_bit_and_takes_the_largest_count(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    initial = {name: buffer.clone() for name, buffer in net.named_buffers()}
    _, data = fit(tmp_path, net, FedAvg())
    after = dict(net.named_buffers())
    for name in ("scale", "hidden", "angles"):
        assert torch.equal(after[name], initial[name]), name
    largest = int(data.split.sizes.max())
    assert after["samples"].item() == ROUNDS * largest
    assert after["layers.1.num_batches_tracked"].item() == ROUNDS * -(-largest // 16)
    assert after["samples"].dtype == torch.int64
    assert after["seen"].tolist() == [True, True, True]
    assert after["largest"].dtype == torch.float64


def test_a_mask_that_drops_everything_still_averages_buffers(tmp_path: Path) -> None:
    class Closed(SignAgreement):
        def compute(self, update: Any) -> Tensor:
            return torch.zeros_like(update.mean)

    torch.manual_seed(0)
    net = Net()
    initial = deepcopy(net)
    fit(tmp_path, net, FedAvg(mask=Closed()))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), initial.parameters(), strict=True))
    assert not torch.equal(net.layers[1].running_mean, initial.layers[1].running_mean)


def test_a_round_that_nobody_enters_changes_nothing(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    initial = deepcopy(net)
    weights = [float(client == EMPTY) for client in range(CLIENTS)]
    starts, _ = fit(tmp_path, net, FedAvg(), clients_per_round=1, sampler=WeightedSampler(weights))
    assert starts.entered == []
    for (name, ours), theirs in zip(net.state_dict().items(), initial.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def test_statistics_are_kept_in_float32_under_a_narrower_model(tmp_path: Path) -> None:
    """What is lost on a bfloat16 1.0 must not be lost in the sums and the global statistics between rounds."""
    kept: list[Tensor] = []

    class Nudge(FederatedCallback):
        def on_client_end(self, trainer: FederatedTrainer, pl_module: Any, update: Any) -> None:
            update.buffers["layers.1.running_var"].fill_(1.0 if update.client.id == 0 else 1.0078125)

        def on_after_server_step(self, trainer: FederatedTrainer, pl_module: Any, update: Any) -> None:
            kept.append(trainer.buffers.values["layers.1.running_var"].clone())

    torch.manual_seed(0)
    net, data = Net(), make_data()
    del net.angles  # torch warns when it turns complex numbers into bfloat16
    FederatedTrainer(
        accelerator="cpu", logger=False, callbacks=[Nudge()], default_root_dir=str(tmp_path), seed=SEED, max_rounds=1,
        precision="bf16-true", enable_progress_bar=False, enable_checkpointing=False,
    ).fit(net, data)  # fmt: skip
    share = 1 - data.split.sizes[0] / data.split.sizes.sum()
    assert kept[0].dtype == torch.float32
    assert kept[0].tolist() == pytest.approx([1 + share * 0.0078125] * 6, abs=1e-6)


class Favours(FedAvg):
    """A rule of a user's, under which client 0 alone counts in the second round."""

    def client_weight(self, client: Client) -> float:
        return float(client.round != 2 or client.id == 0)


class LosesTheFirst(FederatedCallback):
    """In the second round all weight is client 0's, whose update is spoiled."""

    def __init__(self) -> None:
        self.kept: list[tuple[Tensor, Tensor]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        algorithm, rule = trainer.callbacks[0], trainer.aggregator
        self.kept.append((trainer.weights.clone(), algorithm.momentum.clone()))
        for weights in rule.vectors.values() if trainer.round == 1 and isinstance(rule, (AFL, FedDGGA)) else ():
            weights.copy_(torch.tensor([1.0, 0.0, 0.0]))

    def on_client_end(self, trainer: Any, pl_module: Any, update: Update) -> None:
        if (update.client.round, update.client.id) == (2, 0):
            update.delta.fill_(torch.nan)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("make", [lambda: FedDGGA(losses_over="train"), AFL, Favours])
def test_a_round_of_clients_without_weight_leaves_the_model_as_it_is(make: Any, engine: Any, tmp_path: Path) -> None:
    """As one in which nobody takes part does; what clients keep of the server's direction stays too."""
    torch.manual_seed(0)
    loses = LosesTheFirst()
    trainer = federated_trainer(tmp_path, FedCM(0.3), make(), loses, max_rounds=4, max_diverged=0.5, engine=engine)
    with pytest.warns(UserWarning, match="Round 2 leaves the model as it is: its 2 clients have weight 0 in "):
        trainer.fit(Classifier(), federated_data(8, 20, 12))
    (first, m), (second, same), (third, other), _ = loses.kept
    assert torch.equal(second, first)
    assert torch.equal(same, m)
    assert not torch.equal(third, second)
    assert not torch.equal(other, m)
    assert trainer.weights.isfinite().all()
