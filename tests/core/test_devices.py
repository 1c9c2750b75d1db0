"""What is asked of a GPU, with torch's answers given."""

import pytest
import torch
from torch import nn

from lightning_fed.core.devices import cudnn_layer, free_memory

GPU = torch.device("cuda", 0)


def test_what_the_allocator_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"mem_get_info": (1000, 9000), "memory_reserved": 700, "memory_allocated": 300}
    asked = []
    for name, value in given.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: (asked.append(device), value)[1])
    assert free_memory(GPU) == 1400
    assert asked == [GPU] * 3


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_those_of_cudnn_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch, layer: type) -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([layer(2, 2)]))
    assert cudnn_layer(module, GPU) == layer.__name__
    assert cudnn_layer(module, torch.device("cpu")) is None
    assert cudnn_layer(module[:1], GPU) is None
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert cudnn_layer(module, GPU) is None
