"""A second gradient of a step's batch: the function of the first pass at another point, of which nothing else shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.aggregators import FedAvg
from lightning_fed.client_algorithms import MOON, ClientAlgorithm, FedGA, FedLC, FedNTD, FedSAM
from lightning_fed.core.train_state import Tolerance
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, Classifier, federated_data, federated_trainer

SIZES = (16, 6, 24, 13)
ENGINES = ["sequential", "vectorized"]


class BusySecond(Classifier):
    """Dropout, BatchNorm, and a running centre that is read in training: nothing of them may differ between passes."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, 3)))
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        found = self.net(x)
        self.center.mul_(0.7).add_(0.3 * found.detach().mean(0))
        return found - self.center

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("seen", loss)
        return loss


class Metered(BusySecond):
    """What only a client that trains alone may have: a metric object, a counter, a parameter that the loss misses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.steps += 1
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        return super().training_step(batch, batch_idx)


class Asks(ClientAlgorithm):
    """Takes second gradients, and edits none.

    Args:
        ask: Gets the trainer.
    """

    stacks = True
    takes_second_gradient = True
    adds_to_gradient = False

    def __init__(self, ask: Callable[[Any], None]) -> None:
        self.ask = ask

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.ask(trainer)


def fit(folder: Path, *algorithms: Any, net: Any = BusySecond, data: Any = None, **options: Any) -> Any:
    torch.manual_seed(0)
    trainer = federated_trainer(folder, FedAvg(), *algorithms, **{"max_rounds": 2, **options})
    trainer.fit(net(), data or federated_data(*SIZES))
    return trainer


def again(trainer: Any) -> None:
    """At the live weights it is the first gradient, once and once more."""
    out = torch.empty_like(trainer.vector.grad)
    for _ in range(2):
        trainer.gradient_at(trainer.vector.data, out)
        assert torch.equal(out, trainer.vector.grad)
        assert out.any()


def far(trainer: Any) -> None:
    """At another point it is another one, and the first stays."""
    weights, first = trainer.vector.data.clone(), trainer.vector.grad.clone()
    out = torch.empty_like(first)
    trainer.gradient_at(weights + 1, out)
    assert not torch.equal(out, first)
    assert torch.equal(trainer.vector.grad, first)
    assert torch.equal(trainer.vector.data, weights)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_at_the_live_weights_it_is_the_first_gradient_to_the_bit(engine: Any, precision: Any, tmp_path: Path) -> None:
    fit(tmp_path, Asks(again), engine=engine, precision=precision)


def test_under_mixed_precision_too(tmp_path: Path) -> None:
    fit(tmp_path, Asks(again), precision="bf16-mixed")


@pytest.mark.parametrize("form", ["start", "step"])
@pytest.mark.parametrize("engine", ENGINES)
def test_it_is_displaced_as_the_first_is(engine: Any, form: Any, tmp_path: Path) -> None:
    fit(tmp_path, Asks(again), FedGA(0.5, form), engine=engine)


@pytest.mark.parametrize(
    ("net", "engine"), [(Metered, "sequential"), (BusySecond, "sequential"), (BusySecond, "vectorized")]
)
@pytest.mark.parametrize("ask", [again, far])
def test_nothing_of_it_shows_but_its_cost(net: Any, engine: Any, ask: Any, tmp_path: Path) -> None:
    """Weights, buffers, attributes, logged values and parameters without a gradient are those of a run without."""
    plain, asked = fit(tmp_path, net=net, engine=engine), fit(tmp_path, Asks(ask), net=net, engine=engine)
    assert torch.equal(plain.weights, asked.weights)
    one, other = plain.lightning_module, asked.lightning_module
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in one.state_dict().items())
    assert getattr(one, "steps", 0) == getattr(other, "steps", 0)
    for name in ("train/loss", "seen", "accuracy") if net is Metered else ("train/loss", "seen"):
        assert plain.callback_metrics[name] == asked.callback_metrics[name]
    assert plain.totals["gradients"] == plain.totals["samples"] == asked.totals["samples"]
    assert asked.totals["gradients"] == (3 if ask is again else 2) * plain.totals["samples"]


class FragileSecond(Metered):
    """Cannot be taken far from where it trains."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.net[0].weight.max() < 50
        return super().training_step(batch, batch_idx)


def test_one_that_fails_leaves_what_others_have_logged(tmp_path: Path) -> None:
    def ask(trainer: Any) -> None:
        away = 100.0 * (trainer.client.id == len(SIZES) - 1)
        trainer.gradient_at(trainer.vector.data + away, torch.empty_like(trainer.vector.grad))

    tolerant = {"on_client_error": "skip", "max_diverged": 0.5}
    trainer = fit(tmp_path, Asks(ask), net=FragileSecond, tolerance=Tolerance(**tolerant), max_rounds=1)
    assert trainer.logged_metrics["clients/failed"] == 1
    assert {"accuracy", "seen", "train/loss"} <= trainer.callback_metrics.keys()


