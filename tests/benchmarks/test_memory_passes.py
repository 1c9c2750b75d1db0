"""How often a local step, and a client, go through memory of the model's size, beside the tight loop by hand."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

from benchmarks.contestants.plain_tight import PlainTightFedAvg
from tests.parts import Classifier, federated_data, federated_trainer

WIDTH, BATCH = 300, 4
_WRITE_ONLY = ("copy_", "_foreach_copy_", "zero_", "fill_")


class Passes(TorchDispatchMode):
    """Counts what operations read and write of tensors of the model's size, in vectors of that size."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = func._schema
        if func.is_view or "empty" in schema.name:
            return result
        given = {a.name: value for a, value in zip(schema.arguments, args, strict=False)} | (kwargs or {})
        for argument in schema.arguments:
            large = size(given.get(argument.name))
            if argument.alias_info is not None and argument.alias_info.is_write:
                written_only = argument.is_out or schema.name.split("::")[1] in _WRITE_ONLY
                large *= 1 if written_only else 2
            self.vectors += large
        fresh = [r.alias_info is None for r in schema.returns]
        results = result if isinstance(result, (list, tuple)) and len(fresh) > 1 else [result]
        self.vectors += sum(size(value) for value, new in zip(results, fresh, strict=False) if new)
        return result


def size(value: Any) -> float:
    return sum(t.numel() for t in tree_leaves(value) if isinstance(t, Tensor) and t.numel() >= WIDTH**2) / WIDTH**2


def data(clients: int, steps: int) -> TensorDataset:
    count = clients * steps * BATCH
    return TensorDataset(torch.randn(count, WIDTH), torch.randint(0, WIDTH, (count,)))


def by_hand(folder: Path, clients: int, steps: int, momentum: float) -> float:
    images, labels = data(clients, steps).tensors
    rows = list(torch.arange(len(images)).split(steps * BATCH))
    loop = PlainTightFedAvg(nn.Linear(WIDTH, WIDTH), images, labels, rows, clients, BATCH, 0.1, momentum)
    with Passes() as passes:
        loop.round(0)
    return passes.vectors


def framework(folder: Path, clients: int, steps: int, momentum: float) -> float:
    module = Classifier(nn.Linear(WIDTH, WIDTH), lambda module: SGD(module.parameters(), lr=0.1, momentum=momentum))
    trainer = federated_trainer(folder, engine="sequential")
    sizes = [steps * BATCH] * clients
    datamodule = federated_data(*sizes, dataset=data(clients, steps), batch_size=BATCH, val_dataset=None)
    with Passes() as passes:
        trainer.fit(module, datamodule)
    return passes.vectors


def per_step(loop: Callable[..., float], folder: Path, momentum: float = 0.9) -> float:
    return loop(folder, 1, 4, momentum) - loop(folder, 1, 3, momentum)


def per_client(loop: Callable[..., float], folder: Path) -> float:
    return loop(folder, 3, 1, 0.9) - loop(folder, 2, 1, 0.9)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_local_step_makes_no_pass_more_than_one_by_hand(tmp_path: Path, momentum: float) -> None:
    steps = per_step(framework, tmp_path, momentum)
    # Forward and backward read weights and write gradients; the tight loop needs momentum, of which 0 is not to count.
    hand = per_step(by_hand, tmp_path) if momentum else 2 + 3
    assert steps == pytest.approx(hand, abs=0.1)


def test_what_a_client_costs_beyond_its_steps_is_known(tmp_path: Path) -> None:
    # Its update is a vector of its own, which hooks, masks and methods read, and looked at; the first gradient is
    # copied into the momentum, as torch's SGD does.
    more = {"update written": 1, "weights and start read for it": 2, "norm": 1, "momentum": 2}
    # Instead of the update the loop by hand reads the weights to add them up.
    assert per_client(framework, tmp_path) == pytest.approx(per_client(by_hand, tmp_path) + sum(more.values()), abs=0.1)
