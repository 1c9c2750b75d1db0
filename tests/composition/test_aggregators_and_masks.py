"""Every aggregator with every mask, weighting and buffer policy: each part changes the model, unless at a limit."""

from itertools import combinations, product
from typing import Any

import pytest
import torch

from lightning_fed import FederatedTrainer, aggregators
from lightning_fed.aggregators import Aggregator, FedAvg
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from lightning_fed.masks import Mask, NoiseFloorMask, SANDMask
from tests.composition.composition_parts import (
    AFTER_A_MASK,
    LIMITS,
    MASKED,
    MASKS,
    RULES,
    UNMASKED,
    Outcome,
    distance,
    make_data,
    run,
    same,
    start,
)
from tests.parts import graded, leaves, quick_first

# What the order of sums may do to float32 in three rounds, and what a part does at least.
ROUNDING, CLEAR = 5e-6, 2e-4
BUFFERS = ["average", "local", "keep"]
PAIRS = [(rule, mask) for rule in MASKED for mask in MASKS] + [(rule, "none") for rule in UNMASKED]
COMBINATIONS = [
    (rule, mask, weighting, buffers)
    for rule, mask in PAIRS
    for weighting in RULES[rule].weightings
    for buffers in BUFFERS
]
AT_ZERO = ["soft at 0", "binary at 0", "samples at 0", "magnitude at 0", "sand at 0"]
AT_ZERO += ["length at 0", "direction at 0", "values at 0", "delayed at 0", "partial at 0", "noise floor alone"]


def expect_sound(outcome: Outcome, buffers: str) -> None:
    """Finite, away from the start, with buffers that only their policy changes and variances above 0."""
    net = start()
    assert outcome.weights.isfinite().all()
    assert not torch.equal(outcome.weights, torch.cat([p.detach().flatten() for p in net.parameters()]))
    assert (outcome.buffers["layers.1.running_var"] > 0).all()
    unchanged = [
        torch.equal(outcome.buffers[name], buffer.to(outcome.buffers[name].dtype))
        for name, buffer in net.named_buffers()
    ]
    assert all(unchanged) == (buffers != "average")
    assert outcome.buffers["layers.1.num_batches_tracked"].dtype == torch.int64


def test_every_aggregator_and_mask_of_the_package_is_in_the_suite() -> None:
    assert {kind.__name__ for kind in leaves(Aggregator)} == set(RULES), "say in RULES how the aggregator is made"
    made = {type(make()) for make in MASKS.values() if make is not None}
    assert leaves(Mask) - {NoiseFloorMask} == made, "say in MASKS how the mask is made"
    assert all(kind.__name__ in aggregators.__all__ for kind in leaves(Aggregator))


@pytest.mark.parametrize(("rule", "mask", "weighting", "buffers"), graded(COMBINATIONS, quick=8))
def test_each_part_changes_the_model(rule: str, mask: str, weighting: str, buffers: str) -> None:
    here = run(rule, mask, weighting=weighting, buffers=buffers)
    expect_sound(here, buffers)
    assert ("mask/mean" in here.logged) == (mask != "none")
    if mask != "none":
        assert distance(here, run(rule, weighting=weighting, buffers=buffers)) > CLEAR, "without the mask"
    for other in set(RULES[rule].weightings) - {weighting}:
        there = run(rule, mask, weighting=other, buffers=buffers)
        # A rule without weights still averages buffers with them.
        if RULES[rule].weighs or buffers == "average":
            assert distance(here, there) > CLEAR, "other weights"
        else:
            assert same(here, there), "weights in a rule without"
    for other in set(BUFFERS) - {buffers}:
        assert distance(here, run(rule, mask, weighting=weighting, buffers=other)) > CLEAR, f"buffers {other}"
    if rule != "FedAvg" and not RULES[rule].is_mean:
        assert distance(here, run("FedAvg", mask, weighting=weighting, buffers=buffers)) > CLEAR, "FedAvg instead"


