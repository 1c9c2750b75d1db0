"""Each mistake ends with one sentence that names the option, no traceback, and keeps the work already done."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_fed.cli import main
from lightning_fed.models import ImageClassifier
from tests.end_to_end.command import QUICKSTART, fit_words, rows, run_folders
from tests.parts import quick_first


class NotScalar(ImageClassifier):
    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")


class TurnsNaN(ImageClassifier):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (float("nan") if self.trainer.round == 3 else 1.0)


class Fails(ImageClassifier):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("a mistake in the user's own code")


Mistake = Callable[..., str]
HERE = "--model=tests.end_to_end.test_bad_input"
BACKBONE = ("--model.backbone=MLP", "--model.backbone.in_features=64", "--model.backbone.hidden=[8]")


@pytest.fixture
def mistake(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Mistake:
    """Runs a command that must fail; returns the last line on stderr."""

    def run(*more: str, root: Path = tmp_path) -> str:
        with pytest.raises(SystemExit) as stopped:
            main(fit_words(root, 4, *more))
        assert stopped.value.code not in (0, None)
        error = capsys.readouterr().err
        assert "Traceback" not in error
        assert "usage:" not in error
        return error.strip().splitlines()[-1]

    return run


@pytest.mark.parametrize(
    ("words", "parts"),
    quick_first(
        5,
        [
            (["--trainer.max_rounds=-1"], ["--trainer.max_rounds", "-1"]),
            (["--trainer.clients_per_round=21"], ["--trainer.clients_per_round", "20", "21"]),
            (["--trainer.clients_per_round=0"], ["--trainer.clients_per_round"]),
            (["--trainer.clients_per_round=1.5"], ["--trainer.clients_per_round", "1.5"]),
            (["--data.partitioner.classes_per_client=11"], ["classes_per_client", "11", "10"]),
            (["--data.num_clients=5000"], ["--data.num_clients", "5000"]),
            (["--data.num_clients=-3"], ["--data.num_clients", "-3"]),
            (["--aggregator.mask=SignAgreement", "--aggregator.mask.threshold=1.5"], ["threshold", "1.5"]),
            (["--aggregator.lr=0"], ["--aggregator.lr"]),
            (["--trainer.local_steps=2"], ["--trainer.local_epochs", "--trainer.local_steps"]),
            (["--trainer.callbacks=FedAvg"], ["FedAvg and FedAvg", "--aggregator"]),
            (["--trainer.callbacks=BatchSizeFinder"], ["BatchSizeFinder", "--data.batch_size"]),
            (["--trainer.devices=2", "--trainer.strategy=ddp"], ["--trainer.strategy", "'ddp'"]),
            (["--trainer.precision=16-mixed"], ["--trainer.precision", "bf16-mixed"]),
            (["--trainer.max_time=soon"], ["--trainer.max_time", "soon"]),
            (["--model.optimizer.lr=-0.1"], ["--model.optimizer", "-0.1"]),
        ],
    ),
)
@pytest.mark.quick(2)
def test_impossible_options(words: list[str], parts: list[str], tmp_path: Path, mistake: Mistake) -> None:
    last = mistake(*words)
    for part in parts:
        assert part in last
    assert run_folders(tmp_path) == [], "a mistake found before training leaves no run folder behind"


def test_a_root_that_is_a_file(tmp_path: Path, mistake: Mistake) -> None:
    (tmp_path / "runs").write_text("in the way")
    last = mistake(root=tmp_path / "runs")
    assert str(tmp_path / "runs") in last
    assert "--trainer.default_root_dir" in last


def test_early_stopping_on_what_nobody_logs(tmp_path: Path, mistake: Mistake) -> None:
    last = mistake("--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=nothing")
    assert "EarlyStopping" in last
    assert "nothing" in last


def test_predictions_into_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["predict", f"--config={QUICKSTART}", "--trainer.logger=[]", f"--output={tmp_path / 'no' / 'out.pt'}"])
    error = capsys.readouterr().err
    assert stopped.value.code not in (0, None)
    assert "Traceback" not in error
    last = error.strip().splitlines()[-1]
    assert "--output" in last
    assert str(tmp_path / "no") in last


def test_a_loss_that_is_no_scalar(mistake: Mistake) -> None:
    last = mistake(f"{HERE}.NotScalar", *BACKBONE)
    assert "`NotScalar.training_step`" in last
    assert "shape (10,)" in last


def test_nan_loss_names_client_and_round_and_keeps_finished_rounds(tmp_path: Path, mistake: Mistake) -> None:
    last = mistake(f"{HERE}.TurnsNaN", *BACKBONE)
    assert "diverged in round 3" in last
    assert "learning rate" in last
    (folder,) = run_folders(tmp_path)
    assert [row["round"] for row in rows(folder)] == ["0", "1", "2"]
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    assert checkpoint["epoch"] == 2
    assert all(torch.isfinite(value).all() for value in checkpoint["state_dict"].values())


def test_a_mistake_in_the_users_code_keeps_its_traceback(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the user's own code"):
        main(fit_words(tmp_path, 1, f"{HERE}.Fails", *BACKBONE))


def _write_checkpoints(folder: Path) -> dict[str, Path]:
    paths = {name: folder / f"{name}.ckpt" for name in ("missing", "damaged", "foreign", "list")}
    torch.save({"state_dict": {"layer.weight": torch.zeros(3)}}, paths["foreign"])
    paths["damaged"].write_bytes(paths["foreign"].read_bytes()[:-200])
    torch.save([1, 2], paths["list"])
    return paths


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("missing", "no such file"),
        ("damaged", "damaged"),
        ("foreign", "weights of this ImageClassifier"),
        ("list", "list"),
    ],
)
@pytest.mark.parametrize("option", quick_first(1, ["ckpt_path", "weights"]))
def test_checkpoints_that_cannot_be_used(kind: str, part: str, option: str, tmp_path: Path, mistake: Mistake) -> None:
    path = _write_checkpoints(tmp_path)[kind]
    last = mistake(f"--{option}={path}")
    assert str(path) in last
    resumed = (kind, option) == ("foreign", "ckpt_path")  # nothing in it says that a run could go on from it
    assert ("to be a checkpoint of federated training" if resumed else part) in last
    assert f"--{option}" in last
    assert run_folders(tmp_path) == []


def test_weights_alone_are_no_checkpoint_to_resume_from(tmp_path: Path, mistake: Mistake) -> None:
    main(fit_words(tmp_path, 1))
    (folder,) = run_folders(tmp_path)
    checkpoint = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)
    del checkpoint["federated"]
    torch.save(checkpoint, tmp_path / "central.ckpt")
    last = mistake(f"--ckpt_path={tmp_path / 'central.ckpt'}")
    assert "--weights" in last
    main(fit_words(tmp_path, 1, f"--weights={tmp_path / 'central.ckpt'}"))
