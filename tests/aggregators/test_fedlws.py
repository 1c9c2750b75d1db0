"""FedLWS: what a layer is, layers that are 0, and bounds that leave nothing to follow."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import FedLWS
from lightning_fed.core.updates import ReducedUpdate
from lightning_fed.errors import FederatedError

NAMES, SIZES = ("a.weight", "a.bias", "b.weight", "head"), (4, 2, 3, 1)
DELTAS = np.random.default_rng(3).normal(size=(5, 10))


def stepped(w: np.ndarray, **options: Any) -> tuple[np.ndarray, dict[str, torch.Tensor]]:
    """Returns the model after a round of five equal clients, and what was logged."""
    logged: dict[str, torch.Tensor] = {}

    class Vector:
        names, parameters = NAMES, torch.zeros(10).split(SIZES)

    class Trainer:
        weights, vector = torch.tensor(w), Vector()

    class Module:
        log_dict = staticmethod(logged.update)

    rows = torch.tensor(DELTAS)
    update = ReducedUpdate(1, mean=rows.mean(dim=0), updates=rows)
    FedLWS(**options).step(Trainer(), Module(), update)  # type: ignore[arg-type]  # stand in
    return Trainer.weights.numpy(), logged


def gamma(w: np.ndarray, at: slice, beta: float) -> float:
    mean = DELTAS[:, at].mean(axis=0)
    spread = np.mean([np.linalg.norm(row[at] - mean) for row in DELTAS])
    length = np.linalg.norm(w[at])
    return float(length / (length + beta * spread * np.linalg.norm(mean)))


def test_a_layer_is_what_a_module_holds() -> None:
    w = np.random.default_rng(4).normal(size=10)
    found, logged = stepped(w, beta=0.3, tau_min=0.0, tau_max=9.0)
    expected = w + DELTAS.mean(axis=0)
    kept = []
    for at in (slice(0, 6), slice(6, 9), slice(9, 10)):
        kept.append(gamma(w, at, 0.3))
        expected[at] *= kept[-1]
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    assert logged["fedlws/least"] == pytest.approx(min(kept))
    assert logged["fedlws/mean"] == pytest.approx(np.mean(kept))


def test_a_layer_of_zeros_learns() -> None:
    """As B of a LoRA adapter: by the equation its γ would be 0, and the layer 0 for ever."""
    w = np.random.default_rng(4).normal(size=10)
    w[6:9] = 0
    found, _ = stepped(w, beta=0.3)
    np.testing.assert_allclose(found[6:9], DELTAS.mean(axis=0)[6:9], rtol=1e-12)
    assert (np.abs(found[:6]) < np.abs(w + DELTAS.mean(axis=0))[:6]).all()


def test_tau_is_kept_within_its_bounds() -> None:
    w = np.random.default_rng(4).normal(size=10)
    for beta in (1e-9, 1e9):
        same = stepped(w, beta=beta, tau_min=0.1, tau_max=0.1)[0]
        np.testing.assert_array_equal(same, stepped(w, beta=1.0, tau_min=0.1, tau_max=0.1)[0])
    with pytest.raises(FederatedError, match=r"`--aggregator.tau_max` to be at least 0.3 and finite, got 0.2"):
        FedLWS(tau_min=0.3)
