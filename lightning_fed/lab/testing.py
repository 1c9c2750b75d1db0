"""Checks for a method of your own, in small runs of clients whose training can be written down.

Client i has f_i(w) = ½ a_i ‖w - b_i‖², so that a local step is w <- w - η a_i (w - b_i), and n_i equal samples, which
weigh it. Each check takes a function that makes the parts of a run anew, such as ``lambda: [MyRule(), FedProx(0.1)]``.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import FederatedDataModule, Partitioner
from lightning_fed.trainer import FederatedTrainer

__all__ = [
    "LR", "STRENGTHS", "TARGETS", "Quadratics", "expect_any_order", "expect_engines_agree", "expect_resumes",
    "local_ends", "train_quadratics",
]  # fmt: skip

_Array = npt.NDArray[np.float64]
_Parts = Callable[[], Sequence[Callback]]

STRENGTHS = np.array([1.0, 2.0, 0.5])
"""a_i, shape (clients,)."""
TARGETS = np.array([[3.0, 0.0], [0.0, -4.0], [-1.0, 1.0]])
"""b_i, shape (clients, 2)."""
LR = 0.1
"""η of the clients' SGD."""

# The clients of the checks: enough for rules that leave some out.
_FIVE: dict[str, Any] = {
    "strengths": np.array([*STRENGTHS, 1.5, 0.8]), "targets": np.array([*TARGETS, [2.0, 2.0], [0.5, -1.0]]),
    "sizes": np.array([2, 1, 3, 1, 2]),
}  # fmt: skip


class Quadratics(LightningModule):
    """f_i(w) = ½ a_i ‖w - b_i‖², from w = (1, 1); a batch holds the a_i and b_i of its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        strength, target = batch
        loss: Tensor = (0.5 * strength * (self.w - target).square().sum(dim=1)).mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class _InTurn(Partitioner):
    """Gives client i the next n_i samples."""

    def __init__(self, sizes: npt.NDArray[np.int64]) -> None:
        self.sizes = sizes

    def assign(self, targets: Any, num_samples: int, num_clients: int, generator: Any) -> npt.NDArray[np.int64]:
        return np.repeat(np.arange(num_clients), self.sizes)


def train_quadratics(
    *parts: Callback,
    rounds: int = 1,
    steps: int = 1,
    strengths: _Array = STRENGTHS,
    targets: _Array = TARGETS,
    sizes: npt.ArrayLike | None = None,
    ckpt_path: str | None = None,
    **options: Any,
) -> _Array:
    """Trains the clients on whole batches in double precision; returns the global w, shape (2,).

    Args:
        *parts: Aggregator, client algorithms and other callbacks.
        rounds: Rounds.
        steps: Local steps of each client in a round.
        strengths: a_i, shape (clients,).
        targets: b_i, shape (clients, 2).
        sizes: n_i; one sample each if not given.
        ckpt_path: As in ``fit``.
        **options: Further options of ``FederatedTrainer``. Without ``default_root_dir`` no file stays.
    """
    counts = np.asarray(np.broadcast_to(1 if sizes is None else sizes, len(targets)), dtype=np.int64)
    samples = TensorDataset(*(torch.tensor(np.repeat(values, counts, axis=0)) for values in (strengths, targets)))
    data = FederatedDataModule(samples, _InTurn(counts), num_clients=len(targets), batch_size=int(counts.sum()))
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    with TemporaryDirectory() as folder:
        given = {"accelerator": "cpu", "precision": "64-true", "default_root_dir": folder, **quiet, **options}
        trainer = FederatedTrainer(max_rounds=rounds, local_steps=steps, callbacks=list(parts), **given)
        trainer.fit(Quadratics(), data, ckpt_path=ckpt_path)
    found: _Array = trainer.weights.numpy()
    return found


def local_ends(
    w: _Array, steps: int = 1, strengths: _Array = STRENGTHS, targets: _Array = TARGETS, lr: float = LR
) -> _Array:
    """Returns where each client's plain local training from w ends, by hand, shape (clients, 2)."""
    shrunk = (1 - lr * strengths[:, None]) ** steps
    ends: _Array = targets + shrunk * (w - targets)
    return ends


def expect_any_order(make: _Parts, rounds: int = 3, steps: int = 2) -> None:
    """Checks that it does not matter which client has which number, up to the rounding of sums.

    It is no check for what draws at random, by client or in their order, as PCGrad does.
    """
    turned = {name: values[::-1].copy() for name, values in _FIVE.items()}
    one, other = (train_quadratics(*make(), rounds=rounds, steps=steps, **clients) for clients in (_FIVE, turned))
    np.testing.assert_allclose(other, one, rtol=1e-8, atol=1e-9, err_msg="clients in another order")


def expect_engines_agree(make: _Parts, rounds: int = 3, steps: int = 2) -> None:
    """Checks that clients trained one after another, and many at once, give the same model, up to rounding."""
    found = [
        train_quadratics(*make(), rounds=rounds, steps=steps, engine=engine, **_FIVE)
        for engine in ("sequential", "vectorized")
    ]
    np.testing.assert_allclose(found[1], found[0], rtol=1e-8, atol=1e-9, err_msg="vectorized after sequential")


class _Killed(Exception):
    """What ends a run in the middle."""


class _Kill(FederatedCallback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_round_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if trainer.round == self.at:
            raise _Killed


def expect_resumes(make: _Parts, rounds: int = 4, steps: int = 2) -> None:
    """Checks that a run that is killed in its third round, and goes on from its checkpoint, gives the same bits."""
    whole = train_quadratics(*make(), rounds=rounds, steps=steps, **_FIVE)
    with TemporaryDirectory() as folder:
        given = {"default_root_dir": folder, "enable_checkpointing": True, "name": "run", "steps": steps, **_FIVE}
        try:
            train_quadratics(*make(), _Kill(3), rounds=rounds, **given)
        except _Killed:
            (last,) = Path(folder).glob("run/version_*/checkpoints/last.ckpt")
            resumed = train_quadratics(*make(), rounds=rounds, ckpt_path=str(last), **given)
    np.testing.assert_array_equal(resumed, whole, err_msg="after a resume")
