"""Runs with graphs, on the CPU by the stand-in."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_fed.engines import graphs
from tests.engines.graph_stand_in import StandIn
from tests.engines.parts import Outcome, agree, data, train


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[StandIn]:
    """All stand-ins that runs make, in order; without it there are no graphs on the CPU."""
    made: list[StandIn] = []

    def make(device: Any) -> StandIn:
        made.append(StandIn())
        return made[-1]

    monkeypatch.setattr(graphs, "graphs_for", make)
    return made


def captured_as_plain(
    folder: Any, make: Callable[[], Any], *callbacks: Any, rtol: float = 0, make_data: Any = data, **options: Any
) -> Outcome:
    """Trains without graphs and with them, and asserts that nothing differs; callbacks are given as what makes them."""
    plain, captured = (
        train(folder, make, "sequential", *[c() for c in callbacks], datamodule=make_data(), cuda_graphs=on, **options)
        for on in (False, True)
    )
    assert captured.trainer.engine_choice == {"engine": "sequential", "cuda_graphs": True}
    agree(plain, captured, rtol)
    return captured
