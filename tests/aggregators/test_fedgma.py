"""FedGMA of 2021 as a server rule: its three gradients, its two thresholds, and FedAvg as a limit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import FedAvg, FedGMA
from lightning_fed.data import ByUser, FederatedDataModule
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from tests.aggregators.quadratic import (
    LR,
    STRENGTHS,
    TARGETS,
    Quadratic,
    gradients_by_hand,
    step_by_hand,
    train_by_hand,
    weights_after,
)

SIZES = [7, 1, 30, 12, 5]


def problem() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    gradients = (rng.normal(size=(5, 40)) + 0.8) * (rng.random((5, 40)) > 0.2)
    return rng.normal(size=40), rng.normal(size=(5, 40)), gradients


def mask_of(gradients: np.ndarray, p: float, p_means: str) -> np.ndarray:
    up, down = (gradients > 0).sum(axis=0), (gradients < 0).sum(axis=0)
    agreeing = np.abs(up - down) if p_means == "formula" else np.maximum(up, down)
    return (agreeing >= p * len(gradients) - 1e-9).astype(float)


@pytest.mark.parametrize("p_means", ["formula", "prose"])
@pytest.mark.parametrize(("weighting", "lr"), [("samples", 1.0), ("uniform", 0.3)])
def test_agrees_with_numpy_and_lr_is_for_the_mean_alone(p_means: Any, weighting: Any, lr: float) -> None:
    start, deltas, gradients = problem()
    rule = FedGMA(0.6, 0.2, p_means=p_means, weighting=weighting, lr=lr)
    after, logged = step_by_hand(rule, start, deltas, SIZES, gradients)
    shares = np.array(SIZES) / sum(SIZES) if weighting == "samples" else np.full(5, 0.2)
    mask = mask_of(gradients, 0.6, p_means)
    assert 0 < mask.mean() < 1
    expected = start + lr * (shares @ deltas) - 0.2 * mask * (shares @ gradients)
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-12)
    assert logged == pytest.approx({"fedgma/agreed": mask.mean()})


def test_the_two_readings_differ_here() -> None:
    _, _, gradients = problem()
    assert mask_of(gradients, 0.6, "formula").sum() < mask_of(gradients, 0.6, "prose").sum()


@pytest.mark.parametrize("p_means", ["formula", "prose"])
@pytest.mark.parametrize("gradient_at", ["start", "last_step", "end"])
def test_three_quadratic_clients_over_rounds(gradient_at: Any, p_means: Any, tmp_path: Path) -> None:
    w = np.ones(2)
    for _ in range(3):
        before_last, ends = train_by_hand(w, steps=2), train_by_hand(w, steps=3)
        points = {"start": np.tile(w, (3, 1)), "last_step": before_last, "end": ends}[gradient_at]
        gradients = gradients_by_hand(points)
        w = ends.mean(axis=0) - LR * mask_of(gradients, 0.4, p_means) * gradients.mean(axis=0)
    found = weights_after(tmp_path, FedGMA(0.4, LR, gradient_at, p_means), 3, 3)
    np.testing.assert_allclose(found, w, rtol=0, atol=1e-12)


def test_algorithm_1_to_the_letter(tmp_path: Path) -> None:
    """Epochs of one step on all data, the last one's gradient, weights in proportion to 1 / m_k."""
    strengths, targets, owners = (
        np.repeat(STRENGTHS, [1, 2, 4]),
        np.repeat(TARGETS, [1, 2, 4], axis=0),
        [0, 1, 1, 2, 2, 2, 2],
    )
    targets = targets + np.arange(7)[:, None] / 7
    data = FederatedDataModule(
        TensorDataset(torch.tensor(strengths), torch.tensor(targets)),
        ByUser(),
        users=owners,
        num_clients=3,
        batch_size=9,
    )
    quiet: Any = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    rule = FedGMA(0.4, 0.3, "last_step", "formula", "inverse")
    trainer = FederatedTrainer(
        accelerator="cpu", precision="64-true", max_rounds=2, local_epochs=3, clients_per_round=3, callbacks=[rule],
        default_root_dir=str(tmp_path), **quiet,
    )  # fmt: skip
    trainer.fit(Quadratic(), data)
    w, shares = np.ones(2), np.array([1, 1 / 2, 1 / 4]) / 1.75
    for _ in range(2):
        ends, last = [], []
        for client in range(3):
            own, held = w, np.array(owners) == client
            for _ in range(3):
                gradient = (strengths[held, None] * (own - targets[held])).mean(axis=0)
                own = own - LR * gradient
            ends.append(own)
            last.append(gradient)
        w = shares @ np.array(ends) - 0.3 * mask_of(np.array(last), 0.4, "formula") * (shares @ np.array(last))
    np.testing.assert_allclose(trainer.weights.numpy(), w, rtol=0, atol=1e-12)


