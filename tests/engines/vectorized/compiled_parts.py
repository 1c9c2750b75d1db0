"""Fixtures for compiled steps."""

from typing import Any

import pytest
import torch

from lightning_fed.engines.vectorized.compiled_step import CompiledStep


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[CompiledStep]:
    """Collects compiled steps; those of the last run's engine are the last one."""
    made: list[CompiledStep] = []
    plain = CompiledStep.__init__

    def init(self: CompiledStep, *args: Any) -> None:
        plain(self, *args)
        made.append(self)

    monkeypatch.setattr(CompiledStep, "__init__", init)
    return made


@pytest.fixture
def traced(steps: list[CompiledStep], monkeypatch: pytest.MonkeyPatch) -> list[CompiledStep]:
    """Lets ``torch.compile``, which takes seconds, return the graph that it is given."""
    monkeypatch.setattr(torch, "compile", lambda graph, **_: graph)
    return steps
