"""What notebooks show, and the models of clients that they load."""

import json
import random
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch import nn

import lightning_fed
from lightning_fed import FederatedError, FederatedTrainer, load_client_model
from lightning_fed.aggregators import FedAvg
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.client_algorithms import APFL, Ditto, FedBN, FedPer, FedProx, FedSAM, LocalOnly, PFedMe
from lightning_fed.data import Digits, FederatedDataModule
from lightning_fed.data.containers import ClientDatasets
from lightning_fed.lab.report.page import run_options
from lightning_fed.lab.report.runs import load_runs
from lightning_fed.masks import SignAgreement
from lightning_fed.models import MLP, ImageClassifier
from lightning_fed.runs.folder import read_rows
from tests.lab.report.parts import write_run
from tests.parts import Classifier, built, federated_trainer, points

HOSPITALS = {"north": points(8, 1), "south": points(7, 2), "west": points(10, 3), "9": points(6, 4)}


def form(shown: Any) -> str:
    """The form, which leaves the random streams alone."""
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    text: str = shown._repr_html_()
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    return text


class Absent(Digits):
    """Data that must not be asked for."""

    def prepare_data(self) -> None:
        raise AssertionError("downloaded")

    load_datasets = prepare_data  # type: ignore[assignment]


def test_data_are_not_loaded_for_their_form() -> None:
    assert "<b>Absent</b>: call <code>setup()</code>" in form(Absent())


def test_data_show_their_split_once_it_is_made() -> None:
    data = Digits(num_clients=4)
    data.setup()
    shown = form(data)
    assert "data:image/png;base64,iVBOR" in shown
    for cell in ("training samples", "classes per client", "validation", "144 samples", "359 samples"):
        assert f"<td>{cell}</td>" in shown
    data.split_seed = 1  # another split, which nobody has asked for
    assert "call <code>setup()" in form(data)


def test_what_cannot_be_shown_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    data = Digits(num_clients=4)
    data.setup()
    monkeypatch.setattr(Digits, "class_names", property(lambda self: torch.rand(2)[5]))  # draws, then fails
    assert (
        form(data)
        == "<p><b>Digits</b> cannot be shown (IndexError: index 5 is out of bounds for dimension 0 with size 2).</p>"
    )


@pytest.fixture(scope="module")
def trainers(tmp_path_factory: pytest.TempPathFactory) -> list[FederatedTrainer]:
    """Two runs with different rates and seeds."""
    root = str(tmp_path_factory.mktemp("runs"))
    done = []
    for seed, lr in ((0, 0.5), (1, 1.0)):
        trainer = FederatedTrainer(
            accelerator="cpu", max_rounds=2, clients_per_round=2, logger=[], default_root_dir=root, seed=seed,
            callbacks=[FedAvg(lr=lr, mask=SignAgreement(threshold=0.4)), FedProx(mu=0.01)],
        )  # fmt: skip
        trainer.fit(ImageClassifier(MLP(in_features=64, hidden=(8,))), Digits(num_clients=4))
        done.append(trainer)
    return done


def test_a_trainer_shows_what_it_will_do(tmp_path: Path) -> None:
    trainer = FederatedTrainer(accelerator="cpu", max_rounds=2, local_steps=1, default_root_dir=str(tmp_path))
    shown = form(trainer)
    for cell in (
        "100% of the clients, each trains for 1 step",
        "none",
        "auto: chosen when fit begins",
        "cpu, 32-true",
    ):
        assert f"<td>{cell}</td>" in shown
    assert "FedAvg(" in shown
    assert "img" not in shown
    assert list(tmp_path.iterdir()) == []


def test_a_trainer_shows_its_run(trainers: list[FederatedTrainer]) -> None:
    trainer = trainers[0]
    shown = form(trainer)
    assert "<td>2 clients, each trains for 1 epoch</td>" in shown
    assert "FedAvg(apply=&#x27;after&#x27;, buffers=&#x27;average&#x27;, lr=0.5, mask=SignAgreement(" in shown
    assert "threshold=0.4" in shown
    assert "FedProx(mu=0.01)" in shown
    assert trainer.engine_choice is not None
    assert f"<td>{trainer.engine_choice['engine']}: {trainer.engine_choice['reason']}</td>" in shown
    assert trainer.run is not None
    assert form(trainer.run) in shown


