"""Which checkpoints a run takes, what the module may do to them on the way in, and what a refused one leaves behind."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed import FederatedTrainer
from lightning_fed.aggregators import FedAvgM, FedExP
from lightning_fed.core.hooks import FederatedCallback
from lightning_fed.data import FederatedDataModule
from lightning_fed.errors import FederatedError
from tests.parts import CLASSES, FEATURES, Classifier, built, federated_data, federated_trainer, points


def saving_trainer(folder: Path, rounds: int, *callbacks: Any, **options: Any) -> FederatedTrainer:
    options |= {"logger": [], "enable_checkpointing": True, "name": "run", "max_rounds": rounds}
    return federated_trainer(folder, *callbacks, **options)


def last_of(folder: Path, version: int = 0) -> Path:
    return folder / "run" / f"version_{version}" / "checkpoints" / "last.ckpt"


def test_weights_of_another_model_leave_no_run_folder(tmp_path):
    other = Classifier(nn.Linear(FEATURES + 1, CLASSES))
    torch.save(other.state_dict(), tmp_path / "other.pt")
    for option, message in (("weights", "--weights"), ("ckpt_path", "--ckpt_path")):
        trainer = saving_trainer(tmp_path, 2)
        with pytest.raises(FederatedError, match=message):
            trainer.fit(Classifier(), federated_data(), **{option: str(tmp_path / "other.pt")})
        assert list((tmp_path / "run").glob("*")) == []


def test_a_refused_resumption_leaves_the_run_as_it_was(tmp_path):
    saving_trainer(tmp_path, 2).fit(Classifier(), federated_data())
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert last_of(tmp_path) in before
    other = Classifier(nn.Linear(FEATURES, CLASSES, False))
    with pytest.raises(FederatedError, match="weights of this Classifier"):
        saving_trainer(tmp_path, 4).fit(other, federated_data(), ckpt_path="last")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-true"])
def test_a_resumed_run_goes_on_from_all_digits(tmp_path, precision):
    whole, parts = built(Classifier), built(Classifier)
    through = saving_trainer(tmp_path / "whole", 4, precision=precision)
    through.fit(whole, federated_data(8, 12))
    saving_trainer(tmp_path / "parts", 2, precision=precision).fit(parts, federated_data(8, 12))
    resumed = saving_trainer(tmp_path / "parts", 4, precision=precision)
    resumed.fit(built(Classifier), federated_data(8, 12), ckpt_path="last")
    assert (resumed.resumed, resumed.weights.dtype) == (True, through.weights.dtype)
    assert torch.equal(resumed.weights, through.weights)


def test_another_split_of_the_same_data_is_refused(tmp_path):
    def split_with(seed: int) -> FederatedDataModule:
        return FederatedDataModule(points(40), num_clients=3, batch_size=8, split_seed=seed)

    saving_trainer(tmp_path, 2).fit(Classifier(), split_with(1))
    with pytest.raises(FederatedError, match=r"data split.*got another.*--data.*--weights"):
        saving_trainer(tmp_path, 4).fit(Classifier(), split_with(2), ckpt_path=str(last_of(tmp_path)))
    assert not last_of(tmp_path, version=1).parents[1].exists()
    trainer = saving_trainer(tmp_path, 4)
    trainer.fit(Classifier(), split_with(1), ckpt_path=str(last_of(tmp_path)))
    assert (trainer.round, trainer.resumed) == (4, True)
    saving_trainer(tmp_path, 1).fit(Classifier(), split_with(2), weights=str(last_of(tmp_path)))


class Conv(Classifier):
    """Has a weight whose numbers lie in another order with the channels last."""

    def __init__(self) -> None:
        layers = nn.Unflatten(1, (FEATURES, 1, 1)), nn.Conv2d(FEATURES, CLASSES, 3, padding=1), nn.Flatten()
        super().__init__(nn.Sequential(*layers))


def test_a_layout_is_resumed_and_another_one_refused(tmp_path):
    def trained(folder: Path, rounds: int, ckpt: Any = None, layout: str = "channels_last") -> Conv:
        module = built(Conv)
        trainer = saving_trainer(folder, rounds, FedAvgM(lr=0.5), memory_format=layout)
        trainer.fit(module, federated_data(), ckpt_path=ckpt)
        return module

    straight, _ = trained(tmp_path / "straight", 4), trained(tmp_path, 2)
    with pytest.raises(FederatedError, match=r"memory layout.*--trainer\.memory_format.*--weights"):
        trained(tmp_path, 4, str(last_of(tmp_path)), "preserve")
    resumed = trained(tmp_path, 4, str(last_of(tmp_path)))
    assert torch.equal(resumed.net[1].weight, straight.net[1].weight)
    assert resumed.net[1].weight.is_contiguous(memory_format=torch.channels_last)


class Renamed(Classifier):
    """Reads checkpoints in which its layer had another name, as modules do after a change of their code."""

    def __init__(self) -> None:
        super().__init__(optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        self.loaded = 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"] = {k.replace("net", "old"): v for k, v in checkpoint["state_dict"].items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded += 1
        checkpoint["state_dict"] = {k.replace("old", "net"): v for k, v in checkpoint["state_dict"].items()}

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))


def test_the_module_may_change_what_is_loaded(tmp_path):
    whole = built(Renamed)
    saving_trainer(tmp_path / "whole", 3).fit(whole, federated_data(8, 8))
    trained, data = built(Renamed), federated_data(8, 8, test_dataset=points(9, seed=2))
    saving_trainer(tmp_path, 2).fit(trained, data)
    path = str(last_of(tmp_path))
    assert set(torch.load(path, weights_only=True)["state_dict"]) == {"old.weight", "old.bias"}
    expected = saving_trainer(tmp_path, 2).test(trained, data, verbose=False)
    for option in ("ckpt_path", "weights"):
        tested = Renamed()
        assert saving_trainer(tmp_path, 2).test(tested, data, verbose=False, **{option: path}) == expected
        assert tested.loaded == 1
    resumed = Renamed()
    saving_trainer(tmp_path, 3).fit(resumed, federated_data(8, 8), ckpt_path="last")
    assert resumed.loaded == 1
    assert torch.equal(resumed.net.weight, whole.net.weight)
    started = Renamed()
    saving_trainer(tmp_path, 1, clients_per_round=1).fit(started, federated_data(8, 8), weights=path)
    assert started.loaded == 1


def test_the_module_may_let_a_callback_start_anew(tmp_path):
    class Forgetful(Classifier):
        def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            assert checkpoint["callbacks"].pop("Counter") == {"rounds": 2}

    class Counter(FederatedCallback):
        state_key = "Counter"
        rounds = 0

        def state_dict(self) -> dict[str, Any]:
            return {"rounds": self.rounds}

        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            self.rounds += 1

    for rounds, counted in ((2, 2), (3, 1)):
        counter = Counter()
        saving_trainer(tmp_path, rounds, counter).fit(built(Forgetful), federated_data(8, 8), ckpt_path="last")
        assert counter.rounds == counted


class WithTeacher(Classifier):
    """Leaves a large frozen part out of its checkpoints."""

    def __init__(self, strict: bool = False) -> None:
        super().__init__()
        self.teacher = nn.Linear(FEATURES, CLASSES).requires_grad_(False)
        self.strict_loading = strict

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        kept = {k: v for k, v in checkpoint["state_dict"].items() if not k.startswith("teacher")}
        checkpoint["state_dict"] = {**kept, "of_an_older_version": torch.zeros(1)}


def test_strict_loading_off_takes_what_fits(tmp_path):
    trained = WithTeacher()
    saving_trainer(tmp_path, 2).fit(trained, federated_data(8, 8))
    path = str(last_of(tmp_path))

    def check(module: WithTeacher, teacher: Tensor) -> None:
        assert torch.equal(module.net.weight, trained.net.weight)
        assert torch.equal(module.teacher.weight, teacher)
        assert not torch.equal(module.teacher.weight, trained.teacher.weight)

    for option in ("ckpt_path", "weights"):
        module = WithTeacher()
        teacher = module.teacher.weight.clone()
        saving_trainer(tmp_path, 2).validate(module, federated_data(8, 8), verbose=False, **{option: path})
        check(module, teacher)
    module = WithTeacher()
    teacher = module.teacher.weight.clone()
    trainer = saving_trainer(tmp_path, 2)
    trainer.fit(module, federated_data(8, 8), ckpt_path=path)
    check(module, teacher)
    assert trainer.resumed


def test_strict_loading_refuses_what_does_not_fit(tmp_path):
    saving_trainer(tmp_path, 1).fit(WithTeacher(), federated_data())
    path = str(last_of(tmp_path))
    with pytest.raises(FederatedError, match="3 of its tensors"):
        saving_trainer(tmp_path, 1).validate(WithTeacher(strict=True), federated_data(), weights=path)
    wider = WithTeacher()
    wider.net = nn.Linear(FEATURES + 1, CLASSES)
    with pytest.raises(FederatedError, match=r"another shape, such as `net\.weight`"):
        saving_trainer(tmp_path, 1).validate(wider, federated_data(), weights=path)


class Unsure(Classifier):
    """Its validation gives NaN but in one round."""

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", torch.tensor(1.0 if self.trainer.round == 1 else torch.nan))


def test_a_validation_of_nan_is_said_once_and_chooses_nothing(tmp_path):
    trainer = saving_trainer(tmp_path, 3)
    with pytest.warns(UserWarning, match="validation of round 0 gives NaN for val/loss: it cannot") as said:
        trainer.fit(Unsure(), federated_data())
    assert sum("gives NaN" in str(warning.message) for warning in said) == 1
    assert trainer.checkpoint_callback is not None
    assert trainer.checkpoint_callback.best_round == 1


class Scaled(nn.Linear):
    """Keeps a unit in its state, which training changes."""

    unit: Any = None

    def get_extra_state(self) -> Any:
        return self.unit

    def set_extra_state(self, state: Any) -> None:
        self.unit = state


class Measuring(Classifier):
    def __init__(self, unit: Any) -> None:
        super().__init__(nn.Sequential(Scaled(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES)))
        self.net[0].unit = unit

    def on_train_epoch_end(self) -> None:
        if isinstance(self.net[0].unit, dict):
            self.net[0].unit = {**self.net[0].unit, "round": self.trainer.round}


@pytest.mark.parametrize("mean", [FedAvgM, FedExP])
def test_the_extra_state_of_a_part_is_saved_and_restored(tmp_path, mean):
    saving_trainer(tmp_path, 2, mean()).fit(Measuring({"unit": "mm", "table": torch.ones(2)}), federated_data())
    loaded = Measuring.load_from_checkpoint(last_of(tmp_path), unit=None)
    resumed = Measuring({"unit": "inch"})
    saving_trainer(tmp_path, 3, mean()).fit(resumed, federated_data(), ckpt_path="last")
    for module, round in ((loaded, 2), (resumed, 3)):
        unit = module.net[0].unit
        assert (unit["unit"], unit["round"], unit["table"].tolist()) == ("mm", round, [1.0, 1.0])


@pytest.mark.parametrize("unit", [None, 3, torch.ones(2)])
def test_an_extra_state_may_be_anything_and_have_another_shape(tmp_path, unit):
    saving_trainer(tmp_path, 1).fit(Measuring(unit), federated_data())
    resumed = Measuring(torch.zeros(5))
    saving_trainer(tmp_path, 2).fit(resumed, federated_data(), ckpt_path="last")
    assert repr(resumed.net[0].unit) == repr(unit)


def test_an_extra_state_of_objects_is_left_out_and_said(tmp_path):
    with pytest.warns(UserWarning, match="`net.0._extra_state` is left out for its object"):
        saving_trainer(tmp_path, 1).fit(Measuring(object()), federated_data())
    resumed = Measuring({"unit": "inch"})
    saving_trainer(tmp_path, 2).fit(resumed, federated_data(), ckpt_path="last")
    assert resumed.net[0].unit == {"unit": "inch", "round": 2}


class Scheduled(Classifier):
    """Plans over the whole run, in one of the places where modules do."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.length = where, 1

    def setup(self, stage: str) -> None:
        if self.where == "setup":
            self.length = self.trainer.max_epochs

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.where != "setup":
            self.length = getattr(self.trainer, self.where)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.length)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "round"}}


@pytest.mark.parametrize("where", ["setup", "max_epochs", "max_rounds", "estimated_stepping_batches"])
def test_a_schedule_over_the_run_is_not_gone_on_from_with_another_length(tmp_path, where):
    options = {"local_schedule": "continue"}
    saving_trainer(tmp_path, 2, **options).fit(Scheduled(where), federated_data(8, 12))
    with pytest.raises(FederatedError, match=r"Expected `--trainer.max_rounds 2`, as in the run of .*, got 4"):
        saving_trainer(tmp_path, 4, **options).fit(Scheduled(where), federated_data(8, 12), ckpt_path="last")
    again = saving_trainer(tmp_path, 2, **options)
    again.fit(Scheduled(where), federated_data(8, 12), ckpt_path="last")
    assert (again.resumed, again.round) == (True, 2)


def test_a_schedule_within_a_round_goes_on_in_a_longer_run(tmp_path):
    saving_trainer(tmp_path, 2).fit(Scheduled("estimated_stepping_batches"), federated_data(8, 12))
    longer = saving_trainer(tmp_path, 4)
    longer.fit(Scheduled("estimated_stepping_batches"), federated_data(8, 12), ckpt_path="last")
    assert (longer.resumed, longer.round) == (True, 4)
