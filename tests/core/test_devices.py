"""What is asked of a GPU, with torch's answers given."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from lightning_fed.core import devices
from lightning_fed.core.devices import cudnn_layer, free_memory, full_precision, why_not_mixed
from lightning_fed.models import CharLSTM

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


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
    assert cudnn_layer(module, CPU) is None
    assert cudnn_layer(module[:1], GPU) is None
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert cudnn_layer(module, GPU) is None


def test_only_an_lstm_is_refused_on_a_cpu_that_has_none_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    for has in (True, False):
        monkeypatch.setattr(devices, "_lstm_in_bfloat16", lambda has=has: has)
        assert (why_not_mixed(nn.Sequential(nn.LSTM(2, 2)), CPU) is None) == has
        assert why_not_mixed(nn.GRU(2, 2), CPU) is why_not_mixed(nn.Linear(2, 2), CPU) is None
        assert why_not_mixed(nn.GRU(2, 2), GPU) == "cuDNN would compute its GRU in float16 without a loss scale"


def test_a_cpu_is_refused_if_and_only_if_the_lstm_does_not_train_on_it() -> None:
    model = CharLSTM()
    state = torch.get_rng_state()
    with torch.inference_mode():
        refused = why_not_mixed(model, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    try:
        with torch.autocast("cpu", torch.bfloat16):
            model(torch.zeros(4, 80, dtype=torch.long)).sum().backward()
    except RuntimeError:
        assert refused == "this CPU has no LSTM in bfloat16"
    else:
        assert refused is None


def precisions() -> list[Any]:
    """How float32 is computed with, by torch's older and newer flags; the older ones raise where they cannot tell."""
    found: list[Any] = []
    for read in (torch.get_float32_matmul_precision, lambda: torch.backends.cudnn.allow_tf32):
        try:
            found.append(read())
        except RuntimeError:
            found.append(None)
    parts = [torch.backends.cuda.matmul]
    parts += [getattr(of, op, None) for of in (torch.backends.cudnn, torch.backends.mkldnn) for op in ("conv", "rnn")]
    parts += [getattr(torch.backends.mkldnn, "matmul", None)]
    return found + [getattr(part, "fp32_precision", "none") for part in parts]


@pytest.fixture
def flags() -> Iterator[None]:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    if hasattr(torch.backends.mkldnn, "conv"):
        torch.backends.mkldnn.conv.fp32_precision = "none"


def older(precision: str, allow: bool) -> None:
    torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.allow_tf32 = allow


def newer(**parts: str) -> None:
    if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):
        pytest.skip("torch before 2.9 has the older flags alone")
    for name, precision in parts.items():
        of, op = name.split("_")
        getattr(getattr(torch.backends, of), op).fp32_precision = precision


@pytest.mark.parametrize(
    "settings",
    [
        lambda: older("highest", True), lambda: older("medium", False), lambda: newer(cuda_matmul="tf32"),
        lambda: newer(cudnn_conv="ieee"), lambda: newer(cudnn_rnn="ieee", mkldnn_conv="bf16", mkldnn_matmul="bf16"),
    ],
    ids=["default", "older", "newer matmul", "newer conv", "newer cpu"],
)  # fmt: skip
def test_full_precision_leaves_every_flag_as_it_was(flags: None, settings: Callable[[], None]) -> None:
    settings()
    before = precisions()
    with full_precision():
        assert not {"high", "medium", "tf32", "bf16", True}.intersection(precisions())
    assert precisions() == before
