"""Rules for updates that pull against each other, as server rules and in whole runs on quadratic clients."""

from collections.abc import Callable
from itertools import combinations, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed.aggregators import (
    TERM,
    TIES,
    Aggregator,
    Bulyan,
    FedAvg,
    FedFV,
    FedMGDA,
    FedOMG,
    PCGrad,
    QFedAvg,
    SignMajority,
)
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.updates import Client, Need, ReducedUpdate, Update
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from tests.aggregators.quadratic import step_by_hand, train_by_hand, weights_after
from tests.parts import CLASSES, FEATURES, Classifier, federated_data, federated_trainer, points

SIZES = [7, 1, 30, 12, 5]
SHARES = np.array(SIZES) / sum(SIZES)
COMBINING: dict[str, Callable[..., Aggregator]] = {"PCGrad": PCGrad, "FedMGDA": FedMGDA, "FedOMG": FedOMG}
RULES: dict[str, Callable[..., Aggregator]] = {**COMBINING, "SignMajority": SignMajority, "TIES": TIES}
every_rule = pytest.mark.parametrize("make", RULES.values(), ids=RULES)
combining = pytest.mark.parametrize("make", COMBINING.values(), ids=COMBINING)


def problem(lean: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=9), rng.normal(size=(5, 9)) + lean


def run_by_hand(step: Callable[[np.ndarray], np.ndarray], rounds: int) -> np.ndarray:
    w = np.ones(2)
    for _ in range(rounds):
        w = w + step(train_by_hand(w, 3) - w)
    return w


def test_pcgrad_on_three_quadratic_clients(tmp_path: Path) -> None:
    conflicts = []
    number = 0

    def step(deltas: np.ndarray) -> np.ndarray:
        nonlocal number
        number += 1
        draw = np.random.default_rng(np.random.SeedSequence([0, 15, number, 0]))
        orders = draw.permuted(np.array([[1, 2], [0, 2], [0, 1]]), axis=1)
        total = np.zeros(2)
        for own, order in zip(deltas, orders, strict=True):
            for other in deltas[order]:
                conflicts.append(own @ other < 0)
                if own @ other < 0:
                    own = own - (own @ other) / (other @ other) * other
            total += own
        return total / 3

    np.testing.assert_allclose(weights_after(tmp_path, PCGrad(), 4, 3), run_by_hand(step, 4), rtol=0, atol=1e-12)
    assert any(conflicts)
    assert not all(conflicts)


@pytest.mark.parametrize("epsilon", [0.1, 1.0])
def test_fedmgda_on_three_quadratic_clients(epsilon: float, tmp_path: Path) -> None:
    """In the plane the shortest point of a polygon is on a line between two of its corners, or 0 within it."""
    low, high = max(1 / 3 - epsilon, 0), min(1 / 3 + epsilon, 1)
    corners = np.array(list(permutations([low, 1 - low - high, high])))

    def step(deltas: np.ndarray) -> np.ndarray:
        units = deltas / np.linalg.norm(deltas, axis=1)[:, None]
        points = []
        for one, other in combinations(corners @ units, 2):
            apart = one - other
            along = np.clip(-(other @ apart) / max(apart @ apart, 1e-30), 0, 1)
            points.append(other + along * apart)
        within = np.linalg.solve(np.vstack([units.T, np.ones(3)]), [0, 0, 1])
        points += [np.zeros(2)] if ((within >= low) & (within <= high)).all() else []
        return 0.1 * min(points, key=np.linalg.norm)

    found = weights_after(tmp_path, FedMGDA(epsilon, lr=0.1), 4, 3)
    np.testing.assert_allclose(found, run_by_hand(step, 4), rtol=0, atol=1e-10)


