"""The list of all client algorithms, alone and together, and how each enters the composition suite."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lightning_fed.client_algorithms import (
    ALIE,
    APFL,
    DPSGD,
    IPM,
    MOON,
    SCAFFOLD,
    ClientAlgorithm,
    DeltaSGD,
    Ditto,
    FedBN,
    FedCM,
    FedDyn,
    FedGA,
    FedGaLA,
    FedIIR,
    FedLC,
    FedLESAM,
    FedNTD,
    FedPer,
    FedProx,
    FedRep,
    FedRS,
    FedSAM,
    GaussianNoise,
    GradAlign,
    LabelFlip,
    LGFedAvg,
    LinearScaling,
    LocalOnly,
    LogitAdjustment,
    MimeLite,
    PerFedAvg,
    PersonalParameters,
    PFedMe,
    SignFlip,
    Stale,
    StatelessSCAFFOLD,
)
from lightning_fed.sampling import Arrivals

__all__ = ["ALONE", "BESIDE", "CLIENTS", "CLIENT_LIMITS", "LATE", "PRIVATE", "TOGETHER", "UNSENT", "Local"]


@dataclass(frozen=True)
class Local:
    """How client algorithms enter the suite.

    Attributes:
        make: Makes them, in order.
        without: The names in CLIENTS of what is left when one of them is taken out.
        rule: The one aggregator that they go with, None for any.
        uniform: Whether they take ``weighting: uniform`` alone.
        full_batch: Whether they take one step on all of a client's data.
        given: Options that they need, of the aggregator or the trainer.
        few: Whether they go through a few rules and one model alone: the server sees less of the model, and nothing
            else that is new to it, and not every model has such a part.
    """

    make: Callable[[], list[ClientAlgorithm]]
    without: tuple[str, ...] = ("none",)
    rule: str | None = None
    uniform: bool = False
    full_batch: bool = False
    given: dict[str, Any] = field(default_factory=dict)
    few: bool = False

    def options(self, **others: Any) -> dict[str, Any]:
        """The options of a run that has others too, which go first."""
        by_steps = "local_steps" in others
        return {**{k: v for k, v in self.given.items() if not (by_steps and k == "local_epochs")}, **others}


ALONE = {
    "FedProx": Local(lambda: [FedProx(2.0)]),
    "SCAFFOLD": Local(lambda: [SCAFFOLD()]),
    "SCAFFOLD I": Local(lambda: [SCAFFOLD("I")]),
    "StatelessSCAFFOLD": Local(lambda: [StatelessSCAFFOLD()]),
    "FedCM": Local(lambda: [FedCM(0.3)]),
    "MimeLite": Local(lambda: [MimeLite(0.5)]),
    "FedGA": Local(lambda: [FedGA(0.5)]),
    "GradAlign": Local(lambda: [GradAlign(0.5)], ("none on all data",), full_batch=True),
    "LinearScaling": Local(lambda: [LinearScaling()], ("none on all data",), uniform=True, full_batch=True),
    "FedDyn": Local(lambda: [FedDyn()], rule="FedDynServer"),
    "FedLC": Local(lambda: [FedLC(absent=0.5)]),
    "LogitAdjustment": Local(lambda: [LogitAdjustment(absent=0.5)]),
    "FedRS": Local(lambda: [FedRS(0.0)]),
    "MOON": Local(lambda: [MOON(5.0)]),
    "FedNTD": Local(lambda: [FedNTD(3.0)]),
    "FedIIR": Local(lambda: [FedIIR(1.0, ema=0.5)]),
    "FedSAM": Local(lambda: [FedSAM(0.5)]),
    "FedLESAM": Local(lambda: [FedLESAM(0.5)]),
    "FedLESAM last": Local(lambda: [FedLESAM(0.5, "last")]),
    "FedGaLA": Local(lambda: [FedGaLA()]),
    "DeltaSGD": Local(lambda: [DeltaSGD()]),
    "PFedMe": Local(lambda: [PFedMe(4.0, 3, 0.1)]),
    "PerFedAvg": Local(lambda: [PerFedAvg(0.5)], ("none on all data",), full_batch=True),
    "FedBN": Local(lambda: [FedBN()], given={"buffers": "local"}, few=True),
    "FedPer": Local(lambda: [FedPer()], few=True),
    "FedRep": Local(lambda: [FedRep()], given={"local_epochs": 2}, few=True),
    "LGFedAvg": Local(lambda: [LGFedAvg()], few=True),
    "PersonalParameters": Local(lambda: [PersonalParameters(first=1)], few=True),
    "LabelFlip": Local(lambda: [LabelFlip(clients=[1, 3])], few=True),
    "SignFlip": Local(lambda: [SignFlip(clients=[1, 3])], few=True),
    "GaussianNoise": Local(lambda: [GaussianNoise(1.0, clients=[1, 3])], few=True),
    "ALIE": Local(lambda: [ALIE(clients=[1, 3])], few=True),
    "IPM": Local(lambda: [IPM(clients=[1, 3])], few=True),
}
# The global model is what it is without them, and what it was at the start.
BESIDE = {"Ditto": Local(lambda: [Ditto(0.5)]), "APFL": Local(lambda: [APFL(0.5)])}
UNSENT = {"LocalOnly": Local(lambda: [LocalOnly()], rule="FedAvg", given={"buffers": "local"})}
# All five arrive in every round, so nobody is late: its own tests let them be, in both engines and other cohorts.
LATE = {"Stale": Local(lambda: [Stale()], given={"buffers": "keep", "sampler": Arrivals(5, 1.0)})}
# It refuses the BatchNorm of the suite's model, and most others: its own tests have both engines and other algorithms.
PRIVATE = {"DPSGD": Local(lambda: [DPSGD(1.0, noise=1.0)])}
TOGETHER = {
    "FedGA on FedProx": Local(lambda: [FedProx(2.0), FedGA(0.5)], ("FedProx", "FedGA")),
    "FedGA on SCAFFOLD": Local(lambda: [SCAFFOLD(), FedGA(0.5)], ("SCAFFOLD", "FedGA")),
    "FedGA on SCAFFOLD I": Local(lambda: [SCAFFOLD("I"), FedGA(0.5)], ("SCAFFOLD I", "FedGA")),
    "FedGA on stateless": Local(lambda: [StatelessSCAFFOLD(), FedGA(0.5)], ("StatelessSCAFFOLD", "FedGA")),
    "FedProx on SCAFFOLD": Local(lambda: [SCAFFOLD(), FedProx(2.0)], ("SCAFFOLD", "FedProx")),
    "FedProx on stateless": Local(lambda: [StatelessSCAFFOLD(), FedProx(2.0)], ("StatelessSCAFFOLD", "FedProx")),
    "FedProx on FedCM": Local(lambda: [FedCM(0.3), FedProx(2.0)], ("FedCM", "FedProx")),
    "FedGA on FedCM": Local(lambda: [FedCM(0.3), FedGA(0.5)], ("FedCM", "FedGA")),
    "FedProx on MimeLite": Local(lambda: [MimeLite(0.5), FedProx(2.0)], ("MimeLite", "FedProx")),
    "all three": Local(
        lambda: [SCAFFOLD(), FedProx(2.0), FedGA(0.5)], ("FedProx on SCAFFOLD", "FedGA on SCAFFOLD", "FedGA on FedProx")
    ),
    "FedGA on FedDyn": Local(lambda: [FedDyn(), FedGA(0.5)], ("FedDyn", "FedGA"), "FedDynServer"),
    "FedProx on FedLC": Local(lambda: [FedLC(absent=0.5), FedProx(2.0)], ("FedLC", "FedProx")),
    "MOON on adjustment": Local(lambda: [LogitAdjustment(absent=0.5), MOON(5.0)], ("LogitAdjustment", "MOON")),
    "FedNTD on FedRS": Local(lambda: [FedRS(0.0), FedNTD(3.0)], ("FedRS", "FedNTD")),
    "FedIIR on SCAFFOLD": Local(lambda: [SCAFFOLD(), FedIIR(1.0, ema=0.5)], ("SCAFFOLD", "FedIIR")),
    "FedProx on FedDyn": Local(lambda: [FedDyn(), FedProx(2.0)], ("FedDyn", "FedProx"), "FedDynServer"),
    "MoFedSAM": Local(lambda: [FedSAM(0.5), FedCM(0.3)], ("FedSAM", "FedCM")),
    "FedSAM on SCAFFOLD": Local(lambda: [SCAFFOLD(), FedSAM(0.5)], ("SCAFFOLD", "FedSAM")),
    "FedGA on FedSAM": Local(lambda: [FedSAM(0.5), FedGA(0.5)], ("FedSAM", "FedGA")),
    "FedProx on PFedMe": Local(lambda: [PFedMe(4.0, 3, 0.1), FedProx(2.0)], ("PFedMe", "FedProx")),
    "FedLESAM on SCAFFOLD": Local(lambda: [SCAFFOLD(), FedLESAM(0.5)], ("SCAFFOLD", "FedLESAM")),
    # Not on SCAFFOLD, whose terms may cancel to rounding where gradients are dropped: masks would vote on its signs.
    "FedGaLA on FedProx": Local(lambda: [FedProx(2.0), FedGaLA()], ("FedProx", "FedGaLA")),
    "FedGA on DeltaSGD": Local(lambda: [DeltaSGD(), FedGA(0.5)], ("DeltaSGD", "FedGA")),
    "FedGA on FedBN": Local(lambda: [FedBN(), FedGA(0.5)], ("FedBN", "FedGA"), given={"buffers": "local"}, few=True),
    "FedNTD on FedPer": Local(lambda: [FedPer(), FedNTD(3.0)], ("FedPer", "FedNTD"), few=True),
    "FedSAM on FedPer": Local(lambda: [FedPer(), FedSAM(0.5)], ("FedPer", "FedSAM"), few=True),
    "MOON on FedPer": Local(lambda: [FedPer(), MOON(5.0)], ("FedPer", "MOON"), few=True),
    "SCAFFOLD on FedPer": Local(lambda: [FedPer(), SCAFFOLD()], ("FedPer", "SCAFFOLD"), few=True),
    "FedProx on FedRep": Local(
        lambda: [FedRep(), FedProx(2.0)], ("FedRep", "FedProx"), given={"local_epochs": 2}, few=True
    ),
    "FedCM on LGFedAvg": Local(lambda: [LGFedAvg(), FedCM(0.3)], ("LGFedAvg", "FedCM"), few=True),
    "LabelFlip on FedProx": Local(
        lambda: [FedProx(2.0), LabelFlip(clients=[1, 3])], ("FedProx", "LabelFlip"), few=True
    ),
    "SignFlip on FedCM": Local(lambda: [FedCM(0.3), SignFlip(clients=[1, 3])], ("FedCM", "SignFlip"), few=True),
    "GaussianNoise on FedSAM": Local(
        lambda: [FedSAM(0.5), GaussianNoise(1.0, clients=[1, 3])], ("FedSAM", "GaussianNoise"), few=True
    ),
    "ALIE on FedPer": Local(lambda: [FedPer(), ALIE(clients=[1, 3])], ("FedPer", "ALIE"), few=True),
    "IPM on FedProx": Local(lambda: [FedProx(2.0), IPM(clients=[1, 3])], ("FedProx", "IPM"), few=True),
    "SCAFFOLD I on personal": Local(
        lambda: [PersonalParameters(first=1), SCAFFOLD("I")], ("PersonalParameters", "SCAFFOLD I"), few=True
    ),
}
CLIENTS = {**ALONE, **TOGETHER}

# Other orders and forms, and algorithms at their limit or beside it: not part of the grid.
CLIENT_LIMITS = {
    **BESIDE,
    **UNSENT,
    "none": Local(list),
    "none on all data": Local(list, full_batch=True),
    "FedProx on FedGA": Local(lambda: [FedGA(0.5), FedProx(2.0)]),
    "FedGA step": Local(lambda: [FedGA(0.5, form="step")]),
    "FedGA step on FedProx": Local(lambda: [FedProx(2.0), FedGA(0.5, form="step")]),
    "FedGA step on SCAFFOLD": Local(lambda: [SCAFFOLD(), FedGA(0.5, form="step")]),
    "FedGA step on FedDyn": Local(lambda: [FedDyn(), FedGA(0.5, form="step")], rule="FedDynServer"),
    "FedGA global": Local(lambda: [FedGA(0.5, measure_from="global")]),
    "FedGA from round 3": Local(lambda: [FedGA({3: 0.5})]),
    "FedGA from round 4": Local(lambda: [FedGA({4: 0.5})]),
    "FedProx at 0": Local(lambda: [FedProx(0.0)]),
    "FedProx as FedDyn": Local(lambda: [FedProx(0.1)], rule="FedDynServer"),
    "FedCM at 1": Local(lambda: [FedCM(1.0)]),
    "MimeLite at 0": Local(lambda: [MimeLite(0.0)]),
    "FedLC at 0": Local(lambda: [FedLC(0.0)]),
    "LogitAdjustment at 0": Local(lambda: [LogitAdjustment(0.0)]),
    "FedRS at 1": Local(lambda: [FedRS(1.0)]),
    "MOON at 0": Local(lambda: [MOON(0.0)]),
    "FedNTD at 0": Local(lambda: [FedNTD(0.0)]),
    "FedIIR at 0": Local(lambda: [FedIIR(0.0)]),
    "FedSAM at 0": Local(lambda: [FedSAM(0.0)]),
    "FedLESAM at 0": Local(lambda: [FedLESAM(0.0, "last")]),
    "FedGaLA at 0": Local(lambda: [FedGaLA(-1.0)]),
    "FedPer at 0": Local(lambda: [FedPer(0)]),
    "FedGA at 0": Local(lambda: [FedGA(0.0)]),
    "FedGA step at 0": Local(lambda: [FedGA(0.0, form="step")]),
    "FedGA global at 0": Local(lambda: [FedGA(0.0, measure_from="global")]),
    "FedGA at 0 on FedProx at 0": Local(lambda: [FedProx(0.0), FedGA(0.0)]),
    "GradAlign at 0": Local(lambda: [GradAlign(0.0)], ("none on all data",), full_batch=True),
    "SCAFFOLD on all data": Local(lambda: [SCAFFOLD()], ("none on all data",), full_batch=True),
    "stateless on all data": Local(lambda: [StatelessSCAFFOLD()], ("none on all data",), full_batch=True),
}
