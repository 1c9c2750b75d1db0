"""A run of a trial ends early where Optuna's median pruner says so, and such a trial is not asked for again."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_fed.lab.runner.record import done_run
from lightning_fed.lab.runner.tuning import groups_of, tune, with_choices
from lightning_fed.lab.runner.worker import Pruning
from lightning_fed.lab.studies.cells import Watch, cells_of
from lightning_fed.lab.studies.study import Study, Tune
from tests.lab.runner.test_tuning import trainer as train_of

optuna = pytest.importorskip("optuna")

ROUNDS, A_FIFTH = 14, 3


def watched(folder: Path, others: list[float], direction: str = "maximize") -> Watch:
    """Returns a new trial beside others that came to a value at each round."""
    file = str(folder / "journal.log")
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(file))
    study = optuna.create_study(storage=storage, study_name="s", direction=direction)
    for value in others:
        steps = dict.fromkeys(range(1, ROUNDS + 1), value)
        study.add_trial(optuna.trial.create_trial(value=value, intermediate_values=steps))
    return Watch(file, "s", study.ask().number, 0, "val/acc")


def rounds_trained(watch: Watch, value: float) -> int:
    """Counts the rounds of a run that comes to the same value in each."""
    pruning = Pruning(watch)
    for number in range(1, ROUNDS + 1):
        metrics = {"val/acc": torch.tensor(value)}
        run = SimpleNamespace(round=number, max_rounds=ROUNDS, should_stop=False, callback_metrics=metrics)
        pruning.on_train_epoch_end(run, None)
        assert run.should_stop == pruning.pruned
        if run.should_stop:
            return number
    return ROUNDS


@pytest.mark.parametrize(
    ("others", "value", "direction", "rounds"),
    [
        ([0.1, 0.2, 0.5, 0.6, 0.7], 0.4, "maximize", A_FIFTH),  # below the median, from the first round that counts
        ([0.1, 0.2, 0.5, 0.6, 0.7], 0.55, "maximize", ROUNDS),
        ([0.1, 0.2, 0.5, 0.6, 0.7], 0.55, "minimize", A_FIFTH),
        ([0.5, 0.6, 0.7], 0.4, "maximize", ROUNDS),  # too few to compare with
    ],
)
def test_below_the_median_it_ends(tmp_path: Path, others, value: float, direction: str, rounds: int) -> None:
    assert rounds_trained(watched(tmp_path, others, direction), value) == rounds


def test_a_round_without_the_metric_decides_nothing(tmp_path: Path) -> None:
    pruning = Pruning(watched(tmp_path, [0.5] * 6))
    run = SimpleNamespace(round=ROUNDS, max_rounds=ROUNDS, should_stop=False, callback_metrics={})
    pruning.on_train_epoch_end(run, None)
    assert not run.should_stop


def test_a_trial_that_was_ended_early_is_neither_chosen_nor_tried_again(tmp_path: Path) -> None:
    study = Study("T", "t", axes={}, tune=Tune(parameters={"lr": [0.1, 1.0]}, statistic="final", pruner="median"))
    calls = []

    def train(cells, ended):
        missing = [cell for cell in cells if done_run(tmp_path, cell) is None]
        calls.append([cell.options["lr"] for cell in missing])
        assert all(cell.watch is not None and cell.watch.metric == "val/acc" for cell in missing)
        for cell in missing:
            if cell.options["lr"] == 1.0:
                ended(cell, True)
        return train_of(tmp_path, lambda cell: 0.3)([cell for cell in missing if cell.options["lr"] != 1.0], ended)

    for _ in range(2):
        groups = groups_of(study, cells_of(study), tmp_path)
        tune(groups, train, 2)
        tuned, undecided = with_choices(study, cells_of(study), groups)
        assert ({cell.options["lr"] for cell in tuned}, undecided) == ({0.1}, [])
    assert calls == [[0.1, 1.0], []]
