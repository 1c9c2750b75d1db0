"""Beside noise: what else would leave a client is refused, and everyone's absence is hidden."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer
from lightning_fed.aggregators import CoordinateMedian, FedAdam, FedAvg, FedAvgM, FedExP
from lightning_fed.callbacks import ClipUpdates
from lightning_fed.callbacks.diagnostics import ClientEvaluation, GradientDissimilarity, UpdateAgreement, UpdateGeometry
from lightning_fed.client_algorithms import SCAFFOLD, FedCM, FedGA, FedProx, MimeLite, StatelessSCAFFOLD
from lightning_fed.core.updates import Need
from lightning_fed.masks import SignAgreement
from lightning_fed.sampling import BernoulliAvailability, Stragglers, UniformSampler
from tests.callbacks.payloads import Noise, Poisson, RandomK, TopK
from tests.parts import FEATURES, Classifier, built, federated_data, federated_trainer


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("own", 1.0)
        return super().training_step(batch, batch_idx)


class Tenfold(FederatedCallback):
    """An ordinary callback that edits updates."""

    def __init__(self, by: str = "in place") -> None:
        self.by = by

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if self.by == "in place":
            update.delta.mul_(10)
        elif self.by == "anew":
            update.delta = update.delta * 10
        else:
            assert update.delta.norm() > 0


class Sends(FederatedCallback):
    """Sends a count, as an adaptive bound does."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        update.send("below", torch.ones(()))


class Reads(FederatedCallback):
    def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
        """Sees a single update."""


UNIFORM: dict[str, Any] = {"weighting": "uniform"}


def fit(
    folder: Path, *callbacks: Any, net: Any = Classifier, engine: str = "sequential", **options: Any
) -> FederatedTrainer:
    given = callbacks if any(isinstance(cb, FedAvg) for cb in callbacks) else (FedAvg(**UNIFORM), *callbacks)
    trainer = federated_trainer(folder, *given, engine=engine, **{"max_rounds": 3, **options})
    trainer.fit(built(net), federated_data(12, 10, 6))
    return trainer


@pytest.mark.parametrize(
    ("callbacks", "said"),
    [
        ([Noise(1.0), ClipUpdates(1.0)], "Expected ClipUpdates before the payload that adds noise"),
        ([Noise(1.0), FedAvg(mask=SignAgreement())], r"Expected Noise .* got FedAvg\+SignAgreement, which reads votes"),
        ([Noise(1.0), CoordinateMedian()], "Expected Noise .* got CoordinateMedian"),
        ([Noise(1.0), UpdateGeometry()], "Expected Noise with callbacks that read only the mean .* got UpdateGeometry"),
        ([UpdateAgreement(), Noise(1.0)], "got UpdateAgreement, which reads what single clients"),
        ([ClientEvaluation(), Noise(1.0)], "got ClientEvaluation"),
        ([Reads(), Noise(1.0)], "got Reads"),
    ],
)
def test_votes_and_single_updates_are_refused_when_the_trainer_is_made(
    tmp_path: Path, callbacks: Any, said: str
) -> None:
    with pytest.raises(FederatedError, match=said):
        federated_trainer(tmp_path, *callbacks)


@pytest.mark.parametrize(
    ("callbacks", "options", "said"),
    [
        ([FedAvg(weighting="samples")], {}, "Expected `--aggregator.weighting uniform` beside Noise"),
        ([], {"net": Normed}, "Expected `--aggregator.buffers local` or keep beside Noise"),
        ([FedGA()], {}, "Expected no FedGA beside Noise, as the gradients that are exchanged"),
        ([StatelessSCAFFOLD()], {}, "Expected no StatelessSCAFFOLD beside Noise"),
        ([GradientDissimilarity(every_n_rounds=3)], {}, "Expected no GradientDissimilarity beside Noise"),
        ([], {"stragglers": Stragglers()}, "Expected no `--trainer.participation.stragglers` beside Noise"),
        ([], {"max_diverged": 0.5}, "Expected `--trainer.tolerance.max_diverged 0` beside Noise"),
    ],
)
def test_what_leaves_clients_without_noise_is_refused_before_training(
    tmp_path: Path, callbacks: Any, options: Any, said: str
) -> None:
    fit(tmp_path, ClipUpdates(0.1), *callbacks, **options)
    with pytest.raises(FederatedError, match=said):
        fit(tmp_path, ClipUpdates(0.1), Noise(0.0), *callbacks, **options)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("callbacks", "name"),
    [
        ([SCAFFOLD()], "SCAFFOLD"),
        ([FedCM()], "FedCM"),
        ([MimeLite()], "MimeLite"),
        ([FedExP()], "FedExP"),
        ([Sends()], "below"),
    ],
)
def test_sums_without_noise_are_refused(tmp_path: Path, callbacks: Any, name: str, engine: str) -> None:
    aggregator = [] if isinstance(callbacks[0], FedExP) else [FedAvg(**UNIFORM)]
    for payloads in ([ClipUpdates(0.1)], [ClipUpdates(0.1), Noise(0.0, covers=(name,))]):
        trainer = federated_trainer(tmp_path, *payloads, *callbacks, *aggregator, engine=engine)
        trainer.fit(built(Classifier), federated_data(12, 10))
    trainer = federated_trainer(tmp_path, ClipUpdates(0.1), Noise(0.0), *callbacks, *aggregator, engine=engine)
    with pytest.raises(FederatedError, match=f"send nothing without noise beside Noise, got the sum .'{name}'"):
        trainer.fit(built(Classifier), federated_data(12, 10))


