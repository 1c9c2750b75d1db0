"""The table of what a hook may read of the trainer is that of the protocol, and the trainer has each name."""

import pytest

from docs.trainer_names import table, written
from lightning_fed.core.hooks import FederatedCallback, TrainerLike
from lightning_fed.errors import FederatedError
from tests.parts import Classifier, federated_data, federated_trainer

NAMES = sorted({*TrainerLike.__annotations__, *(name for name in vars(TrainerLike) if name[0] != "_")})


def test_the_page_has_the_table_of_the_protocol() -> None:
    assert written() == table(), "run `python docs/trainer_names.py`"


def test_a_hook_reads_every_name_and_sets_three(tmp_path) -> None:
    settable = []

    class Reads(FederatedCallback):
        def on_client_start(self, trainer, pl_module, client) -> None:
            for name in NAMES:
                value = getattr(trainer, name)
                try:
                    setattr(trainer, name, value)
                    settable.append(name)
                except AttributeError:
                    pass

    federated_trainer(tmp_path, Reads()).fit(Classifier(), federated_data())
    assert {"displacement", "origin", "should_stop"} <= set(settable)
    assert not {"weights", "vector", "client_states", "round", "client"} & set(settable)


@pytest.mark.parametrize("name", ["weights", "vector", "client_states", "start_gradients"])
def test_before_fit_a_sentence_says_that_there_is_no_state(tmp_path, name: str) -> None:
    trainer = federated_trainer(tmp_path)
    with pytest.raises(FederatedError, match=rf"`{name}` of the trainer to be read in a hook of `fit`"):
        getattr(trainer, name)
    assert not hasattr(trainer, name)
