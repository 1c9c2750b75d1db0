"""What code of the user's own does between clients counts, or is refused in one sentence."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from tests.parts import Classifier, built, federated_data, federated_trainer

HOOKS = (
    "on_train_epoch_start", "on_round_start", "on_before_server_step", "on_round_end", "on_after_server_step",
    "on_train_epoch_end", "on_validation_start", "on_validation_batch_end", "on_validation_epoch_end",
)  # fmt: skip


class Calls(FederatedCallback):
    """Does something in one hook."""

    def __init__(self, hook: str, act: Any) -> None:
        setattr(self, hook, lambda trainer, module, *args: act(trainer, module))


def fill(trainer: Any, module: Any) -> None:
    with torch.no_grad():
        module.net.weight.fill_(3.0)


def fill_data(trainer: Any, module: Any) -> None:
    module.net.weight.data.fill_(3.0)


def cut_loose(trainer: Any, module: Any) -> None:
    module.net.weight.data = torch.full_like(module.net.weight, 3.0)


@pytest.mark.parametrize("act", [fill, fill_data, cut_loose])
@pytest.mark.parametrize("hook", HOOKS)
def test_writes_to_the_module_between_clients_are_refused(tmp_path: Path, hook: str, act: Any) -> None:
    trainer = federated_trainer(tmp_path, Calls(hook, act), max_rounds=2)
    place = "the hooks of validation" if "validation" in hook else f"`{hook}`"
    with pytest.raises(FederatedError, match=rf"Expected {place} to leave .* write to .* `trainer.weights`"):
        trainer.fit(built(Classifier), federated_data(12, 9))


def test_so_are_those_of_the_module_itself(tmp_path: Path) -> None:
    class Clamps(Classifier):
        def on_train_epoch_end(self) -> None:
            self.net.weight.data.clamp_(-1e-3, 1e-3)

    with pytest.raises(FederatedError, match="Expected `on_train_epoch_end` to leave the parameters of Clamps"):
        federated_trainer(tmp_path, max_rounds=1).fit(built(Clamps), federated_data(12, 9))


@pytest.mark.parametrize("engine", ["sequential", "vectorized"])
@pytest.mark.parametrize("act", [fill, fill_data, cut_loose])
@pytest.mark.parametrize("hook", ["on_client_end", "on_client_entered"])
def test_so_are_those_after_a_clients_training(tmp_path: Path, hook: str, act: Any, engine: str) -> None:
    trainer = federated_trainer(tmp_path, Calls(hook, act), engine=engine)
    with pytest.raises(FederatedError, match=rf"Expected `{hook}` to leave .* edit `update.delta` in `on_client_end`"):
        trainer.fit(built(Classifier), federated_data(12, 9))


def test_writes_to_the_global_model_count(tmp_path: Path) -> None:
    module = built(Classifier)
    act = Calls("on_after_server_step", lambda trainer, module: trainer.weights.fill_(0.25))
    federated_trainer(tmp_path, act, max_rounds=1).fit(module, federated_data(12, 9))
    assert all((p == 0.25).all() for p in module.parameters())


def test_a_layer_that_a_client_adds_is_refused(tmp_path: Path) -> None:
    class Grows(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.more = nn.Linear(2, 2)
            return super().training_step(batch, batch_idx)

    with pytest.raises(FederatedError, match="but `more.bias` was added: make it in `__init__`"):
        federated_trainer(tmp_path, max_rounds=1).fit(built(Grows), federated_data(12, 9))


@pytest.mark.parametrize("name", ["round", "gradients", "samples", "comm/bytes_up", "clients/trained", "time/round"])
@pytest.mark.parametrize("step", ["training_step", "validation_step"])
def test_names_of_our_columns_cannot_be_logged(tmp_path: Path, name: str, step: str) -> None:
    module = built(Classifier)
    former = getattr(module, step)

    def logs(batch: Any, batch_idx: int) -> Any:
        module.log(name, 1e9)
        return former(batch, batch_idx)

    setattr(module, step, logs)
    with pytest.raises(FederatedError, match=rf"got '{name}', a column that the trainer writes"):
        federated_trainer(tmp_path, max_rounds=1).fit(module, federated_data(12, 9))


def test_every_column_of_the_loop_is_reserved(tmp_path: Path) -> None:
    """But `lr`, which a module may log for itself."""
    options = {"on_client_error": "skip", "max_diverged": 0.5, "engine": "sequential", "logger": []}
    trainer = federated_trainer(tmp_path, max_rounds=1, name="run", **options)
    trainer.fit(built(Classifier), federated_data(12, 9))
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as file:
        columns = next(csv.reader(file))
    assert {"round", "clients/failed", "time/clients", "comm/rounds"} <= set(columns)
    module = {name for name in columns if name.startswith(("train/", "val/"))}
    for name in {*columns, "simulated/time", "clients/available", "clients/late"} - {"lr", *module}:
        with pytest.raises(FederatedError, match="got " + repr(name)):
            trainer.train_state.recorder.log(name, 1.0)


def test_a_forked_child_that_goes_on_to_train_writes_no_row(tmp_path: Path) -> None:
    children = []

    def fork(trainer: Any, module: Any) -> None:
        if trainer.round == 1:
            children.append(os.fork())

    trainer = federated_trainer(tmp_path, Calls("on_round_start", fork), max_rounds=3, name="run", logger=[])
    trainer.fit(built(Classifier), federated_data(12, 9))
    (child,) = children
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]


def test_a_module_that_steps_its_optimizer_unasked_is_told_what_to_set(tmp_path: Path) -> None:
    """Every batch was skipped, and the run ended as done with the model that it began with."""

    class Steps(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch).backward()
            self.optimizers().step()

    with pytest.raises(FederatedError, match="moved its weights without: set `automatic_optimization = False`"):
        federated_trainer(tmp_path, max_rounds=3).fit(built(Steps), federated_data(12, 9))


def test_a_module_that_steps_an_optimizer_of_its_own_is_told_which_to_step(tmp_path: Path) -> None:
    class Owns(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch).backward()
            torch.optim.SGD(self.parameters(), 0.1).step()

    with pytest.raises(FederatedError, match=r"to step an optimizer of `self.optimizers\(\)`.* moved the weights"):
        federated_trainer(tmp_path, max_rounds=3).fit(built(Owns), federated_data(12, 9))


def test_a_module_that_returns_none_for_a_while_trains_afterwards(tmp_path: Path) -> None:
    class Waits(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if self.trainer.round > 1 else None

    trainer = federated_trainer(tmp_path, max_rounds=2)
    with pytest.warns(UserWarning, match="No client has taken a step yet: `training_step` of Waits has returned no"):
        trainer.fit(built(Waits), federated_data(12, 9))
    assert trainer.logged_metrics["clients/trained"] == 2


def test_a_module_that_forgets_to_step_is_told_to(tmp_path: Path) -> None:
    """It was told to set what it had set."""

    class Forgets(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))

    with pytest.warns(UserWarning, match=r"No client has taken a step yet: .* calls the `step\(\)`"):
        federated_trainer(tmp_path, max_rounds=3).fit(built(Forgets), federated_data(12, 9))
