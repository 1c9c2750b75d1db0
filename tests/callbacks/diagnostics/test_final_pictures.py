"""Tables and pictures at the end of a run, against NumPy, and what becomes of a run that cannot have them."""

import csv
import errno
import math
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed.callbacks.diagnostics import (
    ClientEvaluation,
    FinalPictures,
    UpdateAgreement,
    final_pictures,
)
from lightning_fed.callbacks.diagnostics.final_pictures import Predictions
from lightning_fed.core.files import WriteError, writing
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.core.updates import ReducedUpdate
from lightning_fed.data import IID, FederatedDataModule
from lightning_fed.errors import FederatedError
from tests.callbacks.diagnostics.parts import columns, trainer_for
from tests.parts import CLASSES, Classifier, OneByOne, federated_data, points

IMAGE = (1, 6, 6)


def images(count: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    return TensorDataset(
        torch.rand(count, *IMAGE, generator=generator), torch.randint(0, CLASSES, (count,), generator=generator)
    )


def image_data(**options: Any) -> FederatedDataModule:
    given = {"test_dataset": images(40, 1), "batch_size": 8, "eval_batch_size": 16, **options}
    return FederatedDataModule(images(30), IID(), num_clients=3, **given)


class Net(Classifier):
    """BatchNorm and dropout, which a careless extra pass would disturb."""

    def __init__(self, features: int = 36) -> None:
        layers = (nn.Linear(features, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES))
        super().__init__(nn.Sequential(nn.Flatten(), *layers))


def net(*args: Any) -> Net:
    torch.manual_seed(0)
    return Net(*args)


def confusion_by_hand(model: nn.Module, data: TensorDataset) -> np.ndarray:
    x, y = data.tensors
    found = np.zeros((CLASSES, CLASSES), dtype=int)
    with torch.no_grad():
        np.add.at(found, (y.numpy(), model.cpu().eval()(x).argmax(1).numpy()), 1)
    return found


def table(trainer: Any, name: str) -> list[list[str]]:
    with (trainer.run.path / name).open(newline="") as file:
        return list(csv.reader(file))


def written(trainer: Any) -> set[str]:
    return {file.name for file in trainer.run.path.iterdir() if file.suffix in (".png", ".csv")} - {"metrics.csv"}


@pytest.mark.parametrize("batch", [1, 7, 50])
def test_predictions_are_counted_and_drawn_alike_in_batches_of_any_size(batch: int) -> None:
    x = torch.arange(50.0).reshape(50, 1, 1, 1)
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(50, 4, generator=generator), torch.randint(0, 4, (50,), generator=generator)
    predicted, found = scores.argmax(1), Predictions(5, np.random.default_rng(0))
    for rows in torch.arange(50).split(batch):
        found.add([x[rows], labels[rows]], scores[rows], labels[rows])
    expected = np.zeros((4, 4), dtype=int)
    np.add.at(expected, (labels.numpy(), predicted.numpy()), 1)
    assert (found.confusion == expected).all()
    keys = np.random.default_rng(0).random(50)
    for right in (True, False):
        order = [i for i in np.argsort(keys).tolist() if (labels[i] == predicted[i]).item() == right][:5]
        drawn = found.drawn(right)
        assert [int(one.image) for one in drawn] == order
        assert [one[1:] for one in drawn] == [(labels[i].item(), predicted[i].item()) for i in order]


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("in_memory", [True, False])
def test_tables_are_those_of_the_final_model(engine: Any, in_memory: bool, tmp_path: Path) -> None:
    model, test = net(), images(40, 1)
    trainer = trainer_for(tmp_path, FinalPictures(), max_rounds=2, engine=engine)
    trainer.fit(model, image_data(in_memory=in_memory))
    expected = confusion_by_hand(model, test)
    head, *rows = table(trainer, "confusion.csv")
    assert head == ["label", "0", "1", "2"]
    assert [row[0] for row in rows] == ["0", "1", "2"]
    assert np.array_equal([list(map(int, row[1:])) for row in rows], expected)
    head, *rows = table(trainer, "classes.csv")
    assert head == ["class", "samples", "accuracy"]
    assert [int(row[1]) for row in rows] == expected.sum(1).tolist()
    assert [float(row[2]) for row in rows] == pytest.approx((expected.diagonal() / expected.sum(1)).tolist())
    assert written(trainer) == {"confusion.csv", "classes.csv", "confusion.png", "predictions.png"}
    assert all((trainer.run.path / name).stat().st_size > 1000 for name in ("confusion.png", "predictions.png"))


def test_validation_data_stand_in_and_what_is_no_image_has_no_sheet(tmp_path: Path) -> None:
    model = net(5)
    trainer = trainer_for(tmp_path, FinalPictures(), max_rounds=1)
    trainer.fit(model, federated_data(20, 5))
    assert written(trainer) == {"confusion.csv", "classes.csv", "confusion.png"}
    found = [list(map(int, row[1:])) for row in table(trainer, "confusion.csv")[1:]]
    assert np.array_equal(found, confusion_by_hand(model, points(12, seed=1)))


def test_each_of_several_sets_has_its_own_and_classes_their_names(tmp_path: Path, monkeypatch: Any) -> None:
    names = ("cat", "dog", "a very long name")
    monkeypatch.setattr(FederatedDataModule, "class_names", names)
    x, y = images(12, 2).tensors
    sets = {"near": images(9, 1), "far/off": TensorDataset(x, y.clamp(max=1))}
    trainer = trainer_for(tmp_path, FinalPictures(num_samples=1), max_rounds=1)
    trainer.fit(net(), image_data(test_dataset=sets))
    kinds = ("confusion{}.csv", "classes{}.csv", "confusion{}.png", "predictions{}.png")
    assert written(trainer) == {kind.format(end) for kind in kinds for end in ("_near", "_far_off")}
    rows = table(trainer, "classes_far_off.csv")
    assert [row[0] for row in rows] == ["class", *names]
    assert rows[-1][1:] == ["0", ""]


@pytest.mark.parametrize("models", [("global",), ("global", "tuned")], ids="-".join)
def test_beside_the_others_clients_and_agreement_are_drawn(models: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Pictures of several models name each."""
    seen: dict[str, Any] = {}
    draw = final_pictures.distribution_figure
    monkeypatch.setattr(final_pictures, "distribution_figure", lambda values: (seen.update(values), draw(values))[1])
    evaluation = ClientEvaluation(models=models)
    trainer = trainer_for(tmp_path, FinalPictures(), evaluation, UpdateAgreement(), max_rounds=2)
    trainer.fit(net(), image_data())
    assert {"clients.png", "agreement.png"} <= written(trainer)
    rows = [dict(zip(table(trainer, "clients.csv")[0], row, strict=True)) for row in table(trainer, "clients.csv")[1:]]
    names = ["loss"] if len(models) == 1 else ["global/loss", "tuned/loss"]
    assert seen == {name: [float(row[name]) for row in rows] for name in names}


@pytest.mark.parametrize("num_clients", [1, 7, 20, 23])
def test_the_histogram_of_agreement_counts_in_exact_bins(num_clients: int) -> None:
    votes = np.random.default_rng(0).integers(-num_clients, num_clients + 1, 500)
    callback, update = UpdateAgreement(), object.__new__(ReducedUpdate)
    vars(update).update(sign_sum=torch.tensor(votes).float(), mean=torch.ones(500), clients=[None] * num_clients)
    trainer: Any = type("Trainer", (), {"round": 1})
    callback.on_before_server_step(trainer, type("Module", (), {"log_dict": lambda self, _: None})(), update)
    expected = np.bincount(np.minimum(20 * np.abs(votes) // num_clients, 19), minlength=20)
    assert callback.histogram is not None
    assert callback.histogram.tolist() == expected.tolist()
    flips = np.abs(2 * np.arange(num_clients + 1) - num_clients)  # heads less tails, each as likely as binomial
    chances = [math.comb(num_clients, heads) / 2**num_clients for heads in range(num_clients + 1)]
    binned = np.bincount(np.minimum(20 * flips // num_clients, 19), chances, minlength=20)
    assert callback.coin_flips is not None
    np.testing.assert_allclose(callback.coin_flips.numpy(), binned, rtol=1e-12)


def test_agreement_is_drawn_beside_coin_flips() -> None:
    """As steps over the same bins: what the clients agree on, and what chance would give."""
    counts, flips = np.array([6, 3, 1]), np.array([0.5, 0.25, 0.25])
    steps = final_pictures.agreement_figure(counts, flips, 0.4).axes[0].patches
    assert [step.get_data().values.tolist() for step in steps] == [[0.6, 0.3, 0.1], flips.tolist()]
    assert [step.get_label() for step in steps][1] == "coin flips"


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
def test_the_model_and_the_rows_are_the_same_without_it(engine: Any, tmp_path: Path) -> None:
    found = []
    for callbacks in ([], [FinalPictures()]):
        trainer = trainer_for(tmp_path, *callbacks, engine=engine, name=f"{len(callbacks)}")
        model = net()
        trainer.fit(model, image_data(val_dataset=images(20, 3)))
        rows = {name: each for name, each in columns(trainer).items() if not name.startswith("time/")}
        found.append(({name: value.clone() for name, value in model.state_dict().items()}, rows, model.training))
    (one, rows, mode), (other, other_rows, other_mode) = found
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert (rows, mode) == (other_rows, other_mode)


class Regression(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, 0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass


class Picky(Classifier):
    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return x

    def loss(self, batch: Any) -> Tensor:
        return super().forward(batch[0]).mean()


DICTS = OneByOne(12, lambda i: {"x": torch.zeros(5), "y": 0})


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (
            Regression,
            {},
            r"^Expected Regression to be a classifier, .* got a float32 tensor of shape \(8,\) for",
        ),
        (Picky, {}, r"^Expected a module whose `forward` scores .* got TypeError\(.*missing 1 required"),
        (Regression, {"val_dataset": DICTS}, "^Expected Regression to be a classifier, .* got a batch that is a dict"),
        (Classifier, {"val_dataset": None}, "^Expected test or validation data for FinalPictures, got none: give some"),
    ],
)
def test_what_is_no_classifier_is_told_before_training(model: Any, options: Any, sentence: str, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, FinalPictures(), limit_val_batches=1.0)
    with pytest.raises(FederatedError, match=sentence) as told:
        trainer.fit(model(), federated_data(20, **options))
    assert str(told.value).endswith("out of `--trainer.callbacks`.")
    assert "\n" not in str(told.value)
    assert trainer.round == 0


def test_a_number_of_samples_is_at_least_one() -> None:
    with pytest.raises(FederatedError, match="num_samples"):
        FinalPictures(num_samples=0)


def test_what_cannot_be_written_or_drawn_is_a_warning_each(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(path: Path, content: bytes) -> None:
        raise WriteError(f"Expected to write {path.name}, but the system refuses (No space left on device).")

    monkeypatch.setattr(final_pictures, "write_atomically", refuse)
    monkeypatch.setattr(final_pictures, "confusion_figure", lambda *_: 1 / 0)
    trainer = trainer_for(tmp_path, FinalPictures())
    with pytest.warns(UserWarning, match="The run goes on without") as said:
        trainer.fit(net(), image_data())
    told = [str(one.message) for one in said if "goes on without" in str(one.message)]
    assert [one.split("without ")[1].split(" ")[0] for one in told] == ["confusion.csv", "classes.csv", "confusion.png"]
    assert written(trainer) == {"predictions.png"}
    assert list(columns(trainer)["train/loss"]) == [1, 2, 3]


def test_a_full_disk_below_the_pictures_is_a_warning_each(tmp_path: Path, monkeypatch: Any) -> None:
    def refuse(path: Path, content: bytes) -> None:
        with writing(path):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("lightning_fed.runs.log.write_atomically", refuse)
    trainer = trainer_for(tmp_path, FinalPictures(), max_rounds=1)
    with pytest.warns(UserWarning, match="the system refuses") as said:
        trainer.fit(net(), image_data())
    told = [str(one.message) for one in said if "the system refuses (No space left" in str(one.message)]
    assert [one.split("without ")[1].split(" ")[0] for one in told] == ["confusion.png", "predictions.png"]
    assert written(trainer) == {"confusion.csv", "classes.csv"}


def test_a_pass_that_fails_is_a_warning(tmp_path: Path) -> None:
    class Fails(Net):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training and self.trainer.round == 3:
                raise RuntimeError("a bad sample")
            return super().forward(x)

    trainer = trainer_for(tmp_path, FinalPictures())
    with pytest.warns(UserWarning, match=r"without the predictions of the final model \(RuntimeError: a bad sample\)"):
        trainer.fit(Fails(), image_data())
    assert trainer.finished_round == 3


def test_loggers_get_the_pictures(tmp_path: Path) -> None:
    taken: list[tuple[str, str]] = []

    class Takes(DummyLogger):
        def log_image(self, key: str, images: list[str]) -> None:
            taken.append((key, Path(images[0]).name))

    trainer = trainer_for(tmp_path, FinalPictures(), logger=[Takes()], max_rounds=1)
    trainer.fit(net(), image_data())
    assert taken == [("confusion", "confusion.png"), ("predictions", "predictions.png")]


class Ends(FederatedCallback):
    """Ends the run in round 2, by a signal or as a callback may."""

    def __init__(self, by_signal: bool) -> None:
        self.by_signal = by_signal

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.round == 2 and self.by_signal:
            signal.raise_signal(signal.SIGTERM)
        elif trainer.round == 2:
            trainer.should_stop = True


@pytest.mark.parametrize("by_signal", [True, False])
def test_a_run_that_goes_on_later_has_no_end_yet(by_signal: bool, tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, FinalPictures(), Ends(by_signal), max_rounds=5)
    trainer.fit(net(), image_data())
    assert trainer.finished_round == 2
    assert ("confusion.png" in written(trainer)) is not by_signal


def test_without_a_folder_nothing_is_computed(tmp_path: Path) -> None:
    passes: list[bool] = []

    class Counts(Net):
        def forward(self, x: Tensor) -> Tensor:
            passes.append(self.training)
            return super().forward(x)

    trainer = trainer_for(tmp_path, FinalPictures(), logger=False, max_rounds=1)
    trainer.fit(Counts(), image_data())
    assert passes.count(False) == 1  # the trial
    assert not list(tmp_path.iterdir())
