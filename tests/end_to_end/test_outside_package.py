"""A module, a data set, an aggregator and a callback in a file of the user's, named by class_path alone."""

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from lightning_fed.cli import main
from tests.end_to_end.command import rows

OWN = '''
import json

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import Dataset

from lightning_fed import FederatedCallback, Need
from lightning_fed.aggregators import Aggregator


class Plane(Dataset):
    """Points on one side of a plane or the other; a target tells which."""

    def __init__(self, size: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.points = torch.randn(size, 5, generator=generator)
        self.targets = (self.points.sum(dim=1) > 0).long()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return {"point": self.points[index], "side": self.targets[index]}


class Sides(LightningModule):
    def __init__(self, width: int = 8):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(5, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch["point"]), batch["side"])
        self.log("train/doubled", 2 * loss)
        return {"loss": loss}

    def test_step(self, batch, batch_idx):
        right = self.net(batch["point"]).argmax(dim=1) == batch["side"]
        self.log("test/acc", right.float().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class HalfMean(Aggregator):
    """Half of the unweighted mean."""

    needs = Need.UPDATES

    def __init__(self, share: float = 0.5, **kwargs):
        super().__init__(**kwargs)
        self.share = share
        self.rounds = 0

    def server_step(self, update):
        self.rounds += 1
        return self.share * update.updates.mean(dim=0)

    def state_dict(self):
        return {"rounds": self.rounds}

    def load_state_dict(self, state_dict):
        self.rounds = state_dict["rounds"]


class Diary(FederatedCallback):
    def __init__(self, path: str):
        self.path = path
        self.before = None

    def on_round_start(self, trainer, pl_module, cohort):
        self.before = trainer.weights.clone()
        self.ids = [client.id for client in cohort.clients]

    def on_after_server_step(self, trainer, pl_module, update):
        error = (trainer.weights - self.before - 0.25 * 0.5 * update.updates.mean(dim=0)).abs().max()
        pl_module.log("step/error", error)
        with open(self.path, "a") as file:
            file.write(json.dumps({"round": trainer.round, "clients": self.ids}) + "\\n")
'''

CONFIG = """
seed_everything: 3
trainer:
  max_rounds: 3
  clients_per_round: 4
  check_test_every_n_rounds: 1
  logger: []
  name: own
  callbacks:
    - class_path: own_parts.Diary
      init_args: {path: diary.jsonl}
data:
  class_path: FederatedDataModule
  init_args:
    train_dataset: {class_path: own_parts.Plane, init_args: {size: 120}}
    test_dataset:
      same: {class_path: own_parts.Plane, init_args: {size: 60, seed: 1}}
      other: {class_path: own_parts.Plane, init_args: {size: 40, seed: 2}}
    partitioner: Shards
    num_clients: 6
    batch_size: 8
model:
  class_path: own_parts.Sides
  init_args: {width: 6}
aggregator:
  class_path: own_parts.HalfMean
  init_args: {lr: 0.25}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the user's files, from which the program is started; it is on no path."""
    (tmp_path / "own_parts.py").write_text(OWN)
    (tmp_path / "own.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    sys.modules.pop("own_parts", None)
    yield tmp_path
    sys.modules.pop("own_parts", None)
    gc.collect()


def test_own_parts_train_and_resume_from_the_command_line(folder: Path) -> None:
    main(["fit", "--config", "own.yaml"])
    run = folder / "runs" / "own" / "version_0"
    table = rows(run)
    assert [row["round"] for row in table] == ["0", "1", "2", "3"]
    for row in table[1:]:
        assert float(row["train/doubled"]) == pytest.approx(2 * float(row["train/loss"]))
        assert float(row["step/error"]) < 1e-7
    assert {"test/acc/same", "test/acc/other"} <= table[0].keys()
    diary = [json.loads(line) for line in Path("diary.jsonl").read_text().splitlines()]
    assert [page["round"] for page in diary] == [1, 2, 3]
    assert all(len(set(page["clients"])) == 4 for page in diary)
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["callbacks"]["HalfMean"] == {"rounds": 3}
    assert json.loads((run / "run.json").read_text())["label"] == "HalfMean"

    main(["fit", "--config", "own.yaml", "--trainer.max_rounds", "4", "--ckpt_path", "last"])
    assert rows(run)[:4] == table
    checkpoint = torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["callbacks"]["HalfMean"] == {"rounds": 4}
