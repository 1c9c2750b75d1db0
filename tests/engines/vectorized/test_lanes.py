"""Clients that train at once stay apart, and memory follows how many they are."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_fed.aggregators import FedGMA
from lightning_fed.client_algorithms import SCAFFOLD, FedGA, FedProx
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.seeding import Purpose, generator_for
from lightning_fed.core.train_state import LocalOptions
from lightning_fed.core.updates import Client
from lightning_fed.engines.vectorized import engine as vectorized
from lightning_fed.engines.vectorized.batches import LaneBatches
from lightning_fed.errors import FederatedError
from lightning_fed.sampling import ClientSampler
from tests.engines.parts import CLASSES, FEATURES, SIZES, Model, agree, data, train


@pytest.mark.parametrize(("epochs", "most"), [(2, None), (None, 7)])
def test_each_client_meets_the_batches_that_it_meets_alone(epochs, most):
    options = {"local_epochs": epochs, "local_steps": most}
    source = data().train_source()
    state: Any = SimpleNamespace(seed=4, source=source, transfer=None)
    clients = tuple(Client(i, size, 2) for i, size in enumerate(SIZES) if size)
    batches = LaneBatches(state, LocalOptions(**options), clients, by_index=False)
    met: dict[int, list[Any]] = {client.id: [] for client in clients}
    for step in range(batches.steps[0]):
        runs = list(batches.groups(step))
        assert [run.lanes.stop for run in runs][-1] == batches.active(step)
        assert [run.lanes.start for run in runs] == [0, *[run.lanes.stop for run in runs][:-1]]
        for run in runs:
            for lane in range(run.lanes.start, run.lanes.stop):
                x, y = (part[lane - run.lanes.start] for part in run.batch)
                assert len(x) == len(y) == run.size
                met[batches.clients[lane].id].append((x, y))
    for client in clients:
        stream, alone = generator_for(4, Purpose.SHUFFLE, 2, client.id), []
        while len(alone) < 40:
            order = torch.randperm(client.num_samples, generator=stream)
            alone += list(source.batches(client.id, order, 0))
        assert len(met[client.id]) == (most or 2 * -(-client.num_samples // 8))
        for (x, y), (a, b) in zip(met[client.id], alone, strict=False):
            assert torch.equal(x, a)
            assert torch.equal(y, b)
    assert batches.samples == sum(len(y) for got in met.values() for _, y in got)


class Noise(Model):
    """Its gradient is what it draws."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("drawn", torch.rand(()))
        return (self.net(batch[0]) * torch.randn(CLASSES)).mean()


def test_random_numbers_differ_between_clients_and_are_the_same_again(tmp_path):
    def make() -> Noise:
        return Noise(nn.Linear(FEATURES, CLASSES))

    one, other = (train(tmp_path, make, "vectorized", datamodule=data(sizes=(8,) * 5)) for _ in range(2))
    agree(one, other, rtol=0)
    signs = {tuple(delta[-CLASSES:].sign().tolist()) for delta in one.deltas}
    assert len({tuple(delta.tolist()) for delta in one.deltas}) == len(one.deltas)
    assert len(signs) > 2
    chunks = train(tmp_path, make, "vectorized", datamodule=data(sizes=(8,) * 5), chunk_size=2)
    assert len({tuple(delta.tolist()) for delta in chunks.deltas}) == len(chunks.deltas)
    another = train(tmp_path, make, "vectorized", datamodule=data(sizes=(8,) * 5), seed=2)
    assert not torch.equal(one.deltas[0], another.deltas[0])


