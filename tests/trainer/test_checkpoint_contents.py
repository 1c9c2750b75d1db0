"""Which checkpoints a run takes, what the module may do to them on the way in, and what a refused one leaves behind."""

from collections import ChainMap
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

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


class Shaped(Classifier):
    """Is built from hyper-parameters, some of which no checkpoint can hold."""

    def __init__(self, act: Any = nn.ReLU, width: int = 4, dtype: Any = torch.float32) -> None:
        super().__init__(nn.Sequential(nn.Linear(FEATURES, width, dtype=dtype), act(), nn.Linear(width, CLASSES)))
        self.save_hyperparameters()


class Mode(Enum):
    FAST = 1


@pytest.mark.parametrize(
    ("act", "said"),
    [(nn.Tanh, "class Tanh"), (partial(nn.Softmax, -1), "partial"), (lambda: nn.SiLU(), "function")],
    ids=["class", "partial", "lambda"],
)
def test_a_hyper_parameter_that_cannot_be_stored_is_said_and_loads_if_given_again(tmp_path, act, said):
    module = Shaped(act, width=6)
    with pytest.warns(UserWarning, match=rf"`act` is left out for its {said} under .*load_from_checkpoint.*act=\.\.\."):
        saving_trainer(tmp_path, 1).fit(module, federated_data(8, 12))
    loaded = Shaped.load_from_checkpoint(last_of(tmp_path), act=act)
    x = torch.randn(3, FEATURES)
    assert (loaded.hparams.width, loaded.hparams.dtype) == (6, torch.float32)
    assert torch.equal(loaded.net(x), module.net(x))


class Listing(Classifier):
    """Takes its options as one object, under a name of its own."""

    def __init__(self, conf: Any) -> None:
        super().__init__(nn.Linear(FEATURES, CLASSES, bias=dict(conf)["bias"]))
        self.save_hyperparameters(conf)


def test_options_that_come_as_one_object_are_stored_under_its_name(tmp_path):
    module = Listing({"bias": False, "mode": Mode.FAST, "nested": ChainMap({"lr": 0.5})})
    module.hparams.note = "changed later"
    with pytest.warns(UserWarning, match="`mode` is left out for its Mode"):
        saving_trainer(tmp_path, 1).fit(module, federated_data(8, 12))
    loaded = Listing.load_from_checkpoint(last_of(tmp_path))
    assert dict(loaded.hparams) == {"bias": False, "nested": {"lr": 0.5}, "note": "changed later"}
    saving_trainer(tmp_path / "none", 1).fit(Classifier(), federated_data(8, 12))
    assert "hyper_parameters" not in torch.load(last_of(tmp_path / "none"), weights_only=True)  # as Lightning


class Course(LightningDataModule):
    """A user's data module that counts its lessons."""

    def __init__(self, lesson: int = 0, samples: int = 16) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lesson = lesson

    def train_dataloader(self) -> Any:
        return DataLoader(points(self.hparams.samples), 4)

    def test_dataloader(self) -> Any:
        return DataLoader(points(8, seed=2), 4)

    def state_dict(self) -> dict[str, Any]:
        return {"lesson": self.lesson}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lesson = state_dict["lesson"]


class Pupil(Classifier):
    """Takes a lesson in each round."""

    def on_train_epoch_start(self) -> None:
        data = self.trainer.datamodule
        getattr(data, "source", data).lesson += 1

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self.loss(batch))


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_state_of_a_data_module_is_kept(tmp_path, wrapped):
    def fitted(rounds: int) -> Course:
        course = Course(samples=20)
        data = FederatedDataModule(source=course, num_clients=2) if wrapped else course
        saving_trainer(tmp_path, rounds).fit(Pupil(), data, ckpt_path="last")
        return course

    assert fitted(5).lesson == 5
    assert fitted(6).lesson == 6
    loaded = Course.load_from_checkpoint(last_of(tmp_path))
    assert (loaded.lesson, loaded.hparams.samples) == (6, 20)
    tested = Course()
    saving_trainer(tmp_path, 1).test(Pupil(), tested, ckpt_path=str(last_of(tmp_path)), verbose=False)
    assert tested.lesson == 6
    started = Course(samples=20)
    saving_trainer(tmp_path, 1).fit(Pupil(), started, weights=str(last_of(tmp_path)))
    assert started.lesson == 1


def test_a_state_that_the_data_module_cannot_load_is_told_in_a_sentence(tmp_path):
    class Changed(Course):
        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.lesson = state_dict["chapter"]

    Changed.__qualname__ = "Course"
    saving_trainer(tmp_path, 1).fit(Pupil(), Course())
    with pytest.raises(FederatedError, match=r"state of Changed, which cannot load it \(KeyError: 'chapter'\)"):
        saving_trainer(tmp_path, 2).fit(Pupil(), Changed(), ckpt_path=str(last_of(tmp_path)))


