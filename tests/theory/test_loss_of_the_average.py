"""The loss of the averaged model against the mean of the clients' (Tenison, Francis, Rish, 2021, A.1 and fig. 1)."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from docs.two_surfaces import OWN, SHARED, loss
from lightning_fed.aggregators import FedAvg
from lightning_fed.masks import SignAgreement
from tests.client_algorithms.client_runs import fit
from tests.client_algorithms.known_clients import Known, Logistic, Problem, Quadratic


class SlopeModule(Known):
    """J = (y - w x)²."""

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (batch[2] - self.w * batch[1]).square().mean()


class Slopes(Problem):
    module = SlopeModule

    def __init__(self, slopes: tuple[float, ...]) -> None:
        super().__init__((1,) * len(slopes))
        self.inputs, self.targets = np.ones((len(slopes), 1)), np.array(slopes)[:, None]
        self.start = np.zeros(1)

    def gradient(self, w: np.ndarray, rows: np.ndarray) -> np.ndarray:
        return np.array([2 * (w - self.targets[rows, 0]).mean()])


def test_mean_squared_error() -> None:
    """J(w) - (J_A + J_B)/2 = -¼ (w_A - w_B)² x², exactly; for n clients -x² times the variance of their w."""
    for slopes in ((1.0, 3.0), (1000.0, 1000.1), (2.0, -1.0, 0.5, 4.0)):
        tape = fit(Slopes(slopes), FedAvg(), batch_size=1, local_steps=2)
        ends, average = np.array([delta[0] for delta in tape.updates[0].values()]), tape.weights[0][0]
        for x, y in ((1.0, 0.0), (-2.0, 5.0)):
            gap = (y - average * x) ** 2 - ((y - ends * x) ** 2).mean()
            assert gap == pytest.approx(-(x**2) * ends.var(), rel=1e-6)
            if len(slopes) == 2:
                assert gap == pytest.approx(-((ends[0] - ends[1]) ** 2) * x**2 / 4, rel=1e-6)


def test_the_papers_cross_entropy() -> None:
    """Log((w_A + w_B)/2) - ½ log(w_A w_B) is log cosh(½ log(w_A/w_B)): small weights do not help, alike ones do."""
    for scale in (1.0, 1e-3, 1e-9):
        for ratio in (1.01, 2.0, 100.0):
            gap = np.log(scale * (1 + ratio) / 2) - np.log(scale * np.sqrt(ratio))
            assert gap == pytest.approx(np.log(np.cosh(np.log(ratio) / 2)), rel=1e-6, abs=1e-13)
    assert np.log(np.cosh(np.log(100) / 2)) > 1.6


@pytest.mark.parametrize("steps", [1, 10])
def test_cross_entropy_with_softmax(steps: int) -> None:
    """Convex in w, so the server's loss is the lower one: by ⅛ dᵀ∇²J d for models that are d apart, d -> 0."""
    problem = Logistic((6, 6))
    left = []
    for lr in (1e-1, 1e-2):
        tape = fit(problem, FedAvg(), batch_size=6, local_steps=steps, optimizer=partial(SGD, lr=lr))
        ends, average = [problem.start + tape.updates[0][i] for i in (0, 1)], tape.weights[0]
        apart = ends[0] - ends[1]
        for i in (0, 1):
            gap = problem.loss(average, i) - (problem.loss(ends[0], i) + problem.loss(ends[1], i)) / 2
            second = -apart @ problem.hessian(average, i) @ apart / 8
            assert gap < 0
            left.append(abs(gap / second - 1))
    assert max(left[:2]) < 0.03
    assert max(left[2:]) < 0.003


class SurfaceModule(Known):
    """Every start is a pair of coordinates of one vector, each with the loss of the client's surface."""

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor(start))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return loss(self.w.reshape(-1, 2), batch[2][0]).sum()


class Surfaces(Quadratic):
    module = SurfaceModule

    def __init__(self, starts: Tensor) -> None:
        super().__init__((1, 1))
        self.inputs, self.targets, self.start = np.zeros((2, 1)), OWN.numpy(), starts.flatten().numpy()


def grid(count: int) -> Tensor:
    line = torch.linspace(-1, 1, count, dtype=torch.float64)
    return torch.cartesian_prod(line, line)


def test_the_mean_of_two_surfaces_is_lowest_where_no_two_clients_are() -> None:
    points = grid(201)
    losses = torch.stack([loss(points, own) for own in OWN])
    lowest = points[losses.mean(dim=0).argmin()]
    shared = torch.stack([loss(SHARED, own) for own in OWN])
    assert min((lowest - own).norm() for own in OWN) < 0.05
    assert losses.mean(dim=0).min() < shared.mean() - 0.05
    # There the worse client has almost no loss to show for it; at the shared minimum both have.
    assert losses[:, losses.mean(dim=0).argmin()].max() > -0.1
    assert shared.max() < -0.4
    assert points[losses.max(dim=0).values.argmin()].tolist() == pytest.approx(SHARED.tolist(), abs=0.05)


def test_where_averaging_and_masked_averaging_lead() -> None:
    """From 121 starts, by rounds of the package: how many end in the shared minimum, and how many stand still."""
    starts, step, ends = grid(11), partial(SGD, lr=0.15), {}
    for name, mask in {"mean": None, "masked": SignAgreement(1.0, binary=True)}.items():
        tape = fit(Surfaces(starts), FedAvg(mask=mask), batch_size=1, local_steps=1, max_rounds=50, optimizer=step)
        ends[name] = torch.tensor(tape.weights[-1]).reshape(-1, 2)
    shared = {name: int(((end - SHARED).norm(dim=1) < 0.1).sum()) for name, end in ends.items()}
    own = {name: int((torch.cdist(end, OWN).min(dim=1).values < 0.1).sum()) for name, end in ends.items()}
    assert shared == pytest.approx({"mean": 36, "masked": 37}, abs=2)
    assert own == pytest.approx({"mean": 74, "masked": 27}, abs=3)
