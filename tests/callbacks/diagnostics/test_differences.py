"""How far clients differ: in their gradients, and beyond the distribution of training."""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed.aggregators import CGW, Aggregator, FedAvg
from lightning_fed.callbacks.diagnostics import DistributionGap, GradientDissimilarity
from lightning_fed.cli import FederatedCLI, main
from lightning_fed.client_algorithms import SCAFFOLD, FedGA
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.engines.full_gradient import FullGradient
from lightning_fed.errors import FederatedError
from lightning_fed.functional import gradient_spread
from tests.aggregators.quadratic import LR, Quadratic
from tests.callbacks.diagnostics.parts import (
    SIZES,
    Net,
    columns,
    gradients_by_hand,
    net_data,
    quadratic_data,
    trainer_for,
)
from tests.parts import Classifier, federated_data, federated_trainer, points

NAMES = ("gradient/dissimilarity", "gradient/distance", "gradient/distance_max", "gradient/norm")


def spread_by_hand(rows: np.ndarray, shares: np.ndarray | None = None) -> tuple[float, np.ndarray, float]:
    shares = np.full(len(rows), 1 / len(rows)) if shares is None else shares / shares.sum()
    mean = (shares[:, None] * rows).sum(axis=0)
    distances = np.array([np.sqrt(np.sum((row - mean) ** 2)) for row in rows])
    return 0.5 * float(np.sum(shares * distances**2)), distances, float(np.sqrt(np.sum(mean**2)))