class Editing(Classifier):
    """Edits its checkpoints by functions."""

    def __init__(self, save: Any = lambda _: None, load: Any = lambda _: None) -> None:
        super().__init__()
        self.on_save_checkpoint, self.on_load_checkpoint = save, load


def removing(*names: str) -> Any:
    def hook(checkpoint: dict[str, Any]) -> None:
        *places, last = names
        for place in places:
            checkpoint = checkpoint[place]
        del checkpoint[last]

    return hook


@pytest.mark.parametrize("name", ["optimizer_states", "lr_schedulers", "loops"])
def test_a_hook_may_remove_what_no_client_needs(tmp_path, name):
    whole, resumed = built(Classifier), built(lambda: Editing(removing(name)))
    saving_trainer(tmp_path / "whole", 3).fit(whole, federated_data(8, 12))
    for rounds in (2, 3):
        trainer = saving_trainer(tmp_path, rounds)
        trainer.fit(resumed, federated_data(8, 12), ckpt_path="last")
    assert trainer.resumed
    assert name not in torch.load(last_of(tmp_path), weights_only=True)
    assert torch.equal(resumed.net.weight, whole.net.weight)


@pytest.mark.parametrize(
    ("place", "message"),
    [
        (("callbacks",), "to hold `callbacks`, which a resumed run needs, but `on_save_checkpoint`"),
        (("epoch",), "to hold `epoch`"),
        (("global_step",), "to hold `global_step`"),
        (("federated", "metrics"), "to hold `federated.metrics`"),
        (("federated",), "to be a checkpoint of federated training to resume from"),
        (("state_dict",), "to hold weights by name, got a NoneType"),
        (("state_dict", "net.weight"), r"1 of its tensors are missing.* `net\.weight`"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else "",
)
def test_what_a_hook_removed_is_missed_in_a_sentence(tmp_path, place, message):
    saving_trainer(tmp_path, 1).fit(Editing(removing(*place)), federated_data(8, 12))
    with pytest.raises(FederatedError, match=message):
        saving_trainer(tmp_path, 2).fit(Editing(), federated_data(8, 12), ckpt_path=str(last_of(tmp_path)))


def test_what_a_hook_removes_at_loading_is_missed_too(tmp_path):
    saving_trainer(tmp_path, 1).fit(Classifier(), federated_data(8, 12))
    module = Editing(load=removing("callbacks"))
    with pytest.raises(FederatedError, match="to hold `callbacks`, which a resumed run needs"):
        saving_trainer(tmp_path, 2).fit(module, federated_data(8, 12), ckpt_path=str(last_of(tmp_path)))


def test_a_hook_may_move_parts_if_another_puts_them_back(tmp_path):
    def moved(checkpoint: dict[str, Any], to: str, name: str) -> None:
        checkpoint[to] = checkpoint.pop(name)

    def save(checkpoint: dict[str, Any]) -> None:
        moved(checkpoint, "weights", "state_dict")
        moved(checkpoint, "others", "callbacks")

    def load(checkpoint: dict[str, Any]) -> None:
        moved(checkpoint, "state_dict", "weights")
        moved(checkpoint, "callbacks", "others")

    whole, parts = built(Classifier), built(lambda: Editing(save, load))
    saving_trainer(tmp_path / "whole", 3, FedAvgM()).fit(whole, federated_data(8, 12))
    for rounds in (2, 3):
        saving_trainer(tmp_path, rounds, FedAvgM()).fit(parts, federated_data(8, 12), ckpt_path="last")
    assert torch.equal(parts.net.weight, whole.net.weight)
    tested = Editing(load=load)
    saving_trainer(tmp_path, 1).validate(
        tested, federated_data(8, 12, val_dataset=points(4)), ckpt_path=str(last_of(tmp_path)), verbose=False
    )
    assert torch.equal(tested.net.weight, whole.net.weight)


def test_a_model_alone_is_saved_as_its_hook_wants(tmp_path):
    class Small(Classifier):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {"net.weight": checkpoint["state_dict"]["net.weight"]}

    trainer = saving_trainer(tmp_path, 1)
    trainer.fit(Small(), federated_data(8, 12))
    trainer.save_checkpoint(tmp_path / "small.ckpt", weights_only=True)
    assert list(torch.load(tmp_path / "small.ckpt", weights_only=True)["state_dict"]) == ["net.weight"]


def test_a_view_that_a_hook_adds_is_stored_without_the_rest(tmp_path):
    def save(checkpoint: dict[str, Any]) -> None:
        checkpoint["row"] = torch.zeros(100_000, 2)[0]

    saving_trainer(tmp_path, 1).fit(Editing(save), federated_data(8, 12))
    assert last_of(tmp_path).stat().st_size < 100_000


def test_lightnings_own_trainer_goes_on_from_a_checkpoint(tmp_path):
    saving_trainer(tmp_path, 2).fit(built(Pupil), Course())
    module = Pupil()
    trainer = Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path)  # fmt: skip
    trainer.fit(module, Course(), ckpt_path=str(last_of(tmp_path)))
    assert trainer.datamodule.lesson == 2 + 1
