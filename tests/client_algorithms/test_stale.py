"""FedBuff and FedAsync against a loop of plain torch over the same arrivals, at their limit, resumed, and refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_fed import FederatedCallback, FederatedError, FederatedTrainer
from lightning_fed.aggregators import FedACG, FedAvg, FedDGGA, FedGMA, FedYogi, QFedAvg
from lightning_fed.client_algorithms import MOON, SCAFFOLD, Ditto, FedCM, FedGA, FedIIR, FedLC, FedNTD, FedProx, Stale
from lightning_fed.sampling import Arrivals, BernoulliAvailability, Stragglers
from tests.parts import CLASSES, FEATURES, SEED, Classifier, built, copied, federated_data, federated_trainer, points

SIZES = (10, 20, 4, 13, 8, 18, 6, 11)
FEDASYNC: dict[str, Any] = {"measure_from": "global"}


def data(double: bool) -> Any:
    parts = [points(sum(SIZES)), points(12, seed=1)]
    dtype = torch.float64 if double else torch.float32
    dataset, held = (TensorDataset(part.tensors[0].to(dtype), part.tensors[1]) for part in parts)
    return federated_data(*SIZES, dataset=dataset, val_dataset=held)


class Taken(FederatedCallback):
    """Notes every client's batches in each round, each global model, and what was logged."""

    def __init__(self) -> None:
        self.rounds: list[dict[int, list[Any]]] = []
        self.models: list[Tensor] = []
        self.logged: list[dict[str, float]] = []

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.rounds.append({client.id: [] for client in cohort.clients})
        self.models.append(trainer.weights.clone())

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.rounds[-1][trainer.client.id].append(copied(batch))

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.logged.append({name: float(value) for name, value in trainer.round_metrics.items()})


def fit(
    folder: Path, *parts: Any, at_once: int = 6, size: int = 3, engine: str = "sequential", double: bool = False,
    net: Any = Classifier, ckpt_path: str | None = None, **options: Any,
) -> FederatedTrainer:  # fmt: skip
    given: dict[str, Any] = {"max_rounds": 12, "clients_per_round": size, "sampler": Arrivals(at_once, 1.0), **options}
    given.setdefault("precision", "64-true" if double else "32-true")
    trainer = federated_trainer(folder, *parts, engine=engine, **given)
    trainer.fit(built(net), data(double), ckpt_path=ckpt_path)
    return trainer


def by_hand(taken: Taken, plan: Any, exponent: float, is_async: bool, lr: float = 1.0, mu: float = 0.0) -> Tensor:
    """w after all rounds: clients take steps of SGD on their batches, from the model of when they began."""

    def gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        w = w.detach().requires_grad_()
        weight, bias = w[: FEATURES * CLASSES].view(CLASSES, FEATURES), w[FEATURES * CLASSES :]
        (found,) = torch.autograd.grad(cross_entropy(x @ weight.T + bias, y), w)
        return found

    versions = [taken.models[0]]
    for round, batches in enumerate(taken.rounds, 1):
        total, now = torch.zeros_like(versions[0]), versions[-1]
        for client in sorted(batches):
            start = versions[plan[round - 1][client]]
            w = start
            for x, y in batches[client]:
                w = w - 0.1 * (gradient(w, x, y) + mu * (w - start))
            scale = (round - plan[round - 1][client]) ** -exponent
            total = total + (w - (now if is_async else start)) * scale * SIZES[client]
        versions.append(now + lr * total / sum(SIZES[client] for client in batches))
    return versions[-1]


def plan_of(at_once: int, size: int) -> list[dict[int, int]]:
    return [Arrivals(at_once, 1.0).arrived(round, size, np.array(SIZES), SEED)[0] for round in range(1, 13)]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize(
    ("at_once", "size", "options", "lr"),
    [(6, 3, {}, 1.0), (8, 2, {"exponent": 1.5}, 0.7), (3, 3, {"exponent": 0.0}, 1.0), (5, 1, FEDASYNC, 0.6)],
    ids=["fedbuff", "steeper", "unscaled", "fedasync"],
)
def test_rounds_are_those_of_a_loop_by_hand(
    tmp_path: Path, at_once: int, size: int, options: Any, lr: float, engine: str
) -> None:
    taken, plan = Taken(), plan_of(at_once, size)
    fit(tmp_path, Stale(**options), FedAvg(lr=lr), taken, at_once=at_once, size=size, double=True)
    expected = by_hand(taken, plan, options.get("exponent", 0.5), bool(options.get("measure_from")), lr)
    trainer = fit(
        tmp_path, Stale(**options), FedAvg(lr=lr), at_once=at_once, size=size, double=True, engine=engine
    )  # fmt: skip
    assert (trainer.weights - expected).norm() < 1e-12 * (expected - taken.models[0]).norm()
    late = [max(round - version for version in arrived.values()) for round, arrived in enumerate(plan)]
    assert max(late) > 1
    assert [logged["stale/max"] for logged in taken.logged] == late


