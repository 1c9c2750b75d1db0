"""Resuming from Python, where the config is described from objects."""

from collections.abc import Callable
from pathlib import Path
from shutil import copytree, rmtree
from typing import Any

import pytest
import torch

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import Digits
from lightning_fed.models import MLP, ImageClassifier
from lightning_fed.trainer import checkpoint_contents
from tests.end_to_end.command import short_trainer


def _model(lr: float = 0.1) -> ImageClassifier:
    torch.manual_seed(0)
    return ImageClassifier(MLP(64, (8,)), optimizer=lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9))


def _weights(model: ImageClassifier) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_a_longer_run_continues_in_the_same_folder_with_the_same_bits(tmp_path: Path) -> None:
    whole = _model()
    short_trainer(tmp_path / "whole", 5).fit(whole, Digits())
    model = _model()
    short_trainer(tmp_path / "parts", 2).fit(model, Digits(), ckpt_path="last")
    model = _model()
    resuming = short_trainer(tmp_path / "parts", 5)
    resuming.fit(model, Digits(), ckpt_path="last")
    assert torch.equal(_weights(model), _weights(whole))
    assert resuming.round == 5
    assert len(list((tmp_path / "parts").glob("*/version_*"))) == 1


class ActsOnce(FederatedCallback):
    """Does something with the run's folder in the first hook of a kind."""

    def __init__(self, hook: str, act: Callable[[Path], None]) -> None:
        self.acts = [act]
        setattr(self, hook, lambda trainer, *rest: self.acts and self.acts.pop()(trainer.run.path))


@pytest.mark.parametrize("which", ["the run", "its name"])
@pytest.mark.parametrize("hook", ["on_train_start", "on_round_start", "on_train_epoch_end"])
def test_a_folder_that_is_removed_while_a_run_trains_is_not_in_the_way_of_the_next(
    tmp_path: Path, hook: str, which: str
) -> None:
    whole, again = _model(), _model()
    short_trainer(tmp_path / "whole", 3).fit(whole, Digits())
    trainer = short_trainer(tmp_path, 3)
    trainer.callbacks.append(ActsOnce(hook, lambda path: rmtree(path if which == "the run" else path.parent)))
    with pytest.raises(FederatedError, match="the system refuses"):
        trainer.fit(_model(), Digits(), ckpt_path="last")
    assert not trainer.run.path.exists()
    short_trainer(tmp_path, 3).fit(again, Digits(), ckpt_path="last")
    assert torch.equal(_weights(again), _weights(whole))


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("hook", ["on_train_start", "on_round_start", "on_client_start", "on_train_epoch_end"])
@pytest.mark.quick(2)
def test_nor_is_one_into_which_pictures_are_drawn(tmp_path: Path, hook: str) -> None:
    trainer = short_trainer(tmp_path, 3)
    trainer.callbacks.append(ActsOnce(hook, rmtree))
    with pytest.raises(FederatedError, match="the system refuses"):
        trainer.fit(_model(), Digits(), ckpt_path="last")
    assert not trainer.run.path.exists()
    short_trainer(tmp_path, 1).fit(_model(), Digits(), ckpt_path="last")


def test_a_checkpoint_of_ones_own_makes_its_folder(tmp_path: Path) -> None:
    trainer = short_trainer(tmp_path, 1)
    trainer.fit(_model(), Digits())
    trainer.save_checkpoint(tmp_path / "new" / "folder" / "mine.ckpt")
    assert (tmp_path / "new" / "folder" / "mine.ckpt").is_file()


def test_a_kill_between_the_first_row_and_the_first_checkpoint_leaves_no_folder_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, again = _model(), _model()
    killed = tmp_path / "run" / "version_0"  # as it is on the disk before the first checkpoint is written
    write = checkpoint_contents.save_checkpoint

    def keep_and_write(content: Any, path: Path) -> None:
        if not killed.exists():
            copytree(path.parents[1], killed)
        write(content, path)

    monkeypatch.setattr(checkpoint_contents, "save_checkpoint", keep_and_write)
    short_trainer(tmp_path / "whole", 3).fit(whole, Digits(), ckpt_path="last")
    assert len((killed / "metrics.csv").read_text().splitlines()) == 2
    assert not any(killed.glob("checkpoints/*"))
    resuming = short_trainer(tmp_path, 3)
    resuming.fit(again, Digits(), ckpt_path="last")
    assert [path.name for path in tmp_path.glob("run/*")] == ["version_0"]
    assert torch.equal(_weights(again), _weights(whole))


