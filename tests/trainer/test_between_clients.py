"""What code of the user's own does between clients counts, or is refused in one sentence."""

import csv
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn

from lightning_fed.aggregators import FedAvg
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, Classifier, built, federated_data, federated_trainer

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


def write_buffer(trainer: Any, module: Any) -> None:
    module.mine.fill_(7.0)


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", *HOOKS, "on_validation_epoch_end"])
def test_writes_to_buffers_between_clients_count_or_are_refused(tmp_path: Path, hook: str) -> None:
    seen = []

    class Sees(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mine", torch.zeros(2))

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            seen.append(self.mine[0].item())
            return super().training_step(batch, batch_idx)

    module = built(Sees)
    trainer = federated_trainer(tmp_path, Calls(hook, write_buffer), engine="sequential", max_rounds=2)
    if hook in ("on_before_server_step", "on_round_end"):
        with pytest.raises(FederatedError, match=f"Expected `{hook}` not to change the buffers .* `mine`.*on_after"):
            trainer.fit(module, federated_data(12, 9))
        return
    trainer.fit(module, federated_data(12, 9))
    assert seen[-1] == 7.0, "a client of the second round starts from it"
    assert torch.equal(module.mine, torch.full((2,), 7.0))


@pytest.mark.parametrize("act", [fill, fill_data, cut_loose])
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
@pytest.mark.parametrize("validates", [True, False])
def test_writes_before_the_first_round_count_once(tmp_path: Path, hook: str, act: Any, validates: bool) -> None:
    starts = []

    class Starts(FederatedCallback):
        def on_round_start(self, trainer: Any, pl_module: Any, cohort: Any) -> None:
            starts.append(pl_module.net.weight.detach().clone())

    given: dict[str, Any] = {"enable_checkpointing": True, "logger": [], "name": "run"}
    if not validates:
        given["limit_val_batches"] = 0
    whole, first, second = built(Classifier), built(Classifier), built(Classifier)
    parts = (Calls(hook, act), Starts())
    federated_trainer(tmp_path / "whole", *parts, max_rounds=2, **given).fit(whole, federated_data(12, 9))
    assert (starts[0] == 3.0).all()
    federated_trainer(tmp_path, *parts, max_rounds=1, **given).fit(first, federated_data(12, 9))
    federated_trainer(tmp_path, *parts, max_rounds=2, **given).fit(second, federated_data(12, 9), ckpt_path="last")
    assert torch.equal(second.net.weight, whole.net.weight), "not again, where a run goes on"


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start"])
def test_the_global_model_may_be_written_before_the_first_round(tmp_path: Path, hook: str) -> None:
    one, other = built(Classifier), built(Classifier)
    federated_trainer(tmp_path, Calls(hook, fill)).fit(one, federated_data(12, 9))
    write = Calls(hook, lambda trainer, module: trainer.weights[: one.net.weight.numel()].fill_(3.0))
    federated_trainer(tmp_path, write).fit(other, federated_data(12, 9))
    assert torch.equal(one.net.weight, other.net.weight)


def test_what_stops_early_and_what_steps_may_not_write_to_the_module_either(tmp_path: Path) -> None:
    class Stops(EarlyStopping):
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            super().on_train_epoch_end(trainer, pl_module)
            fill(trainer, pl_module)

    class Steps(FedAvg):
        def server_step(self, update: Any) -> Any:
            fill(None, module)
            return super().server_step(update)

    class Saves(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            fill(trainer, pl_module)

    for part, who in ((Stops("val/loss"), "on_train_epoch_end"), (Steps(), "Steps.server_step"), (Saves(), "on_save_")):
        module = built(Classifier)
        trainer = federated_trainer(tmp_path, part, max_rounds=1, enable_checkpointing=True, logger=[])
        with pytest.raises(FederatedError, match=f"Expected `{who}.* to leave the parameters"):
            trainer.fit(module, federated_data(12, 9))


LATE = {"layer": lambda: nn.Linear(2, 2), "buffers": lambda: nn.BatchNorm1d(3, affine=False)}


@pytest.mark.parametrize("what", LATE)
@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_client_start", *HOOKS])
def test_what_is_added_once_fit_has_begun_is_refused(tmp_path: Path, hook: str, what: str) -> None:
    def add(trainer: Any, module: Any) -> None:
        if getattr(trainer, "round", 0) in (0, 2):
            module.more = LATE[what]()

    run = {"enable_checkpointing": True, "logger": [], "name": "run", "engine": "sequential"}
    trainer = federated_trainer(tmp_path, Calls(hook, add), max_rounds=2, **run)
    with pytest.raises(FederatedError, match=r"but `more\.\w+` was added: make it in `__init__`"):
        trainer.fit(built(Classifier), federated_data(12, 9))
    for file in (tmp_path / "run" / "version_0" / "checkpoints").glob("last.ckpt"):
        assert not any("more" in name for name in torch.load(file, weights_only=True)["state_dict"])


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


def test_a_row_that_a_hook_gives_to_the_loggers_is_none_of_the_table(tmp_path: Path) -> None:
    def log(trainer: Any, module: Any) -> None:
        for logger in trainer.loggers:
            logger.log_metrics({"round": 2.0, "mine": 3.0}, step=2)

    given: dict[str, Any] = {"name": "run", "logger": [], "enable_checkpointing": True}
    for rounds in (2, 3):
        trainer = federated_trainer(tmp_path, Calls("on_train_epoch_end", log), max_rounds=rounds, **given)
        trainer.fit(built(Classifier), federated_data(12, 9), ckpt_path="last")
    with (tmp_path / "run" / "version_0" / "metrics.csv").open() as file:
        assert [row["round"] for row in csv.DictReader(file)] == ["0", "1", "2", "3"]


@pytest.mark.parametrize(("hook", "at"), [("setup", 0), ("on_fit_start", 0), ("on_round_start", 1)])
def test_a_forked_child_that_goes_on_to_train_writes_no_row(tmp_path: Path, hook: str, at: int) -> None:
    children = []

    def fork(trainer: Any, module: Any) -> None:
        if trainer.round == at:
            children.append(os.fork())

    trainer = federated_trainer(tmp_path, Calls(hook, fork), max_rounds=3, name="run", logger=[])
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

    with pytest.raises(FederatedError, match="changed its weights itself: set `automatic_optimization = False`"):
        federated_trainer(tmp_path, max_rounds=3).fit(built(Steps), federated_data(12, 9))


def test_a_module_that_steps_an_optimizer_of_its_own_is_told_which_to_step(tmp_path: Path) -> None:
    class Owns(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.loss(batch).backward()
            torch.optim.SGD(self.parameters(), 0.1).step()

    with pytest.raises(FederatedError, match=r"to step an optimizer of `self.optimizers\(\)`.* changed the weights"):
        federated_trainer(tmp_path, max_rounds=3).fit(built(Owns), federated_data(12, 9))


def test_a_module_that_returns_none_for_a_while_trains_afterwards(tmp_path: Path) -> None:
    class Waits(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return super().training_step(batch, batch_idx) if self.trainer.round > 1 else None

    trainer = federated_trainer(tmp_path, max_rounds=2)
    with pytest.warns(UserWarning, match="No client of Waits has taken a step yet: .* returned no loss"):
        trainer.fit(built(Waits), federated_data(12, 9))
    assert trainer.logged_metrics["clients/trained"] == 2


def test_a_module_that_forgets_to_step_is_told_to(tmp_path: Path) -> None:
    """It was told to set what it had set."""

    class Forgets(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.manual_backward(self.loss(batch))

    with (
        pytest.warns(UserWarning, match=r"No client of Forgets has taken a step yet: .* calls the `step\(\)`"),
        pytest.raises(FederatedError, match=r"no client has taken a step in any round: .* calls the `step\(\)`"),
    ):
        federated_trainer(tmp_path, max_rounds=3).fit(built(Forgets), federated_data(12, 9))


@pytest.mark.parametrize("where", ["training_step", "on_client_start"])
def test_what_one_client_freezes_the_others_train(tmp_path: Path, where: str) -> None:
    class Freezes(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if where == "training_step" and self.trainer.client.id == 0:
                self.net.bias.requires_grad_(False)
            return super().training_step(batch, batch_idx)

    class Moved(FederatedCallback):
        moved: dict[tuple[int, int], bool] = {}

        def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
            if where == "on_client_start" and client.id == 0:
                pl_module.net.bias.requires_grad_(False)

        def on_client_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
            self.moved[update.client.round, update.client.id] = bool(update.delta[-CLASSES:].any())

    callback, module = Moved(), Freezes()
    callback.moved = {}
    federated_trainer(tmp_path, callback, max_rounds=2).fit(module, federated_data(8, 8, 8))
    assert callback.moved == {(round, id): id != 0 for round in (1, 2) for id in range(3)}
    assert module.net.bias.requires_grad


@pytest.mark.parametrize("hook", ["training_step", "on_train_batch_end", "on_client_start", "on_client_end"])
@pytest.mark.parametrize("name", ["weights", "origin"])
def test_a_client_that_writes_to_the_global_model_is_refused(tmp_path, hook, name):
    def write(*args: Any) -> Any:
        getattr(trainer, name).mul_(1.5)
        return args[0].loss(args[1]) if hook == "training_step" else None

    of_module = hook in ("training_step", "on_train_batch_end")
    module = type("Writes", (Classifier,), {hook: write} if of_module else {})()
    callback = type("WritesToo", (FederatedCallback,), {} if of_module else {hook: write})()
    trainer = federated_trainer(tmp_path, callback, engine="sequential")
    with pytest.raises(FederatedError, match=r"leave `trainer.weights` and `trainer.origin` as they are, but it wrote"):
        trainer.fit(module, federated_data(8, 8))


def test_the_global_model_may_be_written_between_rounds(tmp_path):
    class Halves(FederatedCallback):
        def on_after_server_step(self, trainer: Any, pl_module: Any, update: Any) -> None:
            trainer.weights.mul_(0.5)

        def on_client_start(self, trainer: Any, pl_module: Any, client: Any) -> None:
            trainer.vector.data.mul_(0.5)

    trainer = federated_trainer(tmp_path, Halves(), max_rounds=2)
    trainer.fit(Classifier(), federated_data(8, 8))
    assert trainer.round == 2
