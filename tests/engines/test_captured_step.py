"""A captured local step is the one that is not captured, with all that is around it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engine_parts import CLASSES, FEATURES, Model, Outcome, agree, data, train
from graph_stand_in import StandIn
from torch import nn

from lightning_fed.engines import graphs


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """All stand-ins that runs make."""
    made: list[StandIn] = []

    def make(device: Any) -> StandIn:
        made.append(StandIn())
        return made[-1]

    monkeypatch.setattr(graphs, "graphs_for", make)
    return made


def both(folder: Any, make: Callable[[], Any], *callbacks: Any, rtol: float = 0, **options: Any) -> Outcome:
    """Trains without graphs and with them, and asserts that nothing differs."""
    made = options.pop("make_data", data)
    plain, captured = (
        train(folder, make, "sequential", *[c() for c in callbacks], datamodule=made(), cuda_graphs=on, **options)
        for on in (False, True)
    )
    assert captured.trainer.engine_choice == {"engine": "sequential", "cuda_graphs": True}
    agree(plain, captured, rtol)
    return captured


def norm() -> Model:
    return Model(nn.Sequential(nn.Linear(FEATURES, 5, bias=False), nn.BatchNorm1d(5), nn.Linear(5, CLASSES)))


def dropout() -> Model:
    return Model(nn.Sequential(nn.Linear(FEATURES, 9), nn.Dropout(0.5), nn.Linear(9, CLASSES)))


def optimizing(make: Callable[..., Any], **options: Any) -> Callable[[], Model]:
    return lambda: Model(optimizer=lambda m: make(m.parameters(), **options))


MODELS = {
    "plain": Model, "dropout": dropout, "norm": norm,
    "momentum": optimizing(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True),
    "adam": optimizing(torch.optim.Adam, lr=0.01),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_models(tmp_path, name):
    sizes = {"make_data": lambda: data(sizes=(8, 19, 0, 25, 16, 13))}
    if name == "norm":  # batches of one sample have no statistics
        sizes = {"make_data": lambda: data(sizes=(8, 19, 0, 26, 16, 13))}
    both(tmp_path, MODELS[name], **sizes)