def test_fedomg_on_three_quadratic_clients(tmp_path: Path) -> None:
    """On the circle round the mean the best step is that of one client alone, or gains two of them the same."""

    def step(deltas: np.ndarray) -> np.ndarray:
        mean = deltas.mean(axis=0)
        reach, angles = 0.5 * np.linalg.norm(mean), [np.arctan2(y, x) for x, y in deltas]
        for one, other in combinations(deltas, 2):
            apart = one - other
            cosine = -(apart @ mean) / (reach * np.linalg.norm(apart))
            if abs(cosine) <= 1:
                angles += [np.arctan2(apart[1], apart[0]) + turn * np.arccos(cosine) for turn in (-1, 1)]
        steps = mean + reach * np.stack([np.cos(angles), np.sin(angles)], axis=1)
        return steps[(deltas @ steps.T).min(axis=0).argmax()]

    found = weights_after(tmp_path, FedOMG(0.5), 4, 3)
    np.testing.assert_allclose(found, run_by_hand(step, 4), rtol=0, atol=1e-10)


def test_sign_majority_and_ties_on_three_quadratic_clients(tmp_path: Path) -> None:
    def majority(deltas: np.ndarray) -> np.ndarray:
        return 0.1 * np.sign((deltas > 0).sum(axis=0) - (deltas < 0).sum(axis=0))

    def ties(deltas: np.ndarray) -> np.ndarray:
        agree = deltas * deltas.sum(axis=0) > 0
        return (deltas * agree).sum(axis=0) / agree.sum(axis=0).clip(min=1)

    def ties_of_half(deltas: np.ndarray) -> np.ndarray:
        return ties(deltas * (abs(deltas) > abs(deltas[:, ::-1])))

    for name, rule, by_hand in (
        ("majority", SignMajority(0.1), majority), ("ties", TIES(1.0), ties), ("half", TIES(0.5), ties_of_half),
    ):  # fmt: skip
        found = weights_after(tmp_path / name, rule, 4, 3)
        np.testing.assert_allclose(found, run_by_hand(by_hand, 4), rtol=0, atol=1e-12)


# Limits


@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_limits_that_are_fedavg(weighting: Any) -> None:
    start, deltas = problem()
    for rule, rows in ((FedOMG(0.0, weighting=weighting), deltas), (PCGrad(weighting=weighting), abs(deltas))):
        expected, _ = step_by_hand(FedAvg(weighting=weighting), start, rows, SIZES)
        np.testing.assert_allclose(step_by_hand(rule, start, rows, SIZES)[0], expected, rtol=0, atol=1e-14)
    expected, _ = step_by_hand(FedAvg(weighting="uniform"), start, abs(deltas), SIZES)
    ties, _ = step_by_hand(TIES(1.0, weighting=weighting), start, abs(deltas), SIZES)
    np.testing.assert_allclose(ties, expected, rtol=0, atol=1e-14)


def test_sign_majority_is_the_neighbour_of_the_and_mask() -> None:
    """It moves what a vote of any majority lets through, and where all agree to the side of FedAvg's step."""
    start, deltas = problem(0.5)
    deltas[:, 0] = 0
    deltas[:, 1] = [1, -1, 1, -1, 0]
    found, _ = step_by_hand(SignMajority(), start, deltas, SIZES)
    some, _ = step_by_hand(FedAvg(mask=SignAgreement(0.0, binary=True, comparison=">")), start, deltas, SIZES)
    every, _ = step_by_hand(FedAvg(mask=SignAgreement(1.0, binary=True)), start, deltas, SIZES)
    assert np.array_equal(found != start, some != start)
    assert set(np.flatnonzero(found == start)) == {0, 1}
    agreed = every != start
    assert 0 < agreed.sum() < 7
    assert np.array_equal(np.sign(found - start)[agreed], np.sign(every - start)[agreed])


def test_fedmgda_without_freedom_is_the_mean_of_directions() -> None:
    start, deltas = problem()
    after, _ = step_by_hand(FedMGDA(0.0), start, deltas, SIZES)
    units = deltas / np.linalg.norm(deltas, axis=1)[:, None]
    np.testing.assert_allclose(after, start + SHARES @ units, rtol=0, atol=1e-14)


