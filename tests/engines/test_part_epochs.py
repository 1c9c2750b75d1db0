"""Local epochs that are no whole number: the first batches of a shuffled epoch, under both engines."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lightning_fed import FederatedCallback, FederatedTrainer
from lightning_fed.client_algorithms import FedRep
from lightning_fed.engines.client_batches import steps_in_epochs
from lightning_fed.errors import FederatedError
from lightning_fed.sampling import UnequalWork
from tests.engines.parts import Model, agree, data, train

# Steps in an epoch, in batches of 8, and in half of one: rounded half up.
WHOLE, HALF = [1, 3, 0, 4, 2, 2], [1, 2, 0, 2, 1, 1]


def test_steps_are_rounded_half_up_and_at_least_one() -> None:
    assert steps_in_epochs(0.5, np.array(WHOLE)).tolist() == HALF
    assert steps_in_epochs(0.01, np.array(WHOLE)).tolist() == [1, 1, 0, 1, 1, 1]
    assert steps_in_epochs(1.5, np.array(WHOLE)).tolist() == [2, 5, 0, 6, 3, 3]
    assert steps_in_epochs(0.29, 100) == 29
    assert steps_in_epochs(2.0, np.array(WHOLE)).tolist() == [2 * steps for steps in WHOLE]


class Seen(FederatedCallback):
    """Notes the batches of each client, and which are called the last of an epoch."""

    def __init__(self) -> None:
        self.batches: dict[int, list[torch.Tensor]] = {}
        self.last: dict[int, list[bool]] = {}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.setdefault(trainer.client.id, []).append(batch[0].clone())
        self.last.setdefault(trainer.client.id, []).append(trainer.is_last_batch)


def seen(folder: Path, **options: Any) -> Seen:
    tape = Seen()
    train(folder, Model, "sequential", tape, max_rounds=1, **options)
    return tape


@pytest.mark.parametrize(("epochs", "whole"), [(0.5, 1), (0.01, 1), (1.5, 2)])
def test_they_are_the_first_batches_of_whole_epochs(epochs: float, whole: int, tmp_path: Path) -> None:
    part, all_of_them = seen(tmp_path, local_epochs=epochs), seen(tmp_path, local_epochs=whole)
    steps = steps_in_epochs(epochs, np.array(WHOLE))
    for client, batches in part.batches.items():
        assert len(batches) == steps[client]
        for one, other in zip(batches, all_of_them.batches[client], strict=False):
            assert torch.equal(one, other)
        assert part.last[client] == [
            (at + 1) % WHOLE[client] == 0 or at + 1 == len(batches) for at in range(len(batches))
        ]


def test_several_batches_of_a_step_stay_together(tmp_path: Path) -> None:
    """Client 3 has 4 batches, so 2 steps of 2 of them; half of these is one."""
    assert len(seen(tmp_path, local_epochs=0.5, accumulate_grad_batches=2).batches[3]) == 2


def test_a_whole_number_is_the_same_as_a_count(tmp_path: Path) -> None:
    one, other = (train(tmp_path, Model, "sequential", local_epochs=epochs) for epochs in (2, 2.0))
    assert all(torch.equal(a, b) for a, b in zip(one.state.values(), other.state.values(), strict=True))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"work": UnequalWork(steps=[1, 3], share=0.5)},
        {"work": UnequalWork(lr=[0.5, 2.0])},
        {"clients_per_round": 3},
    ],
)
@pytest.mark.parametrize("epochs", [0.5, 1.4])
def test_engines_agree(epochs: float, options: Any, tmp_path: Path) -> None:
    found = [train(tmp_path, Model, engine, local_epochs=epochs, **options) for engine in ("sequential", "vectorized")]
    agree(*found)
    assert found[0].entered == found[1].entered
    assert found[0].logged["samples"] == found[1].logged["samples"]
    if not options:
        steps = steps_in_epochs(epochs, np.array(WHOLE))
        assert {client: count for _, client, count in found[0].entered} == {i: n for i, n in enumerate(steps) if n}


def test_engines_agree_where_batches_are_read_one_by_one(tmp_path: Path) -> None:
    options = {"local_epochs": 0.5, "max_rounds": 2}
    agree(*(
        train(tmp_path, Model, engine, datamodule=data(in_memory=False), **options)
        for engine in ("sequential", "vectorized")
    ))  # fmt: skip


class Planned(Model):
    """Makes a schedule over all steps."""

    def configure_optimizers(self) -> Any:
        self.planned = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=self.planned)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


@pytest.mark.parametrize(("schedule", "planned"), [("restart", 2), ("continue", 6)])
def test_a_schedule_knows_the_steps_of_the_largest_client(schedule: Any, planned: int, tmp_path: Path) -> None:
    one, other = (
        train(tmp_path, Planned, engine, local_epochs=0.5, local_schedule=schedule)
        for engine in ("sequential", "vectorized")
    )
    assert one.trainer.lightning_module.planned == planned
    agree(one, other)


class Killed(Exception):
    pass


class Kill(FederatedCallback):
    def on_round_end(self, trainer: Any, pl_module: Any, update: Any) -> None:
        if trainer.round == 2:
            raise Killed


def test_a_resumed_run_gives_the_same_bits(tmp_path: Path) -> None:
    options = {"local_epochs": 0.5, "enable_checkpointing": True, "name": "run"}
    whole = train(tmp_path / "whole", Model, "sequential", **options)
    with pytest.raises(Killed):
        train(tmp_path / "killed", Model, "sequential", Kill(), **options)
    trainer = FederatedTrainer(
        default_root_dir=str(tmp_path / "killed"), max_rounds=3, seed=1, precision="64-true", accelerator="cpu",
        logger=False, enable_progress_bar=False, engine="sequential", **options,
    )  # fmt: skip
    (last,) = (tmp_path / "killed").rglob("last.ckpt")
    module = Model()
    trainer.fit(module, data(), ckpt_path=str(last))
    assert trainer.resumed
    assert all(torch.equal(value, whole.state[name]) for name, value in module.state_dict().items())


def test_fedrep_needs_whole_ones(tmp_path: Path) -> None:
    with pytest.raises(FederatedError, match=r"whole ones for .* got 2.5, of which 1 for the"):
        train(tmp_path, Model, "sequential", FedRep(), local_epochs=2.5)
