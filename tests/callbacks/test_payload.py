"""What happens to updates on their way: two payloads of ten lines, the bytes they say, and the order of the list."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.aggregators import CoordinateMedian, FedAvg
from lightning_fed.callbacks import ClipUpdates, Payload
from lightning_fed.client_algorithms import SCAFFOLD
from lightning_fed.core.updates import Need
from lightning_fed.masks import SignAgreement
from tests.parts import Classifier, built, federated_data, federated_trainer


class TopK(Payload):
    """Keeps the k largest coordinates, sent as values and indices of four bytes each."""

    def __init__(self, k: int | None) -> None:
        self.k = k

    def encode(self, trainer: Any, pl_module: Any, update: Any) -> None:
        k = self.k or len(update.delta)
        least = update.delta.abs().topk(k).values[-1]
        update.delta.masked_fill_(update.delta.abs() < least, 0.0)
        update.bytes_up = 8 * k


class Noise(Payload):
    """Adds Gaussian noise to the mean, by the bound of ``ClipUpdates``."""

    adds_noise = True

    def __init__(self, sigma: float) -> None:
        self.sigma = sigma

    def decode(self, trainer: Any, pl_module: Any, update: Any) -> None:
        stream = torch.Generator().manual_seed(trainer.seed + trainer.round)
        noise = torch.randn(len(update.mean), generator=stream).to(update.mean)
        update.mean.add_(noise, alpha=self.sigma / update.num_clients)


SIZE = sum(parameter.numel() for parameter in built(Classifier).parameters())


def fit(folder: Path, *callbacks: Any, engine: str = "sequential", **options: Any) -> FederatedTrainer:
    trainer = federated_trainer(folder, *callbacks, engine=engine, max_rounds=3, logger=[], **options)
    trainer.fit(built(Classifier), federated_data(12, 9, 5))
    return trainer


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("one", "other"),
    [([TopK(None)], []), ([ClipUpdates(0.01), Noise(0.0)], [ClipUpdates(0.01)])],
    ids=["top-k at k = d is FedAvg", "noise of 0 is clipping"],
)
def test_limits_to_the_bit(tmp_path: Path, one: Any, other: Any, engine: str) -> None:
    first, second = (fit(tmp_path, *payloads, engine=engine) for payloads in (one, other))
    assert torch.equal(first.weights, second.weights)
    assert not torch.equal(first.weights, fit(tmp_path, ClipUpdates(1e-3), engine=engine).weights)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_an_update_says_its_bytes(tmp_path: Path, engine: str) -> None:
    whole, few = (fit(tmp_path, SCAFFOLD(), *payloads, engine=engine) for payloads in ([], [TopK(2)]))
    entered = 3 * 3  # clients and rounds; SCAFFOLD sends a vector besides
    assert whole.totals["comm/bytes_up"] == entered * 2 * 4 * SIZE
    assert few.totals["comm/bytes_up"] == entered * (4 * SIZE + 16)
    assert few.totals["comm/bytes_down"] == whole.totals["comm/bytes_down"]


def test_halves_work_in_order_and_back(tmp_path: Path) -> None:
    seen: list[str] = []

    class Notes(Payload):
        def encode(self, trainer: Any, pl_module: Any, update: Any) -> None:
            seen.append(f"{type(self).__name__} {update.client.id}")

        def decode(self, trainer: Any, pl_module: Any, update: Any) -> None:
            seen.append(f"{type(self).__name__} mean")

    class More(Notes):
        pass

    trainer = federated_trainer(tmp_path, Notes(), More(), max_rounds=1)
    trainer.fit(built(Classifier), federated_data(12, 9))
    assert seen == ["Notes 0", "More 0", "Notes 1", "More 1", "More mean", "Notes mean"]


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ([TopK(1), TopK(2)], "Expected each callback once, got TopK twice"),
        ([Noise(1.0), ClipUpdates(1.0)], "Expected ClipUpdates before the payload that adds noise"),
        ([Noise(1.0), FedAvg(mask=SignAgreement())], r"Expected Noise .* got FedAvg\+SignAgreement, which reads votes"),
        ([Noise(1.0), CoordinateMedian()], "Expected Noise .* got CoordinateMedian"),
    ],
)
def test_orders_and_votes_that_would_be_wrong_are_refused(tmp_path: Path, callbacks: Any, said: str) -> None:
    with pytest.raises(FederatedError, match=said):
        federated_trainer(tmp_path, *callbacks)


def test_noise_reaches_the_model(tmp_path: Path) -> None:
    assert FedAvg().all_needs == Need.MEAN
    assert not torch.equal(fit(tmp_path, Noise(1.0)).weights, fit(tmp_path).weights)
