"""Rules that weigh clients by their losses at the global model, on clients whose training can be written down."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import AFL, TERM, Aggregator, FedAvg, QFedAvg
from lightning_fed.client_algorithms import SCAFFOLD
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client, ReducedUpdate, Update
from lightning_fed.errors import FederatedError
from lightning_fed.sampling import ClientSampler
from tests.aggregators.quadratic import LR, STRENGTHS, TARGETS, Quadratic, train_by_hand, weights_after
from tests.parts import Classifier, federated_data, federated_trainer

ROUNDS, STEPS = 4, 3
EXACT: dict[str, Any] = {"rtol": 0, "atol": 1e-12}


def losses_at(w: np.ndarray) -> np.ndarray:
    """f_i(w) of the three clients."""
    return np.array(0.5 * STRENGTHS * ((w - TARGETS) ** 2).sum(axis=1))


def qfedavg(w: np.ndarray, deltas: np.ndarray, losses: np.ndarray, q: float, lipschitz: float) -> np.ndarray:
    above = (losses[:, None] ** q * lipschitz * deltas).sum(axis=0)
    below = (q * losses ** (q - 1) * lipschitz**2 * (deltas**2).sum(axis=1) + lipschitz * losses**q).sum()
    return np.array(w + above / below)


@pytest.mark.parametrize(("q", "lipschitz"), [(0.5, None), (1.0, None), (2.0, 4.0)])
def test_qfedavg_on_three_quadratic_clients(q: float, lipschitz: Any, tmp_path: Path) -> None:
    w = np.ones(2)
    for _ in range(ROUNDS):
        w = qfedavg(w, train_by_hand(w, STEPS) - w, losses_at(w), q, lipschitz or 1 / LR)
    np.testing.assert_allclose(weights_after(tmp_path, QFedAvg(q, lipschitz), ROUNDS, STEPS), w, **EXACT)


def test_the_constant_of_qfedavg_follows_the_learning_rate_of_the_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def halving(module: Quadratic) -> Any:
        made = torch.optim.SGD(module.parameters(), lr=LR)
        return [made], [torch.optim.lr_scheduler.StepLR(made, 1, gamma=0.5)]

    monkeypatch.setattr(Quadratic, "configure_optimizers", halving)
    w, rate = np.ones(2), LR
    for _ in range(3):
        deltas = -rate * STRENGTHS[:, None] * (w - TARGETS)
        w = qfedavg(w, deltas, losses_at(w), 1.0, 1 / rate)
        rate /= 2
    np.testing.assert_allclose(weights_after(tmp_path, QFedAvg(), 3, 1), w, **EXACT)


def afl(w: np.ndarray, deltas: np.ndarray, losses: np.ndarray) -> np.ndarray:
    """λ after a round that gains 0.02 f, of which nothing is below 0."""
    point = 1 / 3 + 0.02 * losses
    return np.array(point - (point.sum() - 1) / 3)


def term(w: np.ndarray, deltas: np.ndarray, losses: np.ndarray) -> np.ndarray:
    tilts = np.exp(0.3 * losses)
    return np.array(w + tilts @ deltas / tilts.sum())


@pytest.mark.parametrize(
    ("rule", "by_hand"),
    [(QFedAvg(), partial(qfedavg, q=1.0, lipschitz=1 / LR)), (TERM(0.3), term), (AFL(0.02), afl)],
    ids=lambda each: each.label if isinstance(each, Aggregator) else "",
)
def test_a_mistake_of_others_takes_what_the_batches_of_the_last_epoch_gave_for_the_loss(
    rule: Any, by_hand: Any, tmp_path: Path
) -> None:
    """LAB's f is what the client logged while it trained, at weights that had left w already."""
    w = np.ones(2)
    deltas, ends = train_by_hand(w, STEPS) - w, train_by_hand(w, STEPS - 1)
    seen = np.array([losses_at(end)[i] for i, end in enumerate(ends)])
    found = weights_after(tmp_path, rule, 1, STEPS)
    if isinstance(rule, AFL):  # the losses of a round count in the next
        assert rule.mixture is not None
        found = rule.mixture.numpy()
    assert abs(found - by_hand(w, deltas, seen)).max() > 1e-3
    np.testing.assert_allclose(found, by_hand(w, deltas, losses_at(w)), **EXACT)


