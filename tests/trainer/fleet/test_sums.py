"""A fleet that shows sums alone carries the rules whose needs are sums, and refuses the others."""

import pytest
import torch

from lightning_fed import FederatedError
from lightning_fed.callbacks import UpdateGeometry
from lightning_fed.core.updates import Need
from lightning_fed.trainer.fleet import SummingFleet
from tests.composition.composition_parts import RULES, make_trainer
from tests.trainer.fleet.fleets import fit, fleet_of, rows_of

OF_SUMS = [name for name in RULES if not make_trainer(name, buffers="local").aggregator.all_needs & ~Need.SUMS]


def test_the_rules_of_sums_are_known() -> None:
    known = {"FedAvg", "FedYogi", "FedNova", "FedDynServer", "FedExP", "FedGMA", "SignMajority", "FedACG"}
    assert known | {"QFedAvg", "TERM"} <= {*OF_SUMS}
    assert not {"Krum", "CoordinateMedian", "TIES", "AFL", "FedFV", "CGW", "PCGrad"} & {*OF_SUMS}


@pytest.mark.parametrize("name", [*OF_SUMS, "masked"])
@pytest.mark.quick(7)
def test_a_rule_of_sums_needs_no_single_update(name: str) -> None:
    rule, mask, client = ("FedAvg", "samples", "SCAFFOLD") if name == "masked" else (name, "none", "none")

    def make() -> object:
        return make_trainer(rule, mask, client, buffers="keep", precision="64-true")

    here, there = fit(make()), fit(make(), fleet_of(make, SummingFleet))
    torch.testing.assert_close(here.weights, there.weights, rtol=0, atol=1e-12)
    assert rows_of(here) == pytest.approx(rows_of(there), rel=1e-9, nan_ok=True)


@pytest.mark.parametrize("rule", ["Krum", "AFL", "CGW"])
def test_a_rule_that_reads_single_clients_is_refused(rule: str) -> None:
    with pytest.raises(FederatedError, match=f"that read sums over clients, .* got {rule}, which reads what single"):
        fit(make_trainer(rule), fleet_of(lambda: make_trainer(rule), SummingFleet))


@pytest.mark.parametrize(
    ("client", "more", "options", "named"),
    [("FedGA", (), {}, "FedGA"), ("none", (UpdateGeometry(),), {}, "UpdateGeometry"), ("none", (), {}, "no sums")],
)  # fmt: skip
def test_what_else_reads_single_clients_is_refused(client: str, more: tuple, options: dict, named: str) -> None:
    with pytest.raises(FederatedError, match=named):
        fit(
            make_trainer("FedAvg", "none", client, *more),
            fleet_of(lambda: make_trainer("FedAvg", "none", client), SummingFleet),
        )
