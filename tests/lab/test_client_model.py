"""A client's own model of a finished run, in an ordinary module: the one that was evaluated, or one sentence."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed import FederatedError, FederatedTrainer, load_client_model
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.client_algorithms import APFL, Ditto, FedBN, FedPer, LocalOnly, PFedMe
from lightning_fed.data import FederatedDataModule
from lightning_fed.data.adapters.containers import ClientDatasets
from lightning_fed.runs.folder import read_rows
from tests.parts import Classifier, built, federated_trainer, points

HOSPITALS = {"north": points(8, 1), "south": points(7, 2), "west": points(10, 3), "9": points(6, 4)}


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
