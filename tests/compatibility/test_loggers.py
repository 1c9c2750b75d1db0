"""Lightning's loggers, and those of one's own, get config, rows and pictures."""

from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger

from lightning_fed.runs.folder import read_rows
from tests.parts import Classifier, federated_data, federated_trainer


class Recording(Logger):
    """Keeps what it gets; its experiment, if any, is what a logger's library has."""

    name, version = "recording", 0

    def __init__(self, experiment: Any = None) -> None:
        super().__init__()
        self.config: dict[str, Any] = {}
        self.rows: list[tuple[Any, dict[str, float]]] = []
        self.status = ""
        self.experiment, self.run_id = experiment, "run-1"

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.config = params

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def finalize(self, status: str) -> None:
        self.status = status

    def log_graph(self, model: Any, input_array: Any = None) -> None:
        self.graph = type(model).__name__


class Shown(Recording):
    """Takes pictures as Lightning's WandbLogger does."""

    def log_image(self, key: str, images: list[Any]) -> None:
        SEEN.append((key, images[0]))


class TensorBoard:
    def add_image(self, key: str, image: Any, dataformats: str) -> None:
        assert (image.ndim, image.shape[2], dataformats) == (3, 3, "HWC")
        SEEN.append((key, ""))


class MLflow:
    def log_artifact(self, run_id: str, local_path: str) -> None:
        assert run_id == "run-1"
        SEEN.append((local_path.rpartition("/")[2].removesuffix(".png"), local_path))

    def log_image(self, run_id: str, image: Any, **kwargs: Any) -> None:
        raise AssertionError("a picture in memory")


class Comet:
    def log_image(self, image_data: str, name: str) -> None:
        SEEN.append((name, image_data))


SEEN: list[tuple[str, str]] = []


@pytest.mark.parametrize("logger", [Shown(), *(Recording(kind()) for kind in (TensorBoard, MLflow, Comet, object))])
def test_config_rows_and_pictures(tmp_path, pictures: None, logger: Recording) -> None:
    SEEN.clear()
    trainer = federated_trainer(tmp_path, logger=[logger], max_rounds=2)
    trainer.fit(Classifier(), federated_data(8, 12))
    assert (logger.config["trainer"]["max_rounds"], logger.config["parameters"], logger.status) == (2, 18, "success")
    assert logger.graph == "Classifier"
    assert [(step, row["round"]) for step, row in logger.rows] == [(0, 0), (1, 1), (2, 2)]
    assert {"train/loss", "val/loss", "lr", "comm/bytes_up"} <= set(logger.rows[-1][1])
    drawn = {path.stem for path in trainer.run.path.glob("*.png")}
    assert drawn
    assert {key for key, _ in SEEN} == (set() if type(logger.experiment) is object else drawn)


def test_lightnings_csv_beside_ours(tmp_path) -> None:
    theirs = CSVLogger(str(tmp_path / "theirs"))
    trainer = federated_trainer(tmp_path, logger=theirs, max_rounds=2)
    trainer.fit(Classifier(), federated_data(8, 12))
    assert [row["round"] for row in read_rows(trainer.run.metrics)] == ["0", "1", "2"]
    (path,) = (tmp_path / "theirs").rglob("metrics.csv")
    assert len(path.read_text().splitlines()) == 4
    assert (path.parent / "hparams.yaml").is_file()


def test_tensorboard_itself(tmp_path) -> None:
    pytest.importorskip("tensorboard")
    from lightning.pytorch.loggers import TensorBoardLogger

    logger = TensorBoardLogger(str(tmp_path / "board"))
    federated_trainer(tmp_path, logger=logger, max_rounds=1).fit(Classifier(), federated_data(8, 12))
    assert any((tmp_path / "board").rglob("events*"))
