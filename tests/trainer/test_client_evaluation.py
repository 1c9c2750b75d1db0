"""A metric that has no value on one client's samples is NaN there, and left out of what is said of all clients."""

import csv
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch import LightningModule
from scipy.stats import spearmanr
from sklearn.metrics import average_precision_score, explained_variance_score, r2_score, roc_auc_score
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import Metric, MetricCollection
from torchmetrics import classification as c

from lightning_fed.callbacks.diagnostics import ClientEvaluation
from lightning_fed.data import FederatedDataModule
from tests.callbacks.diagnostics.parts import columns, trainer_for
from tests.parts import BySizes

NAN = float("nan")


class Scored(LightningModule):
    """Its predictions are its inputs, so that each client's metrics can be written down."""

    def __init__(self, metric: Any, how: str = "object") -> None:
        super().__init__()
        self.weight, self.metric, self.how = nn.Parameter(torch.zeros(1)), metric, how

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.how == "forward":
            self.log("val/m", self.metric(*batch))
            return
        self.metric.update(*batch)
        if self.how == "object":
            self.log_dict(
                dict(self.metric.items()) if isinstance(self.metric, MetricCollection) else {"m": self.metric}
            )

    def on_validation_epoch_end(self) -> None:
        if self.how == "hook":
            found = self.metric.compute()
            self.log_dict(found if isinstance(found, dict) else {"m": found})
            self.metric.reset()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def evaluate(
    folder: Path, metric: Any, clients: list[tuple[Any, Any]], how: str = "object", **options: Any
) -> tuple[dict[str, list[float]], dict[str, dict[int, float]]]:
    """Values of each client, by name, and the columns of one round."""
    x, y = (torch.cat([torch.as_tensor(part[place]) for part in clients]) for place in (0, 1))
    sizes = [len(part[1]) for part in clients]
    data = FederatedDataModule(
        TensorDataset(x, y), BySizes(*sizes), num_clients=len(clients), val_dataset=TensorDataset(x, y), batch_size=4,
        class_labels=False,
    )  # fmt: skip
    trainer = trainer_for(folder, ClientEvaluation(1, **options), max_rounds=1)
    trainer.fit(Scored(metric, how), data)
    with (trainer.run.path / "clients.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = rows[0].keys() - {"round", "client", "samples", "classes"}
    return {name: [float(row[name]) for row in rows] for name in names}, columns(trainer)


NUMBERS = [([0.1, 0.9, 0.4], [0.0, 1.0, 0.7]), ([0.3], [0.5]), ([0.2, 0.5, 0.1, 0.9, 0.3], [0.7] * 5),
           ([1.0, 0.2], [0.4, 0.1])]  # fmt: skip
LABELS = [([0.1, 0.8, 0.3, 0.6], [0, 1, 1, 0]), ([0.4, 0.7], [0, 0]), ([0.4, 0.7], [1, 1]), ([0.2, 0.9], [0, 1])]


def of(score: Any, clients: list[Any]) -> list[float]:
    """What others compute for the first and the last client."""
    return [float(score(np.array(clients[i][1]), np.array(clients[i][0]))) for i in (0, 3)]


r2, variance = of(r2_score, NUMBERS), of(explained_variance_score, NUMBERS)
linear = of(lambda y, x: np.corrcoef(x, y)[0, 1], NUMBERS)
ranks = of(lambda y, x: spearmanr(x, y)[0], NUMBERS)
auc, precision = of(roc_auc_score, LABELS), of(average_precision_score, LABELS)


class Picky(Metric):
    """Fails, as its author wrote it, with fewer than two samples, and divides by their spread."""

    def __init__(self, error: type[Exception]) -> None:
        super().__init__()
        self.error = error
        self.add_state("seen", torch.tensor(0))

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.seen = self.seen + len(target)

    def compute(self) -> Tensor:
        if self.seen < 2:
            raise self.error("at least two")
        return self.seen.float()


class Own(c.BinaryPrecisionRecallCurve):
    """Wraps a function of torchmetrics, which warns."""

    def compute(self) -> Any:
        scores, labels = (torch.cat(part) for part in (self.preds, self.target))
        return torchmetrics.functional.auroc(scores, labels, task="binary")


class Functional(Metric):
    """Keeps samples in lists of its own, and asks a function of torchmetrics, which warns."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("scores", [])
        self.add_state("labels", [])

    def update(self, preds: Tensor, target: Tensor) -> None:
        self.scores.append(preds)
        self.labels.append(target)

    def compute(self) -> Tensor:
        return torchmetrics.functional.auroc(torch.cat(self.scores), torch.cat(self.labels), task="binary")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["object", "hook"])
@pytest.mark.parametrize(
    ("metric", "clients", "expected"),
    [
        (torchmetrics.R2Score, NUMBERS, [r2[0], NAN, NAN, r2[1]]),
        (torchmetrics.ExplainedVariance, NUMBERS, [variance[0], NAN, NAN, variance[1]]),
        (torchmetrics.RelativeSquaredError, NUMBERS, [1 - r2[0], NAN, NAN, 1 - r2[1]]),
        (torchmetrics.SpearmanCorrCoef, NUMBERS, [ranks[0], NAN, NAN, ranks[1]]),
        (torchmetrics.PearsonCorrCoef, NUMBERS, [linear[0], NAN, NAN, linear[1]]),
        (lambda: Picky(ValueError), NUMBERS, [3.0, NAN, 5.0, 2.0]),
        (lambda: Picky(RuntimeError), NUMBERS, [3.0, NAN, 5.0, 2.0]),
        (c.BinaryAUROC, LABELS, [auc[0], NAN, NAN, auc[1]]),
        (lambda: c.BinaryAUROC(thresholds=200), LABELS, [auc[0], NAN, NAN, auc[1]]),
        (c.BinaryAveragePrecision, LABELS, [precision[0], NAN, 1.0, precision[1]]),
        (lambda: c.BinaryAveragePrecision(thresholds=200), LABELS, [precision[0], NAN, 1.0, precision[1]]),
        (Functional, LABELS, [auc[0], NAN, NAN, auc[1]]),
        (Own, LABELS, [auc[0], NAN, NAN, auc[1]]),
    ],
    ids=["r2", "variance", "relative", "spearman", "pearson", "value error", "runtime error", "auroc", "binned auroc",
         "precision", "binned precision", "function", "subclass"],
)  # fmt: skip
def test_a_client_without_a_value_is_nan_and_left_out(
    metric: Any, clients: list[Any], expected: list[float], how: str, tmp_path: Path
) -> None:
    found, logged = evaluate(tmp_path, metric(), clients, how)
    assert found["m"] == pytest.approx(expected, rel=1e-4, nan_ok=True)
    having = [value for value in expected if not np.isnan(value)]
    sizes = [len(part[1]) for part, value in zip(clients, expected, strict=True) if not np.isnan(value)]
    assert logged["per_client/m"][1] == pytest.approx(np.mean(having), rel=1e-4)
    assert logged["per_client/m_weighted"][1] == pytest.approx(np.average(having, weights=sizes), rel=1e-4)
    assert logged["per_client/m_std"][1] == pytest.approx(np.std(having), rel=1e-4, abs=1e-5)
    assert logged["per_client/m_missing"][1] == len(expected) - len(having)


SCORES = [[0.7, 0.2, 0.1], [0.3, 0.5, 0.2], [0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.1, 0.2, 0.7], [0.6, 0.1, 0.3]]
CLASSES = [(SCORES, [0, 1, 2, 1, 2, 0]), (SCORES, [0, 1, 1, 1, 0, 0]), (SCORES, [2] * 6)]


def by_class(score: Any, labels: list[int]) -> list[float]:
    return [score(np.array(labels) == k, np.array(SCORES)[:, k]) for k in range(3)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("thresholds", [None, 200])
@pytest.mark.parametrize(
    ("kind", "score"), [(c.MulticlassAUROC, roc_auc_score), (c.MulticlassAveragePrecision, average_precision_score)]
)
def test_a_class_that_a_client_does_not_have(kind: Any, score: Any, thresholds: Any, tmp_path: Path) -> None:
    found, _ = evaluate(tmp_path / "macro", kind(3, thresholds=thresholds), CLASSES)
    assert found["m"] == pytest.approx([np.mean(by_class(score, CLASSES[0][1])), NAN, NAN], rel=1e-4, nan_ok=True)
    weighted, _ = evaluate(tmp_path / "weighted", kind(3, average="weighted", thresholds=thresholds), CLASSES)
    values = by_class(score, CLASSES[1][1])[:2]
    last = 1.0 if score is average_precision_score else NAN  # all samples of one class
    assert weighted["m"][1:] == pytest.approx([np.mean(values), last], rel=1e-4, nan_ok=True)


@pytest.mark.filterwarnings("ignore")
def test_values_by_class_are_nan_one_by_one(tmp_path: Path) -> None:
    metric = torchmetrics.ClasswiseWrapper(c.MulticlassAUROC(3, average=None))
    found, _ = evaluate(tmp_path, metric, CLASSES, "hook")
    for name, column in zip(
        sorted(found), zip(*([*by_class(roc_auc_score, CLASSES[0][1])], [NAN] * 3), strict=True), strict=True
    ):
        assert found[name][0] == pytest.approx(column[0], rel=1e-4)
    present = by_class(roc_auc_score, CLASSES[1][1])
    assert [found[name][1] for name in sorted(found)] == pytest.approx([*present[:2], NAN], rel=1e-4, nan_ok=True)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("how", ["object", "hook"])
def test_of_a_collection_each_metric_counts_by_itself(how: str, tmp_path: Path) -> None:
    metrics = MetricCollection([c.BinaryAUROC(), c.BinaryAveragePrecision(), c.BinaryAccuracy()])
    found, logged = evaluate(tmp_path, metrics, LABELS, how)
    assert found["BinaryAUROC"] == pytest.approx([auc[0], NAN, NAN, auc[1]], nan_ok=True)
    assert found["BinaryAveragePrecision"] == pytest.approx([precision[0], NAN, 1.0, precision[1]], nan_ok=True)
    assert found["BinaryAccuracy"] == [0.5, 0.5, 0.5, 1.0]
    assert logged["per_client/BinaryAUROC_missing"][1] == 2
    assert "per_client/BinaryAccuracy_missing" not in logged


@pytest.mark.filterwarnings("ignore")
def test_a_batch_without_a_value_is_nan_too(tmp_path: Path) -> None:
    found, _ = evaluate(tmp_path, c.BinaryAUROC(), LABELS, "forward")
    assert found["m"] == pytest.approx([auc[0], NAN, NAN, auc[1]], nan_ok=True)


@pytest.mark.filterwarnings("ignore")
def test_the_metric_of_all_stays_what_it_is(tmp_path: Path) -> None:
    for metric, clients in (
        (torchmetrics.R2Score(), NUMBERS),
        (c.BinaryAUROC(), LABELS),
        (c.BinaryAUROC(), LABELS[1:2]),
    ):
        twin = metric.clone()
        twin.update(*(torch.cat([torch.as_tensor(part[place]) for part in clients]) for place in (0, 1)))
        _, logged = evaluate(tmp_path, metric, clients)
        assert logged["m"][1] == pytest.approx(float(twin.compute()))


@pytest.mark.filterwarnings("ignore")
def test_where_no_client_has_a_value_there_is_none(tmp_path: Path) -> None:
    _, logged = evaluate(tmp_path, torchmetrics.R2Score(), [NUMBERS[0]] * 2, num_clients=1)
    assert "per_client/m_missing" not in logged
    found, logged = evaluate(tmp_path, c.BinaryAUROC(), LABELS[1:3])
    assert np.isnan(found["m"]).all()
    assert np.isnan(logged["per_client/m"][1])
    assert logged["per_client/m_missing"][1] == 2


def test_it_is_said_once_how_many_and_why(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        evaluate(tmp_path, Picky(ZeroDivisionError), NUMBERS, participation=True)
    texts = [str(each.message) for each in said]
    assert texts.count("Picky has no value for some clients, as it fails on their samples: at least two") == 1
    assert texts.count(
        "Some clients have no value of a metric (per_client/m_missing: 1): it is NaN in clients.csv, and means and "
        "spread are over the other clients."
    ) == 1  # fmt: skip


def test_other_failures_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="at least two"):
        evaluate(tmp_path, Picky(TypeError), NUMBERS)
