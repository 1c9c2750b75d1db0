"""Fabric is started as Lightning's trainer starts: devices first."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.plugins import MixedPrecision
from torch import nn

from lightning_fed.core import devices
from lightning_fed.errors import FederatedError
from lightning_fed.trainer.fabric import move_to_device, set_determinism
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


class Moved(Classifier):
    """Notes where it is brought, and stays."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.places = layer, list[torch.device]()

    def to(self, device: torch.device) -> "Moved":
        self.places.append(device)
        return self


def moved(layer: nn.Module, device: str = "cuda", mixed: bool = True) -> Moved:
    """Brings a module to a device that need not be there."""
    plain = SimpleNamespace(convert_module=lambda module: module)
    precision = MixedPrecision("bf16-mixed", device) if mixed else plain
    fabric: Any = SimpleNamespace(device=torch.device(device), strategy=SimpleNamespace(precision=precision))
    module = Moved(layer)
    move_to_device(fabric, module)
    return module


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_in_mixed_precision_are_refused_on_a_gpu(
    layer: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(
        FederatedError,
        match=f"precision on cuda, got bf16-mixed: cuDNN would compute its {layer.__name__} in float16",
    ):
        moved(nn.Sequential(layer(2, 3)))
    assert moved(layer(2, 3), "cpu", mixed=False).places == [torch.device("cpu")]
    assert moved(layer(2, 3), mixed=False).places == [torch.device("cuda")]
    assert moved(nn.LSTMCell(2, 3)).places == [torch.device("cuda")]
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert moved(layer(2, 3)).places == [torch.device("cuda")]


def test_an_lstm_in_mixed_precision_is_refused_on_a_cpu_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_lstm_in_bfloat16", lambda: True)
    assert moved(nn.LSTM(2, 3), "cpu").places == [torch.device("cpu")]
    monkeypatch.setattr(devices, "_lstm_in_bfloat16", lambda: False)
    sentence = "on cpu, got bf16-mixed: this CPU has no LSTM in bfloat16; set `--trainer.precision 32-true`.$"
    with pytest.raises(FederatedError, match=sentence):
        moved(nn.LSTM(2, 3), "cpu")
    assert all(moved(layer(2, 3), "cpu").places == [torch.device("cpu")] for layer in (nn.GRU, nn.RNN))


def test_determinism_does_not_fill_memory_that_is_written_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    try:
        set_determinism(True)
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch._C._get_deterministic_fill_uninitialized_memory()
    finally:
        torch.use_deterministic_algorithms(False)
        torch._C._set_deterministic_fill_uninitialized_memory(True)