@pytest.mark.parametrize("rule", quick_first(3, MASKED))
@pytest.mark.slow
def test_no_two_masks_are_the_same(rule: str) -> None:
    outcomes = {mask: run(rule, mask) for mask in MASKS}
    for one, other in combinations(outcomes, 2):
        assert distance(outcomes[one], outcomes[other]) > CLEAR, (one, other)
    assert distance(outcomes["above"], run(rule, "soft at 0.2")) > CLEAR


@pytest.mark.parametrize(("rule", "mask", "sizes"), graded(product(MASKED, AT_ZERO, ["unequal", "equal"]), 4, ()))
def test_threshold_zero_is_the_rule_without_a_mask(rule: str, mask: str, sizes: str) -> None:
    there, without = run(rule, mask, sizes), run(rule, "none", sizes)
    assert distance(there, without) > CLEAR if mask == "sand at 0" else same(there, without)


@pytest.mark.parametrize("rule", quick_first(3, MASKED))
def test_a_mask_delayed_by_nothing_or_to_the_end_is_the_mask_or_none(rule: str) -> None:
    assert same(run(rule, "delayed by nothing"), run(rule, "soft"))
    assert same(run(rule, "delayed to the end"), run(rule, "none"))


@pytest.mark.parametrize("rule", quick_first(3, MASKED))
def test_above_zero_is_not_the_rule_without_a_mask(rule: str) -> None:
    """Three against three is a share of 0; the five unequal clients cannot cancel."""
    assert distance(run(rule, "above at 0", "equal"), run(rule, "none", "equal")) > CLEAR


@pytest.mark.slow
@pytest.mark.parametrize("mask", quick_first(3, MASKS))
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_rules_at_their_limit_are_federated_averaging(mask: str, weighting: str) -> None:
    fedavg = run("FedAvg", mask, weighting=weighting)
    exact = ("FedAvgM at 0", "FedACG at 0", "CGW at 0", "FedGMA at 0", "FedDGGA at 0", "FedLWS at 0")
    for limit in (*exact, "QFedAvg at 0", "TERM at 0"):
        assert same(run(limit, mask, weighting=weighting), fedavg), limit
    for limit in ("ServerOptimizer as FedAvg", "FedOMG at 0", "AFL at 0", "FedFV at 1", "FedAWA at 0"):
        assert distance(run(limit, mask, weighting=weighting), fedavg) < ROUNDING, limit


@pytest.mark.parametrize(("rule", "mask"), graded(PAIRS, 6, ()))
def test_clients_of_one_size_weigh_alike(rule: str, mask: str) -> None:
    outcomes = [run(rule, mask, "equal", weighting=weighting) for weighting in RULES[rule].weightings]
    assert same(outcomes[0], outcomes[-1])


@pytest.mark.parametrize("rule", quick_first(3, MASKED))
def test_votes_of_clients_of_one_size_are_equal(rule: str) -> None:
    assert same(run(rule, "samples", "equal"), run(rule, "soft", "equal"))


@pytest.mark.parametrize("mask", quick_first(3, MASKS))
def test_fednova_of_clients_of_one_size_is_federated_averaging(mask: str) -> None:
    assert distance(run("FedNova", mask, "equal"), run("FedAvg", mask, "equal")) < ROUNDING


@pytest.mark.parametrize(
    ("rule", "mask"), graded(product(AFTER_A_MASK, ["soft", "binary", "magnitude", "sand"]), 4, ())
)
def test_a_mask_before_the_rule(rule: str, mask: str) -> None:
    before, after, without = run(rule, mask, apply="before"), run(rule, mask), run(rule)
    expect_sound(before, "average")
    assert distance(before, without) > CLEAR
    if RULES[rule].memoryless:
        assert distance(before, after) < ROUNDING
    elif not RULES[rule].is_mean:
        assert distance(before, after) > CLEAR


@pytest.mark.parametrize("rule", sorted(set(MASKED) - set(AFTER_A_MASK)))
def test_no_mask_comes_before_a_rule_without_a_mean(rule: str) -> None:
    with pytest.raises(FederatedError, match=f"`--aggregator.apply after` for {rule}"):
        run(rule, "soft", apply="before")