@pytest.mark.parametrize("t", [0.3, -0.5])
def test_term_on_three_quadratic_clients(t: float, tmp_path: Path) -> None:
    w = np.ones(2)
    for _ in range(ROUNDS):
        tilts = np.exp(t * losses_at(w))
        w = w + (tilts / tilts.sum()) @ (train_by_hand(w, STEPS) - w)
    np.testing.assert_allclose(weights_after(tmp_path, TERM(t), ROUNDS, STEPS), w, **EXACT)


def test_afl_on_three_quadratic_clients(tmp_path: Path) -> None:
    """λ of the round weighs the updates; then it climbs the losses, and client 2 falls out of it."""
    w, mixture = np.ones(2), np.full(3, 1 / 3)
    for _ in range(ROUNDS):
        step = mixture @ (train_by_hand(w, STEPS) - w)
        point = mixture + 0.02 * losses_at(w)
        w = w + step
        mixture = min(
            (np.maximum(point - shift, 0) for shift in np.linspace(-1, 1, 20001)), key=lambda p: abs(p.sum() - 1)
        )
        kept = mixture > 0
        mixture = np.where(kept, point - (point[kept].sum() - 1) / kept.sum(), 0)
    rule = AFL(0.02)
    np.testing.assert_allclose(weights_after(tmp_path, rule, ROUNDS, STEPS), w, **EXACT)
    assert rule.mixture is not None
    np.testing.assert_allclose(rule.mixture, mixture, **EXACT)
    assert mixture.max() > 0.4


@pytest.mark.parametrize(
    ("make", "exact"),
    [
        (lambda: QFedAvg(0.0), {"rtol": 0, "atol": 0}),
        (lambda: TERM(0.0, weighting="uniform"), {"rtol": 0, "atol": 0}),
        (lambda: AFL(0.0), EXACT),
    ],
)
def test_at_0_each_is_uniform_fedavg(make: Any, exact: Any, tmp_path: Path) -> None:
    plain = weights_after(tmp_path / "plain", FedAvg(weighting="uniform"), ROUNDS, STEPS)
    np.testing.assert_allclose(weights_after(tmp_path / "rule", make(), ROUNDS, STEPS), plain, **exact)


LOSSES = np.array([0.5, 2.0, 0.25, 1.0, 0.9])
DELTAS = np.random.default_rng(0).normal(size=(5, 3))
COUNTS = np.array([1, 2, 4, 1, 3])


def sums_of(rule: Any, losses: np.ndarray) -> tuple[np.ndarray, ReducedUpdate]:
    """Returns the step of one round and what reached the server, of which single losses are no part."""
    reducer = RoundReducer(torch.zeros(3, dtype=torch.float64), rule.all_needs)
    reducer.reset(5)
    for id, (loss, delta) in enumerate(zip(losses, DELTAS, strict=True)):
        client = Client(id, int(COUNTS[id]), 1)
        update = Update(client, torch.tensor(delta), 1, weight=rule.client_weight(client), loss=torch.tensor(loss))
        rule.on_client_end(None, None, update)
        assert update.numbers_beside == 0, "it goes in place of the update"
        reducer.add(update, average_buffers=False)
    reduced = reducer.reduce(1)
    return rule.server_step(reduced).numpy(), reduced


