"""Results of studies as tests make them by hand."""

from typing import Any

from lightning_fed.lab.studies.results import StudyResults, StudyRun, Trial
from lightning_fed.lab.studies.study import AxisValue, Name, Profile, Report, Study


def study_run(seed: int, curves: dict[str, dict[int, float]], chosen: dict[str, str] | None = None, **axes: str):
    last = max((at for curve in curves.values() for at in curve), default=0)
    named = {name.replace("_", " "): value for name, value in axes.items()}
    return StudyRun(named, seed, f"{seed}{'-'.join(axes.values())}", last, chosen or {}, curves)


def some_results() -> StudyResults:
    """Two rules on two data sets, two seeds, of which one rule has tuned an option more."""
    runs = []
    for rule, gain in (("FedAvg", 0.0), ("FedAvg, masked", 0.01)):
        for data in ("mnist", "fmnist"):
            for seed in (0, 13):
                high = round(0.7 + gain + seed / 1000 + (0.1 if data == "mnist" else 0), 3)
                curves = {"test/acc": {0: 0.1, 5: round(high - 0.1, 3), 10: high}, "val/loss": {10: 1 / 3}}
                chosen = {"model.optimizer.lr": "0.1"} | ({"aggregator.mask.threshold": "0.4"} if gain else {})
                runs.append(study_run(seed, curves, chosen, rule=rule, data_set=data))
    trials = (
        Trial(
            {"rule": "FedAvg", "data set": "mnist"},
            0,
            {"model.optimizer.lr": "0.1"},
            {"val/acc best": 0.5, "test/acc best, not to choose by": 0.9},
        ),
        Trial(
            {"rule": "FedAvg", "data set": "mnist"},
            0,
            {"aggregator.lr": "1"},
            {"val/acc best": 0.6, "test/acc best, not to choose by": 0.7},
        ),
    )
    return StudyResults("two_rules", "cpu", tuple(runs), trials)


def some_study(**report: Any) -> Study:
    """The study that such results are of; ``report`` are options of its report."""
    axes = {
        Name("rule"): {Name("FedAvg"): AxisValue(), Name("FedAvg, masked"): AxisValue()},
        Name("data set"): {Name("mnist"): AxisValue(), Name("fmnist"): AxisValue()},
    }
    options = {"columns": ["data set"], "baseline": {"rule": "FedAvg"}, **report}
    profiles = {"cpu": Profile(why="fewer rounds")}
    return Study("Two rules", "two_rules", axes=axes, seeds=[0, 13], report=Report(**options), profiles=profiles)
