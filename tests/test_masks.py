"""Masks over a cohort reduced one update at a time."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_fed.aggregators import FedAvg
from lightning_fed.core.reduction import RoundReducer
from lightning_fed.core.updates import Client, Need, ReducedUpdate, Update
from lightning_fed.errors import FederatedError
from lightning_fed.masks import (
    DelayedMask,
    MagnitudeAgreement,
    Mask,
    MaskControl,
    NoiseFloorMask,
    PartialMask,
    SANDMask,
    SignAgreement,
)
from tests.parts import Classifier, federated_data, federated_trainer


def cohort(sign_sum: list[float], clients: int) -> ReducedUpdate:
    return ReducedUpdate(1, tuple(Client(i, 10, 1) for i in range(clients)), sign_sum=torch.tensor(sign_sum))


def test_defaults_are_those_of_the_paper() -> None:
    mask = SignAgreement()
    assert (mask.threshold, mask.binary, mask.comparison, mask.votes) == (0.4, False, ">=", "equal")
    assert mask.needs == Need.SIGN_SUM


def test_counts_the_clients_that_entered() -> None:
    update = cohort([5.0, -3.0, 1.0, 0.0], clients=5)
    assert SignAgreement(0.4).compute(update).tolist() == pytest.approx([1.0, 1.0, 0.2, 0.0])
    assert SignAgreement(0.4, binary=True).compute(update).tolist() == [1.0, 1.0, 0.0, 0.0]
    assert SignAgreement(0.6).compute(update).tolist() == pytest.approx([1.0, 1.0, 0.2, 0.0])
    assert SignAgreement(0.7).compute(update).tolist() == pytest.approx([1.0, 0.6, 0.2, 0.0])


def test_reports_the_mean_of_the_mask_and_the_share_below_the_threshold() -> None:
    update, mask = cohort([5.0, -3.0, 1.0, 0.0], clients=5), SignAgreement(0.7)
    facts = mask.diagnose(update, mask.compute(update))
    assert {name: value.item() for name, value in facts.items()} == pytest.approx(
        {"mask/mean": (1.0 + 0.6 + 0.2 + 0.0) / 4, "mask/below_threshold": 3 / 4}
    )


def test_share_below_zero_threshold_is_nothing() -> None:
    update, mask = cohort([0.0, 1.0], clients=3), SignAgreement(0.0)
    assert mask.diagnose(update, mask.compute(update))["mask/below_threshold"].item() == 0.0


@pytest.mark.parametrize("threshold", [-0.1, 1.5, math.nan])
def test_refuses_thresholds_out_of_range_when_made(threshold: float) -> None:
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.threshold"):
        SignAgreement(threshold)


def test_a_share_at_the_threshold_counts_or_does_not() -> None:
    update = cohort([3.0, -3.0, 1.0], clients=5)
    at, above = SignAgreement(0.6, True), SignAgreement(0.6, True, comparison=">")
    assert at.compute(update).tolist() == [1.0, 1.0, 0.0]
    assert above.compute(update).tolist() == [0.0, 0.0, 0.0]
    shares = [mask.diagnose(update, mask.compute(update))["mask/below_threshold"].item() for mask in (at, above)]
    assert shares == pytest.approx([1 / 3, 1.0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_votes_by_samples_are_counted_over_the_clients_that_entered(dtype: torch.dtype) -> None:
    deltas = torch.tensor([[1.0, 1.0, 0.0], [-2.0, 3.0, 0.0], [-1.0, 0.0, -5.0]], dtype=dtype)
    mask, samples = SignAgreement(0.5, votes="samples"), [50, 20, 10]
    assert Need.WEIGHTED_SIGN_SUM in mask.needs
    assert Need.SIGN_SUM not in mask.needs
    reducer = RoundReducer(torch.zeros(3, dtype=dtype), mask.needs)
    reducer.reset(3)
    for i, delta in enumerate(deltas):
        reducer.add(Update(Client(i, samples[i], 1), delta, 1), average_buffers=False)
    update = reducer.reduce(1)
    found = mask.compute(update)
    assert found.dtype == dtype
    assert found.tolist() == pytest.approx([20 / 80, 1.0, 10 / 80])
    assert mask.diagnose(update, found)["mask/below_threshold"].item() == pytest.approx(2 / 3)


def test_refuses_unknown_words_when_made() -> None:
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.comparison.*'<'"):
        SignAgreement(comparison="<")
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.votes.*'clients'"):
        SignAgreement(votes="clients")


def reduced(deltas: Tensor, mask: Mask) -> ReducedUpdate:
    """The cohort as the loop reduces it for a mask, with samples that must not count."""
    reducer = RoundReducer(torch.zeros_like(deltas[0]), mask.needs)
    reducer.reset(len(deltas))
    for i, delta in enumerate(deltas):
        reducer.add(Update(Client(i, 10 + i, 1), delta, 1, weight=10.0 + i), average_buffers=False)
    return reducer.reduce(1)


def drawn(clients: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    deltas = torch.randn(clients, 6, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    deltas[:, 2] = 0.0  # nobody moves this coordinate
    deltas[0, 3] = 0.0
    deltas[:, 4] = 0.25  # all move this one alike
    return deltas


def test_magnitude_defaults_and_needs() -> None:
    mask = MagnitudeAgreement()
    assert (mask.threshold, mask.binary) == (0.4, False)
    assert mask.needs == Need.SUM | Need.ABS_SUM


@pytest.mark.parametrize("clients", [1, 2, 5, 8])
@pytest.mark.parametrize("binary", [False, True])
def test_magnitude_of_a_cohort(clients: int, binary: bool) -> None:
    deltas, mask = drawn(clients), MagnitudeAgreement(0.3, binary)
    update = reduced(deltas, mask)
    pull, size = np.abs(deltas.numpy().sum(axis=0)), np.abs(deltas.numpy()).sum(axis=0)
    share = np.divide(pull, size, out=np.zeros_like(pull), where=size > 0)
    expected = np.where(share >= 0.3, 1.0, 0.0 if binary else share)
    found = mask.compute(update)
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-12)
    facts = {name: value.item() for name, value in mask.diagnose(update, found).items()}
    assert facts == pytest.approx({"mask/mean": expected.mean(), "mask/below_threshold": (share < 0.3).mean()})


@pytest.mark.parametrize("clients", [1, 2, 5, 8])
@pytest.mark.parametrize("k", [0.01, 10.0])
def test_sand_of_a_cohort_is_divided_tensor_by_tensor(clients: int, k: float) -> None:
    deltas, mask = drawn(clients), SANDMask(0.3, k)
    mask.prepare([2, 4])
    values = deltas.numpy()
    update = reduced(deltas, mask)
    share = np.abs(np.sign(values).sum(axis=0)) / clients
    variance = values.var(axis=0, ddof=1) if clients > 1 else np.zeros(6)
    with np.errstate(divide="ignore"):
        raw = np.maximum(np.tanh(k * (share - 0.3) / variance), 0.0)
    expected = np.concatenate([raw[:2] / (1e-10 + raw[:2].mean()), raw[2:] / (1e-10 + raw[2:].mean())])
    found = mask.compute(update)
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-12)
    facts = {name: value.item() for name, value in mask.diagnose(update, found).items()}
    assert facts == pytest.approx({"mask/mean": expected.mean(), "mask/below_threshold": (share < 0.3).mean()})


def test_sand_defaults_and_needs() -> None:
    mask = SANDMask()
    assert (mask.threshold, mask.k) == (0.4, 10.0)
    assert mask.needs == Need.SIGN_SUM | Need.VARIANCE


@pytest.mark.parametrize("mask", [MagnitudeAgreement(0.4), MagnitudeAgreement(0.4, True), SANDMask(0.4)])
def test_coordinates_that_nobody_moves_and_single_ones(mask: Mask) -> None:
    mask.prepare([3])
    assert mask.compute(reduced(torch.zeros(4, 3), mask)).tolist() == [0.0] * 3
    mask.prepare([1])
    one = mask.compute(reduced(torch.tensor([[2.0]]), mask))
    assert one.dtype == torch.float32
    assert one.tolist() == pytest.approx([1.0])


@pytest.mark.parametrize("threshold", [-0.1, 1.5, math.nan])
@pytest.mark.parametrize("kind", [MagnitudeAgreement, SANDMask])
def test_thresholds_out_of_range_are_refused_when_made(kind: type, threshold: float) -> None:
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.threshold"):
        kind(threshold)


@pytest.mark.parametrize("k", [0.0, -1.0, math.inf, math.nan])
def test_steepness_out_of_range_is_refused_when_made(k: float) -> None:
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.k"):
        SANDMask(k=k)


@pytest.mark.parametrize("keep", ["progress", "length", "direction", "values"])
def test_a_step_of_no_length_stays_as_it_is(keep: Any) -> None:
    control, step = MaskControl(SignAgreement(0.4), keep), torch.tensor([3.0, 0.0, -4.0])
    assert control.over(torch.zeros(3), torch.tensor([1.0, 0.2, 0.0])).tolist() == [0.0] * 3
    assert control.over(step, torch.zeros(3)).tolist() == [0.0] * 3
    assert control.over(step, torch.ones(3)).tolist() == step.tolist()
    lengths = {"progress": 3.2, "length": 4.0, "direction": 5.0, "values": 4.0}
    masked = control.over(step, torch.tensor([0.0, 1.0, 1.0]))
    assert torch.linalg.vector_norm(masked).item() == pytest.approx(lengths[keep])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("elements", [1, 7, 1000, 44_426])
def test_progress_is_the_projection_of_the_masked_step(elements: int, dtype: torch.dtype) -> None:
    draw = np.random.default_rng(elements)
    step, mask = draw.normal(size=elements), draw.uniform(size=elements)
    control, u, m = MaskControl(SignAgreement(0.4), "progress"), torch.tensor(step, dtype=dtype), torch.tensor(mask)
    found = control.over(u, m.to(dtype)).double().numpy()
    unit = step / np.sqrt(math.fsum(step**2))
    np.testing.assert_allclose(
        found, unit * math.fsum(unit * mask * step), rtol=1e-12 if dtype == torch.float64 else 1e-5
    )
    elsewhere = torch.cat([u.new_zeros(3), u])[3:]  # in memory, where a library may add up in another order
    for one in (u, elsewhere):
        assert torch.equal(control.over(one, torch.ones_like(u)), u)


def test_values_stay_in_their_tensor_and_are_drawn_by_seed_and_round() -> None:
    control, votes = MaskControl(SignAgreement(0.9), "values"), [*range(11), *([10.0] * 5)]
    control.prepare([11, 5])
    orders = {}
    for seed, number in [(0, 1), (0, 2), (1, 1), (0, 1)]:
        control.seed = seed
        found = control.compute(replace(cohort(votes, clients=10), round=number)).tolist()
        assert found[11:] == [1.0] * 5
        assert sorted(found[:11]) == pytest.approx([0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 1, 1])
        assert orders.setdefault((seed, number), found) == found
    assert len(set(map(tuple, orders.values()))) == 3


def test_refuses_a_control_of_nothing_when_made() -> None:
    keep: Any = "sign"
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.keep.*'sign'"):
        MaskControl(SignAgreement(), keep)
    mask: Any = None
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.mask.*NoneType"):
        MaskControl(mask, "length")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_delayed_mask_is_ones_until_then(dtype: torch.dtype) -> None:
    mask, deltas = DelayedMask(MagnitudeAgreement(0.3), 2), drawn(5, dtype=dtype)
    assert mask.needs == MagnitudeAgreement.needs
    update = reduced(deltas, mask)
    early, late = (mask.compute(replace(update, round=number)) for number in (2, 3))
    assert (early.dtype, early.tolist()) == (dtype, [1.0] * 6)
    assert late.tolist() == MagnitudeAgreement(0.3).compute(update).tolist()
    assert late.tolist() != early.tolist()
    shares = [mask.diagnose(update, used)["mask/below_threshold"].item() for used in (early, late)]
    assert shares[0] == shares[1] > 0
    assert mask.diagnose(update, early)["mask/mean"].item() == 1.0


def test_a_delayed_control_draws_and_scales_as_it_does_at_once() -> None:
    votes = [*range(11), *([10.0] * 5)]
    for keep in ("values", "length"):
        kind: Any = keep
        control, delayed = (
            make(MaskControl(SignAgreement(0.9), kind)) for make in (lambda m: m, partial(DelayedMask, rounds=1))
        )
        for mask in (control, delayed):
            mask.seed = 7
            mask.prepare([11, 5])
        update, step = replace(cohort(votes, clients=10), round=2), torch.arange(16.0)
        found = [mask.over(step, mask.compute(update)).tolist() for mask in (control, delayed)]
        assert found[0] == found[1] != step.tolist()


def test_refuses_a_delay_of_nothing_when_made() -> None:
    mask: Any = "SignAgreement"
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.mask.*to begin later.*str"):
        DelayedMask(mask, 3)
    with pytest.raises(FederatedError, match=r"--aggregator\.mask\.rounds.*-1"):
        DelayedMask(SignAgreement(), -1)


class ByLayer(Mask):
    """A mask per layer, as a user writes it: no bias moves."""

    def compute(self, update: ReducedUpdate) -> Tensor:
        parts = zip(self.names, self.sizes, strict=True)
        return torch.cat([torch.full((size,), float(not name.endswith("bias"))) for name, size in parts])


def test_masks_know_the_names_of_parameters(tmp_path: Path) -> None:
    net, start = Classifier(), Classifier().state_dict()
    net.load_state_dict(start)
    federated_trainer(tmp_path, FedAvg(mask=MaskControl(ByLayer(), "values"))).fit(net, federated_data(8, 12))
    assert {name for name, p in net.named_parameters() if torch.equal(p, start[name])} == {
        name for name in start if name.endswith("bias")
    }


def test_a_partial_mask_is_one_where_a_pattern_fits() -> None:
    mask, deltas = PartialMask(MagnitudeAgreement(0.9), ["head", "*.bias"]), drawn(5)
    mask.names = ("body.weight", "body.bias", "head.0.weight")
    mask.prepare([3, 1, 2])
    update = reduced(deltas, mask)
    whole = MagnitudeAgreement(0.9).compute(update).tolist()
    assert mask.compute(update).tolist() == [*whole[:3], 1.0, 1.0, 1.0]
    assert min(whole[3:]) < 1
    for wrong, sentence in ((["body", "tail"], "the pattern `tail` in .*unmasked`"), ("head", "a list of names")):
        mask.unmasked = wrong  # type: ignore[assignment]  # on purpose
        with pytest.raises(FederatedError, match=sentence):
            mask.compute(update)


def test_what_rises_above_the_noise_passes() -> None:
    update = ReducedUpdate(2, mean=torch.tensor([0.5, -0.5, 0.19, 0.0, 0.2]), noise=0.1)
    assert NoiseFloorMask(2.0).compute(update).tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]
    assert NoiseFloorMask({1: 2.0, 2: 6.0}).compute(update).tolist() == [0.0] * 5
    assert NoiseFloorMask(0.0).compute(update).tolist() == [1.0] * 5
    assert NoiseFloorMask(9.0).compute(replace(update, noise=0.0)).tolist() == [1.0] * 5
    assert NoiseFloorMask().needs == Need.MEAN
    with pytest.raises(FederatedError, match="mask.threshold` to be at least 0"):
        NoiseFloorMask(-1.0)


@pytest.mark.parametrize(("threshold", "share"), [(1.0, 0.3173), (2.0, 0.0455)])
def test_noise_alone_passes_as_often_as_the_page_says(threshold: float, share: float) -> None:
    noise = 0.3 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    mask = NoiseFloorMask(threshold).compute(ReducedUpdate(1, mean=noise, noise=0.3))
    assert mask.mean().item() == pytest.approx(share, abs=0.006)
