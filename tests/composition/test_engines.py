"""The vectorized engine gives what the sequential one gives, for every method."""

from functools import partial

import pytest
import torch

from tests.composition.client_parts import CLIENT_LIMITS, CLIENTS
from tests.composition.composition_parts import MASKED, MASKS, RULES, Outcome
from tests.composition.composition_parts import run as run_with_bias

# A bias before BatchNorm has a gradient of rounding alone, and its sign a vote: no two engines agree there.
run = partial(run_with_bias, bias=False)
EVERY_CLIENT = {**CLIENTS, **CLIENT_LIMITS}


def goes(rule: str, client: str) -> bool:
    """Whether an aggregator and client algorithms go together."""
    local, weightings = EVERY_CLIENT[client], RULES[rule].weightings
    return local.rule in (None, rule) and (not local.uniform or "uniform" in weightings)


def options_of(client: str) -> dict[str, str]:
    return {"weighting": "uniform"} if EVERY_CLIENT[client].uniform else {}


def agree(one: Outcome, other: Outcome, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(one.weights, other.weights, rtol=rtol, atol=rtol)
    for name, buffer in one.buffers.items():
        torch.testing.assert_close(buffer, other.buffers[name], rtol=rtol, atol=rtol)
    assert one.logged.keys() == other.logged.keys()
    for name, value in one.logged.items():
        if not name.startswith("time/"):
            assert other.logged[name] == pytest.approx(value, rel=rtol, abs=rtol), name


FEW_RULES, FEW_CLIENTS = ("FedAvg", "FedDynServer", "CGW"), ("none", "all three")
PAIRS = [
    pytest.param(rule, client, marks=() if rule in FEW_RULES or client in FEW_CLIENTS else pytest.mark.slow)
    for rule in RULES
    for client in EVERY_CLIENT
    if goes(rule, client)
]


@pytest.mark.parametrize(("rule", "client"), PAIRS)
def test_every_method_trains_alike_under_both_engines(rule, client):
    given = {"client": client, "precision": "64-true", **options_of(client)}
    agree(run(rule, **given), run(rule, engine="vectorized", **given))


@pytest.mark.parametrize("rule", MASKED)
@pytest.mark.parametrize("mask", [name for name in MASKS if name != "none"])
def test_every_mask_votes_alike_under_both_engines(rule, mask):
    given = {"mask": mask, "precision": "64-true"}
    agree(run(rule, **given), run(rule, engine="vectorized", **given))


@pytest.mark.parametrize("client", EVERY_CLIENT)
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_the_size_of_chunks_changes_nothing(client, chunk_size):
    rule = EVERY_CLIENT[client].rule or "FedAvg"
    given = {"client": client, "precision": "64-true", **options_of(client)}
    agree(run(rule, **given), run(rule, engine="vectorized", chunk_size=chunk_size, **given))


@pytest.mark.parametrize(
    "options", [{"local_epochs": 3}, {"local_steps": 5}, {"local_steps": 1}, {"gradient_clip_val": 0.05}], ids=str
)
@pytest.mark.parametrize("client", ["none", "all three", "FedGA step on SCAFFOLD"])
def test_epochs_steps_and_clipping_are_alike_under_both_engines(client, options):
    given = {"client": client, "precision": "64-true", **options}
    agree(run("FedAvg", **given), run("FedAvg", engine="vectorized", **given))


@pytest.mark.parametrize("client", ["none", "SCAFFOLD", "FedGA on FedProx"])
@pytest.mark.parametrize("rule", ["FedAvg", "FedAdam", "FedNova", "CGW"])
def test_single_precision_agrees_to_its_rounding(rule, client):
    agree(run(rule, client=client), run(rule, client=client, engine="vectorized"), rtol=2e-5)