def test_a_run_shows_its_curve_and_its_last_and_best_value(tmp_path: Path) -> None:
    write_run(tmp_path, "a", 3, [0.25, 0.75, 0.5])
    run = load_runs([tmp_path])[0][0]
    shown = form(run)
    assert "<b>FedAvg</b>, seed 3" in shown
    assert ": 2 rounds" in shown
    assert "data:image/png;base64,iVBOR" in shown
    assert "<td>test/acc</td><td>0.5</td><td>0.75</td>" in shown
    run.metrics.write_text("round,test/acc\n")
    assert "nothing is measured yet" in form(run)


def test_rounds_of_runs_are_rows_with_the_options_that_differ(trainers: list[FederatedTrainer]) -> None:
    pytest.importorskip("pandas")
    frame = lightning_fed.load_runs(trainers[0].default_root_dir)
    rate = "aggregator.lr"  # as on the command line
    assert list(frame.columns[:5]) == ["run", "method", "seed", rate, "round"]
    assert frame[["seed", rate, "round"]].values.tolist() == [
        [s, lr, r] for s, lr in ((0, 0.5), (1, 1)) for r in range(3)
    ]
    assert set(frame["run"]) == {str(trainer.log_dir) for trainer in trainers}
    last = float(trainers[1].callback_metrics["val/acc"])
    assert frame["val/acc"].iloc[-1] == pytest.approx(last)
    assert np.isnan(frame["train/loss"].iloc[0]), "round 0 trains nobody"


def test_a_run_from_python_leaves_its_options(trainers: list[FederatedTrainer]) -> None:
    options = json.loads((Path(trainers[1].log_dir or "") / "options.json").read_text())
    assert options["seed_everything"] == 1
    assert options["trainer"]["max_rounds"] == 2
    assert options["trainer"]["callbacks"] is None
    names = run_options(Path(trainers[1].log_dir or ""))
    assert {"aggregator.mask.threshold": "0.4", "client.mu": "0.01", "data.num_clients": "4"}.items() <= names.items()


def test_own_classes_and_several_of_a_kind_have_names_of_the_command_line_too(tmp_path: Path) -> None:
    """An aggregator is known as what it is, not by its place, and FedAvg is there where none is given."""

    class Own(FedAvg):
        def __init__(self, power: float) -> None:
            super().__init__()
            self.power = power

    def names(*callbacks: Callback) -> set[str]:
        trainer = FederatedTrainer(
            accelerator="cpu", max_rounds=1, local_steps=1, logger=[], default_root_dir=str(tmp_path),
            callbacks=list(callbacks), enable_progress_bar=False,
        )  # fmt: skip
        trainer.fit(ImageClassifier(MLP(in_features=64, hidden=(8,))), Digits(num_clients=2))
        kinds = ("aggregator.", "client.", "trainer.callbacks.")
        return {name for name in run_options(Path(trainer.log_dir or "")) if name.startswith(kinds)}

    ours = names(ClientEvaluation(), FedProx(mu=0.1), Own(2.0), FedSAM(rho=0.1))
    assert {"aggregator.power", "client.0.mu", "client.1.rho", "trainer.callbacks.every_n_rounds"} <= ours
    assert "aggregator.lr" in names()


def test_what_cannot_be_used_is_a_warning_and_nothing_at_all_a_sentence(tmp_path: Path) -> None:
    pytest.importorskip("pandas")
    with pytest.raises(FederatedError, match=r"^Expected folders of runs .*found no run .*trainer\.default_root_dir"):
        lightning_fed.load_runs(tmp_path)
    write_run(tmp_path, "a", 0, [0.5])
    empty = write_run(tmp_path, "a", 1)
    with pytest.warns(UserWarning, match="holds no measurement yet"):
        frame = lightning_fed.load_runs(str(tmp_path), empty)
    assert frame["test/acc"].tolist() == [0.5]


def test_without_pandas_one_sentence_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(
        FederatedError, match=r"Expected pandas for `load_runs`.*pip install 'lightning_fed\[notebook\]'"
    ):
        lightning_fed.load_runs(tmp_path)


def net() -> Classifier:
    return Classifier(nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))


def trained(folder: Path, *parts: Any, **options: Any) -> FederatedTrainer:
    looks = ClientEvaluation(1, models=("own",)) if parts else ClientEvaluation(1)
    given = {"max_rounds": 3, "enable_checkpointing": True, "logger": [], "clients_per_round": 3, **options}
    trainer = federated_trainer(folder, *parts, looks, **given)
    trainer.fit(built(net), FederatedDataModule(ClientDatasets(HOSPITALS), batch_size=4, num_clients=None))
    return trainer


