"""Agreement and geometry of the clients' updates, against NumPy and with every engine."""

import csv
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import CGW, FedAdam, FedAvg
from lightning_fed.callbacks.diagnostics import UpdateAgreement, UpdateGeometry, updates
from lightning_fed.client_algorithms import SCAFFOLD
from lightning_fed.core.files import WriteError
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from lightning_fed.functional.geometry import direction_cosines
from lightning_fed.masks import SignAgreement
from tests.callbacks.diagnostics.parts import Net, net_data, trainer_for
from tests.callbacks.diagnostics.test_differences import columns

OURS = ("agreement/", "update/")


class Keeps(FederatedCallback):
    """Keeps every update, and the global model before and after each round."""

    def __init__(self) -> None:
        self.updates: dict[int, list[np.ndarray]] = {}
        self.models: list[np.ndarray] = []

    def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
        self.models.append(trainer.weights.double().numpy().copy())

    def on_client_entered(self, trainer: Any, pl_module: Any, update: Any) -> None:
        self.updates.setdefault(trainer.round, []).append(update.delta.double().numpy().copy())

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.models.append(trainer.weights.double().numpy().copy())


class WithoutMetric(Net):
    """Updates no metric, which many clients at once could not keep apart."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


def run(folder: Path, *callbacks: Callback, **options: Any) -> tuple[FederatedTrainer, dict[str, dict[int, float]]]:
    trainer = trainer_for(folder, *callbacks, **{"precision": "64-true", **options})
    torch.manual_seed(0)
    trainer.fit(Net(), net_data())
    return trainer, columns(trainer)


def by_hand(keeps: Keeps, threshold: float, lr: float) -> dict[str, dict[int, float]]:
    """The columns by round, from the whole matrix of updates; all clients of 50 samples weigh 12 or 13 of them."""
    found: dict[str, dict[int, float]] = {}
    masks: list[np.ndarray] = []
    sizes = np.array([13, 13, 12, 12])
    for round, rows in keeps.updates.items():
        matrix = np.stack(rows)
        share = np.abs(np.sign(matrix).mean(axis=0))
        agreed = share >= threshold - 1e-12
        masks.append(np.where(agreed, 1.0, share))
        mean = sizes / sizes.sum() @ matrix
        norms = np.linalg.norm(matrix, axis=1)
        cosines = (matrix / norms[:, None]) @ (matrix / norms[:, None]).T
        values = {
            "agreement/mean": share.mean(),
            "agreement/below": (~agreed).mean(),
            "agreement/below_by_chance": sum(
                abs(sum(signs)) < threshold * len(rows) - 1e-12 for signs in product((-1, 1), repeat=len(rows))
            )
            / 2 ** len(rows),
            "agreement/mask": masks[-1].mean(),
            "agreement/through": np.linalg.norm(masks[-1] * mean) / np.linalg.norm(mean),
            "agreement/progress": (masks[-1] * mean) @ mean / (mean @ mean),
            "agreement/cos": (masks[-1] * mean) @ mean / np.linalg.norm(masks[-1] * mean) / np.linalg.norm(mean),
            "agreement/least": np.mean(masks, axis=0).min(),
            "update/norm": norms.mean(),
            "update/norm_max": norms.max(),
            "update/norm_mean": np.linalg.norm(mean),
            "update/cosine": cosines[np.triu_indices(len(rows), 1)].mean(),
            "update/cosine_to_mean": (matrix @ mean / norms / np.linalg.norm(mean)).mean(),
            "update/step": np.linalg.norm(keeps.models[round] - keeps.models[round - 1]),
        }
        if round > 1:
            both = (masks[-1] == 1) & (masks[-2] == 1)
            values["agreement/overlap"] = both.sum() / ((masks[-1] == 1) | (masks[-2] == 1)).sum()
        for name, value in values.items():
            found.setdefault(name, {})[round] = float(value)
    return found


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("make", [FedAvg, lambda: FedAvg(mask=SignAgreement(0.8)), lambda: FedAdam(lr=0.1)])
def test_they_are_what_the_matrix_of_updates_says(tmp_path: Path, make: Any, threshold: float) -> None:
    keeps = Keeps()
    _, found = run(tmp_path, make(), keeps, UpdateAgreement(threshold), UpdateGeometry())
    expected = by_hand(keeps, threshold, 1.0)
    assert {name for name in found if name.startswith(OURS)} == expected.keys()
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-9), name


def test_layers_have_columns_of_their_own(tmp_path: Path) -> None:
    keeps = Keeps()
    trainer, found = run(tmp_path, keeps, UpdateAgreement(0.6, by_layer=True))
    names = [name for name, _ in trainer.lightning_module.named_parameters()]
    assert {f"agreement/mean/{name}" for name in names} < found.keys()
    share = np.abs(np.sign(np.stack(keeps.updates[2])).mean(axis=0))[:32]
    assert found["agreement/mean/layers.0.weight"][2] == pytest.approx(share.mean())
    assert found["agreement/below/layers.0.weight"][2] == pytest.approx((share < 0.6).mean())


@pytest.mark.parametrize("parts", [[FedAvg], [CGW], [lambda: FedAvg(mask=SignAgreement(0.4)), lambda: SCAFFOLD("II")]])
@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_training_is_the_same_with_and_without(tmp_path: Path, parts: list[Any], engine: str) -> None:
    kept = []
    for name, measured in (("plain", []), ("measured", [UpdateAgreement(by_layer=True), UpdateGeometry()])):
        callbacks = [*(make() for make in parts), *measured]
        trainer = trainer_for(tmp_path / name, *callbacks, max_rounds=2, engine=engine)
        torch.manual_seed(0)
        trainer.fit(WithoutMetric(), net_data())
        found = columns(trainer)
        kept.append((trainer.weights, {k: v for k, v in found.items() if not k.startswith((*OURS, "time/"))}))
    assert torch.equal(kept[0][0], kept[1][0])
    assert kept[0][1] == kept[1][1]


def test_engines_agree(tmp_path: Path) -> None:
    found = []
    for engine in ("sequential", "vectorized"):
        torch.manual_seed(0)
        module = WithoutMetric()
        module.layers[3].p = 0.0  # what is drawn differs between the engines
        trainer = trainer_for(tmp_path / engine, UpdateAgreement(0.5), UpdateGeometry(), engine=engine, precision=64)
        trainer.fit(module, net_data())
        found.append({name: values for name, values in columns(trainer).items() if name.startswith(OURS)})
    assert len(found[0]) == 15
    for name, values in found[0].items():
        assert found[1][name] == pytest.approx(values, rel=1e-9), name


def test_rounds_that_are_not_due_log_nothing(tmp_path: Path) -> None:
    _, found = run(tmp_path, UpdateAgreement(every_n_rounds=2), UpdateGeometry(every_n_rounds=3))
    assert list(found["agreement/mean"]) == [2]
    assert list(found["update/cosine"]) == [3]
    assert "agreement/overlap" not in found


def test_one_client_agrees_with_itself(tmp_path: Path) -> None:
    _, found = run(tmp_path, UpdateAgreement(), UpdateGeometry(), clients_per_round=1)
    assert found["agreement/below"][1] == pytest.approx(1 - found["agreement/mean"][1])
    assert found["update/cosine_to_mean"][1] == pytest.approx(1.0)
    assert found["update/norm"] == pytest.approx(found["update/norm_mean"])
    assert "update/cosine" not in found


def test_a_resumed_run_goes_on_with_the_same_columns(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"enable_checkpointing": True, "name": "run"}
    _, whole = run(tmp_path / "whole", UpdateAgreement(0.5), max_rounds=3, **kept)
    first, _ = run(tmp_path, UpdateAgreement(0.5), max_rounds=1, **kept)
    trainer = trainer_for(tmp_path, UpdateAgreement(0.5), max_rounds=3, precision="64-true", **kept)
    trainer.fit(Net(), net_data(), ckpt_path=str(first.run.checkpoints / "last.ckpt"))
    found = columns(trainer)
    for name in ("agreement/overlap", "agreement/least"):
        assert found[name] == whole[name]


def table(trainer: FederatedTrainer) -> list[dict[str, str]]:
    with (trainer.run.path / "updates.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_clients_have_a_table_of_their_own(tmp_path: Path) -> None:
    keeps = Keeps()
    trainer, _ = run(tmp_path, keeps, UpdateGeometry(2, by_client=True), clients_per_round=3, max_rounds=4)
    rows = table(trainer)
    assert [int(row["round"]) for row in rows] == [2] * 3 + [4] * 3
    assert list(rows[0]) == ["round", "client", "norm"]
    norms = [np.linalg.norm(update) for round in (2, 4) for update in keeps.updates[round]]
    assert [float(row["norm"]) for row in rows] == pytest.approx(norms)


class KeepsGradients(CGW):
    def server_step(self, update: Any) -> torch.Tensor:
        self.rows = update.gradients.double().numpy().copy()
        return super().server_step(update)


def test_corrective_weights_are_in_the_table(tmp_path: Path) -> None:
    aggregator = KeepsGradients(0.1)
    trainer, _ = run(tmp_path, aggregator, UpdateGeometry(by_client=True), max_rounds=2)
    rows = table(trainer)[4:]
    products = aggregator.rows @ aggregator.rows.sum(axis=0)
    losses, norms = aggregator._losses.numpy(), np.linalg.norm(aggregator.rows, axis=1)
    bound = 0.1 * (losses / norms).min()
    weights = bound * (products / norms**2) / np.sqrt(((products / norms) ** 2).sum())
    assert [float(row["cgw_product"]) for row in rows] == pytest.approx(products)
    assert [float(row["cgw_weight"]) for row in rows] == pytest.approx(weights)
    assert [float(row["cgw_sign"]) for row in rows] == np.sign(weights).tolist()
    trainer, _ = run(tmp_path / "off", CGW(0.0), UpdateGeometry(by_client=True), max_rounds=1)
    assert {row["cgw_weight"] for row in table(trainer)} == {""}


def test_a_resumed_run_keeps_the_rows_of_finished_rounds(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"enable_checkpointing": True, "name": "run", "precision": "64-true"}
    whole, _ = run(tmp_path / "whole", UpdateGeometry(by_client=True), max_rounds=3, **kept)
    first, _ = run(tmp_path, UpdateGeometry(by_client=True), max_rounds=1, **kept)
    path = first.run.path / "updates.csv"
    path.write_text(path.read_text() + "2,0,7.0\n")  # cut off after its checkpoint
    trainer = trainer_for(tmp_path, UpdateGeometry(by_client=True), max_rounds=3, **kept)
    trainer.fit(Net(), net_data(), ckpt_path="last")
    assert trainer.run.path == first.run.path
    assert table(trainer) == table(whole)


def test_a_table_that_cannot_be_written_is_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise WriteError("no space is left")

    monkeypatch.setattr(updates, "append_whole", refuse)
    with pytest.warns(UserWarning, match=r"goes on without updates\.csv: no space") as caught:
        trainer, found = run(tmp_path, UpdateGeometry(by_client=True))
    assert sum("updates.csv" in str(warning.message) for warning in caught) == 1
    assert list(found["update/norm"]) == [1, 2, 3]
    assert table(trainer) == []


def test_cosines_of_a_few_vectors() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.0, 2.0], [-1.0, 0.0]], dtype=torch.float64)
    directions = (rows / rows.norm(dim=1, keepdim=True)).sum(0)
    pairs, to_mean = direction_cosines(directions, 3, torch.tensor([0.0, 5.0], dtype=torch.float64))
    assert pairs.item() == pytest.approx((0.8 - 0.6 + 0.0) / 3)
    assert to_mean.item() == pytest.approx((0.8 + 1.0 + 0.0) / 3)
    assert direction_cosines(directions, 1, directions)[0].isnan()


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: UpdateAgreement(1.5), "threshold"),
        (lambda: UpdateAgreement(every_n_rounds=0), "every_n_rounds"),
        (lambda: UpdateGeometry(every_n_rounds=0), "every_n_rounds"),
    ],
)
def test_options_out_of_range_are_refused(make: Any, word: str) -> None:
    with pytest.raises(FederatedError, match=f"`{word}` of Update"):
        make()


@pytest.mark.parametrize("kind", [UpdateAgreement, UpdateGeometry])
def test_two_that_would_log_under_the_same_names_are_refused(tmp_path: Path, kind: Any) -> None:
    with pytest.raises(FederatedError, match=f"once, got {kind.__name__} twice"):
        run(tmp_path, kind(), kind())
