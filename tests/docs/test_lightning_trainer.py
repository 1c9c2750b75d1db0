"""Every public attribute of the installed Lightning's Trainer has a meaning here, and the page says it."""

import re
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.model_summary import summarize
from torch import Tensor

from docs.lightning_trainer import meaning, public_names, reads_of_lightning, table, written
from lightning_fed.errors import FederatedError
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.forwarding import AbsentNameError, Refused
from tests.parts import CLASSES, FEATURES, Classifier, federated_data, federated_trainer

NAMES = public_names()
READ = reads_of_lightning()
# What Lightning's own code reads, and what nothing here calls: why.
OUT_OF_REACH = {
    "callbacks/batch_size_finder.py": "BatchSizeFinder is refused",
    "callbacks/lr_finder.py": "LearningRateFinder is refused",
    "callbacks/throughput_monitor.py": "ThroughputMonitor is refused",
    "callbacks/stochastic_weight_avg.py": "StochasticWeightAveraging is refused",
    "callbacks/progress/rich_progress.py": "Lightning's bars are replaced",
    "callbacks/progress/tqdm_progress.py": "Lightning's bars are replaced",
    "callbacks/progress/progress_bar.py": "Lightning's bars are replaced",
    "utilities/model_registry.py": "`model_registry` is refused",
    "strategies/launchers/multiprocessing.py": "Fabric launches the processes",
    "strategies/deepspeed.py": "Fabric's strategies are used",
    "setter": "a decorator",
    "accelerator.get_device_stats": "DeviceStatsMonitor gets Lightning's from `callbacks.lightning_callbacks`",
    "strategy.zero_stage_3": "only of a DeepSpeedStrategy",
    "strategy.reduce": "behind `_results`, which is refused",
}
REFUSED = {name for name in NAMES if isinstance(vars(FederatedTrainer.__mro__[1]).get(name), Refused)}


def test_every_name_has_a_meaning():
    assert not [name for name in NAMES if not meaning(name)]


def test_the_page_says_it():
    missing = sorted(set(table().splitlines()) - set(written().splitlines()))
    assert not missing, "run `python docs/lightning_trainer.py`"


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_batch_start", "on_validation_start", "on_fit_end"])
def test_during_fit_each_is_there_or_refused(tmp_path, hook):
    found: dict[str, Any] = {}

    class Reads(Classifier):
        def read(self, *_: Any) -> None:
            for name in NAMES:
                try:
                    getattr(self.trainer, name)
                except AbsentNameError as error:
                    found[name] = str(error)

    module = Reads()
    setattr(module, hook, module.read)
    federated_trainer(tmp_path).fit(module, federated_data())
    assert found.keys() == REFUSED
    for name, said in found.items():
        assert said.startswith(f"Expected `trainer.{name}` not to be read in a federated run, as ")
        assert said.endswith(".")


def test_what_is_refused_counts_as_missing(tmp_path):
    trainer = federated_trainer(tmp_path)
    assert not hasattr(trainer, "validate_loop")
    assert getattr(trainer, "predict_loop", 3) == 3
    assert trainer.train_dataloader is None  # as under Lightning before training


@pytest.mark.parametrize("during", ["fit", "afterwards"])
def test_each_name_that_lightnings_own_code_reads_has_an_answer(tmp_path, during):
    """A value, a refusal in one sentence that names what to read instead, or a reason why nothing comes there."""
    assert {"_data_connector._datahook_selector", "_results", "_logger_connector", "current_epoch"} <= READ.keys()
    unanswered: dict[str, str] = {}

    class Reads(Classifier):
        def on_train_epoch_end(self) -> None:
            for path, files in READ.items():
                if path not in OUT_OF_REACH and not files <= OUT_OF_REACH.keys():
                    self.follow(path)

        def follow(self, path: str) -> None:
            held: Any = self.trainer
            for name in path.split("."):
                try:
                    held = getattr(held, name)
                except FederatedError as error:
                    if not re.search(r"^Expected .+(: (read|use) `| only in )", str(error)):
                        unanswered[path] = str(error)
                    return
                except AttributeError as error:
                    unanswered[path] = str(error)
                    return

    module = Reads()
    clip = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "norm"}
    federated_trainer(tmp_path, ModelCheckpoint(tmp_path), **clip).fit(module, federated_data())
    if during == "afterwards":
        unanswered.clear()
        module.on_train_epoch_end()
    assert unanswered == {}


class Example(Classifier):
    """Brings its example to the layers by hooks of its own and of its data."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.arange(2.0 * FEATURES).reshape(2, FEATURES)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch / 2 if isinstance(batch, Tensor) else batch

    def on_train_epoch_end(self) -> None:
        self.exported = [self.to_torchscript(method="trace")]


@pytest.mark.filterwarnings("ignore:.*(TorchScript|torch.jit).*")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_module_with_an_example_is_summed_up_trained_and_exported(tmp_path, precision):
    module = Example()
    trainer = federated_trainer(tmp_path, enable_model_summary=True, precision=precision)
    trainer.fit(module, federated_data(8, 8))
    assert summarize(module).out_sizes == [[2, CLASSES]]
    x = module.example_input_array
    for exported in (*module.exported, module.to_torchscript(method="trace"), module.to_torchscript()):
        assert torch.equal(exported(x), module(x))
    trainer.validate(module, federated_data())
    assert torch.equal(module.to_torchscript(method="trace", example_inputs=x)(x), module(x))
    given: list[Any] = []
    with patch.object(pl.core.module, "_ONNX_AVAILABLE", True), patch("torch.onnx.export", lambda *a: given.extend(a)):
        module.to_onnx("net.onnx")
    assert torch.equal(given[1], x / 2)
    with patch.object(pl.core.module, "_ONNX_AVAILABLE", False), pytest.raises(ModuleNotFoundError, match="`onnx`"):
        module.to_onnx("net.onnx")


def test_clipping_by_another_algorithm_is_refused_in_lightnings_words(tmp_path):
    class Clips(Classifier):
        def configure_gradient_clipping(self, optimizer: Any, *_: Any) -> None:
            self.clip_gradients(optimizer, gradient_clip_val=1.0, gradient_clip_algorithm="value")

    trainer = federated_trainer(tmp_path, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
    with pytest.raises(MisconfigurationException, match=r"Trainer\(gradient_clip_algorithm='norm'\)"):
        trainer.fit(Clips(), federated_data())