class Explodes(Model):
    """Diverges on clients whose inputs are large."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("largest", x.abs().max(), reduce_fx="max")
        return loss * torch.where(x.abs().max() > 50, torch.inf, 1.0)


def poisoned() -> Any:
    module = data()
    x, _ = module.load_datasets().train.tensors
    x[8:27] *= 100
    return module


def test_those_that_diverge_are_left_out_with_what_they_logged(tmp_path):
    runs = [
        train(tmp_path, Explodes, engine, datamodule=poisoned(), max_diverged=0.4)
        for engine in ("sequential", "vectorized")
    ]
    agree(*runs)
    assert {client for _, client, _ in runs[1].entered} == {0, 3, 4, 5}
    assert runs[1].logged["largest"] < 50
    with pytest.raises(FederatedError, match="client 1 diverged in round 1"):
        train(tmp_path, Explodes, "vectorized", datamodule=poisoned())


class Spoils(FederatedCallback):
    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if update.client.id == 4:
            update.delta[0] = torch.nan


def test_one_that_a_callback_spoils_is_left_out_alone(tmp_path):
    runs = [
        train(tmp_path, Model, engine, Spoils(), SCAFFOLD(), max_diverged=0.3)
        for engine in ("sequential", "vectorized")
    ]
    agree(*runs)
    assert {client for _, client, _ in runs[1].entered} == {0, 1, 3, 5}


class Reads(FederatedCallback):
    """Reads the resident module where a client ends."""

    def __init__(self) -> None:
        self.models: list[dict[str, Tensor]] = []

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.models.append({name: value.clone() for name, value in pl_module.state_dict().items()})


def test_the_resident_module_is_the_clients_where_it_ends(tmp_path):
    def norm() -> Model:
        return Model(nn.Sequential(nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)))

    models = []
    for engine in ("sequential", "vectorized"):
        reads = Reads()
        train(tmp_path, norm, engine, reads, FedGA(0.3), FedProx(0.5), datamodule=data(sizes=(8, 16, 24)))
        models.append(reads.models)
    for one, other in zip(*models, strict=True):
        for name, value in one.items():
            torch.testing.assert_close(value, other[name], rtol=1e-10, atol=1e-10)


def test_memory_follows_the_chunk_and_not_the_cohort(tmp_path, monkeypatch):
    def peak(clients: int, chunk: int) -> int:
        rows: list[int] = []
        made = vectorized.Lanes.__init__

        def noting(self: Any, trainer: Any, capacity: int) -> None:
            made(self, trainer, capacity)
            rows.append(sum(v.numel() for v in vars(self).values() if isinstance(v, Tensor)) // trainer.vector.numel)

        many = data(sizes=(8,) * clients)
        with monkeypatch.context() as patch:
            patch.setattr(vectorized.Lanes, "__init__", noting)
            run = train(tmp_path, Model, "vectorized", datamodule=many, chunk_size=chunk, max_rounds=1)
        assert len(run.entered) == clients
        return rows[0]

    assert peak(24, 4) == peak(12, 4)
    assert 2.5 < (peak(24, 12) - 2) / (peak(24, 4) - 2) < 3.5


class InTurn(ClientSampler):
    """Draws the client without samples in the first round, so that two others train in it and three in the next."""

    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
        return np.array([(0, 2, 3), (1, 3, 4), (0, 4, 5)][round - 1])


def test_matrices_that_grow_change_nothing(tmp_path, monkeypatch):
    """As in a process that gets more clients in a later round than ever before; with all that has a row for each."""

    def run(first: int) -> tuple[list[int], Any]:
        made, capacities = vectorized.Lanes.__init__, []

        def noting(self: Any, trainer: Any, capacity: int) -> None:
            made(self, trainer, max(capacity, first))
            capacities.append(self.capacity)

        def adam(module: Any) -> Any:
            return torch.optim.Adam(module.parameters(), lr=0.01)

        parts, options = (FedGMA(gradient_at="last_step"), FedGA(0.3)), {"clients_per_round": 3, "sampler": InTurn()}
        with monkeypatch.context() as patch:
            patch.setattr(vectorized.Lanes, "__init__", noting)
            return capacities, train(tmp_path, lambda: Model(optimizer=adam), "vectorized", *parts, **options)

    (large, whole), (small, grown) = run(3), run(0)
    assert (large, small) == ([3], [2, 3])
    agree(whole, grown, rtol=0.0)