@pytest.mark.parametrize("where", ["rule", "hook"])
def test_weights_of_a_rules_own_are_refused(tmp_path: Path, where: str) -> None:
    class Favours(FedAvg):
        def client_weight(self, client: Any) -> float:
            return 1.0 + client.id * (where == "rule")

        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            update.weight += update.client.id * (where == "hook")

    with pytest.raises(FederatedError, match="Expected clients to weigh 1 each beside Noise, got 2"):
        fit(tmp_path, Favours(**UNIFORM), ClipUpdates(0.1), Noise(0.0))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("last", [Tenfold("in place"), Tenfold("anew"), RandomK(3), TopK(2)])
def test_edits_after_the_bound_are_refused(tmp_path: Path, last: Any, engine: str) -> None:
    fit(tmp_path, ClipUpdates(0.1), last, engine=engine)
    fit(tmp_path, last, ClipUpdates(0.1), Noise(0.0), engine=engine)
    fit(tmp_path, ClipUpdates(0.1), Tenfold("reads"), Noise(0.0), engine=engine)
    with pytest.raises(FederatedError, match="Expected an update to stay as it is after the bound for which Noise"):
        fit(tmp_path, ClipUpdates(0.1), last, Noise(0.0), engine=engine)


def test_only_the_sampler_that_is_accounted_for_is_taken(tmp_path: Path) -> None:
    fit(tmp_path, Noise(0.0, assumes_sampler=Poisson), sampler=Poisson())
    fit(tmp_path, Noise(0.0, assumes_sampler=UniformSampler))
    with pytest.raises(
        FederatedError, match="Expected `--trainer.participation.sampler Poisson`, .* got UniformSampler"
    ):
        fit(tmp_path, Noise(0.0, assumes_sampler=Poisson))
    with pytest.raises(FederatedError, match="and no `--trainer.participation.availability`, got Poisson and <"):
        fit(tmp_path, Noise(0.0, assumes_sampler=Poisson), sampler=Poisson(), availability=BernoulliAvailability(0.5))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("rule", [FedAvg, FedAvgM, FedAdam])
def test_a_round_without_clients_steps(tmp_path: Path, rule: Any, engine: str) -> None:
    lengths: list[tuple[int, float]] = []

    class Watches(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
            self.before, self.clients = trainer.weights.clone(), len(cohort.clients)

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            lengths.append((self.clients, (trainer.weights - self.before).norm().item()))

    options: dict[str, Any] = {"max_rounds": 8, "sampler": Poisson(), "clients_per_round": 1, "engine": engine}
    trainer = federated_trainer(tmp_path, rule(**UNIFORM), Noise(1.0), Watches(), FedProx(0.1), **options)
    trainer.fit(built(Classifier), federated_data(12, 10, 6))
    assert {0} < {clients for clients, _ in lengths}
    assert all(length > 0 for _, length in lengths)


def test_an_empty_round_gets_the_noise_of_any_other(tmp_path: Path) -> None:
    class Nobody(Poisson):
        def sample(self, round: int, count: int, sizes: Any, seed: int) -> Any:
            return super().sample(round, count, sizes, seed)[:0]

    seen: list[torch.Tensor] = []

    class Looks(FederatedCallback):
        def on_before_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
            seen.append(update.mean.clone())

    trainer = fit(tmp_path, Noise(1.0), Looks(), sampler=Nobody(), max_rounds=2)
    stream = [torch.randn(seen[0].shape, generator=_stream(trainer, number)) / 3 for number in (1, 2)]
    assert len(seen) == 2
    assert all(torch.allclose(one, other) for one, other in zip(seen, stream, strict=True))


def _stream(trainer: Any, number: int) -> torch.Generator:
    trainer.train_state.round = number
    return Noise(1.0).stream(trainer)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_what_clients_log_is_left_out_of_the_row(tmp_path: Path, engine: str) -> None:
    class Logs(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
            pl_module.log("before", 1.0)

        def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
            pl_module.log("after", 2.0)

    given = (FedAvg(**UNIFORM, buffers="keep"), ClipUpdates(0.1), Logs())
    plain, noisy = (fit(tmp_path, *given, *more, net=Normed, engine=engine) for more in ([], [Noise(0.0)]))
    of_clients = {"train/loss", "own", "clip/share", "clip/norm"}
    assert of_clients <= plain.metrics.logged.keys()
    assert plain.metrics.logged.keys() - noisy.metrics.logged.keys() == of_clients
    assert (noisy.metrics.logged["before"], noisy.metrics.logged["after"]) == (1.0, 2.0)
    assert torch.equal(plain.weights, noisy.weights)


def test_noise_reaches_the_model(tmp_path: Path) -> None:
    assert FedAvg().all_needs == Need.MEAN
    assert not torch.equal(fit(tmp_path, Noise(1.0)).weights, fit(tmp_path).weights)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_who_is_in_the_cohort_never_changes_the_noise(tmp_path: Path, engine: str) -> None:
    found: list[torch.Tensor] = []

    class Records(Noise):
        def decode(self, trainer: Any, pl_module: Any, update: Any) -> None:
            before = update.mean.clone()
            super().decode(trainer, pl_module, update)
            found.append((update.mean - before) * trainer.cohort_size)

    for count in (1, 2, 3):
        fit(tmp_path, Records(1.0), clients_per_round=count, max_rounds=1, engine=engine)
    assert torch.allclose(found[0], found[1], atol=1e-6)
    assert torch.allclose(found[0], found[2], atol=1e-6)