@pytest.mark.parametrize(
    ("made", "precision"),
    [(made, "32-true") for made in (Ditto, partial(APFL, 0.3), partial(APFL, 0.3, True), PFedMe, LocalOnly, FedBN)]
    + [(FedPer, "32-true"), (Ditto, "bf16-true"), (FedPer, "bf16-true")],
)
@pytest.mark.quick(3)
def test_the_module_is_the_one_that_was_evaluated(tmp_path: Path, made: Any, precision: Any) -> None:
    trainer = trained(tmp_path, made(), precision=precision)
    rows = list(read_rows(trainer.run.path / "clients.csv"))
    assert [row["name"] for row in rows] == [*HOSPITALS]
    for row in rows:
        for client in (row["name"], int(row["client"])):
            module = net().to(trainer.lightning_module.dtype)
            assert load_client_model(trainer.run.path, client, module) is module
            x, y = HOSPITALS[row["name"]].tensors
            loss = module.eval().loss((x.to(module.dtype), y)).item()
            assert loss == pytest.approx(float(row["own/loss"]), rel=1e-6 if module.dtype == x.dtype else 1e-2)
    states = [load_client_model(trainer.run.path, name, net()).state_dict() for name in ("north", "south")]
    assert any(not torch.equal(a, b) for a, b in zip(*(state.values() for state in states), strict=True))
    # An ordinary one: each parameter has a storage of its own.
    assert all(p.untyped_storage().nbytes() == p.nbytes and p.grad is None for p in module.parameters())


def test_who_has_not_trained_has_the_global_model(tmp_path: Path) -> None:
    trainer = trained(tmp_path, Ditto(), max_rounds=1, clients_per_round=1)
    idle = next(i for i in range(4) if not list(trainer.run.path.glob(f"client_states/Ditto/{i}-*")))
    with pytest.warns(UserWarning, match=f"Client {idle} has not trained in this run: its model is the global one"):
        module = load_client_model(trainer.run.path, idle, net())
    for name, value in module.state_dict().items():
        assert torch.equal(value, trainer.lightning_module.state_dict()[name]), name


def test_images_in_another_layout_and_another_checkpoint(tmp_path: Path) -> None:
    images = torch.utils.data.TensorDataset(torch.randn(12, 2, 4, 4), torch.arange(12) % 3)

    def conv() -> Classifier:
        return Classifier(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 3)))

    options: Any = {"memory_format": "channels_last", "enable_checkpointing": True, "logger": [], "max_rounds": 2}
    trainer = federated_trainer(tmp_path, Ditto(), ClientEvaluation(1, models=("own",)), **options)
    trainer.fit(conv(), FederatedDataModule(images, num_clients=3, batch_size=2))
    rows = list(read_rows(trainer.run.path / "clients.csv"))
    module = load_client_model(str(trainer.run.path), "1", conv(), "last.ckpt")
    split = trainer.datamodule.split
    x, y = images[split.index[split.owners == 1]]
    assert module.loss((x, y)).item() == pytest.approx(float(rows[1]["own/loss"]), rel=1e-5)
    assert module.net[0].weight.is_contiguous()

    own, plain = trained(tmp_path / "own", Ditto()).run.path, trained(tmp_path / "plain").run.path
    for folder, client, module, checkpoint, said in (
        (own, "x", net(), "last", r"by its name \(north, south, west, 9\) or its number \(0 to 3\), got 'x'"),
        (own, 4, net(), "last", r"number \(0 to 3\), got 4"),
        (own, -1, net(), "last", "got -1"),
        (own, 0, net(), "bset", "no such file: change `checkpoint`"),
        (own / "none", 0, net(), "last", "no such file: change `checkpoint`"),
        (own, 0, Classifier(), "last", "Expected .* to hold the weights of this Classifier"),
        (own, 0, net().requires_grad_(False), "last", "Expected .* to have trainable parameters"),
        (plain, 0, net(), "last", "keep models of their own, got FedAvg: load the global model, as `Classifier"),
    ):
        with pytest.raises(FederatedError, match=said):
            load_client_model(folder, client, module, checkpoint)
    frozen = net()
    frozen.net[0].weight.requires_grad_(False)
    with pytest.raises(FederatedError, match=r"with the 6 trained parameters of the run, got 5"):
        load_client_model(own, 0, frozen)
    config = (own / "options.json").read_text()
    (own / "options.json").write_text(config.replace("Ditto", "Mine"))
    with pytest.raises(FederatedError, match="keep models of their own"):  # and imports nothing that a file names
        load_client_model(own, 0, net())
