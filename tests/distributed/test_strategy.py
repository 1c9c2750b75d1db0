"""The strategy by its name, what it leaves alone, and what one process pays for it: nothing."""

from copy import deepcopy

import pytest
import torch
from lightning.fabric import Fabric
from torch import nn

from lightning_fed import FederatedError, FederatedTrainer
from lightning_fed.distributed.processes import Processes
from lightning_fed.distributed.strategy import ClientsStrategy
from lightning_fed.runs.folder import fingerprint


def trainer(**options: object) -> FederatedTrainer:
    return FederatedTrainer(accelerator="cpu", enable_progress_bar=False, **options)


@pytest.mark.parametrize(
    "options", [{"devices": 2}, {"devices": "2"}, {"num_nodes": 2}, {"devices": 3, "strategy": "clients"}]
)
def test_several_processes_have_our_strategy(options: dict[str, object]) -> None:
    built = trainer(**options)
    assert isinstance(built.strategy, ClientsStrategy)
    assert built.world_size == int(options.get("devices", 1)) * int(options.get("num_nodes", 1))
    assert (built.num_devices, built.num_nodes) == (int(options.get("devices", 1)), options.get("num_nodes", 1))
    assert built.processes is built.strategy.processes


@pytest.mark.parametrize("strategy", ["ddp", "ddp_spawn", "ddp_fork"])
def test_strategies_that_share_gradients_are_refused(strategy: str) -> None:
    with pytest.raises(
        FederatedError, match=f"--trainer.strategy` to be auto or clients for 2 processes, got '{strategy}'"
    ):
        trainer(devices=2, strategy=strategy)


def test_one_process_is_as_before() -> None:
    built, vector = trainer(), torch.ones(3)
    assert not isinstance(built.strategy, ClientsStrategy)
    assert (built.processes.rank, built.processes.size, built.processes.are_together()) == (0, 1, False)
    assert built.reduce_sum(vector) is vector
    with built.processes.working_alone():
        assert built.processes.exchange("said") == ["said"]
    assert torch.equal(vector, torch.ones(3))


def test_a_module_is_not_wrapped() -> None:
    strategy, module = ClientsStrategy(), nn.Linear(2, 2)
    assert strategy.setup_module(module) is module


def test_torchrun_says_how_many_devices_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    words = {
        "RANK": 3,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 4,
        "LOCAL_WORLD_SIZE": 2,
        "GROUP_RANK": 1,
        "TORCHELASTIC_RUN_ID": 0,
    }
    with monkeypatch.context() as variables:
        for name, value in words.items():
            variables.setenv(name, str(value))
        built = trainer()
        assert (built.world_size, built.num_nodes, built.global_rank, built.is_global_zero) == (4, 2, 3, False)
    Fabric(accelerator="cpu", devices=2, strategy="clients")  # leaves rank 0 behind


def test_the_number_of_processes_is_no_part_of_the_experiment() -> None:
    options = {"devices": 1, "num_nodes": 1, "strategy": "auto", "local_steps": 2}
    same = {**options, "devices": 2, "strategy": "clients"}
    assert fingerprint({"trainer": options}) == fingerprint({"trainer": same})
    assert fingerprint({"trainer": options}) != fingerprint({"trainer": {**same, "local_steps": 3}})


def test_processes_are_not_copied_with_a_module() -> None:
    processes = Processes()
    assert deepcopy({"of": processes})["of"] is processes
