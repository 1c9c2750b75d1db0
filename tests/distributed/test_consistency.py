"""The model and every hyper-parameter of the local optimizer are compared after a round, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_fed.distributed.consistency import Standing, checksum, expect_same_standing, follow_first, plain_options
from lightning_fed.distributed.processes import Processes
from lightning_fed.errors import FederatedError
from tests.engines.pretended_device import DEVICE, PretendedDevice


def optimizer(**of_second: Any) -> torch.optim.Optimizer:
    parts = [{"params": [nn.Parameter(torch.ones(2))]}, {"params": [nn.Parameter(torch.ones(3))], **of_second}]
    return torch.optim.AdamW(parts, lr=0.1)


def standing(weight: float = 1.0, **of_second: Any) -> Standing:
    held = checksum(torch.tensor([weight, 2.0]), plain_options(optimizer(**of_second)))
    return Standing(None, False, held, kept=0)


def test_the_same_options_agree() -> None:
    expect_same_standing([standing(), standing(lr=0.1), standing(betas=(0.9, 0.999))], 3)
    assert standing(lr=torch.tensor(0.1)) == standing(lr=torch.tensor(0.1))
    own, other = optimizer(), optimizer()
    for one in (own, other):  # whose text is another in each process
        one.param_groups[0]["of the user's own"] = object()
    assert checksum(plain_options(own)) == checksum(plain_options(other))


@pytest.mark.parametrize(
    "other",
    [{"weight": 1.1}, {"lr": 0.1 + 1e-16}, {"betas": (0.9, 0.99)}, {"amsgrad": True}, {"lr": torch.tensor(0.2)}],
    ids=str,
)
def test_another_model_or_option_of_any_group_is_refused(other: dict[str, Any]) -> None:
    with pytest.raises(FederatedError, match="the same options of the local optimizer, after round 3, but they differ"):
        expect_same_standing([standing(), standing(), standing(**other)], 3)


LIKE = {
    "a clone": lambda t: t.clone(),
    "other strides": lambda t: t.t().clone().t(),
    "wider memory": lambda t: torch.stack([t, t], -1)[..., 0],
}
UNLIKE = {
    "one bit": lambda t: torch.nextafter(t, t + 1),
    "one bit up, one down": lambda t: torch.stack([torch.nextafter(t[0], t[0] + 1), torch.nextafter(t[1], t[1] - 1)]),
    "two swapped": lambda t: torch.cat([t[:, [1, 0]], t[:, 2:]], 1),
    "the last": lambda t: torch.cat([t[:, :-1], -t[:, -1:]], 1),
    "another order": lambda t: t.flip(0),
    "another sign of zero": lambda t: torch.where(t == 0, -t, t),
    "two other signs": lambda t: torch.cat([-t[:, :2], t[:, 2:]], 1),
    "all signs": torch.neg,
    "another shape": lambda t: t.reshape(3, -1),
}


@pytest.mark.parametrize("times", [1, 700], ids=["small", "large"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_checksum_is_of_bits(dtype: torch.dtype, times: int) -> None:
    """Of large tensors it is of sums."""
    tensor = torch.tensor([[1.0, -2.0, 0.0], [3.0, 2.0, 4.0]], dtype=dtype).repeat(1, times)
    own = checksum(tensor, {"state": [tensor, 1, None]})
    for name, change in LIKE.items():
        assert checksum(change(tensor), {"state": [change(tensor), 1, None]}) == own, name
    for name, change in UNLIKE.items():
        assert checksum(change(tensor), {"state": [tensor, 1, None]}) != own, name
        assert checksum(tensor, {"state": [change(tensor), 1, None]}) != own, name
    assert checksum(tensor, {"state": [tensor, 2, None]}) != own


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64], ids=str)
def test_tensors_of_any_kind_have_one(dtype: torch.dtype) -> None:
    assert checksum(torch.ones(3, dtype=dtype)) != checksum(torch.zeros(3, dtype=dtype))
    assert checksum(torch.ones((), dtype=dtype)) != checksum(torch.zeros((), dtype=dtype))
    assert checksum(torch.empty(0, dtype=dtype)) == checksum(torch.empty(0, dtype=dtype))


# Of 5,000 words 4,900 are a square with rows of 70.
@pytest.mark.parametrize("words", [5, 5000])
@pytest.mark.parametrize("bit", [0, 1, 30, 31, 32, 62, 63])
def test_each_bit_counts(bit: int, words: int) -> None:
    tensor = torch.arange(words, dtype=torch.float64)
    found = [tensor]
    for place in (3, words // 2, words - 1):
        changed = found[-1].clone()
        changed.view(torch.int64)[place] ^= 1 << bit if bit < 63 else -(1 << 63)
        found.append(changed)
    assert len(set(map(checksum, found))) == len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8], ids=str)
def test_what_makes_no_whole_word_counts(dtype: torch.dtype) -> None:
    tensor = torch.ones(40_003, dtype=dtype)
    changed = tensor.clone()
    changed[-1] = 2
    assert len({checksum(tensor), checksum(changed), checksum(tensor[:-1])}) == 3


@pytest.mark.parametrize("apart", [1, 2, 7, 69, 70, 71, 140, 4000])
def test_two_differences_that_cancel_are_found(apart: int) -> None:
    counts = torch.arange(5000)
    other = counts.clone()
    other[100] += 1
    other[100 + apart] -= 1
    swapped = counts.clone()
    swapped[[300, 300 + apart]] = counts[[300 + apart, 300]]
    assert len({checksum(counts), checksum(other), checksum(swapped)}) == 3


def test_tensors_that_begin_within_a_word_have_one() -> None:
    whole = torch.randn(10_001)
    assert checksum(whole[1:]) == checksum(whole[1:].clone())


def test_a_device_is_waited_for_once() -> None:
    tensors = [torch.randn(7), torch.arange(3), torch.randn(10_001), *[torch.randn(4).bfloat16()] * 20]
    held = {"momentum": tensors[0], "steps": torch.tensor(3.0)}  # some optimizers count their steps on the CPU
    with PretendedDevice() as device:
        there = [tensor.to(DEVICE) for tensor in tensors]
        before, kernels = device.counts["wait"], device.kernels.total()
        found = checksum(there, {**held, "momentum": there[0]})
        assert device.counts["wait"] == before + 1
        assert device.kernels.total() - kernels <= 6
    assert found == checksum(tensors, held)


class Two(Processes):
    """Two processes, of which the other one says what it is told to."""

    def __init__(self, other: Tensor) -> None:
        super().__init__(rank=1, size=2)
        self.other, self.sent = other, 0

    def exchange(self, value: Any, what: str = "") -> list[Any]:
        return [checksum(self.other), value]

    def broadcast(self, *tensors: Tensor, source: int = 0) -> None:
        self.sent += 1
        for tensor in tensors:
            tensor.copy_(self.other)


@pytest.mark.parametrize("differs", [False, True])
def test_weights_are_sent_only_where_they_differ(differs: bool) -> None:
    own = torch.ones(5)
    processes = Two(own + differs * 1e-7)
    follow_first(processes, [own], "server step")
    assert processes.sent == differs
    assert torch.equal(own, processes.other)
