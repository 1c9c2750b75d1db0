"""The clients' losses at w, for rules that ask for them alone: right, by forward passes, and without a trace."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed import FederatedError, Need
from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import SCAFFOLD, FedGA, GradAlign
from lightning_fed.engines.vectorized.step import StackedStep
from tests.engines.test_full_gradient import ENGINES, Collecting, Net, _fit, _tensors

LOSSES = Need.MEAN | Need.LOSSES


def collecting() -> Collecting:
    return Collecting(LOSSES, "start")


@pytest.mark.parametrize(("mode", "engine"), list(product(["eval", "train"], ENGINES)))
def test_asking_for_losses_changes_nothing_else(mode: Any, engine: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"full_gradient_mode": mode, "engine": engine}
    trainer, net = _fit(tmp_path, collecting(), **options)
    plain, other = _fit(tmp_path, FedAvg(), **options)
    assert torch.equal(trainer.weights, plain.weights)
    for (name, value), there in zip(net.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(value, there), name
    assert trainer.logged_metrics["seen"] == plain.logged_metrics["seen"]


@pytest.mark.parametrize(("engine", "size"), list(product(ENGINES, [None, 5, 64])))
def test_a_loss_is_the_mean_over_all_samples_of_the_client(engine: Any, size: Any, tmp_path: Path) -> None:
    """At w, in whatever batches, and to the bit that of the pass that takes gradients there."""
    aggregator, gradients = collecting(), Collecting(Need.MEAN | Need.GRADIENTS, "start")
    options: dict[str, Any] = {"engine": engine, "full_gradient_batch_size": size}
    _, net = _fit(tmp_path, aggregator, **options)
    _fit(tmp_path, gradients, **options)
    for found, there in zip(aggregator.given, gradients.given, strict=True):
        torch.testing.assert_close(found.losses, there.losses, rtol=1e-6, atol=0)
        assert found.losses.dtype == torch.float64
        assert not len(found.gradients)
    assert (aggregator.given[0].losses - aggregator.given[1].losses).abs().min() > 1e-4


class Watched(Net):
    """Notes the grad mode of each pass, and whether dropout was on."""

    seen: list[tuple[bool, bool]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append((torch.is_grad_enabled(), self.layers.training))
        return super().training_step(batch, batch_idx)


def test_it_is_a_forward_pass_alone(tmp_path: Path) -> None:
    Watched.seen = []
    _fit(tmp_path, collecting(), 1, Watched, engine="sequential")
    passes = [training for recorded, training in Watched.seen if not recorded]
    steps = [training for recorded, training in Watched.seen if recorded]
    assert passes == [False] * len(steps), "as many batches, without a gradient, in eval mode"
    assert all(steps)


def test_many_clients_at_once_take_forward_passes_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(StackedStep):
        without: list[int] = []

        def _flat_loss(self, *inputs: Tensor) -> tuple[Tensor, ...]:
            self.without.append(torch.is_grad_enabled())
            return super()._flat_loss(*inputs)

    monkeypatch.setattr("lightning_fed.engines.vectorized.engine.StackedStep", Counting)
    aggregator = collecting()
    _fit(tmp_path, aggregator, 1, engine="vectorized")
    assert Counting.without
    assert not any(Counting.without)
    assert len(aggregator.given[0].losses) == 3


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("client", [lambda: SCAFFOLD("I"), FedGA], ids=["SCAFFOLD", "FedGA"])
def test_a_pass_that_takes_gradients_serves_losses_too(client: Any, engine: Any, tmp_path: Path) -> None:
    def losses(*callbacks: Any) -> tuple[Tensor, float]:
        aggregator = collecting()
        parts: Any = [aggregator, *callbacks]
        trainer, _ = _fit(tmp_path, parts, 1, PlainLosses, engine=engine)
        return aggregator.given[0].losses, float(trainer.logged_metrics["gradients"])

    (alone, alone_cost), (shared, shared_cost) = losses(), losses(client())
    torch.testing.assert_close(alone, shared, rtol=1e-6, atol=0)
    assert alone_cost == shared_cost == 100, "50 samples in steps, and 50 in one pass"


class PlainLosses(Net):
    """With an optimizer whose distance is known."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Broken(Net):
    """No loss at w over the data of the client that holds the sample of most, but a finite one in its steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if torch.is_grad_enabled():
            return loss
        return torch.where(batch[0].max() > LARGEST, loss * torch.nan, loss)


LARGEST = _tensors()[0].max().item() - 1e-6


@pytest.mark.parametrize("engine", ENGINES)
def test_a_client_without_a_finite_loss_is_left_out(engine: Any, tmp_path: Path) -> None:
    aggregator = collecting()
    trainer, _ = _fit(tmp_path, aggregator, 1, Broken, engine=engine, max_diverged=0.5)
    assert aggregator.given[0].num_clients == 2
    assert aggregator.given[0].losses.isfinite().all()
    with pytest.raises(FederatedError, match="diverged"):
        _fit(tmp_path, collecting(), 1, Broken, engine=engine)


def test_losses_over_other_samples_than_gradients_are_refused(tmp_path: Path) -> None:
    parts: Any = [collecting(), GradAlign(0.1, over="batch")]
    with pytest.raises(FederatedError, match=r"over the same samples, got Collecting, .*`--client.over batch`"):
        _fit(tmp_path, parts, local_steps=1)


def test_losses_at_w_beside_gradients_elsewhere_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"Expected `gradient_at` start of Collecting, .* got end"):
        _fit(tmp_path, Collecting(LOSSES | Need.GRADIENTS, "end"))