def test_another_learning_rate_is_refused_instead_of_ignored(tmp_path: Path) -> None:
    short_trainer(tmp_path, 2).fit(_model(lr=0.1), Digits())
    with pytest.raises(FederatedError, match=r"lr 0\.1, got 0\.001.*--weights"):
        short_trainer(tmp_path, 4).fit(_model(lr=0.001), Digits(), ckpt_path="last")


def test_other_trainer_options_are_another_run(tmp_path: Path) -> None:
    short_trainer(tmp_path, 2).fit(_model(), Digits())
    short_trainer(tmp_path, 2, clients=4).fit(_model(), Digits(), ckpt_path="last")
    assert len(list(tmp_path.glob("*/version_*"))) == 2


def test_a_path_resumes_into_a_new_folder_and_keeps_the_old_one_whole(tmp_path: Path) -> None:
    short_trainer(tmp_path, 3).fit(_model(), Digits())
    (first,) = tmp_path.glob("*/version_*")
    before = (first / "metrics.csv").read_bytes()
    resuming = short_trainer(tmp_path, 4)
    resuming.fit(_model(), Digits(), ckpt_path=str(first / "checkpoints" / "last.ckpt"))
    assert (first / "metrics.csv").read_bytes() == before
    assert resuming.run is not None
    assert resuming.run.path != first
    assert len(resuming.run.metrics.read_text().splitlines()) == 1 + 5


def test_the_checkpoint_opens_with_load_from_checkpoint_and_test_finds_it(tmp_path: Path) -> None:
    model = _model()
    short_trainer(tmp_path, 2).fit(model, Digits())
    (folder,) = tmp_path.glob("*/version_*")
    loaded = ImageClassifier.load_from_checkpoint(folder / "checkpoints" / "last.ckpt", backbone=MLP(64, (8,)))
    assert torch.equal(_weights(loaded), _weights(model))
    fresh = ImageClassifier(MLP(64, (8,)))
    (by_name,) = short_trainer(tmp_path, 2).test(fresh, Digits(), ckpt_path=str(folder / "checkpoints" / "last.ckpt"))
    (by_object,) = short_trainer(tmp_path, 2).test(model, Digits())
    assert by_name == by_object


@pytest.mark.parametrize("ckpt_path", ["last", "best"])
@pytest.mark.parametrize("which", ["same", "fresh"])
def test_a_finished_run_is_found_by_name(tmp_path: Path, ckpt_path: str, which: str) -> None:
    """Whatever the bars and the time that the run was given."""
    trainers = [
        FederatedTrainer(
            accelerator="cpu", max_rounds=2, clients_per_round=3, default_root_dir=str(tmp_path), logger=[], **options
        )
        for options in (
            {"enable_progress_bar": True, "max_time": "00:01:00:00"},
            {"enable_progress_bar": False},
            {"enable_progress_bar": False, "max_time": {"hours": 2}},
        )
    ]  # fmt: skip
    trainers[0].fit(_model(), Digits())
    (folder,) = tmp_path.glob("*/version_*")
    state = torch.load(folder / "checkpoints" / f"{ckpt_path}.ckpt", weights_only=True)["state_dict"]
    for trainer in trainers[:1] if which == "same" else trainers[1:]:
        for call in (trainer.test, trainer.validate, trainer.predict):
            other = ImageClassifier(MLP(64, (8,)))
            assert call(other, Digits(), ckpt_path=ckpt_path)
            assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    assert list(tmp_path.glob("*/version_*")) == [folder]


def test_nothing_is_written_when_nothing_is_to_be_kept(tmp_path: Path) -> None:
    FederatedTrainer(
        accelerator="cpu", max_rounds=1, default_root_dir=str(tmp_path / "runs"), logger=False,
        enable_checkpointing=False, enable_progress_bar=False,
    ).fit(_model(), Digits())  # fmt: skip
    assert not (tmp_path / "runs").exists()