def logs_of(rule: Any, losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """log of p_i e^{a_i}, up to a constant, and b_i."""
    if isinstance(rule, TERM):
        return np.log(COUNTS) + rule.t * losses, np.ones(5)
    kept = np.maximum(losses, 1e-10)
    return rule.q * np.log(kept), 1 + rule.q * 4.0 * (DELTAS**2).sum(axis=1) / kept


@pytest.mark.parametrize(
    ("rule", "unit", "sums"),
    [
        (TERM(0.7), 1.0, 1), (TERM(-15.0), 1.0, 1), (TERM(40.0), 1.0, 2), (TERM(-40.0), 1.0, 2), (TERM(1e5), 1.0, 5),
        (TERM(-1e5), 1.0, 5), (TERM(2.0), 1e80, 5), (TERM(-1e-3), 1.0, 1), (QFedAvg(1.5, 4.0), 1.0, 1),
        (QFedAvg(20.0, 4.0), 1e80, 2), (QFedAvg(60.0, 4.0), 1.0, 3), (QFedAvg(20.0, 4.0), 1e-80, 1),
        (QFedAvg(0.5, 4.0), 0.0, 1),
    ],
)  # fmt: skip
def test_no_exponent_overflows_and_few_need_more_than_one_sum(rule: Any, unit: float, sums: int) -> None:
    """Against weights made of all losses together, as a server that sees them would."""
    logs, shares = logs_of(rule, LOSSES * unit)
    powers = np.exp(logs - logs.max())
    weights = powers / (powers * shares).sum()
    step, reduced = sums_of(rule, LOSSES * unit)
    np.testing.assert_allclose(step, weights @ DELTAS, **EXACT)
    np.testing.assert_allclose(rule.client_figures()["step_weight"], weights, **EXACT)
    assert len(reduced.sums) == 2 * sums
    assert not reduced.updates.numel()


def test_signs_of_the_exponent_share_a_sum_and_steps_do_not_need_single_losses() -> None:
    step, reduced = sums_of(TERM(1.0), LOSSES - 0.7)
    assert len(reduced.sums) == 2
    rule = TERM(1.0)
    found = rule.server_step(replace(reduced, losses=torch.empty(0)))
    assert np.array_equal(found.numpy(), step)
    assert not len(rule.step_weights)


def train(folder: Path, rounds: int, *client: Any, **options: Any) -> tuple[FederatedTrainer, AFL]:
    rule = AFL(0.5, weighting="samples")
    torch.manual_seed(0)
    trainer = federated_trainer(folder, rule, *client, max_rounds=rounds, **options)
    trainer.fit(Classifier(), federated_data(6, 0, 10, 4), ckpt_path="last")
    return trainer, rule


@pytest.mark.parametrize("client", [list, lambda: [SCAFFOLD()]], ids=["alone", "SCAFFOLD"])
def test_the_mixture_is_saved_and_a_resumed_run_goes_on_with_it(client: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"enable_checkpointing": True}
    whole, wanted = train(tmp_path / "whole", 4, *client(), **options)
    train(tmp_path / "parts", 2, *client(), **options)
    parts, found = train(tmp_path / "parts", 4, *client(), **options)
    assert parts.resumed
    assert torch.equal(parts.weights, whole.weights)
    assert wanted.mixture is not None
    assert found.mixture is not None
    assert torch.equal(found.mixture, wanted.mixture)
    assert found.mixture[1] == 0, "a client without samples"
    assert abs(found.mixture - torch.tensor([0.3, 0.0, 0.5, 0.2])).max() > 1e-3


def test_afl_refuses_a_cohort_that_is_drawn(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"all 3 clients in every round of AFL, .* got 2: .*clients_per_round"):
        train(tmp_path, 1, clients_per_round=2, sampler=Filled())


class Filled(ClientSampler):
    """Draws clients with samples."""

    def sample(self, round: int, count: int, sizes: np.ndarray, seed: int) -> np.ndarray:
        return np.flatnonzero(sizes)[:count]


class Below(Classifier):
    """A loss that is below 0."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) - 10


def test_qfedavg_refuses_what_it_cannot_raise_to_a_power(tmp_path: Path) -> None:
    trainer = federated_trainer(tmp_path, QFedAvg(), max_rounds=1)
    with pytest.raises(FederatedError, match=r"losses of at least 0 for QFedAvg, .* got -"):
        trainer.fit(Below(), federated_data(6, 10, 4))


@pytest.mark.parametrize(
    ("make", "option"),
    [
        (lambda: QFedAvg(-0.1), "q"),
        (lambda: QFedAvg(lipschitz=0.0), "lipschitz"),
        (lambda: TERM(float("inf")), "t"),
        (lambda: AFL(-1.0), "gamma"),
    ],
)
def test_bad_arguments_name_the_option(make: Any, option: str) -> None:
    with pytest.raises(FederatedError, match=rf"`--aggregator\.{option}`"):
        make()
