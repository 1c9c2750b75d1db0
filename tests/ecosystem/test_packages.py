"""Modules and data of other packages train here as under Lightning, without a line changed."""

import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed.aggregators import FedAvg
from lightning_fed.masks import SignAgreement
from tests.ecosystem.packages import PACKAGES
from tests.parts import federated_trainer


def weights_of(model: Any) -> dict[str, Tensor]:
    """Copies of what is trained."""
    return {key: value.detach().clone() for key, value in model.named_parameters() if value.requires_grad}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    """Names of the weights that are others."""
    return {key for key, value in before.items() if not torch.equal(value, after[key])}


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_trains(name: str, engine: str, tmp_path: Path) -> None:
    """Under Lightning, and then federated, with a mask and two rounds of all clients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages themselves
        alone = PACKAGES[name]()
        at_first = weights_of(alone.model)
        lightning = import_module(alone.lightning).Trainer(
            max_epochs=1, limit_train_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        lightning.fit(alone.model, **alone.data())
        given = PACKAGES[name]()
        before = weights_of(given.model)
        trainer = federated_trainer(tmp_path, FedAvg(mask=SignAgreement(0.1)), engine=engine, max_rounds=2)
        trainer.fit(given.model, **given.data())
    assert trainer.round == 2
    assert trainer.totals["gradients"] >= 20  # ten clients, two rounds
    after = weights_of(given.model)
    assert set() < moved(at_first, weights_of(alone.model)) <= moved(before, after)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert trainer.weights.numel() == sum(value.numel() for value in before.values())