def test_weights_count_once_and_where_the_rule_has_any() -> None:
    """A mistake of others: FedOMG with weights counted twice, so that κ = 0 gives Δ/n."""
    start, deltas = problem()
    after, _ = step_by_hand(FedOMG(0.0), start, deltas, SIZES)
    np.testing.assert_allclose(after - start, SHARES @ deltas, rtol=0, atol=1e-14)
    for name, make in RULES.items():
        one, other = (step_by_hand(make(weighting=w), start, deltas, SIZES)[0] for w in ("samples", "uniform"))
        assert np.array_equal(one, other) == (name in ("SignMajority", "TIES")), name


# All of them


@every_rule
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_no_movement_and_one_client(make: Any, dtype: Any) -> None:
    start, deltas = (part.astype(dtype) for part in problem())
    still, _ = step_by_hand(make(), start, np.zeros_like(deltas), SIZES)
    assert np.array_equal(still, start)
    after, _ = step_by_hand(make(), start, deltas[:1], [3])
    assert after.dtype == dtype
    wanted = {
        "PCGrad": deltas[0],
        "FedMGDA": deltas[0] / np.linalg.norm(deltas[0]),
        "FedOMG": 1.5 * deltas[0],
        "SignMajority": 1e-3 * np.sign(deltas[0]),
        "TIES": np.where(abs(deltas[0]) >= np.sort(abs(deltas[0]))[-2], deltas[0], 0),
    }[make.__name__]
    np.testing.assert_allclose(after, start + wanted, rtol=0, atol=1e-6 if dtype == np.float32 else 1e-12)


@combining
def test_a_mask_goes_over_the_step_and_cannot_come_before_it(make: Any) -> None:
    start, deltas = problem(0.3)
    agreed = np.abs(np.sign(deltas).mean(axis=0))
    factors = np.where(agreed >= 0.5, 1.0, agreed)
    assert 0 < (factors < 1).sum() < 9
    plain, _ = step_by_hand(make(), start, deltas, SIZES)
    masked, _ = step_by_hand(make(mask=SignAgreement(0.5)), start, deltas, SIZES)
    np.testing.assert_allclose(masked - start, factors * (plain - start), rtol=0, atol=1e-14)
    with pytest.raises(FederatedError, match="apply after"):
        make(mask=SignAgreement(), apply="before")


@pytest.mark.parametrize("make", [SignMajority, TIES])
def test_votes_over_votes_are_refused(make: Any) -> None:
    with pytest.raises(FederatedError, match=f"no mask over {make.__name__}, got SignAgreement: .*--aggregator.mask"):
        make(mask=SignAgreement())


@combining
def test_what_a_client_counts_for_is_at_hand(make: Any) -> None:
    start, deltas = problem()
    rule = make()
    assert list(rule.client_figures()) == ["step_weight"]
    assert not len(rule.client_figures()["step_weight"])
    after, _ = step_by_hand(rule, start, deltas, SIZES)
    weights = rule.client_figures()["step_weight"].numpy()
    np.testing.assert_allclose(after - start, weights @ deltas, rtol=0, atol=1e-14)


@every_rule
def test_needs_no_more_than_it_reads(make: Any) -> None:
    assert make().all_needs == (Need.SIGN_SUM if make is SignMajority else Need.UPDATES)


def stepped(rule: PCGrad, deltas: np.ndarray, seed: int, round: int) -> torch.Tensor:
    weights = torch.zeros(deltas.shape[1], dtype=torch.float64)
    trainer: Any = SimpleNamespace(weights=weights, seed=seed)
    clients = tuple(Client(i, 1, round) for i in range(len(deltas)))
    shares = torch.full((len(deltas),), 1 / len(deltas), dtype=torch.float64)
    rule.step(trainer, None, ReducedUpdate(round, clients, weights=shares, updates=torch.tensor(deltas)))
    return weights


def test_the_order_of_pcgrad_comes_from_seed_and_round_alone() -> None:
    """A mistake to make: an order from a stream that goes on differs between processes, and after a resumption."""
    _, deltas = problem()
    first = PCGrad()
    steps = [stepped(first, deltas, 3, round) for round in (1, 2, 3)]
    torch.rand(5)
    np.random.default_rng().random(5)
    assert torch.equal(stepped(PCGrad(), deltas, 3, 3), steps[2])
    assert torch.equal(stepped(first, deltas, 3, 1), steps[0])
    assert not torch.allclose(steps[0], steps[1])
    assert not torch.allclose(stepped(first, deltas, 4, 1), steps[0])


