"""Every aggregator and client algorithm with clients away, late, over-selected and unequal, in both engines."""

from pathlib import Path
from typing import Any

import pytest

from lightning_fed.errors import FederatedError
from lightning_fed.sampling import BernoulliAvailability, PeriodicAvailability, Stragglers, UnequalWork
from tests.composition.test_engines import EVERY_CLIENT, METHODS, trained_alike
from tests.parts import cover, quick_first

FAULTS: dict[str, dict[str, Any]] = {
    "away": {"availability": BernoulliAvailability(0.6)},
    "dropped": {"availability": PeriodicAvailability(3, 0.7), "stragglers": Stragglers(3.0)},
    "partial": {"stragglers": Stragglers(2.5, "partial"), "local_epochs": 2},
    "over-selected": {"stragglers": Stragglers(over_selection=1.3), "clients_per_round": 4},
    "unequal": {"work": UnequalWork(epochs=[1, 3], lr=[0.5, 1.5])},
    "everything": {
        "availability": BernoulliAvailability(0.8), "stragglers": Stragglers(2.5, "partial", over_selection=1.5),
        "work": UnequalWork(steps=[1, 5], lr=[0.5, 1.5], share=0.7, redraw=False), "clients_per_round": 5,
    },
}  # fmt: skip
# What takes one step on all of a client's data has no other work, and Krum needs five clients.
GRID = [
    (rule, client, faults)
    for rule, client in METHODS
    for faults in FAULTS
    if not (EVERY_CLIENT[client].full_batch and ("work" in FAULTS[faults] or "local_epochs" in FAULTS[faults]))
    if not ("Krum" in rule and faults == "over-selected")
    if not ("FedRep" in client and faults in ("partial", "unequal", "everything"))  # refuses clients that end early
]
# Each fault meets one of each family, and each rule and client algorithm some fault; test-pairs lets all meet all.
OF_FAMILIES = {
    *("FedAvg", "FedAdam", "FedNova", "CGW", "CoordinateMedian", "FedFV", "QFedAvg", "AFL", "FedDynServer"),
    *("none", "FedProx", "SCAFFOLD", "FedCM", "FedGA", "FedDyn", "FedNTD", "FedSAM", "FedPer", "PFedMe", "APFL"),
}


def meetings(grid: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
    """Chooses cases in which each rule, and each client algorithm, meets each fault."""
    pairs = cover([((rule, faults), (client, faults)) for rule, client, faults in grid], 1)
    return [(rule, client, faults) for (rule, faults), (client, _) in pairs]


KEPT = dict.fromkeys([*cover(GRID, 1), *meetings([case for case in GRID if {*case[:2]} <= OF_FAMILIES])])
CASES = dict.fromkeys([*KEPT, *meetings(GRID)])


@pytest.mark.filterwarnings("ignore:Round .* leaves the model as it is")
@pytest.mark.parametrize(("rule", "client", "faults"), quick_first(24, CASES, len(KEPT)))
@pytest.mark.quick(7)
def test_every_method_trains_through_faults_alike(rule: str, client: str, faults: str, tmp_path: Path) -> None:
    if rule == "AFL" and "availability" in FAULTS[faults]:  # its weights are over all clients
        with pytest.raises(FederatedError, match="Expected all 5 clients in every round of AFL"):
            trained_alike(tmp_path, "Net", rule, client, **FAULTS[faults])
        return
    trained_alike(tmp_path, "Net", rule, client, **FAULTS[faults])
