"""CGW as a server rule: quadratic clients by hand, limits to the bit, and what it composes with."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from lightning_fed import FederatedTrainer, ReducedUpdate
from lightning_fed.aggregators import CGW, Aggregator, FedAvg
from lightning_fed.data import IID, FederatedDataModule
from lightning_fed.errors import FederatedError
from lightning_fed.masks import SignAgreement
from tests.aggregators.quadratic import (
    STRENGTHS,
    TARGETS,
    gradients_by_hand,
    step_by_hand,
    train_by_hand,
    weights_after,
)
from tests.parts import Reads

SIZES = [7, 1, 30, 12]


def correction(gradients: np.ndarray, losses: np.ndarray, alpha: float, constraint: str) -> np.ndarray:
    """Σ x_i D_i, written again from eq. 13, 23 and 29."""
    total, lengths = gradients.sum(axis=0), np.linalg.norm(gradients, axis=1)
    bound = (alpha * losses / lengths).min()
    if constraint == "shared":
        return bound * total / np.linalg.norm(total)
    products = gradients @ total
    weights = bound * products / lengths**2 / np.sqrt(((products / lengths) ** 2).sum())
    return weights @ gradients


def problem(size: int = 9) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=size), rng.normal(size=(4, size)), rng.normal(size=(4, size)), rng.uniform(0.5, 2, 4)


@pytest.mark.parametrize("constraint", ["per_client", "shared"])
@pytest.mark.parametrize(("weighting", "lr"), [("samples", 1.0), ("uniform", 0.3)])
def test_agrees_with_numpy_and_lr_is_for_the_mean_alone(constraint: Any, weighting: Any, lr: float) -> None:
    start, deltas, gradients, losses = problem()
    rule = CGW(0.3, constraint, weighting=weighting, lr=lr)
    after, _ = step_by_hand(rule, start, deltas, SIZES, gradients, losses)
    shares = np.array(SIZES) / sum(SIZES) if weighting == "samples" else np.full(4, 0.25)
    expected = start + lr * (shares @ deltas) - correction(gradients, losses, 0.3, constraint)
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("constraint", ["per_client", "shared"])
def test_the_device_is_waited_for_once(constraint: Any) -> None:
    _, deltas, gradients, losses = map(torch.tensor, problem())
    update = ReducedUpdate(round=1, mean=deltas.mean(0), gradients=gradients, losses=losses)
    with Reads() as reads:
        CGW(0.3, constraint).server_step(update)
    assert reads.names[0] == "cpu", "all that is read later is read of what was brought to the host"
    assert reads.names.count("cpu") == 1


@pytest.mark.parametrize("constraint", ["per_client", "shared"])
def test_three_quadratic_clients_over_rounds(constraint: Any, tmp_path: Path) -> None:
    w = np.ones(2)
    for _ in range(3):
        ends = train_by_hand(w, steps=2)
        gradients = gradients_by_hand(ends)
        losses = 0.5 * STRENGTHS * ((ends - TARGETS) ** 2).sum(axis=1)
        w = ends.mean(axis=0) - correction(gradients, losses, 0.2, constraint)
    rule = CGW(0.2, constraint)
    np.testing.assert_allclose(weights_after(tmp_path, rule, 3, 2), w, rtol=0, atol=1e-12)
    signs = np.sign(gradients @ gradients.sum(axis=0)) if constraint == "per_client" else np.ones(3)
    assert np.array_equal(rule.corrective_weights.sign().numpy(), signs)
    assert -1 in np.sign(gradients @ gradients.sum(axis=0)), "one client must pull against the others"


class Net(LightningModule):
    """Dropout draws random numbers and BatchNorm has buffers: a gradient pass must leave both alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def run(folder: Path, aggregator: Aggregator, mode: Any = "train") -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (60,), generator=generator)
    inputs = torch.randn(60, 4, generator=generator) + labels[:, None]
    torch.manual_seed(0)
    module = Net()
    trainer = FederatedTrainer(
        accelerator="cpu", max_rounds=3, callbacks=[aggregator], full_gradient_mode=mode, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=str(folder),
    )  # fmt: skip
    trainer.fit(module, FederatedDataModule(TensorDataset(inputs, labels), IID(), num_clients=4, batch_size=8))
    return module.state_dict()


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_alpha_zero_is_fedavg_to_the_bit(tmp_path: Path, mode: Any) -> None:
    plain, none, some = (run(tmp_path, rule, mode) for rule in (FedAvg(), CGW(0.0), CGW(0.1)))
    assert all(torch.equal(plain[name], none[name]) for name in plain)
    assert not torch.equal(plain["net.0.weight"], some["net.0.weight"])


def test_correction_shrinks_in_proportion_to_alpha() -> None:
    start, deltas, gradients, losses = problem()
    plain, _ = step_by_hand(FedAvg(), start, deltas, SIZES)
    whole, half = (step_by_hand(CGW(a), start, deltas, SIZES, gradients, losses)[0] - plain for a in (0.4, 0.2))
    np.testing.assert_allclose(half, whole / 2, rtol=0, atol=1e-15)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("where", ["gradient", "loss"])
def test_a_gradient_or_loss_that_is_not_finite_costs_its_client_the_correction_only(where: str, value: float) -> None:
    start, deltas, gradients, losses = problem()
    (gradients[2] if where == "gradient" else losses)[2] = value
    after, logged = step_by_hand(CGW(0.3), start, deltas, SIZES, gradients, losses)
    kept = [0, 1, 3]
    shares = np.array(SIZES) / sum(SIZES)
    expected = start + shares @ deltas - correction(gradients[kept], losses[kept], 0.3, "per_client")
    np.testing.assert_allclose(after, expected, rtol=0, atol=1e-12)
    assert logged["cgw/zero"] == 1


def test_gradients_of_zero_leave_fedavg() -> None:
    start, deltas, _, losses = problem()
    after, logged = step_by_hand(CGW(0.3), start, deltas, SIZES, np.zeros((4, 9)), losses)
    plain, _ = step_by_hand(FedAvg(), start, deltas, SIZES)
    assert np.array_equal(after, plain)
    assert logged == {"cgw/negative": 0, "cgw/zero": 4}


def test_a_mask_goes_over_the_whole_step() -> None:
    start, deltas, gradients, losses = problem()
    after, logged = step_by_hand(CGW(0.3, mask=SignAgreement(0.6)), start, deltas, SIZES, gradients, losses)
    agreed = np.abs(np.sign(deltas).sum(axis=0)) / 4
    mask = np.where(agreed >= 0.6, 1.0, agreed)
    step = np.array(SIZES) / sum(SIZES) @ deltas - correction(gradients, losses, 0.3, "per_client")
    np.testing.assert_allclose(after, start + mask * step, rtol=0, atol=1e-12)
    assert 0 < logged["mask/mean"] < 1
    products = gradients @ gradients.sum(axis=0)
    assert logged["cgw/negative"] == (products < 0).sum()


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), float("inf")])
def test_options_out_of_range_are_refused(alpha: float) -> None:
    with pytest.raises(FederatedError, match=r"--aggregator\.alpha"):
        CGW(alpha)
    with pytest.raises(FederatedError, match=r"--aggregator\.constraint.*per_client, shared.*'both'"):
        CGW(0.1, "both")