KEEP_NOTHING_ELSE = [*RULES.values(), FedFV, QFedAvg, TERM, lambda: Bulyan(0)]


@pytest.mark.parametrize("make", KEEP_NOTHING_ELSE, ids=[*RULES, "FedFV", "QFedAvg", "TERM", "Bulyan"])
@pytest.mark.quick(2)
def test_a_resumed_run_has_the_same_bits(make: Any, tmp_path: Path) -> None:
    """With an order drawn anew, and updates of clients that were in former rounds alone."""
    x, y = points(37).tensors
    data = {"dataset": TensorDataset(x[y.argsort()], y.sort().values), "val_dataset": None}

    options: dict[str, Any] = {"enable_checkpointing": True, "seed": 1}
    options |= {"clients_per_round": 3} if make is FedFV else {}

    def run(name: str, make: Any, *stops: int) -> torch.Tensor:
        for rounds in stops:
            torch.manual_seed(0)
            trainer = federated_trainer(tmp_path / name, make(), max_rounds=rounds, **options)
            trainer.logger_choice = []
            trainer.fit(Classifier(), federated_data(6, 5, 7, 6, 4, 9, **data), ckpt_path="last")
        return trainer.weights.clone()

    whole = run("whole", make, 4)
    assert torch.equal(run("parts", make, 2, 4), whole)
    assert not torch.allclose(run("plain", FedAvg, 4), whole)


class StandsStill(FederatedCallback):
    """Client 0 sends an update of 0."""

    def on_client_end(self, trainer: Any, pl_module: Any, update: Update) -> None:
        if update.client.id == 0:
            update.delta.zero_()


@every_rule
def test_a_client_that_stands_still_spoils_nothing(make: Any, tmp_path: Path) -> None:
    """A mistake of others: dividing by the length of its update."""
    assert np.isfinite(weights_after(tmp_path, make(), 3, 1, StandsStill())).all()


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: TIES(0.0), "keep"), (lambda: TIES(1.1), "keep"), (lambda: TIES(float("nan")), "keep"),
        (lambda: FedMGDA(-0.1), "epsilon"), (lambda: FedMGDA(1.1), "epsilon"), (lambda: FedOMG(1.0), "kappa"),
        (lambda: FedOMG(-0.1), "kappa"), (lambda: SignMajority(0.0), "lr"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(make: Any, option: str) -> None:
    with pytest.raises(FederatedError, match=rf"--aggregator\.{option}\b"):
        make()


@pytest.mark.parametrize("bias", [True, False])
def test_a_bias_before_batchnorm_votes_by_rounding_and_without_it_both_engines_agree(
    bias: bool, tmp_path: Path
) -> None:
    """What docs/algorithms/sign-majority.md says: the sign of an error counts in full, so leave such a bias out."""
    found, updates = [], {}

    class Notes(FederatedCallback):
        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            updates[update.client.id] = update.delta.clone()

    for engine in ("sequential", "vectorized"):
        torch.manual_seed(0)
        layers = [nn.Linear(FEATURES, 6, bias=bias), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, CLASSES)]
        net = nn.Sequential(*layers)
        if bias:
            nn.init.zeros_(net[0].bias)  # so that no rounding of the weight swallows that of its gradient
        options: dict[str, Any] = {"max_rounds": 3, "engine": engine, "local_epochs": 2}
        federated_trainer(tmp_path, SignMajority(0.01), Notes(), **options).fit(
            Classifier(net), federated_data(*[16] * 5)
        )
        found.append(torch.cat([p.detach().flatten() for name, p in net.named_parameters() if name != "0.bias"]))
    torch.testing.assert_close(*found, rtol=0, atol=1e-6)
    if bias:
        weights, rounding = (abs(torch.stack(list(updates.values()))[:, part]) for part in (slice(30), slice(30, 36)))
        assert 0 < rounding.max() < 1e-5 * weights.max()
