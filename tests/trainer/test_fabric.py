"""Fabric is started as Lightning's trainer starts: devices first."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.accelerators import CPUAccelerator

from lightning_fed.errors import FederatedError
from lightning_fed.trainer.fabric import move_to_device
from tests.parts import Classifier, federated_data, federated_trainer


@pytest.mark.parametrize("call", ["fit", "validate"])
def test_the_device_is_the_current_one_before_data_and_model(
    call: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(CPUAccelerator, "setup_device", lambda self, device: seen.append(device))
    data = federated_data()
    monkeypatch.setattr(type(data), "prepare_data", lambda self: seen.append("data"))
    getattr(federated_trainer(tmp_path), call)(Classifier(), datamodule=data)
    assert seen[:2] == [torch.device("cpu"), "data"]
    assert seen.count(torch.device("cpu")) == 1


def test_double_precision_is_refused_where_the_device_has_none() -> None:
    precision = SimpleNamespace(convert_module=lambda module: module.double())
    fabric: Any = SimpleNamespace(device=torch.device("mps"), strategy=SimpleNamespace(precision=precision))
    with pytest.raises(FederatedError, match="Classifier to be in single precision on mps.*`--trainer.precision"):
        move_to_device(fabric, Classifier())
