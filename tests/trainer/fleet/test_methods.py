"""Every aggregator, mask, client algorithm and payload over a fleet gives what it gives in one process."""

from itertools import cycle, repeat
from typing import Any

import pytest
import torch

from lightning_fed.callbacks import (
    QSGD,
    CentralDP,
    ClipUpdates,
    LocalDP,
    RandomK,
    TopK,
    UpdateAgreement,
    UpdateGeometry,
)
from lightning_fed.sampling import PoissonSampler
from tests.composition.client_parts import ALONE, BESIDE, LATE, UNSENT
from tests.composition.composition_parts import MASKED, MASKS, RULES, SIZES, make_trainer
from tests.trainer.fleet.fleets import fit, fleet_of, rows_of, same_buffers

# Together, as each has a half of its own; those that go with one rule, or with one step, are by themselves.
AT_NODES = {**ALONE, **BESIDE, **UNSENT, **LATE}
LOCAL = {name: local for name, local in AT_NODES.items() if local.make()[0].at_nodes}
FREE = [name for name, local in LOCAL.items() if not (local.rule or local.full_batch or local.given)]
_masks = cycle(MASKS)
METHODS = [
    *zip(
        RULES,
        [next(_masks) if rule in MASKED else "none" for rule in RULES],
        [*FREE, *repeat("none", len(RULES) - len(FREE))],
        strict=True,
    ),
    *((local.rule or "FedAvg", "none", name) for name, local in LOCAL.items() if name not in FREE),
]
DP = {"weighting": "uniform", "buffers": "keep"}
PAYLOADS: dict[str, tuple[Any, dict[str, Any]]] = {
    "clip and top-k": (lambda: [ClipUpdates(0.5), TopK(0.1)], {}),
    "top-k as a map": (lambda: [TopK(0.5)], {}),
    "random-k": (lambda: [RandomK(0.3)], {}),
    "QSGD": (lambda: [QSGD(4)], {}),
    "local DP": (lambda: [LocalDP(1.0, 1e-3, 0.1)], DP),
    "adaptive clip": (
        lambda: [CentralDP(1.0, 1e-3, 1.0, quantile=0.5, count_noise=2.0)], {**DP, "sampler": PoissonSampler()}
    ),
    "diagnostics": (lambda: [UpdateGeometry(), UpdateAgreement()], {}),
}  # fmt: skip


def expect_same(make: Any, batch_size: int = 8) -> None:
    here = fit(make(), batch_size=batch_size)
    there = fit(make(), fleet_of(make, batch_size=batch_size), batch_size)
    assert torch.equal(here.weights, there.weights)
    assert same_buffers(here, there)
    assert rows_of(here) == pytest.approx(rows_of(there), rel=1e-12, nan_ok=True)
    assert there.logged_metrics["fleet/bytes_up"] > 0


@pytest.mark.parametrize(("rule", "mask", "client"), METHODS)
@pytest.mark.quick(10)
def test_a_method_over_nodes_is_that_in_one_process(rule: str, mask: str, client: str) -> None:
    local = LOCAL.get(client)
    options = {"weighting": "uniform"} if local is not None and local.uniform else {}
    batch_size = sum(SIZES["unequal"]) if local is not None and local.full_batch else 8
    expect_same(lambda: make_trainer(rule, mask, client, precision="64-true", **options), batch_size)


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_payload_over_nodes_is_that_in_one_process(name: str) -> None:
    make, options = PAYLOADS[name]
    expect_same(lambda: make_trainer("FedAvg", "none", "SCAFFOLD" if not options else "none", *make(), **options))