class Cubic(Classifier):
    """f(w) = mean over samples of Σ x w³: its gradient at a point is known."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.inputs = batch[0]
        return (batch[0] * self.net.weight[0] ** 3).sum(dim=1).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", 0.0)


@pytest.mark.parametrize("part", [None, (0, 3), (1, 3), (2, 3)])
def test_at_a_point_it_is_the_gradient_there_of_the_part(part: Any, tmp_path: Path) -> None:
    seen = []

    def ask(trainer: Any) -> None:
        point, out = torch.linspace(-1, 2, 5).double(), torch.empty(5, dtype=torch.float64)
        x = trainer.lightning_module.inputs.clone()
        trainer.gradient_at(point, out, part=part)
        size = len(x)
        k, n = part or (0, 1)
        x = x[size * k // n : size * (k + 1) // n]
        np.testing.assert_allclose(out.numpy(), (3 * point**2 * x.mean(0)).numpy(), rtol=1e-12)
        seen.append(len(x))

    trainer = fit(tmp_path, Asks(ask), net=Cubic, precision="64-true", max_rounds=1)
    assert trainer.totals["gradients"] == sum(SIZES) + sum(seen)
    assert part is None or len(set(seen)) > 1


@pytest.mark.parametrize("part", [None, (1, 2)])
def test_many_clients_at_once_get_what_each_gets_alone(part: Any, tmp_path: Path) -> None:
    def run(engine: Any, **options: Any) -> list[Tensor]:
        found: list[Tensor] = []

        def ask(trainer: Any) -> None:
            out = torch.empty_like(trainer.vector.grad)
            trainer.gradient_at(trainer.vector.data * 2 + 0.1, out, part=part)
            found.append(out.reshape(-1, out.shape[-1]).clone())

        net = lambda: Classifier(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)))  # noqa: E731  # built when the seed is set
        trainer = fit(tmp_path, Asks(ask), net=net, engine=engine, precision="64-true", max_rounds=1, **options)
        return sorted(torch.cat(found), key=lambda row: row.tolist()) + [torch.tensor(trainer.totals["gradients"])]

    alone, chunks = run("sequential"), run("vectorized", chunk_size=3)
    assert len(alone) == len(chunks)
    for one, other in zip(alone, chunks, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-11)


REFUSED: dict[str, tuple[dict[str, Any], Any, str]] = {
    "accumulation": (
        {"accumulate_grad_batches": 2}, None, r"`--trainer.accumulate_grad_batches 1` for FedSAM, .* got 2: .*"
    ),
    "compile": ({"compile": True}, None, r"`--trainer.compile false` for FedSAM, .*, got default"),
    "LBFGS": ({}, lambda m: torch.optim.LBFGS(m.parameters()), r"one gradient in a step for FedSAM, .* got LBFGS"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_steps_of_several_gradients_are_refused_before_the_first(name: str, tmp_path: Path) -> None:
    options, optimizer, sentence = REFUSED[name]
    for engine in ("sequential", "auto"):
        with pytest.raises(FederatedError, match=f"^Expected .*{sentence}"):
            fit(tmp_path, FedSAM(), net=lambda: Classifier(optimizer=optimizer), engine=engine, **options)


class ManualSecond(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


def test_manual_optimization_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"^Expected automatic optimization, .*FedSAM"):
        fit(tmp_path, FedSAM(), net=ManualSecond)


class SilentSecond(ClientAlgorithm):
    """Does not say that it takes one."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        trainer.gradient_at(trainer.vector.data, torch.empty_like(trainer.vector.grad))


class AtTheEnd(ClientAlgorithm):
    """Asks when there is no batch any more."""

    takes_second_gradient = True

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        trainer.gradient_at(trainer.vector.data, torch.empty_like(trainer.vector.grad))


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        (SilentSecond(), r"^Expected `takes_second_gradient = True` of a client algorithm"),
        (AtTheEnd(), r"^Expected `trainer.gradient_at` to be called in `on_before_optimizer_step`"),
        (Asks(lambda t: t.gradient_at(t.vector.data, t.vector.grad, part=(2, 2))), r"^Expected `part` .* got \(2, 2\)"),
        (
            Asks(lambda t: t.gradient_at(t.vector.data, t.vector.grad, part=(0, 9))),
            r"least 9 samples.* Asks .* of 8",
        ),
    ],
)
def test_calls_without_a_batch_or_a_part_are_refused(algorithm: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=sentence):
        fit(tmp_path, algorithm)


@pytest.mark.parametrize("engine", ENGINES)
def test_who_does_not_ask_keeps_nothing(engine: Any, tmp_path: Path) -> None:
    kept: list[Any] = []

    class Looks(ClientAlgorithm):
        stacks = True

        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            asked = trainer.train_state.gradient_at
            kept.append((len(asked._noted) if hasattr(asked, "_noted") else None, asked))

    fit(tmp_path, Looks(), FedSAM(0.0), engine=engine)
    assert {noted for noted, _ in kept} == {None}
    assert all(not hasattr(ask, "engine") for _, ask in kept)
    kept.clear()
    fit(tmp_path, Looks(), FedSAM(0.1), engine=engine)
    assert [noted for noted, _ in kept] == [0] * 2 * len(SIZES), "the last batch is let go"


class LateSecond(Classifier):
    """Asks for its client in the second step of the second round: many clients at once cannot go on from there."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1 and self.trainer.round == 1:
            assert self.trainer.client is not None
        return super().training_step(batch, batch_idx)


def test_what_a_chunk_that_failed_had_taken_counts_once(tmp_path: Path) -> None:
    trainer = fit(tmp_path, FedSAM(0.1), net=LateSecond, data=federated_data(*[16] * 8), engine="auto", max_rounds=3)
    assert "trainer.client" in trainer.engine_choice["reason"]
    assert trainer.totals["gradients"] == 2 * trainer.totals["samples"] == 2 * 3 * 8 * 16


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("make", [lambda: FedLC(1.0), lambda: MOON(1.0), lambda: FedNTD(1.0)])
def test_what_other_algorithms_make_of_the_loss_is_in_it(engine: Any, make: Any, tmp_path: Path) -> None:
    net = lambda: Classifier(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)))  # noqa: E731  # built when the seed is set
    fit(tmp_path, Asks(again), make(), net=net, engine=engine)