def test_places_of_the_gradient_give_different_models(tmp_path: Path) -> None:
    found = [weights_after(tmp_path, FedGMA(0.0, 0.5, place), 2, 3) for place in ("start", "last_step", "end")]
    assert all(np.abs(one - other).max() > 1e-3 for one, other in zip(found, found[1:] + found[:1], strict=True))


@pytest.mark.parametrize("p_means", ["formula", "prose"])
@pytest.mark.parametrize("gradient_at", ["start", "last_step", "end"])
def test_server_lr_zero_is_fedavg_to_the_bit(gradient_at: Any, p_means: Any, tmp_path: Path) -> None:
    plain = weights_after(tmp_path, FedAvg(), 3, 2)
    assert np.array_equal(weights_after(tmp_path, FedGMA(0.4, 0.0, gradient_at, p_means), 3, 2), plain)
    assert not np.array_equal(weights_after(tmp_path, FedGMA(0.0, 0.1, gradient_at, p_means), 3, 2), plain)


def test_votes_are_counted_anew_each_round(tmp_path: Path) -> None:
    """With the votes of former rounds added, everything would pass the prose's threshold from the second round on."""
    never = weights_after(tmp_path, FedGMA(1.0, 0.5, "start", "prose"), 1, 1)
    first_only = FedGMA(1.0, 0.5, "start", "prose")
    w = np.ones(2)
    for _ in range(4):
        gradients = gradients_by_hand(np.tile(w, (3, 1)))
        w = train_by_hand(w).mean(axis=0) - 0.5 * mask_of(gradients, 1.0, "prose") * gradients.mean(axis=0)
    np.testing.assert_allclose(weights_after(tmp_path, first_only, 4, 1), w, rtol=0, atol=1e-12)
    assert not np.allclose(never, w)


def test_a_share_of_zero_takes_every_coordinate() -> None:
    start, deltas, gradients = problem()
    shares = np.array(SIZES) / sum(SIZES)
    after, logged = step_by_hand(FedGMA(0.0, 0.2), start, deltas, SIZES, gradients)
    np.testing.assert_allclose(after, start + shares @ deltas - 0.2 * (shares @ gradients), rtol=0, atol=1e-12)
    assert logged == {"fedgma/agreed": 1.0}


def test_one_client_agrees_with_itself_wherever_its_gradient_is_not_zero() -> None:
    start, deltas, gradients = problem()
    for p_means in ("formula", "prose"):
        after, _ = step_by_hand(FedGMA(0.8, 0.2, p_means=p_means), start, deltas[:1], SIZES[:1], gradients[:1])
        np.testing.assert_allclose(after, start + deltas[0] - 0.2 * gradients[0], rtol=0, atol=1e-12)


def test_a_mask_goes_over_the_whole_step() -> None:
    start, deltas, gradients = problem()
    after, logged = step_by_hand(FedGMA(0.6, 0.2, mask=SignAgreement(0.9)), start, deltas, SIZES, gradients)
    shares, agreed = np.array(SIZES) / sum(SIZES), np.abs(np.sign(deltas).sum(axis=0)) / 5
    over = np.where(agreed >= 0.9, 1.0, agreed)
    step = shares @ deltas - 0.2 * mask_of(gradients, 0.6, "formula") * (shares @ gradients)
    np.testing.assert_allclose(after, start + over * step, rtol=0, atol=1e-12)
    assert logged.keys() == {"mask/mean", "mask/below_threshold", "fedgma/agreed"}


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"p": -0.1}, "p"), ({"p": 1.1}, "p"), ({"p": float("nan")}, "p"), ({"server_lr": -1.0}, "server_lr"),
        ({"server_lr": float("inf")}, "server_lr"), ({"gradient_at": "middle"}, "gradient_at"),
        ({"p_means": "both"}, "p_means"), ({"weighting": "squares"}, "weighting"),
    ],
)  # fmt: skip
def test_options_out_of_range_are_refused(options: Any, option: str) -> None:
    with pytest.raises(FederatedError, match=rf"--aggregator\.{option}\b"):
        FedGMA(**options)
