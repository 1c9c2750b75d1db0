"""One server step of FedAvg, with and without a mask, against NumPy."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_fed.aggregators import Aggregator, FedAvg
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client, Need, ReducedUpdate, Update
from lightning_fed.errors import FederatedError
from lightning_fed.masks import Mask, SignAgreement

SIZES = [7, 1, 30, 12]


class Recorder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.logged: dict[str, float] = {}

    def log_dict(self, values: dict[str, Tensor], *args: Any, **kwargs: Any) -> None:
        self.logged.update({name: float(value) for name, value in values.items()})


def server_step(
    aggregator: Aggregator, start: np.ndarray, deltas: np.ndarray, sizes: list[int], module: LightningModule
) -> np.ndarray:
    """Reduces the updates as a round does and lets the aggregator step a copy of ``start``."""
    weights = torch.tensor(start)
    reducer = RoundReducer(weights, aggregator.all_needs)
    reducer.reset(len(deltas))
    for i, (delta, size) in enumerate(zip(deltas, sizes, strict=True)):
        client = Client(i, size, 1)
        reducer.add(Update(client, torch.tensor(delta), 1, {}, aggregator.client_weight(client)), average_buffers=False)
    trainer: Any = SimpleNamespace(weights=weights, vector=SimpleNamespace(names=("w",), parameters=[weights]), seed=0)
    aggregator.step(trainer, module, reducer.reduce(1))
    return weights.numpy()


def problem(clients: int = 4, size: int = 9) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    deltas = rng.normal(size=(clients, size))
    deltas[:, 0], deltas[-1, 1] = 0.0, 0.0
    return rng.normal(size=size), deltas


@pytest.mark.parametrize("lr", [1.0, 0.3, 2.0])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
@pytest.mark.parametrize("mask", [None, (0.4, False), (0.6, True)], ids=["plain", "soft", "binary"])
def test_agrees_with_numpy(lr: float, weighting: Any, mask: tuple[float, bool] | None) -> None:
    start, deltas = problem()
    aggregator = FedAvg(lr=lr, weighting=weighting, mask=None if mask is None else SignAgreement(*mask))
    after = server_step(aggregator, start, deltas, SIZES, Recorder())
    shares = np.array(SIZES) / sum(SIZES) if weighting == "samples" else np.full(4, 0.25)
    m = np.ones(9)
    if mask is not None:
        agreed = np.abs(np.sign(deltas).mean(axis=0))
        m = np.where(agreed >= mask[0] - 1e-9, 1.0, 0.0 if mask[1] else agreed)
        assert 0 < np.count_nonzero(m < 1) < 9
    np.testing.assert_allclose(after, start + lr * m * (shares @ deltas), rtol=0, atol=1e-12)


def test_plain_step_is_the_weighted_mean_of_the_models() -> None:
    start, deltas = problem()
    after = server_step(FedAvg(), start, deltas, SIZES, Recorder())
    np.testing.assert_allclose(after, np.average(start + deltas, axis=0, weights=SIZES), rtol=0, atol=1e-12)


@given(
    deltas=arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=st.floats(-9, 9, width=32)),
    lr=st.sampled_from([1.0, 0.1, 1.7]),
)
@settings(deadline=None, max_examples=50)
def test_threshold_zero_is_the_unmasked_step_to_the_bit(deltas: np.ndarray, lr: float) -> None:
    start = np.linspace(-1, 1, deltas.shape[1], dtype=np.float32)
    sizes = list(range(3, 3 + len(deltas)))
    plain = server_step(FedAvg(lr), start, deltas, sizes, Recorder())
    for binary in (False, True):
        masked = server_step(FedAvg(lr, SignAgreement(0.0, binary)), start, deltas, sizes, Recorder())
        assert plain.tobytes() == masked.tobytes()
    if len(deltas) == 1:  # one client agrees with itself wherever it moved
        masked = server_step(FedAvg(lr, SignAgreement(0.9)), start, deltas, sizes, Recorder())
        assert np.array_equal(plain, masked)


def test_opposed_clients_leave_the_model_where_it_is() -> None:
    start, deltas = problem(clients=1)
    after = server_step(FedAvg(mask=SignAgreement()), start, np.concatenate([deltas, -3 * deltas]), [1, 9], Recorder())
    assert np.array_equal(after, start)


def test_logs_what_the_mask_reports_and_nothing_without_one() -> None:
    start, deltas = problem()
    module = Recorder()
    server_step(FedAvg(), start, deltas, SIZES, module)
    assert module.logged == {}
    server_step(FedAvg(mask=SignAgreement(0.4)), start, deltas, SIZES, module)
    agreed = np.abs(np.sign(deltas).mean(axis=0))
    mask = np.where(agreed >= 0.4, 1.0, agreed)
    assert module.logged == pytest.approx({"mask/mean": mask.mean(), "mask/below_threshold": (agreed < 0.4).mean()})


class NeedsAll(Mask):
    needs = Need.UPDATES

    def compute(self, update: ReducedUpdate) -> Tensor:
        return (update.updates.abs().amax(0) > 1).to(update.mean.dtype)


def test_rule_and_mask_get_what_both_need() -> None:
    start, deltas = problem()
    aggregator = FedAvg(mask=NeedsAll())
    assert aggregator.all_needs == Need.MEAN | Need.UPDATES
    after = server_step(aggregator, start, deltas, SIZES, Recorder())
    chosen = np.abs(deltas).max(axis=0) > 1
    assert 0 < chosen.sum() < len(chosen)
    assert np.array_equal(after != start, chosen)


def test_label_names_rule_and_mask() -> None:
    assert FedAvg().label == "FedAvg"
    assert FedAvg(mask=SignAgreement()).label == "FedAvg+SignAgreement"


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": -1.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": float("inf")}, "lr"),
        ({"weighting": "equal"}, "weighting"),
        ({"buffers": "mean"}, "buffers"),
        ({"mask": 0.4}, "mask"),
    ],
)
def test_bad_arguments_name_the_option(arguments: dict[str, Any], option: str) -> None:
    with pytest.raises(FederatedError, match=rf"^Expected .*--aggregator\.{option}\b"):
        FedAvg(**arguments)
    with pytest.raises(FederatedError, match=r"--aggregator\.mask"):
        FedAvg(mask=SignAgreement)
