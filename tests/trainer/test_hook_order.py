"""Hooks of modules, callbacks and datamodules are called in Lightning's order, as often as under Lightning."""

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.core.hooks import ModelHooks

from lightning_fed.data import FederatedDataModule
from tests.parts import BySizes, Classifier, federated_trainer, lightning_trainer, points

_MODULE = {name for name in vars(ModelHooks) if name.startswith("on_")} | {
    "setup", "teardown", "prepare_data", "configure_model", "configure_callbacks", "configure_optimizers",
    "training_step", "validation_step", "test_step", "predict_step", "backward", "optimizer_step",
    "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step", "on_after_batch_transfer",
}  # fmt: skip
_MODULE -= {"on_validation_model_zero_grad"}  # releases memory under Lightning; here gradients live in one vector
_CALLBACK = {name for name in vars(pl.Callback) if name.startswith("on_")} | {"setup", "teardown"}
_DATA = {"setup", "teardown", "prepare_data", "on_exception"}


def traced(base: type, hooks: set[str], who: str, trace: list[str]) -> type:
    """Derives a class that notes each call of a hook and then does as its base."""

    def noting(name: str) -> Any:
        original = getattr(base, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            trace.append(f"{who}.{name}")
            return original(self, *args, **kwargs)

        return hook

    return type("Traced" + base.__name__, (base,), {name: noting(name) for name in hooks if hasattr(base, name)})


class Module(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        step = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}
        return [optimizer], [step, torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self(batch[0])


def parts(trace: list[str], fails: bool = False) -> tuple[Any, Any, Any]:
    class Failing(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("a mistake in training_step")

    module = traced(Failing if fails else Module, _MODULE, "module", trace)()
    data = traced(FederatedDataModule, _DATA, "data", trace)(
        points(16), BySizes(16), 1, batch_size=8, eval_batch_size=6,
        val_dataset=points(12, seed=1), test_dataset=points(6, seed=2),
    )  # fmt: skip
    return module, data, traced(pl.Callback, _CALLBACK, "callback", trace)()


def without_round_zero(trace: list[str]) -> list[str]:
    """Leaves out the validation between the start of training and the first round."""
    start = trace.index("module.on_train_start") + 1
    return trace[:start] + trace[trace.index("callback.on_train_epoch_start") :]


def traces(folder: Any, call: str, **options: Any) -> tuple[list[str], list[str]]:
    ours: list[str] = []
    module, data, callback = parts(ours)
    getattr(federated_trainer(folder, callback, max_rounds=2, **options), call)(module, data)
    theirs: list[str] = []
    module, data, callback = parts(theirs)
    getattr(lightning_trainer(folder, callback, max_epochs=2, **options), call)(module, data)
    return ours, theirs


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_fit(tmp_path, options):
    ours, theirs = traces(tmp_path, "fit", **options)
    assert "module.on_validation_start" in ours[: ours.index("module.on_train_epoch_start")]
    # Schedules of the round step when all its clients are done, later than Lightning's after the last batch.
    assert ours.count("module.lr_scheduler_step") == theirs.count("module.lr_scheduler_step") > 0
    ours, theirs = ([hook for hook in trace if hook != "module.lr_scheduler_step"] for trace in (ours, theirs))
    assert without_round_zero(ours) == theirs
    assert theirs.count("module.training_step") == 4


@pytest.mark.parametrize("call", ["validate", "test", "predict"])
def test_evaluation(tmp_path, call):
    ours, theirs = traces(tmp_path, call)
    assert ours == theirs


def test_failure(tmp_path):
    ours: list[str] = []
    module, data, callback = parts(ours, fails=True)
    with pytest.raises(RuntimeError, match="a mistake in training_step"):
        federated_trainer(tmp_path, callback).fit(module, data)
    assert ours[ours.index("module.training_step") + 1 :][:2] == ["callback.on_exception", "data.on_exception"]
    assert "module.on_fit_end" not in ours


def test_an_interruption_is_told_like_a_failure(tmp_path):
    ours: list[str] = []
    module, data, callback = parts(ours)

    def interrupted(*_: Any) -> None:
        ours.append("interrupted")
        raise KeyboardInterrupt

    module.training_step = interrupted
    federated_trainer(tmp_path, callback).fit(module, data)
    assert ours[ours.index("interrupted") + 1 :][:2] == ["callback.on_exception", "data.on_exception"]


@pytest.mark.parametrize("call", ["fit", "validate", "test", "predict"])
def test_the_module_is_back_on_the_cpu_after_a_call(tmp_path, call):
    back: list[Any] = []
    module, data, _ = parts([])
    module.cpu = lambda: back.append([p.untyped_storage().nbytes() == p.nbytes for p in module.parameters()])
    getattr(federated_trainer(tmp_path), call)(module, data)
    assert [all(each) for each in back] == [True], "and when its parameters are no views any more"


def test_stages_and_epochs_seen_by_hooks(tmp_path):
    seen: list[Any] = []

    class Watching(Module):
        def setup(self, stage: str) -> None:
            seen.append(("setup", stage, self.trainer.state.fn.value, self.trainer.training))

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(("batch", self.current_epoch, self.global_step, self.trainer.training, self.training))

        def on_validation_epoch_end(self) -> None:
            trainer = self.trainer
            seen.append(("val", self.current_epoch, self.global_step, trainer.validating, self.training))

        def on_train_epoch_end(self) -> None:
            seen.append(("end", self.current_epoch, self.global_step, self.trainer.training, self.training))

    data = FederatedDataModule(points(24), BySizes(8, 16), 2, batch_size=8, val_dataset=points(4))
    federated_trainer(tmp_path, max_rounds=2).fit(Watching(), data)
    rounds = [
        [("batch", 0, 0, True, True), ("batch", 0, 0, True, True), ("batch", 0, 1, True, True)],
        [("val", 0, 2, True, False), ("end", 0, 2, True, True)],
        [("batch", 1, 2, True, True), ("batch", 1, 2, True, True), ("batch", 1, 3, True, True)],
        [("val", 1, 4, True, False), ("end", 1, 4, True, True)],
    ]
    assert seen == [("setup", "fit", "fit", True), ("val", 0, 0, True, False), *sum(rounds, [])]


class Critic(Module):
    """Steps two optimizers in a step, and counts between them."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for optimizer in self.optimizers():
            self.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()
            self.between()

    def between(self) -> None:
        """Called after the step of each optimizer."""

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD([parameter], lr=0.1) for parameter in self.net.parameters()], []


def counted(base: type, trainer: Any, call: str = "fit", ckpt_path: Any = None, **data: Any) -> list[Any]:
    """Returns what each hook of a module, and its trainer afterwards, read as epoch, step and length."""
    seen: list[Any] = []

    def noting(name: str) -> Any:
        original = getattr(base, name)

        def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
            given = args[0] if name in ("optimizer_step", "optimizer_zero_grad") else None
            # Who plans by the length of a run is not resumed with another one.
            length = None if name in ("setup", "configure_model", "configure_optimizers") else self.trainer.max_epochs
            seen.append((name, self.current_epoch, self.global_step, length, given))
            return original(self, *args, **kwargs)

        return hook

    names = (_MODULE | {"between", "on_save_checkpoint"}) - {"configure_callbacks", "prepare_data", "lr_scheduler_step"}
    kind = type("Counted", (base,), {name: noting(name) for name in names if hasattr(base, name)})
    given = FederatedDataModule(points(16), BySizes(16), 1, batch_size=8, val_dataset=points(12, seed=1))
    getattr(trainer, call)(kind(), given, ckpt_path=ckpt_path)
    seen.append(("after", trainer.current_epoch, trainer.global_step))
    return seen


@pytest.mark.parametrize(
    ("base", "options"),
    [(Module, {}), (Module, {"accumulate_grad_batches": 2}), (Critic, {}), (Critic, {"check_val_every_n_epoch": 2})],
)
def test_modules_read_lightnings_counts(tmp_path, base, options):
    saves = {"save_top_k": -1, "save_on_train_epoch_end": False, "filename": "{epoch}-{step}"}
    ours, theirs = (ModelCheckpoint(tmp_path / who, **saves) for who in ("ours", "theirs"))
    seen = counted(base, federated_trainer(tmp_path, ours, max_rounds=3, **options))
    start = next(at for at, row in enumerate(seen) if row[0] == "on_train_epoch_start")
    first = next(at for at, row in enumerate(seen) if row[0] == "on_train_start") + 1
    assert {row[1:3] for row in seen[first:start]} == {(0, 0)}  # the evaluation before training
    expected = counted(base, lightning_trainer(tmp_path, theirs, max_epochs=3, enable_checkpointing=True, **options))
    for saving in (False, True):  # here a checkpoint is written when the round is over
        mine, lightnings = (
            [row for row in rows if (row[0] == "on_save_checkpoint") == saving]
            for rows in (seen[:first] + seen[start:], expected)
        )
        assert mine == lightnings != []
    names = [sorted(path.name for path in (tmp_path / who).iterdir()) for who in ("ours", "theirs")]
    assert names[0] == names[1] != []


def test_a_resumed_run_counts_on(tmp_path):
    options = {"enable_checkpointing": True, "logger": [], "name": "run"}
    whole = counted(Module, federated_trainer(tmp_path / "whole", max_rounds=4, **options))
    counted(Module, federated_trainer(tmp_path, max_rounds=2, **options))
    resumed = counted(Module, federated_trainer(tmp_path, max_rounds=4, **options), ckpt_path="last")
    starts = [[row for row in seen if row[0] == "on_train_epoch_start"] for seen in (whole, resumed)]
    assert [row[1:3] for row in starts[0]] == [(0, 0), (1, 2), (2, 4), (3, 6)]
    assert starts[1] == starts[0][2:]
    assert resumed[-1] == whole[-1] == ("after", 4, 8)
