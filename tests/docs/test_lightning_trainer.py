"""Every public attribute of the installed Lightning's Trainer has a meaning here, and the page says it."""

from typing import Any

import pytest

from docs.lightning_trainer import meaning, public_names, table, written
from lightning_fed.trainer import FederatedTrainer
from lightning_fed.trainer.lightning_names.forwarding import AbsentNameError, Refused
from tests.parts import Classifier, federated_data, federated_trainer

NAMES = public_names()
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