def test_it_goes_with_fedprox_and_any_rule_of_the_mean(tmp_path: Path) -> None:
    """The pull is to where the client began."""
    taken = Taken()
    trainer = fit(tmp_path, Stale(), FedProx(0.5), taken, double=True)
    expected = by_hand(taken, plan_of(6, 3), 0.5, False, mu=0.5)
    assert (trainer.weights - expected).norm() < 1e-12 * (expected - taken.models[0]).norm()
    fit(tmp_path, Stale(), FedLC(), FedYogi())


class Fresh(Arrivals):
    """Draws the same clients, who all start from the newest model."""

    made_for = None


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("options", [{}, FEDASYNC], ids=["fedbuff", "fedasync"])
@pytest.mark.quick(4)
def test_without_staleness_it_is_fedavg_to_the_bit(tmp_path: Path, options: Any, engine: str, precision: Any) -> None:
    given: dict[str, Any] = {"at_once": 8, "size": 8, "engine": engine, "max_rounds": 4, "precision": precision}
    plain = fit(tmp_path, **given, sampler=Fresh(8, 1.0)).weights
    assert torch.equal(fit(tmp_path, Stale(**options), **given).weights, plain)
    late, plain = fit(tmp_path, Stale(**options)).weights, fit(tmp_path, FedAvg(), sampler=Fresh(6, 1.0)).weights
    assert not torch.equal(late, plain)


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path, engine: str) -> None:
    whole = fit(tmp_path, Stale(), engine=engine)
    keeps = {"enable_checkpointing": True, "name": "kept", "engine": engine}
    for rounds in (5, 6, 12):
        trainer = fit(tmp_path, stale := Stale(), max_rounds=rounds, ckpt_path="last", **keeps)
    assert torch.equal(trainer.weights, whole.weights)
    assert trainer.totals["simulated/time"] == whole.totals["simulated/time"] > 0
    assert 1 <= len(stale.versions) <= 6, "the models of who still trains, at most one for each"
    (path,) = tmp_path.glob("kept/*/checkpoints/last.ckpt")
    with pytest.raises(FederatedError, match="Expected the arrivals of the run that is resumed, got others: give the"):
        fit(tmp_path, Stale(), max_rounds=20, at_once=8, ckpt_path=str(path))


def test_the_columns_of_a_round(tmp_path: Path) -> None:
    taken = Taken()
    trainer = fit(tmp_path, Stale(), taken)
    passed = [logged["simulated/time"] for logged in taken.logged]
    assert passed == sorted(passed)
    assert trainer.totals["simulated/time"] == passed[-1]
    assert taken.logged[0]["stale/max"] == 0
    assert all(logged["stale/mean"] <= logged["stale/max"] for logged in taken.logged)


class Normed(Classifier):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, CLASSES)))


@pytest.mark.parametrize(
    ("parts", "options", "words"),
    [
        (
            [],
            {"sampler": None},
            "Expected `--trainer.participation.sampler Arrivals` with Stale, as it says who is late",
        ),
        ([], {"stragglers": Stragglers()}, "Expected no `--trainer.participation.stragglers` with Stale"),
        (
            [],
            {"availability": BernoulliAvailability()},
            "Expected no `--trainer.participation.availability` with Arriv",
        ),
        (
            [],
            {"net": Normed},
            "Expected `--aggregator.buffers local` or keep with Stale, as older buffers are not kept",
        ),
        ([FedGA()], {}, "Expected one client algorithm that displaces .*, got Stale and FedGA"),
        ([Ditto()], {}, "Expected Ditto without Stale, which displaces"),
        *[
            ([part], {}, f"Expected no {type(part).__name__} with Stale, as late clients have an older model")
            for part in (SCAFFOLD(), SCAFFOLD("I"), FedCM(), FedIIR(), MOON(), FedNTD(), FedACG(), FedGMA(), QFedAvg())
        ],
        ([FedDGGA(losses_over="train")], {}, "Expected no FedDGGA with Stale"),
    ],
)
def test_what_a_late_client_does_not_have_is_refused(tmp_path: Path, parts: Any, options: Any, words: str) -> None:
    with pytest.raises(FederatedError, match=words):
        fit(tmp_path, Stale(), *parts, **options)


def test_arrivals_without_late_clients_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match="Expected `--client Stale` with Arrivals, as else every client"):
        fit(tmp_path)


def test_buffers_of_their_own_are_fine(tmp_path: Path) -> None:
    assert fit(tmp_path, Stale(), FedAvg(buffers="local"), net=Normed).round == 12
