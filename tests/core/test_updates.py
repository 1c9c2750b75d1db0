"""Numbers that change with the round: η_g and τ; β of FedGA has its tests beside FedGA."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import CGW, FedACG, FedAvg, FedGMA
from lightning_fed.core.updates import at_round
from lightning_fed.errors import FederatedError, expect_number
from lightning_fed.masks import DelayedMask, MagnitudeAgreement, SANDMask, SignAgreement
from tests.aggregators.quadratic import train_by_hand, weights_after
from tests.parts import Classifier, federated_data, federated_trainer


def test_a_number_stays_until_the_next_one() -> None:
    assert [at_round(0.5, at) for at in (1, 7)] == [0.5, 0.5]
    assert [at_round({3: 0.1, 1: 2.0}, at) for at in (1, 2, 3, 99)] == [2.0, 2.0, 0.1, 0.1]
    assert [at_round({3: 0.1}, at) for at in (2, 3)] == [0.0, 0.1]


@pytest.mark.parametrize("given", [{}, {0: 1.0}, {1: -1.0}, {1: 1.0, 2: 0.0}, {2: 1.0}, {1.5: 1.0}, {1: "x"}, -1, None])
def test_what_is_no_number_by_round_is_refused_in_a_sentence(given: Any) -> None:
    sentence = "`--aggregator.lr` to be a finite number above 0, or such numbers by round from 1 on, got "
    with pytest.raises(FederatedError, match=sentence):
        FedAvg(lr=given)
    with pytest.raises(FederatedError, match="to be a finite number above 0, got {1: 1.0}"):
        expect_number("x", {1: 1.0}, above=0)


@pytest.mark.parametrize("kind", [SignAgreement, MagnitudeAgreement, SANDMask])
def test_a_threshold_by_round_is_checked_and_may_begin_late(kind: Any) -> None:
    assert kind({5: 0.4}).threshold == {5: 0.4}
    with pytest.raises(FederatedError, match=r"`--aggregator\.mask\.threshold` to be in \[0, 1\], or .*got {5: 1\.5}"):
        kind({5: 1.5})


def test_the_server_rate_of_each_round_is_the_one_that_it_names(tmp_path: Path) -> None:
    w = np.ones(2)
    for rate in (1.0, 1.0, 0.25, 0.25):
        w = w + rate * (train_by_hand(w, 3).mean(axis=0) - w)
    found = weights_after(tmp_path, FedAvg({1: 1, 3: 0.25}, weighting="uniform"), 4, 3)
    np.testing.assert_allclose(found, w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule", [FedAvg, FedACG, FedGMA, CGW])
def test_the_same_number_by_round_is_that_number_to_the_bit(rule: Any, tmp_path: Path) -> None:
    rates: list[Any] = [0.7, {1: 0.7}, {1: 0.7, 3: 0.7}, {1: 0.7, 9: 1}]
    plain, *named = (weights_after(tmp_path, rule(lr=lr), 3, 3) for lr in rates)
    assert all(np.array_equal(plain, found) for found in named)


def test_clients_of_fedacg_start_ahead_by_the_rate_of_their_round(tmp_path: Path) -> None:
    w, m = np.ones(2), np.zeros(2)
    for rate in (1.0, 0.5, 0.5):
        m = 0.85 * m + train_by_hand(w + rate * 0.85 * m, 3).mean(axis=0) - (w + rate * 0.85 * m)
        w = w + rate * m
    found = weights_after(tmp_path, FedACG(lr={1: 1.0, 2: 0.5}, weighting="uniform"), 3, 3)
    np.testing.assert_allclose(found, w, rtol=0, atol=1e-12)


def train(folder: Path, lr: Any, mask: Any, rounds: int = 4) -> Any:
    torch.manual_seed(0)
    rule = FedAvg(lr=lr, mask=mask)
    trainer = federated_trainer(folder, rule, max_rounds=rounds, enable_checkpointing=True, name="run")
    trainer.fit(Classifier(), federated_data(8, 12, 20), ckpt_path="last")
    return trainer


@pytest.mark.parametrize("kind", [SignAgreement, MagnitudeAgreement])
def test_a_threshold_that_begins_late_is_a_delayed_mask(kind: Any, tmp_path: Path) -> None:
    found = train(tmp_path / "named", 1.0, kind({3: 0.8}))
    delayed = train(tmp_path / "delayed", 1.0, DelayedMask(kind(0.8), 2))
    assert torch.equal(found.weights, delayed.weights)
    assert not torch.equal(found.weights, train(tmp_path / "at once", 1.0, kind(0.8)).weights)
    assert found.logged_metrics["mask/below_threshold"] == delayed.logged_metrics["mask/below_threshold"]


def test_a_resumed_run_goes_on_with_the_numbers_of_its_rounds(tmp_path: Path) -> None:
    given = {1: 1.0, 2: 0.5, 4: 0.1}, {2: 0.2, 3: 0.9}
    whole = train(tmp_path / "whole", given[0], SANDMask(given[1]))
    train(tmp_path / "parts", given[0], SANDMask(given[1]), rounds=2)
    found = train(tmp_path / "parts", given[0], SANDMask(given[1]))
    assert found.resumed
    assert torch.equal(found.weights, whole.weights)
