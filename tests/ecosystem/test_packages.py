"""Modules and data of other packages train here as under Lightning, without a line changed."""

import warnings
from pathlib import Path

import pytest
import torch

from lightning_fed.aggregators import FedAvg
from lightning_fed.masks import SignAgreement
from tests.ecosystem.packages import PACKAGES
from tests.parts import federated_trainer, lightning_trainer


@pytest.mark.parametrize("name", PACKAGES)
@pytest.mark.parametrize("engine", ["sequential", "auto"])
def test_trains(name: str, engine: str, tmp_path: Path) -> None:
    """Under Lightning, and then federated, with a mask and two rounds of all clients."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages themselves
        alone = PACKAGES[name]()
        lightning_trainer(tmp_path, limit_train_batches=2).fit(alone.model, **alone.data())
        given = PACKAGES[name]()
        before = {key: value.clone() for key, value in given.model.named_parameters() if value.requires_grad}
        trainer = federated_trainer(tmp_path, FedAvg(mask=SignAgreement(0.1)), engine=engine, max_rounds=2)
        trainer.fit(given.model, **given.data())
    assert trainer.totals["clients/trained"] == 20 if "clients/trained" in trainer.totals else trainer.round == 2
    after = dict(given.model.named_parameters())
    moved = [key for key, value in before.items() if not torch.equal(value, after[key])]
    assert len(moved) > len(before) / 2
    assert all(torch.isfinite(value).all() for value in after.values())
    assert trainer.weights.numel() == sum(value.numel() for value in before.values())
