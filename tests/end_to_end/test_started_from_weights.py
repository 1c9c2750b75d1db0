"""Runs that start from given weights: what they are resumed by, from Python and from the command line."""

from pathlib import Path

import pytest
import torch
import yaml

from lightning_fed.cli import main
from lightning_fed.data import Digits
from lightning_fed.models import MLP, ImageClassifier
from lightning_fed.runs.folder import read_run
from tests.end_to_end.command import assert_same_run, fit_words, rows, run_folders, short_trainer

pytestmark = pytest.mark.slow


def model(seed: int = 0) -> ImageClassifier:
    torch.manual_seed(seed)
    return ImageClassifier(MLP(64, (64,)), optimizer=lambda p: torch.optim.SGD(p, lr=0.1))


@pytest.fixture
def weights(tmp_path: Path) -> str:
    torch.save(model(seed=5).state_dict(), tmp_path / "given.pt")
    return str(tmp_path / "given.pt")


def test_resumed_from_python(tmp_path: Path, weights: str) -> None:
    short_trainer(tmp_path / "whole", 4).fit(model(), Digits(), weights=weights)
    short_trainer(tmp_path / "parts", 2).fit(model(), Digits(), weights=weights)
    resuming = short_trainer(tmp_path / "parts", 4)
    resuming.fit(model(1), Digits(), weights=weights, ckpt_path="last")
    assert resuming.resumed
    (whole,), (parts,) = run_folders(tmp_path / "whole"), run_folders(tmp_path / "parts")
    assert_same_run(whole, parts)
    assert len(rows(parts)) == 5


def test_a_start_with_last_and_no_checkpoint_takes_the_weights(tmp_path: Path, weights: str) -> None:
    short_trainer(tmp_path / "plain", 1).fit(model(), Digits(), weights=weights)
    short_trainer(tmp_path / "last", 1).fit(model(1), Digits(), weights=weights, ckpt_path="last")
    assert_same_run(*run_folders(tmp_path / "plain"), *run_folders(tmp_path / "last"))


def test_weights_make_another_experiment(tmp_path: Path, weights: str) -> None:
    short_trainer(tmp_path, 1).fit(model(), Digits())
    short_trainer(tmp_path, 2).fit(model(), Digits(), weights=weights, ckpt_path="last")
    without, with_weights = run_folders(tmp_path)
    assert len(rows(without)) == 2, "the run without weights is not gone on with"
    assert read_run(without).group != read_run(with_weights).group
    assert read_run(without).fingerprint != read_run(with_weights).fingerprint
    short_trainer(tmp_path, 3).fit(model(), Digits(), ckpt_path="last")
    assert [len(rows(folder)) for folder in run_folders(tmp_path)] == [4, 3]


def test_a_finished_run_is_tested_by_the_trainer_that_trained_it(tmp_path: Path, weights: str) -> None:
    training, trained = short_trainer(tmp_path, 2), model()
    training.fit(trained, Digits(), weights=weights)
    expected = short_trainer(tmp_path, 2).test(trained, Digits(), verbose=False)
    training.test(model(4), Digits(), weights=weights, verbose=False)
    assert training.test(model(3), Digits(), ckpt_path="last", verbose=False) == expected
    fresh = short_trainer(tmp_path, 2)
    assert fresh.test(model(3), Digits(), ckpt_path="last", weights=weights, verbose=False) == expected


def test_resumed_by_the_same_words_and_by_its_own_config(tmp_path: Path, weights: str) -> None:
    main(fit_words(tmp_path / "whole", 4, f"--weights={weights}"))
    root = tmp_path / "parts"
    main(fit_words(root, 2, f"--weights={weights}"))
    main(fit_words(root, 3, f"--weights={weights}", "--ckpt_path=last"))
    (folder,) = run_folders(root)
    assert len(rows(folder)) == 4
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert (saved["weights"], saved["ckpt_path"]) == (weights, None), "what is resumed is no part of a run"
    main(["fit", f"--config={folder / 'config.yaml'}", "--ckpt_path=last", "--trainer.max_rounds=4"])
    assert run_folders(root) == [folder]
    assert_same_run(*run_folders(tmp_path / "whole"), folder)
    main(fit_words(tmp_path / "fresh", 4))
    (fresh,) = run_folders(tmp_path / "fresh")
    assert rows(fresh)[0] != rows(folder)[0], "the run started from the weights"
    assert read_run(fresh).group != read_run(folder).group


def test_a_run_of_the_command_line_is_tested_by_its_own_config(
    tmp_path: Path, weights: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(fit_words(tmp_path, 2, f"--weights={weights}"))
    (folder,) = run_folders(tmp_path)
    capsys.readouterr()
    main(["test", f"--config={folder / 'config.yaml'}", "--ckpt_path=last"])
    printed = dict(line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("  "))
    assert float(printed["test/acc"]) == pytest.approx(float(rows(folder)[-1]["test/acc"]), rel=1e-5)