@pytest.mark.parametrize(("rule", "mask"), graded(PAIRS, 6, ()))
def test_clients_without_samples_and_their_order_change_nothing(rule: str, mask: str) -> None:
    filled = run(rule, mask, draws="filled")
    assert same(filled, run(rule, mask))
    assert filled.logged["clients/skipped"] == 0
    assert run(rule, mask).logged["clients/skipped"] == 1


@pytest.mark.parametrize(("rule", "mask"), graded(PAIRS, 6, ()))
def test_one_client_in_a_round(rule: str, mask: str) -> None:
    if getattr(aggregators, rule) in (
        aggregators.TrimmedMean, aggregators.Krum, aggregators.MultiKrum, aggregators.Bulyan, aggregators.AFL,
    ):  # fmt: skip
        with pytest.raises(FederatedError, match="got 1"):
            run(rule, mask, draws="one")
        return
    alone = run(rule, mask, draws="one")
    expect_sound(alone, "average")
    assert alone.logged["clients/trained"] == 1
    # What is left of a mask is 0 where the client stood still, and so is its update.
    if RULES[rule].memoryless and mask not in ("sand", "values"):
        assert same(alone, run(rule, draws="one"))
    if rule in ("CoordinateMedian", "GeometricMedian", "FedNova") and mask == "none":
        assert distance(alone, run("FedAvg", draws="one")) < ROUNDING


@pytest.mark.parametrize(("rule", "mask"), graded(PAIRS, 6, ()))
@pytest.mark.slow
def test_clients_that_train_in_bfloat16(rule: str, mask: str) -> None:
    narrow = run(rule, mask, precision="bf16-true")
    expect_sound(narrow, "average")
    assert narrow.weights.dtype == torch.float32
    assert narrow.buffers["center"].dtype == torch.bfloat16
    assert distance(narrow, run(rule, mask)) > CLEAR
    if mask != "none":
        assert distance(narrow, run(rule, precision="bf16-true")) > CLEAR


@pytest.mark.parametrize(
    ("rule", "mask"), graded(product(UNMASKED, [mask for mask in MASKS if mask != "none"]), kept=())
)
def test_what_makes_no_sense_is_refused_by_name(rule: str, mask: str) -> None:
    reason = getattr(aggregators, rule).mask_refusal
    with pytest.raises(
        FederatedError, match=rf"^Expected no mask over {rule}, got \w+: {reason}; .*--aggregator\.mask"
    ):
        run(rule, mask)


def test_sand_is_divided_within_each_tensor_of_the_model() -> None:
    """One round by hand: the mean of the mask is 1 over every weight and bias for itself."""

    class Keep(FederatedCallback):
        deltas: list[torch.Tensor] = []

        def on_client_end(self, trainer: FederatedTrainer, pl_module: Any, update: Any) -> None:
            self.deltas.append(update.delta.double())

    net, keep = start(), Keep()
    before = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
    FederatedTrainer(
        accelerator="cpu", logger=False, callbacks=[keep, FedAvg(mask=SANDMask(0.1, k=1e-4), weighting="uniform")],
        seed=3, max_rounds=1, enable_progress_bar=False, enable_checkpointing=False, default_root_dir="not-written",
    ).fit(net, make_data("unequal"))  # fmt: skip
    deltas = torch.stack(keep.deltas)
    raw = torch.tanh(1e-4 * (deltas.sign().mean(0).abs() - 0.1) / deltas.var(0)).clamp(min=0)
    parts = raw.split([p.numel() for p in net.parameters()])
    assert len({round(part.mean().item(), 3) for part in parts}) > 1
    expected = before + torch.cat([part / (1e-10 + part.mean()) for part in parts]) * deltas.mean(0)
    after = torch.cat([p.detach().flatten() for p in net.parameters()]).double()
    torch.testing.assert_close(after, expected, rtol=1e-4, atol=1e-5)


def test_limits_are_limits_of_masks_in_the_suite() -> None:
    """A mask that is added here with a threshold must say what becomes of it at 0."""
    made = [make() for make in MASKS.values() if make is not None]
    thresholded = {type(mask) for mask in made if hasattr(getattr(mask, "mask", mask), "threshold")}
    assert {type(make()) for make in LIMITS.values()} == thresholded | {NoiseFloorMask}