# The second is longer than what is widened at a time.
@pytest.mark.parametrize(("n", "d"), [(7, 40), (3, (1 << 16) + 5), (1, 6)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_agrees_with_numpy(n: int, d: int, weighted: bool, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    rows = torch.tensor(rng.normal(size=(n, d)) + 2, dtype=dtype)
    weights = torch.tensor(rng.integers(1, 9, size=n)) if weighted else None
    found = gradient_spread(rows, weights)
    r, distances, norm = spread_by_hand(rows.numpy().astype(np.float64), None if weights is None else weights.numpy())
    assert found.dissimilarity.item() == pytest.approx(r, rel=1e-12)
    np.testing.assert_allclose(found.distances, distances, rtol=1e-12)
    assert found.norm.item() == pytest.approx(norm, rel=1e-12)
    assert found.dissimilarity.dtype == found.distances.dtype == torch.float64


def test_equal_gradients_and_a_single_one_are_at_distance_zero() -> None:
    row = torch.randn(50, generator=torch.Generator().manual_seed(0))
    for n in (1, 3, 10):
        r, distances, norm = gradient_spread(row.expand(n, -1), torch.arange(1, n + 1))
        assert (r.item(), distances.tolist()) == (0.0, [0.0] * n)
        assert norm.item() == pytest.approx(np.linalg.norm(row.double().numpy()))


def test_identities() -> None:
    rows = torch.tensor(np.random.default_rng(1).normal(size=(6, 30)))
    r, distances, norm = gradient_spread(rows)
    pairs = sum(float((a - b).square().sum()) for a in rows for b in rows)
    assert r.item() == pytest.approx(pairs / (4 * 6**2))  # a variance is that of the pairs
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    mixed = gradient_spread(rows[order])
    assert mixed.dissimilarity.item() == pytest.approx(r.item(), rel=1e-13)
    torch.testing.assert_close(mixed.distances, distances[order], rtol=1e-13, atol=0)
    assert gradient_spread(-3 * rows).dissimilarity.item() == pytest.approx(9 * r.item())
    assert r.item() >= 0.5 * distances.mean().item() ** 2
    twice = gradient_spread(rows, torch.tensor([2, 1, 1, 1, 1, 1]))
    assert twice.dissimilarity.item() == pytest.approx(gradient_spread(rows[[0, *range(6)]]).dissimilarity.item())
    assert norm.item() == pytest.approx(float(rows.mean(dim=0).norm()))
    assert torch.equal(rows, torch.tensor(np.random.default_rng(1).normal(size=(6, 30))))  # nothing is done in place


def test_long_gradients_that_are_alike_keep_their_difference() -> None:
    rows = torch.tensor([[1e12, 1.0], [1e12, 3.0]], dtype=torch.float64)
    r, distances, _ = gradient_spread(rows)
    assert r.item() == 0.5
    assert distances.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_three_quadratic_clients_over_three_rounds(weighting: Any, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, GradientDissimilarity(weighting=weighting, client=1), precision="64-true")
    trainer.fit(Quadratic(), quadratic_data())
    found = columns(trainer)
    assert found.keys() >= {*NAMES, "gradient/distance_client"}
    assert all(0 not in found[name] for name in NAMES)
    sizes = np.array(SIZES, dtype=np.float64)
    shares = np.full(3, 1 / 3) if weighting == "uniform" else sizes / sizes.sum()
    w = np.ones(2)
    for round in (1, 2, 3):
        gradients = gradients_by_hand(w)
        r, distances, norm = spread_by_hand(gradients, shares)
        expected = (r, shares @ distances, distances.max(), norm)
        assert [found[name][round] for name in NAMES] == pytest.approx(expected, rel=1e-10)
        assert found["gradient/distance_client"][round] == pytest.approx(distances[1], rel=1e-10)
        w = w - LR * sizes / sizes.sum() @ gradients  # the aggregator weights by samples in either case
    np.testing.assert_allclose(trainer.weights, w, rtol=1e-12)


class Models(FederatedCallback):
    """Keeps the model that each round starts from, and who trains."""

    def __init__(self) -> None:
        self.starts: list[np.ndarray] = []
        self.cohorts: list[list[int]] = []

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.starts.append(trainer.weights.numpy().copy())
        self.cohorts.append([client.id for client in cohort.clients])


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_over_all_clients_whoever_is_drawn(engine: Any, tmp_path: Path) -> None:
    models, plain = Models(), Models()
    options: Any = {"precision": "64-true", "clients_per_round": 1, "max_rounds": 4, "engine": engine}
    trainer = trainer_for(tmp_path, GradientDissimilarity(client=0, over="all"), models, **options)
    trainer.fit(Quadratic(), quadratic_data())
    without = trainer_for(tmp_path / "plain", plain, **options)
    without.fit(Quadratic(), quadratic_data())
    assert torch.equal(trainer.weights, without.weights)
    assert trainer.totals == without.totals
    found = columns(trainer)
    assert len({tuple(cohort) for cohort in models.cohorts}) > 1
    for round, w in enumerate(models.starts, 1):
        r, distances, norm = spread_by_hand(gradients_by_hand(w))
        expected = (r, distances.mean(), distances.max(), norm)
        assert [found[name][round] for name in NAMES] == pytest.approx(expected, rel=1e-10)
        assert found["gradient/distance_client"][round] == pytest.approx(distances[0], rel=1e-10)


class Counted(FullGradient):
    """Notes whose gradient is computed, and when."""

    calls: list[tuple[int, int]] = []

    def compute(self, client: Any, out: Any) -> Any:
        self.calls.append((client.round, client.id))
        return super().compute(client, out)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The (round, client) of every gradient over a client's full data."""
    monkeypatch.setattr(Counted, "calls", [])
    monkeypatch.setattr("lightning_fed.engines.start_gradients.FullGradient", Counted)
    return Counted.calls


def test_only_due_rounds_are_measured(calls: list[tuple[int, int]], tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, GradientDissimilarity(2), max_rounds=5)
    trainer.fit(Quadratic(), quadratic_data())
    assert all(list(columns(trainer)[name]) == [2, 4] for name in NAMES)
    assert calls == [(round, client) for round in (2, 4) for client in (0, 1, 2)]


def test_rounds_that_are_not_due_log_nothing_though_another_part_asks(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, GradientDissimilarity(2), FedGA(0.1))
    trainer.fit(Quadratic(), quadratic_data())
    assert all(list(columns(trainer)[name]) == [2] for name in NAMES)


def test_a_client_of_its_own_is_logged_when_it_is_drawn(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, GradientDissimilarity(client=2), max_rounds=6, clients_per_round=2)
    drawn: dict[int, list[int]] = {}
    trainer.sampler.sample = lambda round, *_: drawn.setdefault(round, [2, 0] if round % 3 else [0, 1])
    trainer.fit(Quadratic(), quadratic_data())
    found = columns(trainer)
    assert list(found["gradient/distance_client"]) == [1, 2, 4, 5]
    # Two clients of equal weight are equally far from their mean.
    assert found["gradient/distance_client"][1] == pytest.approx(found["gradient/distance_max"][1])


@pytest.mark.parametrize(
    ("aggregator", "algorithms", "mode"),
    [
        (FedAvg, [], "eval"), (FedAvg, [], "train"), (CGW, [], "train"), (FedAvg, [lambda: SCAFFOLD("I")], "train"),
        (FedAvg, [lambda: FedGA(0.1), lambda: SCAFFOLD("I")], "eval"),
    ],
    ids=["eval", "train", "CGW", "SCAFFOLD", "FedGA-SCAFFOLD"],
)  # fmt: skip
def test_training_and_costs_are_the_same_with_and_without(
    aggregator: type[Aggregator], algorithms: list[Any], mode: Any, tmp_path: Path
) -> None:
    runs = {}
    for name, diagnostics in (("without", []), ("with", [GradientDissimilarity(2)])):
        callbacks = [aggregator(), *(make() for make in algorithms), *diagnostics]
        trainer = trainer_for(tmp_path / name, *callbacks, clients_per_round=3, full_gradient_mode=mode)
        torch.manual_seed(0)
        net = Net()
        trainer.fit(net, net_data())
        kept = {key: value for key, value in columns(trainer).items() if not key.startswith(("gradient/", "time/"))}
        runs[name] = (net.state_dict(), kept)
    (plain, plain_columns), (measured, measured_columns) = runs.values()
    for key, value in plain.items():
        assert torch.equal(measured[key], value), key
    assert plain_columns.keys() >= {"train/loss", "train/acc", "comm/rounds", "comm/bytes_up", "gradients", "samples"}
    assert measured_columns == plain_columns


def test_gradients_that_others_ask_for_are_computed_once(calls: list[tuple[int, int]], tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, FedGA(0.05), SCAFFOLD("I"), GradientDissimilarity(), max_rounds=2)
    trainer.fit(Quadratic(), quadratic_data())
    assert calls == [(round, client) for round in (1, 2) for client in (0, 1, 2)]
    found, gradients = columns(trainer), gradients_by_hand(np.ones(2))
    assert found["gradient/dissimilarity"][1] == pytest.approx(spread_by_hand(gradients)[0], rel=1e-5)
    assert found["comm/rounds"][2] == 4.0  # FedGA's exchange counts


class BadInEval(Quadratic):
    """Trains well; the loss of client 1 is not finite in eval mode, where full gradients are taken."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if self.training or batch[0][0] != 2.0 else loss * torch.nan


@pytest.mark.filterwarnings("ignore:Client 1 diverged")
@pytest.mark.parametrize(("algorithms", "trained"), [([], 3.0), ([SCAFFOLD], 2.0)])
def test_a_gradient_that_is_not_finite_is_left_out_of_the_figures_but_not_of_training(
    algorithms: list[Any], trained: float, tmp_path: Path
) -> None:
    """Whoever is left out is left out by what an algorithm asks for, with and without a diagnostic beside it."""
    kept = []
    for name, diagnostics in (("plain", []), ("measured", [GradientDissimilarity()])):
        callbacks = [*(make("I") for make in algorithms), *diagnostics]
        trainer = trainer_for(tmp_path / name, *callbacks, max_diverged=0.4)
        trainer.fit(BadInEval(), quadratic_data())
        found = columns(trainer)
        kept.append((trainer.weights, {key: found[key] for key in found if not key.startswith(("gradient/", "time/"))}))
    (plain, plain_columns), (measured, measured_columns) = kept
    assert torch.equal(plain, measured)
    assert plain_columns == measured_columns
    assert set(plain_columns["clients/trained"].values()) == {trained}
    r, distances, _ = spread_by_hand(gradients_by_hand(np.ones(2))[[0, 2]])
    assert found["gradient/dissimilarity"][1] == pytest.approx(r, rel=1e-5)
    assert found["gradient/distance_max"][1] == pytest.approx(distances.max(), rel=1e-5)


@pytest.mark.slow
def test_the_command_line_finds_it_and_the_report_puts_the_least_dissimilar_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    quickstart = Path(__file__).resolve().parents[3] / "configs" / "quickstart.yaml"
    words = ["fit", f"--config={quickstart}", "--trainer.callbacks=GradientDissimilarity", "--trainer.logger=[]"]
    words += ["--trainer.callbacks.every_n_rounds=2", "--trainer.max_rounds=2", "--trainer.clients_per_round=3"]
    for name, classes in (("skewed", "2"), ("mixed", "10")):
        place = [f"--trainer.default_root_dir={tmp_path}", f"--trainer.name={name}"]
        FederatedCLI([*words, *place, f"--data.partitioner.classes_per_client={classes}"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main(["report", str(tmp_path), "--metric", "gradient/dissimilarity"])
    assert end.value.code == 0
    lines = capsys.readouterr().out.splitlines()
    with (tmp_path / "report-gradient_dissimilarity.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["FedAvg (mixed)", "FedAvg (skewed)"]
    assert 0 < float(rows[0]["final_mean"]) < float(rows[1]["final_mean"])
    assert not any("%" in line for line in lines)


@pytest.mark.parametrize(
    "options", [{"every_n_rounds": 0}, {"every_n_rounds": 1.5}, {"every_n_rounds": True}, {"weighting": "loss"}]
)
def test_options_out_of_range_are_refused(options: Any) -> None:
    with pytest.raises(FederatedError, match=f"`{next(iter(options))}` of GradientDissimilarity"):
        GradientDissimilarity(**options)


@pytest.mark.parametrize("client", [-1, 3])
def test_a_client_that_is_not_there_is_refused(client: int, tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"an id in \[0, 3\)"):
        trainer_for(tmp_path, GradientDissimilarity(client=client)).fit(Quadratic(), quadratic_data())


def test_two_that_would_log_under_the_same_names_are_refused(tmp_path: Path) -> None:
    two = [GradientDissimilarity(), GradientDissimilarity(weighting="samples")]
    with pytest.raises(FederatedError, match="once, got GradientDissimilarity twice"):
        trainer_for(tmp_path, *two).fit(Quadratic(), quadratic_data())


class Tested(Classifier):
    def test_step(self, batch: Any, *_: Any) -> None:
        self.log("test/loss", self.loss(batch))


def run(folder: Path, sets: Any, gap: DistributionGap) -> Any:
    torch.manual_seed(0)
    kept: dict[str, Any] = {"logger": [], "enable_checkpointing": True}
    trainer = federated_trainer(folder, gap, max_rounds=3, check_test_every_n_rounds=2, **kept)
    trainer.fit(Tested(), federated_data(test_dataset=sets))
    return trainer


def test_each_set_has_a_gap_in_rounds_that_are_tested(tmp_path: Path) -> None:
    sets = {"test": points(9, seed=1), "unseen": points(7, seed=2), "rotated": points(8, seed=3)}
    trainer = run(tmp_path, sets, DistributionGap())
    found = columns(trainer)
    tested = list(found["test/loss/test"])
    assert 1 not in tested
    for name in ("unseen", "rotated"):
        expected = [found["test/loss/test"][round] - found[f"test/loss/{name}"][round] for round in tested]
        assert list(found[f"gap/loss/{name}"]) == tested
        assert list(found[f"gap/loss/{name}"].values()) == pytest.approx(expected, abs=1e-6)
    assert "gap/loss/test" not in found
    others = run(tmp_path / "other", sets, DistributionGap("rotated"))
    assert set(columns(others)) >= {"gap/loss/test", "gap/loss/unseen"}
    assert torch.equal(others.weights, trainer.weights)


def test_held_out_samples_of_clients_are_the_reference_where_there_are_any(tmp_path: Path) -> None:
    sets = {"clients": points(9, seed=1), "test": points(7, seed=2)}
    found = columns(run(tmp_path, sets, DistributionGap()))
    assert "gap/loss/test" in found
    assert "gap/loss/clients" not in found


@pytest.mark.parametrize(
    ("sets", "reference", "says"),
    [
        ({"": None}, None, "one of them clients or test, got one without a name"),
        ({"a": None, "b": None}, None, "got a, b"),
        ({"test": None, "b": None}, "c", "one of them c, got b, test"),
    ],
)
def test_without_two_sets_there_is_a_sentence(tmp_path: Path, sets: Any, reference: Any, says: str) -> None:
    sets = points(5) if "" in sets else {name: points(5) for name in sets}
    with pytest.raises(FederatedError, match=f"Expected several test sets for DistributionGap, .*{says}"):
        run(tmp_path, sets, DistributionGap(reference))
